"""The adapters of a run that trains any: whole, for a merge or a file, and where they come from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl import platform
from mega_rl.bridge.files.peft import PeftReader, target_modules, write_adapter
from mega_rl.bridge.files.peft_config import AdapterConfig
from mega_rl.bridge.lora import Factors
from mega_rl.bridge.mapping.adapter import adapter_tensors, full_adapter_series, names_of
from mega_rl.bridge.mapping.tensors import roles
from mega_rl.bridge.mapping.tuning import EXPERTS
from mega_rl.bridge.outgoing.merge import LoraMerge
from mega_rl.bridge.reshard.execute import Read, Transfer, write_into
from mega_rl.bridge.reshard.plan import Layout, compile_plan
from mega_rl.bridge.series import Series, hf_name_of, slices_of
from mega_rl.bridge.slices import Box, extents, whole_box
from mega_rl.megatron.policy import MegatronPolicy


def local_reader(policy: MegatronPolicy) -> Read:
    """What a policy holds here, weights and adapters, as it is."""

    def read(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> Tensor:
        return policy.local(local_name, local_box)

    return read


def lora_merge(policy: MegatronPolicy, dtype: torch.dtype, bucket_bytes: int) -> LoraMerge:
    """What makes the weights that act of those that a policy with adapters holds; collective."""
    return LoraMerge(FactorsOfRank(policy, bucket_bytes), local_reader(policy), dtype)


class FactorsOfRank:
    """The whole adapters of all weights of which this rank holds a part, gathered at every call. Collective."""

    def __init__(self, policy: MegatronPolicy, bucket_bytes: int) -> None:
        sizes = adapter_tensors(policy.shape, policy.plan.adapters)
        sources = [policy.adapter_series_of(rank) for rank in range(dist.get_world_size())]
        wanted = [_whole(series, sizes) for series in sources]
        self._policy, self._transfer = policy, _transfer(policy, sources, wanted, bucket_bytes)
        self._own = slices_of(wanted[dist.get_rank()])

    def __call__(self) -> dict[str, Factors]:
        policy, adapters = self._policy, self._policy.plan.adapters
        held = {
            piece.local_name: torch.empty(extents(piece.hf_box), dtype=policy.spec.dtype, device=policy.device)
            for piece in self._own
        }
        with torch.no_grad():
            self._transfer.run(local_reader(policy), write_into(held), policy.spec.dtype)
        return {
            weight: Factors(held[a], held[b], adapters.scale(rank))
            for weight, rank in adapters.ranks.items()
            for a, b in [names_of(weight)]
            if a in held
        }


def _whole(held: Iterable[Series], sizes: Mapping[str, tuple[int, ...]]) -> list[Series]:
    """Whole tensors, under their own names, of which a rank holds these parts."""
    found = {}
    for one in held:
        box = whole_box(sizes[hf_name_of(one.hf_name, (one.layers[0], one.experts[0]))])
        key = one.hf_name, tuple(one.layers), tuple(one.experts)
        found[key] = Series(one.hf_name, box, one.hf_name, box, one.layers, one.experts)
    return list(found.values())


def _transfer(policy: MegatronPolicy, sources: Layout, wanted: Layout, bucket_bytes: int) -> Transfer:
    plan, world_size = compile_plan(sources, wanted), dist.get_world_size()
    synchronize = platform.current().synchronize
    return Transfer(plan, dist.get_rank(), world_size, None, bucket_bytes, policy.device, synchronize)


def export_adapter(policy: MegatronPolicy, target: Path, base: str | Path, bucket_bytes: int) -> None:
    """Write a policy's adapters as a directory of PEFT's; collective.

    Args:
        target: what an earlier run left there is replaced.
        base: the model that they belong to.
    """
    policy.refuse_replaced("an export")
    plan, rank = policy.plan.adapters, dist.get_rank()
    sources = [policy.adapter_series_of(other) for other in range(dist.get_world_size())]
    full = full_adapter_series(policy.shape, plan)
    transfer = _transfer(policy, sources, [full if other == 0 else [] for other in range(len(sources))], bucket_bytes)
    stream = transfer.stream(local_reader(policy), list(adapter_tensors(policy.shape, plan)), policy.spec.dtype)
    tensors = {name: tensor.cpu() for name, tensor in stream}
    if rank == 0:
        linear = [name for name, role in roles(policy.shape).items() if role == "linear"]
        write_adapter(target, peft_config(policy, str(base)), target_modules(plan.ranks, linear), tensors, {})


def peft_config(policy: MegatronPolicy, base: str) -> AdapterConfig:
    """What adapter_config.json says of a policy's adapters."""
    plan, settings = policy.plan.adapters, policy.spec.tuning.adapter
    of_experts = {rank for weight, rank in plan.ranks.items() if EXPERTS in weight}
    others = {rank for weight, rank in plan.ranks.items() if EXPERTS not in weight}
    rank = next(iter(others or of_experts))
    patterns = {r"mlp\.experts\.\d+\.\w+_proj": own for own in of_experts if own != rank}
    return AdapterConfig(rank, settings.alpha, settings.rslora, base, patterns)


def load_adapter(policy: MegatronPolicy, reader: PeftReader) -> None:
    """Fill a policy's adapters from a directory that ``check_continued`` has passed; each rank reads its own boxes."""
    with torch.no_grad():
        for piece in slices_of(policy.adapter_series_of(dist.get_rank())):
            policy.local(piece.local_name, piece.local_box).copy_(reader.read(piece.hf_name, piece.hf_box))
