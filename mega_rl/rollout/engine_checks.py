"""What an engine must show in each of its lives, asked of it alone: questions out, answers in, whoever carries them.

Its log-probabilities must be of the distribution that it samples from: asked for once, with the first weights of a
life. And adapters that learn must reach it: when they have changed, its answers must have changed too. An adapter that
is trained and never delivered leaves a run that looks well: the engine samples from the starting model, and importance
weights hide for a while that it is not the policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from mega_rl.errors import GateFailure, InputError
from mega_rl.rollout.temperature_probe import PROBE_TEMPERATURE, is_sampled_from, measured_temperature, probe_prompt

PATIENCE = {"float32": 1, "bfloat16": 16}  # loads of changed adapters that may leave every answer as it was
NUM_PROMPTS = 4


class Question(NamedTuple):
    """As of ``Probed.first_logprobs``."""

    prompt_ids: tuple[int, ...]
    temperature: float
    with_adapter: bool = True


Answer = Mapping[int, float]  # log-probabilities of the first token after the prompt, nats, by token


@dataclass(frozen=True)
class Held:
    """What an engine holds, as far as its answers tell of it."""

    version: int  # negative: the weights of a validation
    sigma: float = 0.0  # standard deviation of the noise on them
    largest_b: float | None = None  # largest element of the adapters' B; None: there are no adapters
    unchanged: float = 0.0  # share of the elements of adapted weights that are as without the adapter
    is_beside: bool = False  # whether the adapters lie beside the weights, so that an engine can answer without them


class CheckPlan:
    """How the engines of a run are checked.

    Args:
        vocab_size: of the model.
        temperature: ``rollout.temperature``; at 1 raw log-probabilities are right too, and are only told of.
        dtype: that the engines hold.
        say: tells the user, in any thread.
    """

    def __init__(self, vocab_size: int, temperature: float, dtype: str, say: Callable[[str], None]) -> None:
        self.temperature, self.patience, self._say = temperature, PATIENCE[dtype], say
        self._told: set[str] = set()
        prompt = probe_prompt(vocab_size)
        self.probes = Question(prompt, 1.0), Question(prompt, PROBE_TEMPERATURE)
        self.samples = [Question(tuple((t + 7 * i) % vocab_size for t in prompt), 1.0) for i in range(NUM_PROMPTS)]
        self.without = [question._replace(with_adapter=False) for question in self.samples]

    @property
    def every(self) -> list[Question]:
        """All that an engine may be asked."""
        return list(dict.fromkeys([*self.probes, *self.samples, *self.without]))

    def tell_once(self, what: str, sentence: str) -> None:
        """Say a sentence, if none was said of ``what`` before."""
        if what not in self._told:
            self._told.add(what)
            self._say(sentence)


class EngineChecks:
    """Those of one life of one engine.

    Args:
        engine: its number.
    """

    def __init__(self, engine: int, plan: CheckPlan) -> None:
        self._engine, self._plan = engine, plan
        self._is_probed = self._is_shown = self._is_applied = False
        self._before: tuple[Held, list[Answer]] | None = None
        self._num_unmoved = self._num_left_out = 0

    def questions(self, held: Held) -> list[Question]:
        """What must be asked when it has got weights, before it samples with them; the answers go to ``hear``."""
        asked = [] if self._is_probed else list(self._plan.probes)
        if (is_compared := self._is_compared_with(held)) or self._is_sampled_after(held):
            asked += self._plan.samples
        return asked + (self._plan.without if is_compared else [])

    def hear(self, held: Held, answers: Mapping[Question, Answer]) -> None:
        """
        Args:
            answers: to all ``questions``, and perhaps to others.

        Raises:
            InputError: it returns log-probabilities of another distribution than it samples from.
            GateFailure: its answers are as without adapters that add something, or adapters changed and they did not.
        """
        is_sampled, is_compared = self._is_sampled_after(held), self._is_compared_with(held)
        if not self._is_probed:
            self._probe(*(answers[question] for question in self._plan.probes))
        if is_compared:
            pairs = zip(self._plan.samples, self._plan.without, strict=True)
            self._is_applied = any(answers[question] != answers[without] for question, without in pairs)
            self._count_left_out(held)
        if is_sampled:
            self._compare(held, [answers[question] for question in self._plan.samples])

    def _probe(self, plain: Answer, heated: Answer) -> None:
        self._is_probed = True
        measured, temperature = measured_temperature(plain, heated), self._plan.temperature
        if measured is None:
            what = "the model finds all tokens alike, so that the temperature of its log-probabilities cannot be probed"
            self._plan.tell_once("flat", what)
        if is_sampled_from(measured):
            return
        found = (
            f"rollout engine {self._engine} returns log-probabilities of another distribution than it samples from "
            f"(asked for temperature {PROBE_TEMPERATURE:g}, they show {measured:.3g})"
        )
        if temperature != 1.0:
            raise InputError(
                f"{found}, so rollout.temperature={temperature:g} would give wrong importance weights: set "
                "rollout.temperature=1, or use an engine whose sampler obeys logprobs_mode=processed_logprobs."
            )
        self._plan.tell_once("raw", f"warning: {found}; at rollout.temperature=1 this changes nothing")

    def _is_sampled_after(self, held: Held) -> bool:
        """Whether its answers with these weights say something of adapters; noise moves them by itself."""
        if self._is_shown or held.largest_b is None or held.sigma or held.version < 0:
            return False
        return self._before is None or not (self._before[0].largest_b == held.largest_b or held.unchanged == 1.0)

    def _is_compared_with(self, held: Held) -> bool:
        """Whether its answers with these adapters must differ from those without: from the first load of a life on."""
        return held.is_beside and not self._is_applied and bool(held.largest_b) and held.version >= 0

    def _count_left_out(self, held: Held) -> None:
        self._num_left_out += not self._is_applied
        if self._num_left_out >= self._plan.patience:
            raise GateFailure(
                f"rollout engine {self._engine} answers with weight version {held.version} bit for bit as without its "
                "adapter, though that adds something, so it leaves it out: run again with rollout.adapter=merged"
            )

    def _compare(self, held: Held, answers: list[Answer]) -> None:
        if self._before is None:
            self._before = held, answers
            return
        before, earlier = self._before
        self._is_shown, self._num_unmoved = answers != earlier, self._num_unmoved + 1
        if not self._is_shown and self._num_unmoved >= self._plan.patience:
            raise GateFailure(
                f"rollout engine {self._engine} answers with weight version {held.version} bit for bit as with version "
                f"{before.version}, though the adapters have changed since, so it does not get them: run again with "
                "bridge.verify=all, which names the first tensor that an engine holds otherwise, or with "
                "rollout.adapter=merged"
            )


class FleetChecks:
    """Those of engines that load versions when they want: the trainer's thread tells, another one asks.

    Args:
        plan: of the run.
    """

    def __init__(self, plan: CheckPlan) -> None:
        self._plan, self._held = plan, dict[int, Held]()  # by version

    def tell(self, held: Held) -> None:
        """What the trainer has put into the store; called before an engine is told to load it."""
        self._held[held.version] = held

    def held(self, version: int) -> Held:
        """What engines hold that have loaded it; a validation's weights are known by their number alone."""
        return self._held[version] if version >= 0 else Held(version)

    def of_life(self, engine: int) -> EngineChecks:
        return EngineChecks(engine, self._plan)
