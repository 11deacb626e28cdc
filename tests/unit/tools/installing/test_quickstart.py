"""What ``tools/quickstart.sh`` starts, with an interpreter in its place that only notes its arguments."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config import RunConfig, load_config, problems
from mega_rl.config.checks.model import check_model
from mega_rl.config.schema.stage import reward_model
from tests.launching.launch import REPO, run
from tests.unit.config.test_shipped import model_config

SCRIPT = REPO / "tools" / "quickstart.sh"
NOTES = """#!/bin/sh
[ "$1" = -c ] && echo 1234 && exit
printf '%s\\n' "$@" "" >> "$0.log"
"""


def commands(directory: Path, *arguments: str) -> list[list[str]]:
    """Every command line of the script without the interpreter; torchrun's own arguments are left out."""
    python = directory / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(NOTES)
    python.chmod(0o755)
    env = {"VENV": str(directory), "QUICKSTART_DIR": str(directory / "run"), "QUICKSTART_SEED": "7"}
    run((str(SCRIPT), *arguments), timeout=60, env=env).check()
    blocks = Path(f"{python}.log").read_text().strip().split("\n\n")
    found = [block.splitlines() for block in blocks]
    return [line[next(i for i, word in enumerate(line) if word.startswith("tools/")) :] for line in found]


def configuration(line: Sequence[str]) -> RunConfig:
    """Of a command line of tools/train.py."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", action="append")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args(line[1:])
    return load_config([REPO / file for file in options.config], options.overrides)


def fill(directory: Path, head: str) -> None:
    """As much of a model as validation looks at."""
    directory.mkdir(parents=True)
    keys: dict[str, Any] = model_config("huggingface")
    if head == "value":
        keys |= {"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    (directory / "config.json").write_text(json.dumps(keys))
    for name in ("tokenizer.json", "model.safetensors"):
        (directory / name).write_text("")


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, RunConfig]]:
    """The directory of the run, and stage -> its configuration, once all that the stages begin with is there."""
    root = tmp_path_factory.mktemp("chain")
    trained = [line for line in commands(root, "chain") if line[0] == "tools/train.py"]
    for name in ("model", "sft/huggingface", "merged"):
        fill(root / "run" / name, "vocabulary")
    fill(root / "run" / "rm" / "huggingface", "value")
    (root / "run" / "data").mkdir()
    for name in ("train", "val", "sft", "pairs", "pairs_val"):
        (root / "run" / "data" / f"{name}.jsonl").write_text("")
    configs = [configuration(line) for line in trained]
    return root / "run", {Path(config.trainer.output_dir).name: config for config in configs}


def test_every_stage_of_the_chain_is_valid(chain: tuple[Path, dict[str, RunConfig]]) -> None:
    directory, stages = chain
    assert list(stages) == ["sft", "rm", "ppo", "dpo", "lora_sft", "grpo"]
    for name, config in stages.items():
        assert problems(config, 2) == [], name
        check_model(config, 2)
        assert (config.trainer.seed, config.data.seed) == (7, 7)
        files = [config.trainer.output_dir, config.model.path, *config.data.train_files, *config.data.val_files]
        assert all(Path(file).is_relative_to(directory) for file in files), name


def test_every_stage_begins_with_what_another_one_made(chain: tuple[Path, dict[str, RunConfig]]) -> None:
    directory, stages = chain
    for name in ("rm", "ppo", "dpo", "lora_sft"):
        assert stages[name].model.path == f"{stages['sft'].trainer.output_dir}/huggingface"
    scoring_model = reward_model(stages["ppo"])
    assert scoring_model is not None and scoring_model.options["path"] == stages["rm"].trainer.output_dir
    assert stages["ppo"].critic.path == f"{stages['rm'].trainer.output_dir}/huggingface"
    assert stages["lora_sft"].tuning.method == "lora" and stages["grpo"].tuning.method == "full"
    assert stages["grpo"].model.path == str(directory / "merged")


def test_the_plain_quickstart_is_two_runs(tmp_path: Path) -> None:
    started = commands(tmp_path)
    assert [line[0] for line in started] == [
        "tools/make_tiny_model.py",
        "tools/prepare_data.py",
        "tools/train.py",
        "tools/train.py",
    ]
    assert f"model.path={tmp_path}/run/sft/huggingface" in started[-1]


def test_the_quickstart_of_pictures_is_two_runs_of_a_model_that_sees(tmp_path: Path) -> None:
    model, data, sft, grpo = commands(tmp_path, "vision")
    assert model[:4] == ["tools/make_tiny_model.py", "--family", "qwen2_5_vl", "--tokenizer"] and data[1] == "shapes"
    configs = [configuration(line) for line in (sft, grpo)]
    assert [config.model.vision.freeze for config in configs] == [False, True]
    assert [Path(config.model.path) for config in configs] == [tmp_path / "run/model", tmp_path / "run/sft/huggingface"]


def test_another_word_is_refused(tmp_path: Path) -> None:
    launched = run((str(SCRIPT), "chains"), env={"VENV": str(tmp_path)})
    assert launched.returncode == 2 and "'chains' is none of grpo, chain, tools and vision" in launched.stdout
