"""Which gates a step has, over a run and across its resumes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mega_rl.config import RunConfig
from mega_rl.stages.learn.engine_distance import BY_STALENESS, Histories
from mega_rl.stages.learn.gates import GATES, RESUMED, RUNNING, GatedStep, Gates


class GateWatch:
    """The gates of a run, step by step.

    Args:
        first_step: finished steps when this process began: 0, or those of the checkpoint.
        metrics: of the last of them, as far as they are known.
        sigma_of: standard deviation of the noise on the weights of a version.
    """

    def __init__(
        self,
        config: RunConfig,
        is_counted: bool,
        say: Callable[[str], None],
        first_step: int = 0,
        metrics: Mapping[str, float] | None = None,
        sigma_of: Callable[[int], float] = lambda version: 0.0,
    ) -> None:
        self._config, self._is_counted, self._say, self._first_step = config, is_counted, say, first_step
        self._history, self._is_told = Histories(config.trainer.gates.engine_factor, sigma_of), False
        for staleness, distance in _by_staleness(metrics or {}).items():
            if staleness:
                self._history.add(first_step - 1, staleness, distance)
            else:
                self._history.fresh.add(distance, sigma_of(first_step - 1))

    def of_step(self, step: int, version: int, sigma: float) -> Gates:
        """The gates of the step that begins after ``step`` finished ones; see ``GatedStep`` for the others."""
        names, words = tuple(GATES), "the first step"
        if step > 0:
            names, words = RUNNING, f"step {step + 1}"
            if step == self._first_step:
                names, words = RESUMED, f"the first step after the resume, step {step + 1},"
        at = GatedStep(names, words, version, sigma)
        return Gates(self._config, self._is_counted, self._say, at, self._history, self._tell_once)

    def _tell_once(self, sentence: str) -> None:
        if not self._is_told:
            self._is_told = True
            self._say(sentence)


def _by_staleness(metrics: Mapping[str, float]) -> dict[int, float]:
    """What a step's metrics say of the distance of its tokens, by how much older than the step their weights were."""
    found = {
        int(name.removeprefix(BY_STALENESS)): value for name, value in metrics.items() if name.startswith(BY_STALENESS)
    }
    if found or "rollout/logprob_diff_mean" not in metrics:
        return found
    oldest = metrics.get("rollout/staleness_max", 0.0)
    is_one = metrics.get("rollout/staleness_mean", oldest) == oldest  # all tokens are as old: else they say nothing
    return {int(oldest): metrics["rollout/logprob_diff_mean"]} if is_one else {}
