"""What is done with a rollout batch besides learning from it: scoring on all ranks, and its metrics."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist

from mega_rl.config import RunConfig
from mega_rl.observe.metrics import Metrics
from mega_rl.parallel.collectives import gather_objects, together
from mega_rl.parallel.schedule import split_even
from mega_rl.rewards.scorer import Scorer
from mega_rl.rollout.noise import AqnNoise
from mega_rl.types import Completion, InputError, Sample, Score

MAX_UNKNOWN_STEPS = 5  # in a row
MAX_SAMPLES_TOLD = 20  # per line


def score_everywhere(scorer: Scorer, completions: list[Completion]) -> list[Score]:
    """Each rank scores its part; every rank gets all scores, in the order of the completions. Collective.

    Raises:
        InputError: on every rank, where reward workers of one can no longer load the rewards.
    """
    part = split_even(len(completions), dist.get_world_size())[dist.get_rank()]
    scores: list[Score] = []
    with together("scoring"):
        scores = scorer.score([completions[i] for i in part])
    return [score for scores_of_rank in gather_objects(scores) for score in scores_of_rank]


def unknown_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """How many samples have no score, and how many values are unknown by cause; nothing where all are known."""
    causes = Counter(unknown.cause for score in scores for unknown in score.unknown.values())
    if not causes:
        return {}
    counts = {f"reward/num_unknown/{cause}": float(count) for cause, count in causes.items()}
    return {"reward/num_unknown": float(sum(not score.is_known for score in scores))} | counts


class RewardWatch:
    """Tells of unknown rewards, and ends a run in which nothing is known for `MAX_UNKNOWN_STEPS` steps in a row."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._steps_in_a_row = 0

    def tell(self, completions: Sequence[Completion], scores: Sequence[Score]) -> None:
        """One line per reward and cause, with the samples and what happened to the first one."""
        found: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
        for completion, score in zip(completions, scores, strict=True):
            prompt = completion.prompt
            sample = f"{prompt.data_source} prompt {prompt.index} sample {completion.sample_index}"
            for name, unknown in score.unknown.items():
                found[name, unknown.cause].append((sample, unknown.detail))
        for (name, cause), samples in found.items():
            listed = ", ".join(sample for sample, _ in samples[:MAX_SAMPLES_TOLD])
            rest = len(samples) - MAX_SAMPLES_TOLD
            more = f" and {rest} more" if rest > 0 else ""
            self._say(
                f"warning: the reward {name} is unknown ({cause}) for {len(samples)} of {len(scores)} samples: "
                f"{listed}{more}; on the first of them it {samples[0][1]}"
            )

    def check(self, completions: Sequence[Completion], scores: Sequence[Score]) -> None:
        """The same for a training step, whose scores are those of all ranks.

        Raises:
            InputError: no score has been known for `MAX_UNKNOWN_STEPS` steps.
        """
        self.tell(completions, scores)
        if any(score.is_known for score in scores):
            self._steps_in_a_row = 0
            return
        self._steps_in_a_row += 1
        if self._steps_in_a_row >= MAX_UNKNOWN_STEPS:
            name, unknown = next(iter(scores[0].unknown.items()))
            raise InputError(
                f"no reward has been known for {MAX_UNKNOWN_STEPS} steps in a row: mend the reward {name}, which "
                f"{unknown.detail}"
            )
        self._say("warning: no reward of this step is known, so nothing is learnt from it")


def sample_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Rewards, lengths and the sampling policy's entropy of one batch (no collective: every rank has all samples)."""
    lengths = [len(sample.completion.token_ids) for sample in samples]
    logprobs = [logprob for sample in samples for logprob in sample.completion.logprobs]
    return _reward_metrics(samples) | {
        "response_length/mean": sum(lengths) / len(lengths),
        "response_length/max": float(max(lengths)),
        "response_length/min": float(min(lengths)),
        "response_length/clip_fraction": sum(s.completion.finish_reason == "length" for s in samples) / len(samples),
        "prompt_length/mean": sum(len(s.completion.prompt.token_ids) for s in samples) / len(samples),
        # -log p of the sampled tokens estimates the entropy of the policy that sampled them
        "rollout/entropy": -sum(logprobs) / max(1, len(logprobs)),
    }


def _reward_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Over the samples whose score is known, and how many are not."""
    metrics = unknown_metrics([sample.score for sample in samples])
    known = [sample for sample in samples if sample.score.is_known]
    if not known:
        return metrics
    rewards = [sample.score.value for sample in known]
    mean = sum(rewards) / len(rewards)
    groups: dict[int, set[float]] = defaultdict(set)
    parts: dict[str, list[float]] = defaultdict(list)
    for sample in known:
        groups[sample.completion.prompt.index].add(sample.score.value)
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
