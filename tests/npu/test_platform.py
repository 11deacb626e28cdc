"""Platform npu on pretended devices: what it refuses, binds and counts, and when its environment stands."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch

from mega_rl.errors import InputError
from mega_rl.platform.npu import NpuPlatform
from tests.launching.launch import REPO, Launched, run
from tests.npu.platforms import NEEDS_MINDSPEED
from tests.unit.platform.test_mindspeed import packages  # noqa: F401 - a fixture
from tests.unit.tools.test_train import command, config  # noqa: F401 - a fixture

MASK = "ASCEND_RT_VISIBLE_DEVICES"


def python(code: str, **env: str) -> Launched:
    return run([sys.executable, "-c", code], timeout=200, env=env)


@pytest.mark.parametrize("mask", ["0,1", "0"])
def test_devices_of_the_mask_are_usable(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MASK, mask)
    assert NpuPlatform().absence() is None


def test_a_mask_with_absent_devices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MASK, "0,1,5")
    with pytest.raises(InputError, match=f"{MASK} is '0,1,5', but of these 5 is not there .* `npu-smi info` lists"):
        NpuPlatform().absence()


def test_a_run_with_absent_devices_ends_with_one_sentence(config: Path) -> None:  # noqa: F811
    launched = command(config, "platform.name=npu", env={MASK: "0,1,5"})
    assert launched.returncode == 2
    errors = [line for line in launched.stdout.splitlines() if "ASCEND_HOME_PATH" not in line]  # torch_npu says that
    assert len(errors) == 1 and errors[0].startswith(f"error: {MASK} is '0,1,5', but of these 5 is not there"), errors


def test_an_unknown_feature_of_mindspeed_ends_the_run_with_one_sentence(config: Path, packages: Path) -> None:  # noqa: F811
    path = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    overrides = ("platform.name=npu", "platform.mindspeed.features={bufer_pad: 8}")
    argv = (sys.executable, str(REPO / "tools" / "train.py"), "--config", str(config), *overrides)
    launched = run(argv, env={"PYTHONPATH": path})
    assert launched.returncode == 2 and "Traceback" not in launched.stdout
    (error,) = [line for line in launched.stdout.splitlines() if line.startswith("error: ")]
    assert "has 'bufer_pad', which the installed MindSpeed does not know; the nearest one is 'buffer_pad'" in error


def test_a_process_is_bound_to_its_own_device_or_refused() -> None:
    assert NpuPlatform().set_device(1) == torch.device("npu", 1) and torch.npu.current_device() == 1
    with pytest.raises(InputError, match="process 2 of this host .* start at most 2"):
        NpuPlatform().set_device(2)
    NpuPlatform().set_device(0)


def test_memory_is_what_is_allocated_cached_and_there() -> None:
    here, size = NpuPlatform(), 48 << 20
    here.empty_cache()
    here.reset_peak_memory()
    before = here.memory()
    block = torch.zeros(size, dtype=torch.uint8, device="npu")
    during = here.memory()
    taken = during.device_allocated_bytes - before.device_allocated_bytes
    assert size <= taken <= size + 4096  # blocks are padded
    assert during.device_peak_bytes - before.device_peak_bytes == taken
    assert during.device_reserved_bytes >= during.device_allocated_bytes and during.device_total_bytes == 64 << 30
    del block
    after = here.memory()
    assert after.device_allocated_bytes == before.device_allocated_bytes
    assert after.device_reserved_bytes == during.device_reserved_bytes and after.device_peak_bytes >= size  # cached
    here.empty_cache()
    assert here.memory().device_reserved_bytes < during.device_reserved_bytes
    here.reset_peak_memory()
    assert here.memory().device_peak_bytes == before.device_allocated_bytes


ORDER = """
import os, sys
class Watch:
    def find_spec(self, name, path, target=None):
        if name == "torch_npu":
            print("torch_npu is looked for with", os.environ["PYTORCH_NPU_ALLOC_CONF"], os.environ["HCCL_BUFFSIZE"])
            sys.meta_path.remove(self)
os.environ.pop("PYTORCH_NPU_ALLOC_CONF", None)
from mega_rl import platform
assert "torch_npu" not in sys.modules
sys.meta_path.insert(0, Watch())
print(platform.select("npu").name, "torch_npu" in sys.modules)
print(*platform.environment_report(), sep="\\n")
"""


def test_the_environment_stands_before_torch_npu_is_imported() -> None:
    out = python(ORDER, HCCL_BUFFSIZE="512").check().stdout
    assert "torch_npu is looked for with expandable_segments:True 512" in out and "npu True" in out
    (line,) = [line.split() for line in out.splitlines() if line.split()[:1] == ["HCCL_BUFFSIZE"]]
    assert line[1:3] == ["512", "yours"]


def test_without_a_device_the_platform_says_so() -> None:
    code = "from mega_rl import platform; platform.select('npu')"
    launched = python(code, NPU_STUB_DEVICES="0", ASCEND_RT_VISIBLE_DEVICES="0")
    assert launched.returncode != 0 and "npu-smi info` lists" in launched.stdout


REAL = """
import torch
from mega_rl import platform
from mega_rl.config.schema.device import MindSpeedConfig
platform.select("npu", None, MindSpeedConfig(mode="required", features={"use_flash_attn": True}))
import torch.distributed as dist
compiled, all_reduce = torch.compile, dist.all_reduce
print(*platform.prepare(), sep="\\n")
assert torch.compile is compiled and dist.all_reduce is dist.distributed_c10d.all_reduce is all_reduce
"""


@NEEDS_MINDSPEED
def test_the_real_mindspeed_patches_megatron() -> None:
    out = python(REAL).check().stdout
    assert "MindSpeed " in out and " replaced " in out and "megatron.core.transformer.transformer_config: " in out
    assert out.count(" by MindSpeed (") == 6 and "attention by MindSpeed (use_flash_attn: mindspeed.core" in out
