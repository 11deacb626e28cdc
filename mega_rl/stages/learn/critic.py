"""PPO's critic: what its values make of rewards, and how it learns to give them.

Letters: T packed tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from mega_rl.algorithms.reduce import Denominators
from mega_rl.algorithms.value import ValueObjective, explained_variance, gae, rewards_at_ends
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.offload import PARTS
from mega_rl.microbatch import Microbatch
from mega_rl.stages.learn.critic_layout import OwnLayout
from mega_rl.stages.run.batch_share import BatchShare, Totals, totals_of
from mega_rl.stages.run.job import Job
from mega_rl.stages.run.progress import warn_if_skipped

NAME = "critic"  # among the actor's companions, and in checkpoints


class Critic:
    """Values of the tokens, and a trainer of its own.

    With parts in ``memory.offload`` its own are on the device only while it works; meanwhile the actor's gradients and
    optimizer state are not.

    Args:
        job: whose configuration says of the advantages and of the values' loss.
        share: this rank's share of every minibatch, at the critic's layout.
        engine: with a value head.
        actor: whose checkpoints have the critic from now on.
        has_own_layout: whether the engine's layout is not the actor's.
    """

    def __init__(
        self,
        job: Job,
        share: BatchShare,
        engine: MegatronEngine,
        actor: MegatronEngine,
        has_own_layout: bool = False,
    ) -> None:
        self._settings, self._share, self._timers, self._say = job.config.critic, share, job.timers, job.say
        self._engine, self._actor = engine, actor
        self._updates_per_step = job.config.algorithm.minibatches_per_step
        self._own_layout = OwnLayout(share) if has_own_layout else None
        self._objective = ValueObjective(job.config.critic.clip_value)
        actor.companions[NAME] = engine
        engine.offload.to_host(*PARTS)

    @property
    def learns_alone(self) -> bool:
        """Whether the coming step is one of the first ``critic.warmup_steps``, which leave the policy as it is."""
        return self._engine.lr_schedule.num_steps < self._settings.warmup_steps * self._updates_per_step

    def with_advantages(
        self, packed: Sequence[list[Microbatch]], penalty: Callable[[Microbatch], Tensor] | None
    ) -> list[list[Microbatch]]:
        """Micro-batches, whose advantages are rewards, with advantages, values and returns of every token. Collective.

        Args:
            packed: micro-batches of every minibatch.
            penalty: what a token costs [T]: the KL as a part of the reward; None: nothing.
        """
        settings = self._settings

        def of_one(microbatch: Microbatch, values_T: Tensor) -> Microbatch:
            mask_T, cu_seqlens = microbatch.loss_mask, microbatch.cu_seqlens
            assert microbatch.advantages is not None, "the rewards"
            rewards_T = rewards_at_ends(microbatch.advantages, mask_T, cu_seqlens)
            if penalty is not None:
                rewards_T = rewards_T - penalty(microbatch)
            advantages_T, returns_T = gae(rewards_T, values_T, mask_T, cu_seqlens, settings.gamma, settings.lam)
            return microbatch.replace(advantages=advantages_T, values=values_T, returns=returns_T)

        with self._timers("values"), self._working():
            values_of = self._engine.policy.token_values
            if self._own_layout is not None:
                values = self._own_layout.values(packed, values_of)
            else:
                values = [values_of(own_routes(microbatches)) for microbatches in packed]
        return [
            [of_one(m, values_T) for m, values_T in zip(microbatches, of_part, strict=True)]
            for microbatches, of_part in zip(packed, values, strict=True)
        ]

    def update(self, minibatches: Sequence[tuple[list[Microbatch], Denominators]]) -> dict[str, float]:
        """One optimizer step for every minibatch; returns metrics. Collective."""
        total, grad_norm, lr, num_tokens = Totals(), 0.0, 0.0, 0
        with self._timers("critic"), self._working():
            own = [own_routes(microbatches) for microbatches, _ in minibatches]
            if self._own_layout is not None:
                own = self._own_layout.to_learn(own)
            for number, (microbatches, (_, denominators)) in enumerate(zip(own, minibatches, strict=True), start=1):
                loss = partial(self._objective, denominators=denominators)
                total.include(totals_of(self._share, self._engine.forward_backward(microbatches, loss)))
                is_last = number == len(minibatches)
                step = self._engine.optimizer_step(next_is_forward_backward=not is_last)
                warn_if_skipped(self._say, self._engine, step)
                grad_norm, lr = grad_norm + step.grad_norm / len(minibatches), step.lr
                num_tokens += denominators.num_tokens
        sums = total.sums
        return {
            "critic/loss": sums["loss"] / len(minibatches),
            "critic/value_mean": sums["value"] / num_tokens,
            "critic/return_mean": sums["return"] / num_tokens,
            "critic/explained_variance": explained_variance(sums, num_tokens),
            "critic/clip_fraction": sums["clip_fraction"] / num_tokens,
            "critic/grad_norm": grad_norm,
            "critic/lr": lr,
            "critic/skipped_steps_total": float(self._engine.stepper.skipped.total),
        }

    @contextmanager
    def _working(self) -> Iterator[None]:
        self._actor.offload.to_host("gradients", "optimizer")
        self._engine.offload.to_device()
        with self._engine.in_its_groups():
            yield
        self._engine.offload.to_host(*PARTS)
        self._actor.offload.to_device("gradients", "optimizer")


def own_routes(microbatches: Sequence[Microbatch]) -> list[Microbatch]:
    """The micro-batches without the experts that the policy's tokens went to: a critic has routers of its own."""
    return [microbatch.replace(routed_experts=None, own_experts=None) for microbatch in microbatches]
