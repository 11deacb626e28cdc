"""A checkpoint of ours as a directory that engines can load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mega_rl.errors import InputError
from mega_rl.evaluation.weights import EvaluatedWeights


def export(weights: EvaluatedWeights, model: str, target: Path, converter: Path) -> None:
    """
    Args:
        model: Hugging Face directory with configuration and tokenizer.
        target: the new directory.
        converter: tools/convert.py.

    Raises:
        InputError: what the tool refuses.
    """
    arguments = ["megatron-to-hf", "--checkpoint", str(weights.directory), "--model", model, "--out", str(target)]
    made = subprocess.run([sys.executable, str(converter), *arguments], stderr=subprocess.PIPE, text=True, check=False)
    if made.returncode == 2:
        raise InputError(made.stderr.strip().removeprefix("error: "))
    if made.returncode:
        raise RuntimeError(f"tools/convert.py ended with {made.returncode}: {made.stderr}")
