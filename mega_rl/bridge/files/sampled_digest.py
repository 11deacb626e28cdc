"""Which weights a Hugging Face directory holds, told without reading all of them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

SAMPLE_BYTES = 4096  # of the beginning of every tensor


def weights_digest(directory: Path, config: str = "config.json") -> str:
    """A digest of the file ``config``, of every tensor's name, type, shape and place, and of its first bytes.

    Training changes every part of a tensor that it changes at all; two sets of weights that differ only behind the
    first ``SAMPLE_BYTES`` of each tensor would be taken for one.
    """
    digest = hashlib.blake2b(digest_size=16)
    for file in [directory / config, *sorted(directory.glob("*.safetensors"))]:
        with file.open("rb") as content:
            digest.update(f"{file.name}/{file.stat().st_size}/".encode())
            if file.suffix == ".json":
                digest.update(content.read())
                continue
            length = int.from_bytes(content.read(8), "little")
            header = content.read(length)
            digest.update(header)
            for name, entry in sorted(json.loads(header).items()):
                if name != "__metadata__":
                    start, end = entry["data_offsets"]
                    content.seek(8 + length + start)
                    digest.update(content.read(min(SAMPLE_BYTES, end - start)))
    return digest.hexdigest()
