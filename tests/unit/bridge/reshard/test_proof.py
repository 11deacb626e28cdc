"""The hash behind the proof of a sync: it adds up over pieces, and sees every fault that it must."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mega_rl.bridge.mapping.megatron import ModelChunk, Shard, megatron_slices
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.bridge.reshard import proof
from mega_rl.bridge.reshard.proof import (
    CHUNK_DIGITS,
    CHUNK_DIGITS_ON_DEVICE,
    SAMPLE_SYNCS,
    LoadProof,
    Proof,
    piece_hash,
    sampled_names,
)
from mega_rl.bridge.series import from_slice, slices_of
from mega_rl.bridge.slices import Box, Slice, indices, take_columns, whole
from mega_rl.models.mixture import Mixture
from tests.distributed.bridge.test_bridge_execute import SHAPE as DENSE, local_parameters
from tests.pretended.trainer.ranks import PretendedRanks

SALT = 7


def weight(size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)


def whole_hash(tensor: torch.Tensor, salt: int = SALT) -> int:
    return int(piece_hash(tensor, tuple((0, n) for n in tensor.shape), salt))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_pieces_add_up_to_the_whole(dtype: torch.dtype) -> None:
    tensor = weight((37, 700), dtype)
    boxes = [((0, 20), (0, 300)), ((0, 20), (300, 700)), ((20, 37), (0, 1)), ((20, 37), (1, 700))]
    total = torch.stack([piece_hash(tensor[indices(box)], box, SALT) for box in boxes]).sum()
    assert int(total) == whole_hash(tensor)
    vector = weight((501,), dtype)
    halves = [piece_hash(vector[a:b], ((a, b),), SALT) for a, b in ((0, 100), (100, 501))]
    assert int(torch.stack(halves).sum()) == whole_hash(vector)


@pytest.mark.parametrize("size", [(6, 5, 4), (6, 3, 2, 4, 4)])
def test_more_dimensions_are_cut_along_the_first_one_only(size: tuple[int, ...]) -> None:
    tensor = weight(size, torch.bfloat16)
    assert whole_hash(tensor) == whole_hash(tensor.flatten(1))
    rest = [(0, n) for n in size[1:]]
    halves = [piece_hash(tensor[a:b], ((a, b), *rest), SALT) for a, b in ((0, 2), (2, 6))]
    assert int(torch.stack(halves).sum()) == whole_hash(tensor)
    for axis in range(1, len(size)):
        box = tuple((1 if i == axis else 0, n) for i, n in enumerate(size))
        with pytest.raises(AssertionError):
            piece_hash(tensor[indices(box)], box, SALT)


def test_the_strides_of_a_piece_do_not_matter() -> None:
    tensor = weight((64, 48), torch.bfloat16)
    assert whole_hash(tensor.t().contiguous().t()) == whole_hash(tensor)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_flipped_byte_and_every_swap_is_seen(dtype: torch.dtype) -> None:
    tensor = weight((6, 5), dtype)
    expected = whole_hash(tensor)
    for i in range(tensor.nbytes):
        broken = tensor.clone()
        broken.view(torch.uint8).view(-1)[i] ^= 1 << (i % 8)
        assert whole_hash(broken) != expected, i
    for i in range(tensor.numel()):
        for j in range(i):
            broken = tensor.clone().view(-1)
            broken[[i, j]] = broken[[j, i]]
            assert whole_hash(broken.view(6, 5)) != expected, (i, j)
    assert whole_hash(tensor, SALT + 1) != expected


def test_bytes_are_compared_and_not_floats() -> None:
    assert whole_hash(torch.zeros(4)) != whole_hash(-torch.zeros(4))
    nan = torch.full((4,), float("nan"))
    assert whole_hash(nan) == whole_hash(nan.clone())


class Launches(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.name().split(".")[0]] += 1
        return func(*args, **(kwargs or {}))


def test_a_device_is_given_large_chunks_and_its_keys_once() -> None:
    """The pretended device only counts: 1 GB as one piece, and as the pieces of a layer's experts."""
    for size, num_pieces in (((1 << 16, 1 << 13), 1), ((768, 2048), 341)):
        piece, box = torch.empty(size, dtype=torch.bfloat16, device="meta"), tuple((0, n) for n in size)
        first, second = Launches(), Launches()
        with first:
            piece_hash(piece, box, salt=11)
        with second:
            for _ in range(num_pieces):
                piece_hash(piece, box, salt=11)
        assert first.counts["aten::_to_copy"] == 2 and second.counts["aten::_to_copy"] == 0
        digits = num_pieces * piece.numel()
        assert second.counts["aten::mul"] == 2 * max(num_pieces, digits // CHUNK_DIGITS_ON_DEVICE)
    on_host = Launches()
    with on_host:
        piece_hash(torch.zeros(1 << 12, 1 << 10, dtype=torch.bfloat16), ((0, 1 << 12), (0, 1 << 10)), SALT)
    assert on_host.counts["aten::mul"] == 2 * (1 << 22) // CHUNK_DIGITS


def test_the_size_of_chunks_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = weight((700, 901), torch.float32)
    found = whole_hash(tensor)
    for digits in (1, 5000, CHUNK_DIGITS_ON_DEVICE):
        monkeypatch.setattr(proof, "CHUNK_DIGITS", digits)
        assert whole_hash(tensor) == found == -8879545848079402100


def test_samples_cover_every_tensor_within_their_period() -> None:
    names = [f"layer.{i}" for i in range(3 * SAMPLE_SYNCS + 5)]
    for first in (0, 5):
        seen = [name for sync in range(first, first + SAMPLE_SYNCS) for name in sampled_names(names, sync, seed=3)]
        assert sorted(seen) == sorted(names)
    assert sampled_names(names, 0, seed=3) != sampled_names(names, 0, seed=4)


SIZES = {"a": (8, 6), "norm": (6,)}
NORM = whole("norm", "norm", (6,))
TRAINER = [[Slice("a", ((r * 4, r * 4 + 4), (0, 6)), "a", ((0, 4), (0, 6))), NORM] for r in (0, 1)]
ENGINES = [[take_columns("a", "a", 8, 3 * r, 3 * r + 3), NORM] for r in (0, 1)]
Model = dict[str, torch.Tensor]


def local(model: Model, slices: list[Slice]) -> Model:
    """The parameters of a worker, each of one slice."""
    return {piece.local_name: model[piece.hf_name][indices(piece.hf_box)].clone() for piece in slices}


def verdict(patch: pytest.MonkeyPatch, trainer: list[Model], engines: list[Model], left_out: str = "") -> None:
    """A proof between two ranks that each hold whole tensors, of which they show their slices."""
    ranks = PretendedRanks(2)
    ranks.take_the_place_of_the_group(patch)
    wanted = [[piece for piece in of_worker if piece.hf_name != left_out] for of_worker in ENGINES]
    layout = [[from_slice(piece) for piece in of_worker] for of_worker in wanted]

    def check(rank: int) -> None:
        def read(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
            return trainer[rank][hf_name][indices(hf_box)]

        def inspect(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> dict[int, Any]:
            return {rank: function(local(engines[rank], wanted[rank]), *arguments[rank])}

        checks = Proof(SIZES, TRAINER[rank], layout, num_workers=2, is_sample=False, seed=SALT)
        assert checks.check(read, inspect, version=5) == len(SIZES)

    ranks.run(check)


def models() -> list[Model]:
    return [{name: weight(size, torch.bfloat16) for name, size in SIZES.items()} for _ in range(2)]


def test_other_cuts_of_the_same_weights_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    verdict(monkeypatch, models(), models())


def test_the_sentence_names_tensor_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    engines, trainer = models(), models()
    engines[1]["a"][2, 4] += 1
    words = r"weight version 5 the engine on rank 1 holds another a than the trainer \(1 tensors differ\)"
    with pytest.raises(RuntimeError, match=words):
        verdict(monkeypatch, models(), engines)
    engines[0]["norm"][2] += 1
    with pytest.raises(RuntimeError, match=r"rank 0 holds another norm than the trainer \(2 tensors differ\)"):
        verdict(monkeypatch, models(), engines)
    trainer[1]["norm"][3] += 1
    with pytest.raises(RuntimeError, match="trainer ranks 0 and 1 hold different copies of norm"):
        verdict(monkeypatch, trainer, models())
    with pytest.raises(RuntimeError, match="the engine on rank 0 does not hold the whole of norm"):
        verdict(monkeypatch, models(), models(), left_out="norm")


def test_a_trainer_that_lacks_a_part_is_told_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "TRAINER", [TRAINER[0], [NORM]])
    with pytest.raises(RuntimeError, match="weight version 5: the trainer does not hold the whole of a"):
        verdict(monkeypatch, models(), models())


def test_copies_whose_differences_cancel_out_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One copy too large by as much as another is too small: their sum is that of two good ones."""
    monkeypatch.setitem(globals(), "TRAINER", [[NORM, TRAINER[0][0]], [NORM, TRAINER[1][0]]])
    trainer = models()
    for model, step in zip(trainer, (1, -1), strict=True):
        model["norm"].view(torch.int16)[3] += step
    with pytest.raises(RuntimeError, match="trainer ranks 0 and 1 hold different copies of norm"):
        verdict(monkeypatch, trainer, models())


SHAPE = replace(
    DENSE,
    family="qwen3_moe",
    num_layers=2,
    qkv_bias=False,
    qk_norm=True,
    mixture=Mixture(frozenset(range(2)), 4, 2, 8, True),
)
STAGES, TENSOR, ENGINE_SIZE = 2, 2, 4


def held_at(rank: int) -> list[Slice]:
    """TP 2, EP 2, PP 2, and as many copies as there are ranks for; tied embeddings are on both stages."""
    place, stage = rank % TENSOR, rank // TENSOR % STAGES
    experts = Shard(rank // (TENSOR * STAGES) % 2, 2)
    chunk = ModelChunk(range(stage, stage + 1), Shard(place, TENSOR), stage == 0, stage == 1, experts, Shard(place, 2))
    return megatron_slices(SHAPE, chunk)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How many slices each thread has made."""
    counts: Counter[int] = Counter()
    check = Slice.__post_init__

    def counted(piece: Slice) -> None:
        counts[threading.get_ident()] += 1
        check(piece)

    monkeypatch.setattr(Slice, "__post_init__", counted)
    return counts


def both_proofs(patch: pytest.MonkeyPatch, made: Counter[int], size: int) -> list[int]:
    """A load's and a sync's proof among so many ranks, an engine in each four, and the slices that each rank made.

    The worker of the last rank is broken between the two.
    """
    ranks = PretendedRanks(size)
    ranks.take_the_place_of_the_group(patch)
    generator = torch.Generator().manual_seed(0)
    model = {name: torch.randn(n, generator=generator).bfloat16() for name, n in hf_tensors(SHAPE).items()}
    layout = [vllm_series(SHAPE, ENGINE_SIZE, worker) for worker in range(ENGINE_SIZE)]

    def read(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
        return model[hf_name][indices(hf_box)]

    def check(rank: int) -> int:
        held, live = held_at(rank), local_parameters(slices_of(layout[rank % ENGINE_SIZE]), model, torch.bfloat16)
        before = made[threading.get_ident()]

        def inspect(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> dict[int, Any]:
            return {rank: function(live, *arguments[rank])}

        load = LoadProof(hf_tensors(SHAPE), held, layout, size // ENGINE_SIZE, read)
        assert load.difference(inspect, size) is None
        checks = Proof(hf_tensors(SHAPE), held, layout, size, is_sample=False, seed=3)
        assert checks.check(read, inspect, version=1) == len(hf_tensors(SHAPE))
        num_made = made[threading.get_ident()] - before
        if rank == size - 1:
            live["model.layers.1.mlp.experts.routed_experts.w13_weight"][2] += 1
        words = "model.layers.1.mlp.experts.2.gate_proj.weight"
        with pytest.raises(RuntimeError, match=rf"on rank {size - 1} holds another {words} than the trainer \(2 "):
            checks.check(read, inspect, version=2)
        assert f"{words}, of which the engine on rank {size - 1}" in str(load.difference(inspect, size))
        return num_made

    return ranks.run(check)


def test_the_slices_that_a_rank_makes_do_not_grow_with_the_world(
    monkeypatch: pytest.MonkeyPatch, made: Counter[int]
) -> None:
    few, many = both_proofs(monkeypatch, made, 8), both_proofs(monkeypatch, made, 64)
    assert min(few) > 100 and few == many[:8] and sorted(many) == sorted(few * 8)


def test_what_ranks_exchange_does_not_grow_with_the_world(monkeypatch: pytest.MonkeyPatch, made: Counter[int]) -> None:
    """Vectors only, of one length whatever the world; as many as the most divided tensor has pieces, and some."""
    lengths: list[list[int]] = []
    reduced = PretendedRanks.reduced
    for size in (8, 64):
        found: list[int] = []

        def recorded(ranks: PretendedRanks, values: Any, op: Any, found: list[int] = found) -> Any:
            if ranks.rank() == 0:
                found.append(len(values))
            return reduced(ranks, values, op)

        with monkeypatch.context() as patch:
            patch.setattr(PretendedRanks, "reduced", recorded)
            both_proofs(patch, made, size)
        lengths.append(found)
    assert lengths[0] == lengths[1] and 0 < len(lengths[0]) < 30 and max(lengths[0]) <= 8 * len(hf_tensors(SHAPE))
