"""Which keys do not go together with ``rollout.mode`` and ``rollout.max_staleness``."""

from __future__ import annotations

from collections.abc import Iterator

from mega_rl.config.schema import RunConfig

ASYNCHRONOUS = ("pinned", "in_flight")


def mode_problems(config: RunConfig) -> Iterator[str]:
    """Sentences on keys that cannot be meant with the mode."""
    rollout = config.rollout
    mode, eta = rollout.mode, rollout.max_staleness
    if rollout.kv_on_update == "keep" and mode != "in_flight":
        yield (
            f"rollout.kv_on_update is 'keep', but with rollout.mode {mode!r} no response is under way when new weights "
            "come: remove it, or set rollout.mode to in_flight"
        )
    if mode not in ASYNCHRONOUS:
        if mode == "synchronous" and eta > 0:
            yield (
                f"rollout.max_staleness is {eta}, but with rollout.mode 'synchronous' every step samples with its own "
                "weights: set it to 0, or rollout.mode to pinned or in_flight"
            )
        return
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


def _learning_problems(config: RunConfig) -> Iterator[str]:
    mode, eta, aqn = config.rollout.mode, config.rollout.max_staleness, config.aqn
    settings = config.algorithm.dynamic_sampling
    if settings.enabled and settings.oversample != 1:
        yield (
            f"algorithm.dynamic_sampling.oversample is {settings.oversample}, but with rollout.mode {mode!r} no group "
            "waits for the next step, which is sampled already: set it to 1"
        )
    if not eta:
        return
    if config.algorithm.importance_cap is None:
        yield (
            f"algorithm.importance_cap is null, but with rollout.max_staleness {eta} importance weights are what "
            "corrects for the older weights: set it to a number such as 2.0"
        )
    if aqn.enabled and aqn.old_logprobs == "recompute_noisy":
        yield (
            "aqn.old_logprobs is 'recompute_noisy', but the trainer no longer has the weights of up to "
            f"rollout.max_staleness {eta} steps before, which the noise was on: set it to decoupled or rollout"
        )
    if aqn.enabled and aqn.old_logprobs == "none":
        yield (
            f"aqn.old_logprobs is 'none', but with rollout.max_staleness {eta} importance weights are what corrects "
            "for the older weights: set it to decoupled"
        )
