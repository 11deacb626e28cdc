"""Supervised fine-tuning on pictures through ``tools/train.py``: the answer is a colour that only the picture tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.launching.training import computed, copies, metrics_of, steps_saved
from tests.models import vision_models

pytestmark = pytest.mark.slow
COLOURS = {"red": (255, 0, 0), "blue": (0, 0, 255)}
CONFIG = """
model: {{path: {model}, dtype: float32}}
data:
  train_files: [{rows}]
  val_files: [{rows}]
  train_batch_size: 8
  max_prompt_length: 96
  max_response_length: 8
optimizer: {{lr: 2.0e-3}}
parallel: {{tensor: 2, sequence: true}}
trainer: {{stage: sft, total_steps: 4, max_tokens_per_microbatch: 256}}
checkpoint: {{save_freq: 2}}
validation: {{test_freq: 4}}
platform: {{name: cpu}}
"""


def write_rows(directory: Path) -> Path:
    rows = [{"prompt": "say nothing", "response": "."}]
    for number in range(15):
        name = list(COLOURS)[number % 2]
        Image.new("RGB", (16 + 4 * number, 30), COLOURS[name]).save(directory / f"{number}.png")
        rows.append({"prompt": "<image>colour?", "response": name, "images": [f"{number}.png"]})
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def loss_by_transformers(model_dir: Path, rows: Path) -> float:
    """Mean negative log-likelihood in nats of the responses and their ends."""
    model = AutoModelForImageTextToText.from_pretrained(model_dir, dtype=torch.float32).eval()
    tokenizer, processor = AutoTokenizer.from_pretrained(model_dir), Qwen2VLImageProcessorPil.from_pretrained(model_dir)
    token, total, count = model.config.image_token_id, 0.0, 0
    for row in map(json.loads, rows.read_text().splitlines()):
        text = row["prompt"].replace("<image>", vision_models.MARK)
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": text}], add_generation_prompt=True)[
            "input_ids"
        ]
        more = {}
        if "images" in row:
            image = Image.open(rows.parent / row["images"][0])
            more = dict(processor(images=[image], return_tensors="pt"))
            num_tokens = int(more["image_grid_thw"].prod()) // vision_models.MERGE**2
            prompt = [one for i in prompt for one in ([i] * num_tokens if i == token else [i])]
        response = [*tokenizer(row["response"], add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        ids = torch.tensor([prompt + response])
        if more:
            more["mm_token_type_ids"] = (ids == token).long()
        with torch.no_grad():
            table = model(ids, **more).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        total -= float(table.gather(1, ids[0, len(prompt) :, None]).sum())
        count += len(response)
    return total / count


def test_a_run_with_pictures(tmp_path: Path) -> None:
    model, rows = vision_models.write(tmp_path / "model", "qwen3_vl"), write_rows(tmp_path)
    config, output_dir, again = tmp_path / "sft.yaml", tmp_path / "run", tmp_path / "again"
    config.write_text(CONFIG.format(model=model, rows=rows))
    copies(config, output_dir).check()
    metrics = metrics_of(output_dir)
    assert metrics[4]["sft/loss"] < 0.95 * metrics[1]["sft/loss"] and steps_saved(output_dir) == [2, 4]
    exported = output_dir / "huggingface"
    assert loss_by_transformers(exported, rows) == pytest.approx(metrics[4]["sft/val_loss"], rel=1e-5)
    before, after = (AutoModelForImageTextToText.from_pretrained(path).state_dict() for path in (model, exported))
    moved = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert moved and not any("visual" in name for name in moved), "the tower is frozen"

    halved = copies(config, again, "trainer.total_steps=2", "model.vision.freeze_merger=false")
    halved.check()  # a trained merger saves and goes on
    resumed = copies(config, again, "model.vision.freeze_merger=false")
    assert "resuming after step 2" in resumed.check().stdout
    after = AutoModelForImageTextToText.from_pretrained(again / "huggingface").state_dict()
    moved = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert {name for name in moved if "visual" in name} == {name for name in before if "merger" in name}
    assert computed(metrics_of(again)[1])["sft/loss"] == metrics[1]["sft/loss"]
