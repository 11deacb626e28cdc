"""Which experts vLLM's CPU runner sends tokens to: what ``enable_return_routed_experts`` returns on accelerators.

That option of 0.32 needs a runner that needs Triton, and 0.23's experts on a CPU bypass the routers that it listens to.
Our own experts (``versions.plain_cpu_experts``) are told the choice, so they report it here.

Letters: N tokens of one step, M layers with experts, K experts of a token.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mega_rl.rollout.vllm.start.versions import CAPTURE, EXPERT_WEIGHTS

_LAYER = re.compile(r"\blayers\.(\d+)\.")


class RoutingCapture:
    """Keeps the experts of every token in the engine's cache of keys and values, by the token's slot there.

    A prefix that several responses share is computed once, and its experts are then found by the same slots. On a CPU
    the engine schedules a step only after the step before is over, so a response that has ended still has its slots.
    """

    def __init__(self, runner: Any) -> None:
        """``runner``: vLLM's; its ``execute_model`` is replaced by one that keeps the experts, too."""
        self._runner, self._cache = runner, runner.cache_config
        self._chosen: dict[int, Tensor] = {}  # layer -> [N, K], of the step under way
        self._by_slot: npt.NDArray[np.uint16] | None = None  # [slots, M, K]
        self._blocks: dict[str, list[int]] = {}  # request -> its blocks of the cache
        for name, module in runner.get_model().named_modules():
            if hasattr(module, EXPERT_WEIGHTS[0]) and (found := _LAYER.search(f"{name}.")):
                setattr(module, CAPTURE, partial(self._chosen.__setitem__, int(found[1])))
        self._execute_model = runner.execute_model
        runner.execute_model = self._execute_and_keep

    def _execute_and_keep(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        for request in scheduler_output.finished_req_ids:
            self._blocks.pop(request, None)
        self._chosen.clear()
        result = self._execute_model(scheduler_output, *args, **kwargs)
        if self._chosen:
            self._keep(scheduler_output.num_scheduled_tokens)
        return result

    def _keep(self, num_scheduled: dict[str, int]) -> None:
        rows_NMK = torch.stack([self._chosen[layer] for layer in sorted(self._chosen)], dim=1).to(torch.int32).numpy()
        if self._by_slot is None:
            num_slots = self._cache.num_gpu_blocks * self._cache.block_size
            self._by_slot = np.zeros((num_slots, *rows_NMK.shape[1:]), np.uint16)
        start = 0
        for request in self._runner.input_batch.req_ids:
            state, num_tokens = self._runner.requests[request], num_scheduled[request]
            self._blocks[request] = list(state.block_ids[0])
            positions = np.arange(state.num_computed_tokens, state.num_computed_tokens + num_tokens)
            self._by_slot[self._slots(request, positions)] = rows_NMK[start : start + num_tokens]
            start += num_tokens

    def _slots(self, request: str, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        size = self._cache.block_size
        return np.array(self._blocks[request])[positions // size] * size + positions % size

    def of(self, request: str, num_tokens: int) -> npt.NDArray[np.uint16]:
        """[num_tokens, M, K]: the experts of the first tokens of a response that the last step has ended.

        Args:
            request: its name as it was submitted; vLLM appends random letters of its own.
        """
        assert self._by_slot is not None, "no token was computed yet"
        (name,) = [name for name in self._blocks if name.partition("-")[0] == request]
        return self._by_slot[self._slots(name, np.arange(num_tokens))]
