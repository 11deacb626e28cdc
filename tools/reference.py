"""Write the pages of reference from the code: ``python tools/reference.py``.

``docs/configuration.md`` comes from the comments and docstrings of ``mega_rl/config/schema/sections.py``, and
``docs/metrics.md`` from ``METRICS`` and ``HEALTHY`` in ``mega_rl/observe``. Their Chinese twins take every text from
``docs/reference_zh.json``, English -> Chinese. What it lacks is added there with an empty Chinese text and shown; what
no page uses is removed.

Exit status 0: all is written. 1: all is written, but some texts have no Chinese yet.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import io
import json
import re
import sys
import tokenize
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import MISSING

from mega_rl.config.checks.rules import RULES
from mega_rl.config.reading.typed import is_nullable, not_null
from mega_rl.config.schema import sections as schema
from mega_rl.config.schema.limits import MANY, OWN_NAMES
from mega_rl.observe.metrics.declared import METRICS, SECTIONS
from mega_rl.observe.metrics.healthy import HEALTHY
from mega_rl.observe.metrics.metric import MetricSpec

REPO = Path(__file__).resolve().parent.parent
CHINESE = REPO / "docs" / "reference_zh.json"
# Words that are code in a sentence: keys with their section, metrics, tools, and names with an underscore.
_SECTIONS = "|".join(field.name for field in dataclasses.fields(schema.RunConfig))
_METRICS = "|".join(sorted((re.escape(spec.name) for spec in METRICS if "/" in spec.name), reverse=True))
_CODE = re.compile(
    rf"(?<![\w`/.-])((?:(?:{_SECTIONS})\.[a-z_.]*[a-z_]|{_METRICS}|tools/[a-z_]+\.py|[a-z]+(?:_[a-z0-9]+)+)"
    r"(?:=[\w-]+)?)(?![\w`/(])",
    re.ASCII,
)


class Words:
    """The texts of one page: as they are, or their Chinese. ``used`` remembers the English of each, and its place."""

    def __init__(self, chinese: dict[str, str] | None) -> None:
        self.chinese, self.used = chinese, dict[str, str]()

    def __call__(self, english: str, place: str) -> str:
        """``place`` is what needs this text: a key or a metric."""
        if not re.search("[a-zA-Z]", english):
            return english
        self.used.setdefault(english, place)
        text = english if self.chinese is None else self.chinese.get(english) or english
        text = re.sub(r"(`[^`]*`)|\*", lambda found: found[1] or r"\*", text.replace("``", "`"))
        return _CODE.sub(r"`\1`", text).replace(" | ", "; ").replace("|", r"\|")


@dataclasses.dataclass(frozen=True)
class Key:
    """One key of the configuration. ``prefix`` is its section, with a dot; ``meaning`` its comments in the schema."""

    prefix: str
    field: dataclasses.Field[Any]
    hint: Any
    meaning: str

    @property
    def name(self) -> str:
        return self.prefix + self.field.name

    def takes(self) -> str:
        """Choices, or the type with its bounds, as code spans that need no translation."""
        null = ["`null`"] if is_nullable(self.hint) else []
        hint = not_null(self.hint) if null else self.hint
        inner = typing.get_args(hint)[0] if typing.get_origin(hint) is list else None
        if typing.get_origin(inner) is Literal:
            return "`list`: " + ", ".join([f"`{word}`" for word in typing.get_args(inner)] + null)
        if typing.get_origin(hint) is Literal:
            return ", ".join([f"`{word}`" for word in typing.get_args(hint)] + null)
        if self.name in RULES and RULES[self.name].names:
            return ", ".join(f"`{word}`" for word in (*RULES[self.name].names, *OWN_NAMES))
        if hint is bool:
            return "`true`, `false`"
        kind = f"list[{_name(inner)}]" if inner else _name(typing.get_origin(hint) or hint)
        expected = RULES[self.name].expected if self.name in RULES and hint in (int, float) else ""
        bounds = [f"{sign} {limit}" for sign, limit in re.findall(r"(>=|<=|>|<) (-?[\d.*]+)", expected)]
        bounds = [bound for bound in bounds if "**" in bound or float(bound.split()[1]) < MANY]
        only = ["`-1`"] if expected.removeprefix("null or ").startswith("-1") else []
        return ", ".join([f"`{' '.join([kind, ' and '.join(bounds)]).strip()}`", *only, *null])

    def default(self, required: str) -> str:
        if self.field.default == MISSING:
            return required
        factory, default = self.field.default_factory, self.field.default
        value = factory() if factory is not dataclasses.MISSING else default
        return f"`{yaml.safe_dump(value, default_flow_style=True, width=10_000).splitlines()[0]}`".replace("'", "")


def _name(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint))


@functools.cache
def comments_of(source: str) -> dict[str, dict[str, str]]:
    """Class -> field -> the comment lines right above it and the comment behind it, without ``Rarely set.``

    The docstring of the class is that of a field without a name.
    """
    lines = source.splitlines()
    comments = {
        token.start[0]: (token.string.lstrip("# ").strip(), not lines[token.start[0] - 1][: token.start[1]].strip())
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found: dict[str, dict[str, str]] = {}
    for kind in (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)):
        found[kind.name] = {"": " ".join((ast.get_docstring(kind) or "").split())}
        for node in (node for node in kind.body if isinstance(node, ast.AnnAssign)):
            first = node.lineno
            while comments.get(first - 1, ("", False))[1]:
                first -= 1
            texts = [comments[line][0] for line in range(first, (node.end_lineno or first) + 1) if line in comments]
            kept = [text for text in texts if text not in ("Rarely set.", "fmt: skip")]
            found[kind.name][typing.cast(ast.Name, node.target).id] = " ".join(kept)
    return found


def meanings(kind: type) -> dict[str, str]:
    """Field -> what the comments of a dataclass say, those of its bases included."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        found |= comments_of(inspect.getsource(sys.modules[base.__module__]))[base.__name__]
    return found


def sections(kind: Any = schema.RunConfig, name: str = "") -> Iterator[tuple[str, str, list[Key]]]:
    """Name, meaning and keys of every section that has keys of its own, in the order of the schema."""
    comments, hints = meanings(kind), typing.get_type_hints(kind)
    inner, keys = [], []
    for field in dataclasses.fields(kind):
        hint = not_null(hints[field.name]) if is_nullable(hints[field.name]) else hints[field.name]
        entry = typing.get_args(hint)[0] if typing.get_origin(hint) is list else hint
        if dataclasses.is_dataclass(entry):
            inner.append((entry, f"{name}.{field.name}".lstrip(".") + ("[]" if entry is not hint else "")))
        else:
            keys.append(Key(f"{name}.", field, hints[field.name], comments[field.name]))
    if keys:
        yield name, comments[""], keys
    for entry, path in inner:
        yield from sections(entry, path)


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table(head: list[str], rows: list[str]) -> list[str]:
    return [row(*head), "|" + "---|" * len(head), *rows, ""]


HEADS = {
    "configuration": {
        "title": ("Configuration", "配置"),
        "intro": (
            "One or more YAML files per run, each of which changes those before it, and `key=value` on the command "
            "line ([recipes](../configs/README.md)). This page is written from "
            "[sections.py](../mega_rl/config/schema/sections.py) by `make reference`: change it there. Every run "
            "writes its resolved configuration beside its results, and `--dry-run` prints it. `null` stands for no "
            "value.",
            "每次运行使用一个或多个 YAML 文件，后面的修改前面的，命令行上可加 `key=value`"
            "（见[配方](../configs/README_zh.md)）。本页由 `make reference` 根据 "
            "[sections.py](../mega_rl/config/schema/sections.py) 生成，修改请在那里进行。"
            "每次运行都会把完整配置写在结果旁边，`--dry-run` 会打印它。`null` 表示没有值。",
        ),
        "columns": (["key", "takes", "default", "meaning"], ["键", "取值", "默认值", "含义"]),
    },
    "metrics": {
        "title": ("Metrics", "指标"),
        "intro": (
            "Everything that a run may log, under the same names in `metrics.jsonl`, TensorBoard and wandb. "
            "[First runs](first_runs.md) says what to look at first. A star stands for any text. The third column says "
            "how the values that ranks and micro-batches have in one step become one; a `mean` is weighted by the "
            "number of what it is a mean over. A metric without an entry in the last column says what happened and is "
            "neither good nor bad. Limits are rules of thumb unless they name a key. This page is written from "
            "[declared.py](../mega_rl/observe/metrics/declared.py) and "
            "[healthy.py](../mega_rl/observe/metrics/healthy.py) by `make reference`: change it there.",
            "一次运行可能记录的全部指标，在 `metrics.jsonl`、TensorBoard 和 wandb 中名称相同。"
            "最先应看哪些，见[最初的运行](first_runs_zh.md)。星号代表任意文字。"
            "第三列说明一步之内各进程、各微批次的值如何合成一个；`mean` 按其平均对象的数量加权。"
            "最后一列为空的指标只记录发生了什么，无所谓好坏。没有写明配置键的界限只是经验值。"
            "本页由 `make reference` 根据 "
            "[declared.py](../mega_rl/observe/metrics/declared.py) 和 "
            "[healthy.py](../mega_rl/observe/metrics/healthy.py) 生成，修改请在那里进行。",
        ),
        "columns": (
            ["metric", "unit", "over a step", "meaning", "healthy"],
            ["指标", "单位", "一步之内", "含义", "正常情况"],
        ),
    },
}


def start(page: str, language: int) -> list[str]:
    head = HEADS[page]
    links = (f"[中文]({page}_zh.md) · [all pages](README.md)", f"[English]({page}.md) · [全部文档](README_zh.md)")
    return [f"# {head['title'][language]}", "", links[language], "", str(head["intro"][language]), ""]


def configuration(words: Words, language: int) -> str:
    required, columns = ("required", "必填")[language], list(HEADS["configuration"]["columns"][language])
    text = [*start("configuration", language), words(meanings(schema.RunConfig)[""], "all"), ""]
    for name, meaning, keys in sections():
        rows = [row(f"`{key.name}`", key.takes(), key.default(required), words(key.meaning, key.name)) for key in keys]
        text += [f"## `{name}`", "", words(meaning, name), "", *table(columns, rows)]
    return "\n".join(text)


def metrics(words: Words, language: int) -> str:
    columns = list(HEADS["metrics"]["columns"][language])
    text = start("metrics", language)
    for section in SECTIONS:
        rows = [metric_row(spec, words) for spec in METRICS if spec.section == section.key]
        title, meaning = (words(part, f"section {section.key}") for part in (section.title, section.meaning))
        end = "" if language else "."
        text += [f"## {title[0].upper()}{title[1:]}", "", f"{meaning[0].upper()}{meaning[1:]}{end}", ""]
        text += table(columns, rows)
    return "\n".join(text)


def metric_row(spec: MetricSpec, words: Words) -> str:
    texts = (words(text, spec.name) for text in (spec.description, HEALTHY.get(spec.name, "")))
    return row(f"`{spec.name}`", words(spec.unit, spec.name), f"`{spec.reduction}`", *texts)


PAGES = {"configuration": configuration, "metrics": metrics}


def pages(chinese: dict[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """File under ``docs/`` -> its text; and every English text of the pages -> the key or metric that needs it."""
    texts: dict[str, str] = {}
    used: dict[str, str] = {}
    for page, write in PAGES.items():
        texts[f"{page}.md"] = write(Words(None), 0)
        words = Words(chinese)
        texts[f"{page}_zh.md"] = write(words, 1)
        used |= {english: place for english, place in words.used.items() if english not in used}
    return texts, used


def main() -> int:
    chinese = json.loads(CHINESE.read_text(encoding="utf-8"))
    texts, used = pages(chinese)
    for name, text in texts.items():
        (REPO / "docs" / name).write_text(text, encoding="utf-8")
    kept = {english: chinese.get(english, "") for english in used}
    CHINESE.write_text(json.dumps(kept, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    missing = [f"{place}: {english}" for english, place in used.items() if not kept[english]]
    if missing:
        print(f"no Chinese in {CHINESE.relative_to(REPO)} for {len(missing)} texts:", *missing, sep="\n  ")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
