"""Which platform vLLM resolves to: vLLM's plugins choose it when vLLM is imported."""

from __future__ import annotations

from dataclasses import dataclass

from mega_rl.rollout.vllm.start.environment import set_environment


@dataclass(frozen=True)
class ResolvedPlatform:
    version: str  # of vLLM
    device_type: str  # torch's name, "" if no plugin claimed the machine
    implementation: str  # for example "vllm_ascend.platform.NPUPlatform"


def resolved_platform(device_type: str) -> ResolvedPlatform:
    """Import vLLM with the environment of an engine on ``device_type``."""
    set_environment(device_type)
    import vllm
    from vllm.platforms import current_platform

    implementation = f"{type(current_platform).__module__}.{type(current_platform).__qualname__}"
    return ResolvedPlatform(vllm.__version__, str(current_platform.device_type), implementation)
