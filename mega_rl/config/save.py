"""Writing the resolved configuration: what the run really used, defaults included, in a form that loads again."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mega_rl.config.schema.sections import RunConfig


def to_yaml(config: RunConfig) -> str:
    """The whole configuration as YAML text; ``load_config`` of it gives an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(dataclasses.asdict(config))))


def save_resolved(config: RunConfig, path: str | Path) -> None:
    """Writes ``to_yaml(config)`` so that ``path`` holds either the old or the whole new text; makes the directory."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(to_yaml(config))
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _escaped(value: Any) -> Any:
    # Interpolations are resolved by now: a "${" that is left is literal text and must stay so when loaded again.
    if isinstance(value, str):
        return value.replace("${", "\\${")
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value
