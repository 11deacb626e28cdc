"""Sets the tensors that the tables give for a model directory against those of its checkpoint."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.errors import InputError
from mega_rl.models.shape import read_model_shape


def kinds(names: Iterable[str]) -> list[str]:
    """Names with every number replaced by ``*``, each once."""
    return sorted({re.sub(r"\.\d+\.", ".*.", name) for name in names})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="Hugging Face directory with config.json and safetensors")
    model = parser.parse_args().model
    try:
        shape, reader = read_model_shape(model), HFReader(model)
    except InputError as error:
        sys.exit(f"error: {error}")
    expected = hf_tensors(shape)
    found = {name: reader.shape(name) for name in reader.names()}
    other_size = [name for name in expected.keys() & found.keys() if expected[name] != found[name]]
    for title, names in (
        ("in the checkpoint, in no table", found.keys() - expected.keys()),
        ("in a table, not in the checkpoint", expected.keys() - found.keys()),
        ("of another size", other_size),
    ):
        for kind in kinds(names):
            print(f"{title}: {kind}")
    equal = len(expected.keys() & found.keys()) - len(other_size)
    print(f"{shape.family}: {equal} of {len(found)} tensors agree")


if __name__ == "__main__":
    main()
