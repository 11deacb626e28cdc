"""A reward model from pairs, then PPO with it as reward and as critic, through ``tools/train.py`` on two processes.

The critic has a layout of its own: two replicas beside a policy of one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel

from mega_rl.data.rows.rows import read_rows, write_jsonl
from tests.launching import training
from tests.launching.launch import once
from tests.launching.training import TinyWorld, computed, copies, digests, metrics_of, steps_saved

pytestmark = pytest.mark.slow
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
  train_files: [{prompts}, "{counts}[:10]"]
  val_files: [{counts}, {prompts}]
  max_val_samples: 20
  train_batch_size: 8
  max_prompt_length: 8
  max_response_length: 5
rollout: {{tensor_parallel_size: 2, n: 1, kv_cache_bytes: 16777216}}
algorithm: {{name: ppo, minibatches_per_step: 2, kl_coefficient: 0.01}}
critic: {{path: {rm}, tensor: 1, lr: 1.0e-3, warmup_steps: 1, gamma: 0.99, lam: 0.95}}
rewards:
  - {{name: model, weight: 2.0, options: {{path: {rm_run}}}}}
  - {{name: exact_match, only: [arithmetic]}}
  - {{name: '{reward}:digits', weight: 0.5, only: [count*]}}
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
        copies(root / "rm.yaml", root / "rm").check()
        return root / "rm"

    return launch()


@pytest.fixture(scope="module")
def ppo_run(root: Path, rm_run: Path, tiny_world: TinyWorld) -> Path:
    """A run of PPO; not to be written to."""

    @once
    def launch() -> Path:
        counts = [{"prompt": f"{i}{i}+", "data_source": "counting"} for i in range(16)]  # nothing to compare with
        write_jsonl(root / "counts.jsonl", counts)
        names = {"model": tiny_world.model, "prompts": tiny_world.prompts, "counts": root / "counts.jsonl"}
        reward = tiny_world.rl.parent / "reward.py"
        (root / "ppo.yaml").write_text(PPO.format(rm=rm_run / "huggingface", rm_run=rm_run, reward=reward, **names))
        training.train(root / "ppo.yaml", root / "ppo").check()
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


def test_answers_of_pairs_apart_change_nothing(rm_run: Path, root: Path) -> None:
    """Micro-batches of 13 tokens hold every answer, and not the two of every pair."""
    keys = ("trainer.max_tokens_per_microbatch=13", "trainer.total_steps=2", "checkpoint.export_hf=false")
    copies(root / "rm.yaml", root / "apart", *keys).check()
    own, expected = metrics_of(root / "apart")[2], metrics_of(rm_run)[2]
    for name in ("loss", "grad_norm", "accuracy", "margin", "chosen_score", "rejected_score"):
        assert own[f"rm/{name}"] == pytest.approx(expected[f"rm/{name}"], rel=1e-4, abs=1e-5), name


def test_ppo_learns_with_a_reward_model_and_a_critic(ppo_run: Path, rm_run: Path) -> None:
    metrics = metrics_of(ppo_run)
    first = metrics[1]
    assert max(first[f"gate/{name}"] for name in ("reference", "ppo_kl", "ratio")) == 0.0
    assert first["gate/engine"] < 1e-4
    assert "actor/grad_norm" not in first and metrics[2]["actor/grad_norm"] > 0  # in the first the critic learns alone
    for row in (metrics[step] for step in range(1, 5)):
        assert row["critic/loss"] > 0 and row["critic/grad_norm"] > 0 and row["critic/lr"] == pytest.approx(1e-3)
    assert metrics[4]["critic/explained_variance"] != metrics[1]["critic/explained_variance"]


def test_every_row_is_scored_by_the_rewards_of_its_source(ppo_run: Path) -> None:
    weights = {"model": 2.0, "exact_match": 1.0, "digits": 0.5}
    of_source = {"arithmetic": {"model", "exact_match"}, "counting": {"model", "digits"}}
    metrics, found = metrics_of(ppo_run), set()
    for step in range(1, 5):
        lines = (ppo_run / "rollouts" / f"step_{step:06}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        for row in rows:
            parts = row["score"]["parts"]
            assert row["prompt"]["index"] < 70  # 60 sums, and 10 of the 16 rows of the other file
            assert parts.keys() == of_source[row["prompt"]["data_source"]]
            assert row["score"]["value"] == pytest.approx(sum(weights[name] * part for name, part in parts.items()))
            found.add(row["prompt"]["data_source"])
        for name in weights:  # a reward's metric is over the rows that have it
            values = [row["score"]["parts"][name] for row in rows if name in row["score"]["parts"]]
            assert metrics[step].get(f"reward/{name}") == (pytest.approx(sum(values) / len(values)) if values else None)
    assert found == set(of_source)
    sources = {name.split("/")[1] for name in metrics[4] if name.startswith("val-core/")}
    assert sources == set(of_source)


def test_scores_of_the_reward_model_are_those_of_transformers(ppo_run: Path, rm_run: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(rm_run / "huggingface").eval()
    rows = [json.loads(line) for line in (ppo_run / "rollouts" / "step_000003.jsonl").read_text().splitlines()]
    found = torch.tensor([row["score"]["parts"]["model"] for row in rows])
    assert len(rows) == 8 and float(found.std()) > 0
    torch.testing.assert_close(
        found, scores(model, [[*row["prompt"]["token_ids"], *row["token_ids"]] for row in rows]), atol=2e-5, rtol=0
    )


LEARNT = ("critic/", "actor/", "reward/")


def test_rm_killed_and_resumed_is_the_same_run(rm_run: Path, root: Path, tmp_path: Path) -> None:
    struck(root / "rm.yaml", tmp_path / "run", after=4, saved=3)
    resume_and_compare(root / "rm.yaml", rm_run, tmp_path / "run", ("rm/", "data/"))


def test_ppo_killed_and_resumed_is_the_same_run(ppo_run: Path, root: Path, tmp_path: Path) -> None:
    """With the rollouts of the first run, so that no engine is started: the critic's state decides the rest."""
    replay = f"rollout.replay={ppo_run}/rollouts"
    struck(root / "ppo.yaml", tmp_path / "run", replay, after=3, saved=2)
    resume_and_compare(root / "ppo.yaml", ppo_run, tmp_path / "run", LEARNT, replay)


def test_a_critic_on_shared_weights_killed_and_resumed_is_the_same_run(
    ppo_run: Path, root: Path, tmp_path: Path
) -> None:
    """Its policy learns from the answers of another one, which the gate of the engine would find out."""
    keys = [
        "tuning.method=lora",
        "tuning.adapter.rank=4",
        "critic.path=null",
        "critic.shares_base=true",
        "critic.tensor=null",
    ]
    keys += [f"rollout.replay={ppo_run}/rollouts", "trainer.gates.disabled=[engine]"]
    copies(root / "ppo.yaml", tmp_path / "whole", *keys).check()
    metrics = metrics_of(tmp_path / "whole")
    assert metrics[1]["reward/mean"] == metrics_of(ppo_run)[1]["reward/mean"]
    assert all(metrics[step]["critic/grad_norm"] > 0 for step in range(1, 5))
    assert metrics[1]["critic/value_mean"] == 0 != metrics[3]["critic/value_mean"]
    struck(root / "ppo.yaml", tmp_path / "run", *keys, after=3, saved=2)
    resume_and_compare(root / "ppo.yaml", tmp_path / "whole", tmp_path / "run", LEARNT, *keys)


def struck(config: Path, output_dir: Path, *overrides: str, after: int, saved: int) -> None:
    launched = copies(config, output_dir, *overrides, struck_after=after)
    assert launched.returncode != 0 and steps_saved(output_dir) == [saved], launched.stdout[-3000:]


def resume_and_compare(config: Path, run: Path, output_dir: Path, names: tuple[str, ...], *overrides: str) -> None:
    """Go on from what a killed run has left; metrics of all steps and exported weights must be those of ``run``."""
    (saved,) = steps_saved(output_dir)
    resumed = copies(config, output_dir, *overrides).check()
    assert f"resuming after step {saved}" in resumed.stdout

    def named(directory: Path) -> dict[int, dict[str, float]]:
        rows = {done: computed(row) for done, row in metrics_of(directory).items() if done > 0}
        return {done: {n: v for n, v in row.items() if n.startswith(names)} for done, row in rows.items()}

    assert named(output_dir) == named(run) and all(named(run).values())
    assert digests(output_dir / "huggingface") == digests(run / "huggingface")
