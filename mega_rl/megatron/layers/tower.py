"""The module of a vision tower: transformers' own, with our operators where its own are slow.

| in transformers | here |
|---|---|
| attention with one call for every window and a wait for the device in every layer | the platform's packed attention |
| patches by a convolution in three dimensions whose steps are as long as its kernel | the matrix product that it is |
| RMSNorm in six operations | the platform's |

A fused operator takes all windows in one call; where attention is SDPA, neighbours of one size share a call. The
parameters keep their names. Letters: P patches, C numbers of a patch, H heads, D hidden width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mega_rl.models.vision import Tower
from mega_rl.platform import dispatch as operators
from mega_rl.platform.operators.attention import read_borders

Rotate = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # (queries, keys, cosines, sines)


class _Attention(torch.nn.Module):
    """Every patch sees those of its window, or of its picture."""

    def __init__(self, theirs: Any, rotate: Rotate) -> None:
        super().__init__()
        self.qkv, self.proj, self._num_heads, self._rotate = theirs.qkv, theirs.proj, theirs.num_heads, rotate

    def forward(
        self, hidden_states: Tensor, cu_seqlens: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any
    ) -> Tensor:
        q_PHD, k_PHD, v_PHD = self.qkv(hidden_states).unflatten(-1, (3, self._num_heads, -1)).unbind(1)
        q_PHD, k_PHD = self._rotate(q_PHD, k_PHD, *position_embeddings)
        longest = read_borders(cu_seqlens).longest
        scale = q_PHD.shape[-1] ** -0.5
        seen_PHD = operators.varlen_attention(
            q_PHD, k_PHD, v_PHD, cu_seqlens, cu_seqlens, longest, longest, softmax_scale=scale, causal=False
        )
        return self.proj(seen_PHD.flatten(1))


class _PatchEmbedding(torch.nn.Module):
    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.proj = theirs.proj

    def forward(self, patches_PC: Tensor) -> Tensor:
        weight = self.proj.weight.flatten(1)
        return F.linear(patches_PC.to(weight.dtype), weight, self.proj.bias)


class _RMSNorm(torch.nn.Module):
    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.weight, self._epsilon = theirs.weight, theirs.variance_epsilon

    def forward(self, x: Tensor) -> Tensor:
        return operators.rms_norm(x, self.weight, self._epsilon)


def tower_module(tower: Tower) -> Any:
    """A tower of these sizes, its weights not yet filled, which is called as that of transformers."""
    from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
    from transformers.models.qwen3_vl import modeling_qwen3_vl

    is_third = tower.kind == "qwen3_vl"
    module = _third(tower) if is_third else _second(tower)
    rotate = (modeling_qwen3_vl if is_third else modeling_qwen2_5_vl).apply_rotary_pos_emb_vision
    module.patch_embed = _PatchEmbedding(module.patch_embed)
    for block in module.blocks:
        block.attn = _Attention(block.attn, rotate)
        if not is_third:
            block.norm1, block.norm2 = _RMSNorm(block.norm1), _RMSNorm(block.norm2)
    if not is_third:
        module.merger.ln_q = _RMSNorm(module.merger.ln_q)
    return module


def _sizes(tower: Tower) -> dict[str, Any]:
    return {
        "depth": tower.num_blocks,
        "hidden_size": tower.hidden_size,
        "intermediate_size": tower.ffn_size,
        "num_heads": tower.num_heads,
        "in_channels": tower.channels,
        "patch_size": tower.patch,
        "temporal_patch_size": tower.frames,
        "spatial_merge_size": tower.merge,
        "out_hidden_size": tower.out_size,
        "attn_implementation": "sdpa",  # asked for nothing: transformers' own choice would need other packages
    }


def _second(tower: Tower) -> Any:
    from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

    own = {"window_size": tower.window, "fullatt_block_indexes": list(tower.whole_blocks)}
    return Qwen2_5_VisionTransformerPretrainedModel(Qwen2_5_VLVisionConfig(**_sizes(tower), **own))


def _third(tower: Tower) -> Any:
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

    own = {"num_position_embeddings": tower.num_positions, "deepstack_visual_indexes": list(tower.deepstack)}
    return Qwen3VLVisionModel(Qwen3VLVisionConfig(**_sizes(tower), **own))
