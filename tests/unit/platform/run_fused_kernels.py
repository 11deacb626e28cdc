"""``platform.kernels`` on the host against the references, in a process of its own: ``compiled`` or ``liger``.

torch's compiler makes C++ of the formulas; Triton's interpreter runs Liger's kernels. Prints each operator with its
largest difference in float32. The suite runs the first. The second needs packages that a CPU has no other use for:

    pip install --no-deps --target KERNELS triton liger-kernel
    PYTHONPATH=$PWD:KERNELS python tests/unit/platform/run_fused_kernels.py liger
"""

import importlib
import os
import sys
from typing import Any

# Read at the imports below.
os.environ |= {"MEGA_RL_PLATFORM": "cpu", "TORCHDYNAMO_DISABLE": "0", "TRITON_INTERPRET": "1"}

import torch
import torch._dynamo.utils

from mega_rl import platform
from mega_rl.platform.operators import compiled
from mega_rl.platform.operators.torch_kernels import TorchOperators
from tests.operator_cases import compare, operator_cases

OPERATORS = {
    "compiled": ("rms_norm", "rms_norm_of_heads", "add_rms_norm", "swiglu", "swiglu_weighted", "rotary"),
    "liger": ("rms_norm", "rms_norm_of_heads", "add_rms_norm", "swiglu", "swiglu_weighted"),
}


def complete_interpreter() -> None:
    """Add what Triton's interpreter lacks: numbers as arguments, and the reciprocal root of CUDA's library.

    It multiplies bfloat16 numbers as if they were integers, which is left so: float32 alone is compared.
    """
    global tl  # a kernel sees names of its module alone
    import numpy as np
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    converted = interpreter._implicit_cvt

    def with_numbers(argument: Any) -> Any:
        if isinstance(argument, float):
            return tl.tensor(interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32), tl.float32)
        return None if argument is None else converted(argument)

    def reciprocal_root(x):  # type: ignore[no-untyped-def]
        return tl.rsqrt(x)

    interpreter._implicit_cvt = with_numbers
    for name in ("rms_norm", "fused_add_rms_norm"):
        importlib.import_module(f"liger_kernel.ops.{name}").rsqrt = triton.jit(reciprocal_root)


def main(kind: str) -> None:
    if kind == "liger":
        complete_interpreter()
    platform.current().operators = compiled.fused(TorchOperators(), kind)
    for case in operator_cases(torch.float32):
        if case.name in OPERATORS[kind]:
            print(case.name, compare(case, torch.float32, "cpu"))
    if kind == "compiled":
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0, "nothing was compiled"


if __name__ == "__main__":
    main(sys.argv[1])
