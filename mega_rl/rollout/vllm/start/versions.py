"""What differs between the supported versions of vLLM: 0.23, also under vllm-ascend 0.23, and 0.28 to 0.32.

Each difference is read off the installed vLLM itself. ``tests/contract`` holds the recorded signatures of both ends and
checks every branch against them. vLLM is imported inside the functions that need it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_rl.errors import InputError
from mega_rl.rollout.receiver import Receiver
from mega_rl.rollout.vllm.start.adapter_slots import BASE, live_slots
from mega_rl.rollout.vllm.start.environment import BATCH_INVARIANT

EXPERT_WEIGHTS = ("w13_weight", "w2_weight")
INVARIANT_FROM = 90  # compute capability of devices with batch-invariant kernels
CAPTURE = "mega_rl_capture"  # of a module of experts on a CPU: is told which experts [T, K] take the tokens
WEIGHTED_INPUTS = "apply_router_weight_on_input"  # 0.32's name of what no supported family does
TURNS_EXPERTS = "npu"  # the device type whose plug-in, vllm-ascend, holds experts transposed


def parameter_name(name: str) -> str:
    """The name that 0.32 has for an engine's parameter: in earlier versions experts held their weights themselves.

    Layers with slots for adapters wrap the layer that they are without.
    """
    name = name.replace(f"{BASE}.", ".")
    path, _, last = name.rpartition(".")
    if last in EXPERT_WEIGHTS and path.endswith(".experts"):
        return f"{path}.routed_experts.{last}"
    return name


def live_parameters(model: torch.nn.Module) -> dict[str, Tensor]:
    """A worker's parameters by engine name, and its slots; a tied head appears once, under the embedding's name.

    vllm-ascend turns experts' weights into [expert, hidden, rows] once they are loaded. They are shown as everywhere
    else, [expert, rows, hidden], as transposed views of the memory that the engine computes with.
    """
    parameters = {parameter_name(name): parameter.data for name, parameter in model.named_parameters()}
    weights = {name: data.transpose(1, 2) if _is_turned(name, data) else data for name, data in parameters.items()}
    return weights | dict(live_slots(model))


def _is_turned(name: str, data: Tensor) -> bool:
    """Whether these are experts' weights as vllm-ascend computes with them; of two equal widths no shape says it."""
    return data.device.type == TURNS_EXPERTS and name.rpartition(".")[2] in EXPERT_WEIGHTS and data.is_contiguous()


def start_arguments(start_weight_update: Callable[..., None]) -> dict[str, Any]:
    """What vLLM's ``start_weight_update`` must be told: only 0.23 has to hear that its loader is not wanted."""
    takes_format = "is_checkpoint_format" in inspect.signature(start_weight_update).parameters
    return {"is_checkpoint_format": False} if takes_format else {}


class TransferMethods:
    """The methods that vLLM calls in a weight-transfer engine, for every supported version.

    vLLM's own base class, which ``weight_transfer.py`` mixes in behind this one, stores ``model`` in its constructor:
    ``(config, parallel_config, model)`` in 0.23, ``(config, vllm_config, device, model)`` from 0.28 on. Weights are
    written in place, so that a start and a finish have nothing to do; 0.23 does not ask for them.
    """

    model: torch.nn.Module
    _receiver: Receiver | None = None

    def init_transfer_engine(self, init_info: Any) -> None:
        """Join the trainer's ranks; blocks until all of them have joined. ``init_info.link`` is a ``Link``."""
        assert self._receiver is None, "the group is joined once: rebuilding it exhausts an accelerator's resources"
        self._receiver = Receiver(init_info.link, partial(live_parameters, self.model))

    def start_weight_update(self) -> None:
        """Nothing to prepare: the parameters stay live."""

    def receive_weights(self, update_info: Any, load_weights: Callable[..., None] | None = None) -> None:
        """One sync into the live parameters; ``load_weights`` is what 0.23 passes besides, for whole tensors."""
        assert self._receiver is not None, "weights before the group was joined"
        self._receiver.receive()

    def finish_weight_update(self) -> None:
        """Nothing to pack; the engine around the worker forgets its cached prefixes."""

    def shutdown(self) -> None:
        """The group goes with the process."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """0.23 requires this method of every class; the trainer sends by the plan instead."""
        raise AssertionError("weights are sent shard to shard, never as a stream of whole tensors")


@contextmanager
def plain_cpu_experts() -> Iterator[None]:
    """Let experts on a CPU use their weights as they are loaded; wraps an engine's construction and every reload.

    Packing would hide the experts' weights from updates in place. In addition, 0.32 packs at the first loading only, so
    that after a reload its kernel would take plain weights for packed ones, silently.
    """
    from vllm.model_executor.layers import utils as layer_utils
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    if hasattr(cpu_moe, "CPUUnquantizedExperts"):
        with mock.patch.object(cpu_moe.CPUUnquantizedExperts, "process_weights_after_loading", _keep_experts):
            yield
        return
    from vllm.model_executor.layers.fused_moe import cpu_fused_moe

    with (
        mock.patch.object(cpu_fused_moe.CPUFusedMOE, "__init__", _keep_experts_023),
        mock.patch.object(layer_utils, "check_cpu_sgl_kernel", lambda *_: False),
    ):
        yield


def _keep_experts(experts: Any, layer: Any) -> None:
    experts.apply = _PlainExperts(layer).apply


def _keep_experts_023(experts: Any, layer: Any) -> None:
    experts.forward_method = _apply_experts_023


def _apply_experts_023(
    layer: Any,
    hidden_states: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    activation: Any,
    num_experts: int,
    weights_inputs: bool,
) -> Tensor:
    output, weights = torch.empty_like(hidden_states), (layer.w13_weight, layer.w2_weight)
    chosen = topk_weights, topk_ids
    _PlainExperts(layer).apply(output, hidden_states, *weights, *chosen, apply_router_weight_on_input=weights_inputs)
    return output


@dataclass(frozen=True)
class _PlainExperts:
    """The experts of one of vLLM's layers, on a CPU."""

    layer: Any

    def apply(
        self,
        output: Tensor,
        hidden_states: Tensor,
        w1: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        **others: Any,
    ) -> None:
        """0.32's ``apply`` on plain weights: w1 [E, gate and up rows, D], w2 [E, D, rows]; ids and weights [T, K].

        With expert parallelism E counts this worker's experts only; a token's others are computed, and added,
        elsewhere.
        """
        assert not others.get(WEIGHTED_INPUTS), "no supported family weights the experts' inputs"
        if (capture := getattr(self.layer, CAPTURE, None)) is not None:
            capture(topk_ids.clone())
        output.zero_()
        if self.layer.expert_map is not None:
            topk_ids = self.layer.expert_map[topk_ids.long()]  # -1: another worker's
        for expert in topk_ids[topk_ids >= 0].unique().tolist():
            tokens, places = torch.where(topk_ids == expert)
            gate, up = F.linear(hidden_states[tokens], w1[expert]).chunk(2, dim=-1)
            result = F.linear(F.silu(gate) * up, w2[expert])
            output.index_add_(0, tokens, result * topk_weights[tokens, places, None].to(result.dtype))


def check_batch_invariance(envs: Any, current_platform: Any) -> None:
    """
    Args:
        envs, current_platform: vLLM's.

    Raises:
        InputError: this vLLM has no batch-invariant kernels for this device, or was imported without them.
    """
    is_known = BATCH_INVARIANT in envs.environment_variables
    if not is_known or not current_platform.has_device_capability(INVARIANT_FROM):
        what = "device: it needs compute capability 9.0" if is_known else "version of vLLM"
        raise InputError(
            f"rollout.batch_invariant is True, but vLLM has no such kernels for this {what}: set it to false"
        )
    assert envs.VLLM_BATCH_INVARIANT, "vLLM was imported before the variable was set"


def render(llm: Any, token_ids: list[int], pictures: list[Any]) -> dict[str, Any]:
    """What an engine makes of a prompt with one token for each of its pictures; both covered versions call it so.

    Nothing of it is kept: ``picture_arguments`` turns all of vLLM's caches of processed pictures off.
    """
    prompt = {"prompt_token_ids": token_ids, "multi_modal_data": {"image": pictures}}
    (rendered,) = llm.llm_engine.renderer.render_cmpl([prompt])
    return dict(rendered)


@contextmanager
def picture_constants_kept() -> Iterator[None]:
    """Models made in it keep the numbers by which they normalise pictures, if the engine reads no weights.

    vLLM 0.32 has them in the model, in buffers that its dummy loader fills with random numbers and that no sync writes:
    of several engines all but the first, which reads weights, would see something else than the picture.
    """
    try:
        from vllm.model_executor.layers.fusion.mm_input_norm import FusedMMInputNorm
    except ImportError:  # vLLM 0.23 normalises pictures before they come to the model
        yield
        return
    make = FusedMMInputNorm.__init__

    def make_with_constants(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._non_persistent_buffers_set.update(("weight", "bias"))  # the dummy loader passes over those

    with mock.patch.object(FusedMMInputNorm, "__init__", make_with_constants):
        yield


def forget_prefixes(llm: Any) -> bool:
    """Drop all cached keys and values; requests that run are put back and computed anew. False: some were kept."""
    return bool(llm.reset_prefix_cache(reset_running_requests=True))


def num_sampled_tokens(llm: Any) -> dict[str, int]:
    """Tokens that the unfinished requests of an engine in this process have so far, by the names it was given.

    Where an engine begins its next step before the last one has ended, those of the step under way count too.
    """
    requests = llm.llm_engine.engine_core.engine_core.scheduler.requests
    return {external_name(name): r.num_output_tokens + r.num_output_placeholders for name, r in requests.items()}


def outputs_so_far(llm: Any) -> list[Any]:
    """What each unfinished request of an engine in this process has, as if it ended here; all of them go on."""
    from vllm.v1.engine import FinishReason

    states = llm.llm_engine.output_processor.request_states
    return [state.make_request_output([], None, FinishReason.ABORT, None) for state in states.values()]


def taken_out(llm: Any) -> list[Any]:
    """Take all requests out of an engine in this process; returns what each has so far, as vLLM's outputs.

    Nothing of them runs afterwards: an accelerator may still compute a batch ahead, whose tokens are lost.
    """
    outputs = outputs_so_far(llm)
    llm.llm_engine.abort_request([output.request_id for output in outputs])
    core = llm.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests() or core.batch_queue:
        llm.llm_engine.step()
    return outputs


def external_name(name: str) -> str:
    """The name under which a request was added; the engine may have put a word of its own behind it."""
    return name.split("-")[0]


def leave_routing_to_first_rank(llm: Any) -> None:
    """Let an engine of several ranks return the experts of its tokens on its first rank only.

    In 0.32 the workers of the other ranks return none, but in processes that a launcher started each rank has a
    scheduler of its own, which expects them. Earlier schedulers have no such connector, and every rank returns them.
    """
    from vllm.distributed.parallel_state import get_tp_group

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    if not get_tp_group().is_first_rank and hasattr(scheduler, "aux_output_connector"):
        scheduler.aux_output_connector = None


@torch.no_grad()
def undo_wake_up(model: torch.nn.Module) -> None:
    """Give experts back the layout that they had before vllm-ascend's ``wake_up``, ahead of an update.

    ``wake_up`` of 0.23 shows the experts' weights as a loader wants them, as transposed views of the same memory, with
    which the engine cannot compute. vLLM's reload copies what it has processed into the tensors that it finds.
    """
    for name, parameter in model.named_parameters():
        if name.rpartition(".")[2] in EXPERT_WEIGHTS and not parameter.is_contiguous():
            parameter.data = parameter.data.transpose(1, 2)
            assert parameter.is_contiguous(), f"{name} is no transposed view"


def use_logprobs_mode(sampler: Any, mode: str) -> None:
    """Make the sampler of a worker on Ascend return the log-probabilities that the engine was asked for.

    vllm-ascend 0.23 builds its sampler with the default, log-probabilities before the temperature, whatever the
    engine's ``logprobs_mode`` says.
    """
    for part in (sampler, sampler.topk_topp_sampler):
        part.logprobs_mode = mode
