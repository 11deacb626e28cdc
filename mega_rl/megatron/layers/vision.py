"""The vision tower in the trainer: transformers' own module, whole on every rank of the first pipeline stage.

Letters: P patches, C numbers of a patch, N pictures, F merged patches (tokens of the language model), K of them in this
rank's tokens, L tokens of this rank, D hidden width.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mega_rl.megatron.layers.attention import PackedSequences
from mega_rl.megatron.layers.tower import tower_module
from mega_rl.microbatch import Picture
from mega_rl.models.flops import TowerFlops, tower_flops
from mega_rl.models.vision import GRADIENT_BYTES, MAX_KEPT_BYTES, Tower
from mega_rl.observe.heartbeat import HEART
from mega_rl.observe.work import WORK


class VisionTower(torch.nn.Module):
    """transformers' vision tower with what Megatron needs to know of its parameters.

    What a frozen tower makes of a picture stays on the host as long as there is room: other passes over the same
    picture, other samples of its prompt and later epochs neither read it nor compute it again.
    """

    def __init__(self, tower: Tower, config: TransformerConfig, cache_bytes: int) -> None:
        super().__init__()
        self.module = tower_module(tower)
        for parameter in self.module.parameters():
            parameter.data = parameter.data.to(config.params_dtype)  # rotary frequencies, no parameters, stay float32
            # Under sequence parallelism each rank puts only the features of its own tokens into the sequence, so that
            # its gradient is a part; Megatron sums those of marked parameters over the tensor-parallel ranks.
            parameter.sequence_parallel = config.sequence_parallel
        self._tower, self._merge, self._num_stages = tower, tower.merge, config.pipeline_model_parallel_size
        self._known = _Features(cache_bytes)
        self._parts: list[list[Picture]] = []  # of the pictures of a pass, each computed at once
        self._of_pass: dict[str, tuple[Tensor, ...]] = {}  # what was made of them

    def forward(self, pictures: Sequence[Picture]) -> list[Tensor]:
        """[F, D] embeddings of the merged patches of all pictures, then as many again for every layer that adds some
        (DeepStack). A picture that several samples have is computed once, also for the gradient."""
        weight = next(self.module.parameters())
        missing = {p.key: p for p in pictures if p.key not in self._of_pass and p.key not in self._known}
        made = {**self._of_pass, **self._computed(list(missing.values()))}
        parts = [
            [level.to(weight.dtype) for level in made[p.key]]  # so each sample's gradient is widened, then added up
            if p.key in made
            else self._known.get(p.key, weight.device)
            for p in pictures
        ]
        if not self._is_trained:
            for key in missing:
                self._known.put(key, made[key])
        return [torch.cat(level) for level in zip(*parts, strict=True)]

    def begin_pass(self, seen: Sequence[Sequence[Picture]], with_gradient: bool) -> None:
        """Compute pictures of a pass of a tower that is trained before its micro-batches, where that costs less.

        Until ``finish_pass`` the micro-batches see these features, and what they make of them is not followed into the
        tower: only their gradients are gathered, in float32. So a picture takes one pass forward, or two and one
        backward, however many micro-batches have it, and never more patches at a time than before. That is less where
        two have it or more; of those pictures as many are taken as ``MAX_KEPT_BYTES`` hold, the most frequent first.

        Args:
            seen: the pictures of every micro-batch.
        """
        self._parts, self._of_pass = [], {}
        if not self._is_trained:
            return
        of_each = [{picture.key: picture for picture in pictures} for pictures in seen]
        item = GRADIENT_BYTES if with_gradient else next(self.module.parameters()).element_size()
        of_patch = self._tower.feature_numbers * item / self._merge**2
        shared = _shared(of_each, int(MAX_KEPT_BYTES / of_patch))
        self._parts = _parts(shared, max((_num_patches(found.values()) for found in of_each), default=0))
        for part in self._parts:
            HEART.mark()
            with torch.no_grad():
                found = self._computed(part, is_counted=not with_gradient)
            for key, levels in found.items():
                kept = [level.to(torch.float32 if with_gradient else level.dtype, copy=True) for level in levels]
                self._of_pass[key] = tuple(level.requires_grad_(with_gradient) for level in kept)

    def finish_pass(self, with_gradient: bool) -> None:
        """Take the gathered gradients into the tower; after all micro-batches, before its gradients are reduced."""
        for part in self._parts if with_gradient else ():
            HEART.mark()
            made = self._computed(part)
            pairs = [pair for key in made for pair in zip(made[key], self._of_pass[key], strict=True)]
            wanted = [(own, leaf.grad) for own, leaf in pairs if own.requires_grad and leaf.grad is not None]
            torch.autograd.backward([own for own, _ in wanted], [gradient.to(own.dtype) for own, gradient in wanted])
        self._parts, self._of_pass = [], {}

    def share_features(self, other: VisionTower) -> None:
        """Take and leave what is known of pictures where another tower of the same weights does.

        Args:
            other: if a part of it is trained, the two soon differ, and each goes on by itself.
        """
        if not other._is_trained:
            self._known = other._known

    @property
    def _is_trained(self) -> bool:
        return any(parameter.requires_grad for parameter in self.module.parameters())

    @cached_property
    def _flops(self) -> TowerFlops:
        return tower_flops(self._tower, {name for name, p in self.module.named_parameters() if p.requires_grad})

    def _computed(self, pictures: Sequence[Picture], is_counted: bool = True) -> dict[str, tuple[Tensor, ...]]:
        """What the tower makes of these different pictures, by their keys; ``is_counted``: as work."""
        if not pictures:
            return {}
        weight = next(self.module.parameters())
        patches_PC = torch.cat([picture.patches() for picture in pictures]).to(weight.device, weight.dtype)
        if is_counted:
            # Every rank of the first of the stages computes it, but a replica's ranks are averaged over all stages.
            work = self._flops.of([picture.grid for picture in pictures], with_gradient=torch.is_grad_enabled())
            WORK.add(work * self._num_stages)
        grids_N3 = torch.tensor([(1, *picture.grid) for picture in pictures], device=weight.device)
        output = self.module(patches_PC, grid_thw=grids_N3)
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        sizes = [p.grid[0] * p.grid[1] // self._merge**2 for p in pictures]
        parts = zip(*(level.split(sizes) for level in levels), strict=True)
        return dict(zip((picture.key for picture in pictures), parts, strict=True))


def _num_patches(pictures: Iterable[Picture]) -> int:
    return sum(picture.grid[0] * picture.grid[1] for picture in pictures)


def _shared(of_each: Sequence[Mapping[str, Picture]], most: int) -> list[Picture]:
    """The pictures that two micro-batches have, or more, the most frequent first, up to ``most`` patches together."""
    pictures = {key: picture for found in of_each for key, picture in found.items()}
    taken: list[Picture] = []
    for key, times in Counter(key for found in of_each for key in found).most_common():
        size = _num_patches([pictures[key]])
        if times > 1 and size <= most:
            taken.append(pictures[key])
            most -= size
    return taken


def _parts(pictures: Sequence[Picture], most: int) -> list[list[Picture]]:
    """The pictures in their order, cut so that no part has more than ``most`` patches; none of them has more."""
    parts: list[list[Picture]] = []
    for picture in pictures:
        if not parts or _num_patches([*parts[-1], picture]) > most:
            parts.append([])
        parts[-1].append(picture)
    return parts


class _Features:
    """Features of pictures on the host, the least recently used ones forgotten first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._of_key: OrderedDict[str, tuple[Tensor, ...]] = OrderedDict()

    def __contains__(self, key: str) -> bool:
        return key in self._of_key

    def get(self, key: str, device: torch.device) -> tuple[Tensor, ...]:
        self._of_key.move_to_end(key)
        return tuple(features.to(device) for features in self._of_key[key])

    def put(self, key: str, features: Sequence[Tensor]) -> None:
        held = tuple(one.cpu().clone() for one in features)
        self._of_key[key] = held
        self._num_bytes += _size(held)
        while self._num_bytes > self._max_bytes:
            _, oldest = self._of_key.popitem(last=False)
            self._num_bytes -= _size(oldest)


def _size(features: Sequence[Tensor]) -> int:
    return sum(one.nbytes for one in features)


def with_pictures(vision: VisionTower, embedded_L1D: Tensor, packing: PackedSequences, config: Any) -> Tensor:
    """The embeddings with those of pictures in their places; of this rank's share under sequence parallelism.

    What DeepStack's layers add is left in ``packing``.
    """
    local = packing.images
    assert local is not None
    num_own = embedded_L1D.shape[0]
    first = num_own * parallel_state.get_tensor_model_parallel_rank() if config.sequence_parallel else 0
    is_here_K = (local.places_K >= first) & (local.places_K < first + num_own)
    places_K, features_K = local.places_K[is_here_K] - first, local.features_K[is_here_K]
    features_FD, *deepstack = vision(local.images.pictures)
    values_K1D = features_FD[features_K].to(embedded_L1D.dtype)[:, None]
    embedded_L1D = embedded_L1D.index_copy(0, places_K, values_K1D)  # by place, since padding repeats a token
    aside = [features[features_K].to(embedded_L1D.dtype) for features in deepstack]
    leaves = [features.detach().requires_grad_(features.requires_grad) for features in aside]
    packing.deepstack, packing.deepstack_places_K = tuple(leaves), places_K
    return _Aside.apply(leaves, embedded_L1D, *aside)


class _Aside(torch.autograd.Function):
    """The identity, whose backward pass also brings home what gradients have gathered in ``leaves`` by then.

    Layers further up add these leaves by themselves. A recomputed layer runs a backward pass of its own; with anything
    but leaves it would run through the vision tower once per layer.
    """

    @staticmethod
    def forward(ctx: Any, leaves: Sequence[Tensor], main: Tensor, *aside: Tensor) -> Tensor:
        ctx.leaves = leaves
        return main.view_as(main)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return (None, gradients[0], *(leaf.grad for leaf in ctx.leaves))


def add_features(hidden_L1D: Tensor, layer: int, packing: PackedSequences | None) -> Tensor:
    """The output of a layer, counted from 0, with the features that DeepStack adds to it."""
    if packing is None or layer >= len(packing.deepstack):
        return hidden_L1D
    assert packing.deepstack_places_K is not None
    return hidden_L1D.index_add(0, packing.deepstack_places_K, packing.deepstack[layer][:, None])
