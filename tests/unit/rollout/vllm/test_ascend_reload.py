"""A reload of experts as vllm-ascend 0.23 holds them, through vLLM's own layer-wise reload and our worker methods."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

reload = pytest.importorskip("vllm.model_executor.model_loader.reload", reason="vLLM is not installed")

from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase  # noqa: E402

from mega_rl.rollout.vllm.worker_extension import WeightReceiver  # noqa: E402

NAME = "experts.w13_weight"


class TurnedAtLoading(QuantizeMethodBase):
    """As vllm-ascend's method for unquantised experts: [E, rows, D] becomes [E, D, rows]."""

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None: ...

    def apply(self, layer: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("nothing is computed here")

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        turned = layer.w13_weight.data.transpose(1, 2).contiguous()
        layer.w13_weight = nn.Parameter(turned, requires_grad=False)


class Model(nn.Module):
    def __init__(self, weights_ERD: Tensor) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.w13_weight = nn.Parameter(torch.empty_like(weights_ERD), requires_grad=False)
        self.experts.quant_method = TurnedAtLoading()
        reload.record_metadata_for_reloading(self)
        self.experts.w13_weight.data.copy_(weights_ERD)
        self.experts.quant_method.process_weights_after_loading(self.experts)

    def load_weights(self, weights: Any) -> set[str]:
        for name, tensor in weights:
            parameter = dict(self.named_parameters())[name]
            parameter.weight_loader(parameter, tensor)
        return {NAME}

    def wake_up(self) -> None:
        """What vllm-ascend's worker does to experts when it wakes up."""
        self.experts.w13_weight = nn.Parameter(self.experts.w13_weight.transpose(1, 2), requires_grad=False)


class Npu(nullcontext):
    """Stands for ``torch.device("npu")``, which there is only with torch_npu."""

    type = "npu"


@pytest.mark.parametrize("rows", [6, 4], ids=["wide", "square"])
def test_experts_that_woke_up_are_reloaded_into_the_memory_that_the_engine_works_with(rows: int) -> None:
    old, new = torch.rand(2, rows, 4), torch.rand(2, rows, 4)
    model, worker = Model(old), WeightReceiver()
    worker.device = Npu()  # type: ignore[assignment]
    worker.model_runner = SimpleNamespace(get_model=lambda: model, model_config=None)
    address = model.experts.w13_weight.data_ptr()
    for weights in (old, new):
        model.wake_up()
        worker.receiver_begin_update()
        worker.receiver_begin_reload()
        worker.receiver_load(iter([(NAME, weights)]))
        worker.receiver_finish_reload()
        assert torch.equal(model.experts.w13_weight, weights.transpose(1, 2))
        assert model.experts.w13_weight.is_contiguous(), "the kernels take no view"
        assert model.experts.w13_weight.data_ptr() == address, "captured graphs read the old memory"
