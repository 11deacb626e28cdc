"""What a scheduler's thread calls: the requests of a ticket, and the scoring of what was sampled for it.

Both are made once and never change. Nothing that the loop changes while it trains is read from the other thread, such
as the position of the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from mega_rl.config import RunConfig
from mega_rl.data.stream import BatchOrder
from mega_rl.evaluation.evaluate import ValidationSet, requests_of
from mega_rl.fleet.tickets import Key, Rules
from mega_rl.rewards.scorer import Scorer
from mega_rl.rollout.engine import Request
from mega_rl.rollout.requests import make_requests
from mega_rl.stages.sampling.batch_builder import BusyTime, to_score
from mega_rl.types import Prompt, Response, Score


@dataclass(frozen=True)
class TicketRequests:
    """``mega_rl.fleet.executor.Requests``: from a ticket to its requests, each with its seed.

    A pure function of the ticket: the same ones in every thread, whenever they are asked for.
    """

    rules: Rules
    batch_order: BatchOrder[Prompt]
    validation: ValidationSet | None  # None: nobody asks for a validation
    n: int  # samples of a prompt in a step
    seed: int
    max_tokens: int  # of a response in a step
    temperature: float
    with_routing: bool

    @classmethod
    def of_run(
        cls, config: RunConfig, rules: Rules, batch_order: BatchOrder[Prompt], validation: ValidationSet | None
    ) -> TicketRequests:
        rollout = config.rollout
        return cls(
            rules,
            batch_order,
            validation,
            n=rollout.n,
            seed=config.trainer.seed,
            max_tokens=config.data.max_response_length,
            temperature=rollout.temperature,
            with_routing=rollout.routing_replay == "rollout",
        )

    def __call__(self, key: Key, samples: Sequence[int]) -> list[Request]:
        """The requests of some samples of a ticket, in their order."""
        by_sample = {request.sample_index: request for request in self._all(key)}
        return [by_sample[sample] for sample in samples]

    def _all(self, key: Key) -> list[Request]:
        if key.step < 0:
            assert self.validation is not None, "nobody asks for a validation"
            return requests_of(self.validation.prompts[key.ticket], self.validation.settings)
        order, _, place = self.rules.place(key)
        prompts = self.batch_order
        prompt = prompts.spare(key.step, place) if order == "spare" else prompts.item(key.step, key.ticket)
        return make_requests(
            [prompt],
            n=self.n,
            step=key.step,
            seed=self.seed,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            with_routing=self.with_routing,
        )


@dataclass(frozen=True)
class TicketScoring:
    """Starts the scoring of trajectories, in any thread."""

    config: RunConfig
    scorer: Scorer
    busy_time: BusyTime  # of steps; a validation is scored in its own time

    def start(self, key: Key, trajectory: Response) -> Future[Score]:
        """The score of a trajectory of a ticket, as ``Scorer.start``; of a validation as ``evaluate`` does it."""
        if key.step < 0:
            return self.scorer.start(trajectory)
        self.busy_time.begin()
        score = self.scorer.start(to_score(self.config, trajectory))
        score.add_done_callback(lambda _: self.busy_time.end())
        return score
