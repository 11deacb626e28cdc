"""Seconds of one DPO step: MegatronEngine against TRL's DPOTrainer, same model, same pairs, reference computed before.

8 pairs whose prompts and answers differ in length; a step is forward, backward, clipping and AdamW, and the two take
turns in one process. TRL pads the 16 sequences to the longest one; here they are packed. The losses must agree, step
by step. TRL's own trainer runs with ``precompute_ref_log_probs``, its batch made once and not timed.

The environment has no TRL. Make one beside it that sees the locked packages and adds it, and run this script there:

    python -m venv peer
    python -c "import site; print(f'import site; site.addsitedir({site.getsitepackages()[0]!r})')" > \
        "$(peer/bin/python -c 'import site; print(site.getsitepackages()[0])')/locked.pth"
    peer/bin/pip install --no-deps trl==1.16.0 accelerate datasets dill multiprocess xxhash pandas fsspec
    PYTHONPATH=$PWD peer/bin/python -m benchmarks.against_trl.preference

Without TRL only our own time is printed. MEGA_RL_PLATFORM chooses cpu, cuda or npu; TRL runs on the CPU here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config

from benchmarks.against_trl.peer import TrlPeer, settings
from benchmarks.report import publish, table
from mega_rl import platform
from mega_rl.algorithms.preference import PreferenceObjective, answer_sums
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.config.schema.sections import DataConfig, MemoryConfig, OptimizerConfig, ParallelConfig
from mega_rl.data.pairs import PairDataset
from mega_rl.data.rows.rows import DataFiles, write_jsonl
from mega_rl.data.stream import generator
from mega_rl.megatron.engine import MegatronEngine, Optimization
from mega_rl.megatron.model.spec import TrainerSpec
from mega_rl.megatron.policy import MegatronPolicy, initialize_groups
from mega_rl.models.shape import read_model_shape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.stages.run.batch_share import BatchShare, pack_for_rank
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer

OWN, PEER = "mega_rl", "TRL DPOTrainer"
NUM_PAIRS, BETA, LR, BETAS, WEIGHT_DECAY, CLIP = 8, 0.1, 1e-4, (0.9, 0.95), 0.01, 1.0
MAX_TOKENS = 2048  # of a micro-batch; on a CPU it should fit into the cache
TOLERANCE = 1e-3  # between the losses
MODEL = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 10, "vocab_size": 8192}
QUICK = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 512}


def make_inputs(directory: Path, sizes: dict[str, int], longest: int) -> None:
    """Model, tokenizer and pairs.jsonl; prompts are half as long as ``longest`` at most, answers as well."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(Qwen2Config(**sizes, **heads)).save_pretrained(directory)
    arithmetic_tokenizer().save_pretrained(directory)
    random, half = generator("benchmark-pairs"), longest // 2
    rows = []
    for pair in range(NUM_PAIRS):
        lengths = [half * (pair + 1) // NUM_PAIRS, *random.integers(half // 8, half - 1, 2).tolist()]
        texts = ["".join(map(str, random.integers(0, 10, n))) for n in lengths]
        rows.append(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)))
    write_jsonl(directory / "pairs.jsonl", rows)


class Own:
    """``MegatronEngine`` on packed pairs."""

    def __init__(self, directory: Path, longest: int, layout: ParallelLayout) -> None:
        device = platform.current().set_device(0)
        spec = TrainerSpec(
            torch.float32,
            ParallelConfig(),
            MemoryConfig(),
            temperature=1.0,
            chunk_tokens=1024,
            entropy_has_gradient=False,
        )
        optimizer = OptimizerConfig(lr=LR, weight_decay=WEIGHT_DECAY, clip_grad=CLIP, beta1=BETAS[0], beta2=BETAS[1])
        shape, weights = read_model_shape(directory), HFReader(directory)
        policy = MegatronPolicy(spec, shape, layout, device)
        self.engine = MegatronEngine(policy, weights, Optimization(optimizer, 1000))
        data = DataConfig(max_prompt_length=longest, max_response_length=longest, filter_overlong_prompts=False)
        tokenizer = AutoTokenizer.from_pretrained(directory)
        pairs = PairDataset.from_files(DataFiles([str(directory / "pairs.jsonl")]), tokenizer, data).items
        sequences = [one for pair in pairs for one in pair.sequences]
        share = BatchShare(layout, 0, MAX_TOKENS, pad_multiple=1, pad_token_id=0)
        self.microbatches = pack_for_rank(share, sequences, unit=2)
        self.num_tokens = sum(microbatch.num_tokens for microbatch in self.microbatches)
        self.padding = 1 - self.num_tokens / (len(sequences) * max(s.loss_mask.numel() for s in sequences))
        reference = torch.zeros(len(sequences))
        for microbatch, stats in zip(self.microbatches, self.engine.token_stats(self.microbatches), strict=True):
            reference[list(microbatch.sequence_indices)] = answer_sums(stats.logprobs, microbatch)
        self.loss = partial(
            PreferenceObjective(beta=BETA), reference_B=reference, num_pairs=len(pairs), num_chosen_tokens=1
        )

    def step(self) -> float:
        reports = self.engine.forward_backward(self.microbatches, self.loss)
        self.engine.optimizer_step()
        return sum(float(report.sums["loss"]) for report in reports)


class Peer(TrlPeer):
    """TRL's trainer, step by step: its batch, its loss, its optimizer."""

    def __init__(self, directory: Path, longest: int) -> None:
        from datasets import load_dataset
        from trl import DPOConfig, DPOTrainer

        common = DPOConfig, directory, NUM_PAIRS, LR, BETAS, WEIGHT_DECAY
        own = settings(*common, precompute_ref_log_probs=True, max_length=2 * longest, beta=BETA)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa")
        rows = load_dataset("json", data_files=str(directory / "pairs.jsonl"), split="train", cache_dir=str(directory))
        tokenizer = AutoTokenizer.from_pretrained(directory)
        trainer = DPOTrainer(model=model, args=own, train_dataset=rows, processing_class=tokenizer)
        super().__init__(trainer, CLIP)


def timed(way: Own | Peer) -> tuple[float, float, float]:
    """Seconds, CPU seconds and the loss of one step."""
    start, cpu = time.perf_counter(), time.process_time()
    loss = way.step()
    return time.perf_counter() - start, time.process_time() - cpu, loss


def measure(directory: Path, longest: int, steps: int, layout: ParallelLayout) -> dict[str, Any]:
    ways: dict[str, Own | Peer] = {OWN: Own(directory, longest, layout)}
    own = ways[OWN]
    assert isinstance(own, Own)
    if find_spec("trl") is not None:
        ways[PEER] = Peer(directory, longest)
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for _ in range(steps + 1):  # the first one warms up
        for name, way in ways.items():
            found[name].append(timed(way))
    losses = {name: [loss for *_, loss in measured] for name, measured in found.items()}
    if PEER in ways:
        worst = max(abs(a - b) for a, b in zip(losses[OWN], losses[PEER], strict=True))
        assert worst < TOLERANCE, f"the losses differ by {worst}: {losses}"
    seconds, cpu = ({name: [one[k] for one in measured[1:]] for name, measured in found.items()} for k in (0, 1))
    return {
        "num_tokens": own.num_tokens,
        "padding": own.padding,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "losses": losses,
    }


def ratio(seconds: dict[str, list[float]]) -> float | None:
    if PEER not in seconds:
        return None
    return statistics.median(a / b for a, b in zip(seconds[OWN], seconds[PEER], strict=True))


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each way (default: 5)")
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest sequence (default: 512)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 steps: shows that it works, not how fast")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    sizes, longest, steps = (QUICK, 32, 2) if arguments.quick else (MODEL, arguments.longest, arguments.steps)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group(platform.current().backend)
    layout = ParallelLayout.create(1)
    initialize_groups(layout, seed=0)
    with tempfile.TemporaryDirectory() as scratch:
        make_inputs(Path(scratch), sizes, longest)
        found = measure(Path(scratch), longest, steps, layout)
    rows = [
        [name, *(statistics.median(found[key][name]) for key in ("seconds", "cpu_seconds"))]
        for name in found["seconds"]
    ]
    ratios = {key: ratio(found[key]) for key in ("seconds", "cpu_seconds")}
    if ratios["seconds"] is not None:
        rows.append([f"{OWN} / {PEER}", *ratios.values()])
    else:
        print("TRL is not installed: only our own time is measured; see --help\n")
    text = f"{table(['DPO step, 8 pairs', 'time, s', 'CPU time, s'], rows)}\n\n"
    text += f"{found['num_tokens']} tokens; padded to the longest sequence {found['padding']:.0%} would be padding."
    title = f"DPO step (medians of {steps} alternating steps; ratios: medians of pairs)"
    publish(title, text, platform.current().name, {**found, "ratios": ratios}, arguments.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
