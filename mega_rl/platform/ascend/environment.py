"""Environment variables of a process on Ascend: what is set and why, and what must not be set. Pure functions.

Sources: the environment variable references of CANN 8.5 to 9.1 and of Ascend Extension for PyTorch, and the checks of
vLLM-Ascend 0.23 itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from mega_rl.errors import InputError
from mega_rl.platform.ascend.devices import misnamed_masks, read_mask
from mega_rl.platform.contract.base import ProcessRole, Setting

ALLOCATOR = "PYTORCH_NPU_ALLOC_CONF"
NZ = "VLLM_ASCEND_ENABLE_NZ"
BLOCKING = "ASCEND_LAUNCH_BLOCKING"
QUEUE = "TASK_QUEUE_ENABLE"
_ALWAYS = (
    Setting("CUDA_DEVICE_MAX_CONNECTIONS", "1", "Megatron-core asks for it under this name on every device"),
    Setting("HCCL_CONNECT_TIMEOUT", "1800", "seconds; with 120 the ranks give up while an engine is still starting"),
    Setting("HCCL_EXEC_TIMEOUT", "3600", "seconds that a collective waits for its slowest rank"),
    Setting("HCCL_BUFFSIZE", "256", "MiB of each communicator's buffer; 200 is slower for large gradients"),
    Setting("CPU_AFFINITY_CONF", "1", "binds each process to the cores next to its device"),
)
_DETERMINISTIC = (
    Setting("HCCL_DETERMINISTIC", "true", "platform.deterministic: reductions add in a fixed order"),
    Setting("LCCL_DETERMINISTIC", "1", "platform.deterministic: the same for collectives within one host"),
    Setting("ATB_MATMUL_SHUFFLE_K_ENABLE", "0", "platform.deterministic: matmuls of the engine add in a fixed order"),
    Setting("ATB_LLM_LCOC_ENABLE", "0", "platform.deterministic: matmuls of the engine do not overlap collectives"),
)
_PORTS_WHY = "the system picks ports: trainer and engine on one device would want the same ones"
_PORTS = (
    Setting("HCCL_HOST_SOCKET_PORT_RANGE", "auto", _PORTS_WHY),
    Setting("HCCL_NPU_SOCKET_PORT_RANGE", "auto", _PORTS_WHY),
)


def settings(role: ProcessRole) -> list[Setting]:
    """The variables of a process, before anything of CANN or torch_npu is loaded."""
    found = list(_ALWAYS)
    if role.replays_graphs:
        found.append(Setting(QUEUE, "1", "level 2 does not go with the engine's graph capture"))
    else:
        found.append(Setting(QUEUE, "2", "kernels are prepared and launched by a second thread"))
    if role.is_deterministic:
        found += _DETERMINISTIC
    if role.trains and not role.engine_sleeps:
        found.append(Setting(ALLOCATOR, "expandable_segments:True", "less fragmentation; no engine sleeps here"))
    if role.samples:
        found.append(Setting(NZ, "0", "weights are rewritten in place, which the NZ layout would garble"))
    if role.may_share_device:
        found += _PORTS
    return found


def check(role: ProcessRole, environ: Mapping[str, str]) -> list[str]:
    """Sentences about variables that do not do what they were set for.

    Args:
        environ: before or after ``settings`` were applied; they never conflict with themselves.

    Raises:
        InputError: a malformed device mask, or values with which the run would fail or be wrong, a clause for each.
    """
    read_mask(environ)
    refused = _conflicts(role, environ)
    if refused:
        raise InputError("; ".join(refused))
    notes = misnamed_masks(environ)
    if role.replays_graphs and environ.get(QUEUE) == "2":
        notes.append(
            f"{QUEUE} is 2, which does not go with the engine's graph capture: unset it, or set "
            "rollout.vllm.enforce_eager to true"
        )
    if role.is_deterministic and "HCCL_OP_EXPANSION_MODE" in environ:
        mode = environ["HCCL_OP_EXPANSION_MODE"]
        if mode == "AIV":
            notes.append(
                "HCCL_OP_EXPANSION_MODE is AIV, whose larger reductions are not deterministic: unset it, or set "
                "platform.deterministic to false"
            )
    return notes


def _conflicts(role: ProcessRole, environ: Mapping[str, str]) -> list[str]:
    found = []
    if role.engine_sleeps and _has_expandable_segments(environ.get(ALLOCATOR, "")):
        found.append(
            f"{ALLOCATOR} is {environ[ALLOCATOR]!r}, with which a sleeping engine gives no memory back: unset it, or "
            "set rollout.vllm.enable_sleep_mode to false"
        )
    if role.samples and environ.get(NZ, "0") != "0":
        found.append(
            f"{NZ} is {environ[NZ]!r}, but weights are rewritten in place, which the NZ layout garbles: set it to 0"
        )
    if role.replays_graphs and environ.get(BLOCKING, "0") != "0":
        found.append(
            f"{BLOCKING} is {environ[BLOCKING]!r}, with which graphs cannot be captured: unset it, or set "
            "rollout.vllm.enforce_eager to true"
        )
    if role.is_deterministic:
        for setting in _DETERMINISTIC:
            own = environ.get(setting.variable, setting.value)
            is_strict = setting.variable == "HCCL_DETERMINISTIC" and own.lower() == "strict"
            if own.lower() != setting.value and not is_strict:
                found.append(
                    f"{setting.variable} is {own!r}, but platform.deterministic is true: unset it, or set "
                    "platform.deterministic to false"
                )
    return found


def _has_expandable_segments(text: str) -> bool:
    """Whether an allocator configuration, ``key:value,key:value``, turns them on."""
    pairs = dict(part.split(":", 1) for part in text.replace(" ", "").split(",") if ":" in part)
    return pairs.get("expandable_segments", "").lower() == "true"
