"""Where the weights of an evaluation are: a model directory or id, a checkpoint of ours, or the directory of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mega_rl.bridge.files.peft.peft import WEIGHTS_FILE, PeftReader
from mega_rl.bridge.files.peft.peft_config import CONFIG_FILE as ADAPTER_CONFIG
from mega_rl.bridge.files.torch_dist.manifest import MANIFEST, digest, digest_of_ends, read_content
from mega_rl.bridge.files.torch_dist.progress import read_progress
from mega_rl.errors import InputError, shortened
from mega_rl.models.cached import local_directory
from mega_rl.models.files import CONFIG_FILE
from mega_rl.models.shape import read_model_shape

RUN_CONFIG, CHECKPOINTS, EXPORT = "config.yaml", "checkpoints", "huggingface"  # in the directory of a run
_CHECKPOINT = re.compile(r"step_\d{8}")
_MODEL_FILE = re.compile(r".*\.(safetensors|json|model|txt|jinja)")


@dataclass(frozen=True)
class EvaluatedWeights:
    """What a name stands for."""

    directory: Path  # a Hugging Face directory, or a checkpoint
    is_checkpoint: bool  # it has to be exported before an engine can load it
    run_config: Path | None  # the configuration of the run that they come from
    adapter: Path | None = None  # of PEFT's, which is merged into them

    @property
    def is_loadable(self) -> bool:
        """Whether an engine can load the directory as it is."""
        return not self.is_checkpoint and self.adapter is None

    def identity(self) -> Mapping[str, Any]:
        """What tells these weights from others, wherever they lie: the ends of files, or a checkpoint's manifest."""
        if self.is_checkpoint:
            return {MANIFEST: digest(self.directory / MANIFEST)}
        files = (path for path in self.directory.iterdir() if _MODEL_FILE.fullmatch(path.name) and path.is_file())
        found = {path.name: _of_file(path) for path in sorted(files)}
        if self.adapter is not None:
            found |= {f"adapter: {name}": _of_file(self.adapter / name) for name in (ADAPTER_CONFIG, WEIGHTS_FILE)}
        return found


def _of_file(path: Path) -> str:
    return f"{path.stat().st_size} bytes, {digest_of_ends(path)}"


def with_adapter(weights: EvaluatedWeights, adapter: Path, option: str) -> EvaluatedWeights:
    """These weights with an adapter of PEFT's merged into them.

    Args:
        option: what named the adapter, for messages.

    Raises:
        InputError: the adapter is damaged, of another base, or of other sizes; or the weights are a checkpoint.
    """
    if weights.is_checkpoint:
        raise InputError(
            f"{option} takes the model that the adapter was trained from, and {weights.directory} is a checkpoint: "
            "give that model's directory"
        )
    PeftReader(adapter, read_model_shape(weights.directory, key="MODEL"), weights.directory, key=option)
    return replace(weights, adapter=adapter)


def find_weights(name: str) -> EvaluatedWeights:
    """
    Args:
        name: a Hugging Face directory, the id of a model in a local cache, a checkpoint, or the directory of a run. Of
            a run it is the newer one of its newest whole checkpoint and its export.

    Raises:
        InputError: it is none of these, or the run has no weights.
    """
    path = Path(local_directory(name))
    if not path.is_dir():
        raise InputError(
            f"{shortened(name)} is no directory and no model in the local caches: give a model directory, a checkpoint "
            "or the directory of a run"
        )
    if (path / CONFIG_FILE).is_file():
        return EvaluatedWeights(path, False, _run_config(path.parent))
    if (path / MANIFEST).is_file():
        return EvaluatedWeights(path, True, _run_config(path.parent.parent))
    if (config := _run_config(path)) is None and not (path / CHECKPOINTS).is_dir():
        raise InputError(
            f"{shortened(name)} has neither {CONFIG_FILE} (a model) nor {MANIFEST} (a checkpoint) nor {RUN_CONFIG} (a "
            "run): give one of these directories"
        )
    return _of_run(path, config)


def _of_run(run: Path, config: Path | None) -> EvaluatedWeights:
    checkpoints = sorted((run / CHECKPOINTS).glob("step_*"), reverse=True)
    whole = (path for path in checkpoints if _CHECKPOINT.fullmatch(path.name) and _is_model(path))
    newest, export = next(whole, None), run / EXPORT
    written = (export / CONFIG_FILE).stat().st_mtime if (export / CONFIG_FILE).is_file() else None
    if written is not None and (newest is None or written >= (newest / MANIFEST).stat().st_mtime):
        return EvaluatedWeights(export, False, config)
    if newest is None:
        raise InputError(
            f"{run} has no whole checkpoint of a language model and no export: let the run save one "
            "(checkpoint.save_freq, checkpoint.export_hf; with adapters or frozen layers only the export is a model), "
            "or give another run"
        )
    return EvaluatedWeights(newest, True, config)


def _is_model(checkpoint: Path) -> bool:
    """Whether it is whole, by names and sizes (whoever reads it compares the bytes), and all of a language model."""
    if isinstance(read_content(checkpoint), str):
        return False
    progress = read_progress(checkpoint, needed=("model",))
    return "tuning" not in progress and progress["model"].get("head") != "value"


def _run_config(run: Path) -> Path | None:
    return run / RUN_CONFIG if (run / RUN_CONFIG).is_file() else None
