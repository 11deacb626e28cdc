"""A matrix product and an attention call on the device, against the host."""

from __future__ import annotations

import torch

from mega_rl import platform
from mega_rl.doctor.probes import report
from mega_rl.platform import dispatch as operators
from mega_rl.platform.operators import reference
from mega_rl.types import DTYPES

LENGTHS = (5, 128, 67)  # tokens of the packed sequences
NUM_HEADS, NUM_KEY_HEADS, WIDTH = 8, 2, 64


def matmul_error(device: torch.device, dtype: torch.dtype) -> float:
    """Largest error of a product of two [512, 512], in units of the largest value of the host's float64 product."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator).to(dtype) for _ in range(2))
    exact = a.double() @ b.double()
    return float(((a.to(device) @ b.to(device)).cpu().double() - exact).abs().max() / exact.abs().max())


def attention_error(device: torch.device) -> float:
    """Largest difference between the platform's causal attention in bfloat16 and the float32 reference on the host."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(sum(LENGTHS), num_heads, WIDTH, generator=generator).bfloat16()
        for num_heads in (NUM_HEADS, NUM_KEY_HEADS, NUM_KEY_HEADS)
    )
    scale, longest = WIDTH**-0.5, max(LENGTHS)
    exact = reference.varlen_attention(q, k, v, LENGTHS, LENGTHS, softmax_scale=scale, causal=True)
    ends = torch.tensor((0, *LENGTHS)).cumsum(0).int().to(device)
    q, k, v = (x.to(device) for x in (q, k, v))
    out = operators.varlen_attention(q, k, v, ends, ends, longest, longest, softmax_scale=scale, causal=True)
    return float((out.cpu().float() - exact).abs().max())


def main() -> None:
    device = platform.current().set_device(0)
    report(matmul={name: matmul_error(device, dtype) for name, dtype in DTYPES.items()})
    report(attention=attention_error(device))


if __name__ == "__main__":
    main()
