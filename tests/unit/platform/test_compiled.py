"""Fused norm, SwiGLU and rotary embedding: the numbers of the reference, and what is refused."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl import platform
from mega_rl.errors import InputError
from mega_rl.platform.cuda import FlashOperators
from mega_rl.platform.operators import compiled, reference
from mega_rl.platform.operators.torch_kernels import TorchOperators
from tests.launching.launch import run
from tests.operator_cases import OperatorCase, compare, operator_cases

FUSED = ("rms_norm", "rms_norm_of_heads", "add_rms_norm", "swiglu", "swiglu_weighted", "rotary")
CASES = [(d, case) for d in (torch.float32, torch.bfloat16) for case in operator_cases(d) if case.name in FUSED]
IDS = [f"{case.name}-{dtype}" for dtype, case in CASES]


@pytest.mark.parametrize(("dtype", "case"), CASES, ids=IDS)
def test_the_formulas_that_are_compiled(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, case: OperatorCase
) -> None:
    """Not compiled here: the CPU platform turns the compiler off."""
    monkeypatch.setattr(compiled, "_compiled", lambda formula: formula)
    own = compiled.fused(TorchOperators(), "compiled")
    monkeypatch.setattr(platform, "current", lambda: types.SimpleNamespace(operators=own))
    compare(case, dtype)


class _PretendedNorm:
    """``LigerRMSNormFunction.apply`` of liger-kernel 0.8.5."""

    @staticmethod
    def apply(
        x: Tensor, weight: Tensor, eps: float, offset: float, casting_mode: str, in_place: bool, row_mode: Any = None
    ) -> Tensor:
        assert casting_mode == "gemma" and offset == 0.0 and not in_place
        return reference.rms_norm(x, weight, eps).to(x.dtype)


class _PretendedSumNorm:
    """``LigerFusedAddRMSNormFunction.apply`` of the same."""

    @staticmethod
    def apply(
        x: Tensor,
        residual: Tensor,
        weight: Tensor,
        eps: float,
        offset: float = 0.0,
        casting_mode: str = "llama",
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor]:
        assert casting_mode == "gemma" and offset == 0.0 and not in_place
        total = x + residual
        return reference.rms_norm(total, weight, eps).to(x.dtype), total


class _PretendedSwiglu:
    """``LigerSiLUMulFunction.apply`` of the same."""

    @staticmethod
    def apply(gate: Tensor, up: Tensor, gate_multiplier: float = 1.0, down_multiplier: float = 1.0) -> Tensor:
        return reference.swiglu(torch.cat((gate, up), -1)).to(gate.dtype)


@pytest.mark.slow
def test_what_torch_compiles_on_a_host(tmp_path: Path) -> None:
    """torch's compiler makes C++ of the formulas here instead of Triton; the same script runs Liger's kernels."""
    script = Path(__file__).with_name("run_fused_kernels.py")
    kept = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}  # no other run's
    launched = run((sys.executable, str(script), "compiled"), env=kept).check()
    assert [line.split()[0] for line in launched.stdout.splitlines()] == list(FUSED)


@pytest.mark.parametrize(("dtype", "case"), CASES, ids=IDS)
def test_how_liger_is_called(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, case: OperatorCase) -> None:
    kernels: dict[tuple[str, ...], Any] = {
        ("rms_norm", "LigerRMSNormFunction"): _PretendedNorm,
        ("fused_add_rms_norm", "LigerFusedAddRMSNormFunction"): _PretendedSumNorm,
        ("swiglu", "LigerSiLUMulFunction"): _PretendedSwiglu,
    }
    monkeypatch.setattr(compiled, "_liger", lambda *name: kernels[name])
    monkeypatch.setattr(compiled, "_compiled", lambda formula: formula)
    own = compiled.fused(TorchOperators(), "liger")
    monkeypatch.setattr(platform, "current", lambda: types.SimpleNamespace(operators=own))
    compare(case, dtype)


def test_the_other_operators_stay_the_platforms() -> None:
    own: Any = compiled.fused(FlashOperators(), "compiled")
    for name in ("varlen_attention", "grouped_matmul", "permute_tokens", "unpermute_tokens"):
        assert getattr(type(own), name) is getattr(FlashOperators, name)
    plain = FlashOperators()
    assert compiled.fused(plain, "torch") is plain


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled.check_kernels("torch", "npu")
    with pytest.raises(InputError, match=r"platform\.kernels is 'compiled', which is for CUDA; this is cpu"):
        platform.use_kernels("compiled")
    monkeypatch.setattr(compiled.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"liger-kernel is not installed: pip install 'liger-kernel>=0\.6\.1', or set"):
        compiled.check_kernels("liger", "cuda")
    compiled.check_layers("local", "cpu")
    with pytest.raises(InputError, match=r"platform\.layers is 'transformer_engine', which is for CUDA; this is npu"):
        compiled.check_layers("transformer_engine", "npu")
    with pytest.raises(InputError, match=r"transformer-engine\[pytorch\] is not installed: .* set the key to local"):
        compiled.check_layers("transformer_engine", "cuda")


def test_an_old_liger_is_refused_without_importing_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Releases before 0.6.1 have no sum and norm in one kernel."""
    operators = tmp_path / "liger_kernel" / "ops"
    operators.mkdir(parents=True)
    for folder in (operators, operators.parent):
        (folder / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"liger-kernel is too old, .*: pip install 'liger-kernel>=0\.6\.1', or set"):
        compiled.check_kernels("liger", "cuda")
    (operators / "fused_add_rms_norm.py").touch()
    compiled.check_kernels("liger", "cuda")
