"""Reinforcement learning on pictures through ``tools/train.py``, the tower trained, in float32.

Every step sees the same pictures, so that features which the engine had kept of an older tower would show.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from mega_rl.rollout.records import read_step, trajectory_of_row
from tests import vision_models
from tests.distributed.training import metrics_of, train

MISSING = [name for name in ("torchvision", "blake3") if find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(MISSING), reason=f"engines that see pictures need {' and '.join(MISSING)}"),
]
TOLERANCE = 1e-5  # nats
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


def test_a_run_that_sees(tmp_path: Path) -> None:
    model = vision_models.write(tmp_path / "model", "qwen3_vl", for_engine=True)
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    config, output_dir = tmp_path / "rl.yaml", tmp_path / "run"
    config.write_text(CONFIG.format(model=model, rows=write_rows(tmp_path), reward=reward))
    train(config, output_dir, nproc=0, timeout=500).check()
    metrics = metrics_of(output_dir)
    assert all(metrics[step]["actor/grad_norm"] > 0 for step in (1, 2, 3)), "every step changes the weights"
    num_images = []
    for step in (1, 2, 3):
        for row in read_step(output_dir / "rollouts", step):
            assert row["weight_version"] == step - 1
            assert row["logprob_diff"] < TOLERANCE, (step, row["prompt"]["text"])
            prompt = trajectory_of_row(row).prompt
            num_images.append(len(prompt.images))
            repeated = sum(image.num_tokens - 1 for image in prompt.images)
            assert len(prompt.token_ids) - len(row["prompt"]["token_ids"]) == repeated
    assert sorted(num_images) == sorted([0, 1, 1, 2] * 4 * 3)
