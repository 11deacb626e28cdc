"""The files of a Hugging Face model directory that a run needs: config.json, a tokenizer, safetensors weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mega_rl.errors import InputError

CONFIG_FILE = "config.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"  # weights in one file, or in several


def read_config(model_dir: str | Path, key: str = "model.path") -> dict[str, Any]:
    """The parsed ``model_dir/config.json``; InputError, in which ``key`` says who named the directory."""
    directory = Path(model_dir)
    file = directory / CONFIG_FILE
    if not directory.is_dir():
        reason = "is a file" if directory.exists() else "does not exist"
        raise InputError(f"{key} is {str(model_dir)!r}, which {reason}: give a Hugging Face model directory")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(
            f"{key} {str(model_dir)!r} has no {CONFIG_FILE}: give a Hugging Face model directory"
        ) from error
    except OSError as error:
        raise InputError(f"{file} (of {key}) cannot be read ({error.strerror}): make it readable") from error
    except ValueError as error:  # bad JSON or bad UTF-8
        raise InputError(f"{file} (of {key}) is not valid JSON ({error}): copy the model again") from error
    if not isinstance(config, dict):
        raise InputError(f"{file} (of {key}) is not a JSON object: copy the model again")
    return config


def tokenizer_problem(model_dir: str | Path) -> str | None:
    """A sentence if the directory, named by model.path, has no tokenizer."""
    if any((Path(model_dir) / name).is_file() for name in TOKENIZER_FILES):
        return None
    return f"model.path {str(model_dir)!r} has no tokenizer: put one of {', '.join(TOKENIZER_FILES)} there"


def weights_problem(model_dir: str | Path) -> str | None:
    """A sentence if the directory, named by model.path, has no weights."""
    if any((Path(model_dir) / name).is_file() for name in (SINGLE_FILE, INDEX_FILE)):
        return None
    return f"model.path {str(model_dir)!r} has neither {SINGLE_FILE} nor {INDEX_FILE}: save the model's weights so"
