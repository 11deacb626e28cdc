"""Choosing a platform, and what the CPU one fixes for Megatron-core. Each test runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from mega_rl import platform
from mega_rl.errors import InputError
from tests.launching.launch import REPO, Launched, run_copy

SAFE = {"MEGA_RL_PLATFORM": ""}


def python(code: str, **env: str) -> Launched:
    return run_copy(code, env={**SAFE, **env})


SELECT = "from mega_rl import platform; print('chosen', platform.select({name!r}).name)"


@pytest.mark.parametrize(
    ("name", "env", "chosen"),
    [("cpu", {}, "cpu"), ("auto", {"MEGA_RL_PLATFORM": "cpu"}, "cpu"), ("cpu", {"MEGA_RL_PLATFORM": "npu"}, "cpu")],
)
def test_the_key_comes_before_the_variable(name: str, env: dict[str, str], chosen: str) -> None:
    assert f"chosen {chosen}" in python(SELECT.format(name=name), **env).check().stdout


@pytest.mark.parametrize(
    ("name", "env", "sentence"),
    [
        ("tpu", {}, "platform.name is 'tpu': choose one of"),
        ("auto", {"MEGA_RL_PLATFORM": "gpu"}, "the environment variable MEGA_RL_PLATFORM is 'gpu': choose one of"),
        ("npu", {}, "platform.name is 'npu', but torch_npu is not installed: install"),
    ],
)
def test_what_is_not_there_is_refused(name: str, env: dict[str, str], sentence: str) -> None:
    launched = python(SELECT.format(name=name), **env)
    assert launched.returncode != 0 and sentence in launched.stdout


def test_only_the_cpus_memory_is_the_hosts() -> None:
    assert {name: p.has_own_memory for name, p in platform.PLATFORMS.items()} == {
        "npu": True,
        "cuda": True,
        "cpu": False,
    }


def test_one_process_has_one_platform() -> None:
    code = "from mega_rl import platform as p; assert p.select('cpu') is p.select('auto') is p.current()"
    python(code).check()


def test_a_users_own_environment_wins() -> None:
    code = SELECT.format(name="cpu") + "; import os; print('kept', os.environ['CUDA_DEVICE_MAX_CONNECTIONS'])"
    assert "kept 7" in python(code, CUDA_DEVICE_MAX_CONNECTIONS="7").check().stdout


def test_the_environment_is_shown_with_whose_value_it_is() -> None:
    code = "from mega_rl import platform as p; p.select('cpu'); print(*p.environment_report(), sep='\\n')"
    lines = python(code, CUDA_DEVICE_MAX_CONNECTIONS="7", TORCHDYNAMO_DISABLE="1").check().stdout.splitlines()
    assert lines[0].startswith("platform cpu: environment")
    assert lines[1].split()[:3] == ["CUDA_DEVICE_MAX_CONNECTIONS", "7", "yours"] and len(lines) == 3


def test_torch_does_not_import_a_vendors_extension_by_itself() -> None:
    code = "import mega_rl, os; print('autoload', os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'])"
    for own, expected in ({"TORCH_DEVICE_BACKEND_AUTOLOAD": "1"}, "1"), ({}, "0"):
        environment = {k: v for k, v in os.environ.items() if k != "TORCH_DEVICE_BACKEND_AUTOLOAD"} | own
        done = subprocess.run([sys.executable, "-c", code], env=environment, cwd=REPO, capture_output=True, text=True)
        assert done.stdout.strip() == f"autoload {expected}", done.stderr


def test_deterministic_algorithms_are_torchs_own_switch() -> None:
    code = """
import torch
from mega_rl import platform as p
assert not torch.are_deterministic_algorithms_enabled()
p.select("cpu", p.ProcessRole(is_deterministic={wanted}))
assert torch.are_deterministic_algorithms_enabled() is {wanted}
assert torch.utils.deterministic.fill_uninitialized_memory is not {wanted}
"""
    for wanted in (True, False):
        python(code.format(wanted=wanted)).check()


def test_cudas_deterministic_variables_and_their_conflict() -> None:
    cuda, exact = platform.PLATFORMS["cuda"], platform.ProcessRole(is_deterministic=True)
    names = {setting.variable for setting in cuda.environment(exact)}
    added = names - {setting.variable for setting in cuda.environment(platform.ProcessRole())}
    assert added == {"CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NVTE_ALLOW_NONDETERMINISTIC_ALGO"}
    assert not cuda.check_environment(exact, {"CUBLAS_WORKSPACE_CONFIG": ":16:8"})
    assert not cuda.check_environment(platform.ProcessRole(), {"CUBLAS_WORKSPACE_CONFIG": ":0:0"})
    with pytest.raises(InputError, match="CUBLAS_WORKSPACE_CONFIG is ':0:0', but platform.deterministic is true"):
        cuda.check_environment(exact, {"CUBLAS_WORKSPACE_CONFIG": ":0:0"})


def test_generator_states_round_trip_and_no_device_is_pretended() -> None:
    code = """
import torch
from mega_rl import platform
p = platform.select("cpu"); p.prepare(); p.seed(5)
state = p.rng_state(); first = torch.rand(3); p.set_rng_state(state)
assert torch.equal(first, torch.rand(3)) and p.memory().host_peak_bytes > 1 << 20
assert not getattr(torch, "cu" + "da").is_available()
assert torch.zeros(2, device="cpu").type() == "torch.FloatTensor"
"""
    python(code).check()


def test_megatrons_generator_tracker_really_sets_states() -> None:
    code = """
import torch, torch.distributed as dist, os
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
from mega_rl.megatron.layers import compat
from megatron.core import parallel_state, tensor_parallel
dist.init_process_group("gloo"); parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
def draws(seed):
    tensor_parallel.model_parallel_cuda_manual_seed(seed)
    with tensor_parallel.get_cuda_rng_tracker().fork(): return torch.rand(4)
assert torch.equal(draws(1), draws(1)) and not torch.equal(draws(1), draws(2))
"""
    python(code).check()


def test_models_made_on_no_device_keep_their_meaning() -> None:
    """Transformers builds a model on "meta" and fills it afterwards; wrapped constructors must be seen by that."""
    code = """
import torch
from mega_rl import platform
platform.select("cpu").prepare()
with torch.device("meta"):
    assert all(f(3).is_meta for f in (torch.empty, torch.zeros, torch.ones)) and torch.tensor([1]).is_meta
"""
    python(code).check()


def test_a_new_peak_can_be_started_where_the_system_lets_it() -> None:
    code = """
from mega_rl import platform
p = platform.select("cpu"); block = b"x" * (300 << 20); del block
before = p.memory().host_peak_bytes; can = p.reset_peak_memory(); after = p.memory().host_peak_bytes
assert before > 300 << 20 and (not can or before - after > 100 << 20) and (can or before == after), (before, can, after)
"""
    python(code).check()
