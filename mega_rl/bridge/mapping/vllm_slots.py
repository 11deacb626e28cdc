"""Where a vLLM worker keeps an adapter: its slots, under names of ours, as live parameters beside the fused weights.

A fused layer has a pair of slots for each of its projections, in their order: ``...qkv_proj.lora_A.1`` [r, columns] is
k_proj's A and ``...qkv_proj.lora_B.1`` [own rows, r] its B, which holds the scale. Layers cut by rows keep all of A,
layers cut by columns all of B, as in the trainer: where both are cut alike nothing has to be sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mega_rl.bridge.mapping.adapter import adapted_weights, adapter_tensors, names_of
from mega_rl.bridge.mapping.tuning import AdapterPlan
from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.bridge.series import Series, slices_of
from mega_rl.errors import InputError
from mega_rl.models.shape import ModelShape

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM's slots may have


@dataclass(frozen=True)
class Slots:
    """What an engine is started with to have the slots of one adapter."""

    rank: int
    tensors: dict[str, tuple[int, int]]  # PEFT's name of every factor -> its full shape
    names: frozenset[str]  # of the live slots, as in ``slot_series``

    @property
    def max_rank(self) -> int:
        """The smallest rank of vLLM's that holds the adapter's."""
        return next(size for size in RANKS if size >= self.rank)

    @property
    def modules(self) -> list[str]:
        """Last names of the engine's layers with a slot in use."""
        return sorted({name.split(".")[-3] for name in self.names})


def slots_of(shape: ModelShape, plan: AdapterPlan) -> Slots:
    """
    Raises:
        InputError: adapters for which there are no slots.
    """
    ranks = set(plan.ranks.values())
    if max(ranks) > RANKS[-1]:
        raise InputError(
            f"tuning.adapter.rank is {max(ranks)}, more than the {RANKS[-1]} that vLLM's slots take: lower it, or set "
            "rollout.adapter to merged"
        )
    if len(ranks) > 1 or any(".experts." in weight for weight in plan.ranks):
        raise InputError(
            "rollout.adapter is 'slots', but experts have adapters (tuning.adapter.targets), which are only sent "
            "merged: set rollout.adapter to merged, or exclude *.experts.*"
        )
    names = frozenset(piece.local_name for piece in slices_of(slot_series(shape, 1, 0, plan)))
    return Slots(max(ranks), adapter_tensors(shape, plan), names)


def slot_series(shape: ModelShape, tensor_parallel: int, tp_rank: int, plan: AdapterPlan) -> list[Series]:
    """The slots of one worker, every element of its part of the adapter."""
    series = vllm_series(shape, tensor_parallel, tp_rank, expert_parallel=True)  # however experts are cut, they go
    weights = [one for one in series if not one.is_stacked]
    found = []
    for adapted in adapted_weights(weights, plan):
        layer, of_rank = adapted.like.local_name.removesuffix(".weight"), (0, adapted.rank)
        for index, one in enumerate(adapted.projections):
            if one.number is None:
                continue
            a, b = names_of(one.hf_name)
            (rows,) = one.rows
            boxes = [
                (a, (of_rank, one.columns), "lora_A", (of_rank, (0, one.columns[1] - one.columns[0]))),
                (b, (rows, of_rank), "lora_B", ((0, one.num_rows), of_rank)),
            ]
            found += [
                replace(adapted.like, hf_name=hf, hf_box=hf_box, local_name=f"{layer}.{part}.{index}", local_box=box)
                for hf, hf_box, part, box in boxes
            ]
    return found
