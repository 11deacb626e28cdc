"""One Megatron model with its weights: token statistics of packed micro-batches, and its parameters as HF slices.

Letters: T packed tokens of a micro-batch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.mapping.adapter import adapter_series
from mega_rl.bridge.mapping.megatron import chunk_prefix, own_name, rank_series
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.mapping.tuning import tuning_plan
from mega_rl.bridge.series import Series, slices_of
from mega_rl.bridge.slices import Box, Slice
from mega_rl.config.schema.sections import TrainerConfig
from mega_rl.errors import InputError
from mega_rl.megatron.layers.balance import Balancing
from mega_rl.megatron.layers.routing import MicrobatchRouting
from mega_rl.megatron.layers.vision import VisionTower
from mega_rl.megatron.model.context import LocalInput, in_pack_order, learnt_tokens, local_input
from mega_rl.megatron.model.layers import frozen_weights
from mega_rl.megatron.model.spec import TrainerSpec
from mega_rl.megatron.model.transformer import PolicyModel, build_model
from mega_rl.megatron.model.value import NewScore
from mega_rl.megatron.tuning.dropout import token_keys
from mega_rl.megatron.tuning.plan import tune
from mega_rl.microbatch import Microbatch, TokenStats
from mega_rl.models.flops import pass_flops
from mega_rl.models.shape import ModelShape
from mega_rl.observe.heartbeat import HEART
from mega_rl.observe.work import WORK
from mega_rl.parallel.layout import ParallelLayout


def initialize_groups(
    layout: ParallelLayout, seed: int, collective_timeout_s: float = TrainerConfig.collective_timeout_s
) -> None:
    """Create Megatron's process groups for the layout; torch.distributed must be initialised.

    Raises:
        InputError: Megatron's own rank order differs from the layout's, which would misplace every shard.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.num_chunks if layout.num_chunks > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        create_gloo_process_groups=False,
        distributed_timeout_minutes=collective_timeout_s / 60,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    rank = dist.get_rank()
    actual = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_data_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    expected = (*layout.coordinates(rank), *layout.expert_coordinates(rank)[:2])
    if actual != expected:
        raise InputError(
            f"Megatron placed rank {rank} at (tensor, context, data, pipeline, expert_tensor, expert) {actual}, the "
            f"layout at {expected}"
        )


def destroy_groups() -> None:
    """End all process groups but the world's; the process may make others afterwards.

    As long as it exists, each gloo group keeps a thread that wakes a hundred times a second: after some layouts these
    take more processor time than the work.
    """
    parallel_state.destroy_model_parallel()
    for group in [g for g in dist.distributed_c10d._world.pg_map if g is not dist.group.WORLD]:
        dist.destroy_process_group(group)
    gc.collect()  # engines refer to groups in cycles


def token_count(microbatch: Microbatch) -> Tensor:
    """What Megatron divides all gradients by in the end: zero tells it to leave them as plain sums.

    The loss is already divided by global counts; Megatron's own would be summed over groups that differ by version.
    """
    return torch.zeros([], dtype=torch.int, device=microbatch.token_ids.device)


class MegatronPolicy:
    """This rank's part of one model.

    Args:
        spec: what the model is built for.
        shape: the model's shape.
        layout: the trainer's layout, that of ``spec.parallel``, whose groups ``initialize_groups`` has made.
        device: where the weights live.
    """

    def __init__(self, spec: TrainerSpec, shape: ModelShape, layout: ParallelLayout, device: torch.device) -> None:
        self.spec, self.shape, self.layout, self.device = spec, shape, layout, device
        self.chunks: list[PolicyModel] = build_model(spec, shape, device)
        self.plan = tuning_plan(spec.tuning, shape, spec.vision)
        self.adapters = tune(self.chunks, self.plan, shape, layout, spec.seed)
        self.flops = pass_flops(shape, hf_tensors(shape), self.plan.trained, self.plan.adapters.ranks)
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.is_replaced = False  # inside of ``replaced``
        self.frozen: dict[str, Tensor] = {}  # weights of the model that are no parameters: no gradient reaches them
        self.shared: frozenset[str] = (
            frozenset()
        )  # names in ``parameters`` of those that lie in another policy's memory
        self.collect_parameters()

    def collect_parameters(self) -> None:
        """Look the parameters up again, by their names in ``slices_of``."""
        self.parameters = {
            chunk_prefix(self.layout, chunk) + own_name(name): parameter
            for chunk, model in enumerate(self.chunks)
            for name, parameter in model.named_parameters()
        }
        self.frozen = {
            chunk_prefix(self.layout, chunk) + name: weight
            for chunk, model in enumerate(self.chunks)
            for name, weight in frozen_weights(model).items()
        }

    # --- weights -----------------------------------------------------------------------------------------------------

    def slices_of(self, rank: int) -> list[Slice]:
        """What any rank of the layout holds, as slices of the Hugging Face tensors."""
        return slices_of(self.series_of(rank))

    def series_of(self, rank: int) -> list[Series]:
        """The same by kinds of tensors, for plans."""
        return rank_series(self.shape, self.layout, rank)

    def adapter_series_of(self, rank: int) -> list[Series]:
        """What any rank holds of the adapters, under PEFT's names; ``local`` knows these places too."""
        return adapter_series(self.series_of(rank), self.plan.adapters)

    def local(self, local_name: str, local_box: Box) -> Tensor:
        """A view of one box of one local weight, without what its adapter adds."""
        weight = self.parameters[local_name] if local_name in self.parameters else self.frozen[local_name]
        return weight.detach()[tuple(slice(start, stop) for start, stop in local_box)]

    @contextmanager
    def replaced(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """Other values in whole replicated weights, for forward passes; the old ones are back bit for bit afterwards.

        Inside, what would keep the other values (an optimizer step, a checkpoint, an export, a push to the engines)
        raises RuntimeError.

        Args:
            values: HF name -> [full shape], of weights that this rank holds, in the model's dtype.

        Raises:
            InputError: a weight is float32, and therefore its own master: the optimizer's state would be changed.
        """
        self.refuse_replaced("replacing weights")
        places = {p.hf_name: self.parameters[p.local_name].detach() for p in self._own_slices() if p.hf_name in values}
        for name, place in places.items():
            if place.dtype == torch.float32:
                raise InputError(
                    f"aqn.old_logprobs is 'recompute_noisy', but with model.dtype float32 {name} is the optimizer's "
                    "master weight itself: set aqn.old_logprobs to decoupled or rollout, or model.dtype to bfloat16"
                )
        kept = {name: place.clone() for name, place in places.items()}
        self.is_replaced = True
        try:
            for name, value in values.items():
                assert value.dtype == places[name].dtype, name
                places[name].copy_(value)
            yield
        finally:
            for name, value in kept.items():
                places[name].copy_(value)
            self.is_replaced = False

    def refuse_replaced(self, what: str) -> None:
        if self.is_replaced:
            raise RuntimeError(f"{what} while noisy values stand in for the trained weights")

    def _own_slices(self) -> list[Slice]:
        return self.slices_of(dist.get_rank())

    @torch.no_grad()
    def load_huggingface(self, reader: HFReader | NewScore) -> None:
        """Fill every parameter but the shared ones from a Hugging Face directory, reading only this rank's slices."""
        for piece in self._own_slices():
            if piece.local_name in self.shared:
                continue
            HEART.mark()
            weight = reader.read(piece.hf_name, piece.hf_box)
            self.local(piece.local_name, piece.local_box).copy_(weight)

    @torch.no_grad()
    def copy_from(self, other: MegatronPolicy) -> None:
        """Take all weights of a policy of the same model and layout; a tower that neither trains sees pictures once."""
        for own, others in ((self.parameters, other.parameters), (self.frozen, other.frozen)):
            for name, weight in own.items():
                weight.copy_(others[name])
        for model, others_model in zip(self.chunks, other.chunks, strict=True):
            if model.vision is not None and others_model.vision is not None:
                model.vision.share_features(others_model.vision)

    def share_from(self, other: MegatronPolicy) -> None:
        """Let go of this policy's weights that are not trained and have those of another one, which must not be either.

        Args:
            other: of the same layout, with the same decoder.
        """
        self.shared = frozenset(name for name, weight in self.parameters.items() if not weight.requires_grad)
        for name in self.shared:
            theirs = other.parameters[name]
            assert not theirs.requires_grad and theirs.shape == self.parameters[name].shape, name
            self.parameters[name].data = theirs.data

    # --- forward -----------------------------------------------------------------------------------------------------

    def schedule(
        self,
        chunks: Sequence[torch.nn.Module],
        microbatches: Sequence[Microbatch],
        on_output: Callable[[Microbatch, Tensor], tuple[Tensor, Any]],
        forward_only: bool,
        recorded: Sequence[dict[int, Tensor]] | None = None,
        dropout_step: int | None = None,
        balancing: Balancing | None = None,
    ) -> list[Any]:
        """Run Megatron's schedule over the micro-batches; the last pipeline stage returns what ``on_output`` reported.

        Args:
            chunks: the model's chunks, or their data-parallel wrappers.
            microbatches: the same list on every rank of one data-parallel replica; with an interleaved pipeline as
                many as it has stages, or a multiple.
            on_output: (micro-batch, what the head makes of it, [n, T]) -> (loss to differentiate, report).
            forward_only: no backward pass.
            recorded: one per micro-batch, which takes up the experts of every layer on this rank; None: not wanted.
            dropout_step: the optimizer step whose dropout the adapters have; None: they have none.
            balancing: what the routers learn and take down in this pass; None: nothing.
        """
        assert len(chunks) == 1 or len(microbatches) % self.layout.pipeline == 0, len(microbatches)

        def finish(microbatch: Microbatch, local: LocalInput, output: Tensor) -> tuple[Tensor, Tensor, Any]:
            loss, report = on_output(microbatch, in_pack_order(output, local))
            return loss, token_count(microbatch), report

        def forward_step(
            iterator: Iterator[tuple[int, Microbatch]], module: torch.nn.Module
        ) -> tuple[Tensor, Callable[[Tensor], Any]]:
            number, on_host = next(iterator)
            microbatch = on_host.to(self.device)
            local = self._local_input(on_host, microbatch)
            routing = self.routing_of(microbatch, local, recorded[number] if recorded else None)
            if balancing is not None:
                routing = replace(routing or MicrobatchRouting(), balance=balancing.of(on_host, local.sources))
            local.packing.routing = routing
            if dropout_step is not None and self.plan.adapters.dropout:
                local.packing.token_keys_N = self._token_keys(on_host, local, dropout_step)
            HEART.mark()
            if module is chunks[0]:
                asked = None if self.shape.head == "value" else int(on_host.loss_mask.count_nonzero())
                WORK.add(self.flops.of(on_host.lengths, not forward_only, asked))
            output = module(
                local.token_ids, local.position_ids, None, labels=local.target_ids, packed_seq_params=local.packing
            )
            return output, partial(finish, microbatch, local)

        is_interleaved = len(chunks) > 1
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[enumerate(microbatches) for _ in chunks] if is_interleaved else enumerate(microbatches),
            model=list(chunks) if is_interleaved else chunks[0],
            num_microbatches=len(microbatches),
            seq_length=1,  # with variable lengths the stages tell each other the true one
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def begin_pass(self, microbatches: Sequence[Microbatch], with_gradient: bool) -> None:
        """Before a pass over these micro-batches: what they have in common is computed once, if that costs less."""
        for tower in self._towers:
            tower.begin_pass([m.images.pictures for m in microbatches if m.images is not None], with_gradient)

    def finish_pass(self, with_gradient: bool) -> None:
        """Afterwards, before gradients are reduced."""
        for tower in self._towers:
            tower.finish_pass(with_gradient)

    @property
    def _towers(self) -> list[VisionTower]:
        return [model.vision for model in self.chunks if model.vision is not None]

    def _local_input(self, on_host: Microbatch, microbatch: Microbatch) -> LocalInput:
        """This rank's share of a micro-batch, which is on the device too."""
        multiple = self.layout.tensor if self.is_sequence_parallel else 1
        group, method = parallel_state.get_context_parallel_group(), self.spec.parallel.context_method
        local = local_input(microbatch, on_host.cu_seqlens.tolist(), group, multiple, method)
        learnt_K = learnt_tokens(on_host.loss_mask, local.sources)
        local.packing.learnt_K = None if learnt_K is None else learnt_K.to(self.device)
        return local

    def _token_keys(self, on_host: Microbatch, local: LocalInput, step: int) -> Tensor:
        """What dropout knows this rank's tokens by in one optimizer step."""
        keys = token_keys(on_host, self.spec.seed, step)
        own = keys if local.sources is None else keys[local.sources.clamp_min(0)]
        return own.to(self.device)

    @property
    def is_sequence_parallel(self) -> bool:
        return bool(self.chunks[0].config.sequence_parallel)

    def routing_of(
        self, microbatch: Microbatch, local: LocalInput, recorded: dict[int, Tensor] | None = None
    ) -> MicrobatchRouting | None:
        """The experts of this rank's tokens, whose hidden states sequence parallelism cuts once more.

        Args:
            recorded: takes up what the routers choose; None: not wanted.
        """
        if local.routed_experts is None:
            if microbatch.own_experts is None and recorded is None:
                return None
            return MicrobatchRouting(microbatch.own_experts or {}, recorded)
        assert self.shape.mixture is not None, "experts for a model that has none"
        routed_LMK = local.routed_experts
        if self.is_sequence_parallel:
            routed_LMK = routed_LMK.chunk(self.layout.tensor)[parallel_state.get_tensor_model_parallel_rank()]
        layers = sorted(self.shape.mixture.layers)
        return MicrobatchRouting(dict(zip(layers, routed_LMK.unbind(1), strict=True)), recorded)

    def token_stats(self, microbatches: Sequence[Microbatch], record_experts: bool = False) -> list[TokenStats]:
        """Log-probabilities and entropy of what is learnt from, on the host and on every rank, no gradient.

        Args:
            record_experts: also which experts took each token of this rank, for ``Microbatch.own_experts``.
        """
        recorded: list[dict[int, Tensor]] | None = [{} for _ in microbatches] if record_experts else None
        stats = [TokenStats(*rows) for rows in self._outputs(microbatches, 3, recorded)]
        if recorded is None:
            return stats
        experts = ({layer: chosen.cpu() for layer, chosen in own.items()} for own in recorded)
        return [replace(one, own_experts=own) for one, own in zip(stats, experts, strict=True)]

    def token_values(self, microbatches: Sequence[Microbatch]) -> list[Tensor]:
        """The value [T] of every position by a value head, on the host and on every rank, no gradient."""
        return [values_T for (values_T,) in self._outputs(microbatches, 1)]

    @torch.no_grad()
    def _outputs(
        self, microbatches: Sequence[Microbatch], num_rows: int, recorded: Sequence[dict[int, Tensor]] | None = None
    ) -> list[Tensor]:
        """What the head makes of every micro-batch, [num_rows, T] on the host, on every rank."""
        if not microbatches:
            return []

        def report(_: Microbatch, rows_nT: Tensor) -> tuple[Tensor, Tensor]:
            return rows_nT[0].sum(), rows_nT.contiguous()  # gloo sends another layout wrongly, without a word

        self.begin_pass(microbatches, with_gradient=False)
        outputs = self.schedule(self.chunks, microbatches, report, True, recorded)
        self.finish_pass(with_gradient=False)
        if self.layout.pipeline > 1:
            group = parallel_state.get_pipeline_model_parallel_group()
            for index, microbatch in enumerate(microbatches):
                if not parallel_state.is_pipeline_last_stage():
                    outputs.append(torch.empty(num_rows, microbatch.num_tokens, device=self.device))
                dist.broadcast(outputs[index], group=group, group_src=self.layout.pipeline - 1)
        return [output.cpu() for output in outputs]
