"""Import vLLM as the rollout engine does: which platform does it believe to be on?"""

from __future__ import annotations

from mega_rl import platform
from mega_rl.doctor.probes import report
from mega_rl.rollout.vllm.start.resolved_platform import resolved_platform

found = resolved_platform(platform.current().name)
report(version=found.version, device_type=found.device_type, implementation=found.implementation)
