"""GSM8K's test questions answered greedily by a tiny model: ``evaluate`` with scoring and records against ``vllm.LLM``.

    python -m benchmarks.sampling.eval --data DIRECTORY [--quick] [--json PATH]

DIRECTORY holds GSM8K's test.jsonl (default: the variable MEGA_RL_GSM8K_DIR). Both sides have an engine of the same
settings in this process and answer the same prompts in turn; ours also scores every answer in reward workers and writes
every record. The model has random weights, so nearly all answers reach the limit of tokens.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import publish, table
from mega_rl import platform
from mega_rl.config.schema.sampling import RewardConfig, RewardWorkersConfig, RolloutConfig
from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.prompts import PromptDataset
from mega_rl.data.rows.rows import DataFiles, read_rows
from mega_rl.data.tokens.tokenizer import load_tokenizer
from mega_rl.errors import InputError
from mega_rl.evaluation.evaluate import EvaluationSettings, evaluate
from mega_rl.evaluation.records import Directory, RecordPart
from mega_rl.parallel.layout import EngineLayout
from mega_rl.rewards.scorer import Scorer, build_scorer
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.synthetic.arithmetic import bpe_tokenizer
from mega_rl.synthetic.tiny_model import TinyModelSpec, write_tiny_model
from mega_rl.types import Prompt

MAX_PROMPT = 512  # tokens
KV_CACHE_BYTES = 1 << 28


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("MEGA_RL_GSM8K_DIR"), metavar="DIRECTORY")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of measurements")
    parser.add_argument("--max-tokens", type=int, default=64, help="of an answer")
    parser.add_argument("--quick", action="store_true", help="32 questions, 8 tokens, one pair")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.data is None or not (Path(options.data) / "test.jsonl").is_file():
        raise InputError("--data: name the directory with GSM8K's test.jsonl, or set MEGA_RL_GSM8K_DIR")
    if options.quick:
        options.rounds, options.max_tokens = 1, 8
    return options


def direct(llm: Any, prompts: list[Prompt], max_tokens: int) -> int:
    """Answers with vLLM alone; returns the number of tokens."""
    from vllm import SamplingParams

    asked = [{"prompt_token_ids": list(prompt.token_ids)} for prompt in prompts]
    outputs = llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=max_tokens), use_tqdm=False)
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def ours(engine: VLLMEngine, scorer: Scorer, prompts: list[Prompt], max_tokens: int, out: Path) -> int:
    """Answers, scores and records as tools/eval.py does; returns the number of tokens."""
    directory = Directory(out, {})
    part = RecordPart(out, 0)
    settings = EvaluationSettings(
        EngineLayout(1, 1), n=0, temperature=1.0, max_tokens=max_tokens, seed=0, with_logprobs=False
    )
    evaluate(engine, scorer, prompts, settings, part.append)
    part.close()
    directory.merge()
    directory.release()
    return part.num_tokens


def main() -> None:
    options = parse()
    platform.select("cpu")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    file = str(options.data / "test.jsonl")
    with tempfile.TemporaryDirectory() as folder:
        texts = [str(row.get(name)) for row in read_rows([file], "--data") for name in ("question", "answer")]
        spec = TinyModelSpec(hidden_size=128, num_layers=2)  # the quickstart's, with words in its vocabulary
        model = write_tiny_model(Path(folder) / "model", spec, bpe_tokenizer(texts, 2048))
        data = DataConfig(max_prompt_length=MAX_PROMPT)
        size = 32 if options.quick else None
        prompts = PromptDataset.from_files(DataFiles([file], "--data", size), load_tokenizer(str(model)), data).prompts
        rollout = RolloutConfig(weight_update="reload", kv_cache_bytes=KV_CACHE_BYTES)
        length = MAX_PROMPT + options.max_tokens
        engine = VLLMEngine(model, rollout, max_model_len=length, device_type="cpu", dtype="float32")
        from vllm import LLM

        llm = LLM(
            str(model),
            dtype="float32",
            max_model_len=length,
            enforce_eager=True,
            disable_log_stats=True,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
            seed=0,
        )
        scorer = build_scorer([RewardConfig("gsm8k")], RewardWorkersConfig())
        warm = prompts[:16]
        direct(llm, warm, 4)
        ours(engine, scorer, warm, 4, Path(folder) / "warm")
        rows: list[dict[str, float]] = []
        for number in range(options.rounds):
            out, row = Path(folder) / str(number), {}
            sides = {
                "vllm.LLM": lambda: direct(llm, prompts, options.max_tokens),
                "evaluate": lambda out=out: ours(engine, scorer, prompts, options.max_tokens, out),
            }
            for name in list(sides)[:: 1 if number % 2 == 0 else -1]:
                begin, cpu = time.perf_counter(), time.process_time()
                num_tokens = sides[name]()
                row |= {
                    f"{name} tokens": num_tokens,
                    name: num_tokens / (time.perf_counter() - begin),
                    f"{name} cpu": num_tokens / (time.process_time() - cpu),
                }
            assert row["vllm.LLM tokens"] == row["evaluate tokens"], row
            rows.append(row)
        scorer.close()
        say(rows, len(prompts), options)


def say(rows: list[dict[str, float]], num_prompts: int, options: argparse.Namespace) -> None:
    medians = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    ratios = {
        kind or "wall": statistics.median(row[f"evaluate{kind}"] / row[f"vllm.LLM{kind}"] for row in rows)
        for kind in ("", " cpu")
    }
    body = [[name, medians[name], medians[f"{name} cpu"]] for name in ("evaluate", "vllm.LLM")]
    body.append(["evaluate / vllm.LLM", f"{ratios['wall']:.3f}x", f"{ratios[' cpu']:.3f}x"])
    text = table(["side", "tokens/s", "tokens per second of CPU time"], body)
    what = f"{num_prompts} questions, {int(medians['evaluate tokens'])} tokens, {len(rows)} pairs"
    results = {"num_questions": num_prompts, "rounds": rows, "ratios": ratios}
    publish("Evaluation against direct use of the engine", f"{text}\n\n{what}", "cpu", results, options.json)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
