"""A matrix product and an attention call on the device, against the host.

Letters: T tokens, H query heads, K key/value heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mega_rl import platform
from mega_rl.doctor.probes import report

LENGTHS = (5, 128, 67)  # of the packed sequences, tokens
NUM_HEADS, NUM_KEY_HEADS, WIDTH = 8, 2, 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def matmul_error(device: torch.device, dtype: torch.dtype) -> float:
    """Largest error of a product of two [512, 512], in units of the largest value of the host's float64 product."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator).to(dtype) for _ in range(2))
    exact = a.double() @ b.double()
    return float(((a.to(device) @ b.to(device)).cpu().double() - exact).abs().max() / exact.abs().max())


def reference_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Causal attention within each packed sequence, written out: softmax(q k / sqrt(D)) v. [T, H, D]."""
    group = q_THD.shape[1] // k_TKD.shape[1]
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in (q_THD, k_TKD, v_TKD)), strict=True):
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
        is_hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        outputs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(is_hidden, -torch.inf).softmax(-1), v))
    return torch.cat(outputs)


def attention_error(device: torch.device) -> float:
    """Largest difference between ``platform.varlen_attention`` in bfloat16 and the reference in float32 on the host."""
    generator = torch.Generator().manual_seed(1)
    num_tokens = sum(LENGTHS)
    q, k, v = (
        torch.randn(num_tokens, heads, WIDTH, generator=generator).bfloat16()
        for heads in (NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS)
    )
    ends = torch.tensor((0, *LENGTHS)).cumsum(0).int().to(device)
    out = platform.varlen_attention(
        q.to(device),
        k.to(device),
        v.to(device),
        ends,
        ends,
        max(LENGTHS),
        max(LENGTHS),
        softmax_scale=WIDTH**-0.5,
        causal=True,
    )
    return float((out.cpu().float() - reference_attention(q.float(), k.float(), v.float(), LENGTHS)).abs().max())


def main() -> None:
    device = platform.current().set_device(0)
    report(matmul={name: matmul_error(device, dtype) for name, dtype in DTYPES.items()})
    report(attention=attention_error(device))


if __name__ == "__main__":
    main()
