"""``adapter_config.json`` of PEFT: what of it is read, what is refused, and what we write."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mega_rl.bridge.files.torch_dist.plain import read_json
from mega_rl.config.checks.adapters import PEFT_CONFIG as CONFIG_FILE
from mega_rl.errors import InputError, shortened, shown

# Fields of adapter_config.json that change no product of the factors; all others must be off.
_HARMLESS = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config", "exclude_modules",
    "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha", "lora_dropout",
    "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern",
    "revision", "runtime_config", "target_modules", "target_parameters", "task_type", "use_rslora",
}  # fmt: skip
_OFF: tuple[Any, ...] = (None, False, "", [], {}, "none")
# Ways to start an adapter that take something out of the base's own weights, which the base's files then still have.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class PeftConfig:
    """What ``adapter_config.json`` says that counts."""

    rank: int
    alpha: float
    is_rslora: bool = False
    base: str | None = None  # the name or directory of the model that it belongs to
    rank_pattern: Mapping[str, int] = field(default_factory=dict)  # regular expression of a module -> its rank
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def rank_of(self, module: str) -> int:
        return _by_pattern(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What multiplies B A of a module: alpha / r, with rsLoRA alpha / sqrt(r)."""
        rank = self.rank_of(module)
        return _by_pattern(self.alpha_pattern, module, self.alpha) / (math.sqrt(rank) if self.is_rslora else rank)


def read_adapter_config(directory: Path, key: str) -> PeftConfig:
    """``adapter_config.json`` of a directory, checked; InputError as ``PeftReader``."""
    where = f"{key} {shown(str(directory))}"
    if not (directory / CONFIG_FILE).is_file():
        raise InputError(f"{where} has no {CONFIG_FILE}: give a directory that PEFT has saved an adapter to")
    try:
        found = read_json(directory / CONFIG_FILE)
    except (OSError, ValueError) as error:
        raise InputError(
            f"{directory / CONFIG_FILE} (of {key}) is not readable JSON ({error}): copy it again"
        ) from error
    if not isinstance(found, dict) or found.get("peft_type") != "LORA":
        kind = shown(found.get("peft_type")) if isinstance(found, dict) else "missing"
        raise InputError(f"{where}: peft_type is {kind} in {CONFIG_FILE}, and only LORA is read: give a LoRA adapter")
    for name, value in found.items():
        if name not in _HARMLESS and value not in _OFF:
            raise InputError(
                f"{where}: {shortened(name)} is {shown(value)} in {CONFIG_FILE}, which is not supported: give an "
                "adapter that was trained without it"
            )
    start = found.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise InputError(
            f"{where}: init_lora_weights is {shown(start)} in {CONFIG_FILE}, which changes the base's own weights: "
            "convert the adapter with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
        )
    return _checked(found, where)


def _checked(found: dict[str, Any], where: str) -> PeftConfig:
    rank, alpha = found.get("r", 8), found.get("lora_alpha", 8)
    patterns = {name: found.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    numbers = [("r", rank), ("lora_alpha", alpha)]
    for name, pattern in patterns.items():
        if not isinstance(pattern, dict):
            raise InputError(f"{where}: {name} is {shown(pattern)} in {CONFIG_FILE}: give an object")
        for words in pattern:
            try:
                re.compile(words)
            except re.error as error:
                raise InputError(f"{where}: {name} has {shown(words)} in {CONFIG_FILE} ({error})") from error
        numbers += [(f"{name}[{shown(words)}]", value) for words, value in pattern.items()]
    for name, value in numbers:
        kinds = (int,) if name.startswith("r") else (int, float)
        if isinstance(value, bool) or not isinstance(value, kinds) or not (0 < value < 2**31):
            raise InputError(f"{where}: {name} is {shown(value)} in {CONFIG_FILE}: give a number > 0")
    base = found.get("base_model_name_or_path")
    return PeftConfig(rank, float(alpha), bool(found.get("use_rslora")), base or None, **patterns)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """PEFT's rule: the first pattern that is the end of the module's name."""
    return next((value for words, value in patterns.items() if re.match(rf"(.*\.)?({words})$", module)), default)


def check_base(base: str | None, model_dir: Path, where: str) -> None:
    """InputError if the name of the adapter's base is not the model's; its directory may have moved."""
    if base is None or not isinstance(base, str) or names_of(Path(base)) & names_of(model_dir.resolve()):
        return
    raise InputError(
        f"{where} is an adapter of {shown(base)}, and the model is {shown(str(model_dir))}: give its own "
        f"base, or correct base_model_name_or_path in its {CONFIG_FILE} if it is the same model under another name"
    )


def names_of(path: Path) -> set[str]:
    """What a model in this directory may be called: the caches of Hugging Face and ModelScope rename it."""
    cached = {part.rpartition("--")[2] for part in path.parts if part.startswith("models--")}
    return {name.replace("___", ".").lower() for name in {path.name, *cached}}


def config_fields(config: PeftConfig, targets: list[str]) -> dict[str, Any]:
    """The JSON of an adapter with these ``target_modules``."""
    alpha = int(config.alpha) if float(config.alpha).is_integer() else config.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base,
        "r": config.rank,
        "lora_alpha": alpha,
        "use_rslora": config.is_rslora,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
        "target_modules": targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "modules_to_save": None,
        "use_dora": False,
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }
