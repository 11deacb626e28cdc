"""Tokens per second of one training step: MegatronEngine against transformers + AdamW, same model, same ragged batch.

The ways take turns, step by step, in one process: ``mega_rl`` on the packed batch; ``transformers`` on the batch padded
to its longest sequence; ``transformers`` on every sequence by itself, so without any padding. A step is forward,
backward, clipping and AdamW; tokens are those of the batch, padding not counted. The first losses must agree.

Without an accelerator two small models are trained in float32. With one: the shape of Qwen2.5-1.5B in bfloat16, with
model FLOP utilisation (matrix products and causal attention of the model itself, over the device's peak) and the peak
memory of ``mega_rl``, measured before the other ways exist. MEGA_RL_PLATFORM chooses cpu, cuda or npu.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.report import publish, table
from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.config.schema.learning import TuningConfig
from mega_rl.config.schema.sections import MemoryConfig, OptimizerConfig, ParallelConfig
from mega_rl.data.packing import pack
from mega_rl.errors import InputError
from mega_rl.megatron.engine import MegatronEngine, Optimization
from mega_rl.megatron.model.spec import TrainerSpec
from mega_rl.megatron.policy import MegatronPolicy, initialize_groups
from mega_rl.microbatch import Figures, Microbatch, Sequence, TokenStats
from mega_rl.models.shape import read_model_shape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.parallel.schedule import balance
from mega_rl.types import DTYPES

OWN, PADDED, ALONE = "mega_rl", "transformers, padded", "transformers, one by one"
LR, BETAS, WEIGHT_DECAY, CLIP = 1e-4, (0.9, 0.95), 0.01, 1.0
GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One model and one batch."""

    model: dict[str, int]  # arguments of Qwen2Config
    num_sequences: int
    min_length: int  # positions
    max_length: int  # positions
    dtype: str
    max_tokens: int  # trainer.max_tokens_per_microbatch; on a CPU a micro-batch should fit into the cache


def qwen2(width: int, ffn: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, int]:
    return {
        "hidden_size": width,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
    }


CASES = {
    "tiny": Case(qwen2(64, 128, 2, 4, 2, 512), 4, 4, 32, "float32", 64),
    "10M": Case(qwen2(256, 768, 10, 4, 2, 8192), 16, 32, 512, "float32", 2048),
    "60M": Case(qwen2(512, 1536, 14, 8, 4, 32000), 4, 32, 512, "float32", 2048),
    "qwen2.5-1.5b": Case(qwen2(1536, 8960, 28, 12, 2, 151936), 32, 128, 2048, "bfloat16", 16384),
}


def make_sequences(case: Case) -> list[Sequence]:
    """Lengths evenly spread between the shortest and the longest, shuffled; every position is learnt from."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.linspace(case.min_length, case.max_length, case.num_sequences).long()
    lengths = lengths[torch.randperm(case.num_sequences, generator=generator)]
    return [
        Sequence(torch.randint(0, case.model["vocab_size"], (int(n) + 1,), generator=generator), torch.ones(int(n)))
        for n in lengths
    ]


class Own:
    """``MegatronEngine`` on packed micro-batches."""

    def __init__(
        self,
        directory: Path,
        case: Case,
        sequences: list[Sequence],
        layout: ParallelLayout,
        tuning: TuningConfig | None = None,
        memory: MemoryConfig | None = None,
    ) -> None:
        parallel, memory = ParallelConfig(), memory or MemoryConfig()
        spec = TrainerSpec(
            DTYPES[case.dtype], parallel, memory, 1.0, 1024, tuning=tuning or TuningConfig(), entropy_has_gradient=False
        )
        optimizer = OptimizerConfig(lr=LR, weight_decay=WEIGHT_DECAY, clip_grad=CLIP, beta1=BETAS[0], beta2=BETAS[1])
        device = platform.current().set_device(0)
        parts = balance([s.loss_mask.numel() for s in sequences], 1, case.max_tokens)[0]
        self.microbatches = [pack(sequences, part, pad_to_multiple=1, pad_token_id=0) for part in parts]
        self.num_tokens = sum(m.num_tokens for m in self.microbatches)
        shape, weights = read_model_shape(directory), HFReader(directory)
        policy = MegatronPolicy(spec, shape, layout, device)
        self.engine = MegatronEngine(policy, weights, Optimization(optimizer, 1000))

    def step(self) -> float:
        def loss(stats: TokenStats, microbatch: Microbatch) -> tuple[Tensor, Figures]:
            return -(stats.logprobs * microbatch.loss_mask).sum() / self.num_tokens, Figures()

        reports = self.engine.forward_backward(self.microbatches, loss)
        self.engine.optimizer_step()
        return sum(float(report.sums["loss"]) for report in reports)


class Transformers:
    """The same model class, attention (SDPA) and optimizer kernel (fused AdamW) as a plain training script has."""

    def __init__(self, directory: Path, case: Case, sequences: list[Sequence], padded: bool) -> None:
        device = platform.current().set_device(0)
        self.model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=DTYPES[case.dtype], attn_implementation="sdpa"
        ).to(device)
        self.model.config.use_cache = False
        self.model.train()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        )
        self.num_tokens = sum(s.loss_mask.numel() for s in sequences)
        groups = [sequences] if padded else [[sequence] for sequence in sequences]
        self.batches = [tuple(x.to(device) for x in _right_padded(group)) for group in groups]

    def step(self) -> float:
        self.optimizer.zero_grad()
        total = 0.0
        for ids_BL, targets_BL, valid_BL in self.batches:
            mask_BL = None if len(valid_BL) == 1 else valid_BL
            logits_BLV = self.model(input_ids=ids_BL, attention_mask=mask_BL).logits
            nll = F.cross_entropy(logits_BLV.flatten(0, 1).float(), targets_BL.flatten(), reduction="sum")
            loss = nll / self.num_tokens
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return total


def _right_padded(sequences: list[Sequence]) -> tuple[Tensor, Tensor, Tensor]:
    """Input ids, targets with -100 on padding, and the mask of what is none; all [B, L]."""
    ids = [s.token_ids for s in sequences]
    return (
        torch.nn.utils.rnn.pad_sequence([x[:-1] for x in ids], batch_first=True),
        torch.nn.utils.rnn.pad_sequence([x[1:] for x in ids], batch_first=True, padding_value=-100),
        torch.nn.utils.rnn.pad_sequence([torch.ones(len(x) - 1, dtype=torch.int64) for x in ids], batch_first=True),
    )


def timed(step: Callable[[], float]) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process: what other programs take does not count there."""
    begin, cpu_begin = time.perf_counter(), time.process_time()
    step()
    platform.current().synchronize()
    return time.perf_counter() - begin, time.process_time() - cpu_begin


def speedups(seconds: dict[str, list[float]]) -> dict[str, float]:
    """How many times as fast ``mega_rl`` is as each other way: the median of the pairs."""
    own = seconds[OWN]
    return {way: statistics.median(b / a for a, b in zip(own, seconds[way], strict=True)) for way in (PADDED, ALONE)}


def write_model(case: Case, directory: Path) -> int:
    """Write random weights as a Hugging Face directory; returns the number of parameters."""
    torch.manual_seed(0)
    config = Qwen2Config(**case.model, tie_word_embeddings=True, max_position_embeddings=case.max_length)
    model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[case.dtype])
    model.save_pretrained(directory)
    return int(sum(p.numel() for p in model.parameters()))


def run_case(name: str, case: Case, layout: ParallelLayout, arguments: argparse.Namespace) -> dict[str, Any]:
    here = platform.current()
    sequences = make_sequences(case)
    num_tokens = sum(s.loss_mask.numel() for s in sequences)
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        num_parameters = write_model(case, directory)
        here.reset_peak_memory()
        own = Own(directory, case, sequences, layout)
        first_losses = [own.step()]
        own.step()
        peak_bytes = here.memory().device_peak_bytes
        ways: dict[str, Own | Transformers] = {OWN: own}
        ways[PADDED] = Transformers(directory, case, sequences, padded=True)
        ways[ALONE] = Transformers(directory, case, sequences, padded=False)
    first_losses += [ways[way].step() for way in (PADDED, ALONE)]
    tolerance = 1e-5 if case.dtype == "float32" else 2e-2
    assert max(first_losses) - min(first_losses) <= tolerance * max(first_losses), f"losses differ: {first_losses}"
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for number in range(arguments.steps):
        order = list(ways) if number % 2 == 0 else list(ways)[::-1]
        for way in order:
            times[way].append(timed(ways[way].step))
    seconds, cpu_seconds = ({way: [pair[k] for pair in found] for way, found in times.items()} for k in (0, 1))
    result: dict[str, Any] = {
        "case": name,
        "num_parameters": num_parameters,
        "dtype": case.dtype,
        "num_tokens": num_tokens,
        "padding_share": 1 - num_tokens / (case.num_sequences * case.max_length),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "tokens_per_s": {way: num_tokens / statistics.median(found) for way, found in seconds.items()},
        "speedup": speedups(seconds),
        "cpu_speedup": speedups(cpu_seconds),
    }
    if here.name != "cpu":
        flops = own.engine.policy.flops.of([s.loss_mask.numel() for s in sequences], with_gradient=True)
        achieved = flops / statistics.median(seconds[OWN]) / 1e12
        result |= {"tflops": achieved, "mfu": achieved / peak_tflops(arguments), "peak_bytes": peak_bytes}
    return result


def peak_tflops(arguments: argparse.Namespace) -> float:
    """Of this device; raises InputError where it is neither given nor known."""
    if arguments.peak_tflops:
        return float(arguments.peak_tflops)
    known = platform.current().peak_flops()
    if known is None:
        raise InputError(
            "--peak-tflops is missing, and the peak of this device is not known; give its dense bf16 TFLOP/s"
        )
    return known / 1e12


def report(results: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    header = ["model", "parameters", "tokens", OWN, PADDED, ALONE, "against padded", "against one by one", "CPU time"]
    rows = []
    for found in results:
        row = [f"{found['case']} {found['dtype']}", f"{found['num_parameters'] / 1e6:.1f}M", found["num_tokens"]]
        row += [f"{found['tokens_per_s'][way]:,.0f}" for way in (OWN, PADDED, ALONE)]
        row += [f"{found['speedup'][way]:.2f}x" for way in (PADDED, ALONE)]
        row.append(" / ".join(f"{found['cpu_speedup'][way]:.2f}x" for way in (PADDED, ALONE)))
        if "mfu" in found:
            row += [f"{found['mfu']:.1%}", f"{found['peak_bytes'] / GIB:.1f}"]
        rows.append(row)
    if any("mfu" in found for found in results):
        header += ["MFU", "peak memory, GiB"]
    shares = ", ".join(f"{found['case']} {found['padding_share']:.0%}" for found in results)
    text = f"{table(header, rows)}\n\nShare of padding in the padded batch: {shares}. CPU time: both speed-ups by it."
    title = f"Training step, tokens/s (medians of {arguments.steps} alternating steps; speed-ups: medians of pairs)"
    publish(title, text, platform.current().name, {"results": results}, arguments.json)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, action="append", help="default: 10M and 60M, or qwen2.5-1.5b")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each way (default: 5)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--peak-tflops", type=float, help="dense bf16 peak of the device, for the FLOP utilisation")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 steps: shows that it works, not how fast")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.case, arguments.steps = ["tiny"], 2
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    here = platform.current()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    here.set_device(0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group(here.backend)
    layout = ParallelLayout.create(1)
    initialize_groups(layout, seed=0)
    cases = arguments.case or (["10M", "60M"] if here.name == "cpu" else ["qwen2.5-1.5b"])
    report([run_case(name, CASES[name], layout, arguments) for name in cases], arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
