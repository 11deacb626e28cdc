"""Which tensors of a model a run trains, and which of its linear layers have adapters: by names, for no rank yet."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import groupby

from mega_rl.bridge.mapping.megatron import ModelChunk, megatron_slices
from mega_rl.bridge.mapping.tensors import SCORE, hf_tensors, roles
from mega_rl.bridge.mapping.tower import frozen_names
from mega_rl.config.schema.learning import AdapterConfig, TuningConfig, VisionConfig
from mega_rl.errors import InputError, shown
from mega_rl.models.shape import ModelShape
from mega_rl.models.vision import TOWER

ALL_LINEAR = "all-linear"
EXPERTS = ".experts."  # in the name of every tensor of an expert


@dataclass(frozen=True)
class AdapterPlan:
    """The adapters of a model, by the Hugging Face names of the weights that they stand beside."""

    ranks: Mapping[str, int] = field(default_factory=dict)  # weight -> rank of its adapter, in the model's order
    alpha: float = 1.0
    rslora: bool = False
    dropout: float = 0.0  # share of an adapter's input that is dropped in training

    def scale(self, rank: int) -> float:
        """What B A is multiplied by: alpha / r, or alpha / sqrt(r) with ``rslora``, as in PEFT."""
        return self.alpha / (rank**0.5 if self.rslora else rank)


@dataclass(frozen=True)
class TuningPlan:
    """What one run trains."""

    trained: frozenset[str]  # Hugging Face tensors that are trained whole
    adapters: AdapterPlan  # without ranks: there are none
    is_full: bool  # every tensor is trained


def tuning_plan(settings: TuningConfig, shape: ModelShape, vision: VisionConfig | None = None) -> TuningPlan:
    """What ``settings`` train of a model.

    Args:
        vision: what stays as it is of a tower that sees pictures; None: as by default.

    Raises:
        InputError: a name that matches nothing, more layers than there are, or a choice that leaves nothing to train
            or would train a part of what is one parameter in the trainer.
    """
    every = frozenset(name for name, role in roles(shape).items() if role != "router_bias")  # no gradient reaches it
    if settings.method == "full":
        vision = vision or VisionConfig()
        frozen = frozen_names(shape, vision.freeze, vision.freeze_merger)
        return TuningPlan(every - frozen, AdapterPlan(), is_full=not frozen)
    language = {name for name in every if TOWER not in name}
    trained = {
        name
        for entry in settings.also_train
        for name in _found(entry, every if TOWER in entry else language, "tuning.also_train", "tensor")
    }
    adapters = AdapterPlan()
    if settings.method == "freeze":
        trained |= _of_layers(settings, shape, every)
    else:
        adapters = _adapter_plan(settings.adapter, shape)
        both = sorted(trained & set(adapters.ranks))
        if both:
            raise InputError(
                f"tuning.also_train trains {both[0]} whole, which has an adapter too: name its module in "
                "tuning.adapter.exclude, or remove it from tuning.also_train"
            )
    if not trained and not adapters.ranks:
        raise InputError("tuning leaves nothing to train: name more modules")
    _check_whole(trained, shape)
    return TuningPlan(frozenset(trained), adapters, is_full=False)


def critic_tuning(policy: TuningConfig, shares_base: bool) -> TuningConfig:
    """What trains a critic: all of it, or its head and new adapters like the policy's, on weights that stay as they
    are."""
    if not shares_base:
        return TuningConfig()
    return replace(policy, also_train=[SCORE], adapter=replace(policy.adapter, path=None, new=False))


def matches(entry: str, name: str) -> bool:
    """Whether an entry of a list means a tensor or module: as a shell pattern, or as its end between two dots."""
    if set(entry) & set("*?["):
        return fnmatchcase(name, entry)
    return any(one == entry or one.endswith(f".{entry}") for one in (name, module_of(name)))


def module_of(weight: str) -> str:
    """``model.layers.0.self_attn.q_proj.weight`` -> the module that it belongs to."""
    return weight.removesuffix(".weight")


def _found(entry: str, names: Iterable[str], key: str, what: str) -> set[str]:
    names = list(names)
    found = {name for name in names if matches(entry, name)}
    if not found:
        ends = list(dict.fromkeys(name.split(".layers.")[-1].partition(".")[2] or name for name in names))
        known = list(dict.fromkeys(end for end in ends if EXPERTS not in f".{end}"))
        raise InputError(f"{key} has {shown(entry)}, which is no {what} of this model: it has {', '.join(known[:12])}")
    return found


def _of_layers(settings: TuningConfig, shape: ModelShape, every: Iterable[str]) -> set[str]:
    count, total = settings.train_layers, shape.num_layers
    if count == 0 or abs(count) > total:
        raise InputError(
            f"tuning.train_layers is {count}, and the model has {total} layers: set it to 1 to {total} for the last "
            f"ones, or -{total} to -1 for the first ones"
        )
    layers = range(total - count, total) if count > 0 else range(-count)
    parts = {"all": ("",), "mlp": ("mlp.",), "self_attn": ("self_attn.",)}[settings.train_modules]
    starts = tuple(f"{shape.decoder}.layers.{layer}.{part}" for layer in layers for part in parts)
    return {name for name in every if name.startswith(starts)}


def _adapter_plan(settings: AdapterConfig, shape: ModelShape) -> AdapterPlan:
    linear = {module_of(name): name for name, role in roles(shape).items() if role == "linear"}
    key = "tuning.adapter"
    chosen: set[str] = set()
    for entry in settings.targets:
        named = linear if entry == ALL_LINEAR else _found(entry, linear, f"{key}.targets", "linear layer")
        chosen |= set(named)
    for entry in settings.exclude:
        chosen -= _found(entry, linear, f"{key}.exclude", "linear layer")
    split = _some_experts(chosen, linear)
    if split is not None:
        raise InputError(
            f"{key}.targets and {key}.exclude adapt {split} but not that of every expert of its layer, which are "
            "multiplied together: name all of them or none, such as *.experts.*"
        )
    if not chosen:
        raise InputError(f"{key}.targets and {key}.exclude leave no layer to adapt: name more targets")
    expert_rank = settings.expert_rank or settings.rank
    if settings.expert_rank is not None and not any(EXPERTS in module for module in chosen):
        raise InputError(f"{key}.expert_rank is {settings.expert_rank}, but no expert has an adapter: leave it null")
    ranks = {
        name: expert_rank if EXPERTS in name else settings.rank for module, name in linear.items() if module in chosen
    }
    sizes = hf_tensors(shape)
    large = next((name for name, rank in ranks.items() if rank > min(sizes[name])), None)
    if large is not None:
        field_name = "expert_rank" if EXPERTS in large and settings.expert_rank else "rank"
        rows, columns = sizes[large]
        raise InputError(
            f"{key}.{field_name} is {ranks[large]}, more than {large} of {rows} x {columns} can have: set it to at "
            f"most {min(rows, columns)}"
        )
    if settings.dropout and any(EXPERTS in module for module in chosen):
        raise InputError(
            f"{key}.dropout is {settings.dropout:g}, but experts have adapters, whose tokens come from other ranks in "
            f"an order of their own: add *.experts.* to {key}.exclude, or set {key}.dropout to 0"
        )
    return AdapterPlan(ranks, settings.alpha, settings.rslora, settings.dropout)


def _some_experts(chosen: set[str], modules: Iterable[str]) -> str | None:
    """A module of an expert that is chosen while the same of another expert in its layer is not."""
    alike: dict[str, list[str]] = {}
    for module in modules:
        if EXPERTS in module:
            alike.setdefault(re.sub(r"\.experts\.\d+", EXPERTS, module), []).append(module)
    for group in alike.values():
        own = [module for module in group if module in chosen]
        if 0 < len(own) < len(group):
            return own[0]
    return None


def _check_whole(trained: Iterable[str], shape: ModelShape) -> None:
    """The trainer holds some tensors in one parameter (q, k and v; gate and up), which is trained as a whole or not."""
    chosen = set(trained)
    pieces = megatron_slices(shape, ModelChunk(range(shape.num_layers)))
    for _, group in groupby(sorted(pieces, key=lambda p: p.local_name), key=lambda p: p.local_name):
        names = list(dict.fromkeys(piece.hf_name for piece in group))
        missing = [name for name in names if name not in chosen]
        if missing and len(missing) < len(names):
            given = next(name for name in names if name in chosen)
            raise InputError(
                f"tuning.also_train trains {given} without {missing[0]}, and both are one parameter of the trainer: "
                "name both or neither"
            )
