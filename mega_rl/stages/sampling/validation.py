"""Validation: the actor is evaluated on held-out prompts, with one greedy answer and n sampled ones each."""

from __future__ import annotations

from dataclasses import replace

import torch.distributed as dist

from mega_rl.data.prompts import PromptDataset
from mega_rl.evaluation.evaluate import EvaluationSettings, ValidationSet, evaluation_metrics, summarized
from mega_rl.observe.observer import Observer
from mega_rl.observe.sinks.console import before_after_table
from mega_rl.rewards.scorer import Scorer
from mega_rl.stages.learn.validation_gate import ValidationGate
from mega_rl.stages.run.progress import Validations
from mega_rl.stages.run.sampling_job import SamplingJob
from mega_rl.stages.sampling.batch_builder import Batches
from mega_rl.stages.sampling.rollout_metrics import shown_sample
from mega_rl.stages.score.scoring import RewardWatch
from mega_rl.stages.weights.weight_sync import Sync


def validation_set(job: SamplingJob, held_out: PromptDataset | None) -> ValidationSet | None:
    """What the validations of a run ask; None: there is no validation set."""
    if held_out is None:
        return None
    settings, limit, seed = job.config.validation, job.config.data.max_response_length, job.config.trainer.seed
    asked = EvaluationSettings(job.engine_layout, settings.n, settings.temperature, limit, seed)
    return ValidationSet(held_out.prompts, asked)


class Validator:
    """Evaluates the actor on the validation set, with clean weights; without ``data.val_files`` it does nothing."""

    def __init__(
        self,
        job: SamplingJob,
        held_out: PromptDataset | None,
        sync: Sync,
        batches: Batches,
        scorer: Scorer,
        gate: ValidationGate | None = None,
    ) -> None:
        """``gate``: compares answers with the trainer; None: nothing does, or something else."""
        self.gate = gate
        self.layout, self.num_shown = job.engine_layout, job.config.logging.num_text_samples
        self.timers, self.watch = job.timers, RewardWatch(job.say)
        self.dataset, self.sync, self.batches, self.scorer = held_out, sync, batches, scorer
        self.trajectory_store = job.trajectory_store
        self.results: Validations = {}

    def validate(self, observer: Observer, step: int) -> dict[str, float]:
        """Metrics of the actor's present weights, see ``evaluation_metrics``; collective.

        Raises:
            GateFailure: as ``ValidationGate.check``.
        """
        if self.dataset is None:
            return {}
        with self.timers("validate"):
            mine = self.batches.validation(self.sync, step)
            rows = summarized(mine, self.layout, self.trajectory_store)
            if self.scorer.collective is not None:
                summaries = [row.summary for row in rows]
                scores = self.scorer.collective.complete(summaries, [row.score for row in rows], self.trajectory_store)
                rows = [replace(row, score=score) for row, score in zip(rows, scores, strict=True)]
        metrics = evaluation_metrics(rows)
        greedy, sampled = ([row for row in rows if row.is_greedy is is_greedy] for is_greedy in (True, False))
        for part in (greedy, sampled):
            self.watch.tell([row.summary for row in part], [row.score for row in part])
        shown = greedy[: self.num_shown]
        gated = {} if self.gate is None else self.gate.check(rows, self.trajectory_store, step)
        texts = self.trajectory_store.to_first([row.summary for row in shown])
        self.trajectory_store.drop(row.summary for row in rows)
        pairs, picture_set = zip(texts, shown, strict=False), self.dataset.picture_set
        samples = [shown_sample(trajectory, row.score, picture_set) for trajectory, row in pairs]
        observer.samples(step, "validation", samples)
        self.results.setdefault("first", metrics)
        self.results["last"] = metrics
        return metrics | gated

    def print_summary(self) -> None:
        """A table of the run's first validation beside its last one."""
        first, last = self.results.get("first", {}), self.results.get("last", {})
        rows = [(name, first[name], last[name]) for name in last if name in first and name.startswith("val-core/")]
        if rows and dist.get_rank() == 0:
            before_after_table("Held-out problems", rows)
