"""Responses that are taken out of a started engine and gone on with; checks of ``rollout_checks.py``."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
import torch
from transformers import PreTrainedModel

from mega_rl.rollout.engine import Request
from mega_rl.rollout.partial import PartialResponse
from mega_rl.rollout.requests import make_requests
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.rollout.vllm.receiving_engine import ReceivingEngine
from mega_rl.types import Trajectory
from tests.models.rollout_support import answer_of, perturb, prompt, span_error

Write = Callable[[Mapping[str, torch.Tensor]], None]


def steps(engine: VLLMEngine, number: int) -> list[Trajectory]:
    return [trajectory for _ in range(number) for trajectory in engine.step()]


def ended(engine: VLLMEngine) -> list[Trajectory]:
    found = []
    while engine.num_unfinished:
        found += engine.step()
    return found


def key(one: Trajectory | Request) -> tuple[int, int]:
    return one.prompt.index, one.sample_index


def unfinished_responses_go_on(engine: VLLMEngine) -> None:
    """Taken out at every few tokens, with the same weights and the likeliest tokens, responses are what they were."""
    requests = make_requests([prompt(0, 300), prompt(1, 7)], n=1, step=0, seed=0, max_tokens=24, temperature=0.0)
    engine._rollout.ignore_eos = True
    whole = {key(t): t for t in engine.generate(requests)}
    found: dict[tuple[int, int], Trajectory] = {}
    waiting, taken = requests, []
    for number in (3, 1, 5, 0, 2):
        engine.submit(waiting)
        done = steps(engine, number)
        late, waiting = engine.interrupt()
        assert not late and engine.num_unfinished == 0
        found |= {key(t): t for t in done}
        assert len(found) + len(waiting) == len(requests), "a response is lost or doubled"
        taken.append([0 if r.tail is None else r.tail.num_sampled for r in waiting])
    counts = [sum(of_time) for of_time in taken]  # an engine that computes ahead is a token late
    assert counts == sorted(counts) and counts[2] == counts[3] and 12 <= counts[-1] <= 22, taken
    engine.submit(waiting)
    found |= {key(t): t for t in ended(engine)}
    engine._rollout.ignore_eos = False
    for name, trajectory in whole.items():
        again = found[name]
        assert answer_of(again) == answer_of(trajectory) and again.text == trajectory.text, (again, trajectory)
        assert again.finish_reason == trajectory.finish_reason and again.turns == trajectory.turns
        assert again.spans == trajectory.spans and again.prompt == trajectory.prompt
        difference = np.abs(again.logprobs - trajectory.logprobs).max()
        assert difference < 1e-4, difference


def tails_are_functions_of_what_is_kept(engine: VLLMEngine) -> None:
    """Whatever runs beside them; and each beginning of a rest draws anew."""
    requests = make_requests([prompt(2, 9)], n=6, step=3, seed=1, max_tokens=20, temperature=1.0)
    engine.submit(requests)
    found = steps(engine, 6)
    _, waiting = engine.interrupt()
    assert waiting, "all responses ended at once"
    alone = []
    for request in waiting:
        engine.submit([request])
        alone += ended(engine)
    engine.submit(waiting)
    beside = sorted(ended(engine), key=key)
    assert [answer_of(t) for t in alone] == [answer_of(t) for t in beside]
    whole = {key(t): t for t in engine.generate(requests)}
    assert all(answer_of(whole[key(t)]) == answer_of(t) for t in found)
    assert any(answer_of(whole[key(t)]) != answer_of(t) for t in beside), "the rest had the first tokens' draws"


def tail_tokens_are_of_their_version(engine: VLLMEngine, model: PreTrainedModel, write: Callable[[], Write]) -> None:
    """Each token's log-probability is that of the weights of its own version, over three versions, and of no other."""
    waiting = make_requests([prompt(0, 300), prompt(1, 5)], n=3, step=0, seed=9, max_tokens=18, temperature=1.0)
    policies, found = {engine.weight_version: copy.deepcopy(model)}, list[Trajectory]()
    for seed in (41, 42):
        engine.submit(waiting)
        found += steps(engine, 5)
        _, waiting = engine.interrupt()
        perturb(model, seed, 0.05)
        engine.exchange(write(), engine.weight_version + 1)
        policies[engine.weight_version] = copy.deepcopy(model)
    engine.submit(waiting)
    found += ended(engine)
    assert len(found) == 6 and max(len(t.spans) for t in found) == 3
    error = max(span_error(trajectory, policies) for trajectory in found)
    newest = dict.fromkeys(policies, model)
    other = min(span_error(trajectory, newest) for trajectory in found if len(trajectory.spans) > 1)
    assert error < 1e-4 < other, (error, other)


def pieces_are_the_responses(engine: VLLMEngine, model: PreTrainedModel, write: Callable[[], Write]) -> None:
    """What is told of responses under way is what they have become, over a change of weights; and another engine goes
    on with it, with weights that are newer still.
    """
    requests = make_requests([prompt(0, 300), prompt(1, 5)], n=2, step=0, seed=5, max_tokens=18, temperature=1.0)
    engine._rollout.ignore_eos = True
    policies, first = {engine.weight_version: copy.deepcopy(model)}, engine.weight_version
    told: dict[int, int] = {}
    known: dict[int, PartialResponse] = {}

    def hear(least: int) -> int:
        found = ReceivingEngine.grown(engine, told, least)  # type: ignore[arg-type]
        for number, piece in found.items():
            told[number] = piece.first + piece.num_tokens
            known[number] = known[number].grown(piece)
        return len(found)

    def change(seed: int) -> None:
        perturb(model, seed, 0.05)
        engine.exchange(write(), engine.weight_version + 1)
        policies[engine.weight_version] = copy.deepcopy(model)

    for request, number in zip(requests, engine.enter(requests), strict=True):
        known[number] = PartialResponse(request.prompt, request.sample_index)
    assert hear(1) == 0
    done = steps(engine, 5)
    assert hear(1) == 4 and hear(1) == 0 and not done
    change(71)
    done += steps(engine, 4)
    assert hear(9) == 0 and hear(1) == 4 and not done
    whole = {key(t): t for t in ended(engine)}
    for partial in known.values():
        tail, response = partial.trajectory(), whole[partial.prompt.index, partial.sample_index]
        assert tail is not None and 7 <= tail.num_sampled == partial.num_sampled <= 9
        length = len(tail.token_ids)
        assert np.array_equal(tail.token_ids, response.token_ids[:length])
        assert np.array_equal(tail.logprobs, response.logprobs[:length])
        assert tail.spans == response.spans and [span.version for span in tail.spans] == [first, first + 1]
    change(72)
    of = {(one.prompt.index, one.sample_index): one.trajectory() for one in known.values()}
    engine.submit([dataclasses.replace(request, tail=of[key(request)]) for request in requests])
    again = ended(engine)
    engine._rollout.ignore_eos = False
    assert [len(t.spans) for t in again] == [3] * 4 and all(t.num_sampled == 18 for t in again)
    error = max(span_error(trajectory, policies) for trajectory in again)
    assert error < 1e-4, error
