"""What Megatron-core's ``gradient_accumulation_fusion`` calls, by torch alone.

Letters: T rows, D inputs, F outputs of a linear layer.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mega_rl.platform.operators import products


class WeightGradients:
    """Stands for apex's ``fused_weight_gradient_mlp_cuda``: adds a product to a gradient buffer in one operation."""

    @staticmethod
    def wgrad_gemm_accum_fp32(rows_TD: Tensor, grad_TF: Tensor, total_FD: Tensor) -> None:
        """``total += grad.t() @ rows``; the total is float32."""
        if rows_TD.device.type == "cuda" and rows_TD.dtype != torch.float32:
            torch.addmm(total_FD, grad_TF.t(), rows_TD, out_dtype=torch.float32, out=total_FD)
        else:
            products.weight_gradient(grad_TF, rows_TD, total_FD)
