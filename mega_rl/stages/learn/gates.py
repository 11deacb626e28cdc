"""What must hold of a step before the weights change, and whether it does.

In the first step of a run policy, reference and engine are the same weights, computed three times. In the first step of
a resumed run the policy is still computed twice. In every step the engine is the trainer's policy up to rounding and
noise, as far as the steps before showed them. The checks have the names of ``trainer.gates``.
Letters: T packed tokens of a micro-batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from mega_rl import platform
from mega_rl.config import RunConfig
from mega_rl.megatron.engine import LossFunction, MegatronEngine
from mega_rl.microbatch import Figures, Microbatch, TokenStats
from mega_rl.parallel.figures import reduced
from mega_rl.types import Sample

ENGINE_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # nats, mean over tokens; the coarser of the two types counts
# Nats, largest of a token, where the same forward pass may give other bits: sums of the hardware in varying order.
REPEATED_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
HISTORY = 16  # steps that the engine gate goes by

# What each gate measures, and the names of the two values that it compares, if it compares two.
GATES = {
    "reference": ("largest |policy - reference| of a token", "policy", "reference"),
    "ppo_kl": ("largest |pi_old - policy| of a token", "recomputed", "update"),
    "ratio": ("largest distance of the ratio from 1", "", ""),
    "engine": ("mean |trainer - engine| per token", "trainer", "engine"),
}
RESUMED = ("ppo_kl", "ratio", "engine")  # of the first step of a resumed run
RUNNING = ("engine",)  # of all other steps


class GateFailure(RuntimeError):
    """A step shows that the run would not learn what it is meant to."""


@dataclass(frozen=True)
class LogprobDifference:
    """Where two log-probabilities of one micro-batch differ most, and by how much in all."""

    largest: float  # nats; infinity if one of the two is not a number
    total: float  # nats, sum over the learnt tokens
    num_tokens: int  # learnt ones
    sequence: int  # index into the list that was packed
    position: int  # index among the learnt tokens of that sequence
    token: int  # its id
    values: tuple[float, float]


def difference(
    first_T: Tensor, second_T: Tensor, microbatch: Microbatch, counted: Collection[int] | None = None
) -> LogprobDifference | None:
    """The difference of two log-probabilities [T] over the learnt tokens; None without learnt tokens.

    Args:
        counted: the sequences that count, as indices into the list that was packed; None: all.
    """
    learnt_T = (microbatch.loss_mask != 0).cpu()
    bounds = microbatch.cu_seqlens.tolist()
    for sequence, start, end in zip(
        microbatch.sequence_indices, bounds, bounds[1:], strict=False
    ):  # there may be a tail
        if counted is not None and sequence not in counted:
            learnt_T[start:end] = False
    if not learnt_T.any():
        return None
    first_T, second_T = first_T.detach().cpu().double(), second_T.detach().cpu().double()
    gap_T = torch.where(learnt_T, (first_T - second_T).abs(), 0.0).nan_to_num(nan=torch.inf)
    place = int(gap_T.argmax())
    place = place if learnt_T[place] else int(learnt_T.nonzero()[0])
    starts = bounds[:-1]
    row = max(i for i, start in enumerate(starts) if start <= place)
    return LogprobDifference(
        largest=float(gap_T[place]),
        total=float(gap_T.sum()),
        num_tokens=int(learnt_T.sum()),
        sequence=microbatch.sequence_indices[row],
        position=int(learnt_T[starts[row] : place].sum()),
        token=int(microbatch.target_ids[place]),
        values=(float(first_T[place]), float(second_T[place])),
    )


def merged(differences: Iterable[LogprobDifference | None]) -> LogprobDifference | None:
    """Several micro-batches as one: the largest difference of all, and the sums."""
    found = [part for part in differences if part is not None]
    if not found:
        return None
    worst = max(found, key=lambda part: part.largest)
    total, num_tokens = sum(part.total for part in found), sum(part.num_tokens for part in found)
    return replace(worst, total=total, num_tokens=num_tokens)


_NUM_FIELDS = 9  # numbers of a difference on its way to other ranks


def over_ranks(own: Mapping[str, LogprobDifference | None]) -> dict[str, LogprobDifference | None]:
    """``merged`` of every rank's difference, by the names that all ranks have. Collective."""

    def worst(rows: list[list[float]]) -> list[float]:
        columns = zip(*map(_differences, rows), strict=True)
        return [number for column in columns for number in _to_numbers(merged(column))]

    numbers = [number for found in own.values() for number in _to_numbers(found)]
    return dict(zip(own, _differences(reduced(numbers, worst, len(numbers))), strict=True))


def _to_numbers(found: LogprobDifference | None) -> list[float]:
    if found is None:
        return [0.0] * _NUM_FIELDS
    place = found.sequence, found.position, found.token
    return [1.0, found.largest, found.total, found.num_tokens, *place, *found.values]


def _differences(row: Sequence[float]) -> list[LogprobDifference | None]:
    parts = [row[i : i + _NUM_FIELDS] for i in range(0, len(row), _NUM_FIELDS)]
    return [
        LogprobDifference(largest, total, int(num_tokens), int(sequence), int(position), int(token), (first, second))
        if is_there
        else None
        for is_there, largest, total, num_tokens, sequence, position, token, first, second in parts
    ]


class EngineHistory:
    """How far the engine was from the trainer in the steps before: what the next step is measured by.

    The distance that noise makes grows with its standard deviation, so an earlier step is taken in proportion where
    both have noise. A step without noise says nothing about one with it.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._steps: deque[tuple[float, float]] = deque(maxlen=HISTORY)  # (mean |trainer - engine|, sigma)

    def add(self, distance: float, sigma: float) -> None:
        if math.isfinite(distance):
            self._steps.append((distance, sigma))

    def allows(self, sigma: float) -> float | None:
        """The largest distance of a step with this noise, nats per token; None: no step before can be compared."""
        bounds = [
            distance * max(1.0, self._factor * (sigma / earlier if earlier else 1.0))
            for distance, earlier in self._steps
            if earlier or not sigma
        ]
        return median(bounds) if bounds else None


class GatedStep(NamedTuple):
    """A step whose first minibatch is checked."""

    names: Collection[str]  # of the gates
    words: str  # for the step
    version: int  # of the weights that the engine holds: samples of older ones are not compared with it
    sigma: float  # standard deviation of the noise on the engine's weights


class Gates:
    """The checks of one step's first minibatch.

    ``recompute`` comes before the update, ``watched`` wraps its loss, ``check`` stops the run or returns metrics.

    Args:
        config: says what is compared, how closely, and where to look for the cause of a difference.
        is_counted: whether this rank's differences count; they do not if another rank counts for the same sequences.
        say: tells the user.
        step: which gates it has.
        history: of the engine; this step is added to it.
    """

    def __init__(
        self,
        config: RunConfig,
        is_counted: bool,
        say: Callable[[str], None],
        step: GatedStep,
        history: EngineHistory,
    ) -> None:
        self.config, self.settings = config, config.trainer.gates
        self.is_counted, self.say, self.history = is_counted, say, history
        self.names, self.step, self.version, self.sigma = step
        self.tolerances = tolerances(config)
        reasons = reasons_to_leave_out(config, self.sigma)
        self.left_out = {name: why for name, why in reasons.items() if name in self.names}
        if (past := history.allows(self.sigma)) is not None:
            self.tolerances["engine"] = max(past, self.tolerances["engine"])
            self.left_out.pop("engine", None)
        self.logprobs: dict[tuple[int, ...], Tensor] = {}  # sequence_indices of a micro-batch -> recomputed [T]
        self.updated: list[tuple[Microbatch, Tensor]] = []  # micro-batches and log-probabilities [T] of the update
        self.found: dict[str, list[LogprobDifference | None]] = {"reference": [], "ppo_kl": [], "engine": []}

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

    def _compare(self, samples: Sequence[Sample]) -> None:
        """The update's log-probabilities with the recomputed ones and the engine's."""
        wanted = (self.version, self.version)
        fresh = {i for i, s in enumerate(samples) if (s.summary.oldest_version, s.summary.newest_version) == wanted}
        for microbatch, updated_T in self.updated:
            if (recomputed_T := self.logprobs.get(microbatch.sequence_indices)) is not None:
                self.found["ppo_kl"].append(difference(recomputed_T, updated_T, microbatch))
            if microbatch.rollout_logprobs is not None:
                self.found["engine"].append(difference(updated_T, microbatch.rollout_logprobs, microbatch, fresh))

    def check(
        self,
        ratio_mean: float,
        ratio_max: float,
        samples: Sequence[Sample],
        differing: Callable[[], str | None],
    ) -> dict[str, float]:
        """Metrics ``gate/NAME`` of what was measured, if it is a run's first step. Collective.

        Args:
            ratio_mean, ratio_max: of the objective, over the global batch.
            samples: of the minibatch, in the order of its sequences.
            differing: finds a tensor in which policy and reference differ.

        Raises:
            GateFailure: on every rank, if a gate that is not disabled does not hold.
        """
        self._compare(samples)
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
        if failed:
            self._fail(failed, values, worst, samples, differing() if "reference" in failed else None)
        if worst["engine"] is not None:
            self.history.add(distance, self.sigma)
        if self.names == RUNNING:
            return {}
        self._say(values)
        return {} if self.names == RESUMED else {f"gate/{name}": value for name, value in values.items()}

    def _fail(
        self,
        failed: Sequence[str],
        values: Mapping[str, float],
        worst: Mapping[str, LogprobDifference | None],
        samples: Sequence[Sample],
        tensor: str | None,
    ) -> None:
        hints = hints_of(self.config, tensor)
        lines = [
            line
            for name in failed
            for line in report(name, values[name], self._allowance(name), worst.get(name), samples, hints[name])
        ]
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
