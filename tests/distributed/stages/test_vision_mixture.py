"""A mixture of experts that sees, in float32: reinforcement learning with the tower trained, then its evaluation.

One run and one evaluation show everything around pictures: an engine of its own whose weights change under way, a
reward that sees them, held-out rows with pictures, what dashboards and the report show of them, and what another engine
makes of the exported weights.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mega_rl.rollout.collect.records import read_step, trajectory_of_row
from tests.distributed.stages.test_vision_rl import CONFIG, TOLERANCE, pytestmark as needs_torchvision, write_rows
from tests.launching.launch import ENGINE, REPO, ranks, run
from tests.launching.training import metrics_of
from tests.models import vision_models
from tools import report

pytestmark = needs_torchvision
EVAL = REPO / "tools" / "eval.py"
STRUCK = "tests/distributed/fleet/run_struck_fleet.py"
REWARDS = """
import io
from PIL import Image

def early(data_source, solution_str, ground_truth, extra_info):
    return sum(character < "n" for character in solution_str) / 8

def num_red(solution_str, images):
    return sum(Image.open(io.BytesIO(image)).getpixel((0, 0)) == (255, 0, 0) for image in images)
"""
STEPS = 2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a run in ``run``, its rows in ``rows.jsonl`` and its rewards in ``reward.py``."""
    directory = tmp_path_factory.mktemp("mixture")
    model = vision_models.write(directory / "model", "qwen3_vl_moe", for_engine=True)
    rows, reward, config = write_rows(directory), directory / "reward.py", directory / "rl.yaml"
    reward.write_text(REWARDS)
    config.write_text(CONFIG.format(model=model, rows=rows, reward=reward))
    overrides = (
        f"trainer.output_dir={directory / 'run'}",
        "rollout.placement=separate",
        "rollout.mode=in_flight",
        "rollout.max_staleness=1",
        f"data.val_files=[{rows}]",
        f"rewards=[{{name: '{reward}:early'}}, {{name: '{reward}:num_red', weight: 0.0}}]",
        f"trainer.total_steps={STEPS}",
        f"validation={{test_freq: {STEPS}, val_before_train: false, n: 1}}",
        "checkpoint.export_hf=true",
        "logging.num_text_samples=16",
    )
    command = [sys.executable, STRUCK, "patient", "--config", str(config), *overrides]
    said = run(command).check().stdout  # Ray must not be imported yet
    (directory / "said.txt").write_text(said)
    return directory


def test_trainer_and_engine_agree_and_rewards_see(world: Path) -> None:
    """On tokens of the weights that a step trains; those of older weights differ. Some responses have both."""
    metrics = metrics_of(world / "run")
    assert all(metrics[step]["actor/grad_norm"] > 0 for step in (1, STEPS)), "every step changes the weights"
    assert metrics[2]["rollout/staleness_max"] == 1
    assert abs(metrics[2]["rollout/kl_of_staleness/0"]) < TOLERANCE < abs(metrics[2]["rollout/kl_of_staleness/1"]) / 10
    with_both = 0
    for step in (1, STEPS):
        rows = list(read_step(world / "run" / "rollouts", step))
        assert len(rows) == 16
        for row in rows:
            pictures = len(row["prompt"].get("images", ()))
            versions = [span.version for span in trajectory_of_row(row).spans]
            with_both += versions == [0, 1] and pictures > 0
            assert set(versions) <= set(range(step)), (step, versions)
            if versions == [step - 1]:
                assert row["logprob_diff"] < TOLERANCE, (step, row["prompt"]["text"])
            num_red = row["score"]["parts"]["num_red"]
            assert num_red == {0: 0.0, 1: float(row["prompt"]["ground_truth"] == "red"), 2: 1.0}[pictures]
    assert with_both > 0


def test_the_engine_has_shown_what_it_loads(world: Path) -> None:
    """Tower and experts included."""
    log = (world / "run" / "run.log").read_text()
    kinds = re.findall(r"engine 0 of kind (.*) holds model.path as the trainer does$", log, re.MULTILINE)
    assert len(kinds) == 1 and "torch 2." in kinds[0] and "vllm 0." in kinds[0]


def test_an_engine_goes_on_with_what_the_one_before_it_had(world: Path) -> None:
    """It was killed amid the responses of the second step."""
    found = re.findall(r"^GOES ON (\d+) (\d+)$", (world / "said.txt").read_text(), re.MULTILINE)
    assert found and all(int(num_tokens) > 0 for num_tokens, _ in found)
    assert any(int(num_pictures) for _, num_pictures in found), "some with pictures"
    assert metrics_of(world / "run")[STEPS]["fleet/restarts"] == 1


def test_pictures_stand_beside_their_samples(world: Path) -> None:
    seen = EventAccumulator(str(world / "run" / "tensorboard")).Reload()
    tags = seen.Tags()["images"]
    shown = {
        kind: sum(len(seen.Images(tag)) for tag in tags if tag.startswith(f"samples/{kind}/"))
        for kind in ("rollout", "validation")
    }
    assert shown == {"rollout": STEPS * 12, "validation": 3}, "three of four prompts have pictures"
    page = world / "report.html"
    assert report.main([str(world / "run"), "-o", str(page), "--samples", "16"]) == 0
    text = page.read_text()
    assert text.count("<img src=") == 4 * (0 + 1 + 1 + 2) and "pictures of the samples are not shown" not in text


def test_an_evaluation_sees_what_validation_saw(world: Path) -> None:
    """The export in an engine that loads it by itself, and the same greedy answers."""
    out, overrides = world / "eval", ("rollout.kv_cache_bytes=16777216", "rollout.vllm={max_num_seqs: 16}")
    arguments = (world / "run", "--out", out, "--samples", 0, *overrides)
    ranks(EVAL, *arguments, nproc=0, modules=ENGINE).check()
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [len(row.get("images", ())) for row in rows] == [0, 1, 1, 2]
    assert [row["responses"][0]["parts"]["num_red"] for row in rows] == [0.0, 1.0, 0.0, 1.0]
    greedy = sum(row["responses"][0]["score"] for row in rows) / 4
    assert greedy == metrics_of(world / "run")[STEPS]["val-core/rows/greedy/acc"] and greedy > 0
    assert max(len(json.dumps(image)) for row in rows for image in row.get("images", ())) < 300
