"""What a user gets wrong, found while ranks are running: one sentence, a quick end, nothing damaged, nobody left."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from mega_rl.data.rows.rows import write_parquet
from tests.launching import training
from tests.launching.launch import ENGINE, REPO, Launched
from tests.launching.training import TinyWorld, digests, error_lines, metrics_of, steps_saved

pytestmark = pytest.mark.slow


def check_refusal(launched: Launched, *words: str) -> None:
    """The launch failed, and said one sentence with all of the words, once for all ranks."""
    assert launched.returncode != 0, launched.stdout
    lines = error_lines(launched)
    assert len(lines) == 1 and launched.stdout.count(lines[0][:60]) == 1, launched.stdout  # ranks may share a line
    assert [word for word in words if word not in lines[0]] == [], lines[0]
    assert f'File "{REPO / "mega_rl"}' not in launched.stdout, "a traceback through our own code is no sentence"


def test_reward_that_raises_costs_its_samples_only(tiny_world: TinyWorld, tmp_path: Path) -> None:
    reward = tmp_path / "moody.py"
    reward.write_text(
        "def moody(data_source, solution_str, ground_truth, extra_info):\n"
        "    if sum(map(ord, solution_str)) % 5 == 0:\n"
        "        raise KeyError('no such mood')\n"
        "    return len(set(solution_str)) / 5\n"
    )
    output_dir = tmp_path / "run"
    overrides = (f"rewards=[{{name: '{reward}:moody'}}]", "trainer.total_steps=3", "aqn.num_stages=1")
    launched = training.copies(tiny_world.rl, output_dir, *overrides, modules=ENGINE).check()
    told = "warning: the reward moody is unknown (raised) for"
    assert f"{told} " in launched.stdout and "it raised KeyError: 'no such mood'" in launched.stdout
    metrics = metrics_of(output_dir)
    assert list(metrics) == [0, 1, 2, 3]
    unknown = [metrics[step].get("reward/num_unknown", 0) for step in (1, 2, 3)]
    assert 0 < sum(unknown) < 3 * 16 and all(metrics[step]["actor/grad_norm"] > 0 for step in (1, 2, 3))
    assert steps_saved(output_dir) == [2, 3]


def test_damaged_checkpoint_and_one_of_another_model(tiny_world: TinyWorld, sft_run: Path, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    shutil.copytree(sft_run, output_dir)
    saved = training.checkpoint(output_dir, 8)
    damaged = tmp_path / "damaged"
    shutil.copytree(saved, damaged)
    training.truncate(damaged / "megatron" / "__0_0.distcp")
    before = digests(output_dir / "checkpoints")

    launched = training.copies(tiny_world.sft, output_dir, f"checkpoint.resume={damaged}")
    check_refusal(launched, f"checkpoint.resume={damaged}", "__0_0.distcp has", "name a whole checkpoint")

    other = tmp_path / "other_model"
    shutil.copytree(tiny_world.model, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    launched = training.copies(tiny_world.sft, output_dir, f"model.path={other}")
    check_refusal(launched, str(saved), "norm_eps", "model.path")
    assert digests(output_dir / "checkpoints") == before
    assert metrics_of(output_dir) == metrics_of(sft_run)


def test_truncated_parquet(tiny_world: TinyWorld, tmp_path: Path) -> None:
    file = tmp_path / "rows.parquet"
    write_parquet(file, [{"prompt": "1+1=", "answer": "2"}])
    training.truncate(file)
    launched = training.train(tiny_world.sft, tmp_path / "run", f"data.train_files=[{file}]")
    check_refusal(launched, "data.train_files", str(file), "write it again")


def test_rows_without_the_needed_fields(tiny_world: TinyWorld, tmp_path: Path) -> None:
    file = training.write_rows(tmp_path / "rows.jsonl", [{"sum": "1+1=", "answer": "2"}])
    overrides = (f"data.train_files=[{file}]", "parallel.tensor=1", "parallel.sequence=false")
    launched = training.copies(tiny_world.sft, tmp_path / "run", *overrides, nproc=0)
    check_refusal(launched, f"{file} line 1", "`prompt`", "rename or add the fields")
    assert launched.returncode == 2


def test_unknown_engine_option(tiny_world: TinyWorld, tmp_path: Path) -> None:
    one = ("parallel.tensor=1", "parallel.sequence=false", "rollout.tensor_parallel_size=1")
    overrides = (*one, "rollout.vllm={max_num_sequences: 4}")
    launched = training.train(tiny_world.rl, tmp_path / "run", *overrides, nproc=0)
    check_refusal(launched, "rollout.vllm.max_num_sequences", "nearest one is rollout.vllm.max_num_seqs")


def test_layout_that_does_not_fit_the_world(tiny_world: TinyWorld, tmp_path: Path) -> None:
    output_dir = tmp_path / "run"
    launched = training.train(tiny_world.rl, output_dir, "parallel.pipeline=2")
    check_refusal(
        launched,
        "parallel.tensor 2 x parallel.context 1 x parallel.pipeline 2 = 4",
        "world size 2",
        "start a multiple of 4",
    )
    assert not output_dir.exists()
