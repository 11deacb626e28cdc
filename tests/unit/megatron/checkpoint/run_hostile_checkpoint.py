"""Writes small checkpoints of which one file makes a directory when it is unpickled, and says what reading them did.

``--unguarded`` reads them as Megatron and torch would by themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.bridge.files.torch_dist.manifest import WEIGHTS

platform.select("cpu")

from megatron.core import dist_checkpointing  # noqa: E402
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor  # noqa: E402

from mega_rl.megatron.checkpoint import checkpoint  # noqa: E402


class Harmful:
    """Makes a directory when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = str(marker)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.marker,)


def state_of(value: object) -> dict[str, Any]:
    return {
        "tensor": ShardedTensor.from_rank_offsets("tensor", torch.arange(4.0)),
        "object": ShardedObject("object", value, (1,), (0,)),
    }


def index(weights: Path, marker: Path) -> None:
    path = weights / ".metadata"
    content = pickle.loads(path.read_bytes())
    content.storage_meta = Harmful(marker)
    path.write_bytes(pickle.dumps(content))


def index_through_torch(weights: Path, marker: Path) -> None:
    """By a name that begins in a module of torch's and goes on into what that has imported: ``filesystem.os.mkdir``."""
    path, argument = b"torch.distributed.checkpoint.filesystem", str(marker).encode()
    names = b"\x8c" + bytes([len(path)]) + path + b"\x8c\x08os.mkdir\x93"
    (weights / ".metadata").write_bytes(b"\x80\x04" + names + b"\x8c" + bytes([len(argument)]) + argument + b"\x85R.")


def common(weights: Path, marker: Path) -> None:
    torch.save({"content_metadata": Harmful(marker)}, weights / "common.pt")


def generators(weights: Path, marker: Path) -> None:
    torch.save([{"torch": Harmful(marker)}], weights.parent / checkpoint.GENERATORS)


ATTACKS: dict[str, Callable[[Path, Path], None]] = {
    "none": lambda *_: None,
    "index": index,
    "index_through_torch": index_through_torch,
    "object": lambda *_: None,  # it is in the state that is saved
    "common": common,
    "generators": generators,
}


def write(attack: str, directory: Path, marker: Path) -> None:
    weights = directory / WEIGHTS
    weights.mkdir(parents=True)
    dist_checkpointing.save(state_of(Harmful(marker) if attack == "object" else {"plain": 1}), str(weights))
    torch.save([{"torch": torch.get_rng_state()}], directory / checkpoint.GENERATORS)
    ATTACKS[attack](weights, marker)


def read(directory: Path, is_guarded: bool) -> str:
    try:
        if is_guarded:
            loaded, states = checkpoint.read_state(directory, state_of(None))
            assert torch.equal(states[0]["torch"], torch.get_rng_state())
        else:
            torch.load(directory / checkpoint.GENERATORS, weights_only=False)
            loaded = dist_checkpointing.load(state_of(None), str(directory / WEIGHTS))
    except BaseException as error:  # noqa: BLE001 - torch's CheckpointException is no Exception
        return f"{type(error).__name__}: {error}"
    return f"{loaded['tensor'].tolist()} {loaded['object']}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--unguarded", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    results: dict[str, tuple[str, bool]] = {}  # attack -> what was read or said, and whether code has run
    for attack in ATTACKS:
        directory, marker = options.dir / attack, options.dir / f"{attack}_has_run"
        write(attack, directory, marker)
        said = read(directory, not options.unguarded)
        results[attack] = said, marker.is_dir()
    (options.dir / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
