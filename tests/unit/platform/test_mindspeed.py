"""MindSpeed's keys, tried on a small package that stands in for MindSpeed, which is on no package index.

It registers features, parses a command line and patches as MindSpeed core_r0.16.0 does, but it is not MindSpeed.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config.schema.device import MindSpeedConfig
from mega_rl.errors import InputError
from mega_rl.platform.ascend import mindspeed
from mega_rl.platform.contract import versions
from tests.launching.launch import run

FEATURES = """
LAYER = "megatron.core.transformer.transformer_layer"
class Feature:
    def __init__(self, name, options, patches, level=2):
        self.feature_name, self.options, self.patches, self.optimization_level = name, options, patches, level
    def register_args(self, parser):
        for option, keywords in self.options.items():
            parser.add_argument(option, **keywords)
    def is_need_apply(self, args):
        return self.optimization_level == 0 or getattr(args, self.feature_name, None)
    def pre_register_patches(self, manager, args):
        pass
    def register_patches(self, manager, args):
        for name in self.patches:
            manager.register_patch(name, lambda *a, **k: "patched")

class MindSpeedFeaturesManager:
    FEATURES_LIST = [
        Feature("basic", {}, ["torch.compile", "victim.Class.method", "victim.function"], level=0),
        Feature("torch", {}, ["torch.distributed.all_reduce"], level=0),
        Feature("buffer_pad", {"--buffer-pad": {"type": int}}, ["victim.pad"]),
        Feature("zero_memory", {"--zero-memory": {"choices": ["disable", "level0"]}}, ["victim.memory"]),
        Feature("reuse_param", {"--reuse-param": {"action": "store_true"}}, ["victim.reuse"]),
        Feature("profile", {"--profile": {"action": "store_true"}}, ["megatron.training.training.train_step"]),
        Feature("swap", {"--swap": {"action": "store_true"}}, [LAYER + ".TransformerLayer.forward"]),
        Feature("context_parallel_size", {"--context-parallel-algo": {"type": str}}, ["victim.context"]),
        Feature("use_flash_attn", {}, ["megatron.core.transformer.dot_product_attention.DotProductAttention.forward"]),
    ]
    @classmethod
    def register_features_args(cls, parser):
        for feature in cls.FEATURES_LIST:
            feature.register_args(parser)
"""
PATCHES = """
import importlib, sys
class Patch:
    def __init__(self, name, function):
        self.orig_module_name, self.orig_func_name = name.rsplit(".", 1)
        module, _, inner = self.orig_module_name.partition(".Class")
        self.orig_module = importlib.import_module(module)
        if _:
            self.orig_module = self.orig_module.Class
        self.orig_func = getattr(self.orig_module, self.orig_func_name)
        setattr(self.orig_module, self.orig_func_name, function)
        for other in list(sys.modules.values()):  # who has imported the function by its name
            if getattr(other, "__dict__", {}).get(self.orig_func_name) is self.orig_func:
                setattr(other, self.orig_func_name, function)
        self.is_applied = True
class MindSpeedPatchesManager:
    patches_info = {}
    @classmethod
    def register_patch(cls, name, function):
        cls.patches_info[name] = Patch(name, function)
"""
ARGUMENTS = """
import argparse, functools
from mindspeed.features_manager import MindSpeedFeaturesManager
@functools.cache
def get_mindspeed_args():
    parser = argparse.ArgumentParser()
    MindSpeedFeaturesManager.register_features_args(parser)
    return parser.parse_known_args()[0]
"""
ADAPTOR = """
import logging, sys
from mindspeed.args_utils import get_mindspeed_args
from mindspeed.features_manager import MindSpeedFeaturesManager
from mindspeed.patch_utils import MindSpeedPatchesManager
logging.getLogger().setLevel("DEBUG")
print("adaptor", sys.argv[1:])
for feature in MindSpeedFeaturesManager.FEATURES_LIST:
    if feature.is_need_apply(get_mindspeed_args()):
        feature.register_patches(MindSpeedPatchesManager, get_mindspeed_args())
"""
VICTIM = "class Class:\n    def method(self):\n        pass\nfunction = pad = memory = reuse = context = print\n"


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in and a package for it to patch."""
    folder = tmp_path_factory.mktemp("packages")
    package = folder / "mindspeed"
    package.mkdir()
    files = {"__init__": "", "features_manager": FEATURES, "patch_utils": PATCHES, "args_utils": ARGUMENTS}
    for name, text in (files | {"megatron_adaptor": ADAPTOR}).items():
        (package / f"{name}.py").write_text(text)
    (folder / "victim.py").write_text(VICTIM)
    metadata = folder / "mindspeed-0.16.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mindspeed\nVersion: 0.16.0\n")
    return folder


@pytest.fixture(scope="module")
def manager(packages: Path) -> Any:
    names: dict[str, Any] = {}
    exec(FEATURES, names)  # noqa: S102 - our own text
    return names["MindSpeedFeaturesManager"]


@pytest.mark.parametrize(
    ("features", "words"),
    [
        ({}, []),
        ({"buffer_pad": 64, "zero_memory": "level0"}, ["--buffer-pad", "64", "--zero-memory", "level0"]),
        ({"reuse_param": True}, ["--reuse-param"]),
        ({"reuse_param": False}, []),
        ({"use_flash_attn": True}, []),  # mega_rl's own operators
    ],
)
def test_features_become_mindspeeds_command_line(manager: Any, features: dict[str, Any], words: list[str]) -> None:
    assert mindspeed.check_features(features, manager) == words


@pytest.mark.parametrize(
    ("features", "sentence"),
    [
        ({"bufer_pad": 64}, "does not know; the nearest one is 'buffer_pad'"),
        ({"use_flash_atn": True}, "the nearest one is 'use_flash_attn'"),
        ({"buffer_pad": "much"}, "MindSpeed refuses --buffer-pad much"),
        ({"buffer_pad": True}, "but it takes a value"),
        ({"zero_memory": "level9"}, "MindSpeed refuses --zero-memory level9"),
        ({"reuse_param": "yes"}, "set it to true or false"),
        ({"context_parallel_algo": "ulysses_cp_algo"}, "mega_rl decides itself: remove it, and set parallel.context"),
        ({"use_flash_attn": False}, "attention runs on npu_fusion_attention always: remove it"),
    ],
)
def test_a_feature_that_cannot_be_is_one_sentence(manager: Any, features: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match="platform.mindspeed.features") as caught:
        mindspeed.check_features(features, manager)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_without_mindspeed_the_mode_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not mindspeed.is_used(MindSpeedConfig())
    assert not mindspeed.is_used(MindSpeedConfig(features={"use_flash_attn": True}))
    with pytest.raises(InputError, match="mode is required, but MindSpeed is not installed: install"):
        mindspeed.is_used(MindSpeedConfig(mode="required"))
    with pytest.raises(InputError, match="has 'reuse_fp32_param', but MindSpeed is not installed: install"):
        mindspeed.is_used(MindSpeedConfig(features={"reuse_fp32_param": True}))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert mindspeed.is_used(MindSpeedConfig()) and not mindspeed.is_used(MindSpeedConfig(mode="off"))


def test_a_mindspeed_for_another_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = versions.installed() | {"mindspeed": "0.12.1", "megatron-core": "0.16.1"}
    monkeypatch.setattr(versions, "installed", lambda: found)
    with pytest.raises(InputError, match="MindSpeed 0.12.1 patches another Megatron-core .*mindspeed.mode to off"):
        mindspeed.enable(MindSpeedConfig())


ENABLE = """
import logging, sys, torch
from mega_rl.config.schema.device import MindSpeedConfig
from mega_rl.platform.ascend import mindspeed
sys.argv = ["tool", "--config", "mine"]
import torch.distributed as dist
compiled, all_reduce = torch.compile, dist.all_reduce
lines = mindspeed.enable(MindSpeedConfig(features={"buffer-pad": 8, "use_flash_attn": True}))
print(*lines, sep="\\n")
import victim
assert victim.function() == victim.Class().method() == victim.pad() == "patched" and victim.memory is print
assert torch.compile is compiled and sys.argv == ["tool", "--config", "mine"]
assert dist.all_reduce is dist.distributed_c10d.all_reduce is all_reduce
assert logging.getLogger().level == logging.WARNING
for feature in ("profile", "swap"):
    try:
        mindspeed.enable(MindSpeedConfig(features={feature: True}))
    except mindspeed.InputError as error:
        print("refused:", error)
"""


def test_the_log_lists_what_was_really_patched(packages: Path) -> None:
    out = run([sys.executable, "-c", ENABLE], timeout=280, env={"PYTHONPATH": str(packages)}).check().stdout
    assert "adaptor ['--use-distributed-optimizer', '--buffer-pad', '8']" in out
    assert "MindSpeed 0.16.0 replaced 3 functions; features: buffer_pad=8" in out
    assert "  use_flash_attn: attention runs on npu_fusion_attention, by mega_rl's own operators" in out
    assert "  victim: Class.method, function, pad" in out
    assert (
        "refused: platform.mindspeed.features has 'profile', which would do nothing: it replaces only megatron" in out
    )
    assert "'swap', which replaces megatron.core.transformer.transformer_layer.TransformerLayer.forward: mega_rl" in out


LAZY = """
import importlib, sys
from mega_rl.platform.ascend.mindspeed import _without_lazy_aliases

def aliases():
    known = [(name, vars(module)) for name, module in sys.modules.items() if name.startswith("transformers.")]
    return [name for name, own in known if "__getattr__" in own and own.get("__spec__") is None]

with _without_lazy_aliases():
    importlib.import_module("transformers.trainer")  # as MindSpeed's first import does
    print("left", len(aliases()))
print("back", len(aliases()) > 100)
"""


def test_what_mindspeed_imports_brings_no_lazy_alias_back() -> None:
    launched = run([sys.executable, "-c", LAZY], env={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}).check()
    assert {"left 0", "back True"} <= set(launched.stdout.splitlines()), launched.stdout


def test_an_empty_package_is_taken_back_and_a_real_one_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks ``find_spec`` whether there is a flash_attn, and believes MindSpeed's empty one."""
    for name in ("empty_package", "empty_package.interface"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    mindspeed._remove_empty("empty_package")
    assert importlib.util.find_spec("empty_package") is None
    before = sys.modules["json.decoder"]
    mindspeed._remove_empty("json")
    assert sys.modules["json.decoder"] is before
