"""``tools/reference.py``: the pages of configuration and metrics are those of the code, in both languages."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import pytest

from mega_rl.config.reading.typed import leaves
from mega_rl.config.schema.sections import RunConfig
from mega_rl.observe.metrics.declared import METRICS, SECTIONS
from mega_rl.observe.metrics.healthy import HEALTHY
from tests.launching.launch import REPO
from tests.unit.tools.pages.test_docs import spans
from tools import reference

REMEDY = "run `make reference`, and give what it shows its Chinese in docs/reference_zh.json"


@pytest.fixture(scope="module")
def chinese() -> dict[str, str]:
    return json.loads(reference.CHINESE.read_text(encoding="utf-8"))


def test_pages_are_those_of_the_code(chinese: dict[str, str]) -> None:
    texts, _ = reference.pages(chinese)
    stale = [name for name, text in texts.items() if (REPO / "docs" / name).read_text(encoding="utf-8") != text]
    assert stale == [], REMEDY


def test_every_text_has_its_chinese(chinese: dict[str, str]) -> None:
    _, used = reference.pages(chinese)
    assert [f"{place}: {english}" for english, place in used.items() if not chinese.get(english)] == [], REMEDY
    assert set(chinese) - set(used) == set(), REMEDY


def test_chinese_names_the_same_code(chinese: dict[str, str]) -> None:
    """Keys, metrics and files in a text; the words that become code spans are found in both languages alike."""
    differ = []
    for english, text in chinese.items():
        ours, theirs = reference.Words(None)(english, ""), reference.Words({english: text})(english, "")
        if spans(ours) != spans(theirs):
            differ.append((english, text))
    assert differ == []


def test_every_key_and_metric_is_on_its_page() -> None:
    found = [key for _, _, keys in reference.sections() for key in keys]
    assert [key.name for key in found if not key.meaning] == [], "a key without a comment in schema.py"
    names = {key.name for key in found}
    assert {name for name, _ in leaves()} == names
    assert {name.split(".")[0].removesuffix("[]") for name in names} == {field.name for field in fields(RunConfig)}
    assert {spec.section for spec in METRICS} == {section.key for section in SECTIONS}
    assert set(HEALTHY) <= {spec.name for spec in METRICS}


SOURCE = '''
class Outer:
    """A section
    over two lines."""

    first: int = 1  # what it is
    # Rarely set.
    # Above one,
    # over two lines.
    second: list[str] = field(
        default_factory=list  # and inside
    )
    third = 3  # no field
    bare: int = 1
'''


def test_meaning_is_the_comments_of_a_field() -> None:
    assert reference.comments_of(SOURCE)["Outer"] == {
        "": "A section over two lines.",
        "first": "what it is",
        "second": "Above one, over two lines. and inside",
        "bare": "",
    }


@dataclass
class Kinds:
    word: Literal["a", "b"] | None = None
    words: list[Literal["a", "b"]] = field(default_factory=lambda: ["a", "b"])
    flag: bool = True
    names: list[str] = field(default_factory=list)
    free: dict[str, Any] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("name", "takes", "default"),
    [
        ("word", "`a`, `b`, `null`", "`null`"),
        ("words", "`list`: `a`, `b`", "`[a, b]`"),
        ("flag", "`true`, `false`", "`true`"),
        ("names", "`list[str]`", "`[]`"),
        ("free", "`dict`", "`{}`"),
    ],
)
def test_what_a_key_takes_and_its_default(name: str, takes: str, default: str) -> None:
    hints = reference.typing.get_type_hints(Kinds)
    key = reference.Key("kinds.", next(one for one in fields(Kinds) if one.name == name), hints[name], "")
    assert (key.takes(), key.default("required")) == (takes, default)


def test_bounds_come_from_the_rules() -> None:
    takes = {key.name: key.takes() for _, _, keys in reference.sections() for key in keys}
    assert takes["rollout.temperature"] == "`float >= 0.01 and <= 1000`"
    assert takes["checkpoint.save_freq"] == "`int >= 1`, `-1`, `null`"
    assert takes["data.seed"] == "`int >= 0 and < 2**32`"
    assert takes["data.max_prompt_length"] == "`int >= 1`"  # the largest number of all is no bound that anybody meets
    assert takes["logging.dump_rollouts"] == "`int >= -1`"


def test_words_become_code() -> None:
    words = reference.Words(None)
    assert words("as model.dtype | pi_old, see sft/loss and tools/plan.py", "x") == (
        "as `model.dtype`; `pi_old`, see `sft/loss` and `tools/plan.py`"
    )
    assert words("such as *.layers.3.*, ``a*b``", "x") == r"such as \*.layers.3.\*, `a*b`"
    assert words("|a - b|, config/algorithm.py, the model.", "x") == r"\|a - b\|, config/algorithm.py, the model."
    assert reference.Words({"of x_y": "在x_y中"})("of x_y", "x") == "在`x_y`中"


def test_what_is_missing_is_added_and_named(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], chinese: dict[str, str]
) -> None:
    lacking = "seed of the noise"
    table = tmp_path / "docs" / "reference_zh.json"
    table.parent.mkdir()
    table.write_text(json.dumps({"gone": "旧", **{k: v for k, v in chinese.items() if k != lacking}}), encoding="utf-8")
    monkeypatch.setattr(reference, "REPO", tmp_path)
    monkeypatch.setattr(reference, "CHINESE", table)
    assert reference.main() == 1
    assert f"aqn.seed: {lacking}" in capsys.readouterr().out
    written = json.loads(table.read_text(encoding="utf-8"))
    assert written[lacking] == "" and "gone" not in written and list(written) == list(chinese)
    assert lacking in (tmp_path / "docs" / "configuration_zh.md").read_text(encoding="utf-8")
    table.write_text(json.dumps(chinese), encoding="utf-8")
    assert reference.main() == 0
