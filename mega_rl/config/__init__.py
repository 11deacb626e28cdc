"""The configuration of a run: typed schema, loading (YAML and ``key=value``), validation, and writing it back."""

from __future__ import annotations

from mega_rl.config.checks.validate import problems, validate
from mega_rl.config.load import load_config
from mega_rl.config.save import save_resolved, to_yaml
from mega_rl.config.schema.sections import RunConfig
from mega_rl.config.schema.stage import has_critic, samples, workers_rewards

__all__ = [
    "RunConfig",
    "has_critic",
    "load_config",
    "problems",
    "samples",
    "save_resolved",
    "to_yaml",
    "validate",
    "workers_rewards",
]
