"""What must hold between the keys of adapters: where they come from, and how they reach the engines."""

from __future__ import annotations

import os

from mega_rl.config.schema.sections import RunConfig
from mega_rl.config.schema.stage import ADAPTER, samples, sequences_per_row, trains_values
from mega_rl.errors import shown

PEFT_CONFIG = "adapter_config.json"  # what PEFT writes beside the weights of an adapter


def adapter_problems(config: RunConfig, has_files: bool) -> list[str]:
    """Every problem as a sentence; ``has_files`` false asks for no file but the model's."""
    settings, method, rollout = config.tuning.adapter, config.tuning.method, config.rollout
    found = []
    if trains_values(config) and method != "full":
        found.append(
            f"tuning.method is {method!r}, but trainer.stage {config.trainer.stage!r} trains a new head on the whole "
            "model: set tuning.method to full"
        )
    if config.tuning.also_train and method == "full":
        found.append("tuning.also_train adds to what freeze or lora trains, but tuning.method is 'full': set it to []")
    if settings.path is not None and method != "lora":
        found.append(
            f"tuning.adapter.path is {shown(settings.path)}, but tuning.method is {method!r}: set the latter to "
            "lora, or merge the adapter first with tools/merge_lora.py"
        )
    own = os.path.join(config.trainer.output_dir, ADAPTER)
    if settings.path is not None and os.path.realpath(settings.path) == os.path.realpath(own):
        found.append(
            f"tuning.adapter.path is {shown(settings.path)}, where this run will write its own adapter: set another "
            "trainer.output_dir, or copy the adapter to another place"
        )
    elif settings.path is not None and has_files and not os.path.isdir(settings.path):
        found.append(f"tuning.adapter.path is {shown(settings.path)}, which is no directory: give one that PEFT wrote")
    elif settings.path is not None and has_files and not os.path.isfile(os.path.join(settings.path, PEFT_CONFIG)):
        found.append(f"tuning.adapter.path is {shown(settings.path)}, which has no {PEFT_CONFIG}: give what PEFT wrote")
    if settings.new and settings.path is None:
        found.append("tuning.adapter.new merges the adapter of tuning.adapter.path, which is null: set it to false")
    if not settings.new and settings.path is not None and config.tuning.also_train and _has_reference(config):
        found.append(
            "tuning.also_train and tuning.adapter.path leave the reference of algorithm.kl_coefficient nothing to be "
            "made of: unset one of the two, set algorithm.kl_coefficient to 0, or merge the adapter first with "
            "tools/merge_lora.py"
        )
    if method == "lora" and config.platform.layers != "local":
        found.append(
            f"platform.layers is {config.platform.layers!r}, whose linear layers norm their input, which adapters "
            "do not: set it to local, or tuning.method to full or freeze"
        )
    found += _dropout_problems(config)
    if not samples(config) or rollout.adapter == "auto":
        return found
    if method != "lora":
        found.append(f"rollout.adapter is {rollout.adapter!r}, but tuning.method is {method!r}: set it to auto")
    if rollout.adapter == "slots" and rollout.weight_update == "reload":
        found.append(
            "rollout.adapter is 'slots', which are written live, but rollout.weight_update is 'reload': set the one to "
            "merged or the other to auto"
        )
    return found


def _dropout_problems(config: RunConfig) -> list[str]:
    rate, memory = config.tuning.adapter.dropout, config.memory
    if not rate or config.tuning.method != "lora":
        return []
    found, set_to_0 = [], "set tuning.adapter.dropout to 0"
    if samples(config):
        found.append(
            f"tuning.adapter.dropout is {rate:g}, but a policy that drops a part of its input in an update is not the "
            f"one that sampled, so that every ratio of the two would be noise: {set_to_0}"
        )
    if memory.recompute == "selective" and memory.recompute_modules != ["core_attn"]:
        found.append(
            f"tuning.adapter.dropout is {rate:g}, and memory.recompute 'selective' begins in the middle of a layer, "
            "which no longer knows its tokens there: set memory.recompute to full or none, memory.recompute_modules to "
            f"[core_attn], or {set_to_0}"
        )
    budget, longest = (
        config.trainer.max_tokens_per_microbatch,
        config.data.max_prompt_length + config.data.max_response_length,
    )
    together = sequences_per_row(config) * longest
    if budget is not None and longest <= budget < together:
        found.append(
            f"trainer.max_tokens_per_microbatch is {budget}, so that the answers of a long pair would be learnt apart, "
            "by slopes of a forward pass that drops nothing, but tuning.adapter.dropout is "
            f"{rate:g}: raise the former to {together}, or {set_to_0}"
        )
    return found


def _has_reference(config: RunConfig) -> bool:
    return samples(config) and config.algorithm.kl_coefficient != 0
