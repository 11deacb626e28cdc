"""Started by torchrun: experts that the trainer chose before an update are replayed after it, at every layout.

Prints ``ROUTING <layout> <recomputation> ok``, for every layout and every recomputation of activations.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.microbatch import Figures, Microbatch, TokenStats
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.layout import ParallelLayout
from tests.models import tiny_models
from tests.models.engine_support import build_engine, groups, loss_of, pack_for_rank, run_config
from tests.models.layouts import Case, recomputations
from tests.models.parity_reference import OBJECTIVES, make_sequences

FAMILY, NUM_STEPS = "qwen3_moe", 2
OBJECTIVE = OBJECTIVES["rl"]
Gradients = dict[str, torch.Tensor]


def num_differing(one: list[TokenStats], other: list[TokenStats]) -> int:
    """How many (token, layer) pairs have other sets of experts, over all ranks."""
    number = 0
    for a, b in zip(one, other, strict=True):
        assert a.own_experts is not None and b.own_experts is not None and a.own_experts.keys() == b.own_experts.keys()
        pairs = ((x.sort().values, b.own_experts[layer].sort().values) for layer, x in a.own_experts.items())
        number += sum(int((x != y).any(-1).sum()) for x, y in pairs)
    return sum(gather_objects(number))


def check_layers(engine: MegatronEngine, layout: ParallelLayout, stats: list[TokenStats]) -> None:
    """Every layer of the model is on one of the pipeline's ranks, and every micro-batch has all layers of this rank."""
    own = {tuple(sorted(s.own_experts or {})) for s in stats}
    assert len(own) == 1, own
    found = {layer for part in gather_objects(*own) for layer in part}
    assert found == set(range(engine.policy.shape.num_layers)), found


def gradients_of(engine: MegatronEngine, microbatches: list[Microbatch], stats: list[TokenStats]) -> Gradients:
    """Of the whole batch; the update's own forward pass has the log-probabilities of ``stats``."""
    expected = {m.sequence_indices: s.logprobs for m, s in zip(microbatches, stats, strict=True)}
    loss = loss_of(OBJECTIVE, make_sequences(OBJECTIVE, tiny_models.vocab_size(FAMILY)))

    def watched(stats: TokenStats, microbatch: Microbatch) -> tuple[torch.Tensor, Figures]:
        assert torch.equal(stats.logprobs.detach(), expected[microbatch.sequence_indices]), "another forward pass"
        return loss(stats, microbatch)

    engine.forward_backward(microbatches, watched)
    return {name: parameter.main_grad.clone() for name, parameter in engine.policy.parameters.items()}


def check(case: Case, layout: ParallelLayout, recomputation: str, directory: Path, first: Gradients) -> None:
    config = run_config(case, OBJECTIVE)
    config.memory.recompute = recomputation  # type: ignore[assignment]
    config.memory.recompute_modules = ["moe"] if recomputation == "selective" else None
    config.optimizer.lr = 0.05  # so that tokens are sent to other experts
    engine = build_engine(config, layout, directory, NUM_STEPS)
    sequences = make_sequences(OBJECTIVE, tiny_models.vocab_size(FAMILY))
    microbatches = pack_for_rank(case, layout, sequences)
    before = engine.token_stats(microbatches, record_experts=True)
    assert all(s.own_experts is None for s in engine.token_stats(microbatches))
    check_layers(engine, layout, before)
    engine.forward_backward(microbatches, loss_of(OBJECTIVE, sequences))
    engine.optimizer_step()
    replaying = [m.replace(own_experts=s.own_experts) for m, s in zip(microbatches, before, strict=True)]
    after = engine.token_stats(replaying, record_experts=True)
    free = engine.token_stats(microbatches, record_experts=True)
    assert num_differing(before, free) > 0, "no token is sent to other experts: nothing is tested"
    assert num_differing(before, after) == 0, "the experts are not those that were recorded"
    gradients = gradients_of(engine, replaying, after)
    for name, gradient in gradients.items():
        difference = (gradient - first.setdefault(name, gradient)).abs().max()
        assert difference <= 1e-6 * gradient.abs().max(), f"{name} has another gradient: {difference}"
    routers = [gradient for name, gradient in gradients.items() if "router" in name]
    assert routers and all(bool(gradient.any()) for gradient in routers), "a router learns nothing"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=json.loads, required=True, help="JSON list of the arguments of Case")
    parser.add_argument("--dir", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group(platform.current().backend)
    if dist.get_rank() == 0:
        tiny_models.make(FAMILY).save_pretrained(arguments.dir)
    dist.barrier()
    for case in (Case(**keys) for keys in arguments.cases):
        first: Gradients = {}
        with groups(case) as layout:
            for recomputation in recomputations(case):
                check(case, layout, recomputation, arguments.dir, first)
                if dist.get_rank() == 0:
                    print(f"ROUTING {case.name} {recomputation} ok", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
