"""How an engine may not sample: options of ``rollout.vllm`` and of its platform's plug-in that a run cannot do with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mega_rl.config.checks.modes import mode_problems
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.config.schema.sections import RunConfig
from mega_rl.errors import shown

# Engine options that change the distribution that tokens are drawn from.
RESHAPING_OPTIONS = ("logits_processors", "override_generation_config", "top_p", "top_k", "min_p")
SPECULATION = ("speculative_config", "spec_method", "spec_model", "spec_tokens")


def sampling_problems(config: RunConfig) -> Iterator[str]:
    """Sentences on how an engine may not sample: from another distribution than the trainer computes, with weights that
    no sync reaches, or at another time than the rest can do with."""
    rollout = config.rollout
    for option in RESHAPING_OPTIONS:
        if rollout.vllm.get(option):
            yield (
                f"rollout.vllm.{option} changes the distribution that the engine samples from, which the trainer's "
                "log-probabilities do not follow: remove it"
            )
    for option in SPECULATION:
        if rollout.vllm.get(option):
            yield (
                f"rollout.vllm.{option} has the engine guess tokens ahead, with a drafter that no sync of weights "
                "reaches and log-probabilities that nothing has compared: remove it"
            )
    if _ascend_options(rollout).get("enable_reduce_sample"):
        yield (
            "rollout.vllm.additional_config.enable_reduce_sample takes the log-probabilities of a token over a part of "
            "the vocabulary: remove it"
        )
    if rollout.weight_update != "reload":
        yield from _placement_problems(rollout)
    yield from _quantization_problems(rollout)
    yield from mode_problems(config)


def _ascend_options(rollout: RolloutConfig) -> Mapping[str, Any]:
    given = rollout.vllm.get("additional_config")
    return given if isinstance(given, Mapping) else {}


def _placement_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Live weights are written where vLLM's linear placement has each expert, from the first sync to the last."""
    for option, moves in (
        ("enable_eplb", rollout.vllm.get("enable_eplb")),
        ("expert_placement_strategy", rollout.vllm.get("expert_placement_strategy", "linear") != "linear"),
        ("additional_config.eplb_config", _ascend_options(rollout).get("eplb_config")),
    ):
        if moves:
            yield (
                f"rollout.vllm.{option} places experts where live weights would not find them: remove it, or set "
                "rollout.weight_update to reload"
            )


def _quantization_problems(rollout: RolloutConfig) -> Iterator[str]:
    """Only the engine's own loader can quantise what it is sent, and only a colocated engine is sent whole tensors."""
    quantization = rollout.vllm.get("quantization")
    if quantization is None:
        return
    given = f"rollout.vllm.quantization is {shown(quantization)}, but live weights are written as they were trained"
    if rollout.placement == "separate":
        yield f"{given}, and engines elsewhere take no others: remove it, or set rollout.placement to colocated"
    elif rollout.weight_update == "live":
        yield f"{given}: remove it, or set rollout.weight_update to reload"
