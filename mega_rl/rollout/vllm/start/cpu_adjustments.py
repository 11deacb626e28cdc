"""What the CPU build of vLLM needs while an engine is constructed.

vLLM is imported inside, so that other platforms never load these parts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mega_rl.errors import InputError
from mega_rl.models.shape import read_model_shape
from mega_rl.platform.operators import products
from mega_rl.rollout.vllm.start.versions import plain_cpu_experts

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "mega_rl-"  # of shared-memory names


@contextmanager
def cpu_adjustments(*, live_weights: bool, job: str) -> Iterator[None]:
    """Adjust vLLM while ``vllm.LLM`` is constructed on a CPU, and put everything back afterwards.

    The process, which is the trainer's too, is not bound to the memory of one NUMA node.

    Args:
        live_weights: keep linear weights as plain tensors. By default they are packed and the visible parameter becomes
            empty, so that nothing could be written in place; with torch's own matrix products generation is about 20 %
            slower without the packing. Experts are never packed, see ``plain_cpu_experts``.
        job: a word that only this launch has. Ranks of one engine meet in shared memory whose name, under an external
            launcher, holds nothing but their rank numbers: two launches that start at the same time on one machine
            would join each other's memory.
    """
    from vllm.distributed.device_communicators.cpu_communicator import _CPUSHMDistributed

    group_name = _CPUSHMDistributed.make_group_name

    def job_group_name(communicator: Any) -> str:
        # vLLM's worker sets the variable, and a model without an engine has no worker.
        identifier = {"VLLM_DIST_IDENT": os.environ.get("VLLM_DIST_IDENT", job)}
        with mock.patch.dict(os.environ, identifier):
            return f"{PREFIX}{job}-{group_name(communicator).lstrip('/')}"

    with (
        mock.patch.object(torch.ops._C, "init_cpu_memory_env", lambda nodes: None, create=True),
        plain_weights(live_weights),
        mock.patch.object(_CPUSHMDistributed, "make_group_name", staticmethod(job_group_name)),
    ):
        yield
    # All ranks have met by now; memory without a name is freed with the last of them, however they end.
    for path in SHARED_MEMORY.glob(f"{PREFIX}{job}-*"):
        path.unlink(missing_ok=True)


@contextmanager
def plain_weights(live_weights: bool) -> Iterator[None]:
    """Wraps the loading of weights: an engine constructed in it must be reloaded in it, into the same tensors."""
    with plain_cpu_experts(), _plain_linear_weights() if live_weights else nullcontext():
        yield


def _linear(x: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
    # vLLM's parameters are of a class of their own, by which every look at one would be a call.
    with torch._C.DisableTorchFunctionSubclass():
        return products.outputs(x.flatten(0, -2), weight_FD, bias_F).view(*x.shape[:-1], len(weight_FD))


@contextmanager
def _plain_linear_weights() -> Iterator[None]:
    """Linear weights stay as they are loaded."""
    from vllm.model_executor.layers import utils as layer_utils

    pack = layer_utils.dispatch_cpu_unquantized_gemm

    def keep(layer: Any, *args: Any, **kwargs: Any) -> None:
        if layer.weight.ndim == 2:
            layer.cpu_linear = _linear
        else:
            pack(layer, *args, **kwargs)

    with mock.patch.object(layer_utils, "dispatch_cpu_unquantized_gemm", keep):
        yield


def check_head_size(model_path: str) -> None:
    """Raise InputError for heads that the engine's CPU attention cannot take: vLLM itself fails in its first answer."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    head_dim, supported = read_model_shape(model_path).head_dim, CPUAttentionBackend.get_supported_head_sizes()
    if head_dim not in supported:
        raise InputError(
            f"model.path={model_path} has attention heads of {head_dim} channels, and vLLM on a CPU takes "
            f"{', '.join(map(str, supported))}: choose another model, or another platform.name."
        )
