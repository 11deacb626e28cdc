"""Adapters that learn must reach the engines: when they have changed, what the engines answer must have changed too.

An adapter that is trained and never delivered leaves a run that looks well: the engines sample from the starting model,
and importance weights hide for a while that it is not the policy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from mega_rl.config import RunConfig
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.layout import EngineLayout
from mega_rl.rollout.temperature_probe import Probed, probe_prompt
from mega_rl.stages.learn.gates import GateFailure
from mega_rl.stages.weights.weight_sync import Pushed

LARGEST_B, UNCHANGED = "adapter/largest_b", "adapter/unchanged_fraction"
MOSTLY = 0.5  # share of unchanged elements from which on it is told of
PATIENCE = {"float32": 1, "bfloat16": 16}  # syncs of changed adapters that may leave every answer as it was
NUM_PROMPTS = 4


class Delivery:
    """Watches the syncs of a run with adapters until the engines have shown that they get them.

    Args:
        engine: what is asked for log-probabilities of a few fixed prompts.
        layout: of the engines over the ranks.
        vocab_size: of the model.
        config: says what dtype the engines hold.
        say: tells the user.
    """

    def __init__(
        self, engine: Probed, layout: EngineLayout, vocab_size: int, config: RunConfig, say: Callable[[str], None]
    ) -> None:
        self._engine, self._layout, self._say = engine, layout, say
        first = probe_prompt(vocab_size)
        self._prompts = [tuple((token + 7 * i) % vocab_size for token in first) for i in range(NUM_PROMPTS)]
        self._dtype = config.rollout.dtype or config.model.dtype
        self._before: tuple[Pushed, list[str]] | None = None
        self._num_unmoved, self._is_shown, self._is_loss_told = 0, False, False

    def check(self, pushed: Pushed) -> None:
        """After every push for training, before anything is sampled. Collective.

        Raises:
            GateFailure: on every rank, adapters that changed while an engine's answers did not.
        """
        if LARGEST_B not in pushed.metrics:
            return
        self._tell_loss(pushed)
        if self._is_shown or pushed.sigma:  # noise moves the answers by itself
            return
        if self._before is None:
            self._before = pushed, self._answers()
            return
        if _size(pushed) == _size(self._before[0]) or pushed.metrics.get(UNCHANGED) == 1.0:
            return
        before, answers = self._before
        unmoved = [number for number, pair in enumerate(zip(answers, self._answers(), strict=True)) if len({*pair}) < 2]
        self._is_shown, self._num_unmoved = not unmoved, self._num_unmoved + 1
        if unmoved and self._num_unmoved >= PATIENCE[self._dtype]:
            raise GateFailure(
                f"rollout engine {unmoved[0]} answers with weight version {pushed.version} bit for bit as with version "
                f"{before.version}, though the adapters have changed since, so it does not get them: run again with "
                "bridge.verify=all, which names the first tensor that an engine holds otherwise, or with "
                "rollout.adapter=merged"
            )

    def _answers(self) -> list[str]:
        """What each engine finds of the first tokens after the prompts, exactly."""
        asked = [self._engine.first_logprobs(prompt, 1.0) for prompt in self._prompts]
        own = [repr([sorted(of_engine.items()) for of_engine in answers]) for answers in zip(*asked, strict=True)]
        # the other tensor-parallel ranks of an engine have asked the same engine
        parts = gather_objects(own if self._layout.tensor_rank(dist.get_rank()) == 0 else [])
        return [answer for part in parts for answer in part]

    def _tell_loss(self, pushed: Pushed) -> None:
        share = pushed.metrics.get(UNCHANGED, 0.0)
        if self._is_loss_told or self._dtype == "float32" or share < MOSTLY:
            return
        self._is_loss_told = True
        self._say(
            f"warning: {share:.1%} of the elements of adapted weights are in the engines as without the adapter, since "
            f"{self._dtype} rounds their small updates away; the engines sample from a policy that lags behind. "
            "rollout.adapter=slots keeps all of an adapter, rollout.dtype=float32 too (docs/adapters.md)"
        )


def _size(pushed: Pushed) -> float:
    return pushed.metrics[LARGEST_B]
