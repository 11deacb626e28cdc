"""Before a token is learnt: what every engine must show of the weights that it has got, after every push."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch.distributed as dist

from mega_rl.config import RunConfig
from mega_rl.errors import GateFailure, InputError
from mega_rl.parallel.collectives import broadcast_list, is_first, numbers_to_first, together, told_numbers
from mega_rl.parallel.layout import EngineLayout
from mega_rl.rollout.engine_checks import Answer, CheckPlan, EngineChecks, FleetChecks, Held, Question
from mega_rl.rollout.temperature_probe import Probed
from mega_rl.stages.weights.weight_sync import Pushed

LARGEST_B, UNCHANGED = "adapter/largest_b", "adapter/unchanged_fraction"
MOSTLY = 0.5  # share of unchanged elements from which on it is told of


def check_plan(config: RunConfig, vocab_size: int, say: Callable[[str], None]) -> CheckPlan:
    return CheckPlan(vocab_size, config.rollout.temperature, config.rollout.dtype or config.model.dtype, say)


def held_of(pushed: Pushed) -> Held:
    metrics = pushed.metrics
    # Where adapters are merged, a share of the weights is known to be unchanged as soon as they add something.
    is_beside = bool(metrics.get(LARGEST_B)) and UNCHANGED not in metrics
    return Held(pushed.version, pushed.sigma, metrics.get(LARGEST_B), metrics.get(UNCHANGED, 0.0), is_beside)


class Probe(Protocol):
    """What is asked of the engines of a run."""

    def check(self, pushed: Pushed) -> None:
        """After every push for training, before anything is sampled with it. Collective.

        Raises:
            InputError, GateFailure: on every rank, as ``EngineChecks.hear``.
        """


class EngineProbe:
    """A ``Probe`` of engines that all have the weights of the last push, and wait."""

    def __init__(self, engine: Probed, layout: EngineLayout, plan: CheckPlan) -> None:
        self._engine, self._layout, self._plan = engine, layout, plan
        self._checks: list[EngineChecks] = []  # on rank 0: by engine, as soon as they have answered

    def check(self, pushed: Pushed) -> None:
        """As of ``Probe``."""
        held, every = held_of(pushed), self._plan.every
        known = self._checks or [EngineChecks(0, self._plan)]
        asked = {question for checks in known for question in checks.questions(held)}
        numbers = told_numbers([number for number, question in enumerate(every) if question in asked])
        if not numbers:
            return
        questions = [every[int(number)] for number in numbers]
        engines = self._answers(questions)
        failures: list[InputError | GateFailure] = []
        with together("hearing what the rollout engines show"):
            if is_first():
                assert engines, "no rollout engine has answered, so none has shown anything"
                try:
                    self._hear(held, questions, engines)
                except (InputError, GateFailure) as error:
                    failures.append(error)
        for failure in broadcast_list(failures):
            raise failure

    def _hear(self, held: Held, questions: Sequence[Question], engines: Sequence[Sequence[Answer]]) -> None:
        self._checks = self._checks or [EngineChecks(number, self._plan) for number in range(len(engines))]
        for checks, answers in zip(self._checks, engines, strict=True):
            checks.hear(held, dict(zip(questions, answers, strict=True)))

    def _answers(self, questions: Sequence[Question]) -> list[list[Answer]]:
        """Of every engine, in the order of the questions, on rank 0; nothing on the others. Collective."""
        asked = [self._engine.first_logprobs(*question) for question in questions]
        own = [answer for of_engine in zip(*asked, strict=True) for answer in of_engine]
        # the other tensor-parallel ranks of an engine have asked the same engine
        is_leader = self._layout.tensor_rank(dist.get_rank()) == 0
        rows = numbers_to_first(_to_numbers(own) if is_leader else [])
        answers = [answer for row in rows for answer in _of_numbers(row)]
        return [answers[i : i + len(questions)] for i in range(0, len(answers), len(questions))]


def _to_numbers(answers: Sequence[Answer]) -> list[float]:
    """For rank 0: of each how many tokens it has, and these with their log-probabilities."""
    return [number for answer in answers for number in (len(answer), *answer.keys(), *answer.values())]


def _of_numbers(numbers: Sequence[float]) -> list[Answer]:
    """The inverse of ``_to_numbers``."""
    answers, left = list[Answer](), list(numbers)
    while left:
        size = int(left[0])
        answers.append(dict(zip(map(int, left[1 : 1 + size]), left[1 + size : 1 + 2 * size], strict=True)))
        del left[: 1 + 2 * size]
    return answers


class FleetProbe:
    """A ``Probe`` of engines that are asked when they load: they are told what of."""

    def __init__(self, checks: FleetChecks) -> None:
        self._checks = checks

    def check(self, pushed: Pushed) -> None:
        """As of ``Probe``; not collective."""
        self._checks.tell(held_of(pushed))


class NoEngine:
    """A ``Probe`` of a run whose responses are recorded ones: it has said that nobody is asked."""

    def check(self, pushed: Pushed) -> None:
        """Do nothing."""


class Rounding:
    """Tells of adapters whose small updates are lost in the engines' dtype.

    Args:
        config: says what dtype the engines hold.
        say: tells the user.
    """

    def __init__(self, config: RunConfig, say: Callable[[str], None]) -> None:
        self._dtype, self._say, self._is_told = config.rollout.dtype or config.model.dtype, say, False

    def tell(self, pushed: Pushed) -> None:
        share = pushed.metrics.get(UNCHANGED, 0.0)
        if self._is_told or self._dtype == "float32" or share < MOSTLY:
            return
        self._is_told = True
        self._say(
            f"warning: {share:.1%} of the elements of adapted weights are in the engines as without the adapter, since "
            f"{self._dtype} rounds their small updates away; the engines sample from a policy that lags behind. "
            "rollout.adapter=slots keeps all of an adapter, rollout.dtype=float32 too (docs/adapters.md)"
        )
