"""Attention over packed sequences: each platform's way against the reference, and the arguments it refuses.

Letters: T packed queries, S packed keys, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.nn.attention import varlen

from mega_rl import platform
from mega_rl.errors import InputError
from mega_rl.platform import cuda, dispatch as operators
from mega_rl.platform.cuda import FlashOperators
from mega_rl.platform.operators import attention, npu_kernels as npu_operators, reference
from mega_rl.platform.operators.attention import (
    MAX_PADDING,
    VarlenPacking,
    batched_calls,
    check_arguments,
    length_groups,
    place_borders,
    read_borders,
)
from mega_rl.platform.operators.npu_kernels import AscendOperators
from mega_rl.platform.operators.torch_kernels import TorchOperators
from tests.npu.recorder import RecordingTorchNpu

D = 8
SCALE = 0.4  # no kernel's default
RAGGED = [7, 19, 1, 30, 41, 3, 12, 1, 12, 5]
PACKS = {  # lengths of queries and of keys
    "ragged": (RAGGED, RAGGED),
    "one_token": ([1], [1]),
    "thousand_sequences": ([1, 2] * 500, [1, 2] * 500),
    "long_enough_for_calls_of_their_own": ([70, 130, 64], [70, 130, 64]),
    "windows": ([4, 4, 2, 4, 4, 2, 1, 1], [4, 4, 2, 4, 4, 2, 1, 1]),
    "more_keys_than_queries": ([3, 1, 20, 7], [3, 9, 33, 8]),
}


def borders(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def packing_of(lengths_q: list[int], lengths_k: list[int]) -> VarlenPacking:
    cu_seqlens_q = borders(lengths_q)
    cu_seqlens_k = cu_seqlens_q if lengths_q == lengths_k else borders(lengths_k)
    return VarlenPacking(cu_seqlens_q, cu_seqlens_k, max(lengths_q), max(lengths_k))


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> RecordingTorchNpu:
    recorder = RecordingTorchNpu()
    monkeypatch.setattr(npu_operators.importlib, "import_module", lambda name: {"torch_npu": recorder}[name])
    return recorder


def inputs(lengths_q: list[int], lengths_k: list[int], num_heads: int, num_kv_heads: int) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(lengths_q), num_heads), *[(sum(lengths_k), num_kv_heads)] * 2, (sum(lengths_q), num_heads)]
    return [torch.randn(*shape, D, generator=generator) for shape in shapes]


@pytest.mark.usefixtures("fused")
@pytest.mark.parametrize("own", [TorchOperators(), AscendOperators()], ids=["sdpa", "npu_stand_in"])
@pytest.mark.parametrize(
    ("causal", "num_heads", "num_kv_heads"),
    [(True, 2, 2), (True, 6, 2), (False, 4, 2)],
    ids=["causal", "causal_grouped", "full_grouped"],
)
@pytest.mark.parametrize("pack", PACKS)
def test_equals_each_sequence_written_out(
    own: TorchOperators, causal: bool, num_heads: int, num_kv_heads: int, pack: str
) -> None:
    lengths_q, lengths_k = PACKS[pack]
    *qkv, upstream = inputs(lengths_q, lengths_k, num_heads, num_kv_heads)
    packing = packing_of(lengths_q, lengths_k)
    own_inputs = [x.clone().requires_grad_() for x in qkv]
    check_arguments(*own_inputs, packing, causal)
    output = own.varlen_attention(*own_inputs, packing, softmax_scale=SCALE, causal=causal)
    output.backward(upstream)
    exact_inputs = [x.double().requires_grad_() for x in qkv]
    exact = reference.varlen_attention(*exact_inputs, lengths_q, lengths_k, softmax_scale=SCALE, causal=causal)
    exact.backward(upstream.double())
    torch.testing.assert_close(output.double(), exact, atol=2e-6, rtol=1e-5)
    for a, b in zip(own_inputs, exact_inputs, strict=True):
        assert a.grad is not None and b.grad is not None
        torch.testing.assert_close(a.grad.double(), b.grad, atol=5e-6, rtol=1e-5)


def test_neighbouring_windows_of_one_size_share_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    def noted(q: Tensor, *args: Any) -> Tensor:
        calls.append(tuple(q.shape[:2]))
        return q

    monkeypatch.setattr(attention, "sdpa", noted)
    lengths, packing = PACKS["windows"][0], packing_of(*PACKS["windows"])
    q, k, v, _ = inputs(lengths, lengths, 2, 2)
    own = attention.sdpa_attention(q, k, v, packing, softmax_scale=SCALE, causal=False)
    assert calls == [(2, 4), (1, 2), (2, 4), (1, 2), (2, 1)] and torch.equal(own, q)


@pytest.mark.parametrize(
    ("num_sequences", "calls"), [(999, [999]), (1000, [1000]), (1001, [1000, 1]), (2003, [1000, 1000, 3])]
)
def test_the_fused_operator_gets_at_most_a_thousand_sequences(
    fused: RecordingTorchNpu, num_sequences: int, calls: list[int]
) -> None:
    lengths = [1] * num_sequences
    *qkv, _ = inputs(lengths, lengths, 1, 1)
    AscendOperators().varlen_attention(*qkv, packing_of(lengths, lengths), softmax_scale=SCALE, causal=True)
    assert [len(call.kwargs["actual_seq_qlen"]) for call in fused.calls] == calls


def test_borders_that_the_host_placed_are_not_read_back() -> None:
    placed = place_borders(RAGGED, torch.device("cpu"))
    assert torch.equal(placed, borders(RAGGED)) and placed.dtype == torch.int32
    placed[1] = 0  # not looked at any more
    assert read_borders(placed) == read_borders(borders(RAGGED))


def test_layers_share_what_is_read_from_the_borders() -> None:
    packing = packing_of(RAGGED, RAGGED)
    assert packing.borders_q is packing.borders_k is read_borders(packing.cu_seqlens_q)
    for read in (batched_calls, npu_operators._fused_calls):
        assert read(packing.cu_seqlens_q) is read(packing.cu_seqlens_q)
        assert read(borders(RAGGED)) is not read(packing.cu_seqlens_q), "another batch is read itself"


class TestFlashAttention:
    """Which calls go to flash_attn, and how; the function stands for a library that needs a GPU."""

    def call(self, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, value_width: int) -> list[Any]:
        calls: list[Any] = []

        def flash(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            calls.append((args, kwargs))
            return q

        monkeypatch.setattr(cuda, "flash_attention", lambda: flash)
        qk, v = torch.zeros(5, 2, width, dtype=dtype), torch.zeros(5, 2, value_width, dtype=dtype)
        self.packing = packing_of([2, 3], [2, 3])
        FlashOperators().varlen_attention(qk, qk, v, self.packing, softmax_scale=SCALE, causal=True)
        return calls

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_goes_there(self, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
        ((args, kwargs),) = self.call(monkeypatch, dtype, 8, 8)
        assert args[0] is self.packing.cu_seqlens_q and args[1] is self.packing.cu_seqlens_k and args[2:] == (3, 3)
        assert kwargs == {"softmax_scale": SCALE, "causal": True, "deterministic": False}

    @pytest.mark.parametrize(
        ("dtype", "width", "value_width"),
        [(torch.float32, 8, 8), (torch.bfloat16, 264, 264), (torch.bfloat16, 24, 16)],
    )
    def test_what_it_does_not_take_goes_to_sdpa(
        self, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, value_width: int
    ) -> None:
        assert self.call(monkeypatch, dtype, width, value_width) == []

    def test_a_slow_kernel_is_refused_where_it_would_be_felt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Parts of sequences, as context parallelism gathers keys, need a mask in torch; whole ones do not."""
        monkeypatch.setattr(cuda, "flash_attention", lambda: None)
        monkeypatch.setattr(cuda, "MAX_MASK", 99)

        def attend(length_q: int, length_k: int, causal: bool = True) -> None:
            q, kv = torch.zeros(length_q, 2, 8), torch.zeros(length_k, 2, 8)
            packing = packing_of([length_q], [length_k])
            FlashOperators().varlen_attention(q, kv, kv, packing, softmax_scale=SCALE, causal=causal)

        attend(9, 11)
        attend(30, 30)
        attend(9, 12, causal=False)
        with pytest.raises(InputError, match=r"mask of 108 numbers.*context_method to ulysses"):
            attend(9, 12)

    def test_without_the_library_torch_has_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
        cuda.flash_attention.cache_clear()
        assert cuda.flash_attention() is None
        assert "torch's own flash-attention" in cuda.attention_backend()
        monkeypatch.setattr(cuda, "torch_attention", lambda: None)
        assert "SDPA" in cuda.attention_backend()
        cuda.flash_attention.cache_clear()


class TestTorchsFlashAttention:
    """torch's kernel without flash_attn; it needs a GPU too, so tensors of device meta stand for its results."""

    @pytest.fixture(autouse=True)
    def alone(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(cuda, "flash_attention", lambda: None)
        monkeypatch.setattr(cuda, "_capability", lambda device: (9, 0))
        cuda.torch_attention.cache_clear()
        yield
        cuda.torch_attention.cache_clear()

    @pytest.mark.parametrize("causal", [True, False])
    def test_the_installed_torch_takes_the_call(self, monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
        """Fewer heads of keys, parts of sequences: its operator's results and gradients have the right shapes."""
        monkeypatch.setattr(cuda, "_refuse_large_masks", lambda *_: pytest.fail("not for SDPA"))
        q, k, v = (
            torch.zeros(n, h, D, dtype=torch.bfloat16, device="meta").requires_grad_()
            for n, h in ((5, 4), (7, 2), (7, 2))
        )
        packing = packing_of([2, 3], [4, 3])
        out = FlashOperators().varlen_attention(q, k, v, packing, softmax_scale=SCALE, causal=causal)
        out.sum().backward()
        assert out.shape == q.shape and out.grad_fn is not None
        assert "varlen_attn" in type(out.grad_fn).__name__
        assert all(x.grad is not None and x.grad.shape == x.shape for x in (q, k, v))

    @pytest.mark.parametrize("version", ["2.10", "2.11", "2.12"])
    def test_what_each_torch_is_told(self, monkeypatch: pytest.MonkeyPatch, version: str) -> None:
        """Functions with the keywords of three releases; 2.10's would take a scale of its own."""
        told: dict[str, Any] = {}
        unlimited = (-1, -1)

        def of_2_10(query: Tensor, *_: Any, is_causal: bool = False) -> Tensor:
            pytest.fail("it cannot be told the scale")

        def of_2_11(query: Tensor, *_: Any, scale: float = 0.0, window_size: tuple[int, int] = unlimited) -> Tensor:
            told.update(scale=scale, window_size=window_size)
            return query

        def of_2_12(query: Tensor, *_: Any, scale: float, window_size: Any, enable_gqa: bool = False) -> Tensor:
            told.update(scale=scale, window_size=window_size, enable_gqa=enable_gqa)
            return query

        functions: dict[str, Any] = {"2.10": of_2_10, "2.11": of_2_11, "2.12": of_2_12}
        monkeypatch.setattr(varlen, "varlen_attn", functions[version])
        function = cuda.torch_attention()
        assert (function is None) == (version == "2.10")
        if function is not None:
            x, cu_seqlens = torch.zeros(5, 2, D), borders([2, 3])
            function(x, x, x, cu_seqlens, cu_seqlens, 3, 3, softmax_scale=SCALE, causal=True, deterministic=False)
            expected = {"scale": SCALE, "window_size": (-1, 0)}
            assert told == expected | ({"enable_gqa": True} if version == "2.12" else {})

    @pytest.mark.parametrize(
        ("dtype", "width", "capability"),
        [
            (torch.float32, 8, (9, 0)),
            (torch.bfloat16, 12, (9, 0)),
            (torch.float16, 264, (9, 0)),
            (torch.float16, 8, (7, 5)),
        ],
    )
    def test_what_it_does_not_take(
        self, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, width: int, capability: tuple[int, int]
    ) -> None:
        monkeypatch.setattr(cuda, "_capability", lambda device: capability)
        x = torch.zeros(5, 2, width, dtype=dtype)
        assert cuda._packed_attention(x, x) is None


GOOD: dict[str, Any] = {
    "q": torch.zeros(5, 4, D),
    "k": torch.zeros(5, 2, D),
    "v": torch.zeros(5, 2, D),
    "cu_seqlens_q": borders([2, 3]),
    "cu_seqlens_k": borders([2, 3]),
    "max_seqlen_q": 3,
    "max_seqlen_k": 3,
    "softmax_scale": SCALE,
    "causal": True,
}


def test_the_facade_asks_the_platform_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def varlen_attention(*args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    own = types.SimpleNamespace(varlen_attention=varlen_attention)
    monkeypatch.setattr(platform, "current", lambda: types.SimpleNamespace(operators=own))
    (q, k, v, packing), kwargs = operators.varlen_attention(**GOOD)
    assert q is GOOD["q"] and k is GOOD["k"] and v is GOOD["v"]
    assert packing == VarlenPacking(GOOD["cu_seqlens_q"], GOOD["cu_seqlens_k"], 3, 3)
    assert kwargs == {"softmax_scale": SCALE, "causal": True}


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"q": torch.zeros(1, 5, 4, D)}, r"takes \[tokens, heads, width\]"),
        ({"v": torch.zeros(5, 4, D)}, "keys and values need equal"),
        ({"k": torch.zeros(5, 2, D + 1)}, "queries and keys equal width"),
        ({"q": torch.zeros(5, 3, D)}, "multiple of the key heads"),
        ({"q": torch.zeros(5, 4, D, dtype=torch.bfloat16)}, "one dtype"),
        ({"cu_seqlens_q": torch.tensor([0, 2, 5])}, "must be int32"),
        ({"cu_seqlens_q": torch.tensor([[0, 2, 5]], dtype=torch.int32)}, "must be int32"),
        ({"cu_seqlens_q": torch.tensor([2, 5], dtype=torch.int32)}, "begin with 0"),
        ({"cu_seqlens_q": torch.tensor([0], dtype=torch.int32)}, "begin with 0"),
        ({"cu_seqlens_k": torch.tensor([0, 5, 2, 5], dtype=torch.int32)}, "rise by every sequence's length"),
        ({"cu_seqlens_k": torch.tensor([0, 2, 2, 5], dtype=torch.int32)}, "at least one token each"),
        ({"cu_seqlens_q": borders([2, 2])}, "end at 4 queries, 5 keys, of 5 and 5"),
        ({"cu_seqlens_q": borders([2, 2, 1])}, "queries have 3 sequences, keys 2"),
        ({"max_seqlen_k": 2}, "less than the longest sequence, 3 and 3"),
        ({"cu_seqlens_k": borders([3, 2])}, "at least as many keys as queries"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, Any], sentence: str) -> None:
    check: Callable[..., Tensor] = operators.varlen_attention
    with pytest.raises(ValueError, match=sentence):
        check(**(GOOD | wrong))


lengths_strategy = st.one_of(
    st.lists(st.integers(1, 300), min_size=1, max_size=60),
    st.lists(st.integers(1, 6), min_size=1, max_size=200),
)


@settings(max_examples=150, deadline=None)
@given(lengths_strategy)
def test_groups_cover_every_position_once_with_little_padding(lengths: list[int]) -> None:
    groups = length_groups(lengths)
    covered = torch.cat([group.indices_BQ[group.valid_BQ] for group in groups])
    assert covered.sort().values.tolist() == list(range(sum(lengths)))
    rows = [row[valid] for g in groups for row, valid in zip(g.indices_BQ, g.valid_BQ, strict=True)]
    spans = sorted((int(row[0]), int(row[-1]) + 1) for row in rows)
    assert spans == list(pairwise(borders(lengths))), "a row is one whole sequence"
    assert all(torch.equal(row, torch.arange(int(row[0]), int(row[-1]) + 1)) for row in rows)
    for group in groups:
        assert group.is_padded == (not group.valid_BQ.all())
        assert float((~group.valid_BQ).float().mean()) <= MAX_PADDING + 1e-6
        # a padded position repeats a token of its own sequence and stands behind every valid one
        assert (group.valid_BQ.int().diff(dim=1) <= 0).all()
        starts = group.indices_BQ[:, :1]
        assert ((group.indices_BQ - starts) < group.valid_BQ.sum(1, keepdim=True)).all()


@pytest.mark.parametrize(
    ("lengths", "num_groups"), [([1] * 1000, 1), ([17] * 8, 1), ([90, 100, 95, 88], 1), ([1, 100], 2)]
)
def test_similar_lengths_share_a_call(lengths: list[int], num_groups: int) -> None:
    assert len(length_groups(lengths)) == num_groups
