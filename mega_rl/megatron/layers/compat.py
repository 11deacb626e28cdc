"""Fixes inside Megatron-core 0.16, most of them for devices other than CUDA's, applied once at Megatron's import.

``platform.accelerator`` answers the calls of torch itself; these are Megatron's own functions. Each fix says what
breaks without it. If MindSpeed patches Megatron for Ascend, it has its own versions of the first ones.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mega_rl.megatron.layers import host_linear
from mega_rl.platform import accelerator
from mega_rl.platform.operators.weight_gradients import WeightGradients


def _without_compile(load: Callable[[], Any]) -> Any:
    """Megatron wraps small helpers in torch.compile as it is imported, which would run a C++ compiler for each."""
    original = torch.compile
    torch.compile = lambda fn=None, *args, **kwargs: fn if callable(fn) else (lambda f: f)  # type: ignore[assignment]
    try:
        return load()
    finally:
        torch.compile = original


def _import_megatron() -> None:
    import megatron.core.jit as jit

    jit.jit_fuser = lambda fn: fn  # for Megatron modules imported later
    import megatron.core.models.gpt  # noqa: F401
    import megatron.core.optimizer  # noqa: F401


def _generator_states(own: Any) -> None:
    """The RNG tracker sets states through a lazy call that without CUDA only queues: dropout would differ."""
    import megatron.core.tensor_parallel.random as random

    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: own.set_rng_state(state)
    random._get_cuda_rng_state = lambda device="", clone=False, graph_safe=False: own.get_rng_state()
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed within GPU RNG context" not in record.getMessage()
    )


def _without_transformer_engine() -> None:
    """If it is missing, routers read a function that is undefined, and latent attention takes it for installed."""
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.multi_latent_attention as multi_latent_attention

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    if not isinstance(multi_latent_attention.TELinear, type):  # a stand-in
        multi_latent_attention.HAVE_TE = False


def _expert_split_sizes() -> None:
    """Only tensors of a CUDA device become the host numbers that the all-to-all between experts asks for."""
    import megatron.core.transformer.moe.moe_utils as moe_utils
    import megatron.core.transformer.moe.token_dispatcher as token_dispatcher

    def to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if not torch.is_tensor(tensor):
            return tensor
        tensor = tensor.cpu()  # waits for the copy, so there is no stream to record
        return tensor.numpy() if as_numpy else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_host


def spare_a_rank_alone() -> None:
    """Without data parallelism the gradient and weight buffers would be copied onto themselves at every step."""
    import megatron.core.distributed.param_and_grad_buffer as buffers

    def unless_alone(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(output: Tensor, source: Tensor, *, group: Any, **kwargs: Any) -> Any:
            if group.size() == 1 and output.data_ptr() == source.data_ptr():
                return None
            return collective(output, source, group=group, **kwargs)

        return call

    buffers.dist_all_gather_func = unless_alone(buffers.dist_all_gather_func)
    buffers.dist_reduce_scatter_func = unless_alone(buffers.dist_reduce_scatter_func)


def _weight_gradients() -> None:
    """Without apex Megatron refuses ``gradient_accumulation_fusion``, though torch has what it needs."""
    import megatron.core.tensor_parallel.layers as layers

    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = WeightGradients
        layers._grad_accum_fusion_available = True


def _host_products() -> None:
    """On a CPU Megatron's linear layers would take torch's own choice of a matrix product, often the slower one."""
    import megatron.core.tensor_parallel.layers as layers

    host_linear.install(layers)


def apply() -> None:
    """Put all fixes in place; must run before any other module imports Megatron."""
    # Megatron 0.16 calls collectives by names that torch 2.13 has renamed, and torch says so on every rank.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    if accelerator.installed() is not None:
        # Megatron says once per file and rank that the fused kernels of TransformerEngine and apex are missing.
        warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
        _without_compile(_import_megatron)
        _generator_states(accelerator.installed())
        _expert_split_sizes()
    if isinstance(accelerator.installed(), accelerator.HostDevice):
        _host_products()
    spare_a_rank_alone()
    _without_transformer_engine()
    _weight_gradients()
