"""The operators that vLLM-Ascend's engines call: our stand-ins against their schemas, and these against the wheels.

``rollout_schemas.json`` has the schemas as torch's dispatcher shows them, with torch_npu 2.13.0 and vllm-ascend 0.23.0.
The wheels of torch_npu 2.10.0.post4 and of vllm-ascend hold them as text, which is read without importing anything.
"""

from __future__ import annotations

import inspect
import json
import os
import zipfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contract.test_npu_schemas import WHEELS_VARIABLE
from tests.npu.rollout_operators import ROLLOUT

RECORDED: dict[str, str] = json.loads((Path(__file__).parent / "rollout_schemas.json").read_text())
TORCH_NPU = "2.10.0.post4"  # that of vllm-ascend 0.23.0; that of the tests is asked by tests/npu/test_rollout.py


def test_every_stand_in_is_recorded() -> None:
    assert RECORDED.keys() == ROLLOUT.keys()


@pytest.mark.parametrize("name", RECORDED)
def test_a_stand_in_has_the_arguments_of_its_operator(name: str) -> None:
    """Names, order, kinds and defaults; one that gathers the arguments that it refuses names the others rightly."""
    arguments = list(torch._C.parse_schema(RECORDED[name]).arguments)
    own = inspect.signature(ROLLOUT[name]).parameters.values()
    named = [p for p in own if p.kind is not p.VAR_KEYWORD]
    if len(named) < len(own):
        arguments = [a for a in arguments if a.name in {p.name for p in named}]
    assert [(p.name, p.kind is p.KEYWORD_ONLY) for p in named] == [(a.name, a.kwarg_only) for a in arguments]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    given = {p.name: p.default for p in named if p.default is not p.empty}
    assert given == {n: tuple(value) if isinstance(value, list) else value for n, value in defaults.items()}


def schemas(libraries: list[bytes], name: str) -> Iterator[Any]:
    """What the text of a library says of an operator: also C++ signatures, which are no schemas."""
    namespace, _, operator = name.partition("::")
    for library in libraries:
        start = library.find(f"{operator}(".encode())
        while start >= 0:
            text = library[start : library.index(b"\0", start)]
            with suppress(RuntimeError, UnicodeDecodeError):
                yield torch._C.parse_schema(f"{namespace}::{text.decode()}")
            start = library.find(f"{operator}(".encode(), start + 1)


def wheels() -> Path:
    folder = os.environ.get(WHEELS_VARIABLE)
    if folder is None or not Path(folder).is_dir():
        pytest.skip(f"there are no wheels: name a folder of them in {WHEELS_VARIABLE}, or run make test-npu")
    return Path(folder)


def test_the_record_is_what_torch_npu_says() -> None:
    found = list(wheels().glob(f"torch_npu-{TORCH_NPU}-*.whl"))
    if not found:
        pytest.skip(f"no wheel of torch_npu {TORCH_NPU} in {wheels()}")
    with zipfile.ZipFile(found[0]) as wheel:
        libraries = [wheel.read(f"torch_npu/lib/lib{name}.so") for name in ("torch_npu", "op_plugin_atb")]
    for name, text in RECORDED.items():
        if not name.startswith("_C_ascend::"):
            assert torch._C.parse_schema(text) in list(schemas(libraries, name)), name


def test_the_record_is_what_vllm_ascend_says() -> None:
    found = list((wheels().parent / "rollout" / "vllm_ascend").glob("vllm_ascend_C*.so"))
    if not found:
        pytest.skip(f"no vllm-ascend in {wheels().parent / 'rollout'}")
    for name, text in RECORDED.items():
        if name.startswith("_C_ascend::"):
            assert torch._C.parse_schema(text) in list(schemas([found[0].read_bytes()], name)), name
