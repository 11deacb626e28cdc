"""What must hold in the first step of a run: policy, reference and engine are the same weights, computed three times.

The checks have the names of ``trainer.gates``.
Letters: T packed tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mega_rl.config import RunConfig
from mega_rl.megatron.engine import LossFunction, MegatronEngine
from mega_rl.parallel.collectives import gather_objects
from mega_rl.types import Figures, Microbatch, Sample, TokenStats

ENGINE_TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2}  # nats, mean over tokens; the coarser of the two types counts

# What each gate measures, and the names of the two values that it compares, if it compares two.
GATES = {
    "reference": ("largest |policy - reference| of a token", "policy", "reference"),
    "ppo_kl": ("largest |pi_old - policy| of a token", "recomputed", "update"),
    "ratio": ("largest distance of the ratio from 1", "", ""),
    "engine": ("mean |trainer - engine| per token", "trainer", "engine"),
}


class GateFailure(RuntimeError):
    """The first step shows that the run would not learn what it is meant to."""


@dataclass(frozen=True)
class Difference:
    """Where two log-probabilities of one micro-batch differ most, and by how much in all."""

    largest: float  # nats; infinity if one of the two is not a number
    total: float  # nats, sum over the learnt tokens
    num_tokens: int  # learnt ones
    sequence: int  # index into the list that was packed
    position: int  # index among the learnt tokens of that sequence
    values: tuple[float, float]


def difference(first_T: Tensor, second_T: Tensor, microbatch: Microbatch) -> Difference | None:
    """The difference of two log-probabilities [T] over the learnt tokens; None without learnt tokens."""
    learnt_T = (microbatch.loss_mask != 0).cpu()
    if not learnt_T.any():
        return None
    first_T, second_T = first_T.detach().cpu().double(), second_T.detach().cpu().double()
    gap_T = torch.where(learnt_T, (first_T - second_T).abs(), 0.0).nan_to_num(nan=torch.inf)
    place = int(gap_T.argmax())
    place = place if learnt_T[place] else int(learnt_T.nonzero()[0])
    starts = microbatch.cu_seqlens[:-1].tolist()
    row = max(i for i, start in enumerate(starts) if start <= place)
    return Difference(
        largest=float(gap_T[place]),
        total=float(gap_T.sum()),
        num_tokens=int(learnt_T.sum()),
        sequence=microbatch.sequence_indices[row],
        position=int(learnt_T[starts[row] : place].sum()),
        values=(float(first_T[place]), float(second_T[place])),
    )


def merged(differences: Iterable[Difference | None]) -> Difference | None:
    """Several micro-batches as one: the largest difference of all, and the sums."""
    found = [part for part in differences if part is not None]
    if not found:
        return None
    worst = max(found, key=lambda part: part.largest)
    total, num_tokens = sum(part.total for part in found), sum(part.num_tokens for part in found)
    return Difference(worst.largest, total, num_tokens, worst.sequence, worst.position, worst.values)


class Gates:
    """The checks of one run's first optimizer step.

    ``recompute`` comes before the update, ``watched`` wraps its loss, ``check`` stops the run or returns metrics.

    Args:
        config: says what is compared, how closely, and where to look for the cause of a difference.
        is_counted: whether this rank's differences count; they do not if another rank counts for the same sequences.
        say: tells the user.
        sigma: standard deviation of the noise on the engine's weights.
    """

    def __init__(self, config: RunConfig, is_counted: bool, say: Callable[[str], None], sigma: float) -> None:
        self.config, self.settings = config, config.trainer.gates
        self.is_counted, self.say = is_counted, say
        self.tolerances = tolerances(config)
        self.left_out = reasons_to_leave_out(config, sigma)
        self.logprobs: dict[tuple[int, ...], Tensor] = {}  # sequence_indices of a micro-batch -> recomputed [T]
        self.found: dict[str, list[Difference | None]] = {"reference": [], "ppo_kl": [], "engine": []}

    def recompute(self, actor: MegatronEngine, minibatch: list[Microbatch]) -> list[Microbatch]:
        """Compute the policy's log-probabilities by themselves and compare them with the reference's and the engine's.

        They are used as pi_old for micro-batches that have none yet.
        """
        recomputed = []
        for microbatch, stats in zip(minibatch, actor.token_stats(minibatch), strict=True):
            self.logprobs[microbatch.sequence_indices] = stats.logprobs
            others = {"reference": microbatch.reference_logprobs, "engine": microbatch.rollout_logprobs}
            for name, logprobs_T in others.items():
                if logprobs_T is not None:
                    self.found[name].append(difference(stats.logprobs, logprobs_T, microbatch))
            is_open = microbatch.old_logprobs is None
            recomputed.append(microbatch.replace(old_logprobs=stats.logprobs) if is_open else microbatch)
        return recomputed

    def watched(self, loss_function: LossFunction) -> LossFunction:
        """The same loss, which also compares the update's own forward pass with the recomputed one."""

        def compare(stats: TokenStats, microbatch: Microbatch) -> tuple[Tensor, Figures]:
            recomputed_T = self.logprobs[microbatch.sequence_indices]
            self.found["ppo_kl"].append(difference(recomputed_T, stats.logprobs, microbatch))
            return loss_function(stats, microbatch)

        return compare

    def check(
        self,
        ratio_mean: float,
        ratio_max: float,
        samples: Sequence[Sample],
        differing: Callable[[], str | None],
    ) -> dict[str, float]:
        """Metrics ``gate/NAME`` of what was measured. Collective.

        Args:
            ratio_mean, ratio_max: of the objective, over the global batch.
            samples: of the minibatch, in the order of its sequences.
            differing: finds a tensor in which policy and reference differ.

        Raises:
            GateFailure: on every rank, if a gate that is not disabled does not hold.
        """
        own = {name: merged(parts) if self.is_counted else None for name, parts in self.found.items()}
        parts = gather_objects(own)
        worst = {name: merged(part[name] for part in parts) for name in self.found}
        values = {name: found.largest for name, found in worst.items() if found is not None}
        if worst["engine"] is not None:
            values["engine"] = worst["engine"].total / worst["engine"].num_tokens
        values["ratio"] = float(
            (torch.tensor([ratio_mean, ratio_max], dtype=torch.float64) - 1).abs().max()
        )  # NaN stays NaN
        values = {name: value for name, value in values.items() if name not in self.left_out}
        failed = [
            name
            for name, value in values.items()
            if not value <= self.tolerances[name] and name not in self.settings.disabled
        ]
        tensor = differing() if "reference" in failed else None
        if any(failed):
            hints = hints_of(self.config, tensor)
            lines = [
                line
                for name in failed
                for line in report(name, values[name], self.tolerances[name], worst.get(name), samples, hints[name])
            ]
            raise GateFailure("\n".join(["the first step is not what it must be", *lines]))
        self._say(values)
        return {f"gate/{name}": value for name, value in values.items()}

    def _say(self, values: dict[str, float]) -> None:
        held = ", ".join(f"{n} {v:.2g}" for n, v in values.items() if n not in self.settings.disabled)
        notes = [f"{name} not checked ({reason})" for name, reason in self.left_out.items()]
        notes += [f"{name} disabled ({values[name]:.2g})" for name in self.settings.disabled if name in values]
        self.say("; ".join([f"first step agrees: {held}", *notes]))


def gates_of(config: RunConfig, is_counted: bool, say: Callable[[str], None], step: int, sigma: float) -> Gates | None:
    """The gates of the step that begins after ``step`` finished ones; None if it is not the run's first step."""
    return Gates(config, is_counted, say, sigma) if step == 0 else None


def tolerances(config: RunConfig) -> dict[str, float]:
    """What each gate lets pass, nats (ratio: 1)."""
    settings = config.trainer.gates
    dtypes = {config.model.dtype, config.rollout.dtype or config.model.dtype}
    engine = ENGINE_TOLERANCE["float32" if dtypes == {"float32"} else "bfloat16"]
    return {
        "reference": settings.reference,
        "ppo_kl": settings.ppo_kl,
        "ratio": settings.ratio,
        "engine": engine if settings.engine is None else settings.engine,
    }


def reasons_to_leave_out(config: RunConfig, sigma: float) -> dict[str, str]:
    """Gates that say nothing in this run, and why."""
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
    name: str, value: float, tolerance: float, worst: Difference | None, samples: Sequence[Sample], hint: str
) -> list[str]:
    """Lines on one failed gate: the quantity, the worst token, where to look, and how to go on regardless."""
    quantity, first, second = GATES[name]
    lines = [f"  {name}: {quantity} is {value:.3g}, and trainer.gates.{name} allows {tolerance:.3g}"]
    if worst is not None:
        trajectory = samples[worst.sequence].trajectory
        token = trajectory.sampled_ids[worst.position]
        lines.append(
            f"    worst token: prompt {trajectory.prompt.index}, sample {trajectory.sample_index}, response token "
            f"{worst.position} (id {token}): {first} {worst.values[0]:.6g}, {second} {worst.values[1]:.6g}"
        )
    return [*lines, f"    {hint}", f"    to go on regardless: trainer.gates.disabled=[{name}]"]
