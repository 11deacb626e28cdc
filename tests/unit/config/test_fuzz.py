"""Whatever stands in a configuration or an override, it is accepted or refused in a sentence, soon."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from mega_rl.config import load_config, to_yaml, validate
from mega_rl.config.reading.typed import leaf_names
from mega_rl.errors import InputError
from tests.fuzzing import TEXTS, VALUES, accepted_or_sentence, cases

GOOD: dict[str, Any] = {
    "model": {"path": "models/tiny"},
    "data": {"train_files": ["a.jsonl"]},
    "rewards": [{"name": "math", "weight": 2.0, "options": {"a": 1}}],
    "rollout": {"n": 4, "vllm": {"max_num_seqs": 4}},
    "trainer": {"total_steps": 3},
}
NAMES = [name.replace("[]", "[0]") for name in leaf_names()]
SECTIONS = sorted({name.rpartition(".")[0] for name in NAMES} | {"trainer.noise_injection", "rewards[²]", "rewards"})
KEYS = st.one_of(
    st.sampled_from(NAMES),
    st.sampled_from(SECTIONS),
    st.tuples(st.sampled_from(SECTIONS), TEXTS).map(".".join),
    TEXTS,
    st.text("abn.[]0129²=", max_size=12),
)
YAML = st.lists(
    st.sampled_from(
        ["model", "path", "rewards", "a", "1", ":", ": ", "- ", "? ", "\n", "\n  ", " ", "{", "}", "[", "]", ",", "#"]
        + ["&a ", "*a", "*a ", "<<: ", "!!bool ", "!!int ", "!!float ", "!!set ", "!!python/object:os.system ", "!x "]
        + ["!!timestamp ", "!!binary ", "!!omap ", "'", '"', '"\\0"', '"\\ud800"', "|\n", ">-\n", "%YAML", "---", "..."]
        + ["\t", "\0", "é", "@", "`", "=", "${model.path}", "${", "~", ".inf", "1e5", "0x" + "f" * 40, "9" * 5000]
    ),
    max_size=30,
).map("".join)


def outcome(directory: Path, text: str, overrides: list[str], world_size: int | None = None) -> None:
    file = directory / "run.yaml"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    config = accepted_or_sentence(lambda: load_config(file, overrides))
    if config is None:
        return
    file.write_text(to_yaml(config), encoding="utf-8")
    assert repr(load_config(file)) == repr(config)  # not ==, which tells nan from nan
    accepted_or_sentence(lambda: validate(config, world_size))


def placed(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """A copy of the tree with the value at a dotted key."""
    tree = json.loads(json.dumps(tree))
    node: Any = tree
    parts = key.replace("[0]", ".0").split(".")
    for part in parts[:-1]:
        node = (node or [None])[0] if isinstance(node, list) else node.setdefault(part, {})
        if not isinstance(node, dict | list):
            return tree
    if isinstance(node, list):
        node[:] = [value]
    else:
        node[parts[-1]] = value
    return tree


@cases(150)
@given(st.lists(st.tuples(KEYS, VALUES), max_size=4), st.sampled_from([None, 1, 6]))
def test_values_in_a_file(tmp_path: Path, changes: list[tuple[str, Any]], world_size: int | None) -> None:
    tree = GOOD
    for key, value in changes:
        tree = placed(tree, key, value)
    outcome(tmp_path, json.dumps(tree), [], world_size)


FRAMES = [  # what stands before and behind; some texts fit in as one value or one entry
    ("", ""),
    ("model: {path: x}\nrewards: [{name: x, options: ", ""),
    ("model: {path: x}\nrewards: [{name: x, options: {a: ", "}}]"),
    ("model:\n  path: x\nrollout:\n  vllm:\n    a: ", "\n"),
    ("model:\n  path: ", "\ntrainer: {total_steps: 3}\n"),
]


@cases(150)
@given(YAML, st.sampled_from(FRAMES))
def test_text_that_is_nearly_yaml(tmp_path: Path, text: str, around: tuple[str, str]) -> None:
    outcome(tmp_path, text.join(around), [])


@cases(150)
@given(st.lists(st.tuples(KEYS, VALUES.map(json.dumps) | TEXTS | YAML).map("=".join) | TEXTS, min_size=1, max_size=4))
def test_overrides(tmp_path: Path, overrides: list[str]) -> None:
    outcome(tmp_path, json.dumps(GOOD), overrides)


def refusal(directory: Path, text: str, *overrides: str) -> str:
    file = directory / "run.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as caught:
        load_config(file, overrides)
    sentence = str(caught.value)
    assert len(sentence) < 1000 and "\n" not in sentence, sentence
    return sentence


ALIASES = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 9)
)
DOUBLING = "model: {path: x}\nrewards: [{name: x, options: {a0: xxxxxxxx, " + ", ".join(
    f"a{i}: '${{.a{i - 1}}}${{rewards[0].options.a{i - 1}}}'" for i in range(1, 40)
)
LISTS = "model: {path: x}\nrewards: [{name: x, options: {a0: [x, x], " + ", ".join(
    f"a{i}: ['${{..a{i - 1}}}', '${{..a{i - 1}}}']" for i in range(1, 30)
)
LONG_WAY = "model: {path: x}\nrewards: [{name: x, options: {a0: x, " + ", ".join(
    f"a{i}: '${{.a{i - 1}}}'" for i in range(1, 2000)
)
CHAIN = "a0: &a0 [x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 40))


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: " + "[" * 2000 + "]" * 2000, "nested more than 32 deep at line 1"),
        ("{a: " * 1500 + "1" + "}" * 1500, "nested more than 32 deep at line 1"),
        ("- " * 2000 + "x", "nested more than 32 deep at line 1"),
        (ALIASES, "more than 10000 values at line 5"),
        (CHAIN, "nested more than 32 deep at line 31"),
        ("*" + "a" * 5000, "found undefined alias 'aaa"),
        ("a: &a [*a]", "an alias stands inside what it names"),
        ("a: [" + "1," * 20_000 + "]", "more than 10000 values"),
        ("a: " + "x" * 300_000, "more than 262144 characters"),
        ("model: {path: !!bool abc}", "a value is not what its tag says"),
        ("model: {path: !!timestamp abc}", "tag:yaml.org,2002:timestamp"),
        ("? [a, b]\n: 1", "a key is a list or a section"),
        ('model: {path: "a\\0b"}', "the character U+0000, which no file can hold at line 1"),
        ('model: {path: "\\ud800"}', "the character U+D800"),
        ("model: {path: !!int 0x" + "f" * 5000 + "}", "over 63 bits"),
        ("model: {path: x}\n" + "x" * 999 + ": 1", "unknown key 'xxx"),
        ('model: {path: x}\n"a\\nb": 1', "unknown key 'a\\nb'"),
        ("model: {path: x}\nrewards: [{name: x, options: {1: 2}}]", "rewards[0].options has the key 1 (int)"),
        ("model: {path: x, dtype: '${model.path}', path: y}", "the key 'path' stands twice"),
        ("model: {path: '${model.dtype}', dtype: '${model.path}'}", "more than 32 times, or to itself"),
        ("model: {path: '${model.path}@${model.path}'}", "more than 32 times, or to itself"),  # 2^32 ways to follow it
        (DOUBLING + "}}]", "come to more than 262144 characters: write them out"),
        (LISTS + "}}]", "come to more than 262144 characters: write them out"),
        (LONG_WAY + "}}]", "come to more than 262144 characters: write them out"),
        ("model: {path: '${model.${model.dtype}}'}", "has ${...} inside ${...}, or one without its end"),
        ("model: {path: '${oc.decode:x}'}", "calls a function: only ${other.key} and ${oc.env:NAME} can be used"),
    ],
)
def test_what_would_cost_time_or_fail_later_is_refused_as_it_is_read(tmp_path: Path, text: str, part: str) -> None:
    assert part in refusal(tmp_path, text)


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("rewards[²].weight=1", "no entry ²"),
        ("rewards[" + "9" * 5000 + "].weight=1", "has 1 entries and no entry"),
        ("rewards[0].options." + "a." * 2000 + "b=1", "more than 32 parts"),
        ("rewards[0].options.a=" + "[" * 400 + "]" * 400, "nested more than 32 deep"),
        ('model.path="a\\0b"', "the character U+0000"),
        ("optimizer.lr=${oc.env:MEGA_RL_FUZZ_TEXT}", "optimizer.lr is '[' (str): expected"),
        ("model.path=\udcff", "no readable value"),
    ],
)
def test_overrides_that_cannot_be_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, override: str, part: str
) -> None:
    monkeypatch.setenv("MEGA_RL_FUZZ_TEXT", "[")
    assert part in refusal(tmp_path, json.dumps(GOOD), override)


def test_what_is_no_file_is_not_opened(tmp_path: Path) -> None:
    """Opening a pipe would wait for its writer, and reading a device may never end."""
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(InputError, match="is no regular file: give a YAML file"):
            load_config(path)


def test_interpolations_that_are_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGA_RL_FUZZ_TEXT", "sft")
    file = tmp_path / "run.yaml"
    file.write_text(
        "model: {path: 'models/${trainer.seed}/${oc.env:MEGA_RL_FUZZ_TEXT}'}\n"
        "trainer: {output_dir: 'runs/${model.path}', seed: '${data.seed}'}\nrewards: [{name: x, options: '${.name}'}]\n"
    )
    with pytest.raises(InputError, match=r"rewards\[0\].options is 'x'"):
        load_config(file)
    assert load_config(file, ["rewards=[]"]).trainer.output_dir == "runs/models/0/sft"


def test_a_path_that_is_too_long_does_not_exist(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    long = "x" * 5000
    settings = {"model": {"path": long}, "rollout": {"replay": long}, "checkpoint": {"resume": long}}
    file.write_text(json.dumps(GOOD | settings | {"data": {"train_files": [long]}}))
    config = load_config(file)
    with pytest.raises(InputError) as caught:
        validate(config)
    sentence = str(caught.value)
    assert len(sentence) < 5000
    for key in ("model.path", "rollout.replay", "checkpoint.resume", "data.train_files"):
        assert f"{key} has 'xxx" in sentence or f"{key} is 'xxx" in sentence, sentence
