"""The adapters of a run that trains any: whole, for a merge or a file, and where they come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.files.peft.peft import PeftReader, target_modules, write_adapter
from mega_rl.bridge.files.peft.peft_config import CONFIG_FILE, PeftConfig
from mega_rl.bridge.files.sampled_digest import weights_digest
from mega_rl.bridge.lora import Factors, merged
from mega_rl.bridge.mapping.adapter import adapter_tensors, full_adapter_series, names_of
from mega_rl.bridge.mapping.tensors import roles
from mega_rl.bridge.mapping.tuning import EXPERTS, AdapterPlan, tuning_plan
from mega_rl.bridge.mapping.vllm_slots import Slots, slots_of
from mega_rl.bridge.outgoing.merge import LoraMerge, ScaledAdapters
from mega_rl.bridge.outgoing.noise import AqnNoise
from mega_rl.bridge.outgoing.quantize import QUANTIZED_ROLE
from mega_rl.bridge.reshard.execute import Read, Transfer, write_into
from mega_rl.bridge.reshard.plan import Layout, compile_plan
from mega_rl.bridge.series import Series, hf_name_of, slices_of
from mega_rl.bridge.slices import Box, extents, whole_box
from mega_rl.config import RunConfig
from mega_rl.config.schema.learning import AdapterConfig, TuningConfig
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.errors import InputError, shown
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.policy import MegatronPolicy
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.collectives import together


def local_reader(policy: MegatronPolicy, dtype: torch.dtype | None = None) -> Read:
    """What a policy holds here, weights and adapters, cast to ``dtype`` or as it is."""

    def read(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> Tensor:
        return policy.local(local_name, local_box).to(dtype or policy.spec.dtype)

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


def peft_config(policy: MegatronPolicy, base: str) -> PeftConfig:
    """What adapter_config.json says of a policy's adapters."""
    plan, settings = policy.plan.adapters, policy.spec.tuning.adapter
    of_experts = {rank for weight, rank in plan.ranks.items() if EXPERTS in weight}
    others = {rank for weight, rank in plan.ranks.items() if EXPERTS not in weight}
    rank = next(iter(others or of_experts))
    patterns = dict.fromkeys(
        [r"mlp\.experts\.\d+\.\w+_proj"] if of_experts - {rank} else [], max(of_experts, default=0)
    )
    return PeftConfig(rank, settings.alpha, settings.rslora, base, patterns)


# --- where a run's adapters begin ------------------------------------------------------------------------------------


class MergedReader(HFReader):
    """A model directory with an adapter added to what is read of it."""

    def __init__(self, model_dir: Path, adapter: PeftReader) -> None:
        super().__init__(model_dir)
        self._adapter = adapter

    def read(self, name: str, box: Box) -> Tensor:
        weight = super().read(name, box)
        return merged(weight, self._adapter.factors(name), box) if name in self._adapter.weights else weight


def starting_point(
    tuning: TuningConfig, shape: ModelShape, model: HFReader
) -> tuple[HFReader, PeftReader | None, str | None]:
    """What the frozen weights are read from, the adapter that training goes on from, and its digest; collective.

    Raises:
        InputError: on every rank, an adapter that cannot be read, or not be gone on from with these settings.
    """
    settings = tuning.adapter
    if tuning.method != "lora" or settings.path is None:
        return model, None, None
    with together("reading the adapter of tuning.adapter.path"):
        adapter = PeftReader(settings.path, shape, model.model_dir, "tuning.adapter.path")
        if settings.new:
            return MergedReader(model.model_dir, adapter), None, None
        check_continued(adapter, tuning_plan(tuning, shape).adapters, settings)
        digest = weights_digest(adapter.directory, CONFIG_FILE)
    return model, adapter, digest


def check_continued(adapter: PeftReader, plan: AdapterPlan, settings: AdapterConfig) -> None:
    """InputError unless an adapter has the layers, ranks and scales of the run, which goes on from it."""
    where = f"the adapter of tuning.adapter.path {shown(str(adapter.directory))}"
    start = "or set tuning.adapter.new=true to merge it and start another"
    for weight in (*plan.ranks, *adapter.weights):
        if weight not in adapter.weights or weight not in plan.ranks:
            has, lacks = (
                ("tuning.adapter.targets", where) if weight in plan.ranks else (where, "tuning.adapter.targets")
            )
            raise InputError(f"{has} has {weight} and {lacks} has not: set tuning.adapter.targets accordingly, {start}")
        key = "expert_rank" if EXPERTS in weight and settings.expert_rank is not None else "rank"
        ours, theirs = plan.ranks[weight], adapter.weights[weight]
        if ours != theirs:
            raise InputError(
                f"tuning.adapter.{key} is {ours}, and {where} has {theirs} for {weight}: set it to {theirs}, {start}"
            )
        if plan.scale(ours) != adapter.scale_of(weight):
            raise InputError(
                f"tuning.adapter.alpha and tuning.adapter.rslora scale {weight} by {plan.scale(ours):g}, and {where} "
                f"by {adapter.scale_of(weight):g}: set them as in its adapter_config.json, {start}"
            )


def load_adapter(actor: MegatronEngine, adapter: PeftReader) -> None:
    """Fill the actor's adapters from a directory that ``check_continued`` has passed; each rank reads its own boxes."""
    policy = actor.policy
    with torch.no_grad():
        for piece in slices_of(policy.adapter_series_of(dist.get_rank())):
            policy.local(piece.local_name, piece.local_box).copy_(adapter.read(piece.hf_name, piece.hf_box))
    actor.optimizer.reload_model_params()  # its master weights were taken of the values before


def scaled_adapters(policy: MegatronPolicy, dtype: torch.dtype) -> ScaledAdapters:
    """What gives engines with slots each B times its scale."""
    plan = policy.plan.adapters
    scales = {names_of(weight)[1]: plan.scale(rank) for weight, rank in plan.ranks.items()}
    return ScaledAdapters(scales, local_reader(policy), dtype)


# --- what the engines are sent ---------------------------------------------------------------------------------------


def engine_slots(
    rollout: RolloutConfig, shape: ModelShape, plan: AdapterPlan, device_type: str, say: Callable[[str], None]
) -> Slots | None:
    """The slots that engines get for the adapters of a run; None: adapters are merged, or there are none.

    Raises:
        InputError: ``rollout.adapter`` asks for slots that there cannot be.
    """
    asked, on_cpu = rollout.adapter, device_type == "cpu"
    if not plan.ranks or asked == "merged":
        return None
    if on_cpu and shape.mixture is not None and asked == "slots":
        raise InputError(
            "rollout.adapter is 'slots', but vLLM on a CPU has none for mixtures of experts: set it to merged"
        )
    why = "vLLM's slots are slow on a CPU" if on_cpu else "experts are sent merged" if shape.mixture is not None else ""
    why = "engines that see pictures have no slots" if shape.tower else why
    if asked == "auto" and (why or rollout.weight_update == "reload"):
        why = why or "rollout.weight_update=reload"
        say(f"rollout.adapter: adapters are merged into the weights that the engines are sent, as {why}")
        return None
    slots = slots_of(shape, plan)
    say(f"rollout.adapter: the engines have slots of rank {slots.max_rank} for adapters, and get only these")
    return slots


def merged_there(config: RunConfig, plan: AdapterPlan, slots: AdapterPlan | None) -> AdapterPlan | None:
    """The adapters that engines which fetch their weights may add to frozen ones themselves; None: sums are sent.

    They add as the trainer does, which hashes the sums: the bits are the same on every device for 16 bits only.
    """
    is_exact = config.model.dtype == (config.rollout.dtype or config.model.dtype) == "bfloat16"
    if slots is not None or not is_exact or config.rollout.simulated_quantization is not None:
        return None
    return plan if plan.ranks else None


def changing(config: RunConfig, policy: MegatronPolicy, noise: AqnNoise, has_slots: bool) -> frozenset[str] | None:
    """The tensors that can differ from one sync to the next; None: all of them."""
    plan, of_model = policy.plan, roles(policy.shape)
    if plan.is_full:
        return None
    names = {*plan.trained, *(adapter_tensors(policy.shape, plan.adapters) if has_slots else plan.adapters.ranks)}
    if config.aqn.enabled:
        names.update(noise.targets(of_model))
    if config.rollout.simulated_quantization is not None:  # validation is sent weights that are not quantised
        names.update(name for name, role in of_model.items() if role == QUANTIZED_ROLE)
    return frozenset(names)
