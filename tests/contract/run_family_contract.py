"""Started by torchrun: log-probabilities, entropies, gradients and values of every family against transformers'.

Prints ``CONTRACT {json}`` on rank 0: family -> figure -> largest error over all ranks, in float32, relative to the
largest value.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.mapping.tensors import SCORE, hf_tensors, roles
from mega_rl.bridge.slices import indices, whole_box
from mega_rl.config.schema.sections import MemoryConfig, OptimizerConfig, ParallelConfig
from mega_rl.data.packing import pack
from mega_rl.megatron.engine import MegatronEngine, Optimization
from mega_rl.megatron.model.spec import TrainerSpec
from mega_rl.megatron.model.value import NewScore
from mega_rl.megatron.policy import MegatronPolicy, initialize_groups
from mega_rl.microbatch import Figures, Microbatch, Sequence, TokenStats
from mega_rl.models.shape import read_model_shape, value_shape
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.layout import ParallelLayout
from tests.models import families

LENGTHS = (7, 19, 3, 12, 1, 22)


def make_sequences() -> list[Sequence]:
    generator = torch.Generator().manual_seed(1)
    drawn = [torch.randint(0, families.CONTRACT.common["vocab_size"], (n + 1,), generator=generator) for n in LENGTHS]
    return [Sequence(ids, torch.ones(len(ids) - 1), torch.randn(len(ids) - 1, generator=generator)) for ids in drawn]


def objective(logprobs: Tensor, entropy: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    return -(advantages * logprobs + 0.1 * mask * entropy).sum() / sum(LENGTHS)


def reference(family: str, sequences: list[Sequence]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """transformers' log-probabilities and entropies [all positions], and gradients by checkpoint name."""
    model, logprobs, entropies = families.make(family), [], []
    for s in sequences:
        table = torch.log_softmax(model(s.token_ids[None, :-1]).logits[0], dim=-1)
        logprobs.append(table.gather(1, s.token_ids[1:, None])[:, 0])
        entropies.append(-(table.exp() * table).sum(-1))
        assert s.advantages is not None
        objective(logprobs[-1], entropies[-1], s.advantages, s.loss_mask).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return torch.cat(logprobs).detach(), torch.cat(entropies).detach(), families.as_saved(gradients)


def loss_function(stats: TokenStats, m: Microbatch) -> tuple[Tensor, Figures]:
    assert m.advantages is not None
    return objective(stats.logprobs, stats.entropy, m.advantages, m.loss_mask), Figures()


def error(own: Tensor, expected: Tensor) -> float:
    return float((own - expected).abs().max() / expected.abs().max().clamp_min(1e-3))


def compare_values(family: str, engine: MegatronEngine, directory: Path, m: Microbatch) -> float:
    """The largest error of the values that the model with a new head gives to all positions."""
    base, shape = families.make(family), value_shape(engine.policy.shape)
    head = NewScore(HFReader(directory), shape.hidden_size, seed=2)
    base.config.num_labels, base.config.pad_token_id = 1, 0
    model = getattr(transformers, shape.architecture)(base.config)
    model.model.load_state_dict(base.model.state_dict())
    weight = head.read(SCORE, whole_box((1, shape.hidden_size)))
    with torch.no_grad():
        hidden = [model.model(s.token_ids[None, :-1]).last_hidden_state[0] for s in make_sequences()]
    policy = MegatronPolicy(engine.policy.spec, shape, engine.policy.layout, torch.device("cpu"))
    policy.load_huggingface(head)
    (values,) = policy.token_values([m])
    return error(values[: sum(LENGTHS)], torch.cat(hidden) @ weight[0])


def check(family: str, directory: Path, parallel: ParallelConfig, layout: ParallelLayout) -> dict[str, float]:
    sequences = make_sequences()
    logprobs, entropy, gradients = reference(family, sequences)
    shape = read_model_shape(directory)
    if shape.mixture is None:
        parallel = replace(parallel, expert_tensor=None)
    spec = TrainerSpec(torch.float32, parallel, MemoryConfig(), temperature=1.0, chunk_tokens=16)
    device, weights = torch.device("cpu"), HFReader(directory)
    policy = MegatronPolicy(spec, shape, layout, device)
    engine = MegatronEngine(policy, weights, Optimization(OptimizerConfig(), 1))
    multiple = 4 * parallel.tensor
    m = pack(sequences, list(range(len(sequences))), pad_to_multiple=multiple, pad_token_id=0)
    figures = dict.fromkeys(("logprobs", "entropy", "gradients"), 0.0)
    (stats,) = engine.token_stats([m])
    figures["logprobs"] = error(stats.logprobs[: sum(LENGTHS)], logprobs)
    figures["entropy"] = error(stats.entropy[: sum(LENGTHS)], entropy)
    frozen = {name: weight.clone() for name, weight in engine.policy.frozen.items()}
    engine.forward_backward([m], loss_function)
    role = roles(shape)
    for piece in engine.slices_of(dist.get_rank()):
        if role[piece.hf_name] in ("router_bias", "vision"):
            continue  # no gradient on either side: these are texts alone
        own = engine.policy.parameters[piece.local_name].main_grad[indices(piece.local_box)]
        expected = gradients[piece.hf_name]
        scale = expected.abs().max().clamp_min(1e-3)
        wrong = float((own - expected[indices(piece.hf_box)]).abs().max() / scale)
        figures["gradients"] = max(figures["gradients"], wrong)
    assert not engine.optimizer_step().skipped
    for name, weight in frozen.items():
        assert torch.equal(weight, engine.policy.frozen[name]), f"a step moved {name}"
    if shape.tower is None:  # of which there are no value models
        figures["values"] = compare_values(family, engine, directory, m)
    covered = {piece.hf_name for rank in range(dist.get_world_size()) for piece in engine.slices_of(rank)}
    assert covered == set(hf_tensors(shape)), family
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--expert", type=int, default=1)
    parser.add_argument("--family", nargs="*", default=list(families.CONTRACT.own))
    arguments = parser.parse_args()
    dist.init_process_group(platform.current().backend)
    parallel = ParallelConfig(
        tensor=arguments.tensor,
        sequence=arguments.tensor > 1,
        expert=arguments.expert,
        expert_tensor=arguments.tensor // arguments.expert,
    )
    layout = ParallelLayout.of(parallel, dist.get_world_size())
    initialize_groups(layout, seed=1)
    figures = {}
    for family in arguments.family:
        parts = gather_objects(check(family, arguments.directory / family, parallel, layout))
        figures[family] = {name: max(part[name] for part in parts) for name in parts[0]}
    if dist.get_rank() == 0:
        print("CONTRACT", json.dumps(figures), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
