"""Models that do not learn: the reference of the KL penalty (the policy before training), and reward models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from mega_rl import platform
from mega_rl.config.schema.sections import MemoryConfig
from mega_rl.megatron.offload import HostStorages
from mega_rl.megatron.policy import MegatronPolicy
from mega_rl.megatron.tuning.adapter import disabled
from mega_rl.microbatch import Microbatch, TokenStats


class Reference(Protocol):
    """What the policy is kept near to."""

    def token_stats(self, microbatches: Sequence[Microbatch]) -> list[TokenStats]:
        """As ``MegatronPolicy.token_stats``."""

    def differing(self, policy: MegatronPolicy) -> str | None:
        """The first of this rank's weights, by Megatron's name, in which the reference differs from ``policy``."""


class WithoutAdapters:
    """The frozen weights of a policy with adapters: the reference costs no memory."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self._policy = policy

    def token_stats(self, microbatches: Sequence[Microbatch]) -> list[TokenStats]:
        with disabled(self._policy.chunks):
            return self._policy.token_stats(microbatches)

    def differing(self, policy: MegatronPolicy) -> str | None:
        """A weight whose adapter adds something."""
        adapters = policy.adapters.items()
        return next((name for name, adapter in adapters if any(bool(b.any()) for b in adapter.factors())), None)


class StartingAdapters:
    """A policy with the adapters that it has now, for a run that goes on from some: they alone are kept twice."""

    def __init__(self, policy: MegatronPolicy) -> None:
        self._policy = policy
        self._kept = {name: parameter.detach().clone() for name, parameter in self._adapters()}

    @torch.no_grad()
    def token_stats(self, microbatches: Sequence[Microbatch]) -> list[TokenStats]:
        own = {name: parameter.detach().clone() for name, parameter in self._adapters()}
        self._fill(self._kept)
        try:
            return self._policy.token_stats(microbatches)
        finally:
            self._fill(own)

    def differing(self, policy: MegatronPolicy) -> str | None:
        return next((name for name, own in self._adapters() if not torch.equal(own, self._kept[name])), None)

    def _adapters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [
            (f"{weight}:{name}", parameter)
            for weight, adapter in self._policy.adapters.items()
            for name, parameter in adapter.named_parameters()
        ]

    @torch.no_grad()
    def _fill(self, values: Mapping[str, torch.Tensor]) -> None:
        for name, parameter in self._adapters():
            parameter.copy_(values[name])


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


class FrozenCopy(Frozen):
    """The policy as it was before training."""

    def token_stats(self, microbatches: Sequence[Microbatch]) -> list[TokenStats]:
        with self.on_device() as policy:
            return policy.token_stats(microbatches)

    @torch.no_grad()
    def differing(self, policy: MegatronPolicy) -> str | None:
        with self.on_device() as frozen:
            own, other = frozen.parameters, policy.parameters
            return next((name for name in own if not torch.equal(own[name], other[name])), None)
