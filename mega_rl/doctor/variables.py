"""Environment variables: misspelled, read by nothing here, wrong, or pointing at what is not there."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator

from mega_rl import platform
from mega_rl.doctor.finding import CPU, CUDA, NPU, Check, CheckAnswer, Wanted, fail, ok, skip, warn
from mega_rl.doctor.host import Host
from mega_rl.errors import InputError
from mega_rl.platform.ascend import devices as ascend_devices

# CANN's environment-variable reference (collective communication, 8.5 and 9.0) and what torch_npu reads besides.
_HCCL = """
ALGO ALLTOALL_Z_COPY ASYNC_ERROR_HANDLING BLOCKING_WAIT BUFFSIZE CONNECT_TIMEOUT DEBUG_CONFIG DESYNC_DEBUG DETERMINISTIC
DFS_CONFIG DIAGNOSE_ENABLE ENTRY_LOG_ENABLE EVENT_TIMEOUT EXEC_TIMEOUT HOST_RDMA_ENABLE HOST_SOCKET_PORT_RANGE
IF_BASE_PORT IF_IP INTER_HCCS_DISABLE INTRA_PCIE_ENABLE INTRA_ROCE_ENABLE LOGIC_SUPERPOD_ID MULTI_QP_THRESHOLD
NPU_SOCKET_PORT_RANGE OP_BASE_FFTS_MODE_ENABLE OP_EXPANSION_MODE OP_RETRY_ENABLE OP_RETRY_PARAMS P2P_DISABLE
RDMA_PCIE_DIRECT_POST_NOSTRICT RDMA_QPS_PER_CONNECTION RDMA_QP_PORT_CONFIG_PATH RDMA_RETRY_CNT RDMA_SL RDMA_TC
RDMA_TIMEOUT SOCKET_FAMILY SOCKET_IFNAME SO_PATH TRANSFER_TIMEOUT WHITELIST_DISABLE WHITELIST_FILE
"""
HCCL_VARIABLES = frozenset(f"HCCL_{name}" for name in _HCCL.split())
_ASCEND = """
ACL_OP_INIT_MODE ASCEND_AICPU_PATH ASCEND_CUSTOM_OPP_PATH ASCEND_GLOBAL_EVENT_ENABLE ASCEND_GLOBAL_LOG_LEVEL
ASCEND_HOME_PATH ASCEND_LAUNCH_BLOCKING ASCEND_OPP_PATH ASCEND_PROCESS_LOG_PATH ASCEND_RT_VISIBLE_DEVICES
ASCEND_SLOG_PRINT_TO_STDOUT ASCEND_TOOLKIT_HOME ASCEND_VISIBLE_DEVICES ASCEND_WORK_PATH ATB_HOME_PATH
ATB_LLM_LCOC_ENABLE ATB_MATMUL_SHUFFLE_K_ENABLE COMBINED_ENABLE CPU_AFFINITY_CONF INF_NAN_MODE_ENABLE LCCL_DETERMINISTIC
MULTI_STREAM_MEMORY_REUSE PYTORCH_NPU_ALLOC_CONF TASK_QUEUE_ENABLE
"""
ASCEND_VARIABLES = frozenset(_ASCEND.split())
# Variables that vllm-ascend gives up (its pull request 9064) -> the key of additional_config that stands for each.
MOVED = {
    "VLLM_ASCEND_BALANCE_SCHEDULING": "enable_balance_scheduling",
    "VLLM_ASCEND_ENABLE_CONTEXT_PARALLEL": "enable_context_parallel",
    "VLLM_ASCEND_ENABLE_FLASHCOMM1": "enable_flashcomm1",
    "VLLM_ASCEND_ENABLE_FUSED_MC2": "enable_fused_mc2",
    "VLLM_ASCEND_ENABLE_MATMUL_ALLREDUCE": "enable_matmul_allreduce",
    "VLLM_ASCEND_ENABLE_MLAPO": "enable_mlapo",
    "VLLM_ASCEND_FLASHCOMM2_PARALLEL_SIZE": "enable_flashcomm2_parallel_size",
    "VLLM_ASCEND_FUSION_OP_TRANSPOSE_KV_CACHE_BY_BLOCK": "enable_transpose_kv_cache_by_block",
}
LIKENESS = 0.88  # how like a known name a slip must be; families other than HCCL's have many unlisted names
# Families whose libraries are not loaded on a platform -> whoever sets them expected another one.
FOREIGN = {
    CPU: ("HCCL_", "NCCL_"),
    CUDA: ("HCCL_", "LCCL_"),
    NPU: ("NCCL_", "PYTORCH_CUDA_ALLOC_CONF"),
}


# Set by guides of other trainers or for older engines; neither a run here nor its vLLM reads them.
UNREAD = ("USE_MODELSCOPE_HUB", "USE_OPTIMIZED_MODEL", "VERL_DISABLE_DYNAMO", "VLLM_ATTENTION_BACKEND", "VLLM_USE_V1")


def misspelled(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    envs = host.package_file("vllm-ascend", "vllm_ascend/envs.py") or ""
    engine = frozenset(re.findall(r'^\s+"(VLLM_ASCEND_\w+)":', envs, re.MULTILINE))
    trouble = False
    for name in sorted(host.environ):
        if name in MOVED:
            trouble = True
            when = "the releases of vllm-ascend after this one" if name in engine else "newer releases of vllm-ascend"
            yield warn(
                f"{name} is read by nothing in {when}",
                f"unset it, and set rollout.vllm.additional_config.{MOVED[name]} in the run's file",
            )
            continue
        if name.startswith("HCCL_"):
            known, likeness = HCCL_VARIABLES, 0.0
        elif name.startswith("VLLM_ASCEND_") and engine:
            known, likeness = engine, 0.0
        else:
            known, likeness = ASCEND_VARIABLES, LIKENESS
        near = difflib.get_close_matches(name, known, n=1, cutoff=likeness)
        if name in known or not near:
            continue
        trouble = True
        yield warn(f"{name} is no known variable and probably read by nothing", f"set {near[0]}, or unset {name}")
    if not trouble:
        yield ok("no misspelled variable")


def read_by_nothing(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    foreign = [name for name in sorted(host.environ) if name.startswith(FOREIGN[wanted.platform])]
    own_mask = platform.PLATFORMS[wanted.platform].visible_devices_variable
    masks = [p.visible_devices_variable for p in platform.PLATFORMS.values() if p.visible_devices_variable]
    foreign += [mask for mask in masks if mask != own_mask and own_mask and mask in host.environ]
    for name in foreign:
        do = f"unset {name}" if name not in masks else f"unset {name}; devices are chosen with {own_mask}"
        yield warn(f"{name}={host.environ[name]} is read by nothing on the {wanted.platform} platform", do)
    unread = [name for name in UNREAD if name in host.environ]
    for name in unread:
        yield warn(
            f"{name}={host.environ[name]} is of another trainer or an older engine, and read by nothing here",
            f"unset {name}",
        )
    if not foreign and not unread:
        yield ok("no variable of another platform, and none that only other trainers read")


def _is_count(value: str) -> bool:
    return value.isdigit() and int(value) > 0


def _expandable(value: str) -> bool:
    return re.search(r"expandable_segments\s*:\s*true", value, re.IGNORECASE) is not None


NO_SLEEP = "an engine that sleeps on the trainer's devices gives no memory back"
# (platforms, variable, whether a value is trouble, state, what is wrong, fix)
Rule = tuple[tuple[str, ...], str, Callable[[str], bool], Callable[[str, str], CheckAnswer], str, str]
VALUES: tuple[Rule, ...] = (
    ((CUDA,), "PYTORCH_CUDA_ALLOC_CONF", _expandable, warn, NO_SLEEP, "unset it, or set rollout.placement=separate"),
    (
        (NPU,),
        "TORCH_DEVICE_BACKEND_AUTOLOAD",
        lambda value: value == "1",
        warn,
        "torch_npu is imported before its variables are set",
        "unset TORCH_DEVICE_BACKEND_AUTOLOAD",
    ),
    (
        (NPU,),
        "HCCL_CONNECT_TIMEOUT",
        lambda value: not _is_count(value) or int(value) < 600,
        warn,
        "in seconds; engines and trainer need longer than that to meet at start-up",
        "export HCCL_CONNECT_TIMEOUT=1800",
    ),
    (
        (NPU,),
        "HCCL_BUFFSIZE",
        lambda value: not _is_count(value),
        fail,
        "it is a whole number of MiB",
        "export HCCL_BUFFSIZE=256",
    ),
    (
        (NPU,),
        "TASK_QUEUE_ENABLE",
        lambda value: value not in ("1", "2"),
        warn,
        "operators are launched one by one, which is for debugging",
        "unset TASK_QUEUE_ENABLE",
    ),
    (
        (NPU,),
        "ASCEND_GLOBAL_LOG_LEVEL",
        lambda value: value in ("0", "1"),
        warn,
        "debug logs slow every operator down and fill the disk",
        "export ASCEND_GLOBAL_LOG_LEVEL=3",
    ),
    (
        (CUDA, NPU),
        "CUDA_DEVICE_MAX_CONNECTIONS",
        lambda value: value != "1",
        warn,
        "Megatron-core stops with it where tensor parallelism overlaps its communication",
        "export CUDA_DEVICE_MAX_CONNECTIONS=1",
    ),
    (
        (CPU, CUDA, NPU),
        "OMP_NUM_THREADS",
        lambda value: not _is_count(value),
        warn,
        "it is a whole number of threads",
        "unset OMP_NUM_THREADS",
    ),
)


def refused(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    """What a run itself would refuse or warn of, one variable at a time."""
    here = platform.PLATFORMS[wanted.platform]
    for name in sorted(set(host.environ) - set(ascend_devices.NOT_MASKS)):  # the check `device mask` speaks of those
        refusals: list[str] = []
        notes: list[str] = []
        for role in wanted.roles:
            try:
                notes += here.check_environment(role, {name: host.environ[name]})
            except InputError as error:
                refusals.append(str(error))
        for sentence in (refusals + notes)[:1]:
            found, _, fix = sentence.rpartition(": ")
            yield fail(found, fix) if len(refusals) == len(wanted.roles) else warn(found, fix)


def values(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    answers = list(refused(host, wanted))
    trouble = bool(answers)
    yield from answers
    for platforms, name, is_wrong, state, why, fix in VALUES:
        if wanted.platform in platforms and name in host.environ and is_wrong(host.environ[name]):
            trouble = True
            yield state(f"{name}={host.environ[name]}: {why}", fix)
    if host.environ.get("HCCL_WHITELIST_DISABLE") == "0" and not host.environ.get("HCCL_WHITELIST_FILE"):
        trouble = True
        fix = "export HCCL_WHITELIST_DISABLE=1, or name the list in HCCL_WHITELIST_FILE"
        yield fail("HCCL_WHITELIST_DISABLE=0 without a list: no host may connect", fix)
    for part in re.split(r"[:\s]+", host.environ.get("LD_PRELOAD", "")):
        if part and "/" in part and not host.glob(part):
            trouble = True
            yield warn(f"LD_PRELOAD names {part}, which is not there", "unset LD_PRELOAD, or take that file out of it")
    if not trouble:
        yield ok("no wrong value")


def defaults(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    """What a run sets by itself is no trouble if it is missing; a user's own value wins, and is worth knowing."""
    settings = platform.PLATFORMS[wanted.platform].environment(wanted.roles[0])
    own = [
        f"{setting.variable}={host.environ[setting.variable]} (default {setting.value})"
        for setting in settings
        if host.environ.get(setting.variable, setting.value) != setting.value
    ]
    yield ok(f"a run sets {len(settings)} defaults; yours differ in {', '.join(own) if own else 'none'}")


def proxies(host: Host, wanted: Wanted) -> Iterator[CheckAnswer]:
    def value(name: str) -> str:
        return host.environ.get(name.lower()) or host.environ.get(name.upper()) or ""

    proxied = [name for name in ("http_proxy", "https_proxy", "all_proxy") if value(name)]
    if not proxied:
        yield skip("no proxy is set")
        return
    spared = {part.strip() for part in value("no_proxy").split(",")}
    if "*" in spared or {"localhost", "127.0.0.1"} <= spared:
        yield ok(f"{', '.join(proxied)}, localhost spared")
    else:
        yield warn(
            f"{', '.join(proxied)} without localhost in no_proxy: calls between processes of this host go to the proxy",
            "export no_proxy=localhost,127.0.0.1,$no_proxy",
        )


CHECKS = (
    Check("misspelled", "environment", misspelled),
    Check("read by nothing", "environment", read_by_nothing),
    Check("values", "environment", values),
    Check("defaults", "environment", defaults),
    Check("proxies", "environment", proxies),
)
