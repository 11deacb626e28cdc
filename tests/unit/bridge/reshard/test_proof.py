"""The hash behind the proof of a sync: it adds up over pieces, and sees every fault that it must."""

from __future__ import annotations

import pytest
import torch

from mega_rl.bridge.reshard.proof import (
    SAMPLE_SYNCS,
    check_hashes,
    common_cells,
    distinct_boxes,
    piece_hash,
    sampled_names,
)
from mega_rl.bridge.slices import Slice, indices, take_columns, whole

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


def verdict(trainer: list[dict[str, torch.Tensor]], engines: list[dict[str, torch.Tensor]], left_out: str = "") -> None:
    """``check_hashes`` on ranks that each hold whole tensors of their own, of which they show their slices."""
    parts = []
    for side, other, held in ((TRAINER, ENGINES, trainer), (ENGINES, TRAINER, engines)):
        boxes = distinct_boxes(piece for slices in other for piece in slices)
        cells = [common_cells(slices, boxes) for slices in side]
        if side is ENGINES:
            cells = [[cell for cell in mine if cell.hf_name != left_out] for mine in cells]
        values = [
            [int(piece_hash(model[c.hf_name][indices(c.hf_box)], c.hf_box, SALT)) for c in mine]
            for mine, model in zip(cells, held, strict=True)
        ]
        parts.append(list(zip(cells, values, strict=True)))
    check_hashes(SIZES, *parts, engine_size=2, version=5)


def models() -> list[dict[str, torch.Tensor]]:
    return [{name: weight(size, torch.bfloat16) for name, size in SIZES.items()} for _ in range(2)]


def test_other_cuts_of_the_same_weights_agree() -> None:
    verdict(models(), models())


def test_the_sentence_names_tensor_and_rank() -> None:
    engines, trainer = models(), models()
    engines[1]["a"][2, 4] += 1
    with pytest.raises(RuntimeError, match="weight version 5 the engine on rank 1 holds another a than"):
        verdict(models(), engines)
    trainer[1]["norm"][3] += 1
    with pytest.raises(RuntimeError, match="trainer ranks 0 and 1 hold different copies of norm"):
        verdict(trainer, models())
    with pytest.raises(RuntimeError, match="the engine on rank 0 does not hold the whole of norm"):
        verdict(models(), models(), left_out="norm")
