"""One list of calls of ``platform.dispatch``, for every test that compares a platform's kernels with the references.

Letters as in ``platform.operators.torch_kernels``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from mega_rl.platform import dispatch as operators
from mega_rl.platform.operators import reference

D = 8
SCALE = 0.4  # no kernel's default
RAGGED = (7, 19, 1, 30, 41, 3, 12, 1, 12, 5)
MANY = (1,) * 999 + (3, 3, 3)  # more than one fused call takes
COUNTS = (4, 0, 7, 1)  # rows of every expert
Tensors = Mapping[str, Tensor]
TOLERANCES = {torch.float32: (5e-6, 1e-5), torch.bfloat16: (4e-2, 2e-2)}  # absolute, relative


@dataclass(frozen=True)
class OperatorCase:
    """One call and what it should give."""

    name: str
    inputs: dict[str, Tensor]  # floating-point ones get a gradient
    own: Callable[[Tensors], Tensor]
    expected: Callable[[Tensors], Tensor]
    npu_operators: tuple[str, ...]  # that run on device npu, in forward and backward, each at least once


@dataclass(frozen=True)
class Outcome:
    output: Tensor
    gradients: dict[str, Tensor]


def borders(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def operator_cases(dtype: torch.dtype) -> list[OperatorCase]:
    """Every operator, on CPU tensors; a long pack only once."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    cases = [*_attention_cases(random), *_layer_cases(random), *_expert_cases(random)]
    if dtype != torch.float32:
        return cases
    return [*cases, _varlen("varlen_more_than_a_call", random, MANY, MANY, causal=True)]


Random = Callable[..., Tensor]


def _varlen(
    name: str, random: Random, lengths_q: Sequence[int], lengths_k: Sequence[int], causal: bool, value_width: int = D
) -> OperatorCase:
    num_q, num_k = sum(lengths_q), sum(lengths_k)
    inputs = {
        "q": random(num_q, 4, D),
        "k": random(num_k, 2, D),
        "v": random(num_k, 2, value_width),
        "cu_q": borders(lengths_q),
        "cu_k": borders(lengths_k),
    }
    longest = max(lengths_q), max(lengths_k)
    return OperatorCase(
        name,
        inputs,
        lambda x: operators.varlen_attention(
            x["q"], x["k"], x["v"], x["cu_q"], x["cu_k"], *longest, softmax_scale=SCALE, causal=causal
        ),
        lambda x: reference.varlen_attention(
            x["q"], x["k"], x["v"], lengths_q, lengths_k, softmax_scale=SCALE, causal=causal
        ),
        ("npu_fusion_attention", "npu_fusion_attention_grad"),
    )


def _attention_cases(random: Random) -> list[OperatorCase]:
    return [
        _varlen("varlen_causal", random, RAGGED, RAGGED, causal=True),
        _varlen("varlen_full", random, RAGGED, RAGGED, causal=False),
        _varlen("varlen_more_keys", random, (3, 1, 20, 7), (3, 9, 33, 8), causal=True),
        _varlen("varlen_narrow_values", random, RAGGED, RAGGED, causal=True, value_width=D // 2),
    ]


def _rms_norm(name: str, random: Random, *shape: int) -> OperatorCase:
    return OperatorCase(
        name,
        {"x": random(*shape), "weight": random(shape[-1])},
        lambda x: operators.rms_norm(x["x"], x["weight"], 1e-5),
        lambda x: reference.rms_norm(x["x"], x["weight"], 1e-5),
        ("npu_rms_norm", "npu_rms_norm_backward"),
    )


def _add_rms_norm(random: Random) -> OperatorCase:
    inputs = {"x": random(5, 1, 16), "residual": random(5, 1, 16), "weight": random(16)}
    return OperatorCase(
        "add_rms_norm",
        inputs,
        lambda x: torch.stack(operators.add_rms_norm(x["x"], x["residual"], x["weight"], 1e-5)),
        lambda x: torch.stack(reference.add_rms_norm(x["x"], x["residual"], x["weight"], 1e-5)),
        ("npu_add_rms_norm", "npu_rms_norm_backward"),
    )


def _layer_cases(random: Random) -> list[OperatorCase]:
    angles = torch.linspace(0, 3, 6)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.02]).repeat(2)
    tables = [table.to(random(1).dtype) for table in (angles.cos(), angles.sin())]
    return [
        _rms_norm("rms_norm", random, 5, 1, 16),
        _rms_norm("rms_norm_of_heads", random, 5, 1, 4, 8),
        _add_rms_norm(random),
        OperatorCase(
            "swiglu",
            {"x": random(5, 1, 14)},
            lambda x: operators.swiglu(x["x"]),
            lambda x: reference.swiglu(x["x"]),
            ("npu_swiglu", "npu_swiglu_backward"),
        ),
        OperatorCase(
            "swiglu_weighted",
            {"x": random(5, 14), "weights": random(5).float()},
            lambda x: operators.swiglu(x["x"], x["weights"]),
            lambda x: reference.swiglu(x["x"], x["weights"]),
            ("npu_swiglu", "npu_swiglu_backward"),
        ),
        OperatorCase(
            "rotary",
            {"x": random(6, 3, D)},
            lambda x: operators.rotary(x["x"], *(table.to(x["x"].device) for table in tables)),
            lambda x: reference.rotary(x["x"], *tables),
            ("npu_rotary_mul", "npu_rotary_mul_backward"),
        ),
    ]


def _grouped(name: str, random: Random, counts: Sequence[int]) -> OperatorCase:
    names = [f"weight{i}" for i in range(len(counts))]
    return OperatorCase(
        name,
        {
            "x": random(sum(counts), 6),
            **{name: random(10, 6) for name in names},
            "ends": torch.tensor(counts).cumsum(0),
        },
        lambda x: operators.grouped_matmul(x["x"], [x[name] for name in names], x["ends"]),
        lambda x: reference.grouped_matmul(x["x"], [x[name] for name in names], counts),
        ("npu_grouped_matmul",) if sum(counts) else (),
    )


def _unpermute(x: Tensors) -> Tensor:
    _, order = operators.permute_tokens(x["x"].new_zeros(5, 6), x["routed"], 2)
    return operators.unpermute_tokens(x["x"], order, x["routed"])


def _expert_cases(random: Random) -> list[OperatorCase]:
    routed = torch.zeros(5, 4, dtype=torch.bool)
    for token, experts in enumerate([(0, 3), (1, 3), (0, 1), (2, 3), (0, 2)]):
        routed[token, list(experts)] = True
    return [
        _grouped("grouped_matmul", random, COUNTS),
        _grouped("grouped_matmul_of_one", random, (5,)),
        _grouped("grouped_matmul_of_nothing", random, (0, 0)),
        OperatorCase(
            "permute",
            {"x": random(5, 6), "routed": routed},
            lambda x: operators.permute_tokens(x["x"], x["routed"], 2)[0],
            lambda x: reference.permute_tokens(x["x"], x["routed"]),
            ("npu_moe_token_permute_with_routing_map", "npu_moe_token_permute_with_routing_map_grad"),
        ),
        OperatorCase(
            "unpermute",
            {"x": random(10, 6), "routed": routed},
            _unpermute,
            lambda x: reference.unpermute_tokens(x["x"], x["routed"]),
            ("_npu_moe_token_unpermute_with_routing_map", "npu_moe_token_unpermute_with_routing_map_grad"),
        ),
    ]


def outcome(call: Callable[[Tensors], Tensor], case: OperatorCase, device: str = "cpu", wide: bool = False) -> Outcome:
    """Forward and backward on a device, the results back on the CPU in float64.

    Args:
        wide: compute in float64, as the references do with what they are given.
    """
    inputs: dict[str, Tensor] = {}
    for name, x in case.inputs.items():
        x = x.double() if wide and x.is_floating_point() else x.clone()
        inputs[name] = x.to(device).requires_grad_(x.is_floating_point())
    output = call(inputs)
    gradients = {}
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16()  # exact in all
    output.backward(upstream.to(output))
    for name, x in inputs.items():
        if x.requires_grad:
            assert x.grad is not None or wide, f"no gradient for {name}"
            gradients[name] = torch.zeros_like(x) if x.grad is None else x.grad.cpu().double()
    return Outcome(output.detach().cpu().double(), gradients)


def compare(case: OperatorCase, dtype: torch.dtype, device: str = "cpu") -> float:
    """Fail where the operator of this process's platform differs from the reference; else the largest difference."""
    own, expected = outcome(case.own, case, device), outcome(case.expected, case, wide=True)
    absolute, relative = TOLERANCES[dtype]
    pairs = [(own.output, expected.output), *((own.gradients[n], g) for n, g in expected.gradients.items())]
    assert own.gradients.keys() == expected.gradients.keys()
    for a, b in pairs:
        torch.testing.assert_close(a, b, atol=absolute, rtol=relative, msg=lambda text: f"{case.name}: {text}")
    return max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)
