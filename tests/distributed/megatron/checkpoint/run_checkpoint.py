"""Started by torchrun: save an engine and be killed in the next save (``save``), or resume it at layouts (``resume``).

What is found is written into the shared directory, so that launches can be compared with each other.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from mega_rl import platform
from mega_rl.bridge.files.torch_dist.manifest import PROGRESS as PROGRESS_FILE, WEIGHTS
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.slices import indices
from mega_rl.config.schema.sections import RunConfig
from mega_rl.errors import InputError
from mega_rl.megatron.checkpoint import checkpoint
from mega_rl.megatron.checkpoint.saving import CheckpointWriter
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.layout import ParallelLayout
from tests.models import tiny_models
from tests.models.engine_support import (
    build_engine,
    groups,
    loss_of,
    optimizer_of,
    owned_span,
    pack_for_rank,
    run_config,
    total_loss,
)
from tests.models.layouts import Case
from tests.models.parity_reference import OBJECTIVES, make_sequences

FAMILY = "qwen2"  # tied embeddings, of which a pipeline has two copies, and rows that do not divide by 2
OBJECTIVE = OBJECTIVES["sft"]
SAVED_AT = Case(2, tensor=2, sequence=True)
TOTAL_STEPS, SAVED_STEP = 4, 2
DTYPES = ("bfloat16", "float32")
PROGRESS = {
    "data": {"position": 7, "order": [3, 1, 2], "carried": [{"ids": list(range(40)), "logprobs": [-0.1] * 40}]},
    "validations": {"first": {"acc": 0.25}},
}
TOLERANCE = 1e-5  # of the following steps at another layout, relative

Tensors = dict[str, dict[str, torch.Tensor]]  # kind ("weight", "master", "exp_avg", "exp_avg_sq") -> name -> tensor


def config_of(case: Case, dtype: str) -> RunConfig:
    config = run_config(case, OBJECTIVE, dtype)
    config.router.bias_update_rate = 0.01  # of the families that have such a bias
    config.optimizer.schedule, config.optimizer.warmup_steps, config.optimizer.min_lr = "cosine", 1, 1e-4
    return config


def new_engine(case: Case, layout: ParallelLayout, dtype: str, directory: Path, model: str = "model") -> MegatronEngine:
    return build_engine(config_of(case, dtype), layout, directory / model, TOTAL_STEPS)


def follow(
    case: Case, layout: ParallelLayout, engine: MegatronEngine, num_steps: int, family: str = FAMILY
) -> list[dict[str, float]]:
    """The figures of the next optimizer steps."""
    sequences = make_sequences(OBJECTIVE, tiny_models.vocab_size(family))
    microbatches, loss_function = pack_for_rank(case, layout, sequences), loss_of(OBJECTIVE, sequences)
    figures = []
    for _ in range(num_steps):
        loss = total_loss(layout, engine.forward_backward(microbatches, loss_function))
        stats = engine.optimizer_step()
        assert not stats.skipped
        figures.append({"loss": loss, "norm": stats.grad_norm, "lr": stats.lr})
    return figures


def replicas_of(parameter: torch.nn.Parameter) -> dist.ProcessGroup:
    """The ranks over which the optimizer state of a parameter is sharded: an expert has its own."""
    if not getattr(parameter, "allreduce", True):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)


def local_state(engine: MegatronEngine) -> Tensors:
    """Weights and optimizer state of every local parameter, put together over the data-parallel ranks."""
    weights = engine.policy.parameters | engine.policy.frozen
    state: Tensors = {"weight": {name: weight.detach().to("cpu", copy=True) for name, weight in weights.items()}}
    for kind in ("master", "exp_avg", "exp_avg_sq"):
        state[kind] = {}
        for name, parameter in engine.policy.parameters.items():
            full = torch.zeros(parameter.numel(), dtype=torch.float32)
            optimizer, (start, end) = optimizer_of(engine, parameter), owned_span(engine, parameter)
            if optimizer is not None:
                group, order = optimizer.model_param_group_index_map[parameter]
                shard = optimizer.optimizer.param_groups[group]["params"][order]
                full[start:end] = shard.detach() if kind == "master" else optimizer.optimizer.state[shard][kind]
            dist.all_reduce(full, group=replicas_of(parameter))
            state[kind][name] = full.view(parameter.shape)
    return state


def whole_state(engine: MegatronEngine) -> Tensors:
    """The same as whole Hugging Face tensors, on every rank."""
    own = local_state(engine)
    pieces = [
        (kind, piece.hf_name, piece.hf_box, tensors[piece.local_name][indices(piece.local_box)])
        for kind, tensors in own.items()
        for piece in engine.slices_of(dist.get_rank())
        if piece.local_name in tensors  # a frozen weight has no optimizer state
    ]
    shapes = hf_tensors(engine.policy.shape)
    whole: Tensors = {kind: {} for kind in own}
    for kind, name, box, tensor in (piece for part in gather_objects(pieces) for piece in part):
        target = whole[kind].setdefault(name, torch.full(shapes[name], float("nan"), dtype=tensor.dtype))
        target[indices(box)] = tensor
    assert all(tensor.isfinite().all() for tensors in whole.values() for tensor in tensors.values())
    return whole


def assert_same_state(engine: MegatronEngine, expected: Tensors) -> None:
    """Bit for bit, every copy of every tensor on this rank."""
    for kind, tensors in local_state(engine).items():
        for piece in engine.slices_of(dist.get_rank()):
            if piece.local_name not in tensors:
                continue
            own, whole = tensors[piece.local_name][indices(piece.local_box)], expected[kind][piece.hf_name]
            assert torch.equal(own, whole[indices(piece.hf_box)]), f"{kind} of {piece.local_name}"


def save_now(root: Path, step: int, engine: MegatronEngine, keep: int) -> Path:
    CheckpointWriter(root, keep, is_async=False).save(step, engine, PROGRESS)
    return checkpoint.directory_of(root, step)


def save(directory: Path) -> None:
    """Two steps, a checkpoint, two more, for every dtype; then die in the middle of the next checkpoint."""
    rank = dist.get_rank()
    with groups(SAVED_AT) as layout:
        for dtype in DTYPES:
            engine, root = new_engine(SAVED_AT, layout, dtype, directory), directory / dtype
            follow(SAVED_AT, layout, engine, SAVED_STEP)
            torch.manual_seed(100 + rank)
            saved = save_now(root, SAVED_STEP, engine, keep=2)
            assert saved == checkpoint.directory_of(root, SAVED_STEP) and checkpoint.damage(saved) is None
            record: dict[str, Any] = {"random": gather_objects(torch.rand(4)), "state": whole_state(engine)}
            record["steps"] = follow(SAVED_AT, layout, engine, TOTAL_STEPS - SAVED_STEP)
            record["end"] = whole_state(engine)
            changed = [
                n for n, t in record["end"]["weight"].items() if not torch.equal(t, record["state"]["weight"][n])
            ]
            assert len(changed) == len(record["end"]["weight"]), "the steps after the checkpoint change every weight"
            if rank == 0:
                torch.save(record, directory / f"{dtype}.pt")
        rotate(engine, directory / "rotation")
        save_before_any_step(layout, directory)
        dist.barrier()
        if rank == 0:
            print("RECORDED", flush=True)
            Path.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment, method-assign]
        save_now(directory / "float32", TOTAL_STEPS, engine, keep=2)


def save_before_any_step(layout: ParallelLayout, directory: Path) -> None:
    """When all steps were skipped there is no optimizer state yet; what is resumed goes on as if it had run on."""
    engine, resumed = (new_engine(SAVED_AT, layout, "float32", directory) for _ in range(2))
    checkpoint.load(save_now(directory / "before_any_step", 1, engine, keep=0), resumed)
    expected = follow(SAVED_AT, layout, engine, SAVED_STEP)
    assert follow(SAVED_AT, layout, resumed, SAVED_STEP) == expected
    assert_same_state(resumed, whole_state(engine))


def rotate(engine: MegatronEngine, root: Path) -> None:
    """Which checkpoints are left after each save."""

    def left_after(step: int, keep: int) -> list[int]:
        saved = save_now(root, step, engine, keep)
        dist.barrier()
        assert checkpoint.damage(saved) is None, f"what was just saved as step {step} is not there"
        assert not [p.name for p in root.iterdir() if p.name.startswith(".")], "nothing temporary is left"
        steps = [json.loads((p / PROGRESS_FILE).read_text())["step"] for p in checkpoint.all_checkpoints(root)]
        dist.barrier()
        return steps

    assert [left_after(step, 0) for step in (1, 2, 3)] == [[1], [2, 1], [3, 2, 1]]
    assert left_after(4, 2) == [4, 3]
    assert left_after(4, 2) == [4, 3], "the same step again replaces it"
    if dist.get_rank() == 0:
        checkpoint.set_aside(root, after=None)  # as a run does that starts again
    dist.barrier()
    assert left_after(1, 2) == [1]


def resume(directory: Path, cases: list[Case]) -> None:
    for case in cases:
        with groups(case) as layout:
            for dtype in DTYPES:
                resume_at(case, layout, dtype, directory)
            refuse(case, layout, directory)
        if dist.get_rank() == 0:
            print(f"RESUMED {case.name}", flush=True)


def resume_at(case: Case, layout: ParallelLayout, dtype: str, directory: Path) -> None:
    record: dict[str, Any] = torch.load(directory / f"{dtype}.pt")
    engine = new_engine(case, layout, dtype, directory)
    found, sentences = checkpoint.find(directory / dtype, "auto")
    assert found == checkpoint.directory_of(directory / dtype, SAVED_STEP) and sentences == []
    torch.manual_seed(0)
    progress = checkpoint.load(found, engine)
    assert {key: progress[key] for key in (*PROGRESS, "step")} == {**PROGRESS, "step": SAVED_STEP}
    if dist.get_world_size() == SAVED_AT.num_ranks:
        assert torch.equal(torch.rand(4), record["random"][dist.get_rank()]), "random state"
    assert_same_state(engine, record["state"])
    steps = follow(case, layout, engine, TOTAL_STEPS - SAVED_STEP)
    if case == SAVED_AT:
        assert steps == record["steps"], (steps, record["steps"])
        assert_same_state(engine, record["end"])
    elif dtype == "float32":
        for own, expected in zip(steps, record["steps"], strict=True):
            errors = {key: abs(own[key] - expected[key]) / expected[key] for key in expected}
            assert max(errors.values()) < TOLERANCE, errors


def refuse(case: Case, layout: ParallelLayout, directory: Path) -> None:
    """Every rank gets a sentence: another model, and content that cannot be read."""
    whole = checkpoint.directory_of(directory / "float32", SAVED_STEP)
    other = new_engine(case, layout, "float32", directory, model="other_model")
    before = {name: p.detach().clone() for name, p in other.policy.parameters.items()}
    expect_input_error(lambda: checkpoint.load(whole, other), "is of another model: num_layers is 4 there and 2")
    assert all(torch.equal(before[name], p) for name, p in other.policy.parameters.items())
    engine = new_engine(case, layout, "float32", directory)
    for name in (f"{WEIGHTS}/.metadata", f"{WEIGHTS}/__0_0.distcp", checkpoint.GENERATORS):
        garbled = directory / f"garbled_{case.name}_{Path(name).name}"
        if dist.get_rank() == 0:
            shutil.copytree(whole, garbled)
            (garbled / name).write_bytes(bytes((garbled / name).stat().st_size))
        dist.barrier()
        assert checkpoint.damage(garbled) == f"file {name} is not what was written"
        expect_input_error(lambda path=garbled: checkpoint.load(path, engine), "cannot be read")  # type: ignore[misc]


def expect_input_error(action: Callable[[], object], sentence: str) -> None:
    try:
        action()
    except InputError as error:
        assert sentence in str(error), error
        return
    raise AssertionError(f"no error that says {sentence!r}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", choices=("save", "resume"))
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--cases", type=json.loads, default=[], help="JSON list of the arguments of Case")
    arguments = parser.parse_args()
    dist.init_process_group(platform.current().backend)
    if arguments.mode == "save":
        if dist.get_rank() == 0:
            tiny_models.make(FAMILY).save_pretrained(arguments.dir / "model")
            tiny_models.make(FAMILY, num_layers=2).save_pretrained(arguments.dir / "other_model")
        dist.barrier()
        save(arguments.dir)
    else:
        resume(arguments.dir, [Case(**keys) for keys in arguments.cases])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
