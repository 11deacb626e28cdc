"""What must hold of a step before the weights change, and whether it does.

In the first step of a run policy, reference and engine are the same weights, computed three times. In the first step of
a resumed run the policy is still computed twice. In every step the engine is the trainer's policy up to rounding and
noise, as far as the steps before showed them, and tokens of older weights are as far from it as the steps before showed
of tokens as old. The checks have the names of ``trainer.gates``.
Letters: T packed tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mega_rl import platform
from mega_rl.config import RunConfig
from mega_rl.errors import GateFailure
from mega_rl.megatron.engine import LossFunction, MegatronEngine
from mega_rl.microbatch import Figures, Microbatch, TokenStats
from mega_rl.parallel.collectives import broadcast_list, is_first, numbers_to_first, told_numbers
from mega_rl.stages.learn.engine_distance import (
    Distance,
    Distances,
    Group,
    Histories,
    TooFar,
    added,
    distances,
    of_numbers,
    staleness_figures,
    staleness_T,
    to_numbers,
    too_far,
)
from mega_rl.stages.learn.logprob_difference import LogprobDifference, difference, merged, over_ranks
from mega_rl.types import Sample

ENGINE_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # nats, mean over tokens; the coarser of the two types counts
# Nats, largest of a token, where the same forward pass may give other bits: sums of the hardware in varying order.
REPEATED_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
MAX_NAMED = 4  # engines in one report
ENGINE_TOKENS = "gates/engine_tokens"  # metric: tokens compared with the weights that sampled them

# What each gate measures, and the names of the two values that it compares, if it compares two.
GATES = {
    "reference": ("largest |policy - reference| of a token", "policy", "reference"),
    "ppo_kl": ("largest |pi_old - policy| of a token", "recomputed", "update"),
    "ratio": ("largest distance of the ratio from 1", "", ""),
    "engine": ("mean |trainer - engine| per token", "trainer", "engine"),
}
RESUMED = ("ppo_kl", "ratio", "engine")  # of the first step of a resumed run
RUNNING = ("engine",)  # of all other steps


class GatedStep(NamedTuple):
    """A step whose first minibatch is checked."""

    names: Collection[str]  # of the gates
    words: str  # for the step
    version: int  # of the weights that the trainer holds: tokens of older ones are further from them
    sigma: float  # standard deviation of the noise on the engine's weights


class Gates:
    """The checks of one step's first minibatch.

    ``recompute`` comes before the update, ``watched`` wraps its loss, ``check`` stops the run or returns metrics.

    Args:
        config: says what is compared, how closely, and where to look for the cause of a difference.
        is_counted: whether this rank's differences count; they do not if another rank counts for the same sequences.
        say: tells the user.
        step: which gates it has.
        history: of the engines; this step is added to it.
        tell_once: tells the user, once in the run, that the engine gate compared no token, and why.
    """

    def __init__(
        self,
        config: RunConfig,
        is_counted: bool,
        say: Callable[[str], None],
        step: GatedStep,
        history: Histories,
        tell_once: Callable[[str], None],
    ) -> None:
        self.config, self.settings = config, config.trainer.gates
        self.is_counted, self.say, self.history, self.tell_once = is_counted, say, history, tell_once
        self.names, self.step, self.version, self.sigma = step
        self.tolerances = tolerances(config)
        reasons = reasons_to_leave_out(config, self.sigma)
        self.left_out = {name: why for name, why in reasons.items() if name in self.names}
        if (past := history.fresh.allows(self.sigma)) is not None:
            self.tolerances["engine"] = max(past, self.tolerances["engine"])
            self.left_out.pop("engine", None)
        self.logprobs: dict[tuple[int, ...], Tensor] = {}  # sequence_indices of a micro-batch -> recomputed [T]
        self.updated: list[tuple[Microbatch, Tensor]] = []  # micro-batches and log-probabilities [T] of the update
        self.found: dict[str, list[LogprobDifference | None]] = {"reference": [], "ppo_kl": [], "engine": []}
        self.later: list[tuple[Sequence[Microbatch], Sequence[Sample]]] = []  # minibatches after the first

    def recompute(self, actor: MegatronEngine, minibatch: list[Microbatch]) -> list[Microbatch]:
        """Compute the policy's log-probabilities by themselves, if a gate compares them; else return what is given.

        They are used as pi_old for micro-batches that have none yet.
        """
        if "ppo_kl" not in self.names:
            return minibatch
        recomputed = []
        for microbatch, stats in zip(minibatch, actor.token_stats(minibatch), strict=True):
            self.logprobs[microbatch.sequence_indices] = stats.logprobs
            if "reference" in self.names and microbatch.reference_logprobs is not None:
                self.found["reference"].append(difference(stats.logprobs, microbatch.reference_logprobs, microbatch))
            is_open = microbatch.old_logprobs is None
            recomputed.append(microbatch.replace(old_logprobs=stats.logprobs) if is_open else microbatch)
        return recomputed

    def watched(self, loss_function: LossFunction) -> LossFunction:
        """The same loss; what the update's own forward pass finds is kept, to be compared."""

        def keep(stats: TokenStats, microbatch: Microbatch) -> tuple[Tensor, Figures]:
            self.updated.append((microbatch, stats.logprobs.detach()))
            return loss_function(stats, microbatch)

        return keep

    def expect(self, microbatches: Sequence[Microbatch], samples: Sequence[Sample]) -> None:
        """A later minibatch of the step, which has pi_old already: its engines are checked before the first update."""
        aqn = self.config.aqn
        is_of_engine = aqn.enabled and aqn.old_logprobs in ("rollout", "recompute_noisy")
        if not is_of_engine:
            self.later.append((microbatches, samples))

    def _compare(self, samples: Sequence[Sample]) -> dict[Group, Distance]:
        """The update's log-probabilities with the recomputed ones and the engine's; returns the latter by engine."""
        parts: list[Distances] = []
        for microbatch, updated_T in self.updated:
            if (recomputed_T := self.logprobs.get(microbatch.sequence_indices)) is not None:
                self.found["ppo_kl"].append(difference(recomputed_T, updated_T, microbatch))
            if microbatch.rollout_logprobs is not None:
                ages_T = self._ages_T(microbatch, samples)
                self.found["engine"].append(difference(updated_T, microbatch.rollout_logprobs, microbatch, ages_T == 0))
                parts.append(distances(updated_T, microbatch.rollout_logprobs, microbatch, samples, ages_T))
        for microbatches, of_later in self.later if self.updated else []:  # on the last stage of a pipeline only
            for microbatch in microbatches:
                trainer_T, engine_T = microbatch.old_logprobs, microbatch.rollout_logprobs
                if trainer_T is not None and engine_T is not None:
                    ages_T = self._ages_T(microbatch, of_later)
                    parts.append(distances(trainer_T, engine_T, microbatch, of_later, ages_T))
        return added(parts)

    def _ages_T(self, microbatch: Microbatch, samples: Sequence[Sample]) -> Tensor:
        return staleness_T(microbatch, samples, self.version, self.config.rollout.kv_on_update == "keep")

    def check(
        self,
        ratio_mean: float,
        ratio_max: float,
        samples: Sequence[Sample],
        differing: Callable[[], str | None],
    ) -> dict[str, float]:
        """Metrics of the engines' tokens, and in a run's first step ``gate/NAME`` of what was measured. Collective.

        Args:
            ratio_mean, ratio_max: of the objective, over the global batch.
            samples: of the minibatch, in the order of its sequences.
            differing: finds a tensor in which policy and reference differ.

        Raises:
            GateFailure: on every rank, if a gate that is not disabled does not hold.
        """
        by_age, far = self._engines(self._compare(samples))
        limits = self._limits(by_age)
        own = {name: merged(parts) if self.is_counted else None for name, parts in self.found.items()}
        worst = over_ranks(own)
        values = {name: found.largest for name, found in worst.items() if found is not None}
        if worst["engine"] is not None:
            values["engine"] = distance = worst["engine"].total / worst["engine"].num_tokens
        values["ratio"] = float(
            (torch.tensor([ratio_mean, ratio_max], dtype=torch.float64) - 1).abs().max()
        )  # NaN stays NaN
        values = {name: value for name, value in values.items() if name in self.names and name not in self.left_out}
        failed = [
            name
            for name, value in values.items()
            if not value <= self.tolerances[name] and name not in self.settings.disabled
        ]
        if failed or far:
            self._fail(failed, values, worst, samples, differing() if "reference" in failed else None, far)
        if worst["engine"] is not None:
            self.history.fresh.add(distance, self.sigma)
        metrics = self._told(by_age, limits)
        if self.names == RUNNING:
            return metrics
        self._say(values)
        return metrics if self.names == RESUMED else metrics | {f"gate/{name}": v for name, v in values.items()}

    def _engines(self, own: Distances) -> tuple[dict[Group, Distance], list[TooFar]]:
        """What all ranks found, by staleness, and what is too far; only rank 0 sees every engine. Collective."""
        rows = numbers_to_first(to_numbers(own if self.is_counted else {}))
        found, far = added(map(of_numbers, rows)), list[TooFar]()
        if is_first() and "engine" not in self.settings.disabled:
            far = too_far(found, self._limits(found))
        by_age = added([found], lambda group: Group(None, group.staleness))
        return of_numbers(told_numbers(to_numbers(by_age))), broadcast_list(far)

    def _limits(self, found: Distances) -> dict[int, float]:
        """By staleness of what was found: how far such tokens may be, nats per token; none of what cannot be."""
        fresh = self.tolerances["engine"]
        stale = {group.staleness for group in found if group.staleness}
        limits = {age: max(fresh, self.history.allows(self.version, age)) for age in stale}
        return limits | ({} if "engine" in self.left_out else {0: fresh})

    def _told(self, found: Distances, limits: Mapping[int, float]) -> dict[str, float]:
        """Add the tokens of older weights to the history, and say if no others were compared; returns metrics."""
        for group, distance in found.items():
            if group.staleness:
                self.history.add(self.version, group.staleness, distance.mean)
        num_compared = sum(distance.num_tokens for group, distance in found.items() if not group.staleness)
        num_compared = num_compared if 0 in limits else 0
        if num_compared == 0:
            ages = sorted(group.staleness for group in found if group.staleness)
            why = self.left_out.get("engine") or "no sample has the engine's log-probabilities"
            if ages:
                why = (
                    f"the weights of all its tokens are {ages[0]} to {ages[-1]} steps older; they are measured by what "
                    "tokens as old showed in the steps before"
                )
            self.tell_once(f"the engine gate compares no token of step {self.version + 1} exactly: {why}")
        return {ENGINE_TOKENS: float(num_compared)} | staleness_figures(found)

    def _fail(
        self,
        failed: Sequence[str],
        values: Mapping[str, float],
        worst: Mapping[str, LogprobDifference | None],
        samples: Sequence[Sample],
        tensor: str | None,
        far: Sequence[TooFar],
    ) -> None:
        hints = hints_of(self.config, tensor)
        lines = [
            line
            for name in failed
            for line in report(name, values[name], self._allowance(name), worst.get(name), samples, hints[name])
        ]
        if far:
            lines += report_engines(far, is_alone="engine" not in failed, hint=hints["engine"])
        raise GateFailure("\n".join([f"{self.step} is not what it must be", *lines]))

    def _allowance(self, name: str) -> str:
        words = f"trainer.gates.{name} allows {self.tolerances[name]:.3g}"
        if name == "engine" and self.tolerances[name] > tolerances(self.config)[name]:
            words += f", {self.settings.engine_factor:g} times what the last steps showed (trainer.gates.engine_factor)"
        return words

    def _say(self, values: dict[str, float]) -> None:
        held = ", ".join(f"{n} {v:.2g}" for n, v in values.items() if n not in self.settings.disabled)
        notes = [f"{name} not checked ({reason})" for name, reason in self.left_out.items()]
        notes += [f"{name} disabled ({values[name]:.2g})" for name in self.settings.disabled if name in values]
        self.say("; ".join([f"{self.step.removeprefix('the ')} agrees: {held}", *notes]))


def tolerances(config: RunConfig) -> dict[str, float]:
    """What each gate lets pass, nats (ratio: 1), before any step is known."""
    settings = config.trainer.gates
    is_exact = config.platform.deterministic or platform.current().repeats_itself
    repeated = 0.0 if is_exact else REPEATED_TOLERANCE[config.model.dtype]
    dtypes = {config.model.dtype, config.rollout.dtype or config.model.dtype}
    engine = ENGINE_TOLERANCE["float32" if dtypes == {"float32"} else "bfloat16"]
    return {
        "reference": repeated if settings.reference is None else settings.reference,
        "ppo_kl": repeated if settings.ppo_kl is None else settings.ppo_kl,
        "ratio": repeated if settings.ratio is None else settings.ratio,
        "engine": engine if settings.engine is None else settings.engine,
    }


def reasons_to_leave_out(config: RunConfig, sigma: float) -> dict[str, str]:
    """Gates that say nothing in this run as long as no step is known, and why."""
    reasons = {}
    if config.algorithm.kl_coefficient == 0:
        reasons["reference"] = "the run has none"
    if sigma > 0:
        reasons["engine"] = "it samples with noise"
    if config.rollout.simulated_quantization is not None:
        reasons["engine"] = "it samples with simulated 4-bit weights"
    if config.aqn.enabled and config.aqn.old_logprobs == "rollout":
        reasons["ratio"] = "pi_old is the engine's"
    if sigma > 0 and config.aqn.old_logprobs == "recompute_noisy":
        reasons["ratio"] = "pi_old has the engine's noise"
    return reasons


def hints_of(config: RunConfig, tensor: str | None) -> dict[str, str]:
    """Where to look for the cause of each failure."""
    if config.bridge.verify == "all":
        engine = (
            "bridge.verify=all found every weight of the engine equal to the trainer's, so the cause is not the sync: "
            "look at rollout.vllm (quantisation, attention), rollout.dtype and the model family's forward pass"
        )
    else:
        live = "rollout.weight_update=live " if config.rollout.weight_update == "reload" else ""
        engine = f"run again with {live}bridge.verify=all, which names the first tensor that the engine holds otherwise"
    if tensor is not None:
        reference = f"policy and reference hold another {tensor}"
    else:
        reference = "policy and reference hold the same weights, so the forward pass does not repeat itself exactly"
    forward = "the same weights give other numbers with gradients than without: look at memory.recompute and kernels"
    return {"reference": reference, "ppo_kl": forward, "ratio": forward, "engine": engine}


def report(
    name: str, value: float, allowance: str, worst: LogprobDifference | None, samples: Sequence[Sample], hint: str
) -> list[str]:
    """Lines on one failed gate: the quantity, the worst token, where to look, and how to go on regardless."""
    quantity, first, second = GATES[name]
    lines = [f"  {name}: {quantity} is {value:.3g}, and {allowance}"]
    if worst is not None:
        summary = samples[worst.sequence].summary
        lines.append(
            f"    worst token: prompt {summary.prompt_index}, sample {summary.sample_index}, response token "
            f"{worst.position} (id {worst.token}): {first} {worst.values[0]:.6g}, {second} {worst.values[1]:.6g}"
        )
    return [*lines, f"    {hint}", f"    to go on regardless: trainer.gates.disabled=[{name}]"]


def report_engines(far: Sequence[TooFar], is_alone: bool, hint: str) -> list[str]:
    """Lines on the engines that are too far from the trainer, beside those of the gate over all tokens or alone."""
    named = [one for one in far if one.engine is not None] or far
    lines = []
    for one in named[:MAX_NAMED]:
        whose = "all rollout engines together" if one.engine is None else f"rollout engine {one.engine}"
        lines.append(
            f"  engine: mean |trainer - engine| of the {one.distance.num_tokens} tokens of {whose} is "
            f"{one.distance.mean:.3g}, and {one.allowed:.3g} is allowed by trainer.gates.engine and what the last "
            "steps showed of tokens as old"
        )
    if len(named) > MAX_NAMED:
        lines.append(f"  and {len(named) - MAX_NAMED} more rollout engines")
    return [*lines, f"    {hint}", "    to go on regardless: trainer.gates.disabled=[engine]"] if is_alone else lines
