"""What the proofs of weights cost one rank of a large world: objects, memory, what it exchanges, and time.

    python -m benchmarks.weights.proof_at_scale [--quick] [--json PATH]

The layouts are those of Qwen3-30B-A3B and Qwen3-235B-A22B, every tensor and every box of them; the widths of tensors
are cut, so that hashing, which grows with bytes and not with the world, takes little. First the ranks that hold
different parts of the model prove a load and a sync together, as threads of this process, in which the hash of a tensor
is known without its bytes; copies of these ranks add nothing to what is exchanged. What one rank was answered is kept.
Then a process of its own is that rank, with real hashes and these answers: its processor time, its memory above what it
held before, the slices that it made.

A rank holds its own part of the trainer's tensors and one worker of an engine; "proof of a load" is ``LoadProof`` with
the engine's answer, "proof of a sync" is what every sync with ``bridge.verify=all`` does.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.report import publish, table
from benchmarks.weights.plan import QWEN3_235B_A22B, Case, trainer
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.bridge.reshard import held_pieces, proof
from mega_rl.bridge.reshard.held_pieces import Numbers
from mega_rl.bridge.reshard.proof import LoadProof, Proof
from mega_rl.bridge.series import Series, slices_of
from mega_rl.bridge.slices import Box, Slice, extents
from mega_rl.models.shape import ModelShape
from mega_rl.platform.contract.host import host_peak_bytes, reset_host_peak
from tests.pretended.trainer.ranks import PretendedRanks

DTYPE = torch.bfloat16
HALF = 1 << 63
CUT = {"hidden_size": 64, "head_dim": 4, "ffn_size": 64, "vocab_size": 1024}
MODELS = {
    "30B-A3B": replace(QWEN3_235B_A22B, num_layers=48, num_heads=32),
    "235B-A22B": QWEN3_235B_A22B,
}


@dataclass(frozen=True)
class World:
    model: str
    layout: Case
    size: int  # ranks

    def __str__(self) -> str:
        return f"{self.model}, {self.layout}, {self.size} ranks"

    @property
    def shape(self) -> ModelShape:
        shape = MODELS[self.model]
        assert shape.mixture is not None
        layers = frozenset(range(shape.num_layers))
        return replace(shape, **CUT, mixture=replace(shape.mixture, layers=layers, ffn_size=16))


WORLDS = [
    World("30B-A3B", Case(2, 2, 1, 8, 1, 4, False), 64),
    World("30B-A3B", Case(2, 2, 1, 8, 1, 4, False), 1024),
    World("235B-A22B", Case(4, 8, 1, 8, 1, 8, False), 256),
    World("235B-A22B", Case(4, 8, 1, 8, 1, 8, False), 1024),
]
QUICK = [replace(WORLDS[0], size=size) for size in (32, 64)]


def value(hf_name: str) -> float:
    """Of every element of a tensor."""
    return zlib.crc32(hf_name.encode()) % 251


def read(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
    return torch.full(extents(hf_box), value(hf_name), dtype=DTYPE)


class Live(dict[str, torch.Tensor]):
    """An engine worker's parameters of several tensors, made when they are asked for."""

    def __init__(self, series: Sequence[Series]) -> None:
        self._pieces: dict[str, list[Slice]] = {}
        for piece in slices_of(series):
            self._pieces.setdefault(piece.local_name, []).append(piece)

    def __missing__(self, local_name: str) -> torch.Tensor:
        pieces = self._pieces[local_name]
        sizes = zip(*([end for _, end in piece.local_box] for piece in pieces), strict=True)
        found = torch.empty([max(ends) for ends in sizes], dtype=DTYPE)
        for piece in pieces:
            found[tuple(slice(*ends) for ends in piece.local_box)] = value(piece.hf_name)
        if len(self) > 3:  # the pieces of a parameter are asked for one after the other
            self.clear()
        self[local_name] = found
        return found


class SomeRanks(PretendedRanks):
    """The ranks of these numbers; what the last of them is answered is kept."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__(len(numbers))
        self._numbers = numbers
        self.answers: list[Numbers] = []

    def rank(self) -> int:
        return self._numbers[super().rank()]

    def reduced(self, values: Numbers, op: Any) -> Numbers:
        found = super().reduced(values, op)
        if self.rank() == self._numbers[-1]:
            self.answers.append(found)
        return found


@cache
def unit(box: Box, salt: int) -> int:
    """The hash of a box whose every digit is one."""
    ones = torch.ones(extents(box), dtype=torch.int16).view(DTYPE)
    return int(proof.piece_hash(ones, box, salt))


def hashes_of(cells: Sequence[Slice], pieces: object, salt: int) -> list[int]:
    """``cell_hashes`` of what ``read`` gives: every digit of a tensor is the same."""
    digits = [int(torch.tensor(value(cell.hf_name), dtype=DTYPE).view(torch.int16)) for cell in cells]
    pairs = zip(cells, digits, strict=True)
    return [(digit * unit(cell.hf_box, salt) + HALF) % (2 * HALF) - HALF for cell, digit in pairs]


def prove(world: World, held: list[Slice], engine: list[list[Series]], inspect: proof.Inspect) -> Iterator[str]:
    """One rank's part; says what has been done."""
    sizes, size = hf_tensors(world.shape), world.layout.engine_tensor
    load = LoadProof(sizes, held, engine, 1, read)
    assert load.difference(inspect, size) is None
    yield "load"
    checks = Proof(sizes, held, engine, size, is_sample=False, seed=0)
    yield "made"
    assert checks.check(read, inspect, version=1) == len(sizes)
    yield "sync"


def no_engine(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> dict[int, Any]:
    return dict.fromkeys(range(len(arguments)), proof.Difference(0, ""))


def answers_of(world: World) -> tuple[int, list[Numbers]]:
    """The last rank that holds a part of the model as the first, and what it is answered."""
    layouts = trainer(world.shape, world.layout, world.size)
    distinct = list({repr(series): rank for rank, series in reversed(list(enumerate(layouts)))}.values())[::-1]
    engine = [
        vllm_series(world.shape, world.layout.engine_tensor, worker) for worker in range(world.layout.engine_tensor)
    ]
    ranks, pieces = SomeRanks(distinct), proof.EnginePieces(hf_tensors(world.shape), engine)
    with pytest.MonkeyPatch.context() as patch:
        ranks.take_the_place_of_the_group(patch)
        patch.setattr(proof, "EnginePieces", lambda sizes, workers: pieces)
        patch.setattr(proof, "cell_hashes", hashes_of)
        ranks.run(lambda i: list(prove(world, slices_of(layouts[distinct[i]]), engine, no_engine)))
    return distinct[-1], ranks.answers


def measured(world: World, rank: int, answers: list[Numbers], held: list[Series]) -> dict[str, float]:
    """What the proofs cost the rank; in a process of its own."""
    torch.set_num_threads(1)
    given, num_made, check = iter(answers), [0], Slice.__post_init__

    def counted(piece: Slice) -> None:
        num_made[0] += 1
        check(piece)

    engine = [
        vllm_series(world.shape, world.layout.engine_tensor, worker) for worker in range(world.layout.engine_tensor)
    ]
    live, own = Live(engine[rank % len(engine)]), slices_of(held)

    def inspect(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> dict[int, Any]:
        return {rank: function(live, *arguments[rank % len(engine)])}

    found: dict[str, float] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Slice, "__post_init__", counted)
        patch.setattr(held_pieces, "reduced", lambda values, op: next(given))
        patch.setattr(held_pieces, "own_rank", lambda: rank)
        patch.setattr(proof, "together", lambda what: nullcontext())
        assert reset_host_peak(), "the peak of a process cannot be measured here"
        before, start = host_peak_bytes(), time.process_time()
        for done in prove(world, own, engine, inspect):
            found[f"{done}_s"], start = time.process_time() - start, time.process_time()
    assert next(given, None) is None, "fewer exchanges than the others made"
    return found | {
        "slices": num_made[0],
        "peak_mb": (host_peak_bytes() - before) / 1e6,
        "exchanges": len(answers),
        "exchanged_mb": sum(one.nbytes for one in answers) / 1e6,
    }


def measure(world: World) -> dict[str, float]:
    rank, answers = answers_of(world)
    held = trainer(world.shape, world.layout, world.size)[rank]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measured, (world, rank, answers, held))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the smaller model, on 32 and 64 ranks")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    arguments = parser.parse_args()
    results = {str(world): measure(world) for world in (QUICK if arguments.quick else WORLDS)}
    header = ["model and layout", "slices made", "peak MB", "exchanges", "exchanged MB"]
    header += ["proof of a load, CPU s", "making that of syncs", "proof of a sync"]
    names = ("slices", "peak_mb", "exchanges", "exchanged_mb", "load_s", "made_s", "sync_s")
    rows = [[name, *(found[key] for key in names)] for name, found in results.items()]
    publish("Proofs of weights on one rank", table(header, rows), "cpu", {"worlds": results}, arguments.json)


if __name__ == "__main__":
    main()
