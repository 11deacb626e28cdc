"""What a stage that samples needs before its loop, besides what every stage does."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch.distributed as dist

from mega_rl.config import RunConfig
from mega_rl.data.pictures.image_processor import picture_reader
from mega_rl.data.pictures.picture_set import PictureSet
from mega_rl.parallel.collectives import together
from mega_rl.parallel.layout import EngineLayout
from mega_rl.parallel.rendezvous import Rendezvous
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from mega_rl.rollout.episodes.episode_tokens import EpisodePlan
from mega_rl.stages.run.episodes import plan_of
from mega_rl.stages.run.job import Job
from mega_rl.stages.run.opening import open_job


@dataclass(frozen=True)
class SamplingJob(Job):
    """A ``Job`` whose stage samples what it learns from. All ranks ask together for what is asked for first."""

    @cached_property
    def engine_layout(self) -> EngineLayout:
        """Which ranks have an engine together: with separate engines all, since they use those in other processes."""
        rollout, world_size = self.config.rollout, dist.get_world_size()
        return EngineLayout(world_size, world_size if rollout.placement == "separate" else rollout.tensor_parallel_size)

    @cached_property
    def rendezvous(self) -> Rendezvous:
        """Of all ranks."""
        return Rendezvous(self.store, dist.get_rank(), dist.get_world_size())

    @cached_property
    def picture_set(self) -> PictureSet | None:
        """The pictures of the prompts, where the model sees any."""
        tower, config = self.shape.tower, self.config
        if tower is None:
            return None
        with together("opening the image processor"):
            return PictureSet(picture_reader(config.model.path, tower, self.tokenizer, config.data))

    @cached_property
    def trajectory_store(self) -> TrajectoryStore:
        """The tokens of what is sampled."""
        rollout, timeout_s = self.config.rollout, self.config.trainer.collective_timeout_s
        is_here = rollout.placement == "colocated" and rollout.replay is None
        engine = self.engine_layout.replica(dist.get_rank()) if is_here else None
        return TrajectoryStore.open(self.layout, timeout_s, engine)

    @cached_property
    def plan(self) -> EpisodePlan | None:
        """How episodes go on, if there is an environment."""
        with together("making an environment"):
            return plan_of(self.config, self.tokenizer)

    @classmethod
    def of(cls, job: Job) -> SamplingJob:
        """The same job, for a stage that samples."""
        return cls(**{field.name: getattr(job, field.name) for field in dataclasses.fields(job)})


@contextmanager
def open_sampling_job(config: RunConfig) -> Iterator[SamplingJob]:
    """As ``open_job``."""
    with open_job(config) as job:
        yield SamplingJob.of(job)
