"""The documentation: every page has its translation and its place in the index, every link and every key is real."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections import Counter
from pathlib import Path

import pytest

from mega_rl.config.schema.sections import RunConfig
from mega_rl.models.shape import FAMILIES
from tests.launching.launch import REPO
from tests.style.test_layers import LEVEL

PAGES = sorted(path for path in REPO.glob("docs/*.md") if not path.stem.endswith("_zh"))
PAIRS = [*PAGES, REPO / "README.md", REPO / "configs" / "README.md"]
TEXTS = sorted(
    [*REPO.glob("*.md"), *REPO.glob("docs/*.md"), *REPO.glob("configs/*.md"), *REPO.glob("examples/*/README.md")]
)
PROGRAMS = sorted([*REPO.glob("benchmarks/**/*.py"), *REPO.glob("benchmarks/**/*.sh"), *REPO.glob("tests/faults/*.py")])
OTHER_SPELLINGS = {"trainer.noise_injection", "rollout.validation"}  # read beside the fields, or named as what was
# Words that the Chinese pages once had -> what docs/glossary_zh.md has for the same thing.
OTHER_WORDS = {
    "训练侧": "训练端",
    "闸门": "核对",
    "归一化权重": "归一化层（LayerNorm/RMSNorm）权重",
    "全部页面": "全部文档",
    "逐比特": "逐位",
    "训练器": "训练端",
    "权重仓库": "权重存放处",
    "引擎组": "引擎群",
}
UNTRANSLATED = re.compile(r"(?<![\w（/-])(rank|token|checkpoint|loss)s?(?![\w/-])", re.ASCII)
BLOCK = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)


def translation(page: Path) -> Path:
    return page.with_name(f"{page.stem}_zh.md")


def blocks(text: str) -> list[str]:
    """The blocks in some language, without comments, which are translated; a block in no language is a drawing."""
    codes = (block.splitlines() for language, block in BLOCK.findall(text) if language)
    lines = ([re.sub(r"(^|\s)#.*", "", line).strip() for line in code] for code in codes)
    return ["\n".join(line for line in code if line) for code in lines]


def spans(text: str) -> Counter[str]:
    """The code spans outside of code blocks, a line break inside one read as a blank."""
    return Counter(re.sub(r"\s+", " ", span) for span in re.findall(r"`([^`]+)`", BLOCK.sub("", text)))


def tables(text: str) -> list[list[int]]:
    """For every table the number of cells of each of its rows."""
    found: list[list[int]] = []
    previous = ""
    for line in BLOCK.sub("", text).splitlines():
        if line.startswith("|"):
            if not previous.startswith("|"):
                found.append([])
            found[-1].append(re.sub(r"`[^`]*`|\\\|", "", line).count("|") - 1)
        previous = line
    return found


def headings(text: str) -> list[int]:
    return [len(marks) for marks in re.findall(r"^(#+) ", BLOCK.sub("", text), re.MULTILINE)]


def broken_links(path: Path, text: str) -> list[str]:
    links = re.findall(r"\]\(([^)\s]+)\)", BLOCK.sub("", text))
    targets = [link.partition("#")[0] for link in links if not re.match(r"\w+:", link)]
    return [target for target in targets if target and not (path.parent / target).exists()]


def unknown_keys(text: str) -> list[str]:
    """Code spans that read like ``section.key`` of a configuration and are none; in spans only, as blocks are run."""
    sections = {field.name for field in dataclasses.fields(RunConfig)}
    candidates = (re.fullmatch(r"([a-z_]+(?:\.[a-z_0-9]+)+)(?:\s*[:=].*)?", span) for span in spans(text))
    keys = {found[1] for found in candidates if found and found[1].split(".")[0] in sections}
    files = set(LEVEL) | {key for key in keys if key.rsplit(".", 1)[1] in ("py", "md", "json", "txt", "yaml")}
    return sorted(key for key in keys - files - OTHER_SPELLINGS if not is_key(key))


def is_key(key: str) -> bool:
    """Whether the schema has this key, or one with free content (a table of options) on the way to it."""
    kind: object = RunConfig
    for name in key.split("."):
        if not dataclasses.is_dataclass(kind):
            return typing.get_origin(kind) is dict
        hints = typing.get_type_hints(kind)
        if name not in hints:
            return False
        kind = hints[name]
        if isinstance(kind, types.UnionType):
            kind = next(member for member in typing.get_args(kind) if member is not type(None))
    return True


def absent_programs(text: str) -> list[str]:
    """Benchmarks and programs of the tests that are named and not there, and those that are not started as modules."""
    modules = re.findall(r"-m ((?:benchmarks|tests)(?:\.[a-z]\w*)+)(?!\w|\.\w)", text)
    files = re.findall(r"(?<![\w./-])((?:benchmarks|tests)/[\w/]+\.(?:py|sh))\b", text)
    names = [f"{name.replace('.', '/')}.py" for name in modules] + files
    by_path = re.findall(r"(?:python|-node \d+) (benchmarks/\S+\.py|tests/faults/\S+\.py)", text)
    return [name for name in names if not (REPO / name).is_file()] + by_path


def other_words(chinese: str) -> list[str]:
    """Words of a Chinese page that the glossary has otherwise, or English ones that it translates."""
    prose = re.sub(r"`[^`]*`|\[[^]]*\]\([^)]*\)|\"[^\"]*\"", "", BLOCK.sub("", chinese))
    found = [f"{word}: {ours}" for word, ours in OTHER_WORDS.items() if word in prose]
    return found + [f"{match[0]} is not translated" for match in UNTRANSLATED.finditer(prose) if match[0] != "tokens"]


@pytest.mark.parametrize("page", PAIRS, ids=lambda page: str(page.relative_to(REPO)))
def test_translation_has_the_same_code_and_tables(page: Path) -> None:
    english, chinese = (path.read_text(encoding="utf-8") for path in (page, translation(page)))
    assert headings(chinese) == headings(english)
    assert blocks(chinese) == blocks(english)
    assert tables(chinese) == tables(english)
    ours, theirs = spans(english), spans(chinese)
    assert ours - theirs == theirs - ours == Counter()


@pytest.mark.parametrize("index", ["README.md", "README_zh.md"])
def test_index_has_every_page(index: str) -> None:
    ending = "_zh.md" if index.endswith("_zh.md") else ".md"
    names = {page.stem for page in PAGES} - {"README"}
    linked = re.findall(
        r"^\| \[[^]]+\]\(([^)]+)\) \|", (REPO / "docs" / index).read_text(encoding="utf-8"), re.MULTILINE
    )
    assert Counter(linked) == Counter(name + ending for name in names)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(REPO)))
def test_links_and_keys_are_real(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert broken_links(path, text) == []
    assert unknown_keys(text) == []


@pytest.mark.parametrize(
    "path",
    [path for path in TEXTS if path.name != "CHANGELOG.md"] + PROGRAMS,
    ids=lambda path: str(path.relative_to(REPO)),
)
def test_benchmarks_that_are_named_are_there(path: Path) -> None:
    assert absent_programs(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", PAIRS, ids=lambda page: str(page.relative_to(REPO)))
def test_chinese_has_the_words_of_the_glossary(page: Path) -> None:
    text = translation(page).read_text(encoding="utf-8")
    assert other_words(text if page.stem != "glossary" else "") == []


def test_new_places_in_the_changelog_are_real() -> None:
    text = (REPO / "CHANGELOG.md").read_text(encoding="utf-8")
    moved = re.findall(r"^ *\| `mega_rl[^|]* \| (`mega_rl[^|]*`) \|$", text, re.MULTILINE)
    assert moved
    for now in re.findall("`([^`]*)`", " ".join(moved)):
        stem, _, last = now.rpartition(".")
        for name in last.strip("{}").split(","):
            module = REPO / stem.replace(".", "/")
            inside = module.with_suffix(".py")
            assert (module / f"{name}.py").exists() or f"class {name}" in inside.read_text(encoding="utf-8"), now


@pytest.mark.parametrize("suffix", ["", "_zh"])
def test_measurements_of_the_readme_are_those_of_the_page(suffix: str) -> None:
    page = (REPO / f"docs/benchmarks{suffix}.md").read_text(encoding="utf-8").splitlines()
    readme = (REPO / f"README{suffix}.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in readme if re.search(r"\| `python -m (pytest|benchmarks)[^|]*\|$", line)]
    assert len(rows) == 5 and [line for line in rows if line not in page] == []


@pytest.mark.parametrize("suffix", ["", "_zh"])
def test_readme_has_every_model_family(suffix: str) -> None:
    rows = re.findall(r"^\|[^|`]+\| `(\w+For\w+)` \|", (REPO / f"README{suffix}.md").read_text(encoding="utf-8"), re.M)
    assert rows == list(FAMILIES)


def test_differences_are_found() -> None:
    text = "# A\n\nSet `model.path`.\n\n| a | b |\n|---|---|\n| `x|y` | 1 |\n\n```bash\nrun a.py  # now\n```\n"
    assert blocks(text) == ["run a.py"] and tables(text) == [[2, 2, 2]] and headings(text) == [1]
    assert spans(text) == Counter({"model.path": 1, "x|y": 1})
    assert other_words("闸门和 rank 0，`rank`、各进程（rank）、tokens/s") == ["闸门: 核对", "rank is not translated"]
    assert spans("`a\nb`") == spans("`a b`")
    assert broken_links(
        REPO / "README.md", "[a](docs/absent.md) [b](docs/plan.md#top) [c](https://x.y) [d](#here)"
    ) == ["docs/absent.md"]
    text = (
        "`python -m benchmarks.gpu.run`, `-m tests.no.such --quick`, `benchmarks/no.py`, [a](../benchmarks/report.py)"
    )
    assert absent_programs(text) == ["tests/no/such.py", "benchmarks/no.py"]
    assert absent_programs("python benchmarks/report.py") == ["benchmarks/report.py"]
    assert unknown_keys("`model.paht` `rollout.vllm.any` `model.path=X` `data.prompt: 1` `rewards.py` `a.b`") == [
        "data.prompt",
        "model.paht",
    ]
