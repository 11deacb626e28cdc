"""Whatever stands in a config.json, it is a model or refused in sentences, soon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from mega_rl.config.schema.sections import ParallelConfig
from mega_rl.errors import InputError
from mega_rl.models.fit import engine_problems, length_problems, trainer_problems
from mega_rl.models.shape import inspect_model, read_model_shape
from tests.fuzzing import VALUES, accepted_or_sentence, cases
from tests.models.families import CONTRACT

GOOD = {
    name: json.loads(CONTRACT.new_model(name).config.to_json_string(use_diff=False)) | {"architectures": [architecture]}
    for name in CONTRACT.own
    for architecture in CONTRACT.config(name)["architectures"]
}
KEYS = sorted({key for config in GOOD.values() for key in config} | {"rope_scaling", "rope_theta", "num_local_experts"})
SIZES = st.sampled_from([0, 1, 2, 3, 4, 8, 10**4, 10**7, 2**31, 10**30, 1e30, -1])


@cases(200)
@given(st.sampled_from(sorted(GOOD)), st.dictionaries(st.sampled_from(KEYS), SIZES | VALUES, max_size=4))
def test_changed_values(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GOOD[family] | changes))
    shape, problems = inspect_model(tmp_path)
    assert (shape is None) == bool(problems)
    assert accepted_or_sentence(lambda: read_model_shape(tmp_path)) == shape
    assert all(len(problem) < 2000 and "\n" not in problem for problem in problems)
    sizes = ParallelConfig(tensor=2, pipeline=3, expert=2)
    for line in [
        *trainer_problems(shape, sizes, 12),
        *engine_problems(shape, 3, 12),
        *length_problems(shape, 9, 9, 9, 3),
    ]:
        assert len(line) < 2000


@cases(150)
@given(st.binary(max_size=20), st.integers(0, 400), st.integers(0, 400))
def test_changed_bytes(tmp_path: Path, noise: bytes, start: int, end: int) -> None:
    good = json.dumps(GOOD["qwen2"]).encode()
    (tmp_path / "config.json").write_bytes(good[:start] + noise + good[end:])
    accepted_or_sentence(lambda: read_model_shape(tmp_path))


@pytest.mark.parametrize(
    ("family", "changes", "part"),
    [
        ("qwen2", {"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000; no model has more than 4096"),
        ("qwen2", {"vocab_size": 10**30}, "no model has more than 2147483647"),
        ("qwen2", {"rms_norm_eps": 10**400}, "it must be a positive number"),
        ("qwen2", {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it must be a positive number"),
        ("qwen2", {"rope_parameters": {"rope_theta": float("nan")}}, "rope_theta is nan; it must be a positive number"),
        ("qwen2", {"architectures": ["x" * 10**5]}, "choose a model of"),
        ("qwen3_moe", {"num_experts": 10**7}, "no model has more than 16384"),
        ("qwen3_moe", {"num_experts": 10**4, "num_hidden_layers": 4096}, "more than 262144 experts in all"),
    ],
)
def test_sizes_that_no_model_has(tmp_path: Path, family: str, changes: dict[str, Any], part: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GOOD[family] | changes))
    with pytest.raises(InputError) as caught:
        read_model_shape(tmp_path)
    assert part in str(caught.value) and len(str(caught.value)) < 2000


def test_json_without_end(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": ' * 100_000)
    with pytest.raises(InputError, match="is not valid JSON"):
        read_model_shape(tmp_path)
    (tmp_path / "config.json").write_text(" " * (1 << 23))
    with pytest.raises(InputError, match="is no file of at most 4194304 bytes"):
        read_model_shape(tmp_path)


def test_the_unchanged_ones_are_models(tmp_path: Path) -> None:
    for config in GOOD.values():
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert read_model_shape(tmp_path).num_layers == config.get("text_config", config)["num_hidden_layers"]
