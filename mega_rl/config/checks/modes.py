"""Which keys do not go together with ``rollout.mode``, ``rollout.max_staleness`` and ``rollout.oversample``."""

from __future__ import annotations

from collections.abc import Iterator

from mega_rl.config.schema.sections import RunConfig

ASYNCHRONOUS = ("pinned", "in_flight")
# Why rollout.batch_invariant cannot be had on a device, by torch's name of it.
NOT_INVARIANT = {
    "cpu": "vLLM has no such kernels for a CPU, where log-probabilities agree to about 1e-5 in batches of any size",
    "npu": "vllm-ascend has no such kernels",
}


def not_invariant(device_type: str) -> str | None:
    """A sentence if ``rollout.batch_invariant`` cannot be had on a device."""
    if (why := NOT_INVARIANT.get(device_type)) is None:
        return None
    return f"rollout.batch_invariant is True, but {why}: set it to false"


def mode_problems(config: RunConfig) -> Iterator[str]:
    """Sentences on keys that cannot be meant with the mode."""
    rollout = config.rollout
    mode, eta = rollout.mode, rollout.max_staleness
    if rollout.kv_on_update == "keep" and mode != "in_flight":
        yield (
            f"rollout.kv_on_update is 'keep', but with rollout.mode {mode!r} no response is under way when new weights "
            "come: remove it, or set rollout.mode to in_flight"
        )
    if rollout.batch_invariant and (problem := not_invariant(config.platform.name)) is not None:
        yield problem
    if rollout.batch_invariant and rollout.seeds == "engine" and mode != "pinned":  # which says it itself
        yield (
            "rollout.batch_invariant is True, but with rollout.seeds 'engine' a response depends on those beside it: "
            "set rollout.seeds to request"
        )
    if mode not in ASYNCHRONOUS:
        if mode == "synchronous" and eta > 0:
            yield (
                f"rollout.max_staleness is {eta}, but with rollout.mode 'synchronous' every step samples with its own "
                "weights: set it to 0, or rollout.mode to pinned or in_flight"
            )
        if rollout.oversample != 1:
            yield from tail_problems(config, f"rollout.oversample is {rollout.oversample}")
        return
    if rollout.oversample != 1:
        yield (
            f"rollout.oversample is {rollout.oversample}, but with rollout.mode {mode!r} no step waits for its longest "
            "response while engines idle: set it to 1, or rollout.mode to synchronous"
        )
    if rollout.placement == "colocated":
        yield (
            f"rollout.mode is {mode!r}, but colocated engines take turns with the trainer on its devices: set "
            "rollout.placement to separate, or rollout.mode to synchronous"
        )
    if mode == "pinned" and rollout.seeds == "engine":
        yield (
            "rollout.seeds is 'engine', with which a response depends on those beside it, but rollout.mode 'pinned' "
            "promises that it does not: set rollout.seeds to request, or rollout.mode to in_flight"
        )
    if mode == "in_flight" and rollout.routing_replay == "rollout":
        yield (
            "rollout.routing_replay is 'rollout', but with rollout.mode 'in_flight' the weights change within a "
            "response, and with them the experts that the engine tells of its earlier tokens: set "
            "rollout.routing_replay to recompute or off, or rollout.mode to pinned"
        )
    if config.checkpoint.local:
        yield (
            f"checkpoint.local is {config.checkpoint.local}, but copies in memory do not hold what engines sample "
            f"meanwhile with rollout.mode {mode!r}: set it to 0, and checkpoint.save_freq to what a restart may cost"
        )
    yield from _learning_problems(config)


def tail_problems(config: RunConfig, given: str, remedy: str = "set rollout.oversample to 1") -> Iterator[str]:
    """Sentences on keys that cannot be meant where responses go on in the next step, with other weights.

    Args:
        given: why they do, as the beginning of a sentence.
        remedy: what makes them go on no more, as the end of one.
    """
    rollout, settings = config.rollout, config.algorithm.dynamic_sampling
    if config.environment.name is not None:
        yield (
            f"{given}, but an episode cannot be stopped without its environment (environment.name "
            f"{config.environment.name!r}): {remedy}"
        )
    if rollout.stop:
        yield (
            f"{given}, but an engine would not see a string of rollout.stop that begins in one step and ends in the "
            "next: set rollout.stop to [], and rollout.stop_token_ids to tokens that end a response"
        )
    if rollout.oversample != 1 and settings.enabled and settings.oversample != 1:
        yield (
            f"{given}, but algorithm.dynamic_sampling.oversample {settings.oversample} says it too, how many prompts a "
            "step begins: set algorithm.dynamic_sampling.oversample to 1"
        )
    if rollout.oversample != 1 and settings.enabled and settings.budget < rollout.oversample:
        yield (
            f"{given}, but algorithm.dynamic_sampling.budget is {settings.budget}, so that a step may begin no more: "
            "set it to at least rollout.oversample"
        )
    yield from mixed_problems(config, given)


def mixed_problems(config: RunConfig, given: str) -> Iterator[str]:
    """Sentences on keys that cannot be meant where weights of several steps have sampled a response.

    Args:
        given: why they have, as the beginning of a sentence.
    """
    if config.rollout.routing_replay == "rollout":
        yield (
            f"{given}, but with rollout.routing_replay 'rollout' the engine would tell of the experts that new weights "
            "choose for tokens of old ones: set rollout.routing_replay to recompute or off"
        )
    yield from _correction_problems(config, "responses that weights of several steps sample")


def _learning_problems(config: RunConfig) -> Iterator[str]:
    mode, eta = config.rollout.mode, config.rollout.max_staleness
    settings = config.algorithm.dynamic_sampling
    if settings.enabled and settings.oversample != 1:
        yield (
            f"algorithm.dynamic_sampling.oversample is {settings.oversample}, but with rollout.mode {mode!r} no group "
            "waits for the next step, which is sampled already: set it to 1"
        )
    if eta:
        yield from _correction_problems(config, f"rollout.max_staleness {eta}")


def _correction_problems(config: RunConfig, given: str) -> Iterator[str]:
    """Where weights of earlier steps sampled some of the tokens, as ``given`` says."""
    aqn = config.aqn
    if config.algorithm.importance_cap is None:
        yield (
            f"algorithm.importance_cap is null, but with {given} importance weights are what corrects for the older "
            "weights: set it to a number such as 2.0"
        )
    if aqn.enabled and aqn.old_logprobs == "recompute_noisy":
        yield (
            f"aqn.old_logprobs is 'recompute_noisy', but with {given} the trainer no longer has all weights that the "
            "noise was on: set it to decoupled or rollout"
        )
    if aqn.enabled and aqn.old_logprobs == "none":
        yield (
            f"aqn.old_logprobs is 'none', but with {given} importance weights are what corrects for the older weights: "
            "set it to decoupled"
        )
