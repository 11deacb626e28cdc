"""Started on device npu: every operator by MindSpeed and by torch_npu directly, on the same inputs.

For each call of ``tests.operator_cases``: the largest difference of outputs and gradients, and how often what ran; as
JSON on the last line.
"""

from __future__ import annotations

import json

import torch

from mega_rl import platform
from mega_rl.config.schema.device import MindSpeedConfig
from mega_rl.platform.operators.npu_kernels import AscendOperators
from tests.npu.kernels import counts
from tests.operator_cases import OperatorCase, Outcome, operator_cases, outcome


def counted(case: OperatorCase) -> tuple[Outcome, dict[str, int]]:
    counts.clear()
    found = outcome(case.own, case, "npu")
    return found, {name: count for name, count in counts.items() if not name.startswith("aten::")}


def difference(own: Outcome, other: Outcome) -> float:
    pairs = [(own.output, other.output), *((own.gradients[name], other.gradients[name]) for name in other.gradients)]
    assert own.gradients.keys() == other.gradients.keys()
    return max(float((a.double() - b.double()).abs().max()) if a.numel() else 0.0 for a, b in pairs)


def main() -> None:
    here = platform.select("npu", None, MindSpeedConfig(mode="required"))
    lines, found = platform.prepare(), {}
    by_mindspeed, direct = here.operators, AscendOperators()
    for dtype in (torch.float32, torch.bfloat16):
        for case in operator_cases(dtype):
            here.operators = direct
            expected, own_counts = counted(case)
            here.operators = by_mindspeed
            result, counts_with = counted(case)
            name = f"{case.name}-{str(dtype).removeprefix('torch.')}"
            found[name] = {"difference": difference(result, expected), "direct": own_counts, "mindspeed": counts_with}
    print(json.dumps({"lines": list(lines), "cases": found}))


if __name__ == "__main__":
    main()
