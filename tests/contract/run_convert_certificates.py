"""Every family through tools/convert.py at TP2 PP2, with experts at EP2 too, and back.

Prints ``CERTIFIED {json}``: family -> relative error of the logits of each direction.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.launching.launch import REPO
from tests.models import families

sys.path.insert(0, str(REPO / "tools"))
import convert  # noqa: E402 - a tool, not a package


def certificate(*command: object) -> dict[str, object]:
    arguments = [str(part) for part in command]
    assert convert.main([*arguments, "--verify"]) == 0
    content: dict[str, object] = json.loads(
        (Path(arguments[arguments.index("--out") + 1]) / convert.CERTIFICATE).read_text()
    )
    return content


def main(root: Path) -> None:
    errors = {}
    for family in families.CONTRACT.own:
        model, there, back = (root / f"{family}.{part}" for part in ("model", "there", "back"))
        families.make(family).save_pretrained(model)
        has_experts = family.endswith("_moe") or family.startswith("deepseek")
        layout = ("--tp", 2, "--pp", 2, *(("--ep", 2, "--etp", 1) if has_experts else ()))
        first = certificate("hf-to-megatron", "--model", model, "--out", there, *layout)
        second = certificate("megatron-to-hf", "--checkpoint", there, "--out", back)
        assert first["tensors"] == second["tensors"] and first["round_trip"] == second["round_trip"] == "bit-exact"
        errors[family] = [c["logits"]["relative"] for c in (first, second)]  # type: ignore[index]
    print("CERTIFIED", json.dumps(errors), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
