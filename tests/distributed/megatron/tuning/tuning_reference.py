"""What transformers and torch's autograd say of a tuned model: no adapter library and no Megatron here.

With adapters the model's weights are W + scale * B A, put in with ``torch.func.functional_call``, so that the gradients
of A and B come by autograd through the merged weights. With dropout a hook adds to every linear layer what its adapter
makes of its own input, as an adapter library does it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor

from mega_rl.bridge.mapping.adapter import adapter_tensors, names_of
from mega_rl.bridge.mapping.tuning import AdapterPlan, TuningPlan, module_of
from mega_rl.data.packing import pack
from mega_rl.megatron.tuning.dropout import column_keys, dropped, token_keys
from mega_rl.microbatch import Sequence
from mega_rl.models.shape import ModelShape
from tests.models.families import as_saved
from tests.models.parity_reference import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, Objective, num_learnt

NUM_STEPS = 2


@dataclass(frozen=True)
class Step:
    norm: float  # of the gradients of everything that is trained, before clipping
    gradients: dict[str, Tensor]  # before clipping
    values: dict[str, Tensor]  # afterwards


@dataclass(frozen=True)
class Reference:
    factors: dict[str, Tensor]  # of the adapters, at the start
    base: list[Tensor]  # [L] log-probabilities of every sequence without adapters; 0 where nothing is learnt
    logprobs: list[Tensor]  # [L] with them
    merged: dict[str, Tensor]  # the weights with the adapters of the start
    steps: list[Step]  # of AdamW, each from where the one before it ended


def random_factors(shape: ModelShape, plan: AdapterPlan) -> dict[str, Tensor]:
    """Large enough that every error shows."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: torch.randn(size, generator=generator) * (0.1 if ".lora_B." in name else size[1] ** -0.5)
        for name, size in adapter_tensors(shape, plan).items()
    }


def merge(weights: Mapping[str, Tensor], factors: Mapping[str, Tensor], plan: AdapterPlan) -> dict[str, Tensor]:
    """The adapted weights by their names in the checkpoint."""
    merged = {}
    for weight, rank in plan.ranks.items():
        a, b = names_of(weight)
        merged[weight] = weights[weight] + plan.scale(rank) * (factors[b] @ factors[a])
    return merged


def _as_in_memory(model: transformers.PreTrainedModel, saved: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The reverse of ``as_saved``: of every expert its own -> fused ones."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        prefix, _, part = name.rpartition(".experts.")
        experts = [f"{prefix}.experts.{number}" for number in range(len(parameter))] if prefix else []
        if part == "gate_up_proj":
            pairs = ((saved[f"{one}.gate_proj.weight"], saved[f"{one}.up_proj.weight"]) for one in experts)
            tensors[name] = torch.stack([torch.cat(pair) for pair in pairs])
        elif part == "down_proj":
            tensors[name] = torch.stack([saved[f"{one}.down_proj.weight"] for one in experts])
        else:
            tensors[name] = saved[name]
    return tensors


READ_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # of one input, which has one mask


def of_mask(weight: str, ranks: Mapping[str, int]) -> str:
    """The adapted weight whose columns the mask of a weight goes by: the first that reads the same input."""
    module = module_of(weight)
    prefix, _, own = module.rpartition(".")
    group = next((names for names in READ_TOGETHER if own in names), (own,))
    return next(name for name in (f"{prefix}.{one}.weight" for one in group) if name in ranks)


@contextmanager
def dropout(
    model: transformers.PreTrainedModel,
    plan: AdapterPlan,
    factors: Mapping[str, Tensor],
    s: Sequence,
    at: tuple[int, int],
) -> Iterator[None]:
    """Adapters beside the linear layers of a model that is given the sequence of place ``at[0]`` in step ``at[1]``."""
    place, step = at
    keys = token_keys(pack({place: s}, [place], 1, 0), seed=0, step=step)

    def hook_of(weight: str, rank: int) -> Any:
        a, b = (factors[name] for name in names_of(weight))
        columns = column_keys(of_mask(weight, plan.ranks), range(a.shape[1]))

        def add(_: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
            x = inputs[0][0]
            is_kept = dropped(torch.ones_like(x), keys, columns, plan.dropout) > 0
            return output + plan.scale(rank) * ((x * is_kept / (1 - plan.dropout)) @ a.t() @ b.t())[None]

        return add

    hooks = [
        model.get_submodule(module_of(weight)).register_forward_hook(hook_of(weight, rank))
        for weight, rank in plan.ranks.items()
    ]
    yield
    for hook in hooks:
        hook.remove()


def train(
    model: transformers.PreTrainedModel,
    shape: ModelShape,
    plan: TuningPlan,
    sequences: list[Sequence],
    objective: Objective,
) -> Reference:
    """A few AdamW steps of what the plan trains, every sequence by itself."""
    saved = {name: p.detach().clone() for name, p in as_saved(dict(model.named_parameters())).items()}
    factors = random_factors(shape, plan.adapters)
    start = {name: factor.clone() for name, factor in factors.items()}
    trained = {name: saved[name] for name in saved if name in plan.trained} | factors
    for tensor in trained.values():
        tensor.requires_grad_()
    groups = [
        {"params": [p for p in trained.values() if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in trained.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW([group for group in groups if group["params"]], lr=LR, betas=BETAS, eps=EPS)
    num_tokens = num_learnt(sequences)

    def statistics(sequence: Sequence, with_adapters: bool) -> tuple[Tensor, Tensor]:
        """With adapters merged, or without any, or with those that the model has beside its layers."""
        weights = saved | merge(saved, factors, plan.adapters) if with_adapters else saved
        arguments = {"input_ids": sequence.token_ids[None, :-1]}
        output = torch.func.functional_call(model, _as_in_memory(model, weights), kwargs=arguments)
        table = torch.log_softmax(output.logits[0] / objective.temperature, -1)
        return table.gather(1, sequence.token_ids[1:, None])[:, 0], -(table.exp() * table).sum(-1)

    with torch.no_grad():
        base, logprobs = ([statistics(s, is_on)[0] * s.loss_mask for s in sequences] for is_on in (False, True))
        merged = merge(saved, factors, plan.adapters)
    steps = []
    for number in range(NUM_STEPS):
        adamw.zero_grad()
        for place, s in enumerate(sequences):
            if plan.adapters.dropout:
                with dropout(model, plan.adapters, factors, s, (place, number)):
                    logp, entropy = statistics(s, with_adapters=False)
            else:
                logp, entropy = statistics(s, with_adapters=True)
            objective(logp, entropy, s.advantages, s.loss_mask, num_tokens).backward()
        gradients = {name: p.grad.clone() for name, p in trained.items()}
        norm = float(torch.nn.utils.clip_grad_norm_(trained.values(), CLIP))
        adamw.step()
        steps.append(Step(norm, gradients, {name: p.detach().clone() for name, p in trained.items()}))
    return Reference(start, base, logprobs, merged, steps)
