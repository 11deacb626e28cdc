"""The training engine: a Megatron policy with gradients, optimizer and schedule. The loss is a callable it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor

from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.files.identity import identity
from mega_rl.bridge.mapping.adapter import adapter_tensors
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.series import Series, slices_of
from mega_rl.bridge.slices import Slice
from mega_rl.config.schema.sections import OptimizerConfig
from mega_rl.megatron.groups import Groups
from mega_rl.megatron.layers.balance import BalanceTotals, Balancing
from mega_rl.megatron.model.gathering import wait_before_reading
from mega_rl.megatron.model.value import NewScore
from mega_rl.megatron.offload import TrainerOffload
from mega_rl.megatron.optim.optimizer import (
    OptimizerStats,
    OptimizerStep,
    build_optimizer,
    learning_rate_schedule,
    master_of,
    owned_range,
)
from mega_rl.megatron.policy import MegatronPolicy
from mega_rl.microbatch import Figures, Microbatch, TokenStats

LossFunction = Callable[[TokenStats, Microbatch], tuple[Tensor, Figures]]
ValueLoss = Callable[[Tensor, Microbatch], tuple[Tensor, Figures]]  # of the values [T] of a value head


@dataclass(frozen=True)
class Optimization:
    """How the weights of a model are changed."""

    settings: OptimizerConfig  # AdamW's, and which learning-rate schedule
    num_steps: int  # optimizer steps, the length of the schedule
    max_skipped_steps: int = 0  # consecutive steps without a finite gradient that end the run; 0: never


class MegatronEngine:
    """The actor: forward, backward, optimizer step.

    Args:
        policy: the model, which gets its weights here.
        weights: where the starting weights come from.
        optimization: how they are changed.
        base: whose frozen weights this model trains on, instead of a copy of its own; None: its own.
        groups: of a layout that is not that of the process; the engine is built, and every method called, inside of
            ``in_its_groups``. None: the process's.
    """

    def __init__(
        self,
        policy: MegatronPolicy,
        weights: HFReader | NewScore,
        optimization: Optimization,
        base: MegatronPolicy | None = None,
        groups: Groups | None = None,
    ) -> None:
        self._groups = groups
        self.policy = policy
        if base is not None:
            self.policy.share_from(base)
        self.policy.load_huggingface(weights)
        self._weights = weights
        spec, chunks, overlap = policy.spec, policy.chunks, policy.spec.parallel
        settings = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=bool(overlap.overlap_grad_reduce),
            overlap_param_gather=bool(overlap.overlap_param_gather),
        )
        model_config = chunks[0].config
        # Only the first chunk's gradients are worth sending in pieces: its backward pass hides the others' transfer.
        self.wrapped = [
            DistributedDataParallel(model_config, settings, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(chunks)
        ]
        model_config.finalize_model_grads_func = self._finish_gradients
        if overlap.overlap_grad_reduce:
            contexts = [chunk.no_sync for chunk in self.wrapped]
            model_config.no_sync_func = contexts if len(contexts) > 1 else contexts[0]
        if overlap.overlap_param_gather:
            for wrapped, chunk in zip(self.wrapped, chunks, strict=True):
                wait_before_reading(wrapped, chunk)
        self.optimizer = build_optimizer(optimization.settings, spec, self.wrapped)
        model_config.grad_scale_func = self.optimizer.scale_loss
        self.lr_schedule = learning_rate_schedule(self.optimizer, optimization.settings, optimization.num_steps)
        # The wrapper moves parameters into one buffer; the names stay, the tensors' storage does not.
        self.policy.collect_parameters()
        self.gathers_late = bool(overlap.overlap_param_gather)
        self._balancing: Balancing | None = None  # the routers in the last forward and backward pass
        self.router_metrics: dict[str, float] = {}  # of the last optimizer step; none if the model has no experts
        self._is_scattered = False  # whether a rank holds new values only of its own share of the weights
        self.stepper = OptimizerStep(
            self.optimizer,
            self.policy.parameters,
            [*self.slices_of(dist.get_rank()), *slices_of(self.policy.adapter_series_of(dist.get_rank()))],
            [*hf_tensors(policy.shape), *adapter_tensors(policy.shape, policy.plan.adapters)],
            optimization.max_skipped_steps,
        )
        is_active, shares = platform.current().has_own_memory, base is not None
        self.offload = TrainerOffload(spec.memory, self.wrapped, self.optimizer, is_active, shares)
        self.adapter_start: str | None = None  # a digest of the adapter that training goes on from
        self.companions: dict[str, MegatronEngine] = {}  # further models of the run; a checkpoint of this one has them

    def in_its_groups(self) -> AbstractContextManager[None]:
        """Inside, Megatron has the process groups of this engine's layout."""
        return nullcontext() if self._groups is None else self._groups.current()

    @cached_property
    def base(self) -> str:
        """The hash of the weights that training started from. Collective at its first use."""
        assert isinstance(self._weights, HFReader), "a part of a model is trained on a base that is in files"
        return identity(self._weights, self.policy.shape)

    def slices_of(self, rank: int) -> list[Slice]:
        return self.policy.slices_of(rank)

    def series_of(self, rank: int) -> list[Series]:
        return self.policy.series_of(rank)

    def token_stats(self, microbatches: Sequence[Microbatch], record_experts: bool = False) -> list[TokenStats]:
        """Log-probabilities and entropy under the present weights, no gradient; as ``MegatronPolicy.token_stats``."""
        return self.policy.token_stats(microbatches, record_experts)

    def forward_backward(
        self, microbatches: Sequence[Microbatch], loss_function: LossFunction | ValueLoss
    ) -> list[Figures]:
        """Accumulate the gradients of all micro-batches and reduce them over the data-parallel ranks.

        Args:
            microbatches: this data-parallel rank's; every rank has the same number.
            loss_function: (statistics or values, micro-batch) -> (loss, figures for the metrics); the loss is already
                divided by the global denominators, so that the total gradient is a plain sum.

        Returns:
            The figures of each micro-batch, the loss as one of the sums, on the last pipeline stage; elsewhere an
            empty list.
        """
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._is_scattered = False  # the pass collects them

        is_of_values = self.policy.shape.head == "value"

        def on_output(microbatch: Microbatch, rows: Tensor) -> tuple[Tensor, Figures]:
            output: Any = rows[0] if is_of_values else TokenStats(*rows)
            loss, figures = loss_function(output, microbatch)
            return loss, Figures({"loss": loss.detach(), **figures.sums}, figures.maxima)

        self._balancing = self._new_balancing(microbatches)
        self.policy.begin_pass(microbatches, with_gradient=True)
        return self.policy.schedule(
            self.wrapped,
            microbatches,
            on_output,
            forward_only=False,
            dropout_step=self.lr_schedule.num_steps,
            balancing=self._balancing,
        )

    def _finish_gradients(self, *arguments: Any, **keys: Any) -> None:
        """Megatron calls it behind the last micro-batch's backward pass."""
        self.policy.finish_pass(with_gradient=True)
        finalize_model_grads(*arguments, **keys)

    def _new_balancing(self, microbatches: Sequence[Microbatch]) -> Balancing | None:
        """What the routers of experts learn and take down in one pass; None if the model has none. Collective."""
        policy = self.policy
        settings, mixture, layout = policy.spec.router, policy.shape.mixture, policy.layout
        if mixture is None:
            return None
        has_losses = bool(settings.aux_loss or settings.z_loss)
        rank = dist.get_rank()  # every pipeline stage has the same micro-batches
        is_counted = layout.is_counted(rank) and layout.coordinates(rank).pipeline == 0
        totals = BalanceTotals.of(microbatches, is_counted) if has_losses else None
        shard = (
            (layout.tensor, parallel_state.get_tensor_model_parallel_rank()) if policy.is_sequence_parallel else (1, 0)
        )
        return Balancing(settings, mixture, policy.shape.num_layers, totals, shard, policy.device)

    def optimizer_step(self, next_is_forward_backward: bool = False) -> OptimizerStats:
        """Clip the global gradient norm and step; a gradient that is not finite skips the step.

        Args:
            next_is_forward_backward: whether ``forward_backward`` is the next call that uses the weights. If so, with
                ``parallel.overlap_param_gather`` that call collects the new weights from the data-parallel ranks as it
                goes; until then a rank holds new values only of its own share. Otherwise this call collects them.
        """
        self.policy.refuse_replaced("an optimizer step")
        self.lr_schedule.step(1)
        stats = self.stepper(lr=max(float(group["lr"]) for group in self.optimizer.param_groups))
        if self._balancing is not None:
            self.router_metrics = self._balancing.finish(self._router_biases(), not stats.skipped)
        self._is_scattered = self.gathers_late
        if not next_is_forward_backward:
            self.collect_weights()
        return stats

    def _router_biases(self) -> dict[int, Tensor]:
        """Layer of the model -> the bias [E] of its router's scores, of this rank's layers."""
        layers = [layer for chunk in self.policy.chunks for layer in chunk.decoder.layers]
        routers = [layer.mlp.router for layer in layers if hasattr(layer.mlp, "router")]
        return {router.router_replay.layer: router.expert_bias for router in routers if router.expert_bias is not None}

    def collect_weights(self) -> None:
        """Collect the new weights from the data-parallel ranks, if that was left to the next ``forward_backward``."""
        if self._is_scattered:
            for chunk in self.wrapped:
                chunk.start_param_sync(force_sync=True)
            self._is_scattered = False

    def master_weights(self, hf_names: Iterable[str]) -> dict[str, Tensor]:
        """Whole float32 master values of the replicated (norm) weights that this rank's pipeline stage holds.

        If the optimizer shards its masters over the data-parallel ranks, they are put together again; float32 models
        have no other master than the weight itself, and neither have frozen weights.
        """
        wanted = set(hf_names)
        pieces = {piece.hf_name: piece for piece in self.slices_of(dist.get_rank()) if piece.hf_name in wanted}
        masters: dict[str, Tensor] = {}
        sharded: list[str] = []
        for name, piece in pieces.items():
            parameter = self.policy.parameters[piece.local_name]
            assert parameter.dim() == 1, f"{name} is no norm weight"
            if parameter.dtype == torch.float32 or not parameter.requires_grad:
                masters[name] = parameter.detach().float()
                continue
            full = torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device)
            shard = master_of(self.optimizer, parameter)
            if shard is not None:
                start, end = owned_range(self.optimizer, parameter)
                full[start:end] = shard.detach()
            masters[name] = full
            sharded.append(name)
        if sharded:
            flat = torch.cat([masters[name] for name in sorted(sharded)])
            dist.all_reduce(flat, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
            sizes = [masters[name].numel() for name in sorted(sharded)]
            masters |= dict(zip(sorted(sharded), flat.split(sizes), strict=True))
        return masters
