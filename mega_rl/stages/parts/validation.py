"""Validation on held-out prompts with clean weights: one greedy answer, and n sampled ones, per prompt."""

from __future__ import annotations

from collections import defaultdict

from mega_rl.data.prompts import PromptDataset
from mega_rl.observe.console import before_after_table
from mega_rl.observe.observer import Observer
from mega_rl.rewards.scorer import Scorer
from mega_rl.rollout.engine import Sampler
from mega_rl.rollout.replicas import generate_everywhere
from mega_rl.rollout.requests import make_requests
from mega_rl.stages.parts.progress import Validations
from mega_rl.stages.parts.rollout_metrics import readable
from mega_rl.stages.parts.scoring import RewardWatch, score_everywhere
from mega_rl.stages.parts.session import Session
from mega_rl.stages.parts.weight_sync import Sync
from mega_rl.types import Completion, Score

STREAM = 1 << 32  # keeps validation seeds apart from training seeds of any step


class Validator:
    """Scores the validation set; without ``data.val_files`` it does nothing.

    Metrics per data source: ``greedy/acc`` is the mean score of greedy answers, ``acc/mean@1`` the expected score of
    one sampled answer (of the greedy one where ``validation.n`` is 0), ``acc/best@n`` the mean over prompts of
    the best of n. Scores are what the rewards add up to, so they are accuracies where right answers score 1 and others
    0.
    """

    def __init__(
        self, session: Session, held_out: PromptDataset | None, sync: Sync, engine: Sampler, scorer: Scorer
    ) -> None:
        self.session, self.dataset, self.sync, self.engine, self.scorer = session, held_out, sync, engine, scorer
        self.results: Validations = {}

    def validate(self, observer: Observer, step: int) -> dict[str, float]:
        """Metrics of the actor's present weights; collective."""
        if self.dataset is None:
            return {}
        settings = self.session.config.validation
        with self.session.timers("validate"):
            self.sync.push(version=step, is_validation=True)
            greedy, greedy_scores = self._sample(n=1, temperature=0.0)
            sampled, sampled_scores = self._sample(n=settings.n, temperature=settings.temperature)
            self.sync.end_sampling()
        metrics = self._metrics(greedy, greedy_scores, sampled, sampled_scores)
        for completion, score in list(zip(greedy, greedy_scores, strict=True))[: self._num_shown]:
            observer.text(step, f"validation/{completion.prompt.index}", readable(completion, score))
        self.results.setdefault("first", metrics)
        self.results["last"] = metrics
        return metrics

    @property
    def _num_shown(self) -> int:
        return self.session.config.logging.num_text_samples

    def _sample(self, n: int, temperature: float) -> tuple[list[Completion], list[Score]]:
        config = self.session.config
        assert self.dataset is not None
        requests = make_requests(
            self.dataset.prompts,
            n=n,
            step=STREAM,  # the same seeds at every validation, so that curves differ by the weights alone
            seed=config.trainer.seed,
            max_tokens=config.data.max_response_length,
            temperature=temperature,
        )
        completions = generate_everywhere(self.engine, self.session.engine_layout, requests)
        scores = score_everywhere(self.scorer, completions)
        RewardWatch(self.session.say).tell(completions, scores)
        return completions, scores

    @staticmethod
    def _metrics(
        greedy: list[Completion], greedy_scores: list[Score], sampled: list[Completion], sampled_scores: list[Score]
    ) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for source, values in _by_prompt(greedy, greedy_scores).items():
            metrics[f"val-core/{source}/greedy/acc"] = _mean([v for group in values for v in group])
        lengths: dict[str, list[float]] = defaultdict(list)
        for completion in sampled or greedy:
            lengths[completion.prompt.data_source].append(len(completion.token_ids))
        for source, values in _by_prompt(sampled or greedy, sampled_scores or greedy_scores).items():
            metrics[f"val-core/{source}/acc/mean@1"] = _mean([v for group in values for v in group])
            if (size := max(map(len, values))) > 1:
                metrics[f"val-core/{source}/acc/best@{size}"] = _mean([max(group) for group in values])
            metrics[f"val-aux/{source}/response_length/mean"] = _mean(lengths[source])
        return metrics

    def print_summary(self) -> None:
        """A table of the run's first validation beside its last one."""
        first, last = self.results.get("first", {}), self.results.get("last", {})
        rows = [(name, first[name], last[name]) for name in last if name in first and name.startswith("val-core/")]
        if rows and self.session.is_main:
            before_after_table("Held-out problems", rows)


def _by_prompt(completions: list[Completion], scores: list[Score]) -> dict[str, list[list[float]]]:
    """data source -> prompts -> the known scores of their samples; a prompt without any is left out."""
    groups: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for completion, score in zip(completions, scores, strict=True):
        if score.is_known:
            groups[completion.prompt.data_source][completion.prompt.index].append(score.value)
    return {source: list(prompts.values()) for source, prompts in groups.items()}


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
