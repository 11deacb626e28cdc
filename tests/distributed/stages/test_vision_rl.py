"""Reinforcement learning on pictures in float32: whole runs, at several layouts, with every kind of engine.

Every step sees the same pictures, so that features which the engine had kept of an older tower would show.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mega_rl.rollout.collect.records import read_step, trajectory_of_row
from tests.launching import training
from tests.launching.launch import ENGINE, REPO, ranks, started
from tests.launching.training import computed, copies, metrics_of, train
from tests.models import vision_models

MISSING = [name for name in ("torchvision", "blake3") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"engines that see pictures need {' and '.join(MISSING)}"),
]
TOLERANCE = 1e-5  # nats
SCRIPT = REPO / "tests" / "distributed" / "stages" / "run_vision_layouts.py"
FROZEN = "model.vision.freeze=true,model.vision.freeze_merger=true"
# What each run changes, and the number of its steps.
LAYOUTS = {
    "tensor": ("parallel.tensor=2,parallel.sequence=true", 11),
    "pipeline": (f"parallel.pipeline=2,{FROZEN}", 3),
    "data": ("parallel.tensor=1", 3),
}
ENGINE_ONLY = ("bridge/",)  # a replay has no engine that weights would move to
COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255)}
REWARD = """
def early(data_source, solution_str, ground_truth, extra_info):
    return sum(character < "n" for character in solution_str) / 8
"""
CONFIG = """
model: {{path: {model}, dtype: float32, vision: {{freeze: false, freeze_merger: false}}}}
data:
  train_files: [{rows}]
  train_batch_size: 4
  max_prompt_length: 96
  max_response_length: 6
rollout: {{n: 4, kv_cache_bytes: 16777216, vllm: {{max_num_seqs: 16}}}}
bridge: {{verify: all}}
rewards: [{{name: '{reward}:early'}}]
optimizer: {{lr: 1.0e-3}}
trainer: {{total_steps: 3, max_tokens_per_microbatch: 512}}
checkpoint: {{save_freq: -1, export_hf: false}}
validation: {{test_freq: -1}}
logging: {{dump_rollouts: -1}}
platform: {{name: cpu}}
"""


def write_rows(directory: Path) -> Path:
    rows = [{"prompt": "say nothing", "answer": "."}]
    for number, (name, colour) in enumerate(COLOURS.items()):
        Image.new("RGB", (30, 17 + 9 * number), colour).save(directory / f"{name}.png")
        rows.append({"prompt": "<image>colour?", "answer": name, "images": [f"{name}.png"]})
    rows.append({"prompt": "<image>or<image>?", "answer": "b", "images": ["red.png", "blue.png"]})
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def configuration(directory: Path, family: str, tied: bool) -> Path:
    """Of a run on ``write_rows``, with a model of this family."""
    model, reward = (
        vision_models.write(directory / "model", family, for_engine=True, tied=tied),
        directory / "reward.py",
    )
    reward.write_text(REWARD)
    config = directory / "rl.yaml"
    config.write_text(CONFIG.format(model=model, rows=write_rows(directory), reward=reward))
    return config


def rows_of(output_dir: Path, step: int) -> list[dict[str, Any]]:
    """The step's records; what was sampled for it is what the trainer computes, to the last picture's token."""
    rows = read_step(output_dir / "rollouts", step)
    for row in rows:
        prompt = trajectory_of_row(row).prompt
        repeated = sum(image.num_tokens - 1 for image in prompt.images)
        assert len(prompt.token_ids) - len(row["prompt"]["token_ids"]) == repeated
        if row["outcome"] == "learnt" and row["weight_version"] == step - 1 and "spans" not in row:
            assert row["logprob_diff"] < TOLERANCE, (step, prompt.text)
    return rows


def test_the_trainer_at_every_layout_and_its_engine(tmp_path: Path) -> None:
    config = configuration(tmp_path, "qwen2_5_vl", tied=False)
    runs = [
        f"{name},{changes},trainer.total_steps={steps},rollout.tensor_parallel_size=2"
        for name, (changes, steps) in LAYOUTS.items()
    ]
    ranks(SCRIPT, config, tmp_path, *runs, modules=ENGINE).check()
    first = []
    for name, (_, steps) in LAYOUTS.items():
        metrics = metrics_of(tmp_path / name)
        for step in range(1, steps + 1):
            assert metrics[step]["actor/grad_norm"] > 0, "every step changes the weights"
            rows = rows_of(tmp_path / name, step)
            assert [row["weight_version"] for row in rows] == [step - 1] * 16
            assert sorted(len(row["prompt"].get("images", ())) for row in rows) == sorted([0, 1, 1, 2] * 4)
        samples = rows_of(tmp_path / name, 1)
        first.append({(row["prompt"]["index"], row["sample_index"]): row["token_ids"] for row in samples})
    assert first[0] == first[1] == first[2], "the same engine, weights and seeds"


def test_a_run_that_is_killed_goes_on_elsewhere(tmp_path: Path) -> None:
    """Killed with tails, which go on in an engine in another process; and repeated from its records.

    A step begins all four prompts that there are, and ends when two groups have; it begins none where the step
    before carried out two, which are its batch.
    """
    pytest.importorskip("ray", reason="engines in other processes need Ray: install mega_rl[separate]")
    config, output_dir, again = configuration(tmp_path, "qwen3_vl", tied=True), tmp_path / "run", tmp_path / "again"
    own = (
        "data={train_batch_size: 2, max_response_length: 24}",
        f"rollout={{n: 2, oversample: 2, stop_token_ids: {[*range(3, 256, 6)]}}}",
    )
    own = (*own, "trainer.total_steps=5")
    reload = ("rollout.weight_update=reload", "bridge.verify=off", "checkpoint.save_freq=3")
    held = ("log", 3, "--config", config, f"trainer.output_dir={output_dir}", *own, *reload)
    with started((sys.executable, str(training.HELD), *map(str, held))) as running:
        running.wait_for("held at log 3", timeout=600)  # the end of the block sends SIGKILL to all of its processes
    elsewhere = ("rollout.placement=separate", "rollout.num_engines=1")
    resumed = train(config, output_dir, *own, *elsewhere, nproc=0).check()
    assert "resuming after step 3" in resumed.stdout
    metrics = metrics_of(output_dir)
    assert list(metrics) == [0, 1, 2, 3, 4, 5]
    mixed, num_carried = [], 0
    for step in range(1, 6):
        row = metrics[step]
        in_hand = row["rollout/groups_carried_out"] + row["rollout/groups_waiting"]
        assert in_hand == (0 if num_carried == 2 else 2)
        num_carried = row["rollout/groups_carried_out"]
        assert row["rollout/groups_kept"] == 2 and row["actor/grad_norm"] > 0
        learnt = [row for row in rows_of(output_dir, step) if row["outcome"] == "learnt"]
        assert len(learnt) == 4
        mixed += [(step, row) for row in learnt if "spans" in row]
    assert metrics[3]["rollout/tail_tokens"] > 0, "the checkpoint would hold none"
    assert any(row["prompt"].get("images") for _, row in mixed)
    assert not any("assistant" in row["text"] for _, row in mixed), "a text begins in the prompt"
    across = [row for step, row in mixed if step > 3 and row["spans"][0]["version"] < 3 <= row["weight_version"]]
    assert across, "no response was begun before the kill and ended after it"

    copies(config, again, *own, f"rollout.replay={output_dir / 'rollouts'}", nproc=0).check()
    for step, row in metrics_of(again).items():
        trained = {name: value for name, value in computed(row).items() if not name.startswith(ENGINE_ONLY)}
        assert trained.items() <= metrics[step].items(), step
