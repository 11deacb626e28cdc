"""MindSpeed's keys and operators, tried on small packages that stand in for MindSpeed, which is on no package index.

One registers features, parses a command line and patches as MindSpeed core_r0.16.0 does, the other
(``tests/pretended/mindspeed.py``) has its operators; neither is MindSpeed.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from mega_rl import platform
from mega_rl.config.schema.device import MindSpeedConfig
from mega_rl.errors import InputError
from mega_rl.platform.ascend import mindspeed, mindspeed_kernels
from mega_rl.platform.contract import versions
from mega_rl.platform.operators.npu_kernels import DIRECT, AscendOperators
from tests.launching.launch import REPO, run
from tests.npu import mindspeed_operators
from tests.npu.kernels import counts
from tests.npu.recorder import RecordingTorchNpu
from tests.operator_cases import OperatorCase, compare, operator_cases, outcome
from tests.pretended import mindspeed as pretended

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
        ({"use_flash_attn": True, "moe_grouped_gemm": False}, []),  # operators are not taken by its command line
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
    ],
)
def test_a_feature_that_cannot_be_is_one_sentence(manager: Any, features: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match="platform.mindspeed.features") as caught:
        mindspeed.check_features(features, manager)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


FALLBACK = "Megatron-core runs unpatched, and its fused operators are torch_npu's, called directly"


def test_without_mindspeed_the_mode_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for features in ({}, {"use_flash_attn": True}, {"use-flash-attn": False}):
        assert mindspeed.without(MindSpeedConfig(features=features)) == [f"MindSpeed is not installed: {FALLBACK}"]
    assert mindspeed.without(MindSpeedConfig(mode="off")) == [f"MindSpeed is off: {FALLBACK}"]
    with pytest.raises(InputError, match="mode is required, but MindSpeed is not installed: install"):
        mindspeed.without(MindSpeedConfig(mode="required"))
    with pytest.raises(InputError, match="has 'reuse_fp32_param', but MindSpeed is not installed: install"):
        mindspeed.without(MindSpeedConfig(features={"reuse_fp32_param": True}))
    with pytest.raises(InputError, match="features.use_flash_attn is 'yes': set it to true or false"):
        mindspeed.without(MindSpeedConfig(features={"use_flash_attn": "yes"}))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(versions, "installed", lambda: {"mindspeed": "0.16.0", "megatron-core": "0.16.1"})
    monkeypatch.setattr(mindspeed, "_manager", lambda: None)
    assert mindspeed.without(MindSpeedConfig()) is mindspeed.without(MindSpeedConfig(mode="required")) is None


def broken() -> None:
    raise ModuleNotFoundError("No module named 'einops'")


@pytest.mark.parametrize(
    ("version", "manager", "reason"),
    [
        (
            "0.12.1",
            lambda: None,
            "MindSpeed 0.12.1 patches another Megatron-core than 0.16.1: install MindSpeed's branch",
        ),
        ("0.16.0", broken, "MindSpeed does not load: it needs einops (No module named 'einops'); fix its installation"),
    ],
    ids=["another Megatron", "does not load"],
)
def test_a_mindspeed_that_does_not_fit_is_warned_of_or_refused(
    monkeypatch: pytest.MonkeyPatch, version: str, manager: Any, reason: str
) -> None:
    found = versions.installed() | {"mindspeed": version, "megatron-core": "0.16.1"}
    monkeypatch.setattr(versions, "installed", lambda: found)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    monkeypatch.setattr(mindspeed, "_manager", manager)
    (line,) = mindspeed.without(MindSpeedConfig()) or ()
    assert line.startswith(f"warning: {FALLBACK}, because {reason}") and "mindspeed.mode to off" in line
    for config, start in (
        (MindSpeedConfig(mode="required"), "platform.mindspeed.mode is required, but "),
        (MindSpeedConfig(features={"swap_optimizer": True}), "platform.mindspeed.features has 'swap_optimizer', but "),
    ):
        with pytest.raises(InputError) as caught:
            mindspeed.without(config)
        assert str(caught.value).startswith(start + reason)


ALL = [(dtype, case) for dtype in (torch.float32, torch.bfloat16) for case in operator_cases(dtype)]
IDS = [f"{case.name}-{str(dtype).removeprefix('torch.')}" for dtype, case in ALL]
# What of MindSpeed one call of each operator runs; torch_npu has the others alone.
CALLS = {
    "varlen": "dot_product_attention_forward_impl",
    "rms_norm": "fused_rmsnorm",
    "swiglu": "fused_swiglu",
    "rotary": "npu_rotary_position_embedding",
    "permute": "MoePermuteMaskMap",
    "unpermute": "MoeUnpermuteMaskMap",
    "grouped_matmul": "npu_gmm",
}
DIRECTLY = ("add_rms_norm", "grouped_matmul_of_one", "grouped_matmul_of_nothing")
AFTER = {
    "op_builder.builder": mindspeed_operators.after_builder,
    "core.transformer.flash_attention.flash_attention.adaptor": mindspeed_operators.after_attention,
    "core.fusions.fused_rms_norm": mindspeed_operators.after_rms_norm,
    "core.fusions.fused_bias_swiglu": mindspeed_operators.after_swiglu,
    "te.pytorch.permutation": mindspeed_operators.after_permutation,
}


@pytest.fixture
def importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The pretended package on the path, over stand-ins of torch_npu's kernels; nothing of it stays."""
    monkeypatch.syspath_prepend(pretended.write(tmp_path))
    monkeypatch.setitem(sys.modules, "torch_npu", RecordingTorchNpu())  # type: ignore[arg-type]
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    before = {name for name in sys.modules if name.partition(".")[0] == "mindspeed"}
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] == "mindspeed" and name not in before]:
        del sys.modules[name]


@pytest.fixture
def by_mindspeed(importable: Path, monkeypatch: pytest.MonkeyPatch) -> AscendOperators:
    for name, after in AFTER.items():
        after(importlib.import_module(f"mindspeed.{name}"))
    taken = mindspeed_kernels.take(())
    assert not taken.missing and len(taken.lines) == len(mindspeed_kernels.OFFERS)
    operators = AscendOperators(taken.kernels)
    monkeypatch.setattr(platform, "current", lambda: types.SimpleNamespace(operators=operators))
    return operators


@pytest.mark.parametrize(("dtype", "case"), ALL, ids=IDS)
def test_each_operator_by_mindspeed_is_the_direct_one(
    by_mindspeed: AscendOperators, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, case: OperatorCase
) -> None:
    compare(case, dtype)
    counts.clear()
    own = outcome(case.own, case)
    ran = {name.removeprefix("mindspeed::") for name, count in counts.items() if count}
    wanted = next(call for start, call in CALLS.items() if case.name.startswith(start) or case.name in DIRECTLY)
    assert (not ran) if case.name in DIRECTLY else wanted in ran, ran
    monkeypatch.setattr(platform, "current", lambda: types.SimpleNamespace(operators=AscendOperators()))
    counts.clear()
    direct = outcome(case.own, case)
    assert not any(counts.values()), "the direct ones run nothing of MindSpeed"
    assert torch.equal(own.output, direct.output)
    assert all(torch.equal(own.gradients[name], gradient) for name, gradient in direct.gradients.items())


def test_an_operator_that_is_missing_or_unwanted_is_torch_npus(importable: Path) -> None:
    """Here nothing is compiled, a module is absent, and one operator is switched off."""
    (importable / "mindspeed" / "core" / "fusions" / "fused_rms_norm.py").unlink()
    taken = mindspeed_kernels.take({"use_fused_swiglu"})
    assert taken.missing.keys() == {"use_fused_rmsnorm", "use_fused_rotary_pos_emb", "moe_grouped_gemm"}
    own = {name for name in vars(DIRECT) if getattr(taken.kernels, name) is getattr(DIRECT, name)}
    assert own == {"rms_norm", "swiglu", "rotary", "grouped_product"}
    assert "  SwiGLU by torch_npu's npu_swiglu, called directly: use_fused_swiglu is false" in taken.lines
    assert any("nothing compiles grouped_matmul here" in line for line in taken.lines)
    first = mindspeed.operator_report(taken)[0]
    assert first.startswith("warning: MindSpeed's use_fused_rmsnorm, use_fused_rotary_pos_emb, moe_grouped_gemm cannot")


def test_without_cann_nothing_is_compiled(importable: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASCEND_HOME_PATH")
    missing = mindspeed_kernels.take(()).missing
    assert missing["moe_grouped_gemm"] == "it is compiled, and ASCEND_HOME_PATH names no CANN: source its set_env.sh"


@pytest.mark.parametrize("file", ["ascend.yaml", "ascend_sampling.yaml"])
def test_the_recipes_of_ascend_name_every_operator(file: str) -> None:
    settings = yaml.safe_load((REPO / "configs" / "machines" / file).read_text())["platform"]["mindspeed"]
    assert settings == {"mode": "auto", "features": dict.fromkeys(mindspeed_kernels.OFFERS, True)}


ELSEWHERE = """
import sys
from mega_rl import platform
from mega_rl.config.schema.device import MindSpeedConfig
platform.select("cpu", None, MindSpeedConfig(mode="required"))
platform.prepare()
from mega_rl.megatron import engine
assert "mindspeed" not in sys.modules
assert type(platform.current().operators).__module__ == "mega_rl.platform.operators.torch_kernels"
"""


def test_a_run_on_a_cpu_imports_nothing_of_mindspeed(tmp_path: Path) -> None:
    run([sys.executable, "-c", ELSEWHERE], timeout=280, env={"PYTHONPATH": str(pretended.write(tmp_path))}).check()


ENABLE = """
import logging, sys, torch
from mega_rl.config.schema.device import MindSpeedConfig
from mega_rl.platform.ascend import mindspeed
from mega_rl.platform.operators.npu_kernels import DIRECT
sys.argv = ["tool", "--config", "mine"]
import torch.distributed as dist
compiled, all_reduce = torch.compile, dist.all_reduce
lines, kernels = mindspeed.enable(MindSpeedConfig(features={"buffer-pad": 8, "use_flash_attn": True}))
assert kernels == DIRECT
print(*lines, sep="\\n")
import victim
assert victim.function() == victim.Class().method() == victim.pad() == "patched" and victim.memory is print
assert torch.compile is compiled and sys.argv == ["tool", "--config", "mine"]
assert dist.all_reduce is dist.distributed_c10d.all_reduce is all_reduce
assert logging.getLogger().level == logging.WARNING
try:
    mindspeed.enable(MindSpeedConfig(mode="required"))
except mindspeed.InputError as error:
    print("refused:", error)
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
    assert "attention by torch_npu's npu_fusion_attention, called directly: use_flash_attn cannot be used (No mo" in out
    assert (
        "refused: platform.mindspeed.mode is required, but MindSpeed's operator of use_flash_attn cannot be us" in out
    )
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
