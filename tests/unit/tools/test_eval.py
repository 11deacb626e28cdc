"""The command line of ``tools/eval.py``: what it takes from a run, and what it refuses before anything heavy starts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mega_rl.config.schema.sampling import RewardConfig
from mega_rl.config.schema.sections import RunConfig
from mega_rl.data.rows.rows import write_jsonl
from mega_rl.errors import InputError
from mega_rl.evaluation.configuration import settings_of
from mega_rl.evaluation.exporting import export
from mega_rl.evaluation.grading import Grading, outcomes
from mega_rl.evaluation.weights import find_weights, with_adapter
from mega_rl.models.shape import read_model_shape
from mega_rl.rollout.vllm.start.seeing import Sight
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer
from mega_rl.synthetic.tiny_model import TinyModelSpec, write_tiny_model
from tests.models import adapters, families
from tools import eval as tool

RUN = """
model: {{path: {model}}}
data: {{train_files: [gone.jsonl], val_files: [{data}], max_prompt_length: 16, max_response_length: 7}}
rollout: {{tensor_parallel_size: 2, stop: ["!"], placement: separate, num_engines: 2}}
rewards: [{{name: overlong, options: {{max_length: 9, buffer: 2}}}}, {{name: gsm8k, options: {{method: flexible}}}}]
parallel: {{tensor: 8}}
trainer: {{output_dir: {run}, total_steps: 1, seed: 5}}
validation: {{n: 4, temperature: 0.6}}
platform: {{name: cpu}}
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The directory of a run with an export, and its held-out data beside it."""
    spec = TinyModelSpec(hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=1, ffn=8)
    directory = tmp_path / "run"
    model = write_tiny_model(directory / "huggingface", spec, arithmetic_tokenizer())
    write_jsonl(tmp_path / "val.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    (directory / "config.yaml").write_text(RUN.format(model=model, data=tmp_path / "val.jsonl", run=directory))
    return directory


def refusal(run: Path, *arguments: str) -> str:
    with pytest.raises(InputError) as caught:
        tool.main([str(run), "--out", str(run.parent / "out"), *arguments])
    assert not (run.parent / "out").exists()
    return str(caught.value)


def test_a_run_gives_rewards_templates_and_lengths(run: Path) -> None:
    weights = find_weights(str(run))
    config = tool.configured(tool.parse([str(run), "--out", "o"]), weights)
    assert (config.data.max_prompt_length, config.data.max_response_length, config.rollout.stop) == (16, 7, ["!"])
    assert [reward.name for reward in config.rewards] == ["overlong", "gsm8k"] and config.rewards[1].options
    assert (config.validation.n, config.validation.temperature, config.trainer.seed) == (4, 0.6, 5)
    assert config.model.path == str(run / "huggingface") and config.parallel.tensor == 1
    layout = (config.rollout.placement, config.rollout.tensor_parallel_size, config.rollout.num_engines)
    assert layout == ("colocated", 1, 1), "the layout is the evaluation's own"


def test_the_command_line_wins(run: Path) -> None:
    options = ["--samples", "2", "--temperature", "1.5", "--seed", "9", "--reward", "boxed", "--data", "d.jsonl"]
    more = ["--max-problems", "3", "--tensor-parallel", "2", "data.max_response_length=11"]
    config = tool.configured(tool.parse([str(run), *options, "--out", "o", *more]), find_weights(str(run)))
    assert (config.validation.n, config.validation.temperature, config.trainer.seed) == (2, 1.5, 9)
    assert [reward.name for reward in config.rewards] == ["boxed"] and config.data.val_files == ["d.jsonl"]
    assert (config.data.max_val_samples, config.data.max_response_length) == (3, 11)
    assert config.rollout.tensor_parallel_size == 2


def test_settings_hold_what_answers_depend_on_and_not_where_they_are_made(run: Path) -> None:
    weights = find_weights(str(run))

    def settings(*arguments: str) -> str:
        config = tool.configured(tool.parse([str(run), "--out", "o", *arguments]), weights)
        return json.dumps(settings_of(config, weights, is_greedy=True), sort_keys=True)

    base = settings()
    assert base == settings("--tensor-parallel", "2") == settings("--placement", "separate", "--engines", "2")
    changes = (
        ["--samples", "3"],
        ["--temperature", "0.5"],
        ["--seed", "6"],
        ["--reward", "boxed"],
        ["rollout.stop=[x]"],
    )
    assert all(settings(*change) != base for change in changes)
    assert settings("--max-problems", "1") != base
    file = tool.configured(tool.parse([str(run), "--out", "o"]), weights).data.val_files[0]
    assert settings("--data", file) == base != settings("--data", f"{file}[:1]") != settings("--data", f"{file}[:2]")
    assert settings("rewards=[{name: boxed, only: [a]}]") != settings("rewards=[{name: boxed, only: []}]")
    assert settings("rewards=[{name: boxed, only: []}]") == settings("rewards=[{name: boxed}]") and "only" not in base


def test_an_environment_answers_as_in_the_run_and_may_give_the_rewards(run: Path) -> None:
    weights, keys = find_weights(str(run)), ["rewards=[]", "environment.name=number_guessing"]

    def settings(*arguments: str) -> dict[str, Any]:
        config = tool.configured(tool.parse([str(run), "--out", "o", *arguments]), weights)
        tool.check(config, 1, [], is_greedy=True)
        return settings_of(config, weights, is_greedy=True)

    found = settings(*keys, "environment.max_turns=7")
    assert found["environment"]["max_turns"] == 7 and found["rewards"] == []
    assert found == settings(*keys, "environment.max_turns=7", "environment.workers=3") != settings(*keys)
    assert "environment" not in settings()


@pytest.mark.parametrize("key", ["rollout.stop=[x]", "environment.name=number_guessing"])
def test_a_run_with_tails_is_evaluated_with_what_tails_refuse(run: Path, key: str) -> None:
    """An evaluation stops no response."""
    arguments = tool.parse([str(run), "--out", "o", "rollout.oversample=1.5", key])
    tool.check(tool.configured(arguments, find_weights(str(run))), 1, [], is_greedy=True)


def test_what_an_environment_gave_takes_the_place_of_a_reward() -> None:
    kinds = [("greedy", {"environment": 0.5}), ("sampled", {"gsm8k": 1.0, "environment_turns": 9.0}), ("sampled", {})]
    responses = [
        {"kind": kind, "parts": parts, "text": "#### 3", "num_tokens": 1, "finish_reason": "stop"}
        for kind, parts in kinds
    ]
    record = {"data_source": "s", "problem": 0, "ground_truth": "3", "responses": responses}
    rewards = [RewardConfig("gsm8k")]
    (found,) = outcomes([record], Grading.of(rewards, None, 0.5, has_environment=True))
    assert (found.greedy, found.sampled, found.num_unknown) == (True, (True,), 1)
    (alone,) = outcomes([record], Grading.of(rewards, "environment", 0.5, has_environment=True))
    assert (alone.greedy, alone.sampled, alone.num_unknown) == (True, (), 2)
    assert Grading.of([], None, 1.0, has_environment=True) == Grading("environment", 1.0, None)
    with pytest.raises(InputError, match="choose one of the rewards, gsm8k, environment"):
        Grading.of(rewards, "gsm", has_environment=True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--k", "1", "8"], "--k 8 cannot be estimated from --samples 4: give 1 <= k <= n, or raise --samples"),
        (["--samples", "0", "--no-greedy"], "--no-greedy with --samples 0 leaves no answers"),
        (["--data", "no.jsonl"], "--data: no.jsonl cannot be read"),
        (["--right-by", "boxed"], "--right-by is 'boxed': choose one of the rewards, overlong, gsm8k"),
        (
            ["--engines", "2"],
            "needs 2 processes, and there are 1: start with mega-rl eval, or torchrun --nproc-per-node 2",
        ),
        (["--tensor-parallel", "2"], "rollout.tensor_parallel_size"),
        (["data.max_response_length=0"], "data.max_response_length is 0"),
        (["--temperature", "0"], "validation.temperature is 0"),
        (["rewards=[]"], "no rewards: name one with --reward NAME"),
        (["platform.name=abacus"], "platform.name is 'abacus'"),
        (["data.max_len=3"], "data.max_len"),
        (["rollout.tensor_parallel_size=2"], "is set by --tensor-parallel: write --tensor-parallel 2"),
        (["rollout.num_engines=2"], "is set by --engines: write --engines 2"),
        (["rollout.placement=separate"], "is set by --placement: write --placement separate"),
    ],
)
def test_impossible_wishes_are_refused(run: Path, arguments: list[str], words: str) -> None:
    assert words in refusal(run, *arguments)


@pytest.fixture
def adapter(run: Path) -> Path:
    """An adapter of the run's export."""
    model = run / "huggingface"
    return adapters.save(run.parent / "adapter", adapters.state(adapters.pairs(read_model_shape(model))), model)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("base_model_name_or_path", "other/model", "is an adapter of 'other/model', and the model is "),
        (
            "r",
            8,
            "is of shape [4, 8], and the model with its adapter_config.json asks for [8, 8]: give the adapter of this",
        ),
        ("peft_type", "IA3", "peft_type is 'IA3' in adapter_config.json, and only LORA is read"),
    ],
)
def test_an_adapter_that_is_not_the_models_is_refused(
    run: Path, adapter: Path, field: str, value: Any, words: str
) -> None:
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {field: value}))
    sentence = refusal(run / "huggingface", "--adapter", str(adapter))
    assert words in sentence and sentence.startswith("--adapter ")


def test_an_adapter_of_another_size_or_from_nowhere_is_refused(run: Path, adapter: Path) -> None:
    shape = read_model_shape(run / "huggingface")
    adapters.save(adapter, adapters.state(adapters.pairs(replace(shape, hidden_size=32))), run / "huggingface")
    assert "give the adapter of this model" in refusal(run / "huggingface", "--adapter", str(adapter))
    assert "has no adapter_config.json" in refusal(run / "huggingface", "--adapter", str(run))


def test_an_adapter_is_merged_into_the_model_that_the_engines_load(run: Path, adapter: Path, tmp_path: Path) -> None:
    model = run / "huggingface"
    weights = with_adapter(find_weights(str(model)), adapter, "--adapter")
    config = tool.configured(tool.parse([str(model), "--out", "o"]), weights)
    export(weights, config.model.path, tmp_path / "merged", Path(tool.__file__).parent)
    before, after = (load_file(directory / "model.safetensors") for directory in (model, tmp_path / "merged"))
    factors = adapters.pairs(read_model_shape(model))
    assert before.keys() == after.keys() and factors
    for name, weight in before.items():
        assert (name in factors) == (not torch.equal(after[name], weight))
    for name, (a, b) in factors.items():
        expected = before[name].float() + adapters.ALPHA / adapters.RANK * (b @ a)
        torch.testing.assert_close(after[name], expected.to(before[name].dtype))


IMAGE, TEXT = {"type": "image"}, {"type": "text", "text": "?"}


@pytest.mark.parametrize(
    ("fields", "is_seen"),
    [
        ({"prompt": "?", "images": [], "image": None}, False),
        ({"prompt": [{"role": "user", "content": [TEXT]}]}, False),
        ({"prompt": "<image>?", "images": ["a.png"]}, True),
        ({"prompt": [{"role": "user", "content": [IMAGE, TEXT]}]}, True),
    ],
)
def test_an_image_processor_is_opened_for_pictures_only(tmp_path: Path, fields: dict[str, Any], is_seen: bool) -> None:
    """Text needs no file of it and no chat template, whatever the model."""
    config = RunConfig()
    config.model.path, config.data.chat_template = str(tmp_path), "never"
    config.data.val_files, config.data.max_val_samples = [str(tmp_path / "val.jsonl")], 2
    (tmp_path / "config.json").write_text(json.dumps(families.CONTRACT.config("qwen3_vl")))
    last = {"prompt": "<image>", "images": ["a.png"]}  # beyond the rows that are taken
    write_jsonl(tmp_path / "val.jsonl", [{"prompt": "1"}, fields, last])
    tokenizer: Any = None
    if not is_seen:
        assert tool.picture_set_of(config, tokenizer) is None
        return
    with pytest.raises(InputError, match="preprocessor_config.json cannot be read"):
        tool.picture_set_of(config, tokenizer)


def test_engines_in_other_processes_get_pictures_with_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    monkeypatch.setattr(tool, "RemoteEngines", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(tool.dist, "get_world_size", lambda: 1)
    config, device = RunConfig(), torch.device("cpu")
    config.rollout.placement, config.rollout.num_engines, config.data.max_images = "separate", 2, 3
    reader = SimpleNamespace(pixel_limits={"shortest_edge": 1, "longest_edge": 9})
    picture_set: Any = SimpleNamespace(pictures={"digest-2x2": object()}, reader=reader)
    tool.build_engine(config, device, picture_set)
    tool.build_engine(config, device, None)
    (spec, num_engines, given), (blind, _, nothing) = made
    assert given is picture_set and num_engines == 2
    assert spec.sight == Sight({}, 3, {"shortest_edge": 1, "longest_edge": 9})
    assert blind.sight is None and nothing is None


def test_a_model_alone_needs_data_and_rewards(run: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    (run / "huggingface").rename(model)
    assert "no data: name at least one" in refusal(model)
    assert "no rewards: name one" in refusal(model, "--data", str(tmp_path / "val.jsonl"))
    assert "is no directory and no model" in refusal(tmp_path / "nowhere")


def write_evaluation(directory: Path, right: list[bool], digest: str = "d") -> Path:
    directory.mkdir()
    settings = {"data": [{"name": "v", "sha256": digest}], "rewards": [{"name": "gsm8k", "weight": 1.0, "options": {}}]}
    (directory / "settings.json").write_text(json.dumps(settings))
    rows = [
        {
            "problem": number,
            "data_source": "s",
            "ground_truth": "1",
            "responses": [
                {
                    "kind": "greedy",
                    "text": "",
                    "parts": {"gsm8k": float(is_right)},
                    "num_tokens": 1,
                    "finish_reason": "stop",
                    "token_ids": [1],
                }
            ],
        }
        for number, is_right in enumerate(right)
    ]
    write_jsonl(directory / "results.jsonl", rows)
    return directory


def test_comparison_as_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = write_evaluation(tmp_path / "a", [False] * 7 + [True])
    second = write_evaluation(tmp_path / "b", [True] * 7 + [False])
    tool.main(["--compare", str(first), str(second), "--json", str(tmp_path / "c.json")])
    out = capsys.readouterr().out
    assert "greedy, right to wrong (1): s 7" in out and "greedy, wrong to right (7): s 0, s 1" in out
    found = json.loads((tmp_path / "c.json").read_text())["greedy"]
    assert found["p_value"] == pytest.approx(2 * 9 / 2**8) and not found["is_significant"]


def test_evaluations_of_different_data_are_not_compared(tmp_path: Path) -> None:
    first, second = write_evaluation(tmp_path / "a", [True]), write_evaluation(tmp_path / "b", [True], "other")
    with pytest.raises(InputError, match="are of different data"):
        tool.main(["--compare", str(first), str(second)])
