"""What the passes and optimizer steps of one update found, and the metrics that follow from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mega_rl.algorithms.objective import POOLED
from mega_rl.algorithms.own import OWN
from mega_rl.megatron.optim.optimizer import OptimizerStats
from mega_rl.observe.metrics.declared import MAXIMA, MEANS
from mega_rl.stages.run.batch_share import Totals


@dataclass(frozen=True)
class Gradients:
    """What the forward and backward pass over a minibatch found, over all ranks; the gradients are the actor's."""

    totals: Totals  # of the objective
    num_tokens: int  # that the minibatch learns from
    gate_metrics: dict[str, float]


@dataclass(frozen=True)
class UpdateStep:
    """What one optimizer step did."""

    stats: OptimizerStats
    router_metrics: dict[str, float]


def pass_metrics(passes: Sequence[Gradients]) -> dict[str, float]:
    """Token sums become token means, averaged over the minibatches; maxima stay maxima; see `POOLED` for the others."""
    metrics: dict[str, float] = {}
    pooled: dict[str, float] = defaultdict(float)
    for found in passes:
        metrics |= found.gate_metrics
        pooled["num_tokens"] += found.num_tokens
        for figure, value in found.totals.sums.items():
            if figure.startswith(POOLED):
                pooled[figure.removeprefix(POOLED)] += value
                continue
            metric = f"actor/{figure}" if figure.startswith(OWN) else MEANS[figure]
            share = value if figure == "loss" else value / found.num_tokens  # the loss is divided already
            metrics[metric] = metrics.get(metric, 0.0) + share / len(passes)
        for figure, value in found.totals.maxima.items():
            metric = MAXIMA[figure]
            metrics[metric] = max(metrics.get(metric, value), value)
    return metrics | _pooled_metrics(pooled)


def _pooled_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Metrics of what was added up over all minibatches, see `POOLED`."""
    num_tokens = sums["num_tokens"]
    if not num_tokens or "weight" not in sums:
        return {}
    metrics = {"rollout/ess": sums["weight"] ** 2 / (num_tokens * sums["weight_squared"])}
    for name, number in sums.items():
        kind, _, age = name.partition("/")
        if kind == "tokens" and number:
            metrics[f"rollout/tokens_of_staleness/{age}"] = number / num_tokens
            metrics[f"rollout/kl_of_staleness/{age}"] = sums[f"rollout_kl/{age}"] / number
    return metrics


def step_metrics(steps: Sequence[UpdateStep], skipped_total: int) -> dict[str, float]:
    """The mean norm of the gradients, and the rest as the last step left it; of a batch without a step, the counts."""
    metrics: dict[str, float] = {}
    for step in steps:
        grad_norm = metrics.get("actor/grad_norm", 0.0) + step.stats.grad_norm / len(steps)
        metrics |= {"actor/grad_norm": grad_norm, "actor/lr": step.stats.lr, **step.router_metrics}
    num_skipped = sum(step.stats.skipped for step in steps)
    return metrics | {"actor/skipped_steps": float(num_skipped), "actor/skipped_steps_total": float(skipped_total)}
