"""Which rank does what: plain integers, no process groups.

Ranks are numbered in Megatron-core's default order ``tp-cp-ep-dp-pp``: tensor-parallel neighbours are consecutive, then
come context-parallel ones, then data-parallel replicas, and pipeline stages are furthest apart. Expert layers have a
numbering of their own over the same ranks, in which expert parallelism takes the place of context parallelism.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from mega_rl.config.schema.sections import ParallelConfig


class Coordinates(NamedTuple):
    """Where a rank stands along each axis of parallelism, the fastest axis first."""

    tensor: int
    context: int
    data: int
    pipeline: int


class ExpertCoordinates(NamedTuple):
    """Where a rank stands among the ranks that share out the experts of a layer, the fastest axis first."""

    tensor: int  # which shard of its experts
    expert: int  # which experts
    data: int  # which replica of them
    pipeline: int


@dataclass(frozen=True)
class ParallelLayout:
    """The trainer's layout: ``world_size == tensor * context * data * pipeline``.

    Example: ``ParallelLayout.create(8, tensor=2, pipeline=2).coordinates(5) == (1, 0, 0, 1)``.
    """

    world_size: int
    tensor: int
    pipeline: int
    data: int
    context: int = 1
    expert: int = 1  # ranks that share out the experts of a layer
    expert_tensor: int = 1  # ranks that share one expert
    num_chunks: int = 1  # model chunks per rank; more than 1: interleaved (virtual) pipeline

    def __post_init__(self) -> None:
        assert min(self.tensor, self.pipeline, self.data, self.context, self.expert, self.expert_tensor) >= 1, self
        assert self.num_chunks == 1 or self.pipeline > 1, self
        assert self.world_size == self.tensor * self.context * self.data * self.pipeline, self
        assert self.ranks_per_stage % (self.expert * self.expert_tensor) == 0, self

    @classmethod
    def of(cls, parallel: ParallelConfig, world_size: int) -> ParallelLayout:
        """The layout that a configuration asks for; whether it fits, ``models.fit.trainer_problems`` has answered."""
        return cls.create(
            world_size,
            parallel.tensor,
            parallel.pipeline,
            context=parallel.context,
            expert=parallel.expert,
            expert_tensor=parallel.expert_tensor,
            virtual_pipeline=parallel.virtual_pipeline,
        )

    @classmethod
    def create(
        cls,
        world_size: int,
        tensor: int = 1,
        pipeline: int = 1,
        *,
        context: int = 1,
        expert: int = 1,
        expert_tensor: int | None = None,
        virtual_pipeline: int | None = None,
    ) -> ParallelLayout:
        """The layout whose data parallelism is what the world size leaves.

        Args:
            expert_tensor: None: as ``tensor`` (for models without experts that means nothing).
            virtual_pipeline: model chunks per rank; None: one.
        """
        assert min(tensor, context, pipeline) >= 1, (tensor, context, pipeline)
        return cls(
            world_size,
            tensor,
            pipeline,
            data=world_size // (tensor * context * pipeline),
            context=context,
            expert=expert,
            expert_tensor=expert_tensor or tensor,
            num_chunks=virtual_pipeline or 1,
        )

    @property
    def ranks_per_stage(self) -> int:
        return self.tensor * self.context * self.data

    @property
    def expert_data(self) -> int:
        """Replicas of every expert."""
        return self.ranks_per_stage // (self.expert * self.expert_tensor)

    def coordinates(self, rank: int) -> Coordinates:
        """The coordinates of a global rank."""
        assert 0 <= rank < self.world_size, (rank, self)
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        pipeline, data = divmod(rest, self.data)
        return Coordinates(tensor, context, data, pipeline)

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """The coordinates of a global rank in expert layers."""
        assert 0 <= rank < self.world_size, (rank, self)
        rest, tensor = divmod(rank, self.expert_tensor)
        rest, expert = divmod(rest, self.expert)
        pipeline, data = divmod(rest, self.expert_data)
        return ExpertCoordinates(tensor, expert, data, pipeline)

    def rank(self, tensor: int, context: int, data: int, pipeline: int) -> int:
        """The global rank at these coordinates: the inverse of `coordinates`."""
        assert 0 <= tensor < self.tensor and 0 <= context < self.context, (tensor, context, self)
        assert 0 <= data < self.data and 0 <= pipeline < self.pipeline, (data, pipeline, self)
        return tensor + self.tensor * (context + self.context * (data + self.data * pipeline))

    def is_counted(self, rank: int) -> bool:
        """Whether a sum over ranks takes this rank: of all that hold the same sequences, one per pipeline stage."""
        coordinates = self.coordinates(rank)
        return coordinates.tensor == 0 and coordinates.context == 0

    def sequence_groups(self) -> list[list[int]]:
        """Global ranks that learn from the same sequences, by data coordinate, each group ascending."""
        groups: list[list[int]] = [[] for _ in range(self.data)]
        for rank in range(self.world_size):
            groups[self.coordinates(rank).data].append(rank)
        return groups

    def layers_of_chunk(self, num_layers: int, pipeline_rank: int, chunk: int = 0) -> range:
        """The decoder layers, counted over the whole model, of one model chunk; all chunks hold equally many.

        The stages hold consecutive layers; with several chunks per rank the stages are gone through once per chunk.
        """
        assert 0 <= pipeline_rank < self.pipeline and 0 <= chunk < self.num_chunks, (pipeline_rank, chunk, self)
        assert num_layers % (self.pipeline * self.num_chunks) == 0, (num_layers, self)
        per_chunk = num_layers // (self.pipeline * self.num_chunks)
        first = (chunk * self.pipeline + pipeline_rank) * per_chunk
        return range(first, first + per_chunk)


@dataclass(frozen=True)
class EngineLayout:
    """Colocated rollout engines: each run of ``tensor_parallel_size`` consecutive global ranks is one replica."""

    world_size: int
    tensor_parallel_size: int

    def __post_init__(self) -> None:
        size = self.tensor_parallel_size
        assert size >= 1 and self.world_size >= 1 and self.world_size % size == 0, self

    @property
    def num_replicas(self) -> int:
        return self.world_size // self.tensor_parallel_size

    def replica(self, rank: int) -> int:
        """Which engine a global rank belongs to."""
        assert 0 <= rank < self.world_size, (rank, self)
        return rank // self.tensor_parallel_size

    def tensor_rank(self, rank: int) -> int:
        """The tensor-parallel rank of a global rank within its engine."""
        assert 0 <= rank < self.world_size, (rank, self)
        return rank % self.tensor_parallel_size

    def leaders(self) -> list[int]:
        """The first global rank of every engine."""
        return list(range(0, self.world_size, self.tensor_parallel_size))

    def replica_ranks(self, replica: int) -> range:
        """The global ranks of one engine, by tensor-parallel rank."""
        assert 0 <= replica < self.num_replicas, (replica, self)
        return range(replica * self.tensor_parallel_size, (replica + 1) * self.tensor_parallel_size)
