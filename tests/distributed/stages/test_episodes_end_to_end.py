"""Training on episodes through ``tools/train.py``, in float32: gates, metrics, records, credit of turns, dynamic
sampling, a replay without tools, a run that is killed and goes on, and an evaluation.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from mega_rl.data.rows.rows import write_jsonl
from mega_rl.rollout.collect.records import read_step, trajectory_of_row
from mega_rl.synthetic.arithmetic import bpe_tokenizer
from mega_rl.synthetic.products import TOOLS_TEMPLATE, WORDS, ProductsSpec, products_data
from mega_rl.synthetic.tiny_model import TinyModelSpec, write_tiny_model
from mega_rl.types import ASSISTANT, Trajectory
from tests.launching import training
from tests.launching.launch import ENGINE, Launched, ranks
from tests.launching.training import computed, metrics_of, steps_saved

pytestmark = pytest.mark.slow
EVALUATION = "tests/distributed/evaluation/run_eval_episodes.py"
ENVIRONMENT = '''
import pathlib
from mega_rl.environments.protocol import End, Reply

CALLS = pathlib.Path(__file__).with_suffix(".calls")

class Lengths:
    """Says how long a turn was; ends after two or three of them; breaks in the first sample of odd prompts.

    In every fourth group all samples get nothing at any turn, so that there is nothing to learn from.
    """
    roles = ("tool",)

    def __init__(self, prompt, sample_index, *, bound):
        self.bound, self.is_bad = bound, prompt.index % 2 and sample_index == 0
        self.is_dull = prompt.index % 4 == 2
        self.last = 1 + sample_index % 2

    def start(self):
        return [{"role": "user", "content": "Go."}]

    def step(self, turn):
        with CALLS.open("a") as file:
            file.write("x")
        if turn.number == 1 and self.is_bad:
            raise ValueError("broken")
        if turn.number == self.last:
            reward = 0.0 if self.is_dull else min(1.0, len(turn.text) / self.bound)
            return End(reward, {"said": len(turn.text)})
        reward = 0.0 if self.is_dull else len(turn.text) % 3 / 4
        return Reply([{"role": "tool", "content": f"{len(turn.text)}"}], {"tool_calls": 1, "tool_s": 0.5}, reward)
'''
CONFIG = """
model: {{path: {model}, dtype: float32}}
data: {{train_files: [{train}], val_files: [{train}], max_val_samples: 2, train_batch_size: 4}}
# one response at a time, and nothing out of a cache: which turns meet in the engine, and are rounded together, depends
# on how fast environments answer
rollout:
  tensor_parallel_size: 2
  n: 4
  kv_cache_bytes: 16777216
  vllm: {{block_size: 32, max_num_seqs: 1, enable_prefix_caching: false}}
environment: {{name: '{environment}:Lengths', options: {{bound: 20}}, max_turn_tokens: 9, step_timeout_s: 600}}
algorithm:
  kl_coefficient: 0.01
  credit: turn
  turn_discount: 0.5
  dynamic_sampling: {{enabled: true, oversample: 1.5}}
optimizer: {{lr: 3.0e-3}}
parallel: {{tensor: 2, sequence: true}}
trainer: {{total_steps: 2}}
validation: {{n: 0}}
logging: {{dump_rollouts: -1, num_text_samples: 2}}
checkpoint: {{save_freq: 1, export_hf: false}}
platform: {{name: cpu}}
"""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a configuration, and a run of it in ``run``."""
    directory = tmp_path_factory.mktemp("episodes")
    tokenizer = bpe_tokenizer(WORDS, 400, TOOLS_TEMPLATE)
    write_tiny_model(directory / "model", TinyModelSpec(hidden_size=64, num_heads=2, ffn=96), tokenizer)
    write_jsonl(directory / "train.jsonl", products_data(ProductsSpec(num_train=40, num_val=1, num_sft=1)).train)
    environment = directory / "lengths_of_turns.py"
    environment.write_text(ENVIRONMENT)
    names = {"model": directory / "model", "train": directory / "train.jsonl", "environment": environment}
    (directory / "config.yaml").write_text(CONFIG.format(**names))
    copies(directory, directory / "run").check()
    return directory


def recorded(run: Path) -> list[tuple[dict[str, Any], Trajectory]]:
    rows = [row for step in (1, 2) for row in read_step(run / "rollouts", step)]
    return [(row, trajectory_of_row(row)) for row in rows]


def copies(world: Path, output_dir: Path, *overrides: str, struck_after: int | None = None) -> Launched:
    config = world / "config.yaml"
    return training.copies(config, output_dir, *overrides, struck_after=struck_after, modules=ENGINE)


def learnt(run: Path) -> list[tuple[dict[str, Any], Trajectory]]:
    return [(row, trajectory) for row, trajectory in recorded(run) if row["outcome"] == "learnt"]


def test_trainer_and_engine_agree_over_all_turns(world: Path) -> None:
    metrics = metrics_of(world / "run")
    assert metrics[1]["rollout/logprob_diff_max"] < 1e-5
    assert metrics[2]["actor/kl"] > 0 and metrics[2]["actor/grad_norm"] > 0
    rows = [row for row, _ in learnt(world / "run")]
    own = [row["logprob_diff"] for row in rows if row["weight_version"] == row["step"] - 1]  # others were carried over
    assert len(rows) == 32 > len(own) and all(difference < 1e-6 for difference in own)  # mean, before the update


def test_episodes_are_learnt_from_and_counted(world: Path) -> None:
    found, metrics = learnt(world / "run"), metrics_of(world / "run")
    assert len(found) == 32
    for row, trajectory in found:
        assert trajectory.episode is not None and trajectory.prompt.text.count("<|im_start|>user") == 2
        assert (
            "".join(turn.text for turn in trajectory.turns).count("<|im_start|>tool") == len(trajectory.turns) // 2 - 1
        )
        is_bad = trajectory.prompt.index % 2 == 1 and trajectory.sample_index == 0
        assert (trajectory.episode.stop, row["score"]["value"] is None) == (
            "failed" if is_bad else "environment",
            is_bad,
        )
        total = (trajectory.episode.reward or 0.0) + sum(trajectory.episode.turn_rewards)
        assert is_bad or row["score"]["parts"] == {"environment": total}
        sampled = [turn for turn in trajectory.turns if turn.role == ASSISTANT]
        assert len(sampled) in (2, 3) and all(turn.stop - turn.start <= 9 for turn in sampled)
    for step in (1, 2):
        row, here = metrics[step], [t for r, t in found if r["step"] == step]
        assert row["episode/turns"] == sum(len(t.turns) // 2 for t in here) / 16
        assert row["episode/failed_fraction"] == sum(t.episode.stop == "failed" for t in here if t.episode) / 16
        assert row["reward/num_unknown/raised"] == row["reward/num_unknown"] == 16 * row["episode/failed_fraction"]
        assert row["episode/tool_s"] == pytest.approx(0.5 * row["episode/tool_calls"])
    assert {"val-core/products/greedy/acc", "val-aux/products/episode/turns"} <= metrics[2].keys()


def test_groups_without_a_difference_are_replaced_and_surplus_ones_wait(world: Path) -> None:
    rows, metrics = [row for row, _ in recorded(world / "run")], metrics_of(world / "run")
    dropped = [row for row in rows if row["outcome"] == "dropped"]
    assert dropped and all(row["prompt"]["index"] % 4 == 2 for row in dropped)
    assert not any(row["prompt"]["index"] % 4 == 2 for row in rows if row["outcome"] != "dropped")
    for step in (1, 2):
        kept = [row for row in rows if (row["step"], row["outcome"]) == (step, "learnt")]
        assert len(kept) == 16 and metrics[step]["rollout/groups_kept"] == 4
    assert metrics[2]["rollout/groups_carried_in"] == metrics[1]["rollout/groups_carried_out"] > 0


def test_turns_are_credited_by_what_came_after_them(world: Path) -> None:
    """Against the formula, once more: returns with discount 1/2, over the same turn of the group."""
    groups: dict[tuple[int, int], list[tuple[dict[str, Any], list[float]]]] = defaultdict(list)
    for row, trajectory in learnt(world / "run"):
        assert trajectory.episode is not None
        rewards = [*trajectory.episode.turn_rewards[:-1], trajectory.episode.reward or 0.0]
        returns = [sum(0.5**j * r for j, r in enumerate(rewards[k:])) for k in range(len(rewards))]
        if row["score"]["value"] is not None:
            groups[row["step"], row["prompt"]["index"]].append((row, returns))
    assert len(groups) == 8
    for group in groups.values():
        for row, returns in group:
            assert len(row["turn_advantages"]) == len(returns) in (2, 3)
            for turn, (advantage, value) in enumerate(zip(row["turn_advantages"], returns, strict=True)):
                others = [other[turn] for _, other in group if len(other) > turn]
                spread = statistics.stdev(others) if len(others) > 1 else 0.0
                assert advantage == pytest.approx((value - statistics.fmean(others)) / (spread + 1e-6), abs=1e-6)
    assert any(len(set(row["turn_advantages"])) > 1 for group in groups.values() for row, _ in group)


def test_a_replay_learns_the_same_and_runs_no_tool(world: Path) -> None:
    calls = (world / "lengths_of_turns.calls").read_text()
    replay = [f"rollout.replay={world / 'run' / 'rollouts'}", "data.val_files=[]"]
    copies(world, world / "replay", *replay).check()
    assert (world / "lengths_of_turns.calls").read_text() == calls
    first, again = (metrics_of(world / name) for name in ("run", "replay"))
    for step in (1, 2):
        here, there = computed(first[step]), computed(again[step])
        assert {name: here[name] for name in there} == there
    rows, other = ([json.dumps(row) for row, _ in recorded(world / name)] for name in ("run", "replay"))
    assert rows == other


def test_a_killed_run_goes_on_exactly(world: Path) -> None:
    """Killed in the second step, after its episodes; groups that the first one carried over are in the checkpoint."""
    cut = world / "cut"
    struck = copies(world, cut, struck_after=1)
    assert struck.returncode != 0 and steps_saved(cut) == [1], struck.stdout[-3000:]
    assert "resuming after step 1" in copies(world, cut).check().stdout
    whole, resumed = metrics_of(world / "run"), metrics_of(cut)
    assert {step: computed(row) for step, row in resumed.items()} == {s: computed(row) for s, row in whole.items()}
    rows, other = ([json.dumps(row) for row, _ in recorded(world / name)] for name in ("run", "cut"))
    assert rows == other


def test_an_evaluation_answers_with_episodes(world: Path) -> None:
    """On pretended engines: one of them and two write the same."""
    found = []
    for nproc in (1, 2):
        out = world / f"eval_{nproc}"
        arguments = (world / "model", "--config", world / "run" / "config.yaml", "--out", out, "--max-problems", 6)
        more = ("--samples", 2, "--right-at", 0.9)
        ranks(EVALUATION, *arguments, *more, nproc=nproc, modules=ENGINE).check()
        found.append([(out / name).read_text() for name in ("results.jsonl", "summary.json")])
    assert found[0] == found[1]
    rows = [json.loads(line) for line in found[0][0].splitlines()]
    assert [row["problem"] for row in rows] == list(range(6)) and all(len(row["responses"]) == 3 for row in rows)
    responses = [response for row in rows for response in row["responses"]]
    assert {response["episode"]["stop"] for response in responses} == {"environment", "failed"}
    for response in responses:
        roles = [turn["role"] for turn in response["turns"]]
        assert roles == (["assistant", "tool"] * 3)[: len(roles)] and roles[-1] == "assistant"
        is_failed = response["episode"]["stop"] == "failed"
        assert is_failed == (response["score"] is None) == ("environment" in response["unknown"])
        assert sum(len(turn["text"]) for turn in response["turns"]) > len(response["text"])
    (source,) = json.loads(found[0][1])["sources"].values()
    sampled = [response for response in responses if response["kind"] == "sampled"]
    assert source["episodes"]["episode/turns"] == sum(r["episode"]["num_turns"] for r in sampled) / 12
    greedy = [r["parts"]["environment"] >= 0.9 for r in responses if r["kind"] == "greedy"]
    assert source["metrics"]["greedy"]["value"] == sum(greedy) / 6
