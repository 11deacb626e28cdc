"""A reward model from pairs, then PPO with it as reward and as critic, through ``tools/train.py`` on two processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from mega_rl.data.rows import read_rows, write_jsonl
from tests.distributed import training
from tests.distributed.training import TinyWorld, computed, digests, metrics_of, steps_saved
from tests.launch import once

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RM = """
model: {{path: {model}, dtype: float32}}
data:
  train_files: [{pairs}]
  val_files: [{held_out}]
  train_batch_size: 16
  max_prompt_length: 8
  max_response_length: 5
reward_model: {{centre: 0.01}}
optimizer: {{lr: 3.0e-3}}
parallel: {{pipeline: 2}}
trainer: {{stage: rm, total_steps: 6}}
checkpoint: {{save_freq: 3}}
validation: {{test_freq: 3}}
platform: {{name: cpu}}
"""
PPO = """
model: {{path: {model}, dtype: float32}}
data:
  train_files: [{prompts}]
  val_files: [{prompts}]
  max_val_samples: 4
  train_batch_size: 8
  max_prompt_length: 8
  max_response_length: 5
rollout: {{tensor_parallel_size: 2, n: 1, kv_cache_bytes: 16777216}}
algorithm: {{name: ppo, minibatches_per_step: 2, kl_coefficient: 0.01}}
critic: {{path: {rm}, lr: 1.0e-3, warmup_steps: 1, gamma: 0.99, lam: 0.95}}
rewards:
  - {{name: model, weight: 2.0, options: {{path: {rm_run}}}}}
  - {{name: exact_match}}
optimizer: {{lr: 3.0e-4}}
parallel: {{tensor: 2, sequence: true}}
trainer: {{total_steps: 4}}
checkpoint: {{save_freq: 2}}
validation: {{n: 2}}
logging: {{dump_rollouts: -1}}
platform: {{name: cpu}}
"""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ppo")


@pytest.fixture(scope="module")
def rm_run(root: Path, tiny_world: TinyWorld) -> Path:
    """A run of stage rm; not to be written to."""

    @once
    def launch() -> Path:
        rows = [
            {"prompt": row.get("prompt"), "chosen": row.get("answer"), "rejected": f"+{row.get('answer')}"}
            for row in read_rows([str(tiny_world.prompts)], "file")
        ]
        for place, row in enumerate(rows[::3]):
            row["margin"] = 0.1 * (place % 3)
        files = {"pairs": root / "pairs.jsonl", "held_out": root / "held_out.jsonl"}
        write_jsonl(files["pairs"], rows[12:])
        write_jsonl(files["held_out"], rows[:12])
        (root / "rm.yaml").write_text(RM.format(model=tiny_world.model, **files))
        training.train(root / "rm.yaml", root / "rm", timeout=300).check()
        return root / "rm"

    return launch()


@pytest.fixture(scope="module")
def ppo_run(root: Path, rm_run: Path, tiny_world: TinyWorld) -> Path:
    """A run of PPO; not to be written to."""

    @once
    def launch() -> Path:
        names = {"model": tiny_world.model, "prompts": tiny_world.prompts}
        (root / "ppo.yaml").write_text(PPO.format(rm=rm_run / "huggingface", rm_run=rm_run, **names))
        training.train(root / "ppo.yaml", root / "ppo", timeout=300).check()
        return root / "ppo"

    return launch()


def scores(model: PreTrainedModel, answers: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([model(input_ids=torch.tensor([ids])).logits[0, 0] for ids in answers])


def test_the_exported_reward_model_is_the_one_that_was_validated(rm_run: Path, root: Path) -> None:
    metrics = metrics_of(rm_run)
    assert [step for step, row in metrics.items() if "rm/val_loss" in row] == [3, 6]
    assert metrics[6]["rm/loss"] < 0.9 * metrics[1]["rm/loss"]
    assert metrics[6]["rm/margin"] > metrics[1]["rm/margin"]
    model = AutoModelForSequenceClassification.from_pretrained(rm_run / "huggingface").eval()
    tokenizer = AutoTokenizer.from_pretrained(rm_run / "huggingface")
    assert model.config.num_labels == 1 and model.config.pad_token_id == tokenizer.pad_token_id
    rows = read_rows([str(root / "held_out.jsonl")], "file")

    def ids(row: object, answer: str) -> list[int]:
        parts = (tokenizer(row.get(name), add_special_tokens=False)["input_ids"] for name in ("prompt", answer))
        return [*next(parts), *next(parts), tokenizer.eos_token_id]

    chosen, rejected = (scores(model, [ids(row, answer) for row in rows]) for answer in ("chosen", "rejected"))
    margins = torch.tensor([float(row.get("margin") or 0.0) for row in rows])
    assert margins.any()
    losses = -F.logsigmoid(chosen - rejected - margins) + 0.01 * (chosen + rejected) ** 2
    assert float(losses.mean()) == pytest.approx(metrics[6]["rm/val_loss"], abs=2e-5)
    assert float((chosen - rejected).mean()) == pytest.approx(metrics[6]["rm/val_margin"], abs=2e-5)


def test_ppo_learns_with_a_reward_model_and_a_critic(ppo_run: Path, rm_run: Path) -> None:
    metrics = metrics_of(ppo_run)
    first = metrics[1]
    assert max(first[f"gate/{name}"] for name in ("reference", "ppo_kl", "ratio")) == 0.0
    assert first["gate/engine"] < 1e-4
    assert "actor/grad_norm" not in first and metrics[2]["actor/grad_norm"] > 0  # in the first the critic learns alone
    for row in (metrics[step] for step in range(1, 5)):
        assert row["critic/loss"] > 0 and row["critic/grad_norm"] > 0 and row["critic/lr"] == pytest.approx(1e-3)
        assert row["reward/mean"] == pytest.approx(2 * row["reward/model"] + row["reward/exact_match"], abs=1e-6)
    assert metrics[4]["critic/explained_variance"] != metrics[1]["critic/explained_variance"]
    assert any(name.startswith("val-core/") for name in metrics[4])


def test_scores_of_the_reward_model_are_those_of_transformers(ppo_run: Path, rm_run: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(rm_run / "huggingface").eval()
    rows = [json.loads(line) for line in (ppo_run / "rollouts" / "step_000003.jsonl").read_text().splitlines()]
    found = torch.tensor([row["score"]["parts"]["model"] for row in rows])
    assert len(rows) == 8 and float(found.std()) > 0
    torch.testing.assert_close(
        found, scores(model, [[*row["prompt"]["token_ids"], *row["token_ids"]] for row in rows]), atol=2e-5, rtol=0
    )


def test_rm_resumes_exactly(rm_run: Path, root: Path, tmp_path: Path) -> None:
    resume_and_compare(root / "rm.yaml", rm_run, 3, tmp_path / "run", ("rm/", "data/"))


def test_ppo_resumes_exactly(ppo_run: Path, root: Path, tmp_path: Path) -> None:
    """With the rollouts of the first run, so that no engine is started: the critic's state decides the rest."""
    learnt = ("critic/", "actor/", "reward/")
    resume_and_compare(root / "ppo.yaml", ppo_run, 2, tmp_path / "run", learnt, f"rollout.replay={ppo_run}/rollouts")


def resume_and_compare(
    config: Path, run: Path, step: int, output_dir: Path, names: tuple[str, ...], *overrides: str
) -> None:
    """Go on from a checkpoint in the middle of a run; metrics and exported weights must come out the same."""
    assert step in steps_saved(run)
    resume = f"checkpoint.resume={training.checkpoint(run, step)}"
    resumed = training.train(config, output_dir, resume, *overrides, timeout=300).check()
    assert f"resuming after step {step}" in resumed.stdout

    def later(directory: Path) -> dict[int, dict[str, float]]:
        rows = {done: computed(row) for done, row in metrics_of(directory).items() if done > step}
        return {done: {n: v for n, v in row.items() if n.startswith(names)} for done, row in rows.items()}

    assert later(output_dir) == later(run) and later(run)
    assert digests(output_dir / "huggingface") == digests(run / "huggingface")
