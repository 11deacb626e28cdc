"""Episodes on a scripted engine: the same tokens whatever waits for whom, and nothing that is not counted."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from mega_rl.data.tokens.replies import ReplyTokens
from mega_rl.data.tokens.tokenizer import encode, render_prompt
from mega_rl.environments.episode import EpisodeLimits
from mega_rl.environments.protocol import End, Message, Reply, Turn
from mega_rl.observe.metrics.declared import match
from mega_rl.parallel import collectives
from mega_rl.rewards.scorer import Scorer, WeightedReward
from mega_rl.rollout.collect.collect import PromptGroup
from mega_rl.rollout.collect.records import to_group, to_rows, write_step
from mega_rl.rollout.collect.replay import ReplayEngine
from mega_rl.rollout.engine import Request
from mega_rl.rollout.episodes.episode_metrics import episode_metrics
from mega_rl.rollout.episodes.episode_tokens import EpisodePlan
from mega_rl.rollout.episodes.episodes import MAX_WAIT_S, EpisodeSampler, turn_seed
from mega_rl.rollout.requests import make_requests
from mega_rl.stages.run.episodes import without_reward
from mega_rl.synthetic.arithmetic import bpe_tokenizer
from mega_rl.types import ASSISTANT, PROMPT, Prompt, Score, Trajectory
from tests.models.chat_templates import TEXTS
from tests.pretended.samplers import ScriptedEngine

LIMITS = EpisodeLimits(max_turns=3, step_timeout_s=120.0)


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    return bpe_tokenizer(TEXTS, 300)


def requests(num_prompts: int = 4, n: int = 3, max_tokens: int = 200) -> list[Request]:
    prompts = []
    for index in range(num_prompts):
        text, ids = render_prompt(tokenizer(), f"What is {index} + {index}?")
        prompts.append(Prompt(index, tuple(ids), text, str(2 * index), "sums"))
    return make_requests(prompts, n=n, step=3, seed=1, max_tokens=max_tokens, temperature=1.0)


class Echo:
    """Says how long a turn was, and gives a reward after the third."""

    roles = ("tool",)

    def __init__(self, prompt: Prompt, sample_index: int) -> None:
        self.heard: list[str] = []

    def step(self, turn: Turn) -> Reply | End:
        self.heard.append(turn.text)
        if turn.number == 2:
            return End(float(len("".join(self.heard))), {"heard": len(self.heard)})
        return Reply([{"role": "tool", "content": f"{len(turn.text)} characters"}], {"tool_calls": 1})


class SlowEcho(Echo):
    """The same, each time after another while."""

    async def step(self, turn: Turn) -> Reply | End:  # type: ignore[override]
        await asyncio.sleep(hash(turn.text) % 7 / 500)
        return super().step(turn)


def plan(make: Callable[[Prompt, int], Any] = Echo, limits: EpisodeLimits = LIMITS, **options: Any) -> EpisodePlan:
    return EpisodePlan(make, ReplyTokens(tokenizer(), roles=["tool"]), tokenizer(), limits, **options)


@contextmanager
def sampler(engine: ScriptedEngine, plan: EpisodePlan) -> Iterator[EpisodeSampler]:
    made = EpisodeSampler(engine, plan)
    try:
        yield made
    finally:
        made.close()


def episodes(plan: EpisodePlan, wanted: list[Request], order: int = 0, pace: int = 3) -> list[Trajectory]:
    with sampler(ScriptedEngine(tokenizer(), order, pace), plan) as made:
        return made.generate(wanted)


def with_a_barrier(wanted: list[Request]) -> list[Trajectory]:
    """Every turn waits for all tools: what a loop over turns would come to."""
    engine, replies, found = ScriptedEngine(tokenizer()), ReplyTokens(tokenizer()), list[Trajectory]()
    for request in wanted:
        ids = list(request.prompt.token_ids)
        for turn in range(3):
            room = len(request.prompt.token_ids) + request.max_tokens - len(ids)
            prompt = Prompt(request.prompt.index, tuple(ids), "", "", "")
            made = engine.answer(
                Request(prompt, request.sample_index, turn_seed(request.seed, turn), room, request.temperature)
            )
            text = made.text
            ids = made.token_ids.tolist()
            if turn < 2:
                sampled = made.sampled_ids.tolist()
                ids += replies(sampled, [{"role": "tool", "content": f"{len(text)} characters"}])
        found.append(made)
    return found


def test_the_same_tokens_with_slow_tools_other_orders_two_engines_and_a_barrier() -> None:
    wanted = requests()
    first = episodes(plan(), wanted)
    assert [(t.prompt.index, t.sample_index) for t in first] == [(i, k) for i in range(4) for k in range(3)]
    assert episodes(plan(SlowEcho), wanted, order=5, pace=1) == first
    halves = [one for half in (wanted[:6], wanted[6:]) for one in episodes(plan(), half, order=9, pace=7)]
    assert halves == first
    assert [t.token_ids.tolist() for t in with_a_barrier(wanted)] == [t.token_ids.tolist() for t in first]
    assert len({tuple(t.token_ids) for t in first}) == len(first), "every sample is its own"


def test_a_trajectory_has_every_turn_and_learns_from_what_was_sampled() -> None:
    (request, *_) = requests()
    engine = ScriptedEngine(tokenizer())
    with sampler(engine, plan()) as made:
        (found,) = made.generate([request])
    assert [turn.role for turn in found.turns] == [PROMPT, ASSISTANT, "tool", ASSISTANT, "tool", ASSISTANT]
    assert [r.seed for r in engine.requests] == [turn_seed(request.seed, turn) for turn in range(3)]
    assert engine.requests[0].seed == request.seed
    for asked, turn in zip(engine.requests, found.turns[1::2], strict=True):
        alone = engine.answer(asked)
        own = slice(turn.start, turn.stop)
        assert asked.prompt.token_ids == tuple(found.token_ids[: turn.start])
        assert asked.max_tokens == len(request.prompt.token_ids) + 200 - turn.start
        assert np.array_equal(found.token_ids[own], alone.sampled_ids) and found.loss_mask[own].all()
        assert np.array_equal(found.logprobs[own], alone.sampled_logprobs)
    assert found.summary().turn_sizes == tuple(turn.stop - turn.start for turn in found.turns[1::2])
    for turn in (found.turns[0], *found.turns[2::2]):
        assert not found.loss_mask[turn.start : turn.stop].any()
    said = [turn.text.removesuffix("<|im_end|>") for turn in found.turns[1::2]]
    assert found.turns[2].text == f"\n<|im_start|>tool\n{len(said[0])} characters<|im_end|>\n<|im_start|>assistant\n"
    assert found.text == said[2] and found.episode is not None
    assert found.episode.reward == len("".join(said)) and found.episode.stop == "environment"
    assert found.episode.metrics == {"heard": 3, "tool_calls": 2, "turns": 3, "replies_cut": 0}
    (other,) = episodes(plan(scored="all_turns"), [request])
    assert other.text == "\n".join(said)


def test_limits_of_an_episode() -> None:
    wanted = requests(n=6)
    for limit in (1, 5, 20, 45):
        for request, found in zip(wanted, episodes(plan(), [r for r in requests(n=6, max_tokens=limit)]), strict=True):
            assert found.episode is not None
            assert len(found.token_ids) <= len(request.prompt.token_ids) + limit
            assert found.turns[-1].role == ASSISTANT, "no reply at the end that nobody reads"
            assert (found.episode.stop == "tokens") <= (found.finish_reason == "length")
    stops = {t.episode.stop for t in episodes(plan(), requests(n=6, max_tokens=45)) if t.episode}
    assert "tokens" in stops
    short = episodes(plan(max_turn_tokens=2), wanted)
    assert all(turn.stop - turn.start <= 2 for t in short for turn in t.turns[1::2])
    two = episodes(plan(limits=EpisodeLimits(max_turns=2, step_timeout_s=120.0)), wanted)
    assert {(t.episode.stop, t.episode.num_turns) for t in two if t.episode} == {("turns", 2)}


class Opening(Echo):
    def start(self) -> list[Message]:
        return [{"role": "user", "content": "begin"}]


def test_messages_before_the_first_turn_stand_in_the_prompt() -> None:
    (request, *_) = requests()
    (found,) = episodes(plan(Opening), [request])
    messages = [{"role": "user", "content": "What is 0 + 0?"}, {"role": "user", "content": "begin"}]
    text = tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert found.prompt.text == text and list(found.prompt.token_ids) == encode(tokenizer(), text)
    (none,) = episodes(plan(Opening), requests(1, 1, max_tokens=3))
    assert none.num_sampled == 0 and none.episode is not None
    assert none.episode.failure is not None and none.episode.failure.cause == "no_room"


class Bad(Echo):
    """By the number of its sample: raises when made, raises in a step, cannot close, answers nonsense, answers much."""

    def __init__(self, prompt: Prompt, sample_index: int) -> None:
        super().__init__(prompt, sample_index)
        self.kind = sample_index % 5
        if self.kind == 0:
            raise SystemExit("not made")

    def step(self, turn: Turn) -> Reply | End:
        if self.kind == 1:
            raise ValueError("broken")
        if self.kind == 3:
            return 3  # type: ignore[return-value]
        if self.kind == 4:
            return Reply([{"role": "tool", "content": "x" * 100_000 + "\x00"}])
        return super().step(turn)

    def close(self) -> None:
        if self.kind == 2:
            raise RuntimeError("not closed")


def test_whatever_environments_do_every_episode_ends_and_is_counted() -> None:
    limits = EpisodeLimits(max_turns=3, max_reply_tokens=20, step_timeout_s=120.0)
    found = episodes(plan(Bad, limits, workers=8), requests(8, 30))
    assert len(found) == 240
    by_kind: dict[int, set[tuple[str, str | None]]] = defaultdict(set)
    for t in found:
        assert t.episode is not None
        by_kind[t.sample_index % 5].add((t.episode.stop, t.episode.failure and t.episode.failure.cause))
        assert t.sample_index % 5 != 4 or t.episode.metrics["replies_cut"] >= 2
    assert by_kind == {
        0: {("failed", "raised")},
        1: {("failed", "raised")},
        2: {("environment", None)},
        3: {("failed", "not_a_reply")},
        4: {("turns", None)},
    }


class Hanging(Echo):
    release = threading.Event()

    def step(self, turn: Turn) -> Reply | End:
        self.release.wait(600)
        return End(1.0)


def test_threads_that_hang_do_not_keep_others_from_theirs() -> None:
    limits = EpisodeLimits(step_timeout_s=0.1, close_timeout_s=0.1)
    found = episodes(plan(Hanging, limits, workers=4), requests(4, 5))
    Hanging.release.set()
    failures = [t.episode.failure for t in found if t.episode is not None]
    assert [failure and failure.cause for failure in failures] == ["timed_out"] * 20


class Late(Echo):
    """Is made when nobody waits for it any more, and says how it is closed."""

    may_be_made = threading.Event()
    closed: SimpleQueue[str] = SimpleQueue()

    def __init__(self, prompt: Prompt, sample_index: int) -> None:
        self.may_be_made.wait(600)
        super().__init__(prompt, sample_index)


class LatePlain(Late):
    def close(self) -> None:
        self.closed.put("plain")
        raise SystemExit("not closed")


class LateAsync(Late):
    async def close(self) -> None:
        await asyncio.sleep(0)
        self.closed.put("async")


@pytest.mark.parametrize("kind", [LatePlain, LateAsync])
def test_an_environment_that_is_made_too_late_is_closed(kind: type[Late]) -> None:
    Late.may_be_made.clear()
    (found,) = episodes(plan(kind, EpisodeLimits(step_timeout_s=0.1)), requests(1, 1))
    assert found.episode is not None and found.episode.failure is not None
    assert found.episode.failure.cause == "timed_out" and Late.closed.empty()
    Late.may_be_made.set()  # after the event loop has ended, too
    assert Late.closed.get(timeout=60) == kind.__name__.removeprefix("Late").lower()
    time.sleep(0.1)
    assert Late.closed.empty(), "once"


def test_a_step_waits_while_all_wait_for_tools() -> None:
    class Waiting(Echo):
        async def step(self, turn: Turn) -> Reply | End:  # type: ignore[override]
            await asyncio.sleep(0.3)
            return End(1.0)

    engine = ScriptedEngine(tokenizer())
    with sampler(engine, plan(Waiting)) as made:
        made.submit(requests(1, 2))
        num_steps, began = 0, time.monotonic()
        while made.num_unfinished:
            made.step()
            num_steps += 1
        assert num_steps < 12 + (time.monotonic() - began) / MAX_WAIT_S and engine.num_idle_steps == 0


def test_no_more_environments_work_at_once_than_there_are_workers() -> None:
    working, most = set[int](), []

    class Working(Echo):
        def step(self, turn: Turn) -> Reply | End:
            working.add(id(self))
            most.append(len(working))
            time.sleep(0.002)
            working.discard(id(self))
            return super().step(turn)

    episodes(plan(Working, workers=2), requests(4, 8))
    assert max(most) <= 2


@pytest.mark.parametrize("turn", [1, 2, 9])
def test_turns_have_seeds_of_their_own(turn: int) -> None:
    seeds = {turn_seed(seed, number) for seed in range(50) for number in (0, turn)}
    assert len(seeds) == 100 and all(0 <= seed < 2**63 for seed in seeds)


def test_the_ranks_of_an_engine_submit_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader runs the environments; the other rank learns what to submit before the same step of the engine.

    Of an environment that has nothing to say it learns a number, and no object.
    """
    told: SimpleQueue[Any] = SimpleQueue()
    is_leader = threading.local()

    numbers, objects = list[Any](), list[Any]()  # that the leader told

    def broadcast(value: Any, group: Any, among: list[Any]) -> Any:
        if is_leader.value:
            among.append(value)
            told.put(value)
            return value
        return told.get(timeout=60)

    monkeypatch.setattr(collectives, "told_numbers", partial(broadcast, among=numbers))
    monkeypatch.setattr(collectives, "broadcast_object", partial(broadcast, among=objects))
    engines = [ScriptedEngine(tokenizer(), order=4) for _ in range(2)]
    wanted = requests()

    def rank(number: int) -> list[Any]:
        is_leader.value = number == 0
        made = EpisodeSampler(engines[number], plan(SlowEcho), number == 0, ranks=object())
        made.submit(wanted)
        ended: list[Any] = []
        while made.num_unfinished:
            ended += made.step()
        made.close()
        return ended

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(rank, range(2))
    assert engines[0].requests == engines[1].requests and len(engines[0].requests) == 36
    assert all(objects) and len(objects) == numbers.count([1]) and len(numbers) == len(objects) + numbers.count([])
    assert sum(map(len, objects)) == 36 + len(wanted), "every turn and every end was told"
    assert [(t.prompt.index, t.sample_index) for t in first] == [(r.prompt.index, r.sample_index) for r in second]
    assert all(isinstance(r, Request) for r in second)
    assert sorted(first, key=lambda t: (t.prompt.index, t.sample_index)) == episodes(plan(), wanted)


def test_records_and_replays_of_episodes(tmp_path: Path) -> None:
    wanted = requests(2, 3)
    found = episodes(plan(Opening), wanted)
    groups = [PromptGroup(tuple(found[i : i + 3]), (Score(1.0),) * 3) for i in (0, 3)]
    rows = [json.loads(json.dumps(row)) for group in groups for row in to_rows(group)]
    assert [to_group(rows[:3]), to_group(rows[3:])] == groups
    write_step(tmp_path, 8, rows, -1)
    replay = ReplayEngine(tmp_path, None)
    replay.turn_to(7)
    assert replay.generate(wanted) == found


class Paying(Echo):
    """Pays for every turn but the last; the end has a reward only in even samples."""

    def __init__(self, prompt: Prompt, sample_index: int) -> None:
        super().__init__(prompt, sample_index)
        self.end = End(0.25) if sample_index % 2 == 0 else End()

    def step(self, turn: Turn) -> Reply | End:
        if turn.number == 2:
            return self.end
        return Reply([{"role": "tool", "content": "ok"}], reward=turn.number + 0.5)


def test_rewards_of_turns_are_recorded_replayed_and_part_of_the_score(tmp_path: Path) -> None:
    wanted = requests(1, 2)
    found = episodes(plan(Paying), wanted)
    assert [t.episode.turn_rewards for t in found if t.episode] == [(0.5, 1.5, 0.0)] * 2
    alone = [Scorer([], None).start(trajectory).result() for trajectory in found]
    assert [(s.value, s.parts) for s in alone] == [(2.25, {"environment": 2.25}), (2.0, {"environment": 2.0})]
    pool: Any = SimpleNamespace(submit=lambda packed, rewards: answered([[0.75]]))
    scores = [Scorer([WeightedReward("r", 2.0)], pool).start(trajectory).result() for trajectory in found]
    assert scores[0] == alone[0] and scores[1].parts == {"r": 0.75, "environment_turns": 2.0}
    assert scores[1].value == 3.5 and scores[1].turn_rewards == (0.5, 1.5, 0.0)
    group = PromptGroup(tuple(found), tuple(scores))
    rows = [json.loads(json.dumps(row)) for row in to_rows(group)]
    assert to_group(rows) == group
    write_step(tmp_path, 8, rows, -1)
    replay = ReplayEngine(tmp_path, None)
    replay.turn_to(7)
    assert replay.generate(wanted) == found
    for row in rows:  # as they were written before turns had rewards
        del row["episode"]["turn_rewards"], row["score"]["turn_rewards"]
    assert [t.episode.turn_rewards for t in to_group(rows).trajectories if t.episode] == [(), ()]


def answered(values: Any) -> Future[Any]:
    result: Future[Any] = Future()
    result.set_result(values)
    return result


def test_the_environment_scores_or_the_rewards_do() -> None:
    scorer = Scorer([], None)
    (given, *_) = episodes(plan(), requests(1, 1))
    score = scorer.start(given).result()
    assert given.episode is not None and score.parts == {"environment": given.episode.reward}

    class Silent(Echo):
        def step(self, turn: Turn) -> Reply | End:
            return End()

    (silent,) = episodes(plan(Silent), requests(1, 1))
    unknown = scorer.start(silent).result()
    assert not unknown.is_known and unknown.unknown["environment"].cause == "missing"
    (failed,) = episodes(plan(Bad), requests(1, 1))
    assert scorer.start(failed).result().unknown["environment"].cause == "raised"
    (cut,) = episodes(plan(limits=EpisodeLimits(max_turns=1, step_timeout_s=120.0)), requests(1, 1))
    assert cut.episode is not None and cut.episode.stop == "turns"
    left_out = without_reward(cut.episode)
    assert left_out.failure is not None and left_out.failure.cause == "unfinished"
    assert without_reward(given.episode) == given.episode


def test_metrics_of_episodes() -> None:
    class Calling(Echo):
        def step(self, turn: Turn) -> Reply | End:
            if turn.number == 1:
                return End(1.0)
            of_tool = {"tool_calls/add": 2, "tool_errors/add": 1, "tool_s/add": 4.0}
            return Reply([{"role": "tool", "content": "3"}], {"tool_calls": 2, "tool_s": 4.0, **of_tool})

    found = [*episodes(plan(Calling), requests(1, 3)), *episodes(plan(Bad), requests(1, 1))]
    metrics = episode_metrics([trajectory.summary() for trajectory in found])
    assert metrics["episode/turns"] == 6 / 4 and metrics["episode/failed_fraction"] == 1 / 4
    assert metrics["episode/tool_calls"] == metrics["episode/tool_calls/add"] == 6 / 4
    assert metrics["episode/tool_errors/add"] == 0.5 and metrics["episode/tool_s/add"] == 2.0
    assert metrics["episode/reply_tokens"] == sum(
        turn.stop - turn.start for t in found for turn in t.turns if turn.role == "tool"
    ) / len(found)
    assert all(match(name) for name in metrics)
    assert episode_metrics([]) == {}
