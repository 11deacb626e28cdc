"""TRL's trainers, step by step: their batch, their loss, their optimizer. What a step of ours is compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


def settings(
    kind: type[Any],
    directory: Path,
    batch_size: int,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    **own: Any,
) -> Any:
    """A configuration of TRL for steps on a CPU in float32, all of one batch.

    Args:
        kind: TRL's class.
        own: what this kind has besides.
    """
    return kind(
        output_dir=str(directory / "trl"),
        per_device_train_batch_size=batch_size,
        gradient_checkpointing=False,
        learning_rate=lr,
        adam_beta1=betas[0],
        adam_beta2=betas[1],
        weight_decay=weight_decay,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        bf16=False,
        max_steps=1000,
        **own,
    )


class TrlPeer:
    """A trainer of TRL that makes one step when it is told to."""

    def __init__(self, trainer: Any, clip: float) -> None:
        self.trainer, self._clip = trainer, clip
        self.batch = next(iter(trainer.get_train_dataloader()))
        self.optimizer = trainer.create_optimizer()
        self.model = trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1  # what its own loop would have set

    def step(self) -> float:
        """One optimizer step; returns the loss before it."""
        loss = self.trainer.training_step(self.model, dict(self.batch))
        torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], self._clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss)
