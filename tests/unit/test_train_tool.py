"""The command line of ``tools/train.py``: what it refuses before anything heavy starts."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mega_rl.config import load_config
from mega_rl.data.synthetic import arithmetic_tokenizer
from mega_rl.data.tiny_model import TinyModelSpec, write_tiny_model
from mega_rl.types import InputError
from tests.launch import Launched, run
from tools import train

CONFIG = """
model: {{path: {model}}}
data: {{train_files: [{data}], max_prompt_length: 8, max_response_length: 8}}
rewards: [{{name: exact_match}}]
trainer: {{output_dir: {output_dir}, total_steps: 1}}
platform: {{name: cpu}}
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    spec = TinyModelSpec(hidden_size=16, num_layers=3, num_heads=4, num_kv_heads=1, ffn=8)
    model = write_tiny_model(tmp_path / "model", spec, arithmetic_tokenizer())
    data = tmp_path / "train.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    file = tmp_path / "run.yaml"
    file.write_text(CONFIG.format(model=model, data=data, output_dir=tmp_path / "run"))
    return file


@pytest.fixture(autouse=True)
def world_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")


def refusal(config: Path, *overrides: str) -> str:
    """What ``main`` says; the run has left nothing behind."""
    with pytest.raises(InputError) as caught:
        train.main(["--config", str(config), *overrides])
    assert not (config.parent / "run").exists()
    return str(caught.value)


def change_model(config: Path, **values: object) -> None:
    file = config.parent / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        (
            "model.path=nowhere/model",
            ("model.path is 'nowhere/model'", "does not exist", "Hugging Face model directory"),
        ),
        ("parallel.tensor=2", ("parallel.tensor is 2", "num_key_value_heads", "divisor of 1")),
        ("parallel.pipeline=3", ("= 3 does not divide the world size 2", "start a multiple of 3")),
        ("rollout.tensor_parallel_size=4", ("rollout.tensor_parallel_size is 4", "world size 2", "one of 1, 2")),
        ("optimizer.warmup=1", ("unknown key optimizer.warmup", "did you mean optimizer.warmup_steps?")),
        ("rollot.n=4", ("unknown key rollot", "did you mean rollout?")),
        ("optimizer.lr=fast", ("optimizer.lr", "'fast'")),
        ("data.train_files=[gone.jsonl]", ("data.train_files", "'gone.jsonl'", "does not exist")),
        ("trainer.resume=runs/gone", ("trainer.resume is 'runs/gone'", "checkpoint directory")),
        ("platform.name=abacus", ("platform.name is 'abacus'", "cpu")),
    ],
)
def test_a_bad_value(config: Path, override: str, parts: tuple[str, ...]) -> None:
    sentence = refusal(config, override)
    assert [part for part in parts if part not in sentence] == [], sentence
    assert "\n" not in sentence


def test_malformed_model_config(config: Path) -> None:
    file = config.parent / "model" / "config.json"
    file.write_text(file.read_text()[:-20])
    sentence = refusal(config)
    assert f"{file} (of model.path) is not valid JSON" in sentence and "copy the model again" in sentence


def test_unknown_architecture(config: Path) -> None:
    change_model(config, architectures=["MambaForCausalLM"])
    sentence = refusal(config)
    assert "MambaForCausalLM" in sentence and "choose a model of " in sentence and "Qwen2ForCausalLM" in sentence


def test_configuration_that_is_not_there(tmp_path: Path) -> None:
    sentence = refusal(tmp_path / "gone.yaml")
    assert f"configuration {tmp_path / 'gone.yaml'} cannot be read" in sentence


def command(config: Path, *arguments: str) -> Launched:
    script = Path(train.__file__)
    return run([sys.executable, str(script), "--config", str(config), *arguments], timeout=120)


def test_exit_status_and_one_sentence(config: Path) -> None:
    launched = command(config, "optimizer.lr=-1")
    assert launched.returncode == 2
    lines = launched.stdout.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: "), launched.stdout
    assert "optimizer.lr is -1" in lines[0], lines[0]


def test_dry_run_prints_a_configuration_that_loads_again(config: Path, tmp_path: Path) -> None:
    launched = command(config, "--dry-run", "optimizer.lr=3e-4").check()
    printed = tmp_path / "printed.yaml"
    printed.write_text(launched.stdout)
    assert load_config(printed) == load_config(config, ["optimizer.lr=3e-4"])
    assert not (tmp_path / "run").exists()
