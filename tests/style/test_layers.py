"""Who may import whom, where vendor libraries live, and that device names stay inside ``mega_rl/platform``.

``ROWS``, ``ROOMS`` and ``HOMES`` are the rules; test_contributing.py holds the tables of CONTRIBUTING.md equal to them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent.parent
ROWS = (
    ("types", "microbatch", "errors"),
    ("models", "own_code"),
    ("config", "observe"),
    ("platform", "algorithms", "rewards", "fleet"),
    ("parallel", "environments"),
    ("data", "bridge"),
    ("megatron", "rollout", "planning", "synthetic"),
    ("evaluation",),
    ("stages", "doctor", "cli", "importers", "report", "serving", "simulation"),
    ("tools", "examples"),
)
ROW = {package: row for row, packages in enumerate(ROWS) for package in packages}
# The rooms of a package, its inner folders and what lies directly in it (under the package's own name), from the lowest
# level to the highest: a room imports from itself and from rooms of lower levels, never from one of its own level.
ROOMS: dict[str, tuple[tuple[str, ...], ...]] = {
    "bridge": (
        ("bridge",),
        ("bridge.mapping", "bridge.reshard"),
        ("bridge.files", "bridge.outgoing"),
        ("bridge.files.torch_dist",),
        ("bridge.files.peft",),
    ),
    "config": (("config.schema",), ("config.reading",), ("config.checks",), ("config",)),
    "data": (("data.rows",), ("data.tokens",), ("data.pictures",), ("data", "data.sets")),
    "doctor": (("doctor.probes",), ("doctor",)),
    "environments": (("environments",), ("environments.built_in",)),
    "importers": (("importers.draft",), ("importers.rules",), ("importers",)),
    "megatron": (
        ("megatron.tuning",),
        ("megatron.layers",),
        ("megatron.model",),
        ("megatron.optim",),
        ("megatron",),
        ("megatron.checkpoint",),
    ),
    "observe": (("observe.metrics",), ("observe.sinks",), ("observe",), ("observe.analysis",)),
    "parallel": (("parallel",), ("parallel.watch",)),
    "platform": (("platform.operators",), ("platform.contract",), ("platform.ascend",), ("platform",)),
    "rewards": (("rewards.sandbox",), ("rewards.functions",), ("rewards.pool",), ("rewards",)),
    "rollout": (
        ("rollout",),
        ("rollout.collect", "rollout.episodes", "rollout.vllm.start"),
        ("rollout.scheduling", "rollout.vllm"),
        ("rollout.remote",),
        ("rollout.remote.fleet",),
    ),
    "stages": (
        ("stages.run",),
        ("stages.learn", "stages.weights"),
        ("stages.models",),
        ("stages.offline", "stages.score"),
        ("stages.sampling",),
        ("stages",),
    ),
}
LEVEL = {room: level for levels in ROOMS.values() for level, rooms in enumerate(levels) for room in rooms}
# A vendor library, and the folders and files that may import it.
HOMES: dict[str, tuple[str, ...]] = {
    "megatron": ("mega_rl/megatron/",),
    "vllm": ("mega_rl/rollout/vllm/",),
    "vllm_ascend": ("mega_rl/rollout/vllm/",),
    "ray": ("mega_rl/rollout/remote/",),
    "flash_attn": ("mega_rl/platform/cuda.py",),
    "liger_kernel": ("mega_rl/platform/operators/compiled.py",),
    "torch_npu": ("mega_rl/platform/npu.py", "mega_rl/platform/operators/npu_kernels.py"),
    "mindspeed": ("mega_rl/platform/ascend/mindspeed.py", "mega_rl/platform/ascend/mindspeed_kernels.py"),
}
DEVICE_NAME = re.compile(r"(cuda|nccl)(:.*)?|.*CUDA_VISIBLE_DEVICES.*", re.DOTALL)


def imports(tree: ast.AST, path: str, inside: bool = False) -> Iterator[tuple[int, str, bool]]:
    """(line, absolute module, inside a function) of every import, ``import_module("...")`` included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, inside) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(Path(path).parent.parts[: len(Path(path).parts) - node.level]) if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            yield from ((node.lineno, f"{module}.{alias.name}", inside) for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in (
            "import_module",
            "__import__",
        ):
            yield from ((node.lineno, str(arg.value), inside) for arg in node.args[:1] if isinstance(arg, ast.Constant))
        function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from imports(node, path, inside or function)


def room(module: str) -> str:
    """The room of ``LEVEL`` in which a module of ours lies, or its package where that has no rooms."""
    package, *rest = module.removeprefix("mega_rl.").split(".")
    outer_last = [".".join([package, *rest[:depth]]) for depth in range(len(rest), 0, -1)]
    return next((name for name in outer_last if name in LEVEL), package)


def import_faults(tree: ast.AST, path: str) -> Iterator[str]:
    parts = path.removesuffix(".py").split("/")
    package = parts[1] if parts[0] == "mega_rl" and len(parts) > 1 else parts[0]
    here = room(".".join(parts))
    for line, module, inside in imports(tree, path):
        root, _, rest = module.partition(".")
        if root in HOMES and not path.startswith(HOMES[root]):
            yield f"{path}:{line}: {root} may be imported only in {' and '.join(HOMES[root])}"
        if root != "mega_rl":
            continue
        target = rest.split(".")[0]
        if inside:
            yield f"{path}:{line}: {module} is imported inside a function"
        there = room(module)
        if target == package and there != here and LEVEL[there] >= LEVEL[here]:
            yield f"{path}:{line}: {here} may not import {there}"
        if package == "__init__" or (target != package and ROW.get(target, -1) >= ROW[package]):
            yield f"{path}:{line}: {package} (row {ROW.get(package)}) may not import {target} (row {ROW.get(target)})"


def device_faults(tree: ast.AST, path: str) -> Iterator[str]:
    """Vendor device calls and names; docstrings, bare strings and comments may speak of them."""
    bare = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        found = ""
        if isinstance(node, ast.Attribute) and node.attr == "cuda":
            found = f"{ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in bare:
            found = repr(node.value) if DEVICE_NAME.fullmatch(node.value) else ""
        elif isinstance(node, ast.keyword) and node.arg == "num_gpus":
            found = "num_gpus="
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [f"{getattr(node, 'module', '')}.{alias.name}" for alias in node.names]
            found = next((name for name in names if re.search(r"(^|\.)torch\.cuda(\.|$)", name)), "")
        if found:
            yield f"{path}:{getattr(node, 'lineno', 0)}: {found} belongs in mega_rl/platform"


def faults(path: str, source: str) -> list[str]:
    """Every broken rule of one file; ``path`` is relative to the repository."""
    tree = ast.parse(source, path)
    devices = [] if path.startswith("mega_rl/platform/") else device_faults(tree, path)
    return [*import_faults(tree, path), *devices]


def source_files() -> list[str]:
    folders = ("mega_rl", "tools", "examples")
    return sorted(str(p.relative_to(REPO)) for folder in folders for p in (REPO / folder).rglob("*.py"))


@pytest.mark.parametrize("path", source_files())
def test_file_keeps_the_rules(path: str) -> None:
    assert faults(path, (REPO / path).read_text(encoding="utf-8")) == []


def test_every_package_has_a_row() -> None:
    packages = {p.stem for p in (REPO / "mega_rl").iterdir() if p.suffix == ".py" or (p / "__init__.py").is_file()}
    assert packages - {"__init__"} <= set(ROW)


def test_every_inner_room_has_its_level() -> None:
    inner = {p.parent.relative_to(REPO / "mega_rl") for p in (REPO / "mega_rl").glob("*/**/__init__.py")}
    names = {".".join(folder.parts) for folder in inner}
    holding = {
        name for name in names if "." not in name or any((REPO / "mega_rl").joinpath(*name.split(".")).glob("[!_]*.py"))
    }
    with_rooms = {name.split(".")[0] for name in holding if "." in name}
    assert {name for name in holding if name.split(".")[0] in with_rooms} == set(LEVEL)
    assert all(room.split(".")[0] == package for package, levels in ROOMS.items() for rooms in levels for room in rooms)


def test_no_room_is_higher_than_what_it_imports_asks_for() -> None:
    used: dict[str, set[str]] = {name: set() for name in LEVEL}
    for path in source_files():
        here = room(module_name(path))
        for _, module, _ in imports(ast.parse((REPO / path).read_text(encoding="utf-8")), path):
            there = room(module) if module.startswith("mega_rl.") else ""
            if here in LEVEL and there in LEVEL and there.split(".")[0] == here.split(".")[0] and there != here:
                used[here].add(there)
    assert {name: 1 + max((LEVEL[r] for r in used[name]), default=-1) for name in LEVEL} == LEVEL


@pytest.mark.parametrize(
    ("path", "source", "expected"),
    [
        ("mega_rl/config/a.py", "from mega_rl.stages.rl import train", "may not import stages"),
        (
            "mega_rl/bridge/a.py",
            "if TYPE_CHECKING:\n    import mega_rl.megatron.model.transformer",
            "may not import megatron",
        ),
        ("mega_rl/types.py", "from mega_rl import config", "may not import config"),
        ("mega_rl/data/a.py", "from ..stages import rl", "may not import stages"),
        ("mega_rl/megatron/a.py", "from mega_rl.rollout.engine import Engine", "may not import rollout"),
        ("mega_rl/data/a.py", "from mega_rl.bridge import plan", "may not import bridge"),
        ("mega_rl/fleet/a.py", "from mega_rl.rollout.engine import Engine", "may not import rollout"),
        ("mega_rl/fleet/a.py", "from mega_rl.parallel import store", "may not import parallel"),
        ("mega_rl/fleet/a.py", "from mega_rl.simulation import c", "may not import simulation"),
        ("mega_rl/__init__.py", "from mega_rl.types import Prompt", "may not import types"),
        ("mega_rl/bridge/mapping/a.py", "from mega_rl.bridge.files.stored import S", "may not import bridge.files"),
        ("mega_rl/bridge/mapping/a.py", "from ..reshard import plan", "bridge.mapping may not import bridge.reshard"),
        ("mega_rl/bridge/reshard/a.py", "import mega_rl.bridge.files.copy", "may not import bridge.files"),
        ("mega_rl/bridge/reshard/a.py", "from mega_rl.bridge import outgoing", "may not import bridge.outgoing"),
        ("mega_rl/bridge/reshard/a.py", "from mega_rl.bridge.mapping import vllm", "may not import bridge.mapping"),
        ("mega_rl/bridge/outgoing/a.py", "from mega_rl.bridge.files import copy", "may not import bridge.files"),
        ("mega_rl/bridge/files/a.py", "from mega_rl.bridge.outgoing import noise", "may not import bridge.outgoing"),
        (
            "mega_rl/bridge/slices.py",
            "from mega_rl.bridge.mapping import tensors",
            "bridge may not import bridge.mapping",
        ),
        ("mega_rl/bridge/__init__.py", "from .reshard.plan import Plan", "bridge may not import bridge.reshard"),
        ("mega_rl/rollout/a.py", "from mega_rl.rollout.vllm.engine import E", "rollout may not import rollout.vllm"),
        ("mega_rl/rollout/a.py", "from .remote import engines", "rollout may not import rollout.remote"),
        ("mega_rl/rollout/vllm/a.py", "from mega_rl.rollout.remote import r", "may not import rollout.remote"),
        ("mega_rl/platform/operators/a.py", "from mega_rl.platform.ascend import d", "may not import platform.ascend"),
        ("mega_rl/platform/ascend/a.py", "from mega_rl.platform import dispatch", "may not import platform"),
        ("mega_rl/stages/run/a.py", "from mega_rl.stages import rl", "stages.run may not import stages"),
        ("mega_rl/stages/run/a.py", "from mega_rl.stages.learn import gates", "stages.run may not import stages.learn"),
        ("mega_rl/doctor/probes/a.py", "from mega_rl.doctor import host", "doctor.probes may not import doctor"),
        ("mega_rl/stages/a.py", "import ray", "ray may be"),
        ("mega_rl/stages/a.py", "def f():\n    from mega_rl.types import Prompt", "inside a function"),
        ("mega_rl/stages/a.py", "def f():\n    import_module('mega_rl.types')", "inside a function"),
        ("mega_rl/stages/a.py", "from megatron.core import parallel_state", "megatron may be imported only"),
        ("mega_rl/stages/a.py", "def f():\n    import vllm", "vllm may be imported only"),
        ("mega_rl/platform/cpu.py", "import torch_npu", "torch_npu may be imported only"),
        ("mega_rl/megatron/a.py", "import mindspeed.megatron_adaptor", "mindspeed may be imported only"),
        ("tools/a.py", "import importlib\nimportlib.import_module('vllm')", "vllm may be imported only"),
        ("mega_rl/stages/a.py", "torch.cuda.synchronize()", "torch.cuda belongs"),
        ("mega_rl/stages/a.py", "x = tensor.cuda()", "tensor.cuda belongs"),
        ("mega_rl/stages/a.py", "import torch.cuda", "torch.cuda belongs"),
        ("mega_rl/stages/a.py", "from torch import cuda", "torch.cuda belongs"),
        ("mega_rl/stages/a.py", "from torch.cuda import Stream", "torch.cuda.Stream belongs"),
        ("mega_rl/stages/a.py", "device = 'cuda'", "'cuda' belongs"),
        ("mega_rl/stages/a.py", "device = f'cuda:{rank}'", "'cuda:' belongs"),
        ("mega_rl/stages/a.py", "init(backend='nccl')", "'nccl' belongs"),
        ("mega_rl/stages/a.py", "mask = os.environ['CUDA_VISIBLE_DEVICES']", "'CUDA_VISIBLE_DEVICES' belongs"),
        ("mega_rl/rollout/a.py", "f.options(num_gpus=1)", "num_gpus= belongs"),
    ],
)
def test_broken_rule_is_found(path: str, source: str, expected: str) -> None:
    assert any(expected in fault for fault in faults(path, source)), faults(path, source)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("mega_rl/stages/a.py", "from mega_rl.megatron import engine\nfrom mega_rl.rollout import engine"),
        (
            "mega_rl/bridge/a.py",
            "from mega_rl.bridge.rules import Rule\nfrom .plan import Plan\nfrom mega_rl.types import X",
        ),
        ("mega_rl/megatron/a.py", "from megatron.core import parallel_state"),
        ("mega_rl/rollout/vllm/a.py", "def f():\n    from vllm import LLM"),
        ("mega_rl/platform/npu.py", "import importlib\nimportlib.import_module('torch_npu')"),
        ("mega_rl/platform/cuda.py", "torch.cuda.synchronize()\nbackend = 'nccl'"),
        (
            "mega_rl/stages/a.py",
            '"""Like "cuda".\n\ntorch.cuda.x"""\n\ndef f():\n    "cuda"\n    # torch.cuda.synchronize()',
        ),
        ("mega_rl/platform/a.py", "from mega_rl.types import InputError"),
        (
            "mega_rl/bridge/files/a.py",
            "from mega_rl.bridge.mapping import tensors\nfrom mega_rl.bridge.slices import Box",
        ),
        (
            "mega_rl/rollout/remote/a.py",
            "from mega_rl.rollout.vllm.engine import E\nfrom mega_rl.rollout.engine import E",
        ),
        ("mega_rl/stages/a.py", "from mega_rl.stages.run.job import Job"),
        ("mega_rl/stages/run/a.py", "from mega_rl.stages.run import job\nfrom .batch_share import BatchShare"),
        ("mega_rl/megatron/a.py", "from mega_rl.bridge.files.stored import S"),
    ],
)
def test_kept_rule_is_accepted(path: str, source: str) -> None:
    assert faults(path, source) == []


def module_name(path: str) -> str:
    """The dotted name of a source file of ours; a package's ``__init__`` has the package's."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def import_graph(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """For every module, those that Python runs before it, given the modules' source texts by path.

    An import of ``a.b.c`` runs the packages ``a`` and ``a.b`` first. Packages in which the importing module itself lies
    are left out: they are being run already.
    """
    files = {module_name(path): path for path in sources}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        around = {module.rsplit(".", depth)[0] for depth in range(1, module.count(".") + 1)}
        graph[module] = set()
        for _, target, _ in imports(ast.parse(sources[path], path), path):
            while target and target not in files:  # the last name may be a function or a class
                target = target.rpartition(".")[0]
            parents = {target.rsplit(".", depth)[0] for depth in range(1, target.count(".") + 1)}
            graph[module] |= ({target} | (parents - around)) & files.keys() - {module}
    return graph


def circle(graph: Mapping[str, set[str]]) -> list[str]:
    """One circle of imports, its first module at both ends, or an empty list."""
    finished: set[str] = set()

    def search(module: str, way: list[str]) -> list[str]:
        if module in way:
            return [*way[way.index(module) :], module]
        for target in sorted(graph[module] - finished):
            if found := search(target, [*way, module]):
                return found
        finished.add(module)
        return []

    return next((found for module in sorted(graph) if (found := search(module, []))), [])


def test_there_is_no_circle_of_imports() -> None:
    sources = {path: (REPO / path).read_text(encoding="utf-8") for path in source_files()}
    assert circle(import_graph(sources)) == []


@pytest.mark.parametrize(
    ("sources", "expected"),
    [
        (
            {"mega_rl/a/b.py": "from mega_rl.a import c", "mega_rl/a/c.py": "from . import b"},
            ["mega_rl.a.b", "mega_rl.a.c", "mega_rl.a.b"],
        ),
        (  # a package's __init__ and a module inside it
            {"mega_rl/a/__init__.py": "from mega_rl.a.b import X", "mega_rl/a/b.py": "from mega_rl.a import Y"},
            ["mega_rl.a", "mega_rl.a.b", "mega_rl.a"],
        ),
        (  # through the __init__ of an inner room, which nobody names
            {
                "mega_rl/a/__init__.py": "from mega_rl.a.cpu import CPU",
                "mega_rl/a/cpu.py": "from mega_rl.a.inner.kernels import f",
                "mega_rl/a/inner/__init__.py": "from mega_rl import a",
                "mega_rl/a/inner/kernels.py": "",
            },
            ["mega_rl.a", "mega_rl.a.cpu", "mega_rl.a.inner", "mega_rl.a"],
        ),
        (
            {
                "mega_rl/a/__init__.py": "from mega_rl.a.cpu import CPU",
                "mega_rl/a/cpu.py": "from mega_rl.a.inner.kernels import f",
                "mega_rl/a/inner/__init__.py": "",
                "mega_rl/a/inner/kernels.py": "",
                "mega_rl/a/inner/dispatch.py": "from mega_rl import a",
            },
            [],
        ),
    ],
)
def test_a_circle_of_imports_is_found(sources: dict[str, str], expected: list[str]) -> None:
    assert circle(import_graph(sources)) == expected
