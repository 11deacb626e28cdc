"""Our calls of torch_npu against the operator schemas of its wheels, torch_npu neither imported nor installed.

The calls are those that the operators of Ascend really make, noted while every case of ``tests/operator_cases.py`` runs
over stand-ins; no list of them is kept by hand. The schemas are recorded from the wheels by ``npu_schemas.py``.
"""

from __future__ import annotations

import inspect
import os
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl import platform
from mega_rl.platform.operators import npu_kernels as npu_operators
from mega_rl.platform.operators.npu_kernels import AscendOperators
from tests.contract.npu_schemas import RECORDED, differences, read_files, read_schemas, recorded_schemas
from tests.npu.recorder import OPERATORS, Call, RecordingTorchNpu
from tests.operator_cases import operator_cases, outcome

VERSIONS = sorted(path.stem for path in RECORDED.glob("*.json"))
WHEELS_VARIABLE = "MEGA_RL_TORCH_NPU_WHEELS"


def fits(kind: str, value: Any) -> bool:
    """Whether the dispatcher takes a value for an argument of this type."""
    if kind.startswith("Optional["):
        return value is None or fits(kind.removeprefix("Optional[").removesuffix("]"), value)
    if kind.startswith("List["):
        inner = kind.removeprefix("List[").removesuffix("]")
        return isinstance(value, list | tuple) and all(fits(inner, item) for item in value)
    known = {"Tensor": torch.Tensor, "int": int, "SymInt": int, "float": int | float, "bool": bool, "str": str}
    return isinstance(value, known[kind]) and (kind == "bool" or not isinstance(value, bool))


def arguments_of(version: str, name: str) -> list[Any]:
    return list(torch._C.parse_schema(f"npu::{recorded_schemas(version)[name].schema}").arguments)


def faults_of(call: Call, version: str) -> list[str]:
    """Every way in which a call does not fit the operator of a version."""
    recorded = recorded_schemas(version)
    if call.name not in recorded or not recorded[call.name].is_function:
        return [f"torch_npu {version} has no function {call.name}"]
    arguments = arguments_of(version, call.name)
    positional = [argument for argument in arguments if not argument.kwarg_only]
    known = {argument.name: argument for argument in arguments}
    faults = []
    if len(call.args) > len(positional):
        faults.append(f"{call.name} takes {len(positional)} positional arguments, not {len(call.args)}")
    given = dict(zip((argument.name for argument in positional), call.args, strict=False))
    faults += [f"{call.name} is given {name} twice" for name in given.keys() & call.kwargs.keys()]
    given |= call.kwargs
    faults += [f"{call.name} has no argument {name}" for name in given.keys() - known.keys()]
    for name, argument in known.items():
        if name not in given and not argument.has_default_value():
            faults.append(f"{call.name} needs {name}")
        if name in given and not fits(str(argument.type), given[name]):
            faults.append(f"{call.name} takes {argument.type} for {name}, not {given[name]!r:.60}")
    return faults


@pytest.fixture(scope="module")
def calls() -> Iterator[list[Call]]:
    recorder = RecordingTorchNpu()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(npu_operators.importlib, "import_module", lambda name: {"torch_npu": recorder}[name])
        patch.setattr(platform, "current", lambda: types.SimpleNamespace(operators=AscendOperators()))
        for dtype in (torch.float32, torch.bfloat16):
            for case in operator_cases(dtype):
                outcome(case.own, case)
    yield recorder.calls


def test_the_versions_are_the_oldest_and_the_newest_supported() -> None:
    assert {"2.10.0.post4", "2.14.0"} <= set(VERSIONS)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_call_fits(calls: list[Call], version: str) -> None:
    assert [fault for call in calls for fault in faults_of(call, version)] == []


def test_the_calls_are_those_of_every_operator(calls: list[Call]) -> None:
    names = {name.removeprefix("npu::") for name in OPERATORS}
    forward = {name for name in names if not name.startswith("_") and not name.endswith(("_grad", "_backward"))}
    of_sum = {"npu_rms_norm_backward"}  # npu_add_rms_norm has no gradient of its own
    assert {call.name for call in calls} == forward | of_sum


BREAKAGES: dict[str, Callable[[Call], Call]] = {
    "has no argument pre_tokens": lambda call: replace(call, kwargs=call.kwargs | {"pre_tokens": 5}),
    "takes float for scale": lambda call: replace(call, kwargs=call.kwargs | {"scale": "0.5"}),
    "takes Optional.List.int.. for actual_seq_qlen": lambda call: replace(
        call, kwargs=call.kwargs | {"actual_seq_qlen": torch.tensor([1])}
    ),
    "takes int for head_num": lambda call: replace(call, kwargs=call.kwargs | {"head_num": True}),
    "needs head_num": lambda call: replace(
        call, kwargs={name: value for name, value in call.kwargs.items() if name != "head_num"}
    ),
    "given query twice": lambda call: replace(call, kwargs=call.kwargs | {"query": call.args[0]}),
    "takes 24 positional arguments, not 27": lambda call: replace(call, args=(*call.args, *[None] * 24)),
    "has no function npu_fusion_attn": lambda call: replace(call, name="npu_fusion_attn"),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("sentence", BREAKAGES)
def test_a_wrong_call_is_found(calls: list[Call], sentence: str, version: str) -> None:
    call = next(call for call in calls if call.name == "npu_fusion_attention")
    broken = " | ".join(faults_of(BREAKAGES[sentence](call), version))
    assert re.search(sentence, broken), broken


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", sorted(name.removeprefix("npu::") for name in OPERATORS))
def test_a_stand_in_has_the_arguments_of_its_operator(name: str, version: str) -> None:
    """Names, order, kinds and defaults: an argument that a call leaves out means the same in both."""
    own = inspect.signature(OPERATORS[f"npu::{name}"]).parameters.values()
    arguments = arguments_of(version, name)
    assert [(p.name, p.kind is p.KEYWORD_ONLY) for p in own] == [(a.name, a.kwarg_only) for a in arguments]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    assert {p.name: p.default for p in own if p.default is not p.empty} == defaults


@pytest.mark.parametrize("version", VERSIONS)
def test_the_record_is_what_the_wheel_says(version: str) -> None:
    folder = os.environ.get(WHEELS_VARIABLE)
    wheels = list(Path(folder).glob(f"torch_npu-{version}-*.whl")) if folder else []
    if not wheels:
        pytest.skip(
            f"no wheel of torch_npu {version}: name a folder of wheels in {WHEELS_VARIABLE}, or run "
            f"python -m tests.contract.npu_schemas {version}"
        )
    _, library, functions = read_files(wheels[0])
    assert differences(recorded_schemas(version), read_schemas(library, functions)) == []
