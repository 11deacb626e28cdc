"""Seconds of one whole GRPO step: a run of ours against a run of TRL's GRPOTrainer, same model, prompts and batch.

8 prompts with 8 samples each; a step is sampling, rewards, log-probabilities of a reference, loss, backward pass, AdamW
and, with us, the sync into the engine. Both runs are processes of their own that make their steps in turn, one thread
each. With ``equal`` lengths no response ends before the limit; with ``ragged`` ones every token is the last one with a
fixed probability, so lengths are geometric, and a loop over a padded batch waits for the longest. The weights that end
responses are made, not learnt: the learning rate is so small that they stay what they are. Ratios are medians of the
pairs; the CPU time is that of a process and its workers.

TRL generates with transformers, as it does on a CPU; its colocated vLLM wants a CUDA device. preference.py says how to
make an environment beside ours that has TRL; run the script there, with PYTHONPATH=$PWD. Without TRL only our own time
is printed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.report import publish, table

OWN, PEER = "mega_rl", "TRL GRPOTrainer"
PROMPTS, SAMPLES = 8, 8
LR, KL = 1e-9, 1e-3
HAZARD = {"equal": 1e-9, "ragged": 1 / 64}  # probability that a token is the last one
PHASES = ("sync", "generate", "old_logprobs", "reference_logprobs", "update")
WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs", "home", "while", "it")


def write_inputs(directory: Path, lengths: str) -> None:
    """A model of 3M parameters whose responses end with a known probability, and prompts."""
    import torch
    from safetensors.torch import load_file, save_file

    from mega_rl.synthetic.arithmetic import bpe_tokenizer
    from mega_rl.synthetic.tiny_model import TinyModelSpec, write_tiny_model

    tokenizer = bpe_tokenizer([f"{a}{b}" for a in WORDS for b in WORDS], 1500)
    spec = TinyModelSpec(hidden_size=192, num_layers=7, num_heads=6, num_kv_heads=3, ffn=512, tied=False)
    write_tiny_model(directory / "model", spec, tokenizer)
    path = directory / "model" / "model.safetensors"
    weights = load_file(path)
    # The first channel is nearly the only one that the last norm leaves: it is the same for every token.
    weights["model.embed_tokens.weight"][:, 0] = 10.0
    head = weights["lm_head.weight"]
    head[:, 0] = 0.0
    head[tokenizer.eos_token_id] = 0.0
    head[tokenizer.eos_token_id, 0] = math.log(HAZARD[lengths] * len(head)) / math.sqrt(spec.hidden_size)
    save_file(weights, path, metadata={"format": "pt"})
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(PROMPTS * 4):
        picks = torch.randint(len(WORDS), (4,), generator=generator).tolist()
        rows.append({"prompt": " ".join(WORDS[i] for i in picks), "answer": "", "data_source": "words"})
    (directory / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


class Turns:
    """A worker's side: it is told when to make a step, and tells how long the last one took."""

    def __init__(self, descriptor: int) -> None:
        self._out = os.fdopen(descriptor, "w")
        self._begun: tuple[float, float] | None = None

    def next(self, **figures: float) -> None:
        if self._begun is not None:
            seconds, cpu_seconds = time.perf_counter() - self._begun[0], cpu_s() - self._begun[1]
            self._out.write(json.dumps({"seconds": seconds, "cpu_seconds": cpu_seconds, **figures}) + "\n")
        else:
            self._out.write("{}\n")
        self._out.flush()
        if not sys.stdin.readline():
            os._exit(0)
        self._begun = time.perf_counter(), cpu_s()


def cpu_s() -> float:
    """Of this process and the workers that it has."""
    import psutil

    own = psutil.Process()
    parts = [one.cpu_times() for one in (own, *own.children(recursive=True))]
    return sum(part.user + part.system for part in parts)


def own_run(directory: Path, turns: Turns, arguments: argparse.Namespace) -> None:
    """``tools/train.py`` as it is, but for a wait before every step."""
    import yaml

    config = {
        "model": {"path": str(directory / "model"), "dtype": "float32"},
        "data": {"train_files": [str(directory / "train.jsonl")], "train_batch_size": PROMPTS}
        | {"max_prompt_length": 64, "max_response_length": arguments.tokens},
        "rollout": {"n": SAMPLES, "kv_cache_bytes": 1 << 28, "vllm": {"max_num_seqs": PROMPTS * SAMPLES}},
        "algorithm": {"name": "grpo", "kl_coefficient": KL},
        "aqn": {"enabled": False},
        "rewards": [{"name": "repetition"}],
        "reward_workers": {"num_workers": 1},
        "optimizer": {"lr": LR},
        "trainer": {"output_dir": str(directory / "run"), "total_steps": 10_000}
        | {"max_tokens_per_microbatch": arguments.microbatch},
        "logging": {"tensorboard": False},
        "platform": {"name": "cpu", "num_threads": arguments.threads},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    from mega_rl.stages.run.job import Job
    from tools import train

    own_step = Job.step
    rows = directory / "run" / "metrics.jsonl"

    @contextmanager
    def step(self: Job, number: int) -> Iterator[None]:
        last = json.loads(rows.read_text().splitlines()[-1])["metrics"] if number > 1 else {}
        figures = {name: last.get(f"time/{name}_s", 0.0) for name in PHASES}
        turns.next(tokens=last.get("response_length/mean", 0.0) * PROMPTS * SAMPLES, **figures)
        with own_step(self, number):
            yield

    Job.step = step  # type: ignore[method-assign]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        os.environ[name] = value
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": arguments.port}
    train.main(["--config", str(directory / "config.yaml")])


def peer_run(directory: Path, turns: Turns, arguments: argparse.Namespace) -> None:
    """GRPOTrainer with the same batch."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from benchmarks.against_trl.peer import settings

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    rows = [json.loads(line) for line in (directory / "train.jsonl").read_text().splitlines()]
    made: dict[str, float] = {}

    def repetition(completion_ids: list[list[int]], completions: list[str], **_: Any) -> list[float]:
        made["tokens"] = float(sum(map(len, completion_ids)))
        return [len(set(text.split())) / max(1, len(text.split())) - 1 for text in completions]

    class Waiting(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            turns.next(**made)

    chosen = settings(
        GRPOConfig,
        directory,
        PROMPTS * SAMPLES,
        LR,
        (0.9, 0.999),
        0.0,
        num_generations=SAMPLES,
        max_completion_length=arguments.tokens,
        temperature=1.0,
        beta=KL,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(directory / "model"),
        args=chosen,
        reward_funcs=repetition,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in rows]),
        processing_class=AutoTokenizer.from_pretrained(directory / "model"),
        callbacks=[Waiting()],
    ).train()


WAYS = {OWN: own_run, PEER: peer_run}


class Worker:
    """One run in a process of its own, which makes a step when it is told to."""

    def __init__(self, way: str, directory: Path, port: int, arguments: argparse.Namespace) -> None:
        reading, writing = os.pipe()
        argv = [sys.executable, "-m", "benchmarks.against_trl.grpo_step", "--worker", way]
        argv += ["--directory", str(directory), "--descriptor", str(writing)]
        argv += ["--tokens", str(arguments.tokens), "--port", str(port), "--microbatch", str(arguments.microbatch)]
        argv += ["--threads", str(arguments.threads)]
        environ = {**os.environ, "OMP_NUM_THREADS": str(arguments.threads), "MEGA_RL_PLATFORM": "cpu"}
        self._log = directory / f"{way.split()[0]}.log"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                argv, env=environ, stdin=subprocess.PIPE, stdout=log, stderr=log, pass_fds=[writing], text=True
            )
        os.close(writing)
        self._told = os.fdopen(reading)
        self._answer()

    def _answer(self) -> dict[str, float]:
        line = self._told.readline()
        if not line:
            raise SystemExit(f"error: a run ended: {self._log.read_text()[-2000:]}")
        found: dict[str, float] = json.loads(line)
        return found

    def step(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def measure(lengths: str, arguments: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """What every step of each way took."""
    ways = [OWN, *([PEER] if find_spec("trl") is not None else [])]
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        write_inputs(directory, lengths)
        workers = {way: Worker(way, directory, free_port(), arguments) for way in ways}
        for number in range(arguments.steps + 1):
            for way in ways if number % 2 else ways[::-1]:
                taken = workers[way].step()
                if number:  # the first one also warms up
                    found[way].append(taken)
        for worker in workers.values():
            worker.close()
    return found


def free_port() -> int:
    import socket

    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def median(found: list[dict[str, float]], name: str) -> float:
    return statistics.median(one[name] for one in found)


def ratio(found: dict[str, list[dict[str, float]]], name: str) -> float | str:
    """How many times as long the peer takes."""
    if PEER not in found:
        return "-"
    return statistics.median(b[name] / a[name] for a, b in zip(found[OWN], found[PEER], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", choices=HAZARD, action="append", help="default: both")
    parser.add_argument("--tokens", type=int, default=0, help="of a response at most (default: 128, ragged 512)")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="of each run (default: 1)")
    parser.add_argument("--microbatch", type=int, default=2048, help="tokens of one of ours (default: 2048)")
    parser.add_argument("--quick", action="store_true", help="8 tokens, one step: shows that it works, not how fast")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--worker", choices=WAYS, help=argparse.SUPPRESS)
    for name in ("directory", "descriptor", "port"):
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        WAYS[arguments.worker](Path(arguments.directory), Turns(int(arguments.descriptor)), arguments)
        return
    given = arguments.tokens
    rows, results = [], {}
    for lengths in arguments.lengths or HAZARD:
        arguments.tokens = given or {"equal": 128, "ragged": 512}[lengths]
        if arguments.quick:
            arguments.tokens, arguments.steps = 8, 1
        found = results[lengths] = measure(lengths, arguments)
        for way, steps in found.items():
            ratios = [ratio(found, name) if way == PEER else 1.0 for name in ("seconds", "cpu_seconds")]
            phases = ", ".join(f"{name} {median(steps, name):.2f}" for name in PHASES) if way == OWN else "-"
            figures = [median(steps, name) for name in ("tokens", "seconds", "cpu_seconds")]
            rows.append([f"{lengths}, {way}", *figures, *ratios, phases])
    header = ["lengths", "tokens", "time, s", "CPU time, s", "of ours", "by CPU time", "phases of ours, s"]
    publish(f"GRPO step, {PROMPTS} x {SAMPLES} responses", table(header, rows), "cpu", results, arguments.json)


if __name__ == "__main__":
    main()
