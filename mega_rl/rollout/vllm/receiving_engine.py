"""vLLM in a process of its own, whose weights come from the trainer's processes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mega_rl.bridge.mapping.vllm_slots import Slots
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.rollout.partial import ResponsePiece, piece_of
from mega_rl.rollout.receiver import Link
from mega_rl.rollout.requests import resumed
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.rollout.vllm.start.environment import set_batch_invariance, set_environment
from mega_rl.rollout.vllm.start.options import TRANSFER_BACKEND
from mega_rl.rollout.vllm.start.seeing import Sight
from mega_rl.rollout.vllm.start.versions import outputs_so_far, start_arguments
from mega_rl.types import Span


class ReceivingEngine(VLLMEngine):
    """A ``VLLMEngine`` that takes an update with ``receive``, through vLLM's own start, update and finish."""

    def __init__(
        self,
        model_path: str | Path,
        rollout: RolloutConfig,
        *,
        max_model_len: int,
        device_type: str,
        dtype: str,
        slots: Slots | None = None,
        sight: Sight | None = None,
    ) -> None:
        set_environment(device_type)
        if rollout.batch_invariant:
            set_batch_invariance(device_type)
        _register()
        super().__init__(
            model_path,
            rollout,
            max_model_len=max_model_len,
            device_type=device_type,
            dtype=dtype,
            slots=slots,
            sight=sight,
        )

    def connect(self, link: Link) -> None:
        """Join the trainer's ranks in one group; blocks until all of them have joined."""
        self._llm.init_weight_transfer_engine({"init_info": {"link": link}})

    def receive(self) -> None:
        """Take one sync, between ``begin_update`` and ``finish_update``; the trainer's ranks run their part of it."""
        assert self._loaded is not None, "weights outside of an update"
        self._llm.start_weight_update(**start_arguments(self._llm.start_weight_update))
        self._llm.update_weights({"update_info": {}})
        self._llm.finish_weight_update()

    def grown(self, told: Mapping[int, int], least: int) -> dict[int, ResponsePiece]:
        """What responses under way have got, by number: of those that have at least so many tokens that are new.

        Args:
            told: tokens of each that are known; of those that are not in it: none.
            least: 1 or more.
        """
        found = {}
        for output in outputs_so_far(self._llm):
            number, (answer,) = int(output.request_id), output.outputs
            first, length, request = told.get(number, 0), len(answer.token_ids), self._under_way[number]
            if length - first < least or not request.with_logprobs:
                continue
            num_prompt = len(resumed(request).prompt.token_ids)
            spans = self._changes.spans_so_far(number, num_prompt + length) or (Span(num_prompt, self._version),)
            found[number] = piece_of(first, answer.token_ids, answer.logprobs.logprobs, spans)
        return found

    def abandon(self) -> None:
        """Drop all that is under way; nothing is returned for it."""
        self._llm.llm_engine.abort_request([str(number) for number in self._under_way])
        self._under_way.clear()
        self._beside.clear()
        self._changes.forget()
        self._rest_if_idle()


def _register() -> None:
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory as factory

    if TRANSFER_BACKEND not in factory._registry:  # a second registration under one name is an error
        factory.register_engine(TRANSFER_BACKEND, "mega_rl.rollout.vllm.weight_transfer", "ShardReceiver")
