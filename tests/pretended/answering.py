"""An engine and a scorer that answer by rule, for tests of what is done with the answers."""

from __future__ import annotations

import math
from concurrent.futures import Future

from mega_rl.rollout.engine import Request
from mega_rl.types import Prompt, Score, Trajectory, UnknownReward
from tests.pretended.samplers import Modelless, answered

PROMPTS = [Prompt(i, (1, 2), f"{i}?", "", "a" if i < 2 else "b") for i in range(3)]


class FakeEngine(Modelless):
    """A response has as many tokens as its sample's number, and one more; the newest request ends first."""

    def step(self) -> list[Trajectory]:
        return [self.answer(self._under_way.pop())]

    def answer(self, request: Request) -> Trajectory:
        number = 1 if request.greedy else request.sample_index + 1
        text = str((request.seed >> 7) % 3) if not request.greedy else "1"
        return answered(request, [5] * number, [0.0] * number, text, 0)


class FakeScorer:
    """Sample 1 of a prompt is right, prompt 1 is unknown, every other answer is wrong."""

    collective = None

    def start(self, trajectory: Trajectory) -> Future[Score]:
        result: Future[Score] = Future()
        unknown = Score(math.nan, {}, {"r": UnknownReward("raised", "raised ValueError: x")})
        is_right = trajectory.num_sampled == 2
        result.set_result(unknown if trajectory.prompt.index == 1 else Score(float(is_right), {"r": float(is_right)}))
        return result
