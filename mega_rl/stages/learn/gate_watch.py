"""Which gates a step has, over a run and across its resumes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mega_rl.config import RunConfig
from mega_rl.stages.learn.gates import GATES, RESUMED, RUNNING, EngineHistory, GatedStep, Gates


class GateWatch:
    """The gates of a run, step by step.

    Args:
        first_step: finished steps when this process began: 0, or those of the checkpoint.
        metrics: of the last of them, as far as they are known.
    """

    def __init__(
        self,
        config: RunConfig,
        is_counted: bool,
        say: Callable[[str], None],
        first_step: int = 0,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        self._config, self._is_counted, self._say, self._first_step = config, is_counted, say, first_step
        self._history = EngineHistory(config.trainer.gates.engine_factor)
        known = metrics or {}
        # Tokens of older weights are further from the trainer, and the gate leaves them out.
        if "rollout/logprob_diff_mean" in known and not known.get("rollout/staleness_max"):
            self._history.add(known["rollout/logprob_diff_mean"], known.get("aqn/sigma", 0.0))

    def of_step(self, step: int, version: int, sigma: float) -> Gates:
        """The gates of the step that begins after ``step`` finished ones; see ``GatedStep`` for the others."""
        names, words = tuple(GATES), "the first step"
        if step > 0:
            names, words = RUNNING, f"step {step + 1}"
            if step == self._first_step:
                names, words = RESUMED, f"the first step after the resume, step {step + 1},"
        at = GatedStep(names, words, version, sigma)
        return Gates(self._config, self._is_counted, self._say, at, self._history)
