"""Every metric, declared once: its section, name or pattern, unit, meaning, reduction, and how it is shown.

The layout of every dashboard and of the report follows from ``SECTIONS`` and ``METRICS``.

A ``*`` in a name stands for any text that is not empty (a data source may itself contain a slash).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from mega_rl.observe.metrics import from_files, of_fleet
from mega_rl.observe.metrics.metric import DISTRIBUTION, MetricSpec, Section

PHASES = (
    *("generate", "sync", "reward", "old_logprobs", "reference_logprobs", "values", "critic"),
    *("update", "validate", "save", "step"),
)
# In which the trainer's models compute: what throughput/mfu goes by.
PHASES_OF_TRAINER = ("old_logprobs", "reference_logprobs", "values", "critic", "update")


# In reading order.
SECTIONS = (
    Section("learning", "learning", "whether it learns: rewards and losses, and where in the data it is"),
    Section("validation", "held-out problems", "what has been learnt, on problems that nothing is learnt from"),
    Section("health", "health of the policy", "whether the updates stay small and the policy stays diverse"),
    Section("agreement", "trainer and engine", "whether both compute the same probabilities for the same tokens"),
    Section("speed", "throughput and time", "tokens per second, and where the seconds of a step go"),
    Section("memory", "memory", "the largest rank's peaks, in the run and in each phase"),
    Section("sync", "weight sync", "what one weight sync moves, and how long it takes"),
    Section("rollouts", "rollout lengths", "how long prompts and responses are, and which groups are kept"),
    Section("aqn", "AQN", "noise on the weights that sample, and what it does to the policy"),
    Section("fleet", "fleet of engines", "what engines do that sample beside the trainer, and how many there are"),
)


# What each section shows, here in the order of the console line. Metrics keep their sign. A new metric is one entry, in
# the section where a reader would look for it.
_LEARNING = (
    MetricSpec("reward/mean", "reward", "over the samples of the step", console="reward {value:.3f}"),
    MetricSpec("actor/loss", "nats", "objective that is minimised, over the global batch", console="loss {value:+.3f}"),
    *from_files.LEARNING,
    MetricSpec("reward/std", "reward", "over all samples of the step; does not add up from parts of it"),
    MetricSpec("reward/max", "reward", "over the samples of the step", "max"),
    MetricSpec("reward/min", "reward", "over the samples of the step", "min"),
    MetricSpec("reward/groups_equal_fraction", "fraction", "prompts whose samples all have one reward"),
    MetricSpec("reward/num_unknown", "samples", "without a score, since one of their rewards failed", "sum"),
    MetricSpec("reward/num_unknown/*", "samples", "the same of one cause, counted per reward", "sum"),
    MetricSpec("reward/*", "reward", "one reward of the sum, before its weight"),
    MetricSpec("actor/pg_loss", "nats", "policy-gradient part of the loss"),
    MetricSpec("actor/lr", "1", "learning rate of the step", "last"),
    MetricSpec("critic/lr", "1", "learning rate of the step", "last"),
    MetricSpec("data/epoch", "epochs", "passes over the training data that were drawn so far, fractional", "last"),
    MetricSpec("rewards", "reward", "of every sample", DISTRIBUTION),
)
_HEALTH = (
    MetricSpec("actor/kl", "nats", "estimated KL from the reference, per token", console="kl {value:.4f}"),
    MetricSpec("actor/entropy", "nats", "of the clean policy, per response token", console="entropy {value:.2f}"),
    MetricSpec("actor/grad_norm", "1", "global, before clipping", console="grad {value:.2f}"),
    MetricSpec("actor/ppo_kl", "nats", "mean of logp_old - logp per token"),
    MetricSpec("actor/clip_fraction", "fraction", "tokens whose ratio is clipped"),
    MetricSpec("actor/dual_clip_fraction", "fraction", "tokens that the dual clip bounds"),
    MetricSpec("actor/importance_bounded_fraction", "fraction", "tokens whose weight was cut or masked"),
    MetricSpec("actor/ratio_mean", "1", "mean of exp(logp - logp_old) per token"),
    MetricSpec("actor/ratio_max", "1", "largest ratio of a token", "max"),
    MetricSpec("actor/importance_weight", "1", "mean capped weight against the engine's policy, per token"),
    MetricSpec("actor/own/*", "1", "mean per token of a figure that only a user's own loss has"),
    MetricSpec("actor/skipped_steps", "steps", "optimizer steps skipped for a gradient that is not finite", "sum"),
    MetricSpec("actor/skipped_steps_total", "steps", "the same in the run so far, resumed ones included", "last"),
    MetricSpec("router/load_max", "1", "tokens of the busiest expert, of the mean, over the layers"),
    MetricSpec("router/idle_fraction", "fraction", "experts of all layers that no token of the step went to"),
    MetricSpec("router/aux_loss", "1", "load-balancing loss, mean of the layers; 1: all experts are used alike"),
    MetricSpec("router/z_loss", "1", "mean square of the log-sum-exp of the router's logits, over the layers"),
    *from_files.HEALTH,
    MetricSpec("critic/loss", "reward^2", "half the squared error of the values, per token"),
    MetricSpec("critic/value_mean", "reward", "of the values before the update, per token"),
    MetricSpec("critic/return_mean", "reward", "what the values should have been, per token"),
    MetricSpec("critic/explained_variance", "1", "share of the returns' variance that the values foresaw", "last"),
    MetricSpec("critic/clip_fraction", "fraction", "tokens whose value the update moved as far as it may"),
    MetricSpec("critic/grad_norm", "1", "global, before clipping"),
    MetricSpec("critic/skipped_steps_total", "steps", "optimizer steps skipped for a gradient not finite", "last"),
    MetricSpec("advantages", "1", "of every sample that is learnt from", DISTRIBUTION),
)
_AGREEMENT = (
    MetricSpec("rollout/logprob_diff_mean", "nats", "mean |trainer - engine| per token", console="diff {value:.0e}"),
    MetricSpec("rollout/logprob_diff_max", "nats", "largest |trainer - engine| of a token", "max"),
    MetricSpec("rollout/kl", "nats", "KL of the sampling policy from the trainer's, estimated on its samples"),
    MetricSpec("rollout/entropy", "nats", "of the policy that sampled, per token"),
    MetricSpec(
        "rollout/staleness_mean",
        "steps",
        "between the weights that sampled a token and those that learn, mean",
    ),
    MetricSpec("rollout/staleness_max", "steps", "the same, of the oldest token", "max"),
    MetricSpec("rollout/ess", "fraction", "effective sample size, (sum w)^2 / (tokens x sum w^2), of uncapped weights"),
    MetricSpec("rollout/tokens_of_staleness/*", "fraction", "tokens whose weights are so many steps older"),
    MetricSpec("rollout/kl_of_staleness/*", "nats", "rollout/kl of these tokens alone"),
    MetricSpec("rollout/logprob_diff_of_staleness/*", "nats", "mean |trainer - engine| of these tokens alone"),
    MetricSpec("gates/engine_tokens", "tokens", "tokens that were compared with the weights that sampled them", "sum"),
    MetricSpec(
        "gates/validation_tokens", "tokens", "tokens of a validation that were compared with the trainer", "last"
    ),
    MetricSpec("gates/validation_diff", "nats", "mean |trainer - engine| of these tokens", "last"),
    MetricSpec("gate/reference", "nats", "first step: largest |policy - reference| of a token", "max"),
    MetricSpec("gate/ppo_kl", "nats", "first step: largest |pi_old - policy| of a token", "max"),
    MetricSpec("gate/ratio", "1", "first step: largest distance of the ratio from 1", "max"),
    MetricSpec("gate/engine", "nats", "first step: mean |trainer - engine| per token"),
)
_AQN = (
    MetricSpec(
        "aqn/sigma",
        "1",
        "standard deviation asked of the noise that the samples were drawn with, mean over their tokens",
        "last",
        console="sigma {value:.3g}",
    ),
    MetricSpec("aqn/sigma_min", "1", "the smallest of them, where tokens were drawn with several", "last"),
    MetricSpec("aqn/sigma_max", "1", "the largest of them, where tokens were drawn with several", "last"),
    MetricSpec("aqn/stage", "stage", "stage of the noise schedule that the samples are of, mean over tokens", "last"),
    MetricSpec("aqn/stage_min", "stage", "the first of them, where tokens are of several", "last"),
    MetricSpec("aqn/stage_max", "stage", "the last of them, where tokens are of several", "last"),
    MetricSpec("aqn/effective_sigma", "1", "standard deviation of the noise after rounding", "last"),
    MetricSpec("aqn/changed_fraction", "fraction", "channels that the rounded noise changed", "last"),
    MetricSpec("aqn/num_tensors", "tensors", "norm weights with noise", "last"),
    MetricSpec("aqn/noise_hash", "1", "number from a hash of the noise: equal on all ranks", "last"),
    MetricSpec("aqn/kl_clean_noisy", "nats", "KL between clean and noisy policy, per token"),
)
_VALIDATION = (
    MetricSpec("val-core/*/greedy/acc", "fraction", "greedy answers that are right", console="{0} greedy {value:.3f}"),
    MetricSpec("val-core/*/acc/mean@*", "fraction", "sampled answers right", console="{0} mean@{1} {value:.3f}"),
    MetricSpec("val-core/*/acc/best@*", "fraction", "prompts with a right sample", console="{0} best@{1} {value:.3f}"),
    MetricSpec("val-aux/*/response_length/mean", "tokens", "of the validation responses"),
    MetricSpec("val-aux/*/episode/*", "1", "of the validation's episodes, as episode/* is of the step's"),
)
_SPEED = (
    MetricSpec("throughput/tokens_per_s", "tokens/s", "trained tokens per second of step", "last", "{value:.0f} tok/s"),
    MetricSpec(
        "throughput/mfu", "fraction", "share of a device's peak in tflops_per_device", "last", "mfu {value:.0%}"
    ),
    MetricSpec("throughput/tflops_per_device", "TFLOP/s", "model operations while the trainer computes", "last"),
    MetricSpec("device/utilisation", "fraction", "of the time in which a kernel ran, mean of the devices", "last"),
    MetricSpec("time/step_s", "s", "wall time of the whole step", "max", "{value:.1f} s"),
    *(
        MetricSpec(f"time/{phase}_s", "s", f"wall time of the phase {phase}, slowest rank", "max")
        for phase in PHASES
        if phase != "step"
    ),
    MetricSpec("rollout/tokens_per_s", "tokens/s", "sampled tokens per second that the trainer waits for them", "sum"),
)
_MEMORY = (
    MetricSpec("memory/peak_host_gib", "GiB", "resident memory of the largest rank, in the run so far", "max"),
    MetricSpec("memory/peak_device_gib", "GiB", "device memory of the largest rank, in the run so far", "max"),
    MetricSpec("memory/peak_host_gib/*", "GiB", "the same within one phase of the step", "max"),
    MetricSpec("memory/peak_device_gib/*", "GiB", "the same within one phase of the step", "max"),
    MetricSpec("device/memory_used_gib", "GiB", "on the fullest device, all processes, seen once a second", "max"),
    MetricSpec("device/memory_reserved_gib", "GiB", "held by torch's cache as the step ends, largest rank", "max"),
    MetricSpec("device/memory_total_gib", "GiB", "that a device has", "max"),
    MetricSpec("rollout/routing_bytes", "bytes", "experts of the step's tokens, over all ranks", "last"),
)
_SYNC = (
    MetricSpec("bridge/seconds", "s", "time of one sync, slowest rank", "max"),
    MetricSpec("adapter/largest_b", "1", "largest magnitude in the factors B of the adapters that were sent", "max"),
    MetricSpec("adapter/unchanged_fraction", "fraction", "of merged weights, that rounding left as they were", "last"),
    MetricSpec("bridge/plan_s", "s", "time to compile the plan, once per run, slowest rank", "max"),
    MetricSpec("bridge/pack_s", "s", "pieces into send buffers, noise and casts included, slowest rank", "max"),
    MetricSpec("bridge/transfer_s", "s", "waiting for exchanges that nothing hid, slowest rank", "max"),
    MetricSpec("bridge/write_s", "s", "local copies and received pieces into place, slowest rank", "max"),
    MetricSpec("bridge/verify_s", "s", "time of the proof", "max"),
    MetricSpec("bridge/bytes_local", "bytes", "weights copied within a rank in one sync", "sum"),
    MetricSpec("bridge/bytes_sent", "bytes", "weights sent between ranks in one sync", "sum"),
    MetricSpec("bridge/bytes_received", "bytes", "weights received from other ranks in one sync", "sum"),
    MetricSpec("bridge/bytes_minimum", "bytes", "distinct weights that ranks needed and did not hold", "sum"),
    MetricSpec("bridge/largest_sender", "1", "bytes sent by the busiest rank over the mean", "max"),
    MetricSpec("bridge/gb_per_s", "GB/s", "10^9 bytes moved per second of sync, all ranks", "sum"),
    MetricSpec("bridge/verified_tensors", "tensors", "compared by the proof of one sync", "last"),
    MetricSpec(
        "rollout/weight_version",
        "version",
        "of the weights that the step trains; none are newer",
        "last",
    ),
)
_ROLLOUTS = (
    MetricSpec("response_length/mean", "tokens", "per sample"),
    MetricSpec("response_length/max", "tokens", "longest response", "max"),
    MetricSpec("response_length/min", "tokens", "shortest response", "min"),
    MetricSpec("response_length/clip_fraction", "fraction", "responses cut by the length limit"),
    MetricSpec("prompt_length/mean", "tokens", "per prompt"),
    MetricSpec("rollout/groups_generated", "groups", "prompts sampled in the step", "sum"),
    MetricSpec("rollout/groups_dropped", "groups", "of them left out: all samples have one reward", "sum"),
    MetricSpec("rollout/groups_kept", "groups", "that the step learns from, carried ones included", "sum"),
    MetricSpec("rollout/groups_carried_in", "groups", "kept by an earlier step and learnt from in this one", "sum"),
    MetricSpec("rollout/groups_carried_out", "groups", "kept above the batch size, for the next step", "sum"),
    MetricSpec("rollout/groups_waiting", "groups", "begun and not ended, with which the next step goes on", "sum"),
    MetricSpec("rollout/tails", "responses", "of them that have not ended", "sum"),
    MetricSpec("rollout/tail_tokens", "tokens", "that these have so far", "sum"),
    MetricSpec("rollout/groups_budget_exhausted", "1", "1 where a step learns from fewer groups than it wants", "max"),
    MetricSpec("episode/turns", "turns", "of the model, per episode"),
    MetricSpec("episode/reply_tokens", "tokens", "that environments wrote, per episode; they are not learnt"),
    MetricSpec("episode/replies_cut", "messages", "shortened to environment.max_reply_tokens, per episode"),
    MetricSpec("episode/tool_calls", "calls", "of tools, per episode"),
    MetricSpec("episode/tool_errors", "calls", "of tools that were answered with an error, per episode"),
    MetricSpec("episode/tool_s", "s", "in calls of tools, per episode"),
    MetricSpec("episode/tool_calls/*", "calls", "of this tool, per episode"),
    MetricSpec("episode/tool_errors/*", "fraction", "of the calls of this tool that were answered with an error"),
    MetricSpec("episode/tool_s/*", "s", "per call of this tool"),
    MetricSpec("episode/failed_fraction", "fraction", "episodes that a failure of their environment ended"),
    MetricSpec("episode/turns_limit_fraction", "fraction", "episodes that environment.max_turns ended"),
    MetricSpec("episode/tokens_limit_fraction", "fraction", "episodes that data.max_response_length ended"),
    MetricSpec("episode/*", "1", "what an environment counts by this name, per episode"),
    MetricSpec("response_lengths", "tokens", "of every sample", DISTRIBUTION),
)
_BY_SECTION: Mapping[str, tuple[MetricSpec, ...]] = {
    "learning": _LEARNING,
    "health": _HEALTH,
    "agreement": _AGREEMENT,
    "aqn": _AQN,
    "validation": _VALIDATION,
    "speed": _SPEED,
    "memory": _MEMORY,
    "sync": _SYNC,
    "rollouts": _ROLLOUTS,
    "fleet": of_fleet.METRICS,
}
METRICS = tuple(replace(spec, section=section) for section, specs in _BY_SECTION.items() for spec in specs)
# Metrics of one section that share a chart, by its title; every other metric has a chart of its own.
CHARTS: Mapping[str, tuple[str, ...]] = {
    "reward": ("reward/mean", "reward/max", "reward/min"),
    "loss": ("actor/loss", "actor/pg_loss"),
    "samples without a reward": ("reward/num_unknown", "reward/num_unknown/*"),
    "rewards by name": ("reward/*",),
    "skipped steps": ("actor/skipped_steps", "actor/skipped_steps_total"),
    "clipped tokens": ("actor/clip_fraction", "actor/dual_clip_fraction", "actor/importance_bounded_fraction"),
    "learning rate": ("actor/lr", "critic/lr"),
    "gradient norm": ("actor/grad_norm", "critic/grad_norm"),
    "gates of the first step": ("gate/reference", "gate/ppo_kl", "gate/ratio", "gate/engine"),
    "accuracy": ("val-core/*/greedy/acc", "val-core/*/acc/mean@*", "val-core/*/acc/best@*"),
    "memory of the device": ("device/memory_used_gib", "device/memory_reserved_gib", "device/memory_total_gib"),
    "peak memory": ("memory/peak_host_gib", "memory/peak_device_gib"),
    "host memory of the phases": ("memory/peak_host_gib/*",),
    "device memory of the phases": ("memory/peak_device_gib/*",),
    "response length": ("response_length/mean", "response_length/max", "response_length/min"),
    "sigma": ("aqn/sigma", "aqn/sigma_min", "aqn/sigma_max", "aqn/effective_sigma"),
    "stage": ("aqn/stage", "aqn/stage_min", "aqn/stage_max"),
    "tokens per second": ("rollout/tokens_per_s", "throughput/tokens_per_s"),
    "groups of the step": (
        "rollout/groups_generated",
        "rollout/groups_dropped",
        "rollout/groups_kept",
        "rollout/groups_carried_in",
        "rollout/groups_carried_out",
        "rollout/groups_waiting",
    ),
    "bytes of a sync": ("bridge/bytes_local", "bridge/bytes_sent", "bridge/bytes_received", "bridge/bytes_minimum"),
    "seconds of a sync": (
        "bridge/plan_s",
        "bridge/pack_s",
        "bridge/transfer_s",
        "bridge/write_s",
        "bridge/verify_s",
        "bridge/seconds",
    ),
    "why episodes end": (
        "episode/failed_fraction",
        "episode/turns_limit_fraction",
        "episode/tokens_limit_fraction",
    ),
    "calls by tool": ("episode/tool_calls/*",),
    **from_files.CHARTS,
    **of_fleet.CHARTS,
    "seconds of the phases": tuple(f"time/{phase}_s" for phase in PHASES if phase != "step"),
}

# What a policy's objective measures (`microbatch.Figures`) -> the metric that is its mean over the learnt tokens.
MEANS = {
    "loss": "actor/loss",
    "pg_loss": "actor/pg_loss",
    "kl": "actor/kl",
    "entropy": "actor/entropy",
    "ratio": "actor/ratio_mean",
    "clip_fraction": "actor/clip_fraction",
    "dual_clip_fraction": "actor/dual_clip_fraction",
    "ppo_kl": "actor/ppo_kl",
    "importance_weight": "actor/importance_weight",
    "importance_bounded": "actor/importance_bounded_fraction",
    "rollout_kl": "rollout/kl",
    "rollout_logprob_abs_diff": "rollout/logprob_diff_mean",
}
# And the metric that is its maximum.
MAXIMA = {"ratio": "actor/ratio_max", "rollout_logprob_abs_diff": "rollout/logprob_diff_max"}

_EXACT = {spec.name: spec for spec in METRICS if "*" not in spec.name}
_PATTERNS = [
    (re.compile("(.+)".join(re.escape(part) for part in spec.name.split("*"))), spec)
    for spec in METRICS
    if "*" in spec.name
]
CONSOLE_METRICS = tuple(spec for spec in METRICS if spec.console)
_CHART = {name: title for title, names in CHARTS.items() for name in names}
_POSITION = {spec.name: position for position, spec in enumerate(METRICS)}


@functools.lru_cache(maxsize=4096)
def match(name: str) -> tuple[MetricSpec, tuple[str, ...]]:
    """The declaration of a metric and the texts its stars stand for; an exact name comes before a pattern.

    Raises:
        KeyError: the metric is not declared.
    """
    if name in _EXACT:
        return _EXACT[name], ()
    for pattern, spec in _PATTERNS:
        found = pattern.fullmatch(name)
        if found:
            return spec, found.groups()
    raise KeyError(f"metric {name!r} is not declared: add it to METRICS in mega_rl/observe/metrics/declared.py")


def chart_title(name: str) -> str:
    """Title of the chart that shows a metric: one that it shares with others, or its own name."""
    return _CHART.get(match(name)[0].name, name)


def laid_out(names: Iterable[str]) -> list[tuple[Section, dict[str, list[str]]]]:
    """Every section that the metrics have, in reading order, with its charts: title -> metrics.

    Charts and metrics stand in the order of ``METRICS``; names that it does not declare are left out.
    """
    known = [name for name in dict.fromkeys(names) if is_declared(name)]
    charts: dict[str, dict[str, list[str]]] = {section.key: {} for section in SECTIONS}
    for name in sorted(known, key=lambda name: (_POSITION[match(name)[0].name], name)):
        charts[match(name)[0].section].setdefault(chart_title(name), []).append(name)
    return [(section, charts[section.key]) for section in SECTIONS if charts[section.key]]


def is_declared(name: str) -> bool:
    return name in _EXACT or any(pattern.fullmatch(name) for pattern, _ in _PATTERNS)


@dataclass(frozen=True)
class _Tally:
    """What one metric has come to so far; ``weight`` counts only for means."""

    value: float  # sum of weight x value for a mean
    weight: float


def _join(pick: Callable[[float, float], float], a: float, b: float) -> float:
    return math.nan if math.isnan(a) or math.isnan(b) else pick(a, b)


def combine(reduction: str, first: _Tally, second: _Tally) -> _Tally:
    """Two tallies of one metric as one; NaN in either is NaN in the result, except for ``last``."""
    weight = first.weight + second.weight
    match reduction:
        case "mean" | "sum":
            return _Tally(first.value + second.value, weight)
        case "max":
            return _Tally(_join(max, first.value, second.value), weight)
        case "min":
            return _Tally(_join(min, first.value, second.value), weight)
        case "last":
            return _Tally(second.value, weight)
    raise AssertionError(f"no such reduction: {reduction}")


class Metrics:
    """Accumulates the metrics of one step; plain data inside, so that ranks can send it to each other and merge.

    Example: ``m = Metrics(); m.add("actor/kl", 0.1, weight=30); m.add("actor/kl", 0.4, weight=10); m.result()``
    gives ``{"actor/kl": 0.175}``.
    """

    def __init__(self) -> None:
        self._tallies: dict[str, _Tally] = {}

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Adds one observation.

        Args:
            name: a declared metric.
            value: in the declared unit.
            weight: for means, what the value is averaged over (tokens, samples); other reductions ignore it.

        Raises:
            KeyError: the metric is not declared.
        """
        spec, _ = match(name)
        assert spec.reduction != DISTRIBUTION, f"{name} is a distribution, which is not added up"
        assert weight >= 0, f"{name}: negative weight {weight}"
        # A weight of 0 stands for no observations, whose mean may well be NaN: it must not spoil the others.
        share = 0.0 if weight == 0 else float(value) * weight
        self._put(name, spec, _Tally(share if spec.reduction == "mean" else float(value), float(weight)))

    def merge(self, others: Iterable[Metrics]) -> Metrics:
        """Takes in what other ranks or micro-batches accumulated, in their order; returns itself."""
        for other in list(others):
            for name, tally in other._tallies.items():
                self._put(name, match(name)[0], tally)
        return self

    def result(self) -> dict[str, float]:
        """Name -> reduced value, in the order of first appearance; a mean over a total weight of 0 is NaN."""
        return {name: _reduced(match(name)[0].reduction, tally) for name, tally in self._tallies.items()}

    def _put(self, name: str, spec: MetricSpec, tally: _Tally) -> None:
        before = self._tallies.get(name)
        self._tallies[name] = tally if before is None else combine(spec.reduction, before, tally)


def _reduced(reduction: str, tally: _Tally) -> float:
    if reduction != "mean":
        return tally.value
    return tally.value / tally.weight if tally.weight else math.nan
