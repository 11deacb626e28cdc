"""Every configuration that the repository ships loads, and says what it runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mega_rl.config import load_config

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"
SHIPPED = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml"))


def test_the_named_ones_are_shipped() -> None:
    named = {"quickstart.yaml", "quickstart_sft.yaml", "grpo_gsm8k_cpu.yaml", "grpo_gsm8k_qwen2.5_0.5b.yaml"}
    assert named <= set(SHIPPED)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_config_loads(name: str) -> None:
    config = load_config(CONFIGS / name, [])
    assert config.trainer.total_steps is not None or config.trainer.total_epochs is not None
    assert config.trainer.stage in ("rl", "sft")
