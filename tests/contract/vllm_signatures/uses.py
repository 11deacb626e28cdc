"""What our sources ask of vLLM, read from them: every name they reach, and how they call it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent.parent.parent
ROLLOUT = REPO / "mega_rl" / "rollout"
VERSIONS = "vllm/start/versions.py"  # alone may name what only some of the covered versions have

_OUTPUT, _ANSWER = "vllm.outputs.RequestOutput", "vllm.outputs.CompletionOutput"
WORKER = "vllm.v1.worker.gpu_worker.Worker"
# Expressions of our sources that hold something of vLLM's: what an assignment in another function hides.
INSTANCES = {
    ("vllm/engine.py", "self._llm"): "vllm.LLM",
    ("vllm/engine.py", "self._llm.llm_engine"): "vllm.v1.engine.llm_engine.LLMEngine",
    ("vllm/receiving_engine.py", "self._llm"): "vllm.LLM",
    ("vllm/weight_changes.py", "self._llm"): "vllm.LLM",
    ("vllm/start/versions.py", "llm.llm_engine.renderer"): "vllm.renderers.base.BaseRenderer",
    ("vllm/start/versions.py", "state"): "vllm.v1.engine.output_processor.RequestState",
    ("vllm/engine.py", "output"): _OUTPUT,
    ("vllm/engine.py", "answer"): _ANSWER,
    ("requests.py", "output"): _OUTPUT,
    ("requests.py", "answer"): _ANSWER,
    ("requests.py", "answer.logprobs"): "vllm.logprobs.FlatLogprobs",
    ("vllm/streaming_engine.py", "answer.logprobs"): "vllm.logprobs.FlatLogprobs",
    ("vllm/worker_extension.py", "self.model_runner"): f"{WORKER}.model_runner",
    ("vllm/start/cpu_routing.py", "runner"): f"{WORKER}.model_runner",
    ("vllm/start/cpu_routing.py", "self._runner"): f"{WORKER}.model_runner",
    ("vllm/start/cpu_routing.py", "self._cache"): "vllm.config.cache.CacheConfig",
    ("vllm/start/adapter_slots.py", "manager"): "vllm.lora.model_manager.LoRAModelManager",
    ("vllm/worker_extension.py", "self.device"): f"{WORKER}.device",
}
OTHERS = (f"{WORKER}.device", f"{WORKER}.model_runner.get_model()")  # torch's: what they have is not vLLM's to say


@dataclass(frozen=True, order=True)
class Call:
    num_positional: int
    keywords: tuple[str, ...]
    is_open: bool  # with * or **: only the rest can be checked


@dataclass(frozen=True, order=True)
class Use:
    path: str  # dotted; "()" after a name stands for what calling it returns
    call: Call | None
    where: str  # file under mega_rl/rollout:line

    @property
    def is_optional(self) -> bool:
        """Whether some of the covered versions may lack it."""
        return self.where.startswith(f"{VERSIONS}:")


def uses() -> list[Use]:
    """Every use in ``mega_rl/rollout``, in the order of files and lines."""
    found = []
    for path in sorted(ROLLOUT.rglob("*.py")):
        found += list(_File(path.relative_to(ROLLOUT).as_posix(), ast.parse(path.read_text(encoding="utf-8"))).uses())
    return found


class _File:
    def __init__(self, name: str, tree: ast.Module) -> None:
        self.name, self.tree = name, tree
        self.known = {text: path for (file, text), path in INSTANCES.items() if file == name}
        self.imports: list[tuple[str, int]] = []
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    self.known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    self.imports.append((f"{node.module}.{alias.name}", node.lineno))

    def uses(self) -> Iterator[Use]:
        for path, line in self.imports:
            yield Use(path, None, f"{self.name}:{line}")
        inner: set[int] = set()  # parts of longer expressions
        for node in ast.walk(self.tree):  # from the outside in
            if isinstance(node, ast.Call):
                if patched := self._patched(node):
                    yield Use(patched, None, f"{self.name}:{node.lineno}")
                if path := self._path(node.func):
                    inner |= {id(part) for part in ast.walk(node.func)}
                    yield Use(path, _call(node), f"{self.name}:{node.lineno}")
            elif isinstance(node, ast.Attribute) and id(node) not in inner and (path := self._path(node)):
                inner |= {id(part) for part in ast.walk(node)} - _calls_in(node)
                yield Use(path, None, f"{self.name}:{node.lineno}")

    def _path(self, node: ast.expr) -> str | None:
        if (path := self.known.get(ast.unparse(node))) is not None:
            return path
        if isinstance(node, ast.Attribute) and (owner := self._path(node.value)) and owner not in OTHERS:
            return f"{owner}.{node.attr}"
        if isinstance(node, ast.Call) and (called := self._path(node.func)):
            return f"{called}()"
        return None

    def _patched(self, node: ast.Call) -> str | None:
        """``mock.patch.object(owner, "name", ...)`` and ``hasattr(owner, "name")`` as owner.name."""
        if ast.unparse(node.func) not in ("mock.patch.object", "hasattr") or len(node.args) < 2:
            return None
        owner, name = self._path(node.args[0]), node.args[1]
        return f"{owner}.{name.value}" if owner and isinstance(name, ast.Constant) else None


def _calls_in(node: ast.Attribute) -> set[int]:
    """Calls within a chain are uses of their own."""
    return {id(part) for call in ast.walk(node) if isinstance(call, ast.Call) for part in (call, *ast.walk(call.func))}


def _call(node: ast.Call) -> Call:
    is_open = any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords)
    positional = sum(not isinstance(a, ast.Starred) for a in node.args)
    return Call(positional, tuple(k.arg for k in node.keywords if k.arg is not None), is_open)
