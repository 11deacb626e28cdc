"""A training step with adapters against a full one of the same engine, and the bytes of gradients and optimizer.

Three engines take turns, step by step, in one process, on the same packed batch: full training, adapters of rank 16 on
every linear layer, and the last quarter of the layers with the rest frozen. A step is forward, backward, clipping and
AdamW. The bytes are Megatron's buffers and the optimizer's tensors as they lie in memory, beside what
``mega_rl.planning`` says of them. Target: a step with adapters takes at most 0.90 of a full one.

Where TRL and PEFT are installed, a step of TRL's SFTTrainer with PEFT's adapters takes turns with them: the same model,
sequences, rank and optimizer, all linear layers too. Target: ours takes at most 0.95 of it. The environment has no
TRL: ``benchmarks/against_trl/preference.py`` says how to make one beside it that has; PEFT is added, and the script run
there:

    peer/bin/pip install --no-deps peft==0.21.2
    PYTHONPATH=$PWD peer/bin/python -m benchmarks.training.lora --threads 1
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from benchmarks.against_trl.peer import TrlPeer, settings
from benchmarks.report import publish, table
from benchmarks.training.step import (
    BETAS,
    CASES,
    CLIP,
    LR,
    WEIGHT_DECAY,
    Case,
    Own,
    make_sequences,
    qwen2,
    timed,
    write_model,
)
from mega_rl import platform
from mega_rl.bridge.mapping.tuning import tuning_plan
from mega_rl.config.schema.learning import AdapterConfig, TuningConfig
from mega_rl.config.schema.sections import RunConfig
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.optim.optimizer import chained
from mega_rl.megatron.policy import initialize_groups
from mega_rl.microbatch import Sequence
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.planning.state import stage_parameters, trainer_state
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer
from mega_rl.types import DTYPES

FULL, LORA, FREEZE, PEER = "full", "lora, rank 16", "freeze, last quarter", "TRL SFTTrainer + PEFT, rank 16"
RANK = 16
MIB = 1 << 20
ALL = {**CASES, "7M": Case(qwen2(256, 768, 4, 4, 2, 16384), 4, 128, 128, "float32", 512)}


def ways(case: Case) -> dict[str, TuningConfig]:
    quarter = max(1, case.model["num_hidden_layers"] // 4)
    return {
        FULL: TuningConfig(),
        LORA: TuningConfig(method="lora", adapter=AdapterConfig(rank=RANK)),
        FREEZE: TuningConfig(method="freeze", train_layers=quarter),
    }


class Peer(TrlPeer):
    """TRL's trainer with PEFT's adapters, step by step: its batch, its loss, its optimizer."""

    def __init__(self, directory: Path, case: Case, sequences: list[Sequence]) -> None:
        from datasets import Dataset
        from peft import LoraConfig
        from trl import SFTConfig, SFTTrainer

        common = SFTConfig, directory, len(sequences), LR, BETAS, WEIGHT_DECAY
        chosen = settings(*common, max_length=case.max_length + 1)
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=DTYPES[case.dtype], attn_implementation="sdpa")
        own = AdapterConfig(rank=RANK)
        adapter = LoraConfig(r=RANK, lora_alpha=own.alpha or RANK, target_modules="all-linear", task_type="CAUSAL_LM")
        rows = Dataset.from_dict({"input_ids": [sequence.token_ids.tolist() for sequence in sequences]})
        trainer = SFTTrainer(
            model=model,
            args=chosen,
            train_dataset=rows,
            processing_class=arithmetic_tokenizer(),
            peft_config=adapter,
        )
        super().__init__(trainer, CLIP)


def medians(seconds: dict[str, list[tuple[float, float]]], way: str, other: str) -> tuple[float, float]:
    """Of the steps of a way over those of another one, pair by pair: by the clock, and by CPU time."""
    pairs = [[a / b for a, b in zip(*pair, strict=True)] for pair in zip(seconds[way], seconds[other], strict=True)]
    return statistics.median(pair[0] for pair in pairs), statistics.median(pair[1] for pair in pairs)


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
        taking_turns: dict[str, Own | Peer] = {**engines}
        if find_spec("trl") is not None and find_spec("peft") is not None and platform.current().name == "cpu":
            taking_turns[PEER] = Peer(Path(scratch), case, sequences)
    first = [way.step() for way in taking_turns.values()]
    assert max(first) - min(first) <= 1e-4 * max(first), f"first losses differ: {first}"
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in taking_turns}
    for number in range(num_steps):
        for way in list(taking_turns)[:: 1 if number % 2 == 0 else -1]:
            seconds[way].append(timed(taking_turns[way].step))
    shape, found = engines[FULL].engine.policy.shape, {}
    for way, own in engines.items():
        trained = [p for p in own.engine.policy.parameters.values() if p.requires_grad]
        ratio, cpu_ratio = medians(seconds, way, FULL)
        found[way] = {
            "trained": sum(p.numel() for p in trained),
            "seconds": [pair[0] for pair in seconds[way]],
            "ratio": ratio,
            "cpu_ratio": cpu_ratio,
            "bytes": measured_bytes(own.engine),
            "planned_bytes": planned_bytes(case, ways(case)[way], shape, layout),
        }
        assert found[way]["bytes"] == found[way]["planned_bytes"], found[way]
    result: dict[str, Any] = {"case": name, "num_parameters": num_parameters, "ways": found}
    if PEER in seconds:
        ratio, cpu_ratio = medians(seconds, LORA, PEER)
        result["peer"] = {"seconds": seconds[PEER], "ratio": ratio, "cpu_ratio": cpu_ratio}
    return result


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
    told = [
        [f"{LORA} / {PEER}", f"{peer['ratio']:.2f}", f"{peer['cpu_ratio']:.2f}"]
        for peer in (result["peer"] for result in results if "peer" in result)
    ]
    beside = table(["against the peer", "time", "CPU time"], told) if told else "TRL or PEFT is not here: see --help"
    title = f"Training step by what is trained (medians of {arguments.steps} alternating steps; bytes as planned)"
    publish(title, f"{table(header, rows)}\n\n{beside}", platform.current().name, {"results": results}, arguments.json)


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
