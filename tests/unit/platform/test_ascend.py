"""Ascend without a device: masks and ids, the environment of every role, versions, and what a missing library says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.errors import InputError
from mega_rl.platform import environment
from mega_rl.platform.ascend import (
    devices as ascend_devices,
    environment as ascend_environment,
    install as ascend_install,
)
from mega_rl.platform.ascend.devices import MASK
from mega_rl.platform.contract import versions
from mega_rl.platform.contract.base import ProcessRole, Setting
from mega_rl.platform.roles import engine_role, trainer_role

SLEEPING = ProcessRole(samples=True, engine_sleeps=True, replays_graphs=True)


@pytest.mark.parametrize(("text", "ids"), [(None, None), ("0", (0,)), ("2,5,7", (2, 5, 7))])
def test_a_mask_is_read(text: str | None, ids: tuple[int, ...] | None) -> None:
    assert ascend_devices.read_mask({} if text is None else {MASK: text}) == ids


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "write device ids joined by commas"),
        ("1, 2,3", "write device ids joined by commas without blanks"),  # CANN would see device 1 alone
        ("0,1,", "write device ids joined by commas"),
        ("all", "write device ids joined by commas"),
        ("-1", "write device ids joined by commas"),
        ("0,2,2", "names a device twice"),
        ("3,2,1", "ascending order only: set it to 1,2,3"),
    ],
)
def test_a_mask_that_cann_reads_otherwise_is_refused(text: str, sentence: str) -> None:
    with pytest.raises(InputError, match=MASK) as caught:
        ascend_devices.read_mask({MASK: text})
    assert sentence in str(caught.value) and repr(text) in str(caught.value)


def test_absent_devices_are_named() -> None:
    ascend_devices.check_visible((0, 7), num_visible=2, num_on_host=8)
    ascend_devices.check_visible(None, num_visible=0)
    for mask, visible, on_host, absent in (((0, 8, 9), 1, 8, "8,9 are not there"), ((1, 3), 1, None, "3 is not there")):
        with pytest.raises(InputError, match=absent):
            ascend_devices.check_visible(mask, visible, on_host)


def test_more_processes_than_devices_are_refused() -> None:
    ascend_devices.check_local_rank(1, 2, (4, 5))
    with pytest.raises(InputError, match=r"process 2 .* the 2 of ASCEND_RT_VISIBLE_DEVICES=4,5; start at most 2"):
        ascend_devices.check_local_rank(2, 2, (4, 5))
    with pytest.raises(InputError, match="there is 1 on this host"):
        ascend_devices.check_local_rank(1, 1, None)


def test_physical_ids_become_indices_of_the_mask() -> None:
    mask = (2, 5, 7)
    assert [ascend_devices.logical_id(i, mask) for i in mask] == [0, 1, 2]
    assert [ascend_devices.physical_id(i, mask) for i in range(3)] == list(mask)
    assert ascend_devices.logical_id(6, None) == ascend_devices.physical_id(6, None) == 6
    with pytest.raises(InputError, match="device 3 was assigned .* leaves it out"):
        ascend_devices.logical_id(3, mask)


def test_ray_hands_out_physical_ids() -> None:
    assert ascend_devices.ray_device(["5"], {MASK: "5"}) == 0  # Ray set the mask to the one device
    assert ascend_devices.ray_device(["5"], {MASK: "2,5,7", ascend_devices.RAY_KEEPS_MASK: "1"}) == 1
    assert ascend_devices.ray_device(["5"], {ascend_devices.RAY_KEEPS_MASK: "1"}) == 5


def test_a_variable_that_nothing_reads_is_named() -> None:
    notes = ascend_environment.check(ProcessRole(), {"NPU_VISIBLE_DEVICES": "0,1"})
    assert len(notes) == 1 and "read by nothing: set ASCEND_RT_VISIBLE_DEVICES" in notes[0]
    assert ascend_environment.check(SLEEPING, {MASK: "0,1"}) == []


def values(role: ProcessRole) -> dict[str, str]:
    settings = ascend_environment.settings(role)
    assert len({s.variable for s in settings}) == len(settings)
    return {s.variable: s.value for s in settings}


def test_only_a_process_without_a_sleeping_engine_gets_expandable_segments() -> None:
    allocator = ascend_environment.ALLOCATOR
    assert values(ProcessRole())[allocator] == "expandable_segments:True"
    assert allocator not in values(SLEEPING)
    assert allocator not in values(ProcessRole(trains=False, samples=True))  # vLLM-Ascend sets its own


def test_the_environment_follows_the_role() -> None:
    trainer, colocated = values(ProcessRole()), values(SLEEPING)
    assert (trainer["TASK_QUEUE_ENABLE"], colocated["TASK_QUEUE_ENABLE"]) == ("2", "1")
    assert values(replace(SLEEPING, replays_graphs=False))["TASK_QUEUE_ENABLE"] == "2"
    assert ("VLLM_ASCEND_ENABLE_NZ" in trainer, colocated["VLLM_ASCEND_ENABLE_NZ"]) == (False, "0")
    assert "HCCL_NPU_SOCKET_PORT_RANGE" not in colocated
    shared = values(ProcessRole(may_share_device=True))
    assert shared["HCCL_NPU_SOCKET_PORT_RANGE"] == shared["HCCL_HOST_SOCKET_PORT_RANGE"] == "auto"
    exact = values(ProcessRole(is_deterministic=True))
    assert exact.items() >= {"HCCL_DETERMINISTIC": "true", "LCCL_DETERMINISTIC": "1"}.items()
    assert exact.items() >= {"ATB_MATMUL_SHUFFLE_K_ENABLE": "0", "ATB_LLM_LCOC_ENABLE": "0"}.items()
    # Trainers and engines meet in one group, and CANN restricts AIV to inference with one group at a time.
    assert "HCCL_OP_EXPANSION_MODE" not in exact | trainer | colocated | values(engine_role(RolloutConfig(), False))


@pytest.mark.parametrize(
    "role", [ProcessRole(), SLEEPING, replace(SLEEPING, is_deterministic=True), engine_role(RolloutConfig(), True)]
)
def test_the_defaults_of_a_role_do_not_conflict_with_it(role: ProcessRole) -> None:
    assert ascend_environment.check(role, values(role)) == []


@pytest.mark.parametrize(
    ("role", "variable", "value", "fix"),
    [
        (SLEEPING, "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True", "unset it, or set rollout.vllm.enable_sleep"),
        (SLEEPING, "PYTORCH_NPU_ALLOC_CONF", "page_size:1g, expandable_segments:true", "gives no memory back"),
        (SLEEPING, "VLLM_ASCEND_ENABLE_NZ", "1", "set it to 0"),
        (engine_role(RolloutConfig(), False), "VLLM_ASCEND_ENABLE_NZ", "2", "set it to 0"),
        (SLEEPING, "ASCEND_LAUNCH_BLOCKING", "1", "rollout.vllm.enforce_eager to true"),
        (ProcessRole(is_deterministic=True), "HCCL_DETERMINISTIC", "false", "platform.deterministic to false"),
        (ProcessRole(is_deterministic=True), "ATB_LLM_LCOC_ENABLE", "1", "platform.deterministic to false"),
    ],
)
def test_a_value_with_which_the_run_would_be_wrong_is_refused(
    role: ProcessRole, variable: str, value: str, fix: str
) -> None:
    with pytest.raises(InputError, match=variable) as caught:
        ascend_environment.check(role, {variable: value})
    assert fix in str(caught.value) and repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("role", "variable", "value"),
    [
        (ProcessRole(), "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:True"),
        (SLEEPING, "PYTORCH_NPU_ALLOC_CONF", "expandable_segments:False,max_split_size_mb:256"),
        (ProcessRole(), "VLLM_ASCEND_ENABLE_NZ", "1"),  # there is no engine in this process
        (replace(SLEEPING, replays_graphs=False), "ASCEND_LAUNCH_BLOCKING", "1"),
        (ProcessRole(is_deterministic=True), "HCCL_DETERMINISTIC", "strict"),
    ],
)
def test_a_value_that_is_harmless_in_this_role_is_kept(role: ProcessRole, variable: str, value: str) -> None:
    assert ascend_environment.check(role, {variable: value}) == []


@pytest.mark.parametrize(
    ("role", "variable", "value", "fix"),
    [
        (SLEEPING, "TASK_QUEUE_ENABLE", "2", "rollout.vllm.enforce_eager"),
        (ProcessRole(is_deterministic=True), "HCCL_OP_EXPANSION_MODE", "AIV", "platform.deterministic"),
    ],
)
def test_a_value_that_is_only_unwise_is_noted(role: ProcessRole, variable: str, value: str, fix: str) -> None:
    (note,) = ascend_environment.check(role, {variable: value})
    assert variable in note and fix in note


def test_a_users_value_wins_is_shown_as_such_and_survives_a_revert() -> None:
    settings = (Setting("A_VARIABLE", "1", "reason one"), Setting("B", "22", "reason two"))
    environ = {"B": "mine"}
    applied = environment.apply(settings, environ)
    assert environ == {"A_VARIABLE": "1", "B": "mine"}
    first, second = (line.split() for line in environment.table(applied))
    assert first[:3] == ["A_VARIABLE", "1", "default"] and second[:3] == ["B", "mine", "yours"]
    environment.revert(applied, environ)
    assert environ == {"B": "mine"}


@pytest.mark.parametrize(
    ("rollout", "role"),
    [
        (RolloutConfig(), SLEEPING),
        (None, ProcessRole()),  # a stage that does not sample
        (RolloutConfig(replay="there"), ProcessRole()),
        (RolloutConfig(placement="separate"), ProcessRole(may_share_device=True)),
        (RolloutConfig(vllm={"enable_sleep_mode": False}), replace(SLEEPING, engine_sleeps=False)),
        (RolloutConfig(vllm={"enforce_eager": True}), replace(SLEEPING, replays_graphs=False)),
    ],
)
def test_a_trainers_role_follows_from_the_configuration(rollout: RolloutConfig | None, role: ProcessRole) -> None:
    assert trainer_role(rollout, is_deterministic=False) == role
    assert trainer_role(rollout, is_deterministic=True) == replace(role, is_deterministic=True)


def test_an_engine_of_its_own_does_not_sleep() -> None:
    role = engine_role(RolloutConfig(placement="separate"), is_deterministic=False)
    assert role == ProcessRole(trains=False, samples=True, replays_graphs=True, may_share_device=True)


GOOD = {
    "python": "3.11.9",
    "cann": "9.1.0",
    "torch": "2.10.0+cpu",
    "torch_npu": "2.10.0.post4",
    "megatron-core": "0.16.1",
    "mindspeed": "0.16.0",
    "vllm": "0.23.0+empty",
    "vllm-ascend": "0.23.0",
    "triton-ascend": "3.2.2",
    "transformers": "5.5.4",
    "ray": "2.60.0",
}


def test_the_known_good_combination_is_judged_so() -> None:
    assert {row.state for row in versions.table("npu", GOOD)} == {"ok"} and versions.refusals("npu", GOOD) == []


@pytest.mark.parametrize(
    ("component", "version", "failing", "sentence"),
    [
        ("torch_npu", "2.9.0", "torch_npu", "torch_npu 2.9.0 does not load with torch 2.10.0+cpu: install"),
        ("torch", "2.11.0+cpu", "torch_npu", "torch_npu 2.10.0.post4 does not load with torch 2.11.0+cpu"),
        ("torch", "2.10.0+cu128", "torch", "is a CUDA build, which torch_npu refuses: install the CPU build"),
        ("vllm", "0.28.1", "vllm-ascend", "vllm-ascend 0.23.0 is not made for vLLM 0.28.1"),
        ("mindspeed", "0.12.1", "mindspeed", "MindSpeed 0.12.1 patches another Megatron-core than 0.16.1"),
    ],
)
def test_a_pair_that_is_known_to_fail_is_refused(component: str, version: str, failing: str, sentence: str) -> None:
    found = GOOD | {component: version}
    assert any(sentence in line for line in versions.refusals("npu", found)), versions.refusals("npu", found)
    assert {row.component: row.state for row in versions.table("npu", found)}[failing] == "fails"
    assert versions.refusals("cpu", found) == []


def test_what_is_new_or_missing_is_not_called_good() -> None:
    found = GOOD | {"cann": "9.2.0", "mindspeed": None, "torch_npu": None, "torch": "2.10.1"}
    states = {row.component: row.state for row in versions.table("npu", found)}
    assert (states["cann"], states["mindspeed"], states["torch_npu"]) == ("untested", "absent", "missing")
    assert all(row.fix for row in versions.table("npu", found) if row.state not in ("ok", "absent"))


def test_this_environment_is_the_cpus_known_good_one() -> None:
    assert {row.state for row in versions.table("cpu", versions.installed())} <= {"ok", "absent"}


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("x86_64-linux/ascend_toolkit_install.info", "package_name=Ascend-cann-toolkit\nversion=9.1.0\n"),
        ("compiler/version.info", "Version=9.1.0\nversion_dir=9.1.0\n"),
    ],
)
def test_canns_version_is_read_from_its_files(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).parent.mkdir()
    (tmp_path / file).write_text(text)
    assert versions.cann_version({"ASCEND_HOME_PATH": str(tmp_path)}) == "9.1.0"
    assert versions.cann_version({"ASCEND_HOME_PATH": str(tmp_path / "x86_64-linux")}) in ("unknown", "9.1.0", None)
    assert versions.cann_version({}) is None and versions.cann_version({"ASCEND_HOME_PATH": "/nowhere"}) is None


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ("libascendcl.so: cannot open shared object file: No such file", "CANN is missing (libascendcl.so"),
        (
            "libascend_hal.so: cannot open shared object file: No such file",
            "the Ascend driver is missing (libascend_hal",
        ),
        ("libatb.so: cannot open shared object file: No such file", "NNAL is missing (libatb.so"),
        ("/x/libascendcl.so: undefined symbol: aclrtFoo", "CANN does not load"),
    ],
)
def test_what_the_loader_says_becomes_a_sentence(message: str, sentence: str) -> None:
    assert ascend_install.explain(message).startswith(sentence)
    assert "\n" not in ascend_install.explain(message + "\nmore")


def test_cann_is_missing_here_or_loads() -> None:
    missing = ascend_install.missing_library()
    assert missing is None or "CANN is missing (libascendcl.so is not found): install it" in missing
