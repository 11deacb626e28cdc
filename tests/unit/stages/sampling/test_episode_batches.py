"""Groups of episodes over the steps of a run, on a pretended engine: dynamic sampling, and going on after a kill."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from transformers import PreTrainedTokenizerFast

from mega_rl.config import RunConfig
from mega_rl.data.prompts import PromptDataset
from mega_rl.data.stream import Stream
from mega_rl.data.tokens.replies import ReplyTokens
from mega_rl.data.tokens.tokenizer import render_prompt
from mega_rl.environments.episode import EpisodeLimits
from mega_rl.environments.protocol import End, Reply, Turn
from mega_rl.evaluation.evaluate import AnsweredPrompt, EvaluationSettings, evaluate, evaluation_metrics, summarized
from mega_rl.parallel.layout import EngineLayout, ParallelLayout
from mega_rl.parallel.rendezvous import Rendezvous
from mega_rl.rewards.scorer import Scorer
from mega_rl.rollout.collect.collect import GroupSummary
from mega_rl.rollout.collect.records import to_rows
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from mega_rl.rollout.episodes.episode_tokens import EpisodePlan
from mega_rl.rollout.episodes.episodes import EpisodeSampler
from mega_rl.stages.sampling.batch_builder import Batch, BatchBuilder
from mega_rl.synthetic.arithmetic import bpe_tokenizer
from mega_rl.types import Prompt
from tests.models.chat_templates import TEXTS
from tests.pretended.samplers import ScriptedEngine

ONE = EngineLayout(1, 1)
Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return bpe_tokenizer(TEXTS, 300)


@cache
def prompts() -> list[Prompt]:
    rendered = [render_prompt(tokenizer(), f"What is {index} + {index}?") for index in range(20)]
    return [Prompt(index, tuple(ids), text, "", "sums") for index, (text, ids) in enumerate(rendered)]


class Lengths:
    """Pays by the length of turns, and of every third prompt the same for all samples."""

    def __init__(self, prompt: Prompt, sample_index: int) -> None:
        self.is_dull, self.last = prompt.index % 3 == 0, 1 + sample_index % 2

    def step(self, turn: Turn) -> Reply | End:
        if turn.number == self.last:
            return End(0.5 if self.is_dull else len(turn.text) / 20)
        reply = [{"role": "tool", "content": str(len(turn.text))}]
        return Reply(reply, {"tool_calls": 1}, None if self.is_dull else len(turn.text) % 5)


class Run:
    """Groups of a run whose engine ends what it samples in an order of its own."""

    def __init__(self, order: int) -> None:
        config = RunConfig()
        config.data.train_batch_size, config.data.max_response_length, config.rollout.n = 3, 200, 4
        config.algorithm.credit = "turn"
        config.algorithm.dynamic_sampling.enabled, config.algorithm.dynamic_sampling.oversample = True, 1.7
        self.trajectory_store = TrajectoryStore(ParallelLayout.create(1), 0)
        self.engine = sampler(order)
        timers: Any = SimpleNamespace(add=lambda name, seconds: None)
        stream = Stream(PromptDataset(prompts()), 3, True, 5)
        meeting = Rendezvous(dist.HashStore(), 0, 1)
        job: Any = SimpleNamespace(
            config=config,
            engine_layout=ONE,
            timers=timers,
            rendezvous=meeting,
            trajectory_store=self.trajectory_store,
        )
        self.builder = BatchBuilder(job, stream, self.engine, Scorer([], None))

    def step(self, step: int) -> tuple[Batch, dict[str, Rows]]:
        """The groups, and as rows by what became of them."""
        batch = self.builder.build(step)
        return batch, {outcome: self.rows(groups) for outcome, groups in batch.by_outcome.items()}

    def rows(self, groups: list[GroupSummary]) -> Rows:
        return [row for group in self.trajectory_store.groups_to_first(groups) for row in to_rows(group)]


def sampler(order: int) -> EpisodeSampler:
    replies = ReplyTokens(tokenizer(), roles=["tool"])
    plan = EpisodePlan(Lengths, replies, tokenizer(), EpisodeLimits(step_timeout_s=120.0))
    return EpisodeSampler(ScriptedEngine(tokenizer(), order, pace=1 + order % 5), plan)


def test_dynamic_sampling_of_episodes_goes_on_exactly_after_a_kill() -> None:
    whole, cut, resumed = Run(order=0), Run(order=3), Run(order=9)
    expected = [whole.step(step) for step in range(4)]
    for batch, rows in expected:
        assert len(batch.learnt) == 3
        assert all(row["prompt"]["index"] % 3 == 0 for row in rows["dropped"])
        assert not any(row["prompt"]["index"] % 3 == 0 for row in rows["learnt"] + rows["carried"])
    assert any(rows["dropped"] for _, rows in expected)
    saved = next(step for step, (batch, _) in enumerate(expected[:3]) if batch.carried)
    for step in range(saved + 1):
        cut.step(step)
    state = json.loads(json.dumps(cut.builder.state_dict()))  # as a checkpoint has it
    assert state["carried"]
    cut.step(saved + 1)  # and then it was killed
    resumed.builder.load_state_dict(state)
    for step in range(saved + 1, 4):
        batch, rows = resumed.step(step)
        assert rows == expected[step][1] and batch.metrics == expected[step][0].metrics
    paid = [row for _, rows in expected for row in rows["learnt"] if any(row["score"]["turn_rewards"])]
    assert paid and all(row["score"]["turn_rewards"] == row["episode"]["turn_rewards"] for row in paid)
    for run in (whole, cut, resumed):
        run.engine.close()


def test_an_evaluation_answers_with_episodes_and_tells_how_they_were() -> None:
    engine, mine = sampler(order=2), list[AnsweredPrompt]()
    settings = EvaluationSettings(ONE, n=2, temperature=1.0, max_tokens=200, seed=3)
    evaluate(engine, Scorer([], None), prompts()[:4], settings, mine.append)
    engine.close()
    rows = summarized(mine, ONE, TrajectoryStore(ParallelLayout.create(1), 0))
    assert [row.summary.episode.num_turns for row in rows if row.summary.episode] == [2] * 4 + [2, 3] * 4
    metrics = evaluation_metrics(rows)
    assert metrics["val-aux/sums/episode/turns"] == 2.5 and metrics["val-aux/sums/episode/tool_calls"] == 1.5
    assert metrics["val-aux/sums/episode/failed_fraction"] == 0.0
    greedy = [row.score.value for row in rows if row.is_greedy]
    assert metrics["val-core/sums/greedy/acc"] == pytest.approx(sum(greedy) / 4)
