"""What a device computes at most: matrix products in bfloat16 without sparsity, per second, by the name of the chip."""

from __future__ import annotations

import re

TERA = 1e12
# A part of the name that the driver gives -> 10^12 operations per second; the first that fits counts. Sources: the
# vendor's data sheets, which state the double for NVIDIA, with sparsity.
_CUDA = (
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.0),
    ("H200 NVL", 835.0),
    ("H100", 989.0),
    ("H200", 989.0),
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("H800", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
)
# The whole name, since variants differ in cores and clock. A 910C (A3) is two devices to torch_npu, its dies, of which
# each counts by itself.
_ASCEND = {
    "Ascend910B1": 414.0,
    "Ascend910B2": 376.0,
    "Ascend910B3": 313.0,
    "Ascend910B4": 280.0,
    "Ascend910_9381": 376.0,
    "Ascend910_9382": 376.0,
    "Ascend910_9391": 376.0,
    "Ascend910_9392": 376.0,
}


def cuda_peak(name: str) -> float | None:
    """Operations per second of a CUDA device; None: the chip is not known."""
    if " MIG " in name:  # a part of one
        return None
    return next((peak * TERA for part, peak in _CUDA if re.search(rf"{re.escape(part)}(?!\d)", name)), None)


def ascend_peak(name: str) -> float | None:
    """Operations per second of an Ascend device; None: the chip is not known."""
    peak = _ASCEND.get(name)
    return None if peak is None else peak * TERA
