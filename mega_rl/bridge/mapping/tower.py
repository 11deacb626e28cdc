"""The vision tower's tensors: whole on every rank of the first pipeline stage, whole in every engine's worker."""

from __future__ import annotations

from collections.abc import Iterator

from mega_rl.bridge.series import Series, numbered
from mega_rl.bridge.slices import whole
from mega_rl.models.shape import ModelShape
from mega_rl.models.vision import is_of_merger, tower_tensors

TRAINER_PREFIX = "vision.module"  # of the tower's parameters in the trainer's model


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
