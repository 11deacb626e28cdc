"""Processes of engines that have no vLLM; their weights come from the store, and are proved, as every engine's."""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch

from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.series import Series, slices_of
from mega_rl.bridge.slices import Slice, whole_box
from mega_rl.parallel.joint_group import MeetingPoint
from mega_rl.rollout.collect.handed_trajectories import OwnerAddress
from mega_rl.rollout.engine import Request
from mega_rl.rollout.remote.engine_process import EngineProcess, EngineSpec
from mega_rl.rollout.remote.fleet import kept_engine
from mega_rl.rollout.remote.fleet.kept_engine import KeptEngine
from mega_rl.rollout.remote.weight_store import Store, StoredVersion
from mega_rl.rollout.store_form import StoreForm
from mega_rl.rollout.vllm.start.seeing import Pixels
from mega_rl.types import Trajectory
from tests.distributed.bridge.test_bridge_execute import local_parameters
from tests.launching.training import STRUCK_LOG as LOG
from tests.models.vision_models import MERGE, PATCH
from tests.pretended.tokens import Response, first_logprobs

PAUSE = ".pause"  # of a file beside the log: as long as it is there, engines make no step


def digest(parameters: Mapping[str, torch.Tensor]) -> int:
    found = 0
    for tensor in parameters.values():
        found = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().tobytes(), found)
    return found


def empty_parameters(form: StoreForm) -> dict[str, torch.Tensor]:
    """Of an engine of one worker, for weights of this form."""
    plan = form.plan(0)
    places, names = plan.fixed.places | plan.slot.places, plan.fixed.names | plan.slot.names
    return {name: torch.zeros(place.size, dtype=form.dtype) for name, place in places.items() if name in names}


_STAMPS = count(2, 2)


def sealed(store: Store, version: int) -> StoredVersion:
    """What lies in the store's parameters as a version that is whole."""
    parameters = [store.parameters(worker, version) for worker in range(len(store.form.workers))]
    hashes = [
        (plan.fixed.hashes_of(of_worker, store.form.salt), plan.slot.hashes_of(of_worker, store.form.salt))
        for plan, of_worker in zip(store.form.plans, parameters, strict=True)
    ]
    return store.seal(version, next(_STAMPS), hashes)


class PretendedEngine:
    """What ``EngineProcess`` drives: makes one token of every response a step, of the weights that it holds.

    Pictures of prompts must have come with the requests, each of as many pixels as its tokens stand for.
    """

    def __init__(self, step_s: float, pictures: Mapping[str, Pixels], is_pinned: bool) -> None:
        self._step_s, self._pictures, self._is_pinned = step_s, pictures, is_pinned
        self.live: dict[str, torch.Tensor] = {}
        self._digest = self._version = -1
        self._under_way: dict[int, Response] = {}
        self._number = 0

    num_slots = 256

    @property
    def num_unfinished(self) -> int:
        return len(self._under_way)

    def enter(self, requests: Sequence[Request]) -> list[int]:
        first = self._number + 1
        for request in requests:
            for image in request.prompt.images:
                seen = self._pictures[image.key].resized()
                assert seen.width * seen.height == image.num_tokens * (PATCH * MERGE) ** 2, (seen.size, image)
            self._number += 1
            self._under_way[self._number] = Response(request, 0)
        return list(range(first, self._number + 1))

    def numbered_step(self) -> list[tuple[int, Trajectory]]:
        time.sleep(self._step_s)
        while LOG in os.environ and Path(os.environ[LOG] + PAUSE).exists():
            time.sleep(self._step_s)
        for response in self._under_way.values():
            response.advance(self._version, self._digest)
        ended = [number for number, response in self._under_way.items() if response.has_ended]
        return [(number, self._under_way.pop(number).trajectory()) for number in ended]

    def exchange(self, write: Callable[[Mapping[str, torch.Tensor]], None], version: int) -> None:
        assert not (self._under_way and self._is_pinned), "weights change under a pinned ticket"
        write(self.live)
        self._version, self._digest = version, digest(self.live)

    def first_logprobs(
        self, prompt_ids: Sequence[int], temperature: float, with_adapter: bool = True
    ) -> list[dict[int, float]]:
        return [first_logprobs(self._digest if with_adapter else None, prompt_ids, temperature)]

    def abandon(self) -> None:
        self._under_way.clear()

    def parameters(self) -> dict[str, torch.Tensor]:
        return self.live


class PretendedProcess(EngineProcess):
    """A process of an engine that has no vLLM; its weights come from the store, and are proved, as every engine's."""

    step_s = 0.02

    def start(self, spec: EngineSpec, tensor_rank: int, point: MeetingPoint) -> int | None:
        self._tensor_rank = tensor_rank
        is_pinned = spec.rollout.mode == "pinned"
        engine = PretendedEngine(self.step_s, self._shown, is_pinned)
        self._engine = self._sampler = engine  # type: ignore[assignment]
        self._model_path = "" if spec.rollout.vllm.get("load_format") == "dummy" else spec.model_path
        return self.engine.num_slots

    def inspect(self, function: Callable[..., Any], written: Sequence[Series], *arguments: Any) -> Any:
        """As if ``written`` had been loaded at the start."""
        assert self._model_path, "an engine that loads nothing is asked what it has loaded"
        self.engine.live = self.loaded(slices_of(written), *arguments)  # type: ignore[attr-defined]
        return super().inspect(function, written, *arguments)

    def loaded(self, slices: list[Slice], dtype: torch.dtype, *_: Any) -> dict[str, torch.Tensor]:
        reader = HFReader(self._model_path)
        model = {piece.hf_name: reader.read(piece.hf_name, whole_box(reader.shape(piece.hf_name))) for piece in slices}
        return local_parameters(slices, {name: tensor.to(dtype) for name, tensor in model.items()}, dtype)

    def attach(self, form: StoreForm, owners: Sequence[OwnerAddress] = ()) -> None:
        super().attach(form, owners)
        if not self.engine.live:  # type: ignore[attr-defined]
            self.engine.live = empty_parameters(form)  # type: ignore[attr-defined]


class PretendedKeptProcess(PretendedProcess, KeptEngine):
    """The same on a cluster of the user's own."""

    def start(self, spec: EngineSpec, tensor_rank: int, point: MeetingPoint) -> int | None:
        num_slots = super().start(spec, tensor_rank, point)
        self._started_as = kept_engine.digest(spec)
        return num_slots
