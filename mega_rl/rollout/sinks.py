"""Where a sync's weights go: the engine workers of a run and the way to write into them.

A sink is chosen once, when the engines stand: here for engines in the trainer's processes, in ``remote/sink.py`` for
engines in others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl import platform
from mega_rl.bridge.mapping.live_check import difference, whole_parameters
from mega_rl.bridge.mapping.tensors import full_series, hf_tensors
from mega_rl.bridge.mapping.tuning import AdapterPlan
from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.bridge.mapping.vllm_slots import slot_series
from mega_rl.bridge.reshard.execute import Read, Transfer, TransferCount, write_into
from mega_rl.bridge.reshard.plan import Layout, compile_plan
from mega_rl.bridge.reshard.proof import Answer, Inspect, LoadProof, colocated
from mega_rl.bridge.series import Series, having, slices_of
from mega_rl.errors import InputError
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.collectives import gather_objects, together
from mega_rl.parallel.layout import EngineLayout
from mega_rl.rollout.transfers import Transfers


@dataclass(frozen=True)
class SentWeights:
    """What every sync of a run sends."""

    shape: ModelShape
    dtype: torch.dtype  # that the engines hold, and the one that is sent
    bucket_bytes: int  # limit for the buffers of a transfer
    device: torch.device  # of this trainer rank
    changing: frozenset[str] | None = None  # tensors that can differ from one sync to the next; None: all
    slots: AdapterPlan | None = None  # the adapters that engines keep in slots; None: they have none
    has_whole_experts: bool = False  # whether a worker holds some experts whole, not a part of each
    merged: AdapterPlan | None = None  # the adapters that engines add to frozen weights themselves; None: they do not

    def loaded_layout(self, tensor_parallel: int, tp_rank: int) -> list[Series]:
        """What one engine worker loads from a model's directory."""
        return vllm_series(self.shape, tensor_parallel, tp_rank, self.has_whole_experts)

    def worker_layout(self, tensor_parallel: int, tp_rank: int) -> list[Series]:
        """What one engine worker holds of what is sent."""
        series = self.loaded_layout(tensor_parallel, tp_rank)
        return series if self.slots is None else series + slot_series(self.shape, tensor_parallel, tp_rank, self.slots)


class WeightSink(Protocol):
    """All engine workers of a run as the destination of the trainer's weights; every method is collective.

    ``connect`` comes once, before the first ``update``.
    """

    @property
    def weight_version(self) -> int:
        """The version of the latest ``update``; 0 for the weights that the engines started with."""

    @property
    def inspect(self) -> Inspect | None:
        """Looks into the live parameters of all workers; None: they do not match the mapping and cannot be compared."""

    @property
    def keeps_versions(self) -> bool:
        """Whether engines fetch the weights when they want: what they may still ask for stays, and a validation's
        weights lie beside those for training instead of taking their place."""

    def layout(self) -> list[list[Series]]:
        """What every worker needs, [worker] -> its series."""

    def connect(self, sources: Layout) -> None:
        """Plan all syncs to come: the first one brings everything, the others may bring only what can have changed.

        Args:
            sources: what every trainer rank holds.
        """

    def update(self, read: Read, version: int, is_validation: bool = False) -> TransferCount | None:
        """Wake the engines' weights, replace them by those of ``version``, and forget every cached prefix.

        Args:
            read: gives this rank's part of what is sent, of the engines' dtype.
            is_validation: these are the exact weights that the version's validation samples from. Where versions are
                kept they have a place of their own, which the next validation takes: the one before must have ended.

        Returns:
            What this rank moved; None if that is not counted.

        Raises:
            RuntimeError: on every rank, an update that did not reach the whole engine.
        """

    def begin_sampling(self) -> None:
        """Wake the rest of the engines, their cache of keys and values, after ``update``.

        Until then the trainer's weights, which ``update`` reads, may be where the cache will be.
        """

    def make_room(self) -> None:
        """Give the device memory that engines share with the trainer back, until the next ``update``."""


class ColocatedEngine(Protocol):
    """What the sinks of this file ask of an engine in this process.

    An update is ``begin_update``, then writing into ``parameters()`` in place or ``load_hf_weights``, then
    ``finish_update``.
    """

    @property
    def weight_version(self) -> int:
        """The version given to the latest ``finish_update``; 0 for the weights that the engine started with."""

    def parameters(self) -> dict[str, Tensor]:
        """This rank's live parameters by the engine's own (fused) names: writing into them changes the engine."""

    def use_loader(self) -> None:
        """From here on updates come through ``load_hf_weights``, and there are no ``parameters``."""

    def begin_update(self) -> None:
        """Make ready for new weights."""

    def load_hf_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load full Hugging Face tensors by name through the engine's own loader.

        A tensor may be read as late as in ``finish_update``: its memory must not be reused before.
        """

    def finish_update(self, version: int) -> None:
        """Use the new weights as ``version``."""

    def sleep(self, rewritten: Collection[str] = ()) -> None:
        """Give device memory back; does nothing if the platform cannot.

        An engine that sleeps wakes in two parts, in this order, and samples only after both.

        Args:
            rewritten: parameters that the next update writes whole, so that their values need not be kept.
        """

    def wake_weights(self) -> None:
        """Take the memory of the weights again, with their values."""

    def wake_cache(self) -> None:
        """Take the memory of the cache of keys and values again, which is empty."""


class InPlaceSink:
    """Writes each shard of engines in the trainer's processes in place, every byte moved at most once."""

    keeps_versions = False

    def __init__(self, engine: ColocatedEngine, weights: SentWeights, engines: EngineLayout) -> None:
        self._engine, self._weights, self._engines = engine, weights, engines
        self._transfers: Transfers | None = None
        self._rewritten: Collection[str] | None = None  # what every update but the first writes whole

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    def inspect(self, function: Callable[..., Answer], arguments: Sequence[tuple[Any, ...]]) -> dict[int, Answer]:
        return colocated(self._engine.parameters(), dist.get_rank())(function, arguments)

    def layout(self) -> list[list[Series]]:
        size, engines = self._engines.tensor_parallel_size, self._engines
        return [self._weights.worker_layout(size, engines.tensor_rank(rank)) for rank in range(engines.world_size)]

    def obstacle(self, load: LoadProof) -> str | None:
        """What cannot be written on any rank, in words that follow "cannot write"; None if all can be. Collective."""
        wanted = slices_of(self.layout()[dist.get_rank()])
        with together("matching the engine's parameters"):
            parameters = self._engine.parameters()
            own = difference(parameters, wanted, self._weights.dtype)
        found = next((words for words in gather_objects(own) if words is not None), None)
        return found or load.difference(self.inspect, self._engines.world_size)

    def connect(self, sources: Layout) -> None:
        wanted, weights = self.layout(), self._weights
        self._transfers = Transfers(wanted, weights.changing, lambda part: colocated_transfer(sources, part, weights))

    def update(self, read: Read, version: int, is_validation: bool = False) -> TransferCount:
        assert self._transfers is not None, "an update before connect"
        self._engine.wake_weights()
        self._engine.begin_update()
        parameters = self._engine.parameters()
        if self._rewritten is None:
            series, changing = self.layout()[dist.get_rank()], self._weights.changing
            sent = series if changing is None else having(series, changing)
            self._rewritten = whole_parameters(parameters, slices_of(sent))
        write = write_into(parameters)
        with torch.no_grad():
            transfer_count = self._transfers.next().run(read, write, self._weights.dtype)
        self._engine.finish_update(version)
        return transfer_count

    def begin_sampling(self) -> None:
        self._engine.wake_cache()

    def make_room(self) -> None:
        self._engine.sleep(self._rewritten or ())


class LoaderSink:
    """Gives whole Hugging Face tensors to the loader of engines in the trainer's processes, whatever their layout."""

    inspect = None
    keeps_versions = False

    def __init__(self, engine: ColocatedEngine, weights: SentWeights, num_ranks: int) -> None:
        self._engine, self._weights, self._num_ranks = engine, weights, num_ranks
        self._transfer: Transfer | None = None
        engine.use_loader()

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    def layout(self) -> list[list[Series]]:
        return [full_series(self._weights.shape)] * self._num_ranks

    def connect(self, sources: Layout) -> None:
        self._transfer = colocated_transfer(sources, self.layout(), self._weights)

    def update(self, read: Read, version: int, is_validation: bool = False) -> None:
        assert self._transfer is not None, "an update before connect"
        self._engine.wake_weights()
        self._engine.begin_update()
        names = list(hf_tensors(self._weights.shape))
        self._engine.load_hf_weights(self._transfer.stream(read, names, self._weights.dtype))
        self._engine.finish_update(version)

    def begin_sampling(self) -> None:
        self._engine.wake_cache()

    def make_room(self) -> None:
        self._engine.sleep()


def colocated_layout(weights: SentWeights, engines: EngineLayout) -> list[list[Series]]:
    """What every worker of engines in the trainer's processes loads, [rank] -> its series."""
    size = engines.tensor_parallel_size
    return [weights.loaded_layout(size, engines.tensor_rank(rank)) for rank in range(engines.world_size)]


def colocated_transfer(sources: Layout, wanted: Layout, weights: SentWeights) -> Transfer:
    """This rank's part in the plan between trainer and engines of the same processes."""
    return Transfer(
        compile_plan(sources, wanted),
        dist.get_rank(),
        len(wanted),
        None,
        weights.bucket_bytes,
        weights.device,
        platform.current().synchronize,
    )


def colocated_sink(
    engine: ColocatedEngine,
    weights: SentWeights,
    engines: EngineLayout,
    *,
    load: LoadProof | None,
    weight_update: str,
    verify: str,
    say: Callable[[str], None],
) -> WeightSink:
    """The sink that ``rollout.weight_update`` asks for, of an engine that is awake; collective.

    ``live`` writes in place, ``reload`` goes through the loader; ``auto`` is live for engines whose parameters are
    exactly as the mapping of the model family says, names, shapes and loaded values, and says why if they are not.

    Args:
        load: compares what the engines have loaded; None if ``weight_update`` is ``reload``.
        verify: ``bridge.verify``.

    Raises:
        InputError: on every rank, if writing in place is asked for, or needed, and the engine cannot be written to.
    """
    if weight_update == "reload":
        return LoaderSink(engine, weights, engines.world_size)
    assert load is not None, "a live write before the engine's own load was compared"
    live = InPlaceSink(engine, weights, engines)
    reason = live.obstacle(load)
    if reason is None:
        return live
    if weight_update == "live":
        raise refused_live(reason)
    if weights.slots is not None:
        raise InputError(
            f"rollout.adapter=slots needs live weights, and they cannot write {reason}: set rollout.adapter=merged"
        )
    if verify != "off":
        raise InputError(
            f"bridge.verify={verify} can prove only what is written in place, and rollout.weight_update=auto "
            f"cannot write {reason}: set bridge.verify=off to go through the engine's own loader, without a proof"
        )
    say(f"rollout.weight_update: weights go through the engine's own loader, as live cannot write {reason}")
    return LoaderSink(engine, weights, engines.world_size)


def refused_live(reason: str) -> InputError:
    """The error if ``rollout.weight_update=live`` is set but not possible; ``reason`` is a sink's obstacle."""
    return InputError(
        f"rollout.weight_update=live cannot write {reason}: set rollout.weight_update=reload, which goes "
        "through the engine's own loader"
    )
