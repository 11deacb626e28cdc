"""A part of the schema: the device, and what a run asks of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from mega_rl.config.schema.limits import Text, above, between

Dtype = Literal["float32", "bfloat16"]
Kernels = Literal["torch", "compiled", "liger"]
Layers = Literal["local", "transformer_engine"]


@dataclass
class MindSpeedConfig:
    """MindSpeed's operators, and its patches of Megatron-core; ``npu`` only."""

    # auto: use MindSpeed if it is installed and fits | required: stop if not | off: call torch_npu's operators directly
    mode: Literal["auto", "required", "off"] = "auto"
    # MindSpeed's own argument names (dashes or underscores) and values, checked against the installed MindSpeed; fused
    # operators are on unless false
    features: dict[str, Any] = field(default_factory=dict)


@dataclass
class PlatformConfig:
    """The device, and what a run asks of it."""

    # cpu, cuda or npu; auto: what the environment variable MEGA_RL_PLATFORM says, else the first that is present
    name: Text = "auto"
    # CPU threads per rank; null: this host's cores / its ranks
    num_threads: Annotated[int, between(1, 4096)] | None = None
    # 10^12 operations per second that one device reaches at most in bfloat16 matrix products, for throughput/mfu; null:
    # what is known of the chip
    peak_tflops: Annotated[float, above(0, 1 << 20)] | None = None
    deterministic: bool = False  # the same run on the same devices gives the same bits; slower
    # RMSNorm, also with the sum before it, SwiGLU and rotary embedding on CUDA: torch: torch's kernels; compiled: fused
    # by torch.compile; liger: the kernels of the liger-kernel package
    kernels: Kernels = "torch"
    # linear layers of attention and dense MLPs in the trainer: local: Megatron's own; transformer_engine: those of
    # NVIDIA's TransformerEngine, fused with the norm before them; CUDA only, where that package is installed
    layers: Layers = "local"
    mindspeed: MindSpeedConfig = field(default_factory=MindSpeedConfig)
