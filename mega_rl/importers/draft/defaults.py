"""What holds in a neighbour where nothing is given, as data that ``tools/neighbour_defaults.py`` writes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from mega_rl.config.reading.yaml_text import parse_yaml
from mega_rl.config.schema.sections import RunConfig

FOLDER = Path(__file__).resolve().parent.parent / "defaults"
EVERY = "every"  # in the place of a program's name: what all of them have alike
# Keys of ours that are named by who starts a run, and not taken from a default: which model, which data, where to.
NAMED = ("model.path", "data.train_files", "data.val_files", "trainer.output_dir", "logging.", "platform.name")

# Arguments of vLLM that are what it does anyway.
ENGINE = {"rollout.vllm.enforce_eager": False, "rollout.vllm.enable_prefix_caching": True} | {
    "rollout.vllm.enable_chunked_prefill": True
}


@cache
def read(neighbour: str) -> dict[str, Any]:
    """The whole file: ``commit``, and each program with its keys."""
    tree: dict[str, Any] = parse_yaml((FOLDER / f"{neighbour}.yaml").read_text(encoding="utf-8"))
    alike = tree.pop(EVERY)
    return {name: alike | keys if isinstance(keys, dict) else keys for name, keys in tree.items()}


def programs(neighbour: str) -> list[str]:
    return [name for name, keys in read(neighbour).items() if isinstance(keys, dict)]


def defaults(neighbour: str, program: str, given: Iterable[str]) -> dict[str, Any]:
    """Dotted key of theirs -> default, without those of sections that are absent.

    Args:
        given: the keys of the file; a section that is absent by default is there if one of its keys is.
    """
    keys, given = read(neighbour)[program], list(given)
    absent = [key for key in keys if key.endswith(".") and not any(name.startswith(key) for name in given)]
    return {key: value for key, value in keys.items() if not key.endswith(".") and not key.startswith(tuple(absent))}


def default_of(ours: str) -> Any:
    """Our default of a dotted key; None of an argument of vLLM that is not known."""
    value: Any = RunConfig()
    for part in ours.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part)
    return ENGINE.get(ours, value)
