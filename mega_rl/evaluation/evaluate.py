"""Held-out prompts, answered greedily and by sampling over all engines, and scored while others are still sampled."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from operator import itemgetter
from queue import SimpleQueue

import torch.distributed as dist

from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel.collectives import together
from mega_rl.parallel.layout import EngineLayout
from mega_rl.parallel.rendezvous import Rendezvous
from mega_rl.parallel.sending import spread
from mega_rl.rewards.scorer import Scorer
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from mega_rl.rollout.engine import Ended, Request, Sampler, whole
from mega_rl.rollout.episodes.episode_metrics import episode_metrics
from mega_rl.rollout.requests import make_requests
from mega_rl.types import Prompt, Score, Trajectory, TrajectorySummary

STREAM = 1 << 32  # keeps the seeds of evaluations apart from training seeds of any step


@dataclass(frozen=True)
class EvaluationSettings:
    """How the prompts of an evaluation are answered."""

    layout: EngineLayout
    n: int  # sampled answers per prompt
    temperature: float  # of the sampled answers
    max_tokens: int  # of an answer
    seed: int
    is_greedy: bool = True  # one greedy answer per prompt, beside the sampled ones
    with_logprobs: bool = True  # of the answers' tokens; an engine is faster without

    def __post_init__(self) -> None:
        assert self.n + self.is_greedy > 0, "a prompt without answers"


@dataclass(frozen=True)
class ValidationSet:
    """The prompts of a run's validations and how they are answered: the same in every validation."""

    prompts: Sequence[Prompt]
    settings: EvaluationSettings


@dataclass(frozen=True)
class EvaluationRow:
    """One answer of an evaluation."""

    trajectory: Trajectory
    score: Score
    is_greedy: bool
    seed: int | None = None  # that it was sampled with; None: greedy


@dataclass(frozen=True)
class RowSummary:
    """The same as every rank knows it: without the tokens."""

    summary: TrajectorySummary
    score: Score
    is_greedy: bool


@dataclass(frozen=True)
class AnsweredPrompt:
    """A prompt with all its answers: the greedy one, then the sampled ones by their number."""

    prompt: Prompt
    rows: tuple[EvaluationRow, ...]


def evaluate(
    engine: Sampler,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    take: Callable[[AnsweredPrompt], None],
    rendezvous: Rendezvous | None = None,
) -> None:
    """Answer and score every prompt with the engines' present weights. Collective; one process needs no group.

    Every engine answers an even share of the prompts, all of them side by side. A prompt goes to ``take`` as soon as
    its last answer is scored, on the first rank of the engine that answered it.

    Args:
        prompts: each with an index of its own, the same on all ranks.
        rendezvous: where the ranks wait for the slowest one; None: in a collective, which has a time limit.

    Raises:
        InputError: on every rank, if a prompt leaves no room for its answer; on the rank that scores, if the rewards
            can no longer be loaded, or what ``take`` raises: that ends its process, and torchrun then ends the others.
    """
    layout, rank = settings.layout, dist.get_rank() if dist.is_initialized() else 0
    replica, num_replicas = layout.replica(rank), layout.num_replicas
    share = prompts[len(prompts) * replica // num_replicas : len(prompts) * (replica + 1) // num_replicas]
    requests = [request for prompt in share for request in requests_of(prompt, settings)]
    with together("checking the requests"):
        engine.check(requests)
    engine.submit(requests)
    under_way = _UnderWay(scorer, share, settings, take) if layout.tensor_rank(rank) == 0 else None
    while engine.num_unfinished:
        ended = engine.step()
        if under_way is not None:
            under_way.add(ended)
    if under_way is not None:
        under_way.finish()
    if rendezvous is not None:
        rendezvous.wait("sampling and scoring")


def summarized(
    mine: Sequence[AnsweredPrompt], layout: EngineLayout, trajectory_store: TrajectoryStore
) -> list[RowSummary]:
    """The rows of all ranks on every rank, by the prompts' indices: all greedy ones, then all sampled ones. Collective.

    Args:
        mine: what ``evaluate`` gave to ``take`` on this rank.
        layout: of the engines.
        trajectory_store: where the trajectories stay.
    """
    own = [
        (
            answered.prompt.index,
            [RowSummary(trajectory_store.add(r.trajectory), r.score, r.is_greedy) for r in answered.rows],
        )
        for answered in mine
    ]
    found = sorted((one for part in spread(own, layout.leaders()) for one in part), key=itemgetter(0))
    rows = [row for _, of_prompt in found for row in of_prompt]
    return [row for is_greedy in (True, False) for row in rows if row.is_greedy is is_greedy]


def requests_of(prompt: Prompt, settings: EvaluationSettings) -> list[Request]:
    """One per answer. The greedy one has the number behind the last sample's, which no other request of the prompt has.

    The seeds are the same at every evaluation, so that curves differ by the weights only.
    """

    def requests(n: int, temperature: float) -> list[Request]:
        return make_requests(
            [prompt], n=n, step=STREAM, seed=settings.seed, max_tokens=settings.max_tokens, temperature=temperature
        )

    greedy, sampled = requests(int(settings.is_greedy), 0.0), requests(settings.n, settings.temperature)
    numbered = [*(replace(request, sample_index=settings.n) for request in greedy), *sampled]
    return [replace(request, with_logprobs=settings.with_logprobs) for request in numbered]


class _UnderWay:
    """Prompts between their requests and their scores, on the first rank of an engine."""

    def __init__(
        self,
        scorer: Scorer,
        share: Sequence[Prompt],
        settings: EvaluationSettings,
        take: Callable[[AnsweredPrompt], None],
    ) -> None:
        self._scorer, self._settings, self._take = scorer, settings, take
        self._prompts = {prompt.index: prompt for prompt in share}
        self._scores: dict[int, dict[int, tuple[Trajectory, Future[Score]]]] = defaultdict(dict)  # prompt -> sample
        self._num_known: dict[int, int] = defaultdict(int)  # scores of a prompt, known or failed
        self._told: SimpleQueue[int] = SimpleQueue()  # the prompt of each score, as it comes to be known

    def add(self, ended: Sequence[Ended]) -> None:
        """Start to score these, and hand on the prompts that have become complete."""
        for trajectory in whole(ended):
            index = trajectory.prompt.index
            score = self._scorer.start(trajectory)
            self._scores[index][trajectory.sample_index] = trajectory, score
            score.add_done_callback(lambda _, index=index: self._told.put(index))  # type: ignore[misc]
        while not self._told.empty():
            self._count(self._told.get())

    def finish(self) -> None:
        """Wait for the scores that are left."""
        with HEART.waiting("the rewards", is_for_ranks=False):
            while self._prompts:
                self._count(self._told.get())

    def _count(self, index: int) -> None:
        self._num_known[index] += 1
        if self._num_known[index] < self._settings.n + self._settings.is_greedy:
            return
        prompt, found = self._prompts.pop(index), self._scores.pop(index)
        trajectories = {number: trajectory for number, (trajectory, _) in found.items()}
        scores = {number: score.result() for number, (_, score) in found.items()}
        self._take(answered(prompt, self._settings, trajectories, scores))


def answered(
    prompt: Prompt,
    settings: EvaluationSettings,
    trajectories: Mapping[int, Trajectory],
    scores: Mapping[int, Score],
) -> AnsweredPrompt:
    """A prompt with its answers, by the sample numbers of ``requests_of``, all of which are there."""
    return AnsweredPrompt(
        prompt,
        tuple(
            _row(request, trajectories[request.sample_index], scores[request.sample_index])
            for request in requests_of(prompt, settings)
        ),
    )


def _row(request: Request, trajectory: Trajectory, score: Score) -> EvaluationRow:
    if request.greedy:
        return EvaluationRow(replace(trajectory, sample_index=0), score, True)
    return EvaluationRow(trajectory, score, False, request.seed)


def evaluation_metrics(rows: Sequence[RowSummary]) -> dict[str, float]:
    """Per data source: ``greedy/acc``, ``acc/mean@1`` and ``acc/best@n``.

    ``greedy/acc`` is the mean score of greedy answers, ``acc/mean@1`` the expected score of one sampled answer (of the
    greedy one if there are no others), ``acc/best@n`` the mean over prompts of the best of n. Scores are what the
    rewards add up to, so they are accuracies if right answers score 1 and others 0. With an environment there are the
    metrics of the same episodes besides, also of those whose reward is not known.
    """
    metrics: dict[str, float] = {}
    greedy, sampled = ([row for row in rows if row.is_greedy is is_greedy] for is_greedy in (True, False))
    for source, values in _by_prompt(greedy).items():
        metrics[f"val-core/{source}/greedy/acc"] = _mean([v for group in values for v in group])
    summaries: dict[str, list[TrajectorySummary]] = defaultdict(list)
    for row in sampled or greedy:
        summaries[row.summary.data_source].append(row.summary)
    for source, values in _by_prompt(sampled or greedy).items():
        metrics[f"val-core/{source}/acc/mean@1"] = _mean([v for group in values for v in group])
        if (size := max(map(len, values))) > 1:
            metrics[f"val-core/{source}/acc/best@{size}"] = _mean([max(group) for group in values])
        metrics[f"val-aux/{source}/response_length/mean"] = _mean([one.num_sampled for one in summaries[source]])
    for source, of_source in summaries.items():
        metrics |= {f"val-aux/{source}/{name}": value for name, value in episode_metrics(of_source).items()}
    return metrics


def _by_prompt(rows: Sequence[RowSummary]) -> dict[str, list[list[float]]]:
    """data source -> prompts -> the known scores of their samples; a prompt without any is left out."""
    groups: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.score.is_known:
            groups[row.summary.data_source][row.summary.prompt_index].append(row.score.value)
    return {source: list(prompts.values()) for source, prompts in groups.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
