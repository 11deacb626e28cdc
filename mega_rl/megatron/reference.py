"""Models that do not learn: the reference of the KL penalty (the policy before training), and reward models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from mega_rl import platform
from mega_rl.config.schema import MemoryConfig
from mega_rl.megatron.offload import HostStorages
from mega_rl.megatron.policy import MegatronPolicy
from mega_rl.types import Microbatch, TokenStats


class Frozen:
    """A frozen model; with weights among the offloaded parts they are on the device only while they are used."""

    def __init__(self, policy: MegatronPolicy, settings: MemoryConfig, is_active: bool) -> None:
        self._policy = policy
        for chunk in policy.chunks:
            chunk.requires_grad_(False)
        self._is_moved = is_active and "weights" in settings.offload
        self._storages = HostStorages()
        self._leave()

    @contextmanager
    def on_device(self) -> Iterator[MegatronPolicy]:
        """The model while it may be used."""
        self._storages.to_device()
        yield self._policy
        self._leave()

    def _leave(self) -> None:
        if self._is_moved:
            self._storages.to_host(self._policy.parameters.values())
            platform.current().empty_cache()


class Reference(Frozen):
    """The policy as it was before training."""

    def token_stats(self, microbatches: Sequence[Microbatch]) -> list[TokenStats]:
        """As ``MegatronPolicy.token_stats``."""
        with self.on_device() as policy:
            return policy.token_stats(microbatches)

    @torch.no_grad()
    def differing(self, policy: MegatronPolicy) -> str | None:
        """The first of this rank's weights, by Megatron's name, in which the reference differs from ``policy``."""
        with self.on_device() as frozen:
            own, other = frozen.parameters, policy.parameters
            return next((name for name in own if not torch.equal(own[name], other[name])), None)
