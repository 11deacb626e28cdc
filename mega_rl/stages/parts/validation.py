"""Evaluation on held-out prompts, with one greedy answer and n sampled ones each; validation evaluates the actor."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch.distributed as dist

from mega_rl.config import RunConfig
from mega_rl.data.prompts import PromptDataset
from mega_rl.observe.console import before_after_table
from mega_rl.observe.observer import Observer
from mega_rl.observe.timers import Timers
from mega_rl.parallel.layout import EngineLayout
from mega_rl.parallel.rendezvous import Rendezvous
from mega_rl.rewards.scorer import Scorer
from mega_rl.rollout.engine import Sampler
from mega_rl.rollout.replicas import generate_everywhere
from mega_rl.rollout.requests import make_requests
from mega_rl.stages.parts.progress import Validations
from mega_rl.stages.parts.rollout_metrics import readable
from mega_rl.stages.parts.scoring import RewardWatch, score_everywhere
from mega_rl.stages.parts.weight_sync import Sync
from mega_rl.types import Prompt, Score, Trajectory

STREAM = 1 << 32  # keeps validation seeds apart from training seeds of any step


@dataclass(frozen=True)
class EvaluationSettings:
    """How the prompts of an evaluation are answered."""

    layout: EngineLayout
    n: int  # sampled answers per prompt beside the greedy one; 0: the greedy one only
    temperature: float  # of the sampled answers
    max_tokens: int  # of an answer
    seed: int


@dataclass(frozen=True)
class Row:
    """One answer of an evaluation."""

    trajectory: Trajectory
    score: Score
    is_greedy: bool


def evaluate(
    engine: Sampler,
    scorer: Scorer,
    prompts: Sequence[Prompt],
    settings: EvaluationSettings,
    rendezvous: Rendezvous | None = None,
) -> tuple[dict[str, float], list[Row]]:
    """Metrics of the engines' present weights, and the answers: all greedy ones, then all sampled ones. Collective.

    A single process needs no process group. Metrics per data source: ``greedy/acc`` is the mean score of greedy
    answers, ``acc/mean@1`` the expected score of one sampled answer (of the greedy one if ``n`` is 0),
    ``acc/best@n`` the mean over prompts of the best of n. Scores are what the rewards add up to, so they are accuracies
    if right answers score 1 and others 0.

    Args:
        rendezvous: where the ranks wait for the slowest one; None: in a collective, which has a time limit.

    Raises:
        InputError: on every rank, if a prompt leaves no room for its answer, or the rewards can no longer be loaded.
    """
    rows: list[Row] = []
    for n, temperature, is_greedy in ((1, 0.0, True), (settings.n, settings.temperature, False)):
        requests = make_requests(
            prompts,
            n=n,
            step=STREAM,  # the same seeds at every evaluation, so that curves differ by the weights only
            seed=settings.seed,
            max_tokens=settings.max_tokens,
            temperature=temperature,
        )
        trajectories = generate_everywhere(engine, settings.layout, requests, rendezvous=rendezvous)
        scores = score_everywhere(scorer, trajectories, rendezvous)
        rows += [Row(trajectory, score, is_greedy) for trajectory, score in zip(trajectories, scores, strict=True)]
    return evaluation_metrics(rows), rows


def evaluation_metrics(rows: Sequence[Row]) -> dict[str, float]:
    """The metrics that ``evaluate`` describes."""
    metrics: dict[str, float] = {}
    greedy, sampled = ([row for row in rows if row.is_greedy is is_greedy] for is_greedy in (True, False))
    for source, values in _by_prompt(greedy).items():
        metrics[f"val-core/{source}/greedy/acc"] = _mean([v for group in values for v in group])
    lengths: dict[str, list[float]] = defaultdict(list)
    for row in sampled or greedy:
        lengths[row.trajectory.prompt.data_source].append(row.trajectory.num_sampled)
    for source, values in _by_prompt(sampled or greedy).items():
        metrics[f"val-core/{source}/acc/mean@1"] = _mean([v for group in values for v in group])
        if (size := max(map(len, values))) > 1:
            metrics[f"val-core/{source}/acc/best@{size}"] = _mean([max(group) for group in values])
        metrics[f"val-aux/{source}/response_length/mean"] = _mean(lengths[source])
    return metrics


class Validator:
    """Evaluates the actor on the validation set, with clean weights; without ``data.val_files`` it does nothing."""

    def __init__(
        self,
        config: RunConfig,
        layout: EngineLayout,
        timers: Timers,
        say: Callable[[str], None],
        held_out: PromptDataset | None,
        sync: Sync,
        engine: Sampler,
        scorer: Scorer,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        settings = config.validation
        self.settings = EvaluationSettings(
            layout, settings.n, settings.temperature, config.data.max_response_length, config.trainer.seed
        )
        self.num_shown = config.logging.num_text_samples
        self.timers, self.watch = timers, RewardWatch(say)
        self.dataset, self.sync, self.engine, self.scorer = held_out, sync, engine, scorer
        self.rendezvous = rendezvous
        self.results: Validations = {}

    def validate(self, observer: Observer, step: int) -> dict[str, float]:
        """Metrics of the actor's present weights, see ``evaluate``; collective."""
        if self.dataset is None:
            return {}
        with self.timers("validate"):
            self.sync.push(version=step, is_validation=True)
            metrics, rows = evaluate(self.engine, self.scorer, self.dataset.prompts, self.settings, self.rendezvous)
            self.sync.end_sampling()
            if self.scorer.judge is not None:
                scores = self.scorer.judge.complete([row.trajectory for row in rows], [row.score for row in rows])
                rows = [replace(row, score=score) for row, score in zip(rows, scores, strict=True)]
                metrics = evaluation_metrics(rows)
        greedy, sampled = ([row for row in rows if row.is_greedy is is_greedy] for is_greedy in (True, False))
        for part in (greedy, sampled):
            self.watch.tell([row.trajectory for row in part], [row.score for row in part])
        for row in greedy[: self.num_shown]:
            observer.text(step, f"validation/{row.trajectory.prompt.index}", readable(row.trajectory, row.score))
        self.results.setdefault("first", metrics)
        self.results["last"] = metrics
        return metrics

    def print_summary(self) -> None:
        """A table of the run's first validation beside its last one."""
        first, last = self.results.get("first", {}), self.results.get("last", {})
        rows = [(name, first[name], last[name]) for name in last if name in first and name.startswith("val-core/")]
        if rows and dist.get_rank() == 0:
            before_after_table("Held-out problems", rows)


def _by_prompt(rows: Sequence[Row]) -> dict[str, list[list[float]]]:
    """data source -> prompts -> the known scores of their samples; a prompt without any is left out."""
    groups: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if row.score.is_known:
            prompt = row.trajectory.prompt
            groups[prompt.data_source][prompt.index].append(row.score.value)
    return {source: list(prompts.values()) for source, prompts in groups.items()}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
