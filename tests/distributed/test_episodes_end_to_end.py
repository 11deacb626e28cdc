"""Training on episodes through ``tools/train.py``, in float32: gates, metrics, records, and a replay without tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega_rl.data.products import TOOLS_TEMPLATE, WORDS, ProductsSpec, products_data
from mega_rl.data.rows import write_jsonl
from mega_rl.data.synthetic import bpe_tokenizer
from mega_rl.data.tiny_model import TinyModelSpec, write_tiny_model
from mega_rl.rollout.records import read_step, trajectory_of_row
from mega_rl.types import ASSISTANT, Trajectory
from tests.distributed import training
from tests.distributed.training import computed, metrics_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ENVIRONMENT = '''
import pathlib
from mega_rl.environments.protocol import End, Reply

CALLS = pathlib.Path(__file__).with_suffix(".calls")

class Lengths:
    """Says how long a turn was; ends after two or three of them; breaks in the first sample of odd prompts."""
    roles = ("tool",)

    def __init__(self, prompt, sample_index, *, bound):
        self.bound, self.is_bad = bound, prompt.index % 2 and sample_index == 0
        self.last = 1 + sample_index % 2

    def start(self):
        return [{"role": "user", "content": "Go."}]

    def step(self, turn):
        with CALLS.open("a") as file:
            file.write("x")
        if turn.number == 1 and self.is_bad:
            raise ValueError("broken")
        if turn.number == self.last:
            return End(min(1.0, len(turn.text) / self.bound), {"said": len(turn.text)})
        return Reply([{"role": "tool", "content": f"{len(turn.text)}"}], {"tool_calls": 1, "tool_s": 0.5})
'''
CONFIG = """
model: {{path: {model}, dtype: float32}}
data: {{train_files: [{train}], val_files: [{train}], max_val_samples: 2, train_batch_size: 4}}
rollout: {{tensor_parallel_size: 2, n: 4, kv_cache_bytes: 16777216, vllm: {{block_size: 32}}}}
environment: {{name: '{environment}:Lengths', options: {{bound: 20}}, max_turn_tokens: 9, step_timeout_s: 600}}
algorithm: {{kl_coefficient: 0.01}}
optimizer: {{lr: 3.0e-3}}
parallel: {{tensor: 2, sequence: true}}
trainer: {{total_steps: 2}}
validation: {{n: 0}}
logging: {{dump_rollouts: -1, num_text_samples: 2}}
checkpoint: {{save_freq: null, export_hf: false}}
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
    training.train(directory / "config.yaml", directory / "run").check()
    return directory


def recorded(run: Path) -> list[tuple[dict[str, object], Trajectory]]:
    rows = [row for step in (1, 2) for row in read_step(run / "rollouts", step)]
    return [(row, trajectory_of_row(row)) for row in rows]


def test_trainer_and_engine_agree_over_all_turns(world: Path) -> None:
    metrics = metrics_of(world / "run")
    assert all(metrics[step]["rollout/logprob_diff_max"] < 1e-5 for step in (1, 2))
    assert metrics[2]["actor/kl"] > 0 and metrics[2]["actor/grad_norm"] > 0
    differences = [row["logprob_diff"] for row, _ in recorded(world / "run")]
    assert len(differences) == 32 and all(difference < 1e-6 for difference in differences)  # mean, before the update


def test_episodes_are_learnt_from_and_counted(world: Path) -> None:
    found, metrics = recorded(world / "run"), metrics_of(world / "run")
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
        assert is_bad or row["score"]["parts"] == {"environment": trajectory.episode.reward}
        sampled = [turn for turn in trajectory.turns if turn.role == ASSISTANT]
        assert len(sampled) in (2, 3) and all(turn.stop - turn.start <= 9 for turn in sampled)
    for step in (1, 2):
        row, here = metrics[step], [t for r, t in found if r["step"] == step]
        assert row["episode/turns"] == sum(len(t.turns) // 2 for t in here) / 16
        assert row["episode/failed_fraction"] == sum(t.episode.stop == "failed" for t in here if t.episode) / 16
        assert row["reward/num_unknown/raised"] == row["reward/num_unknown"] == 16 * row["episode/failed_fraction"]
        assert row["episode/tool_s"] == pytest.approx(0.5 * row["episode/tool_calls"])
    assert {"val-core/products/greedy/acc"} <= metrics[2].keys()


def test_a_replay_learns_the_same_and_runs_no_tool(world: Path) -> None:
    calls = (world / "lengths_of_turns.calls").read_text()
    replay = [f"rollout.replay={world / 'run' / 'rollouts'}", "data.val_files=[]"]
    training.train(world / "config.yaml", world / "replay", *replay).check()
    assert (world / "lengths_of_turns.calls").read_text() == calls
    first, again = (metrics_of(world / name) for name in ("run", "replay"))
    for step in (1, 2):
        here, there = computed(first[step]), computed(again[step])
        assert {name: here[name] for name in there} == there
    rows, other = ([json.dumps(row) for row, _ in recorded(world / name)] for name in ("run", "replay"))
    assert rows == other
