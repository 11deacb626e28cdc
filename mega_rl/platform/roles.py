"""What each process of a run is for, from nothing but the configuration."""

from __future__ import annotations

from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.platform.contract.base import ProcessRole


def trainer_role(rollout: RolloutConfig | None, is_deterministic: bool) -> ProcessRole:
    """The role of torchrun's processes: they train, and hold the engines unless those live elsewhere.

    Args:
        rollout: None for a stage that does not sample.
    """
    if rollout is None or rollout.replay is not None:
        return ProcessRole(is_deterministic=is_deterministic)
    if rollout.placement == "separate":
        return ProcessRole(may_share_device=True, is_deterministic=is_deterministic)
    return ProcessRole(
        samples=True,
        engine_sleeps=_sleeps(rollout, by_default=True),
        replays_graphs=_replays_graphs(rollout),
        is_deterministic=is_deterministic,
    )


def engine_role(rollout: RolloutConfig, is_deterministic: bool) -> ProcessRole:
    """The role of a process that only samples."""
    return ProcessRole(
        trains=False,
        samples=True,
        engine_sleeps=_sleeps(rollout, by_default=False),
        replays_graphs=_replays_graphs(rollout),
        may_share_device=True,
        is_deterministic=is_deterministic,
    )


def _sleeps(rollout: RolloutConfig, by_default: bool) -> bool:
    return bool(rollout.vllm.get("enable_sleep_mode", by_default))


def _replays_graphs(rollout: RolloutConfig) -> bool:
    return not rollout.vllm.get("enforce_eager", False)
