"""Low-rank adapters on Megatron-core's local linear layers: what they add to a layer's output, and their gradients.

A fused local weight holds several Hugging Face linears, and each of them has an adapter of its own, so that adapters
are PEFT's, tensor by tensor. What crosses tensor-parallel ranks is only ever r wide:

| weight | A | B | sums |
|---|---|---|---|
| cut by rows | whole, ``[P * r, columns]`` | own rows | A x is gathered (sequence parallel) or copied |
| cut by columns | own columns | whole | A x is summed, with sequence parallelism scattered |
| of experts | likewise | likewise | the token dispatcher sums outputs and input gradients |

A factor that is whole on every rank gets a complete gradient on each, but for two cases: with sequence parallelism
Megatron sums what is marked ``sequence_parallel``; of experts cut over ranks ``_SumGradients`` does.

Letters: r rank of an adapter, N rows sorted by expert, D width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn.functional import linear

from mega_rl.bridge.mapping.adapter import AdaptedWeight, Projection, adapted_weights
from mega_rl.bridge.mapping.tuning import EXPERTS, AdapterPlan, module_of
from mega_rl.bridge.series import Number, Series, hf_name_of
from mega_rl.megatron.tuning.dropout import DroppedProduct, column_keys
from mega_rl.platform import dispatch as operators


class _SumGradients(torch.autograd.Function):
    """The weights as they are; their gradients are summed over a group, all in one collective."""

    @staticmethod
    def forward(ctx: Any, group: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        flat = _flatten_dense_tensors([gradient.contiguous() for gradient in gradients])
        torch.distributed.all_reduce(flat, group=ctx.group)
        return None, *_unflatten_dense_tensors(flat, gradients)


class Adapter(torch.nn.Module):
    """The adapters of all projections of one local weight; the module's output is what they add to the layer's.

    ``A`` is [P * r, own columns] and ``B0``, ``B1``, ... [own rows, r], of the P projections that have an adapter.

    Args:
        weight: the local weight.
        kind: what it holds.
        scale: of B A.
        is_column: whether tensor parallelism cuts the weight by rows, which are the columns of Megatron's product.
        is_expert: whether it is an expert's.
        is_sequence_parallel: whether the model is.
    """

    A: Tensor
    dropout = 0.0
    column_keys_D: Tensor  # with dropout: of the layer's input
    token_keys_N: Tensor | None = None  # of all tokens of the micro-batch under way; None: nothing is dropped

    def __init__(
        self,
        weight: Tensor,
        kind: AdaptedWeight,
        scale: float,
        is_column: bool,
        is_expert: bool,
        is_sequence_parallel: bool,
    ) -> None:
        super().__init__()
        self.projections, self.rank, self.scale = kind.projections, kind.rank, scale
        self.is_column, self.is_on = is_column, True
        self.is_sequence_parallel = is_sequence_parallel and not is_expert
        groups = parallel_state
        get_group = groups.get_expert_tensor_parallel_group if is_expert else groups.get_tensor_model_parallel_group
        self.group = get_group()
        self.is_split = self.group.size() > 1
        self.turns = _turns(kind.projections)
        adapted = kind.adapted
        shapes = {"A": (len(adapted) * kind.rank, weight.shape[1])}
        shapes |= {f"B{number}": (one.num_rows, kind.rank) for number, one in enumerate(adapted)}
        self.bs = tuple(name for name in shapes if name != "A")
        for name, shape in shapes.items():
            parameter = torch.nn.Parameter(torch.zeros(shape, dtype=weight.dtype, device=weight.device))
            self._mark(parameter, is_whole=(name == "A") == is_column, is_expert=is_expert)
            self.register_parameter(name, parameter)

    def _mark(self, parameter: Any, is_whole: bool, is_expert: bool) -> None:
        """What Megatron's gradient sums and its norm, which counts every element once, go by."""
        # The norm leaves out what is not marked, but on the first rank of the dense tensor parallelism; this says
        # nothing of experts, whose copies are left out as ``shared``.
        parameter.tensor_model_parallel = not is_whole or is_expert
        parameter.partition_dim, parameter.partition_stride = (0 if self.is_column else 1), 1
        if is_expert:
            parameter.allreduce = False
            parameter.shared = is_whole and self.group.rank() > 0
        elif is_whole and self.is_split:
            parameter.sequence_parallel = self.is_sequence_parallel

    def factors(self) -> list[Tensor]:
        """The Bs."""
        return [getattr(self, name) for name in self.bs]

    def forward(self, x: Tensor) -> Tensor:
        """[..., columns] of the layer's input -> [..., local rows]."""
        hidden = self._product(x) * self.scale
        if self.is_split and self.is_column and self.is_sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True)
        elif self.is_split and self.is_column:
            hidden = copy_to_tensor_model_parallel_region(hidden)
        elif self.is_split and self.is_sequence_parallel:
            hidden = reduce_scatter_to_sequence_parallel_region(hidden)
        elif self.is_split:
            hidden = reduce_from_tensor_model_parallel_region(hidden)
        pairs = zip(hidden.split(self.rank, -1), self.factors(), strict=True)
        return self.join([linear(h, b) for h, b in pairs])

    def _product(self, x: Tensor) -> Tensor:
        if self.token_keys_N is None:
            return linear(x, self.A)
        keys = self.token_keys_N
        if self.is_column and self.is_sequence_parallel:  # x has the tokens of this rank
            keys = keys.chunk(self.group.size())[self.group.rank()]
        return DroppedProduct.apply(x, self.A, keys, self.column_keys_D, self.dropout)

    def drop(self, rate: float, number: Number) -> None:
        """Have dropout of the layer's input, one mask for all projections; ``number``: layer and expert."""
        first = next(one for one in self.projections if one.number is not None)
        keys = column_keys(hf_name_of(first.hf_name, number), range(*first.columns))
        self.dropout, self.column_keys_D = rate, keys.to(self.A.device)

    def join(self, outputs: Sequence[Tensor]) -> Tensor:
        """Per adapted projection [..., own rows] -> [..., local rows], zeros where there is no adapter."""
        if len(self.projections) == 1:
            return outputs[0]
        front = outputs[0].shape[:-1]
        parts = [
            outputs[0].new_zeros(*front, one.num_rows) if one.number is None else outputs[one.number]
            for one in self.projections
        ]
        turns = [part.view(*front, self.turns, part.shape[-1] // self.turns) for part in parts]
        return torch.cat(turns, dim=-1).flatten(-2)

    @torch.no_grad()
    def initialise(self, number: Number, seed: int, sizes: Mapping[str, Sequence[int]]) -> None:
        """PEFT's start: A from a uniform distribution within 1 / sqrt(columns) of 0, the same at every layout; B zero.

        Args:
            number: layer and expert of the weight.
            sizes: the full shapes of the Hugging Face weights.
        """
        for one in self.projections:
            if one.number is None:
                continue
            weight = hf_name_of(one.hf_name, number)
            key = hashlib.blake2b(f"{seed}:{weight}".encode(), digest_size=7).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(key, "big"))
            num_columns = sizes[weight][1]
            whole = 2 * torch.rand(self.rank, num_columns, generator=generator) - 1
            top = one.number * self.rank
            self.A[top : top + self.rank].copy_(whole[:, slice(*one.columns)] / num_columns**0.5)


def _turns(projections: Sequence[Projection]) -> int:
    """How often the projections alternate in the local rows: the key-value groups of linear_qkv, else once."""
    (turns,) = {len(one.local_rows) for one in projections}
    start = 0
    for turn in range(turns):
        for one in projections:
            assert one.local_rows[turn][0] == start, one
            start = one.local_rows[turn][1]
    return turns


def attach(
    chunk: Any, weights: Iterable[Series], plan: AdapterPlan, sizes: Mapping[str, Sequence[int]], seed: int
) -> dict[str, Adapter]:
    """Give the linear layers of a model chunk their adapters; must be before Megatron's wrapper looks for parameters.

    Args:
        weights: what the chunk holds, by its own local names.
        plan: which weights have an adapter.
        sizes: the full shapes of the Hugging Face weights.
        seed: of the first values of A.

    Returns:
        Local weight -> its adapter.
    """
    adapters: dict[str, Adapter] = {}
    for kind in adapted_weights(weights, plan):
        for number in ((layer, expert) for layer in kind.like.layers for expert in kind.like.experts):
            name = kind.like.local_name_of(number)
            layer: Any = chunk.get_submodule(module_of(name))
            is_column, is_expert = layer.weight.partition_dim == 0, EXPERTS in name  # Megatron marks where it cuts
            sequence = chunk.config.sequence_parallel
            adapter = Adapter(layer.weight, kind, plan.scale(kind.rank), is_column, is_expert, sequence)
            adapter.initialise(number, seed, sizes)
            if plan.dropout:
                adapter.drop(plan.dropout, number)
            layer.adapter, adapters[name] = adapter, adapter
            layer.sharded_state_dict = partial(_sharded_state_dict, layer)
            if not is_expert:  # those are multiplied together, by ``product_of_experts``
                layer.register_forward_hook(_add, prepend=True)  # before what else changes the output
    if plan.dropout:
        for layer in chunk.decoder.layers:
            own = [module for module in layer.modules() if isinstance(module, Adapter)]
            layer.register_forward_pre_hook(partial(_announce, own), with_kwargs=True)
    return adapters


def _announce(adapters: list[Adapter], _: Any, __: Any, keywords: Mapping[str, Any]) -> None:
    """Full recomputation calls a layer again when another micro-batch's keys may be in its adapters."""
    for adapter in adapters:
        adapter.token_keys_N = keywords["packed_seq_params"].token_keys_N


def _add(layer: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    return (output[0] + layer.adapter(inputs[0]), output[1]) if layer.adapter.is_on else output


def _sharded_state_dict(layer: Any, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> Any:
    """Megatron's own takes every tensor but weight and bias for a copy: of split factors one rank's would be saved."""
    axes = {"weight": 0, "bias": 0} if layer.adapter.is_column else {"weight": 1}
    axes |= {f"adapter.{name}": 0 for name in layer.adapter.bs} if layer.adapter.is_column else {"adapter.A": 1}
    state = layer.state_dict(prefix="", keep_vars=True)
    groups = {"tp_group": layer.tp_group, "dp_cp_group": metadata["dp_cp_group"]}
    return make_sharded_tensors_for_checkpoint(state, prefix, axes, sharded_offsets, **groups)


def product_of_experts(rows_ND: Tensor, layers: Sequence[Any], ends_E: Tensor) -> Tensor:
    """Rows sorted by expert, whose end ``ends_E``, through one linear layer of every expert, with their adapters."""
    output = operators.grouped_matmul(rows_ND, [layer.weight for layer in layers], ends_E)
    adapters: list[Adapter] = [layer.adapter for layer in layers if hasattr(layer, "adapter")]
    if not adapters or not adapters[0].is_on:
        return output
    assert len(adapters) == len(layers), "all experts of a layer have adapters, or none"
    own = adapters[0]
    first, others = [adapter.A for adapter in adapters], [adapter.factors() for adapter in adapters]
    if own.is_split and own.is_column:
        first = list(_SumGradients.apply(own.group, *first))
    elif own.is_split:
        summed = iter(_SumGradients.apply(own.group, *(b for bs in others for b in bs)))
        others = [[next(summed) for _ in bs] for bs in others]
    hidden = operators.grouped_matmul(rows_ND, first, ends_E) * own.scale
    parts = [
        operators.grouped_matmul(part.contiguous(), list(bs), ends_E)
        for part, bs in zip(hidden.split(own.rank, -1), zip(*others, strict=True), strict=True)
    ]
    return output + own.join(parts)


@contextmanager
def disabled(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """The frozen weights alone: the reference policy of a run with adapters, without a copy of anything."""
    adapters = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Adapter)]
    try:
        for adapter in adapters:
            adapter.is_on = False
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True
