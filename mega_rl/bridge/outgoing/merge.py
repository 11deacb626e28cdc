"""Adapters on their way to the engines: merged into the weights that leave, or sent beside them with their scale.

The trainer's frozen weights are never written to. Adding an adapter in place and taking it off again would move them a
little at every sync in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.bridge.lora import Factors, update
from mega_rl.bridge.outgoing.transform import Changed
from mega_rl.bridge.reshard.execute import Read
from mega_rl.bridge.slices import Box
from mega_rl.parallel.collectives import reduced

WholeFactors = Callable[[], Mapping[str, Factors]]  # weight -> its whole adapter, of all that are held here; collective


@dataclass
class MergeRecord:
    """What rounding left of the updates on one rank, in one sync."""

    largest_b: float = 0.0  # magnitude; 0: the adapters add nothing
    num_elements: int = 0  # that were read of weights with an adapter that adds something
    num_unchanged: int = 0  # of them, those that the engine holds as without the adapter


LARGEST_B, UNCHANGED = "adapter/largest_b", "adapter/unchanged_fraction"


def magnitudes(tensors: Sequence[Tensor]) -> list[float]:
    """The largest magnitude of each; the device is waited for once."""
    return torch.stack([tensor.abs().amax().float() for tensor in tensors]).tolist() if tensors else []


class LoraMerge:
    """The ``Transform`` that sends W + scale B A instead of W: summed in float32, rounded once, the same at any layout.

    It reads the adapted weights itself, since the sum comes before the cast: it has to be the first transform.

    Args:
        factors: asked at every sync for the adapters as they are then.
        weights: this rank's weights as the trainer holds them, in its dtype.
        dtype: what the engine holds.
    """

    def __init__(self, factors: WholeFactors, weights: Read, dtype: torch.dtype) -> None:
        self._factors, self._weights, self._dtype = factors, weights, dtype

    def for_sync(self, read: Read, version: int) -> Changed:
        """``read`` with the adapters as they are now; collective."""
        every = self._factors()
        largest = dict(zip(every, magnitudes([own.b for own in every.values()]), strict=True))
        factors = {name: own for name, own in every.items() if largest[name] != 0}
        largest_b = max((largest[name] for name in factors), default=0.0)
        num_elements, unchanged = 0, list[Tensor]()  # counts, which stay on the device until the end of the sync

        def with_adapter(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> Tensor:
            if hf_name not in factors:
                return read(local_name, hf_name, hf_box, local_box)
            weight = self._weights(local_name, hf_name, hf_box, local_box)
            nonlocal num_elements
            result = update(factors[hf_name], hf_box).add_(weight).to(self._dtype)
            num_elements += result.numel()
            unchanged.append((result == weight.to(self._dtype)).sum())
            return result

        def record() -> MergeRecord:
            num_unchanged = int(torch.stack(unchanged).sum()) if unchanged else 0
            return MergeRecord(largest_b, num_elements, num_unchanged)

        return Changed(with_adapter, metrics=lambda: merge_metrics(record()))


def merge_metrics(own: MergeRecord) -> dict[str, float]:
    """The ``adapter/*`` figures of one sync over all ranks, on every rank. Collective."""

    def of_ranks(rows: list[list[float]]) -> list[float]:
        return [max(row[0] for row in rows), sum(row[1] for row in rows), sum(row[2] for row in rows)]

    row = [own.largest_b, float(own.num_elements), float(own.num_unchanged)]
    largest_b, num_elements, num_unchanged = reduced(row, of_ranks, len(row))
    return {LARGEST_B: largest_b} | ({UNCHANGED: num_unchanged / num_elements} if num_elements else {})


class ScaledAdapters:
    """The ``Transform`` for engines with slots for adapters, which multiply by nothing: B leaves times its scale.

    Args:
        scales: name of a B -> its scale.
        adapters: this rank's adapters as the trainer holds them, in its dtype.
        dtype: what the slots hold.
    """

    def __init__(self, scales: Mapping[str, float], adapters: Read, dtype: torch.dtype) -> None:
        self._scales, self._adapters, self._dtype = scales, adapters, dtype

    def for_sync(self, read: Read, version: int) -> Changed:
        seen = list[Tensor]()  # largest magnitudes, which stay on the device until the end of the sync

        def scaled(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> Tensor:
            if hf_name not in self._scales:
                return read(local_name, hf_name, hf_box, local_box)
            b = self._adapters(local_name, hf_name, hf_box, local_box)
            seen.append(b.abs().amax().float())
            return (b.float() * self._scales[hf_name]).to(self._dtype)

        def record() -> MergeRecord:
            return MergeRecord(max(torch.stack(seen).tolist(), default=0.0) if seen else 0.0)

        return Changed(scaled, metrics=lambda: merge_metrics(record()))
