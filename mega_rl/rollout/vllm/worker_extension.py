"""What vLLM's worker learns from us: to show its live parameters, and to take new weights through its own loader."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from mega_rl.bridge.mapping.vllm_slots import Slots
from mega_rl.rollout.vllm.sleeping_memory import dropped
from mega_rl.rollout.vllm.start.adapter_slots import open_slots
from mega_rl.rollout.vllm.start.cpu_routing import RoutingCapture
from mega_rl.rollout.vllm.start.versions import live_parameters, parameter_name, undo_wake_up, use_logprobs_mode


class WeightReceiver:
    """Mixed into vLLM's worker class (``worker_extension_cls``): no method may share a name with the worker's own."""

    model_runner: Any
    device: torch.device
    receiver_routing: RoutingCapture

    def receiver_parameters(self) -> dict[str, torch.Tensor]:
        """``live_parameters`` of this rank."""
        return live_parameters(self.model_runner.get_model())

    def receiver_dropped(self, names: Collection[str]) -> AbstractContextManager[None]:
        """``dropped`` for live parameters of these names."""
        parameters = self.receiver_parameters()
        return dropped([parameters[name] for name in names], self.device.type)

    def receiver_set_up(self, logprobs_mode: str) -> None:
        """What the worker does not take from the engine's arguments by itself."""
        if self.device.type == "npu":
            use_logprobs_mode(self.model_runner.sampler, logprobs_mode)

    @torch.no_grad()
    def receiver_open_slots(self, slots: Slots) -> Any:
        """Register an adapter that adds nothing and show its slots among the parameters; returns what requests take."""
        return open_slots(self.model_runner, slots)

    def receiver_begin_update(self) -> None:
        """Give the parameters the layout with which the engine computes."""
        if self.device.type == "npu":
            undo_wake_up(self.model_runner.get_model())

    def receiver_begin_reload(self) -> None:
        """Give every layer its unpacked parameters back, so that the loader can fill them."""
        with self.device:
            initialize_layerwise_reload(self.model_runner.get_model())

    def receiver_capture_routing(self) -> None:
        """Keep the experts of all tokens from here on (CPU only)."""
        self.receiver_routing = RoutingCapture(self.model_runner)

    def receiver_routed_experts(self, request: str, num_tokens: int) -> npt.NDArray[np.uint16]:
        """``RoutingCapture.of`` this rank."""
        return self.receiver_routing.of(request, num_tokens)

    @torch.no_grad()
    def receiver_load(self, weights: Iterator[tuple[str, torch.Tensor]]) -> set[str]:
        """Load Hugging Face tensors; returns the engine's names of the parameters that they touched.

        If the model does not report the names, all of them are returned: then no missing parameter can be found.
        """
        with self.device:
            loaded = self.model_runner.get_model().load_weights(weights)
        return set(self.receiver_parameters()) if loaded is None else {parameter_name(name) for name in loaded}

    @torch.no_grad()
    def receiver_finish_reload(self) -> None:
        """Pack what the loader has filled."""
        model = self.model_runner.get_model()
        with self.device:
            finalize_layerwise_reload(model, self.model_runner.model_config)
        if current_platform.is_cpu():
            _repack_tied_head(model)


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Pack a tied head from the embedding's new weight.

    The loader fills the embedding only: a head that shares its weight would keep the old packed copy, silently (seen
    in vLLM 0.28 to 0.32).
    """
    decoder = getattr(model, "language_model", model)
    head = getattr(decoder, "lm_head", None)
    embedding = getattr(getattr(decoder, "model", None), "embed_tokens", None)
    if head is None or embedding is None or not hasattr(head, "cpu_linear"):
        return
    if head.weight.data_ptr() == embedding.weight.data_ptr():
        head.quant_method.process_weights_after_loading(head)
