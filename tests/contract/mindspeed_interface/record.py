"""Records the part of MindSpeed that mega_rl calls, out of a checkout of it that is not imported.

git clone https://gitcode.com/Ascend/MindSpeed.git && git -C MindSpeed checkout COMMIT_OF_DOCKER_ENV
python -m tests.contract.mindspeed_interface.record MindSpeed
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

RECORD = Path(__file__).with_name("mindspeed.json")
# Of a file below mindspeed/: functions, methods, and names that hold something.
USED = {
    "features_manager/features_manager": ("MindSpeedFeaturesManager.FEATURES_LIST",)
    + ("MindSpeedFeaturesManager.register_features_args",),
    "patch_utils": ("MindSpeedPatchesManager.patches_info", "MindSpeedPatchesManager.register_patch"),
    "args_utils": ("get_mindspeed_args",),
    "op_builder/builder": ("MindSpeedOpBuilder.load",),
    "core/transformer/flash_attention/flash_attention/adaptor": ("dot_product_attention_forward_impl",),
    "core/fusions/fused_rms_norm": ("RMSNorm.fused_rmsnorm",),
    "core/fusions/fused_bias_swiglu": ("fused_swiglu",),
    "ops/npu_rotary_position_embedding": ("npu_rotary_position_embedding", "rope_op_builder"),
    "ops/gmm": ("GMMFunction.builder",),
    "te/pytorch/permutation": ("MoePermuteMaskMap.forward", "MoeUnpermuteMaskMap.forward"),
}
# What is compiled: file -> function.
COMPILED = {
    "ops/csrc/cann/gmm.cpp": "npu_gmm",
    "ops/csrc/cann/npu_rotary_position_embedding.cpp": "npu_rotary_position_embedding",
}
VALUE = "a value"


def _found(body: list[ast.stmt], name: str) -> str | None:
    """The arguments of a function, or that there is a value of this name; None: it is not there."""
    first, _, rest = name.partition(".")
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == first and rest:
            return _found(node.body, rest)
        if isinstance(node, ast.FunctionDef) and node.name == first and not rest:
            for argument in ast.walk(node.args):
                if isinstance(argument, ast.arg):
                    argument.annotation = None
            return ast.unparse(node.args)
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == first for target in targets):
            return VALUE
    return None


def functions(root: Path) -> dict[str, str | None]:
    """ "file: name" -> its arguments, below the folder with ``mindspeed/``."""
    return {
        f"{file}: {name}": _found(ast.parse((root / "mindspeed" / f"{file}.py").read_text()).body, name)
        for file, names in USED.items()
        for name in names
    }


def compiled(root: Path) -> dict[str, list[str]]:
    """ "file: name" -> the parameter list of each overload, as written."""
    found = {}
    for file, name in COMPILED.items():
        text = (root / "mindspeed" / file).read_text()
        lists = re.findall(rf"^[\w:<>]+ {name}\(([^)]*)\)\s*{{", text, re.MULTILINE)
        assert f'm.def("{name}"' in text
        found[f"{file}: {name}"] = [" ".join(parameters.split()) for parameters in lists]
    return found


def main() -> None:
    root = Path(sys.argv[1])
    commit = subprocess.run(("git", "-C", root, "rev-parse", "HEAD"), check=True, capture_output=True, text=True)
    record = {"commit": commit.stdout.strip(), "functions": functions(root), "compiled": compiled(root)}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
