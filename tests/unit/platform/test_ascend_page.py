"""docs/ascend.md and docs/ascend_zh.md say the same, and name only what is there."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path

import pytest

from mega_rl.config import RunConfig
from mega_rl.platform.ascend import environment as ascend_environment
from mega_rl.platform.contract import versions
from mega_rl.platform.contract.base import ProcessRole

ROOT = Path(__file__).resolve().parents[3]
PAGES = {name: (ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("ascend.md", "ascend_zh.md")}
SECTIONS = {field.name for field in dataclasses.fields(RunConfig)}


def blocks(text: str) -> list[str]:
    return re.findall(r"```\w*\n(.*?)```", text, re.DOTALL)


def spans(text: str) -> set[str]:
    """Everything between single backticks."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))


def commands(text: str) -> list[str]:
    """What is typed: the blocks without comments, and without the words that stand for addresses."""
    lines = [line.split(" #")[0].rstrip() for block in blocks(text) for line in block.splitlines()]
    return [re.sub(r"(?<= )(ADDRESS_\w+|[^ ]*[^\x00-\x7f][^ ]*)", "ADDRESS", line) for line in lines]


def rows(text: str) -> list[int]:
    """How many rows each table has, in order."""
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [table.count("\n") for table in tables]


def test_both_languages_say_the_same() -> None:
    english, chinese = PAGES.values()
    assert spans(english) == spans(chinese)
    assert commands(english) == commands(chinese)
    assert rows(english) == rows(chinese)
    assert re.findall(r"^#+ ", english, re.MULTILINE) == re.findall(r"^#+ ", chinese, re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_files_and_links_exist(page: str) -> None:
    text = PAGES[page]
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    for link in links:
        assert (ROOT / "docs" / link).exists(), link
    for file in re.findall(r"\b(?:tools|configs|docker)/[\w./]+\.\w+", text):
        assert (ROOT / file).is_file(), file
    headings = {heading.lower().replace(" ", "-") for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", text)) <= headings


def test_keys_of_the_configuration_exist() -> None:
    keys = set()
    for text in PAGES.values():
        found = {re.split(r"[:= ]", span)[0] for span in spans(text)}
        found |= set(re.findall(r"(?<= )([a-z_]+\.[a-z_.]+)=", "\n".join(blocks(text))))
        keys |= {key for key in found if key.partition(".")[0] in SECTIONS and "." in key}
    assert keys, "no key found: the pattern is wrong"
    for key in keys:
        section: type = RunConfig
        for part in key.split("."):
            types = {field.name: field.type for field in dataclasses.fields(section)}
            assert part in types, f"{key} is no key of the configuration"
            value = getattr(section(), part)
            if isinstance(value, dict):  # rollout.vllm and platform.mindspeed.features: names of other software
                break
            section = type(value)
            if not dataclasses.is_dataclass(section):
                break


def table_row(page: str, section: str, name: str) -> str:
    """The row of a section's first table whose first column has the name."""
    table = PAGES[page].split(f"\n## {section}\n")[1].split("\n## ")[0]
    return next(line for line in table.splitlines() if re.search(rf"^\|[^|]*\b{re.escape(name)}\b", line))


@pytest.mark.parametrize(("page", "section"), zip(PAGES, ("Versions", "版本配套"), strict=True))
def test_versions_are_the_known_good_ones(page: str, section: str) -> None:
    names = {"python": "Python", "cann": "CANN", "mindspeed": "MindSpeed"}
    for component in versions.COMBINATIONS["npu"]:
        if component.name != "ray":
            row = table_row(page, section, names.get(component.name, component.name))
            assert any(version in row for version in component.known_good), component.name


@pytest.mark.parametrize(("page", "section"), zip(PAGES, ("Environment variables", "环境变量"), strict=True))
def test_every_variable_that_is_set_is_explained(page: str, section: str) -> None:
    flags = [field.name for field in dataclasses.fields(ProcessRole)]
    for values in itertools.product((False, True), repeat=len(flags)):
        for setting in ascend_environment.settings(ProcessRole(**dict(zip(flags, values, strict=True)))):
            row = table_row(page, section, setting.variable)
            assert setting.value in row, setting


@pytest.mark.parametrize("page", PAGES)
def test_refused_variables_are_named(page: str) -> None:
    for name in (ascend_environment.ALLOCATOR, ascend_environment.NZ, ascend_environment.BLOCKING):
        assert f"`{name}" in PAGES[page]
