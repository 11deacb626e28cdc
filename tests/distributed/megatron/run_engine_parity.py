"""Started by torchrun: the Megatron engine against transformers, for every family, at every layout of this many ranks.

Prints one line of JSON after ``PARITY`` per layout, family and objective on rank 0: figure -> [largest error over all
ranks, where it is].
"""

from __future__ import annotations

import argparse
import functools
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from mega_rl import platform
from mega_rl.bridge.slices import indices
from mega_rl.config.schema.learning import RouterConfig
from mega_rl.data.packing import unpack
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.model.context import in_pack_order, local_input
from mega_rl.microbatch import Microbatch, Sequence
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.layout import ParallelLayout
from tests.models import tiny_models
from tests.models.engine_support import (
    build_engine,
    groups,
    loss_of,
    owned_span,
    pack_for_rank,
    run_config,
    slow_gathers,
    total_loss,
)
from tests.models.layouts import LATENT, MIXTURE, VISION, VISION_MIXTURE, Case
from tests.models.parity_reference import (
    NUM_STEPS,
    OBJECTIVES,
    Reference,
    RouterLosses,
    make_sequences,
    train,
    with_pictures,
)


class Errors:
    """The largest error of every figure on this rank, and where it is."""

    def __init__(self) -> None:
        self.worst: dict[str, tuple[float, str]] = {}

    def note(self, figure: str, value: float, where: str = "") -> None:
        assert value == value, f"{figure} is not a number at {where}"
        self.worst[figure] = max(self.worst.get(figure, (0.0, "")), (value, where))

    def of_all_ranks(self) -> dict[str, tuple[float, str]]:
        parts = gather_objects(self.worst)
        return {name: max(part[name] for part in parts if name in part) for name in sorted(set().union(*parts))}


def sequences_of(family: str, objective: str) -> list[Sequence]:
    experts = tiny_models.experts(family) if family in (*MIXTURE, *VISION_MIXTURE) and objective == "rl" else None
    is_text = family not in (*VISION, *VISION_MIXTURE)
    num_text = tiny_models.vocab_size(family) - (0 if is_text else len(tiny_models.picture_tokens(family)))
    sequences = make_sequences(OBJECTIVES[objective], num_text, experts)
    if is_text:
        return sequences
    return with_pictures(sequences, tiny_models.shape(family), tiny_models.picture_tokens(family))


def router_losses(family: str, objective: str) -> RouterLosses:
    """Large enough to be seen: in the gradient of a router they weigh as much as the objective."""
    if objective != "sft" or family not in (*MIXTURE, *LATENT, *VISION_MIXTURE):
        return RouterLosses()
    return RouterLosses(aux_loss=0.3, z_loss=0.02, bias_update_rate=0.01 if family in LATENT else 0.0)


def save_references(families: list[str], directory: Path) -> None:
    """The models, and every rank its share of what transformers says of them."""
    pairs = [(family, objective) for family in families for objective in OBJECTIVES]
    for family, objective in pairs[dist.get_rank() :: dist.get_world_size()]:
        sequences, losses = sequences_of(family, objective), router_losses(family, objective)
        reference = train(tiny_models.make(family), sequences, OBJECTIVES[objective], losses)
        torch.save(reference, directory / f"{family}_{objective}.pt")
    if dist.get_rank() == 0:  # transformers writes nothing on the others
        for family in families:
            tiny_models.make(family).save_pretrained(directory / family)
    dist.barrier()


@functools.cache
def reference_of(family: str, objective: str, directory: Path) -> Reference:
    reference: Reference = torch.load(directory / f"{family}_{objective}.pt", weights_only=False)
    return reference


def local_tensors(engine: MegatronEngine, whole: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Hugging Face tensors as this rank's parameters; vocabulary padding is zero."""
    tensors = {name: torch.zeros(p.shape) for name, p in engine.policy.parameters.items()}
    for piece in engine.slices_of(dist.get_rank()):
        if piece.local_name in tensors:  # frozen weights are none
            tensors[piece.local_name][indices(piece.local_box)] = whole[piece.hf_name][indices(piece.hf_box)]
    return tensors


def is_expert(parameter: torch.nn.Parameter) -> bool:
    return not getattr(parameter, "allreduce", True)


def compare_gradients(engine: MegatronEngine, gradients: dict[str, torch.Tensor], errors: Errors) -> None:
    """Every element once over the data-parallel ranks, vocabulary padding included, which must have no gradient."""
    scale = local_tensors(engine, {name: torch.full_like(g, float(g.abs().max())) for name, g in gradients.items()})
    num_owned = torch.zeros(2, dtype=torch.int64)  # of dense parameters, of experts, which have their own replicas
    for name, full in local_tensors(engine, gradients).items():
        parameter = engine.policy.parameters[name]
        start, end = owned_span(engine, parameter)
        num_owned[int(is_expert(parameter))] += end - start
        if start == end:
            continue
        own, expected = parameter.main_grad.flatten()[start:end], full.flatten()[start:end]
        largest = scale[name].max().clamp(min=torch.finfo(torch.float32).tiny)  # 0 of an expert that no token went to
        errors.note("gradients", float((own - expected).abs().max() / largest), name)
    dist.all_reduce(num_owned[0], group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    dist.all_reduce(num_owned[1], group=parallel_state.get_expert_data_parallel_group())
    assert int(num_owned.sum()) == sum(p.numel() for p in engine.policy.parameters.values()), "gradients left out"


def compare_logits(
    engine: MegatronEngine, layout: ParallelLayout, m: Microbatch, expected: list[torch.Tensor], errors: Errors
) -> None:
    if layout.pipeline > 1:
        return  # the log-probabilities of all stages are compared
    with torch.no_grad():
        group, method = parallel_state.get_context_parallel_group(), engine.policy.spec.parallel.context_method
        own = local_input(m, m.cu_seqlens.tolist(), group, layout.tensor, method)
        own.packing.routing = engine.policy.routing_of(m, own)
        (model,) = engine.policy.chunks
        local = model(own.token_ids, own.position_ids, None, packed_seq_params=own.packing)
        local = tensor_parallel.gather_from_tensor_model_parallel_region(local)[0]
        logits = in_pack_order(local.t(), own).t()
    for index, rows in zip(m.sequence_indices, unpack(logits, m), strict=True):
        wanted = expected[index]
        errors.note("logits", float((rows[:, : wanted.shape[1]] - wanted).abs().max()), f"sequence {index}")


def compare_statistics(engine: MegatronEngine, ms: list[Microbatch], reference: Reference, errors: Errors) -> None:
    for m, stats in zip(ms, engine.token_stats(ms), strict=True):
        for figure, values, expected in (
            ("logprobs", stats.logprobs, reference.logprobs),
            ("entropy", stats.entropy, reference.entropy),
        ):
            for index, own in zip(m.sequence_indices, unpack(values, m), strict=True):
                errors.note(figure, float((own - expected[index]).abs().max()), f"sequence {index}")


def check_skipped_step(engine: MegatronEngine, ms: list[Microbatch], loss_function: Any) -> None:
    """A gradient that is infinite on the last data-parallel rank alone changes no weight on any rank."""
    is_last = parallel_state.get_data_parallel_rank() == parallel_state.get_data_parallel_world_size() - 1

    def broken(stats: Any, m: Microbatch) -> Any:
        loss, figures = loss_function(stats, m)
        return loss * (float("inf") if is_last else 1.0), figures

    before = {name: p.detach().clone() for name, p in engine.policy.parameters.items()}
    engine.forward_backward(ms, broken)
    assert engine.optimizer_step().skipped, "a gradient that is not finite was applied"
    for name, parameter in engine.policy.parameters.items():
        assert torch.equal(before[name], parameter), f"{name} changed in a skipped step"


def check(case: Case, layout: ParallelLayout, family: str, objective_name: str, directory: Path) -> None:
    objective = OBJECTIVES[objective_name]
    sequences, reference = sequences_of(family, objective_name), reference_of(family, objective_name, directory)
    config = run_config(case, objective)
    config.router = RouterConfig(**asdict(router_losses(family, objective_name)))
    config.model.vision.freeze = config.model.vision.freeze_merger = False
    config.memory.recompute = case.recompute
    engine = build_engine(config, layout, directory / family, NUM_STEPS)
    microbatches, errors = pack_for_rank(case, layout, sequences), Errors()
    compare_logits(engine, layout, microbatches[0], reference.logits, errors)
    compare_statistics(engine, microbatches, reference, errors)
    loss_function = loss_of(objective, sequences)
    for index, step in enumerate(reference.steps):
        reports = engine.forward_backward(microbatches, loss_function)
        errors.note("loss", abs(total_loss(layout, reports) - step.loss) / abs(step.loss))
        compare_gradients(engine, step.gradients, errors)
        stats = engine.optimizer_step(next_is_forward_backward=index + 1 < len(reference.steps))
        assert not stats.skipped
        errors.note("norm", abs(stats.grad_norm - step.norm) / step.norm)
    for name, expected in local_tensors(engine, reference.weights).items():
        own = engine.policy.parameters[name].detach()
        errors.note("weights", float((own - expected).abs().max()), name)
    for piece in engine.slices_of(dist.get_rank()):
        if (bias := engine.policy.frozen.get(piece.local_name)) is not None:
            errors.note("weights", float((bias - reference.weights[piece.hf_name]).abs().max()), piece.hf_name)
    check_skipped_step(engine, microbatches, loss_function)
    figures = errors.of_all_ranks()
    if dist.get_rank() == 0:
        line = {"layout": case.name, "family": family, "objective": objective_name, "errors": figures}
        print(f"PARITY {json.dumps(line)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=json.loads, required=True, help="JSON list of the arguments of Case")
    parser.add_argument("--dir", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group(platform.current().backend)
    cases = [Case(**keys) for keys in arguments.cases]
    save_references(sorted({family for case in cases for family in case.families}), arguments.dir)
    for case in cases:
        with groups(case) as layout, slow_gathers(case):
            for family in case.families:
                for objective in OBJECTIVES:
                    check(case, layout, family, objective, arguments.dir)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
