"""The files of a Hugging Face model directory that a run needs: config.json, a tokenizer, safetensors weights."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mega_rl.errors import InputError, shortened, shown

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 1 << 22
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"  # weights in one file, or in several


def read_config(model_dir: str | Path, key: str = "model.path") -> dict[str, Any]:
    """The parsed ``model_dir/config.json``; InputError, in which ``key`` says who named the directory."""
    file = Path(model_dir) / CONFIG_FILE
    if not os.path.isdir(model_dir):
        why = "is a file" if os.path.exists(model_dir) else "does not exist"
        raise InputError(
            f"{key} is {shown(str(model_dir))}, which {why}: give a Hugging Face model directory, or the id of a model "
            "that `hf download ID` or `modelscope download --model ID` has put into the local cache"
        )
    if not os.path.exists(file):
        raise InputError(f"{key} {shown(str(model_dir))} has no {CONFIG_FILE}: give a Hugging Face model directory")
    if not os.path.isfile(file) or os.path.getsize(file) > MAX_CONFIG_BYTES:
        raise InputError(f"{file} (of {key}) is no file of at most {MAX_CONFIG_BYTES} bytes: copy the model again")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{file} (of {key}) cannot be read ({error.strerror}): make it readable") from error
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, or JSON nested without end
        raise InputError(f"{file} (of {key}) is not valid JSON ({error}): copy the model again") from error
    if not isinstance(config, dict):
        raise InputError(f"{file} (of {key}) is not a JSON object: copy the model again")
    return config


def tokenizer_problem(model_dir: str | Path) -> str | None:
    """A sentence if the directory, named by model.path, has no tokenizer, or a pipe or device in its place."""
    for entry in os.scandir(model_dir):
        if entry.name.endswith((".json", ".model", ".txt", ".jinja")) and not (entry.is_file() or entry.is_dir()):
            name = shortened(entry.name)  # a pipe, say: opening it would wait for its writer
            return f"model.path {shown(str(model_dir))} has {name}, which is no regular file: copy the model again"
    if any(os.path.isfile(Path(model_dir) / name) for name in TOKENIZER_FILES):
        return None
    return f"model.path {shown(str(model_dir))} has no tokenizer: put one of {', '.join(TOKENIZER_FILES)} there"


def weights_problem(model_dir: str | Path) -> str | None:
    """A sentence if the directory, named by model.path, has no weights."""
    if any(os.path.isfile(Path(model_dir) / name) for name in (SINGLE_FILE, INDEX_FILE)):
        return None
    return f"model.path {shown(str(model_dir))} has neither {SINGLE_FILE} nor {INDEX_FILE}: save the model's weights so"
