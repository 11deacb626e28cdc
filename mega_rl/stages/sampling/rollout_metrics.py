"""What is done with a rollout batch besides learning from it: its metrics, and showing it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import Any

from mega_rl.bridge.outgoing.noise import AqnNoise
from mega_rl.data.packing import unpack
from mega_rl.data.pictures.picture_set import PictureSet
from mega_rl.data.pictures.thumbnails import thumbnails_of
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.observe.observer import Observer
from mega_rl.observe.sinks.sinks import ShownSample
from mega_rl.parallel.collectives import is_first, placed
from mega_rl.rollout.collect.collect import GroupSummary, PromptGroup
from mega_rl.rollout.collect.records import to_rows, write_step
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from mega_rl.rollout.episodes.episode_metrics import episode_metrics
from mega_rl.stages.learn.learning import pack_samples
from mega_rl.stages.run.batch_share import BatchShare
from mega_rl.stages.run.job import Job
from mega_rl.stages.run.speed import RankReport, slowest
from mega_rl.stages.sampling.batch_builder import Batch
from mega_rl.stages.score.scoring import unknown_metrics
from mega_rl.stages.weights.weight_sync import Pushed
from mega_rl.types import Sample, Score, TokenSource, Trajectory

ROLLOUTS = "rollouts"  # under the output directory


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Rewards, lengths and the sampling policy's entropy of one batch (no collective: every rank has all summaries)."""
    if not samples:
        return {}
    summaries = [sample.summary for sample in samples]
    lengths = [summary.num_sampled for summary in summaries]
    routed = [summary.num_routing_bytes for summary in summaries if summary.routing is not None]
    return (
        _reward_metrics(samples)
        | episode_metrics(summaries)
        | ({"rollout/routing_bytes": float(sum(routed))} if routed else {})
        | {
            "response_length/mean": sum(lengths) / len(lengths),
            "response_length/max": float(max(lengths)),
            "response_length/min": float(min(lengths)),
            "response_length/clip_fraction": sum(one.finish_reason == "length" for one in summaries) / len(samples),
            "prompt_length/mean": sum(one.num_prompt for one in summaries) / len(samples),
            # -log p of the sampled tokens estimates the entropy of the policy that sampled them
            "rollout/entropy": -sum(one.logprob_sum for one in summaries) / max(1, sum(lengths)),
        }
    )


def _reward_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Metrics of the samples whose score is known, and the number of samples whose score is not."""
    metrics = unknown_metrics([sample.score for sample in samples])
    known = [sample for sample in samples if sample.score.is_known]
    if not known:
        return metrics
    rewards = [sample.score.value for sample in known]
    mean = sum(rewards) / len(rewards)
    groups: dict[int, set[float]] = defaultdict(set)
    parts: dict[str, list[float]] = defaultdict(list)
    # the samples of a group stand side by side, from the first one on
    numbers = accumulate(int(sample.summary.sample_index == 0) for sample in samples)
    for sample, number in zip(samples, numbers, strict=True):
        if not sample.score.is_known:
            continue
        groups[number].add(sample.score.value)
        for name, value in sample.score.parts.items():
            parts[name].append(value)
    metrics |= {
        "reward/mean": mean,
        "reward/std": (sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1)) ** 0.5,
        "reward/max": max(rewards),
        "reward/min": min(rewards),
        "reward/groups_equal_fraction": sum(len(values) == 1 for values in groups.values()) / len(groups),
    }
    if len(parts) > 1:
        metrics |= {f"reward/{name}": sum(values) / len(values) for name, values in parts.items()}
    return metrics


def shown_sample(trajectory: Trajectory, score: Score, picture_set: PictureSet | None) -> ShownSample:
    """What a dashboard shows of one answer; of an episode, who said what."""
    pictures: Callable[[], tuple[bytes, ...]] = tuple
    if picture_set is not None:
        pictures = partial(thumbnails_of, trajectory.prompt, picture_set.pictures)
    prompt, text = trajectory.prompt, trajectory.text
    if trajectory.episode is not None:
        text = "\n".join(f"[{turn.role}] {turn.text}" for turn in trajectory.turns[1:])
    end = trajectory.finish_reason
    return ShownSample(prompt.text, text, prompt.ground_truth, score.value, trajectory.num_sampled, end, pictures)


def show(
    job: Job, observer: Observer, actor: MegatronEngine, step: int, batch: Batch, samples: Sequence[Sample]
) -> None:
    """Samples of the step on the dashboards and, with ``logging.dump_rollouts``, all of them in a file.

    Collective. A row of the file is what ``records.to_rows`` says, with ``step``, ``sampled_for`` (the same, where the
    weights need not be that step's), ``outcome`` (learnt, carried, dropped), ``advantage`` and ``logprob_diff``, the
    mean |trainer - engine| over the response's tokens in nats before the update; both are null if the step does not
    learn from the sample. With ``algorithm.credit`` turn there are ``turn_advantages``, and ``advantage`` is the mean.
    """
    logging, share = job.config.logging, job.share
    shown, is_dumped = samples[: logging.num_text_samples], logging.dump_rollouts != 0
    groups = batch.generated if is_dumped else []
    texts, whole = _on_first(batch.trajectory_store, shown, groups)
    pairs = zip(texts, shown, strict=False)
    observer.samples(step, "rollout", [shown_sample(text, sample.score, share.picture_set) for text, sample in pairs])
    observer.distribution(step, "rewards", [sample.score.value for sample in samples])
    observer.distribution(step, "advantages", [sample.advantage for sample in samples])
    observer.distribution(step, "response_lengths", [float(sample.summary.num_sampled) for sample in samples])
    if not is_dumped:
        return
    differences = logprob_differences(share, actor, samples, batch.trajectory_store) if samples else []
    if share.rank == 0:
        outcomes = [outcome for outcome, of_outcome in batch.by_outcome.items() for _ in of_outcome]
        learnt = iter([_advantages(s) | {"logprob_diff": d} for s, d in zip(samples, differences, strict=True)])
        others = {"advantage": None, "logprob_diff": None}
        head = {"step": step} | ({} if batch.sampled_for is None else {"sampled_for": batch.sampled_for})
        rows = [
            {**head, "outcome": outcome, **row, **(next(learnt) if outcome == "learnt" else others)}
            for outcome, group in zip(outcomes, whole, strict=True)
            for row in to_rows(group)
        ]
        write_step(job.output_dir / ROLLOUTS, step, rows, logging.dump_rollouts)


def _on_first(
    source: TrajectoryStore, shown: Sequence[Sample], groups: Sequence[GroupSummary]
) -> tuple[list[Trajectory], list[PromptGroup]]:
    """Whole samples and whole groups, on rank 0; nothing on the others. Collective: all of them in one exchange."""
    wanted = [sample.summary for sample in shown]
    found = iter(source.to_first(wanted + [summary for group in groups for summary in group.summaries]))
    if not is_first():
        return [], []
    texts = list(islice(found, len(wanted)))
    return texts, [PromptGroup(tuple(islice(found, len(group.summaries))), group.scores) for group in groups]


def _advantages(sample: Sample) -> dict[str, Any]:
    of_turns = {"turn_advantages": list(sample.turn_advantages)} if sample.turn_advantages else {}
    return {"advantage": sample.advantage, **of_turns}


def logprob_differences(
    share: BatchShare, actor: MegatronEngine, samples: Sequence[Sample], source: TokenSource
) -> list[float]:
    """Mean |trainer - engine| over each response's tokens, nats, under the present weights. Collective."""
    microbatches = pack_samples(share, samples, source)
    own: dict[int, float] = {}
    for microbatch, stats in zip(microbatches, actor.token_stats(microbatches), strict=True):
        assert microbatch.rollout_logprobs is not None, "samples have the engine's log-probabilities"
        difference_T = (stats.logprobs - microbatch.rollout_logprobs).abs() * microbatch.loss_mask
        for index, values in zip(microbatch.sequence_indices, unpack(difference_T, microbatch), strict=True):
            own[index] = float(values.sum()) / max(1.0, float(samples[index].summary.num_sampled))
    return placed(own if share.is_counted and share.is_last_stage else {}, len(samples))


def schedule_metrics(
    noise: AqnNoise, pushed: Pushed, samples: Sequence[Sample], metrics: Mapping[str, float]
) -> dict[str, float]:
    """Where in the noise schedule the samples were drawn, and how far the noise moved the sampling policy.

    Args:
        pushed: speaks where there are no samples.
    """
    if not noise.config.enabled:
        return {}
    tokens: Counter[int] = Counter()  # by the version of the weights that sampled them
    for sample in samples:
        for version, count in sample.summary.versions:
            tokens[version] += count
    tokens = tokens if tokens.total() else Counter({pushed.version: 1})
    of_version: dict[str, dict[int, float]] = {
        "aqn/sigma": {version: noise.sigma(version) for version in tokens},
        "aqn/stage": {version: float(noise.stage(version)) for version in tokens},
    }
    figures: dict[str, float] = {}
    for name, values in of_version.items():
        least, most = min(values.values()), max(values.values())
        if least == most:
            figures[name] = most
            continue
        mean = sum(values[version] * count for version, count in tokens.items()) / tokens.total()
        figures |= {name: mean, f"{name}_min": least, f"{name}_max": most}
    if "rollout/kl" in metrics:
        # E over the noisy policy of log(noisy / clean): the KL from the noisy to the clean policy
        figures["aqn/kl_clean_noisy"] = metrics["rollout/kl"]
    return figures


def time_metrics(reports: Sequence[RankReport], samples: Sequence[Sample]) -> dict[str, float]:
    """Phase times of the slowest rank, and the rates that follow from them; without reports nothing."""
    if not reports:
        return {}
    seconds = slowest([report.phases for report in reports])
    num_sampled = sum(sample.summary.num_sampled for sample in samples)
    num_tokens = num_sampled + sum(sample.summary.num_prompt for sample in samples)
    return seconds | {
        "throughput/tokens_per_s": num_tokens / max(seconds["time/step_s"], 1e-9),
        "rollout/tokens_per_s": num_sampled / max(seconds["time/generate_s"], 1e-9),
    }
