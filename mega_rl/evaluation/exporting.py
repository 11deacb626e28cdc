"""Weights that no engine loads as they are, as a directory that engines can load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mega_rl.errors import InputError
from mega_rl.evaluation.weights import EvaluatedWeights


def export(weights: EvaluatedWeights, model: str, target: Path, tools: Path) -> None:
    """A checkpoint in Hugging Face's files, or a model with its adapter merged.

    Args:
        model: Hugging Face directory with configuration and tokenizer.
        target: the new directory.
        tools: the directory of our tools.

    Raises:
        InputError: what the tool refuses.
    """
    if weights.adapter is not None:
        tool, arguments = "merge_lora.py", [str(weights.directory), str(weights.adapter), "-o", str(target)]
    else:
        tool, arguments = "convert.py", ["megatron-to-hf", "--checkpoint", str(weights.directory)]
        arguments += ["--model", model, "--out", str(target)]
    command = [sys.executable, str(tools / tool), *arguments]
    made = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if made.returncode == 2:
        raise InputError(made.stderr.strip().removeprefix("error: "))
    if made.returncode:
        raise RuntimeError(f"tools/{tool} ended with {made.returncode}: {made.stderr}")
