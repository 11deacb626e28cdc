"""What every operator of ``platform.dispatch`` computes, written out in float32 (float64 for float64 inputs).

Tests and the environment check compare the platforms' kernels with these; nothing here is meant to be fast.
Gradients are autograd's.
Letters as in ``torch_kernels``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def attention(
    q_QHD: Tensor, k_PKD: Tensor, v_PKD: Tensor, *, softmax_scale: float, is_visible_QP: Tensor | None = None
) -> Tensor:
    """Softmax attention of one sequence: [Q, H, D of the values]. Source: arXiv 1706.03762, section 3.2.1."""
    repeats = q_QHD.shape[1] // k_PKD.shape[1]
    k_PHD, v_PHD = (_wide(x).repeat_interleave(repeats, dim=1) for x in (k_PKD, v_PKD))
    scores_HQP = torch.einsum("qhd,phd->hqp", _wide(q_QHD), k_PHD) * softmax_scale
    if is_visible_QP is not None:
        scores_HQP = scores_HQP.masked_fill(~is_visible_QP, float("-inf"))
    return torch.einsum("hqp,phd->qhd", scores_HQP.softmax(-1), v_PHD)


def causal_mask(num_queries: int, num_keys: int, device: torch.device | None = None) -> Tensor:
    """bool [Q, P]: a query sees the keys up to its own position, the last query being at the last key."""
    return torch.ones(num_queries, num_keys, dtype=torch.bool, device=device).tril(num_keys - num_queries)


def varlen_attention(
    q_THD: Tensor,
    k_SKD: Tensor,
    v_SKD: Tensor,
    lengths_q: Sequence[int],
    lengths_k: Sequence[int],
    *,
    softmax_scale: float,
    causal: bool,
) -> Tensor:
    """One sequence after the other: [T, H, D of the values]."""
    parts = zip(q_THD.split(list(lengths_q)), *(x.split(list(lengths_k)) for x in (k_SKD, v_SKD)), strict=True)
    outputs = []
    for q, k, v in parts:
        visible = causal_mask(len(q), len(k), q.device) if causal else None
        outputs.append(attention(q, k, v, softmax_scale=softmax_scale, is_visible_QP=visible))
    return torch.cat(outputs)


def rms_norm(x: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
    """``x / sqrt(mean(x^2) + epsilon) * weight``. Source: arXiv 1910.07467, equation 4."""
    x = _wide(x)
    return x * (x.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt() * _wide(weight_D)


def add_rms_norm(x: Tensor, residual: Tensor, weight_D: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """The norm of the sum, rounded to the dtype of its parts first as it is kept in that, and the sum."""
    total = (_wide(x) + _wide(residual)).to(x.dtype)
    return rms_norm(total, weight_D, epsilon), _wide(total)


def swiglu(gate_and_up: Tensor, weights_T: Tensor | None = None) -> Tensor:
    """``gate * sigmoid(gate) * up`` times the weight of the row. Source: arXiv 2002.05202, equation 6."""
    gate, up = _wide(gate_and_up).chunk(2, -1)
    product = gate * gate.sigmoid() * up
    return product if weights_T is None else product * _wide(weights_T)[:, None]


def rotary(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Pairs (i, i + D/2) of every head, turned. Source: arXiv 2104.09864, equation 34, in GPT-NeoX's pairing."""
    x, cos, sin = _wide(x_THD), _wide(cos_TD)[:, None], _wide(sin_TD)[:, None]
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos[..., :half] - b * sin[..., :half], b * cos[..., half:] + a * sin[..., half:]), dim=-1)


def grouped_matmul(x_ND: Tensor, weights_FD: Sequence[Tensor], counts: Sequence[int]) -> Tensor:
    """The rows of every expert times its weight, transposed: [N, F]."""
    owners = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts)).tolist()
    if not owners:
        return _wide(x_ND) @ _wide(weights_FD[0]).t()
    return torch.stack([_wide(weights_FD[owner]) @ _wide(x) for x, owner in zip(x_ND, owners, strict=True)])


def permute_tokens(x_TD: Tensor, is_routed_TE: Tensor) -> Tensor:
    """A row for every (expert, token) that the map holds, by expert and then by token: [N, D]."""
    chosen = [(e, t) for e in range(is_routed_TE.shape[1]) for t in range(len(x_TD)) if is_routed_TE[t, e]]
    return torch.stack([_wide(x_TD[t]) for _, t in chosen])


def unpermute_tokens(rows_ND: Tensor, is_routed_TE: Tensor) -> Tensor:
    """The rows of every token, added up: [T, D]."""
    tokens = [t for e in range(is_routed_TE.shape[1]) for t in range(len(is_routed_TE)) if is_routed_TE[t, e]]
    rows = _wide(rows_ND)
    sums = [rows[[n for n, owner in enumerate(tokens) if owner == t]].sum(0) for t in range(len(is_routed_TE))]
    return torch.stack(sums)
