"""AdamW with its step count in the parameter group, which Megatron's distributed optimizer expects of FusedAdam.

Without TransformerEngine and apex Megatron falls back to ``torch.optim.AdamW``, whose per-parameter step breaks the
loading of sharded optimizer checkpoints (a missing 'step', or one tensor shared by all parameters).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import megatron.core.optimizer
import megatron.core.optimizer.distrib_optimizer
import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


class GroupStepAdam(torch.optim.Optimizer):
    """Decoupled (AdamW, arXiv 1711.05101) or coupled Adam on torch's fused kernels; arguments as apex's FusedAdam."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        **_: Any,
    ) -> None:
        self._kernel = torch._fused_adamw_ if adam_w_mode else torch._fused_adam_
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "Megatron computes the loss itself"
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if not parameters:
                continue
            group["step"] = group.get("step", 0) + 1
            for parameter in parameters:
                if not self.state[parameter]:
                    self.state[parameter] = {name: torch.zeros_like(parameter) for name in MOMENTS}
            moments = [[self.state[p][name] for p in parameters] for name in MOMENTS]
            self._update(group, parameters, [p.grad for p in parameters], *moments)

    def _update(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        gradients: list[Tensor],
        exp_avg: list[Tensor],
        exp_avg_sq: list[Tensor],
    ) -> None:
        """Update float32 tensors in place with what their group says, its step included."""
        # the kernel only reads the step, for the bias correction
        step = torch.full((), float(group["step"]), device=parameters[0].device)
        self._kernel(
            parameters,
            gradients,
            exp_avg,
            exp_avg_sq,
            [],
            [step] * len(parameters),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
        )


def install() -> None:
    """Make Megatron's optimizers use ``GroupStepAdam`` if TransformerEngine and apex are missing."""
    optimizer, distributed = megatron.core.optimizer, megatron.core.optimizer.distrib_optimizer
    if getattr(optimizer, "USING_PYTORCH_OPTIMIZER", False):
        optimizer.Adam, optimizer.USING_PYTORCH_OPTIMIZER = GroupStepAdam, False
        distributed.Adam, distributed.HAVE_APEX_OR_TE, distributed.USING_APEX_OPTIMIZER = GroupStepAdam, True, True


@contextmanager
def used(kind: type[torch.optim.Optimizer]) -> Iterator[None]:
    """Optimizers that Megatron builds inside are of this class, whatever is installed; after ``install``."""
    homes: tuple[Any, ...] = (megatron.core.optimizer, megatron.core.optimizer.distrib_optimizer)
    before = [home.Adam for home in homes]
    for home in homes:
        home.Adam = kind
    try:
        yield
    finally:
        for home, own in zip(homes, before, strict=True):
            home.Adam = own
