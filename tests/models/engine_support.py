"""Megatron engines at small layouts, for the scripts that torchrun starts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.config.schema.sections import RunConfig
from mega_rl.data.packing import pack
from mega_rl.megatron import engine as engine_module
from mega_rl.megatron.engine import LossFunction, MegatronEngine, Optimization
from mega_rl.megatron.policy import MegatronPolicy, destroy_groups, initialize_groups
from mega_rl.microbatch import Figures, Microbatch, Sequence, TokenStats
from mega_rl.models.shape import read_model_shape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.parallel.schedule import balance
from mega_rl.stages.models.trainer import trainer_spec
from tests.models.layouts import Case
from tests.models.parity_reference import BETAS, CLIP, EPS, LR, WEIGHT_DECAY, Objective, num_learnt

BUCKET_SIZE = 4000  # values: several buckets of a tiny model, as a large one has


class LateGather:
    """The handle of a gather of weights that begins only where it is waited for: nothing may read them before."""

    def __init__(self, group: Any, begin: Callable[[Any], None]) -> None:
        self._group, self._begin = group, begin

    def wait(self) -> None:
        group = self._group
        group.param_gather_handle = None
        self._begin(group)
        group.param_gather_handle.wait()
        group.param_gather_handle = None


@contextmanager
def slow_gathers(case: Case) -> Iterator[None]:
    """Weights that are gathered beside the forward pass come bucket by bucket, each as late as it may."""
    if not case.overlap:
        yield
        return
    # Imported here: mega_rl.megatron must come before Megatron-core.
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as Group

    begin = Group.start_param_sync

    def begin_late(group: Any, force_sync: bool = False) -> None:
        if force_sync:
            begin(group, force_sync=True)
            return
        assert group.param_gather_handle is None, "a gather that nothing has waited for"
        group.param_gather_handle, group.param_gather_dispatched = LateGather(group, begin), True

    small = partial(engine_module.DistributedDataParallelConfig, bucket_size=BUCKET_SIZE)
    with (
        mock.patch.object(engine_module, "DistributedDataParallelConfig", small),
        mock.patch.object(Group, "start_param_sync", begin_late),
    ):
        yield


@contextmanager
def groups(case: Case) -> Iterator[ParallelLayout]:
    """Megatron's process groups for one layout; the process may use another one afterwards."""
    layout = ParallelLayout.create(
        dist.get_world_size(),
        case.tensor,
        case.pipeline,
        context=case.context,
        expert=case.expert,
        expert_tensor=case.expert_tensor,
        virtual_pipeline=case.virtual_pipeline,
    )
    assert dist.get_world_size() == case.num_ranks, case
    initialize_groups(layout, seed=1)
    yield layout
    dist.barrier()
    destroy_groups()


def run_config(case: Case, objective: Objective, dtype: str = "float32") -> RunConfig:
    config = RunConfig()
    config.trainer.stage = objective.stage
    config.rollout.temperature = 0.7  # of no consequence in the supervised stage
    config.algorithm.entropy_coefficient = objective.entropy_coefficient
    config.model.dtype = dtype
    parallel = config.parallel
    for axis in (
        "tensor",
        "pipeline",
        "virtual_pipeline",
        "context",
        "context_method",
        "expert",
        "expert_tensor",
        "sequence",
    ):
        setattr(parallel, axis, getattr(case, axis))
    parallel.overlap_grad_reduce = parallel.overlap_param_gather = case.overlap
    config.optimizer.lr, config.optimizer.weight_decay = LR, WEIGHT_DECAY
    config.optimizer.beta1, config.optimizer.beta2 = BETAS
    config.optimizer.eps, config.optimizer.clip_grad = EPS, CLIP
    config.trainer.logprob_chunk_tokens = 16
    return config


def own_device() -> torch.device:
    """Of this process on its platform."""
    return platform.current().set_device(int(os.environ.get("LOCAL_RANK", "0")))


def build_engine(config: RunConfig, layout: ParallelLayout, directory: Path, total_steps: int) -> MegatronEngine:
    shape, weights = read_model_shape(directory), HFReader(directory)
    policy = MegatronPolicy(trainer_spec(config), shape, layout, own_device())
    optimization = Optimization(config.optimizer, total_steps, config.trainer.max_skipped_steps)
    return MegatronEngine(policy, weights, optimization)


def optimizer_of(engine: MegatronEngine, parameter: torch.nn.Parameter) -> Any:
    """The optimizer in Megatron's chain that owns a part of the parameter on this rank, or None."""
    chain = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    return next((o for o in chain if parameter in o.model_param_gbuf_map), None)


def owned_span(engine: MegatronEngine, parameter: torch.nn.Parameter) -> tuple[int, int]:
    """The flat range of a parameter whose reduced gradient and optimizer state this data-parallel rank holds."""
    optimizer = optimizer_of(engine, parameter)
    if optimizer is None:
        return 0, 0
    span = optimizer._get_model_param_range_map(parameter)["param"]
    return span.start, span.end


def pack_for_rank(case: Case, layout: ParallelLayout, sequences: list[Sequence]) -> list[Microbatch]:
    """This rank's share, padded to a multiple that leaves a tail in some micro-batch."""
    group = layout.pipeline if layout.num_chunks > 1 else 1
    plan = balance([s.loss_mask.numel() for s in sequences], layout.data, case.max_tokens, multiple=group)
    microbatches = [
        pack(sequences, part, pad_to_multiple=4 * case.tensor, pad_token_id=0).to(own_device())
        for part in plan[layout.coordinates(dist.get_rank()).data]
    ]
    assert any(len(m.cu_seqlens) - 1 > len(m.sequence_indices) for m in microbatches), "no tail: change the lengths"
    return microbatches


def loss_of(objective: Objective, sequences: list[Sequence]) -> LossFunction:
    num_tokens = num_learnt(sequences)

    def loss_function(stats: TokenStats, microbatch: Microbatch) -> tuple[torch.Tensor, Figures]:
        assert microbatch.advantages is not None
        advantages, mask = microbatch.advantages, microbatch.loss_mask
        return objective(stats.logprobs, stats.entropy, advantages, mask, num_tokens), Figures()

    return loss_function


def total_loss(layout: ParallelLayout, reports: list[Figures]) -> float:
    """The loss of one step over all micro-batches and data-parallel ranks, on every rank."""
    is_counted = layout.is_counted(dist.get_rank())
    total = torch.tensor(sum(float(r.sums["loss"]) for r in reports) if is_counted else 0.0, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)
