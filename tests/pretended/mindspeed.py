"""A package in the place of MindSpeed, which is on no package index: names and arguments of its operators.

``tests/contract/mindspeed_interface`` holds them against a record of the real one. What the functions do, by
torch_npu, is written anew from MindSpeed's pages of them. Its adaptor patches nothing of MindSpeed's: it makes
Megatron-core run on the device as mega_rl does without MindSpeed.
"""

from __future__ import annotations

from pathlib import Path

VERSION = "0.16.0"
BASICS = {
    "__init__": "",
    "features_manager/__init__": "from mindspeed.features_manager.features_manager import MindSpeedFeaturesManager\n",
    "features_manager/features_manager": """
class MindSpeedFeaturesManager:
    FEATURES_LIST = []
    @classmethod
    def register_features_args(cls, parser):
        for feature in cls.FEATURES_LIST:
            feature.register_args(parser)
""",
    "patch_utils": """
class MindSpeedPatchesManager:
    patches_info = {}
    @staticmethod
    def register_patch(orig_func_name, new_func=None, force_patch=False, create_dummy=False):
        raise NotImplementedError("a pretended MindSpeed patches nothing")
""",
    "args_utils": """
import argparse
def get_mindspeed_args(get_defaults=False):
    return argparse.Namespace()
""",
    "megatron_adaptor": """
import torch_npu
from mega_rl.platform import accelerator
accelerator.install("npu", torch_npu.npu)
""",
}
OPERATORS = {
    "op_builder/builder": """
class MindSpeedOpBuilder:
    def __init__(self, name):
        self.name = name
    def load(self, verbose=True):
        raise RuntimeError(f"nothing compiles {self.name} here")
""",
    "core/transformer/flash_attention/flash_attention/adaptor": """
import torch_npu
def dot_product_attention_forward_impl(self, query, key, value, attention_mask, attn_mask_type=None,
                                       attention_bias=None, packed_seq_params=None):
    assert attention_bias is None and isinstance(packed_seq_params.cu_seqlens_q, list)
    return torch_npu.npu_fusion_attention(
        query, key, value, query.shape[1], "TND", pse=None, padding_mask=None, atten_mask=attention_mask,
        scale=self.softmax_scale, pre_tockens=self.config.pre_tockens, next_tockens=self.config.next_tockens,
        keep_prob=1 - self.attention_dropout.p, inner_precise=0, sparse_mode=self.config.sparse_mode,
        actual_seq_qlen=packed_seq_params.cu_seqlens_q, actual_seq_kvlen=packed_seq_params.cu_seqlens_kv)[0]
""",
    "core/fusions/fused_rms_norm": """
import torch_npu
class RMSNorm:
    def fused_rmsnorm(self, x):
        assert not self.config.layernorm_zero_centered_gamma
        return torch_npu.npu_rms_norm(x, self.weight, epsilon=self.eps)[0]
""",
    "core/fusions/fused_bias_swiglu": """
import torch_npu
def fused_swiglu(x):
    return torch_npu.npu_swiglu(x, dim=-1)
""",
    "ops/npu_rotary_position_embedding": """
from mindspeed.op_builder.builder import MindSpeedOpBuilder
rope_op_builder = MindSpeedOpBuilder("npu_rotary_position_embedding")
def npu_rotary_position_embedding(x, cos, sin, mode=0):
    return rope_op_builder.load().npu_rotary_position_embedding(x, cos, sin, mode)
""",
    "ops/gmm": """
from mindspeed.op_builder.builder import MindSpeedOpBuilder
class GMMFunction:
    builder = MindSpeedOpBuilder("grouped_matmul")
""",
    "te/pytorch/permutation": """
import torch, torch_npu
class MoePermuteMaskMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, routing_map, probs=None, num_out_tokens=None, drop_and_pad=False):
        rows, to_probs, order = torch_npu.npu_moe_token_permute_with_routing_map(
            tokens, routing_map, probs=probs, num_out_tokens=num_out_tokens, drop_and_pad=drop_and_pad)
        ctx.order, ctx.routing_map, ctx.num_tokens, ctx.drop_and_pad = order, routing_map, len(tokens), drop_and_pad
        return rows, to_probs, order
    @staticmethod
    def backward(ctx, to_rows, to_probs, _):
        to_tokens, _ = torch_npu.npu_moe_token_permute_with_routing_map_grad(
            to_rows, None, ctx.order, ctx.routing_map, ctx.routing_map.shape[1], ctx.num_tokens, ctx.drop_and_pad)
        return to_tokens, None, None, None, None
class MoeUnpermuteMaskMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, permuted_tokens, sorted_indices, restore_shape, probs=None, routing_map=None, drop_and_pad=False):
        assert probs is None
        tokens = torch_npu._npu_moe_token_unpermute_with_routing_map(
            permuted_tokens, sorted_indices, restore_shape, probs=None, routing_map=routing_map,
            drop_and_pad=drop_and_pad)[0]
        ctx.order, ctx.routing_map, ctx.shape = sorted_indices, routing_map, restore_shape
        ctx.drop_and_pad = drop_and_pad
        return tokens
    @staticmethod
    def backward(ctx, to_tokens):
        to_rows, _ = torch_npu.npu_moe_token_unpermute_with_routing_map_grad(
            to_tokens, ctx.order, ctx.order, routing_map=ctx.routing_map, permuted_tokens=None, probs=None,
            drop_and_pad=ctx.drop_and_pad, restore_shape=ctx.shape)
        return to_rows, None, None, None, None, None
""",
}


def write(folder: Path, without: str = "", version: str = VERSION) -> Path:
    """The package in a folder that is then on the path of a process; without one of its modules, if named."""
    for name, text in (BASICS | OPERATORS).items():
        if name != without:
            file = folder / "mindspeed" / f"{name}.py"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
    metadata = folder / f"mindspeed-{version}.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mindspeed\nVersion: {version}\n")
    return folder
