"""Token log-probabilities, forward and backward: time and peak memory against logits, log_softmax, gather.

Every measurement is a process of its own, the two ways in turn, so that neither inherits the other's memory. Memory is
the peak above what the process held when hidden states and weights were there (resident set on a CPU, allocated device
memory elsewhere). ``mega_rl`` returns the entropy of every position too; the plain way here does not.
MEGA_RL_PLATFORM chooses cpu, cuda or npu.

Letters: T tokens, D hidden width, V vocabulary.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
import torch
from torch import Tensor

from benchmarks.report import publish, table
from mega_rl import platform
from mega_rl.errors import InputError
from mega_rl.megatron.model.logprob import VocabularyShard, token_logprobs
from mega_rl.types import DTYPES

WAYS = ("mega_rl", "plain")
GIB = 2**30
PLAIN_COPIES = 4.0  # float32 [T, V] tensors: the plain way holds three at its peak, and others need memory too


@dataclass(frozen=True)
class Measurement:
    """One forward and backward pass in a process of its own."""

    seconds: float
    cpu_seconds: float  # of this process: what other programs take does not count
    peak_bytes: int  # above the baseline
    loss: float
    hidden_grad_norm: float
    weight_grad_norm: float


def plain(hidden_TD: Tensor, weight_VD: Tensor, target_ids_T: Tensor, temperature: float) -> Tensor:
    logits_TV = (hidden_TD @ weight_VD.t()).float()
    if temperature != 1.0:
        logits_TV = logits_TV / temperature
    return torch.log_softmax(logits_TV, dim=-1).gather(1, target_ids_T[:, None])[:, 0]


def measure(way: str, arguments: argparse.Namespace) -> Measurement:
    """Run one way once in this process."""
    here = platform.current()
    device = here.set_device(0)
    shard = VocabularyShard(
        None, 0, arguments.vocabulary, arguments.temperature, arguments.chunk_tokens, entropy_has_gradient=False
    )

    def run(num_tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(0)
        sizes = ((num_tokens, arguments.hidden), (arguments.vocabulary, arguments.hidden))
        hidden_TD, weight_VD = (
            (torch.randn(size, generator=generator) * arguments.hidden**-0.25)
            .to(device, DTYPES[arguments.dtype])
            .requires_grad_()
            for size in sizes
        )
        target_ids_T = torch.randint(0, arguments.vocabulary, (num_tokens,), generator=generator).to(device)
        coefficients_T = torch.randn(num_tokens, generator=generator).to(device)
        here.synchronize()
        here.reset_peak_memory()
        nonlocal baseline, begin, cpu_begin
        baseline = psutil.Process().memory_info().rss if here.name == "cpu" else here.memory().device_peak_bytes
        begin, cpu_begin = time.perf_counter(), time.process_time()
        if way == "plain":
            logprobs_T = plain(hidden_TD, weight_VD, target_ids_T, arguments.temperature)
        else:
            logprobs_T, *_ = token_logprobs(hidden_TD, weight_VD, target_ids_T, shard)
        loss = (coefficients_T * logprobs_T).sum()
        loss.backward()
        assert hidden_TD.grad is not None and weight_VD.grad is not None
        here.synchronize()
        return loss.detach(), hidden_TD.grad, weight_VD.grad

    baseline, begin, cpu_begin = 0, 0.0, 0.0
    run(min(64, arguments.tokens))  # libraries start their threads and pick their kernels
    loss, hidden_grad_TD, weight_grad_VD = run(arguments.tokens)
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - cpu_begin
    memory = here.memory()
    peak = memory.host_peak_bytes if here.name == "cpu" else memory.device_peak_bytes
    norms = (float(x.float().norm()) for x in (hidden_grad_TD, weight_grad_VD))
    # Never below nothing: the kernel counts resident pages with a small delay.
    return Measurement(seconds, cpu_seconds, max(0, peak - baseline), float(loss), *norms)


def in_own_process(way: str, arguments: argparse.Namespace) -> Measurement:
    passed = [f"--{name.replace('_', '-')}={getattr(arguments, name)}" for name in SHARED if getattr(arguments, name)]
    command = [sys.executable, "-m", "benchmarks.training.logprob", "--measure", way, *passed]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return Measurement(**json.loads(done.stdout.splitlines()[-1]))


def check_memory(arguments: argparse.Namespace) -> None:
    """Refuse what would start to swap; raises InputError."""
    needed = PLAIN_COPIES * arguments.tokens * arguments.vocabulary * 4
    available = psutil.virtual_memory().available
    if platform.current().name == "cpu" and needed > available:
        raise InputError(
            f"--tokens {arguments.tokens}: the plain way needs {needed / GIB:.0f} GiB and {available / GIB:.0f} GiB "
            "are free; give fewer tokens, or a smaller --vocabulary"
        )


def compare(arguments: argparse.Namespace) -> None:
    check_memory(arguments)
    rounds: list[dict[str, Measurement]] = []
    for number in range(arguments.rounds):
        order = WAYS if number % 2 == 0 else WAYS[::-1]
        rounds.append({way: in_own_process(way, arguments) for way in order})
    own, reference = ([found[way] for found in rounds] for way in WAYS)
    for name in ("loss", "hidden_grad_norm", "weight_grad_norm"):
        values = getattr(own[0], name), getattr(reference[0], name)
        tolerance = 1e-4 if arguments.dtype == "float32" else 2e-2
        assert abs(values[0] - values[1]) <= tolerance * abs(values[1]), f"{name} differs: {values}"
    figures = {"time, s": "seconds", "CPU time, s": "cpu_seconds", "peak memory, GiB": "peak_bytes"}
    units = [GIB if name == "peak_bytes" else 1 for name in figures.values()]
    medians = [
        [statistics.median(getattr(m, name) for m in found) for name in figures.values()] for found in (own, reference)
    ]
    ratios = {
        name: statistics.median(getattr(a, name) / getattr(b, name) for a, b in zip(own, reference, strict=True))
        for name in figures.values()
    }
    rows = [[way, *(x / u for x, u in zip(row, units, strict=True))] for way, row in zip(WAYS, medians, strict=True)]
    text = table(("forward + backward", *figures), [*rows, ["mega_rl / plain", *ratios.values()]])
    shape = f"T={arguments.tokens}, V={arguments.vocabulary}, D={arguments.hidden}, {arguments.dtype}"
    publish(
        f"Log-probabilities: {shape}, median of {len(rounds)} pairs",
        text,
        platform.current().name,
        {
            "tokens": arguments.tokens,
            "vocabulary": arguments.vocabulary,
            "hidden": arguments.hidden,
            "dtype": arguments.dtype,
            "ratios": ratios,
            "rounds": [{way: asdict(m) for way, m in found.items()} for found in rounds],
        },
        arguments.json,
    )


SHARED = ("tokens", "vocabulary", "hidden", "dtype", "temperature", "chunk_tokens", "threads")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="T (default: 8192)")
    parser.add_argument("--vocabulary", type=int, default=152064, help="V (default: 152064, Qwen2.5's)")
    parser.add_argument("--hidden", type=int, default=64, help="D (default: 64, narrow: a CPU stays busy for seconds)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampling; logits are divided by it")
    parser.add_argument("--chunk-tokens", type=int, default=1024, help="as trainer.logprob_chunk_tokens")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--rounds", type=int, default=3, help="pairs of measurements (default: 3)")
    parser.add_argument("--quick", action="store_true", help="a small case, once: shows that it works, not how fast")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.tokens, arguments.vocabulary, arguments.hidden, arguments.rounds = 256, 8192, 32, 1
    return arguments


def main(argv: list[str] | None = None) -> None:
    arguments = parse(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.measure:
        print(json.dumps(asdict(measure(arguments.measure, arguments))))
    else:
        compare(arguments)


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        raise SystemExit(f"error: {error}") from None
