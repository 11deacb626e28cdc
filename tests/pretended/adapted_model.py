"""A model whose adapters engines add to its frozen weights by themselves, in a weight store."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from mega_rl.bridge.lora import Factors, merged
from mega_rl.bridge.mapping.adapter import adapter_tensors, names_of
from mega_rl.bridge.mapping.tensors import hf_tensors, roles
from mega_rl.bridge.mapping.tuning import AdapterPlan
from mega_rl.bridge.series import slices_of
from mega_rl.bridge.slices import indices, whole_box
from mega_rl.models.shape import ModelShape
from mega_rl.rollout.remote.fleet.store_sink import form_of
from mega_rl.rollout.remote.weight_store import Store, StoredVersion
from mega_rl.rollout.sinks import SentWeights
from mega_rl.rollout.store_form import StoreForm
from tests.distributed.bridge.test_bridge_execute import local_parameters


def adapted_form(
    shape: ModelShape, plan: AdapterPlan, engine_size: int, way: str, others: Collection[str] = ()
) -> StoreForm:
    """
    Args:
        way: slots, sums or factors.
        others: tensors that change besides.
    """
    changing = frozenset(adapter_tensors(shape, plan) if way == "slots" else plan.ranks) | frozenset(others)
    slots, merged = (plan if way == name else None for name in ("slots", "factors"))
    sent = SentWeights(shape, torch.bfloat16, 1 << 20, torch.device("cpu"), changing, slots, merged=merged)
    return form_of(sent, engine_size, num_slots=2, salt=1, has_validation=False)


class AdaptedModel:
    """Versions of a model with adapters, in a store: layer 0 has none, nor has o_proj."""

    def __init__(self, shape: ModelShape, engine_size: int) -> None:
        self.shape = shape
        linear = [name for name, role in roles(self.shape).items() if role == "linear" and ".o_proj." not in name]
        ranks = {name: 2 if ".experts." in name else 4 for name in linear if ".layers.0." not in name}
        self.plan, self.generator = AdapterPlan(ranks, alpha=3.0), torch.Generator().manual_seed(0)
        self.form = adapted_form(shape, self.plan, engine_size, "factors")
        self.base = self._random(hf_tensors(self.shape))
        self.store = Store(self.form)

    def _random(self, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
        return {n: torch.randn(size, generator=self.generator).bfloat16() for n, size in sizes.items()}

    def put(self, version: int) -> tuple[StoredVersion, list[dict[str, Tensor]]]:
        """What readers are told, and what each worker's parameters must be; version 0 adds nothing."""
        factors = self._random(adapter_tensors(self.shape, self.plan))
        factors = {name: tensor * (version > 0) for name, tensor in factors.items()}
        sums = dict(self.base)
        for name, rank in self.plan.ranks.items():
            own = Factors(*(factors[part] for part in names_of(name)), self.plan.scale(rank))
            sums[name] = merged(sums[name], own, whole_box(sums[name].shape))
        written = self.base | factors | {f"{name}.frozen": tensor for name, tensor in self.base.items()}
        for worker in range(len(self.form.workers)):
            memory = self.store.parameters(worker, version)
            for piece in slices_of(self.form.later(worker) if version else self.form.first(worker)):
                memory[piece.local_name][indices(piece.local_box)] = written[piece.hf_name][indices(piece.hf_box)]
        wanted = [local_parameters(slices_of(series), sums, torch.bfloat16) for series in self.form.workers]
        hashes = [
            (plan.fixed.hashes_of(one, self.form.salt), plan.slot.hashes_of(one, self.form.salt))
            for plan, one in zip(self.form.plans, wanted, strict=True)
        ]
        return self.store.seal(version, 2 * version + 2, hashes), wanted
