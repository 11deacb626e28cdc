"""A training step by where the optimizer's state is and what its moments are, and what the moments cost in quality.

First table: engines of one model take turns, step by step, in one process: state on the device, state on the host,
bfloat16 moments in either place. A step is forward, backward, clipping and AdamW. The bytes are masters and moments as
they lie in memory, beside what ``mega_rl.planning`` says of them. On a CPU the host is the device, so the time is what
the copies cost at most; on an accelerator it is what passing the bus adds. MEGA_RL_PLATFORM chooses cpu, cuda or npu.

Second table: a tiny model learns the language of a random automaton (each token allows four next ones) with float32
moments, bfloat16 moments as they are trained here (rounded stochastically), and ones that are rounded to the nearest.
Shown is the mean loss of the last tenth of the steps, in nats, and the least that there is: the automaton's entropy.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.report import publish, table
from benchmarks.training.step import CASES, Case, Own, make_sequences, qwen2, timed, write_model
from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.mapping.tuning import tuning_plan
from mega_rl.config.schema.learning import TuningConfig
from mega_rl.config.schema.sections import MemoryConfig, OptimizerConfig, ParallelConfig, RunConfig
from mega_rl.data.packing import pack
from mega_rl.megatron.engine import MegatronEngine, Optimization
from mega_rl.megatron.model.spec import TrainerSpec
from mega_rl.megatron.optim import frugal_adam
from mega_rl.megatron.optim.optimizer import chained
from mega_rl.megatron.policy import MegatronPolicy, initialize_groups
from mega_rl.microbatch import Figures, Microbatch, Sequence, TokenStats
from mega_rl.models.shape import ModelShape, read_model_shape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.planning.state import stage_parameters, trainer_state

DEVICE = "device, float32"
WAYS = {
    DEVICE: MemoryConfig(),
    "host, float32": MemoryConfig(optimizer_on_host=True),
    "device, bfloat16": MemoryConfig(optimizer_state_dtype="bfloat16"),
    "host, bfloat16": MemoryConfig(optimizer_on_host=True, optimizer_state_dtype="bfloat16"),
}
MIB = 1 << 20
ALL = {**CASES, "7M": Case(qwen2(256, 768, 4, 4, 2, 16384), 4, 128, 128, "bfloat16", 512)}
LEARNER = Case(qwen2(64, 192, 2, 4, 2, 256), 8, 64, 64, "bfloat16", 512)
NUM_NEXT = 4  # tokens that may follow a token
MOMENTS = ("float32", "bfloat16, stochastic", "bfloat16, nearest")


def measured_bytes(engine: MegatronEngine) -> int:
    """Of masters and moments, wherever they are; float32 weights are their own masters."""
    weights = {p.untyped_storage().data_ptr() for p in engine.policy.parameters.values()}
    total = 0
    for part in chained(engine.optimizer):
        tensors = [v for state in part.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        tensors += [p for group in part.optimizer.param_groups for p in group["params"]]
        total += sum(t.nbytes for t in tensors if t.untyped_storage().data_ptr() not in weights)
    return total


def planned_bytes(case: Case, memory: MemoryConfig, shape: ModelShape, layout: ParallelLayout) -> int:
    config = RunConfig(memory=memory)
    config.model.dtype = case.dtype  # type: ignore[assignment]
    held = stage_parameters(config, shape, layout, 0, tuning_plan(TuningConfig(), shape))
    return trainer_state(config, layout, 0, held, has_reference=False).optimizer


def run_case(name: str, case: Case, layout: ParallelLayout, num_steps: int) -> dict[str, Any]:
    sequences = make_sequences(case)
    with tempfile.TemporaryDirectory() as scratch:
        num_parameters = write_model(case, Path(scratch))
        engines = {way: Own(Path(scratch), case, sequences, layout, memory=memory) for way, memory in WAYS.items()}
    for own in engines.values():
        own.step()
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in engines}
    for number in range(num_steps):
        for way in list(engines)[:: 1 if number % 2 == 0 else -1]:
            seconds[way].append(timed(engines[way].step))
    last = {way: own.step() for way, own in engines.items()}
    assert last[DEVICE] == last["host, float32"], f"state on the host gives another loss: {last}"
    shape, found = engines[DEVICE].engine.policy.shape, {}
    for way, own in engines.items():
        pairs = zip(seconds[way], seconds[DEVICE], strict=True)
        ratios = [tuple(mine / first for mine, first in zip(*pair, strict=True)) for pair in pairs]
        found[way] = {
            "seconds": [pair[0] for pair in seconds[way]],
            "ratio": statistics.median(ratio[0] for ratio in ratios),
            "cpu_ratio": statistics.median(ratio[1] for ratio in ratios),
            "bytes": measured_bytes(own.engine),
            "planned_bytes": planned_bytes(case, WAYS[way], shape, layout),
        }
        assert found[way]["bytes"] == found[way]["planned_bytes"], found[way]
    return {"case": name, "num_parameters": num_parameters, "ways": found}


def automaton(vocab_size: int) -> Tensor:
    """[V, 4]: the tokens that may follow each token, all as likely."""
    return torch.randint(vocab_size, (vocab_size, NUM_NEXT), generator=torch.Generator().manual_seed(0))


def sentence(following: Tensor, length: int, generator: torch.Generator) -> Sequence:
    ids = [int(torch.randint(len(following), (), generator=generator))]
    for choice in torch.randint(NUM_NEXT, (length,), generator=generator).tolist():
        ids.append(int(following[ids[-1], choice]))
    return Sequence(token_ids=torch.tensor(ids), loss_mask=torch.ones(length))


def losses_of(moments: str, beta2: float, layout: ParallelLayout, num_steps: int, directory: Path) -> list[float]:
    """The loss of every step, the data being the same in every way."""
    memory = MemoryConfig(optimizer_state_dtype=moments.partition(",")[0])  # type: ignore[arg-type]
    spec = TrainerSpec(torch.bfloat16, ParallelConfig(), memory, 1.0, chunk_tokens=1024, entropy_has_gradient=False)
    optimizer = OptimizerConfig(lr=3e-3, beta2=beta2, schedule="cosine", warmup_steps=min(10, num_steps // 2))
    weights, shape, device = HFReader(directory), read_model_shape(directory), platform.current().set_device(0)
    policy = MegatronPolicy(spec, shape, layout, device)
    engine = MegatronEngine(policy, weights, Optimization(optimizer, num_steps))
    following, generator = automaton(shape.vocab_size), torch.Generator().manual_seed(1)

    def loss(stats: TokenStats, microbatch: Microbatch) -> tuple[Tensor, Figures]:
        return -(stats.logprobs * microbatch.loss_mask).sum() / microbatch.num_tokens, Figures()

    found = []
    for _ in range(num_steps):
        batch = [sentence(following, LEARNER.max_length, generator) for _ in range(LEARNER.num_sequences)]
        (report,) = engine.forward_backward([pack(batch, list(range(len(batch))), 1, 0).to(device)], loss)
        found.append(float(report.sums["loss"]))
        engine.optimizer_step()
    return found


def learn(layout: ParallelLayout, num_steps: int) -> dict[str, dict[str, list[float]]]:
    """beta2 -> moments -> losses."""
    stochastic = frugal_adam.round_stochastically
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        write_model(LEARNER, Path(scratch))
        for beta2 in (0.95, 0.999):
            for moments in MOMENTS:
                if moments.endswith("nearest"):
                    frugal_adam.round_stochastically = lambda values, bits: values.to(torch.bfloat16)
                losses = losses_of(moments, beta2, layout, num_steps, Path(scratch))
                frugal_adam.round_stochastically = stochastic
                found.setdefault(str(beta2), {})[moments] = losses
    return found


def report(
    results: list[dict[str, Any]], learnt: dict[str, dict[str, list[float]]], options: argparse.Namespace
) -> None:
    header = ["model", "state", "step, s", "of the first", "by CPU time", "masters + moments, MiB"]
    rows = [
        [
            f"{result['case']} ({result['num_parameters'] / 1e6:.1f}M)",
            way,
            f"{statistics.median(figures['seconds']):.3f}",
            f"{figures['ratio']:.2f}",
            f"{figures['cpu_ratio']:.2f}",
            f"{figures['bytes'] / MIB:.2f}",
        ]
        for result in results
        for way, figures in result["ways"].items()
    ]
    tail = max(1, options.learning_steps // 10)
    quality = [
        [beta2, *(f"{statistics.mean(ways[moments][-tail:]):.4f}" for moments in MOMENTS), f"{math.log(NUM_NEXT):.4f}"]
        for beta2, ways in learnt.items()
    ]
    text = f"{table(header, rows)}\n\n{table(['beta2', *MOMENTS, 'least'], quality)}"
    title = f"Optimizer state (medians of {options.steps} alternating steps; loss after {options.learning_steps})"
    publish(title, text, platform.current().name, {"results": results, "losses": learnt}, options.json)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=ALL, action="append", help="default: 7M, or qwen2.5-1.5b")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each way (default: 5)")
    parser.add_argument("--learning-steps", type=int, default=600, help="of the second table (default: 600)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, few steps: shows that it works")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.case, arguments.steps, arguments.learning_steps = ["tiny"], 1, 3
    here = platform.current()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    here.set_device(0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group(here.backend)
    layout = ParallelLayout.create(1)
    initialize_groups(layout, seed=0)
    cases = arguments.case or (["7M"] if here.name == "cpu" else ["qwen2.5-1.5b"])
    results = [run_case(name, ALL[name], layout, arguments.steps) for name in cases]
    report(results, learn(layout, arguments.learning_steps), arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
