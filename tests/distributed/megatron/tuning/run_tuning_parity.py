"""Started by torchrun: engines that train a part of a model against transformers, at many layouts.

Prints one line of JSON after ``TUNED`` per case on rank 0: figure -> [largest error over all ranks, where it is].
"""

from __future__ import annotations

import argparse
import functools
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.bridge.mapping.tuning import TuningPlan, tuning_plan
from mega_rl.bridge.series import slices_of
from mega_rl.bridge.slices import Slice, indices
from mega_rl.config.schema.learning import AdapterConfig, TuningConfig
from mega_rl.config.schema.sections import RunConfig
from mega_rl.data.packing import unpack
from mega_rl.megatron.checkpoint import checkpoint
from mega_rl.megatron.checkpoint.saving import CheckpointWriter
from mega_rl.megatron.engine import LossFunction, MegatronEngine
from mega_rl.megatron.reference import WithoutAdapters
from mega_rl.microbatch import Figures, Microbatch, Sequence, TokenStats
from mega_rl.models.shape import ModelShape, read_model_shape
from mega_rl.observe.heartbeat import HEART
from mega_rl.observe.work import WORK
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.planning.state import stage_parameters, trainer_state
from mega_rl.stages.weights.adapters import local_reader, lora_merge
from tests.distributed.megatron.run_engine_parity import Errors
from tests.distributed.megatron.tuning.tuning_cases import FOUR, TWO, VARIANTS, TuningCase
from tests.distributed.megatron.tuning.tuning_reference import NUM_STEPS, Reference, train
from tests.models import tiny_models
from tests.models.engine_support import (
    build_engine,
    groups,
    loss_of,
    owned_span,
    pack_for_rank,
    run_config,
    slow_gathers,
)
from tests.models.parity_reference import OBJECTIVES, make_sequences, num_learnt

BUCKET_BYTES = 1 << 16
OBJECTIVE = OBJECTIVES["rl"]  # advantages, entropy, a temperature


def settings_of(variant: str) -> TuningConfig:
    keys = dict(VARIANTS[variant])
    return TuningConfig(**keys | {"adapter": AdapterConfig(**keys.get("adapter", {}))})


def config_of(tuned: TuningCase) -> RunConfig:
    config = run_config(tuned.case, OBJECTIVE, tuned.dtype)
    config.tuning, config.memory.recompute = settings_of(tuned.variant), tuned.recompute
    return config


def sequences_of(family: str) -> list[Sequence]:
    return make_sequences(OBJECTIVE, tiny_models.vocab_size(family))


def save_references(cases: tuple[TuningCase, ...], directory: Path) -> None:
    """The models, and every rank its share of what transformers says of them."""
    if dist.get_rank() == 0:
        for family in sorted({tuned.family for tuned in cases}):
            tiny_models.make(family).save_pretrained(directory / family)
    dist.barrier()
    pairs = sorted({(tuned.family, tuned.variant) for tuned in cases})
    for family, variant in pairs[dist.get_rank() :: dist.get_world_size()]:
        shape = read_model_shape(directory / family)
        plan = tuning_plan(settings_of(variant), shape)
        reference = train(tiny_models.make(family), shape, plan, sequences_of(family), OBJECTIVE)
        torch.save(reference, directory / f"{family}_{variant}.pt")
    dist.barrier()


@functools.cache
def reference_of(family: str, variant: str, directory: Path) -> Reference:
    reference: Reference = torch.load(directory / f"{family}_{variant}.pt", weights_only=False)
    return reference


def trained_slices(engine: MegatronEngine, plan: TuningPlan) -> list[Slice]:
    """What this rank trains, as slices of Hugging Face tensors and of the adapters'."""
    rank = dist.get_rank()
    whole = [piece for piece in engine.slices_of(rank) if piece.hf_name in plan.trained]
    return whole + slices_of(engine.policy.adapter_series_of(rank))


def fill(engine: MegatronEngine, pieces: list[Slice], values: dict[str, torch.Tensor]) -> None:
    """Other values for what is trained, as a step would leave them."""
    with torch.no_grad():
        for piece in pieces:
            if piece.hf_name in values:
                place = engine.policy.local(piece.local_name, piece.local_box)
                place.copy_(values[piece.hf_name][indices(piece.hf_box)])
    engine.optimizer.reload_model_params()


def all_logprobs(engine: MegatronEngine | WithoutAdapters, ms: list[Microbatch]) -> dict[int, torch.Tensor]:
    return {
        index: own
        for m, stats in zip(ms, engine.token_stats(ms), strict=True)
        for index, own in zip(m.sequence_indices, unpack(stats.logprobs, m), strict=True)
    }


def compare_logprobs(found: dict[int, torch.Tensor], wanted: list[torch.Tensor], name: str, errors: Errors) -> None:
    for index, own in found.items():
        errors.note(name, float((own - wanted[index]).abs().max()), f"sequence {index}")


def compare_gradients(
    engine: MegatronEngine, pieces: list[Slice], gradients: dict[str, torch.Tensor], errors: Errors
) -> None:
    """Every trained element once; each trained parameter lies in slices, but for the padding of the vocabulary."""
    parameters = {name: p for name, p in engine.policy.parameters.items() if p.requires_grad}
    assert {piece.local_name for piece in pieces} == set(parameters), "trained and described are not the same"
    for piece in pieces:
        parameter = parameters[piece.local_name]
        start, end = owned_span(engine, parameter)
        is_owned = torch.zeros(parameter.numel(), dtype=torch.bool)
        is_owned[start:end] = True
        is_owned = is_owned.view(parameter.shape)[indices(piece.local_box)]
        whole = gradients[piece.hf_name]
        found = parameter.main_grad[indices(piece.local_box)] - whole[indices(piece.hf_box)]
        if is_owned.any():
            worst = float((found.abs() * is_owned).max() / whole.abs().max().clamp(min=1e-12))
            errors.note("gradients", worst, piece.hf_name)


def compare_values(
    engine: MegatronEngine, pieces: list[Slice], values: dict[str, torch.Tensor], name: str, errors: Errors
) -> None:
    for piece in pieces:
        own = engine.policy.local(piece.local_name, piece.local_box)
        errors.note(name, float((own - values[piece.hf_name][indices(piece.hf_box)]).abs().max()), piece.hf_name)


def check_state(engine: MegatronEngine, config: RunConfig, shape: ModelShape, layout: ParallelLayout) -> None:
    """Gradients and optimizer hold what is trained and nothing else, in the bytes that the plan says."""
    rank = dist.get_rank()
    held = stage_parameters(config, shape, layout, layout.coordinates(rank).pipeline, engine.policy.plan)
    planned = trainer_state(config, layout, rank, held, has_reference=False)
    own = [buffer for chunk in engine.wrapped for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    gradients = sum(buffer.grad_data.numel() * buffer.grad_data.element_size() for buffer in own)
    frozen = [p for p in engine.policy.parameters.values() if not p.requires_grad]
    weights = sum(b.param_data.numel() * b.param_data.element_size() for b in own)
    weights += sum(p.numel() * p.element_size() for p in frozen)
    assert planned.gradients == gradients, (planned.gradients, gradients)
    assert planned.weights == weights, (planned.weights, weights)
    chain = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    states = [s for part in chain if part.optimizer is not None for s in part.optimizer.state.values()]
    moments = sum(s[kind].numel() * s[kind].element_size() for s in states for kind in ("exp_avg", "exp_avg_sq"))
    assert planned.moments == moments, (planned.moments, moments)
    if engine.policy.spec.dtype != torch.float32:
        masters = [p for part in chain for group in part.optimizer.param_groups for p in group["params"]]
        assert planned.masters == sum(p.numel() * p.element_size() for p in masters)


def check_work(engine: MegatronEngine, layout: ParallelLayout, sequences: list[Sequence]) -> None:
    """Every sequence is counted once by a whole replica of the model, its learnt tokens by the head, no padding."""
    own = WORK.collect((HEART.phase,)) * layout.data / layout.world_size
    lengths = [sequence.loss_mask.numel() for sequence in sequences]
    counted, expected = sum(gather_objects(own)), engine.policy.flops.of(lengths, True, num_learnt(sequences))
    assert math.isclose(counted, expected, rel_tol=1e-9), (counted, expected)


def check_checkpoint(tuned: TuningCase, engine: MegatronEngine, reference: Reference, directory: Path) -> None:
    """The first case of a variant saves what it has after one step; each one resumes from it, at its own layout."""
    root = directory / f"checkpoints_{tuned.family}_{tuned.variant}_{tuned.dtype}"
    if not root.exists():
        dist.barrier()
        writer = CheckpointWriter(root, 0, is_async=False)
        writer.save(1, engine, {"data": {}, "validations": {}})
        writer.finish()
    dist.barrier()
    with torch.no_grad():
        for parameter in engine.policy.parameters.values():
            if parameter.requires_grad:
                parameter.fill_(7.0)
    checkpoint.load(checkpoint.directory_of(root, 1), engine)


def check(tuned: TuningCase, layout: ParallelLayout, directory: Path) -> dict[str, tuple[float, str]]:
    reference = reference_of(tuned.family, tuned.variant, directory)
    sequences, config = sequences_of(tuned.family), config_of(tuned)
    engine = build_engine(config, layout, directory / tuned.family, NUM_STEPS)
    shape, plan, errors = engine.policy.shape, engine.policy.plan, Errors()
    ms, pieces = pack_for_rank(tuned.case, layout, sequences), trained_slices(engine, plan)
    start = all_logprobs(engine, ms)  # B is zero: the model itself
    reference_model = WithoutAdapters(engine.policy)
    assert reference_model.differing(engine.policy) is None
    compare_logprobs(start, reference.base, "base", errors)
    fill(engine, pieces, reference.factors)
    compare_logprobs(all_logprobs(engine, ms), reference.logprobs, "logprobs", errors)
    if plan.adapters.ranks:
        assert any(gather_objects(reference_model.differing(engine.policy) is not None))
        without = all_logprobs(reference_model, ms)
        same = all(torch.equal(without[index], start[index]) for index in start)
        assert same or plan.trained, "adapters off are not the model itself"
    read = local_reader(engine.policy)
    if plan.adapters.ranks:
        read = lora_merge(engine.policy, engine.policy.spec.dtype, BUCKET_BYTES).for_sync(read, version=0).read
    for piece in engine.slices_of(dist.get_rank()):
        if piece.hf_name in reference.merged:
            own = read(piece.local_name, piece.hf_name, piece.hf_box, piece.local_box)
            wanted = reference.merged[piece.hf_name][indices(piece.hf_box)]
            errors.note("merged", float((own - wanted).abs().max()), piece.hf_name)
    for number, step in enumerate(reference.steps):
        WORK.collect(())
        engine.forward_backward(ms, loss_of(OBJECTIVE, sequences))
        check_work(engine, layout, sequences)
        compare_gradients(engine, pieces, step.gradients, errors)
        stats = engine.optimizer_step()
        assert not stats.skipped
        errors.note("norm", abs(stats.grad_norm - step.norm) / step.norm, f"step {number}")
        compare_values(engine, pieces, step.values, "weights", errors)
        if number == 0:
            check_state(engine, config, shape, layout)
            check_checkpoint(tuned, engine, reference, directory)
            compare_values(engine, pieces, step.values, "resumed", errors)
    check_skipped_step(engine, ms, loss_of(OBJECTIVE, sequences), {piece.hf_name for piece in pieces})
    return errors.of_all_ranks()


def check_skipped_step(engine: MegatronEngine, ms: list[Microbatch], loss: LossFunction, own: set[str]) -> None:
    """A gradient that is not finite changes nothing, and what it is of is named as what was trained."""

    def broken(stats: TokenStats, m: Microbatch) -> tuple[torch.Tensor, Figures]:
        value, figures = loss(stats, m)
        return value * float("inf"), figures

    before = {name: p.detach().clone() for name, p in engine.policy.parameters.items()}
    engine.forward_backward(ms, broken)
    stats = engine.optimizer_step()
    assert stats.skipped and stats.bad_parameter in set().union(*gather_objects(own)), stats
    assert all(torch.equal(before[name], p) for name, p in engine.policy.parameters.items())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    dist.init_process_group(platform.current().backend)
    cases = tuple(t for t in (TWO if dist.get_world_size() == 2 else FOUR) if arguments.only in t.name)
    save_references(cases, arguments.dir)
    for tuned in cases:
        with groups(tuned.case) as layout, slow_gathers(tuned.case):
            errors: Any = check(tuned, layout, arguments.dir)
        if dist.get_rank() == 0:
            print(f"TUNED {json.dumps({'case': tuned.name, 'errors': errors})}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
