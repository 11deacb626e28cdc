"""What each platform's operators keep for the backward pass, and what theirs takes while it runs: for memory plans.

The counts are of the kernels that this package chooses. ``benchmarks/training/memory.py`` measures those of the CPU;
those of the accelerators follow from what their kernels' backward passes are given.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OperatorMemory:
    """What the operators of one platform keep."""

    has_fused_norm: bool  # keeps its input and a number per row; else float32 copies of the input and of the normalised
    attention_outputs: int  # copies of the attention's output: the kernel's own, and one if parts are put together
    softmax_floats: int  # float32 numbers that attention keeps of every token and query head
    keeps_rotated: bool  # rotation keeps what it rotates
    swiglu_temporaries: int  # widths of the gate that SwiGLU's backward takes besides its results
    tile_logits: int | None  # most float32 logits of one tile of the loss; None: trainer.logprob_chunk_tokens only
    tile_tokens: int | None
    engine_block_tokens: int  # of one block of the rollout engine's key-value memory, vLLM's default


OPERATOR_MEMORY = {
    # torch's composite RMSNorm; SDPA one sequence at a time, its outputs put together afterwards
    "cpu": OperatorMemory(False, 2, 1, False, 1, 512 * 1024, 512, 128),
    # torch's fused RMSNorm; flash attention over all sequences keeps its output and log-sum-exp
    "cuda": OperatorMemory(True, 1, 1, False, 1, None, None, 16),
    # npu_rms_norm, npu_fusion_attention (softmax maximum and sum, 8 equal numbers each), npu_rotary_mul, npu_swiglu
    "npu": OperatorMemory(True, 1, 16, True, 0, None, None, 128),
}
