"""A training step with adapters against a full one of the same engine, and the bytes of gradients and optimizer.

Three engines take turns, step by step, in one process, on the same packed batch: full training, adapters of rank 16 on
every linear layer, and the last quarter of the layers with the rest frozen. A step is forward, backward, clipping and
AdamW. The bytes are Megatron's buffers and the optimizer's tensors as they lie in memory, beside what
``mega_rl.planning`` says of them. Target: a step with adapters takes at most 0.90 of a full one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import publish, table
from train_step import CASES, Case, Own, make_sequences, qwen2, timed, write_model

from mega_rl import platform
from mega_rl.bridge.mapping.tuning import tuning_plan
from mega_rl.config.schema import AdapterConfig, RunConfig, TuningConfig
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.optimizer import chained
from mega_rl.megatron.policy import initialize_groups
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.planning.state import stage_parameters, trainer_state

FULL, LORA, FREEZE = "full", "lora, rank 16", "freeze, last quarter"
MIB = 1 << 20
ALL = {**CASES, "7M": Case(qwen2(256, 768, 4, 4, 2, 16384), 4, 128, 128, "float32", 512)}


def ways(case: Case) -> dict[str, TuningConfig]:
    quarter = max(1, case.model["num_hidden_layers"] // 4)
    return {
        FULL: TuningConfig(),
        LORA: TuningConfig(method="lora", adapter=AdapterConfig(rank=16)),
        FREEZE: TuningConfig(method="freeze", train_layers=quarter),
    }


def measured_bytes(engine: MegatronEngine) -> int:
    """Of gradients, masters and moments; float32 weights are their own masters."""
    buffers = [b for chunk in engine.wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    total = sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers)
    for part in chained(engine.optimizer):
        tensors = [v for state in part.optimizer.state.values() for v in state.values() if torch.is_tensor(v)]
        if engine.policy.spec.dtype != torch.float32:
            tensors += [p for group in part.optimizer.param_groups for p in group["params"]]
        total += sum(t.numel() * t.element_size() for t in tensors)
    return total


def planned_bytes(case: Case, tuning: TuningConfig, shape: ModelShape, layout: ParallelLayout) -> int:
    config = RunConfig()
    config.model.dtype = case.dtype  # type: ignore[assignment]
    held = stage_parameters(config, shape, layout, 0, tuning_plan(tuning, shape))
    state = trainer_state(config, layout, 0, held, has_reference=False)
    return state.gradients + state.optimizer


def run_case(name: str, case: Case, layout: ParallelLayout, num_steps: int) -> dict[str, Any]:
    sequences = make_sequences(case)
    with tempfile.TemporaryDirectory() as scratch:
        num_parameters = write_model(case, Path(scratch))
        engines = {way: Own(Path(scratch), case, sequences, layout, tuning) for way, tuning in ways(case).items()}
    first = [own.step() for own in engines.values()]
    assert max(first) - min(first) <= 1e-4 * max(first), f"first losses differ: {first}"
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in engines}
    for number in range(num_steps):
        for way in list(engines)[:: 1 if number % 2 == 0 else -1]:
            seconds[way].append(timed(engines[way].step))
    shape, found = engines[FULL].engine.policy.shape, {}
    for way, own in engines.items():
        trained = [p for p in own.engine.policy.parameters.values() if p.requires_grad]
        pairs = zip(seconds[way], seconds[FULL], strict=True)
        ratios = [tuple(mine / full for mine, full in zip(*pair, strict=True)) for pair in pairs]
        found[way] = {
            "trained": sum(p.numel() for p in trained),
            "seconds": [pair[0] for pair in seconds[way]],
            "ratio": statistics.median(ratio[0] for ratio in ratios),
            "cpu_ratio": statistics.median(ratio[1] for ratio in ratios),
            "bytes": measured_bytes(own.engine),
            "planned_bytes": planned_bytes(case, ways(case)[way], shape, layout),
        }
        assert found[way]["bytes"] == found[way]["planned_bytes"], found[way]
    return {"case": name, "num_parameters": num_parameters, "ways": found}


def report(results: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    header = ["model", "method", "trained", "step, s", "of a full step", "by CPU time", "gradients + optimizer, MiB"]
    rows = [
        [
            f"{result['case']} ({result['num_parameters'] / 1e6:.1f}M)",
            way,
            f"{figures['trained']:,}",
            f"{statistics.median(figures['seconds']):.3f}",
            f"{figures['ratio']:.2f}",
            f"{figures['cpu_ratio']:.2f}",
            f"{figures['bytes'] / MIB:.2f}",
        ]
        for result in results
        for way, figures in result["ways"].items()
    ]
    title = f"Training step by what is trained (medians of {arguments.steps} alternating steps; bytes as planned)"
    publish(title, table(header, rows), platform.current().name, {"results": results}, arguments.json)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=ALL, action="append", help="default: 7M, or qwen2.5-1.5b")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each way (default: 5)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 steps: shows that it works, not how fast")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args(argv)
    if arguments.quick:
        arguments.case, arguments.steps = ["tiny"], 2
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
    report([run_case(name, ALL[name], layout, arguments.steps) for name in cases], arguments)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
