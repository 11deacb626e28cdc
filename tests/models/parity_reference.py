"""What transformers says of a tiny model: the side that the Megatron engine is compared with. No Megatron here.

Letters: L positions of one sequence, V vocabulary, M layers with experts, K experts of a token, E experts, D width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from unittest import mock

import torch
import transformers
from torch import Tensor

from mega_rl.microbatch import Images, Sequence
from mega_rl.models.positions import Placed, image_positions, picture_places
from mega_rl.models.shape import ModelShape
from tests.models.families import as_saved

LENGTHS = (7, 19, 30, 41, 3, 12, 1, 12, 5, 50, 9)  # positions; the total is odd, so packs of a multiple have a tail
# A gradient that is nothing but rounding must not become a step: eps stands well above it.
LR, BETAS, EPS, WEIGHT_DECAY, CLIP = 1e-3, (0.9, 0.95), 1e-5, 0.01, 1.0
NUM_STEPS = 3


@dataclass(frozen=True)
class Objective:
    """``-sum(advantage * logp + entropy_coefficient * mask * entropy) / num_tokens``, after the temperature."""

    stage: str  # the engine applies rollout.temperature in "rl" only
    temperature: float
    entropy_coefficient: float

    def __call__(self, logprobs: Tensor, entropy: Tensor, advantages: Tensor, mask: Tensor, num_tokens: int) -> Tensor:
        total = (advantages * logprobs).sum()
        if self.entropy_coefficient:
            total = total + self.entropy_coefficient * (mask * entropy).sum()
        return -total / num_tokens


OBJECTIVES = {"sft": Objective("sft", 1.0, 0.0), "rl": Objective("rl", 0.7, 0.1)}


@dataclass(frozen=True)
class RouterLosses:
    """What routers learn besides, in the words of ``config.router``; sequence by sequence."""

    aux_loss: float = 0.0
    z_loss: float = 0.0
    bias_update_rate: float = 0.0


class Routers:
    """The routers of a model of transformers: what they saw in the last forward pass, and whom they chose in a step."""

    def __init__(self, model: transformers.PreTrainedModel, losses: RouterLosses) -> None:
        self.losses = losses
        self.seen: list[tuple[Tensor, Tensor, int]] = []  # logits and scores [L, E], experts of a token
        self.loads: dict[torch.nn.Module, Tensor] = {}
        for name, module in model.named_modules() if losses.aux_loss else ():
            if name.endswith("mlp.gate"):
                module.register_forward_hook(self._see)

    def _see(self, gate: torch.nn.Module, inputs: tuple[Tensor], output: tuple[Tensor, Tensor, Tensor]) -> None:
        logits_LE, chosen_LK = inputs[0].flatten(0, -2) @ gate.weight.t(), output[2]
        has_bias = hasattr(gate, "e_score_correction_bias")
        scores_LE = logits_LE.sigmoid() if has_bias else logits_LE.softmax(-1)
        self.seen.append((logits_LE, scores_LE / scores_LE.sum(-1, keepdim=True), chosen_LK.shape[-1]))
        if has_bias and torch.is_grad_enabled():
            load = torch.bincount(chosen_LK.flatten(), minlength=logits_LE.shape[1])
            self.loads[gate] = self.loads[gate] + load if gate in self.loads else load

    def loss(self, num_sequences: int, num_tokens: int) -> Tensor:
        """Of the sequence that was computed last: arXiv 2412.19437, equation 17; arXiv 2202.08906, equation 5."""
        total = torch.zeros(())
        for logits_LE, scores_LE, K in self.seen:
            E, is_chosen_LE = logits_LE.shape[1], torch.zeros_like(logits_LE)
            is_chosen_LE.scatter_(1, scores_LE.topk(K).indices, 1.0)
            balance = (is_chosen_LE.mean(0) * E / K * scores_LE.mean(0)).sum()
            z = logits_LE.exp().sum(-1).log().square().sum()
            total = total + self.losses.aux_loss * balance / num_sequences + self.losses.z_loss * z / num_tokens
        self.seen.clear()
        return total

    @torch.no_grad()
    def move_biases(self) -> None:
        for gate, load in self.loads.items():
            gate.e_score_correction_bias += self.losses.bias_update_rate * torch.sign(load.float().mean() - load)
        self.loads.clear()


def make_sequences(
    objective: Objective, vocab_size: int, experts: tuple[int, int, int] | None = None
) -> list[Sequence]:
    """Random sequences of which about a third is not learnt from.

    Args:
        experts: (M, E, K): two thirds of the sequences bring random experts of every token, which are replayed.
    """
    generator = torch.Generator().manual_seed(3)
    sequences: list[Sequence] = []
    for length in LENGTHS:
        ids = torch.randint(0, vocab_size, (length + 1,), generator=generator)
        mask = (torch.rand(length, generator=generator) < 0.7).float()
        advantages = mask * torch.randn(length, generator=generator) if objective.stage == "rl" else mask
        routed = None
        if experts is not None and len(sequences) % 3:
            M, E, K = experts
            routed = torch.rand(length, M, E, generator=generator).argsort(-1)[:, :, :K].to(torch.uint8).numpy()
        sequences.append(Sequence(ids, mask, advantages, routed_experts=routed))
    return sequences


@dataclass(frozen=True)
class Drawn:
    """A picture that is there already."""

    key: str
    grid: tuple[int, int]
    content: Tensor

    def patches(self) -> Tensor:
        return self.content


def with_pictures(sequences: list[Sequence], shape: ModelShape, tokens: Mapping[str, int]) -> list[Sequence]:
    """The same, with pictures of random patches in the place of random tokens: none, one or two in each.

    Sequences see the same pictures, as the samples of a prompt do; those of mixtures do not, since an expert that few
    tokens choose would have gradients which nearly cancel.

    Args:
        tokens: names of ``config.json`` for the tokens of pictures -> their ids.
    """
    tower, generator, found = shape.tower, torch.Generator().manual_seed(5), []
    assert tower is not None
    known: dict[str, Drawn] = {}
    for number, sequence in enumerate(sequences):
        length, ids, first = sequence.loss_mask.numel(), sequence.token_ids.clone(), 2
        placed = []
        for rows, columns in [(4, 6), (6, 4)][: number % 3]:
            end = first + rows * columns // tower.merge**2
            if end + 1 > length:
                break
            ids[first - 1], ids[first:end] = tokens["vision_start_token_id"], tokens["image_token_id"]
            ids[end] = tokens["vision_end_token_id"]
            placed.append(Placed(first, rows, columns))
            first = end + 3
        if not placed:
            found.append(sequence)
            continue
        pictures = []
        for i, p in enumerate(placed):
            patches = torch.randn(p.rows * p.columns, tower.patch_numbers, generator=generator)
            one = Drawn(str(i) if shape.mixture is None else f"{number}.{i}", (p.rows, p.columns), patches)
            pictures.append(known.setdefault(one.key, one))
        images = Images(tuple(pictures), picture_places(placed, tower.merge))
        positions = image_positions(length, placed, tower.merge)
        found.append(replace(sequence, token_ids=ids, images=images, position_ids=positions))
    num_seen = sum(len(sequence.images.pictures) for sequence in found if sequence.images)
    assert num_seen >= 6 and len(known) == (2 if shape.mixture is None else num_seen), "too few pictures"
    return found


def _forced_router(gate: torch.nn.Module, experts_LK: Tensor, hidden_LD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What transformers' router of Qwen3-MoE returns if it chooses these experts: their weights add up to 1."""
    logits_LE = hidden_LD.reshape(len(experts_LK), -1) @ gate.weight.t()
    weights_LK = torch.softmax(logits_LE, -1).gather(1, experts_LK)
    return logits_LE, weights_LK / weights_LK.sum(-1, keepdim=True), experts_LK


@contextmanager
def replayed(model: transformers.PreTrainedModel, sequence: Sequence) -> Iterator[None]:
    """The model with the experts of the sequence, if it brings any."""
    with ExitStack() as stack:
        if sequence.routed_experts is not None:
            gates = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
            experts = torch.from_numpy(sequence.routed_experts).long().unbind(1)
            for gate, experts_LK in zip(gates, experts, strict=True):
                stack.enter_context(mock.patch.object(gate, "forward", partial(_forced_router, gate, experts_LK)))
        yield


def logits_of(model: transformers.PreTrainedModel, sequence: Sequence) -> Tensor:
    """[L, V]."""
    ids, pictures = sequence.token_ids[None, :-1], {}
    if (images := sequence.images) is not None:
        types = torch.zeros_like(ids).index_fill_(1, images.places, 1)
        grids = torch.tensor([(1, *picture.grid) for picture in images.pictures])
        patches = torch.cat([picture.patches() for picture in images.pictures])
        pictures = {"pixel_values": patches, "image_grid_thw": grids, "mm_token_type_ids": types}
    with replayed(model, sequence):
        return model(ids, **pictures).logits[0]


def num_learnt(sequences: list[Sequence]) -> int:
    return int(sum(s.loss_mask.sum() for s in sequences))


@dataclass(frozen=True)
class Step:
    loss: float
    norm: float  # of all gradients, before clipping
    gradients: dict[str, Tensor]  # before clipping


@dataclass(frozen=True)
class Reference:
    """The figures of a few AdamW steps."""

    logits: list[Tensor]  # [L, V] of every sequence under the starting weights
    logprobs: list[Tensor]  # [L], after the temperature; 0 where nothing is learnt
    entropy: list[Tensor]  # [L], likewise
    steps: list[Step]
    first_weights: dict[str, Tensor]  # after the first step
    weights: dict[str, Tensor]  # after the last step


def _statistics(logits: Tensor, ids: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    table = torch.log_softmax(logits / temperature, dim=-1)
    return table.gather(1, ids[1:, None])[:, 0], -(table.exp() * table).sum(-1)


def train(
    model: transformers.PreTrainedModel,
    sequences: list[Sequence],
    objective: Objective,
    losses: RouterLosses = RouterLosses(),  # noqa: B008 - frozen
) -> Reference:
    """Train ``model`` on every sequence by itself, so without any padding or packing."""
    with torch.no_grad():
        logits = [logits_of(model, s) for s in sequences]
        found = [_statistics(x, s.token_ids, objective.temperature) for x, s in zip(logits, sequences, strict=True)]
        pairs = [(a * s.loss_mask, b * s.loss_mask) for (a, b), s in zip(found, sequences, strict=True)]
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=LR, betas=BETAS, eps=EPS)
    num_tokens, num_positions = num_learnt(sequences), sum(s.loss_mask.numel() for s in sequences)
    routers = Routers(model, losses)
    steps = []
    first_weights: dict[str, Tensor] = {}
    for _ in range(NUM_STEPS):
        adamw.zero_grad()
        loss = 0.0
        for s in sequences:
            logprobs, entropy = _statistics(logits_of(model, s), s.token_ids, objective.temperature)
            part = objective(logprobs, entropy, s.advantages, s.loss_mask, num_tokens)
            (part + routers.loss(len(sequences), num_positions)).backward()
            loss += part.item()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        adamw.step()
        routers.move_biases()
        biases = {name: b.clone() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")}
        weights = as_saved({name: p.detach().clone() for name, p in model.named_parameters()} | biases)
        first_weights = first_weights or weights
        steps.append(Step(loss, norm, as_saved(gradients)))
    return Reference(logits, [a for a, _ in pairs], [b for _, b in pairs], steps, first_weights, weights)
