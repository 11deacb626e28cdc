"""Whether engines load a model as the trainer does: one of each kind shows it before any of that kind serves.

The engines of a fleet need no weights of their own, and what is written into them is read back by the way it was
written. So a kernel that rearranges a weight once it is loaded would have its weights in the wrong order, and nothing
would show it but the weights that an engine has loaded by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mega_rl.bridge.mapping.live_check import difference
from mega_rl.bridge.reshard.held_pieces import Numbers
from mega_rl.bridge.reshard.proof import Difference, LoadProof, differing, first_difference, loaded_otherwise
from mega_rl.bridge.series import Series, slices_of
from mega_rl.errors import InputError
from mega_rl.fleet.events import Start
from mega_rl.rollout.remote.engine_process import EngineSpec
from mega_rl.rollout.vllm.start.options import without_weights

REMEDY = (
    "set rollout.vllm.kernel_config to a kernel that leaves weights in their order (such as {moe_backend: triton}), or "
    "rollout.mode=synchronous with rollout.placement=colocated, where weights go through the engine's own loader"
)


def own_load(
    parameters: Mapping[str, Tensor],
    written: Sequence[Series],
    dtype: torch.dtype,
    layout: Sequence[Series],
    asked: Numbers | None,
    expected: Numbers,
    salt: int,
) -> str | Difference:
    """What an engine's worker has loaded otherwise, or words about what cannot be written; runs in the worker.

    Args:
        written: what it will be sent, of this dtype; the others are as of ``differing``.
    """
    words = difference(parameters, slices_of(written), dtype)
    return words or differing(parameters, layout, asked, expected, salt)


class LoadChecks:
    """The kinds of engines of a run, and what is known of them. One thread calls all methods.

    The first engine of a kind loads ``model.path``; others of it may start meanwhile, without weights, and wait.
    """

    def __init__(self, spec: EngineSpec, proof: LoadProof, say: Callable[[str], None]) -> None:
        """
        Args:
            spec: what an engine is started with that loads weights by itself.
            proof: of what the trainer has loaded.
            say: is told of every kind that is as it has to be.

        Raises:
            InputError: no engine is to load weights.
        """
        if spec.rollout.vllm.get("load_format") == "dummy":
            raise InputError(
                "rollout.vllm.load_format is 'dummy', but one engine of each kind loads model.path, to be compared "
                "with the trainer: remove it, the other engines start without weights anyhow"
            )
        self.spec = replace(spec, rollout=without_weights(spec.rollout))  # of an engine that takes all from the store
        self._loading_spec, self._proof, self._say = spec, proof, say
        self._kinds: dict[Start, str] = {}  # of the engines that are not told of yet
        self._right: set[str] = set()  # kinds
        self._loading: dict[str, Start] = {}  # kind -> the engine that shows it
        self._waiting: dict[str, list[Start]] = {}  # kind -> engines that have started

    def spec_of(self, start: Start, kind: str) -> EngineSpec:
        """What an engine of this kind is started with."""
        self._kinds[start] = kind
        if kind in self._right or kind in self._loading:
            return self.spec
        self._loading[kind] = start
        return self._loading_spec

    def questions(
        self, start: Start, written: Sequence[Sequence[Series]], dtype: torch.dtype
    ) -> list[tuple[object, ...]] | None:
        """The arguments of ``own_load`` for each worker of an engine that has started; None: it has loaded nothing."""
        if self._loading.get(self._kinds[start]) != start:
            return None
        pairs = zip(written, self._proof.questions, strict=True)
        return [(of_worker, dtype, *question) for of_worker, question in pairs]

    def started(self, start: Start) -> list[Start]:
        """The engines that may serve, now that this one has started without weights: itself, or none yet."""
        kind = self._kinds[start]
        if kind not in self._right:
            self._waiting.setdefault(kind, []).append(start)
            return []
        del self._kinds[start]
        return [start]

    def compared(self, start: Start, found: Sequence[str | Difference]) -> list[Start]:
        """The engines that may serve, now that this one's workers have said what they have loaded.

        Raises:
            InputError: they have loaded otherwise than the trainer.
        """
        kind = self._kinds[start]
        words = next((one for one in found if isinstance(one, str)), None)
        if words is None:
            wrong = first_difference({i: one for i, one in enumerate(found) if isinstance(one, Difference)})
            words = wrong and loaded_otherwise(f"engine {start.engine}", wrong[1])
        if words is not None:
            mode = self.spec.rollout.mode
            raise InputError(f"rollout.mode={mode} cannot write {words} (engines of kind {kind}): {REMEDY}")
        self._say(f"engine {start.engine} of kind {kind} holds model.path as the trainer does")
        self._right.add(kind)
        del self._loading[kind]
        serving = [start, *self._waiting.pop(kind, [])]
        for one in serving:
            del self._kinds[one]
        return serving

    def left(self, start: Start) -> None:
        """The engine has ended."""
        kind = self._kinds.pop(start, None)
        if kind is None:
            return
        if self._loading.get(kind) == start:
            del self._loading[kind]
        if start in (waiting := self._waiting.get(kind, [])):
            waiting.remove(start)

    def abandoned(self) -> list[Start]:
        """One engine for each kind of which some wait and none loads any more: it must begin anew."""
        return [starts[0] for kind, starts in self._waiting.items() if starts and kind not in self._loading]
