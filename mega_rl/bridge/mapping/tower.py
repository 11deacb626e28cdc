"""The vision tower's tensors: whole on every rank of the first pipeline stage, whole in every engine's worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mega_rl.bridge.series import Series, numbered
from mega_rl.bridge.slices import Slice, whole, whole_box
from mega_rl.models.shape import ModelShape
from mega_rl.models.vision import TOWER, is_of_merger, tower_tensors

TRAINER_PREFIX = "vision.module"  # of the tower's parameters in the trainer's model
ENGINE_DECODER = "language_model"  # the module of an engine that holds everything but the tower
FUSED = ("gate_proj", "up_proj")  # one parameter of an engine, in this order


def tower_names(shape: ModelShape) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """The checkpoint's name of every tensor of the tower, its name in the tower, and its shape."""
    if shape.tower is not None:
        for name, size in tower_tensors(shape.tower):
            yield f"{shape.tower_prefix}.{name}", name, size


def frozen_names(shape: ModelShape, tower: bool, merger: bool) -> frozenset[str]:
    """The checkpoint's names of what is frozen, if the blocks of the tower or its mergers are."""
    return frozenset(hf for hf, name, _ in tower_names(shape) if (merger if is_of_merger(name) else tower))


def trainer_tower(shape: ModelShape) -> list[Series]:
    """What a rank that has the embedding holds of the tower."""
    return numbered([whole(f"{TRAINER_PREFIX}.{name}", hf, size) for hf, name, size in tower_names(shape)])


def whole_tower(shape: ModelShape) -> list[Series]:
    """Every tensor under the checkpoint's own name."""
    return numbered([whole(hf, hf, size) for hf, _, size in tower_names(shape)])


def engine_tower(shape: ModelShape) -> list[Series]:
    """What an engine's worker holds of the tower: all of it, the two halves of a gated layer in one parameter."""
    return numbered([_in_engine(hf, name, size) for hf, name, size in tower_names(shape)])


def _in_engine(hf: str, name: str, size: tuple[int, ...]) -> Slice:
    half = next((half for half in FUSED if f".mlp.{half}." in name), None)
    if half is None:
        return whole(f"{TOWER}.{name}", hf, size)
    start = size[0] * FUSED.index(half)
    fused = f"{TOWER}.{name.replace(half, 'gate_up_proj')}"
    return Slice(hf, whole_box(size), fused, ((start, start + size[0]), *whole_box(size[1:])))


def within_language_model(shape: ModelShape, series: list[Series]) -> list[Series]:
    """The decoder's series with the local names that engines of vision-language models have for them."""
    if shape.tower is None:
        return series

    def named(name: str) -> str:
        inner = name.removeprefix(f"{shape.decoder}.")
        return f"{ENGINE_DECODER}.{name if inner == name else f'model.{inner}'}"

    return [replace(one, local_name=named(one.local_name)) for one in series]
