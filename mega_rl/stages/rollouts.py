"""What is done with a rollout batch besides learning from it: scoring on all ranks, and its metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from mega_rl.config import RunConfig
from mega_rl.observe.metrics import Metrics
from mega_rl.parallel.collectives import gather_objects, together
from mega_rl.parallel.schedule import split_even
from mega_rl.rewards.scorer import Scorer
from mega_rl.rollout.noise import AqnNoise
from mega_rl.types import Completion, Sample, Score


def score_everywhere(scorer: Scorer, completions: list[Completion]) -> list[Score]:
    """Each rank scores its part; every rank gets all scores, in the order of the completions. Collective.

    Raises:
        InputError: on every rank, where a reward raised on one.
    """
    part = split_even(len(completions), dist.get_world_size())[dist.get_rank()]
    scores: list[Score] = []
    with together("scoring"):
        scores = scorer.score([completions[i] for i in part])
    return [score for scores_of_rank in gather_objects(scores) for score in scores_of_rank]


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Rewards, lengths and the sampling policy's entropy of one batch (no collective: every rank has all samples)."""
    rewards = [sample.score.value for sample in samples]
    lengths = [len(sample.completion.token_ids) for sample in samples]
    mean = sum(rewards) / len(rewards)
    groups: dict[int, set[float]] = defaultdict(set)
    parts: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        groups[sample.completion.prompt.index].add(sample.score.value)
        for name, value in sample.score.parts.items():
            parts[name].append(value)
    logprobs = [logprob for sample in samples for logprob in sample.completion.logprobs]
    metrics = {
        "reward/mean": mean,
        "reward/std": (sum((r - mean) ** 2 for r in rewards) / max(1, len(rewards) - 1)) ** 0.5,
        "reward/max": max(rewards),
        "reward/min": min(rewards),
        "reward/groups_equal_fraction": sum(len(values) == 1 for values in groups.values()) / len(groups),
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/min": float(min(lengths)),
        "response_length/clip_fraction": sum(s.completion.finish_reason == "length" for s in samples) / len(samples),
        "prompt_length/mean": sum(len(s.completion.prompt.token_ids) for s in samples) / len(samples),
        # -log p of the sampled tokens estimates the entropy of the policy that sampled them
        "rollout/entropy": -sum(logprobs) / max(1, len(logprobs)),
    }
    if len(parts) > 1:
        metrics |= {f"reward/{name}": sum(values) / len(values) for name, values in parts.items()}
    return metrics


def noise_metrics(config: RunConfig, noise: AqnNoise, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """Where the noise schedule stands, and how far the noise moved the sampling policy."""
    if not config.aqn.enabled:
        return {}
    figures = {"aqn/sigma": noise.sigma(step), "aqn/stage": float(noise.stage(step))}
    if "rollout/kl" in metrics:
        # E over the noisy policy of log(noisy / clean): the KL from the noisy to the clean policy
        figures["aqn/kl_clean_noisy"] = metrics["rollout/kl"]
    return figures


def time_metrics(seconds: Mapping[str, float], samples: Sequence[Sample]) -> dict[str, float]:
    """Phase times of the slowest rank, and the rates that follow from them. Collective."""
    own = Metrics()
    for name, value in seconds.items():
        own.add(name, value)
    slowest = Metrics().merge(gather_objects(own)).result()
    num_sampled = sum(len(sample.completion.token_ids) for sample in samples)
    num_tokens = num_sampled + sum(len(sample.completion.prompt.token_ids) for sample in samples)
    return slowest | {
        "throughput/tokens_per_s": num_tokens / max(slowest["time/step_s"], 1e-9),
        "rollout/tokens_per_s": num_sampled / max(slowest["time/generate_s"], 1e-9),
    }
