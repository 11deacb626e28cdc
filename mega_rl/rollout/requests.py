"""Requests out of prompts, and trajectories out of what the engine returns. Knows no engine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mega_rl.errors import InputError
from mega_rl.rollout.engine import Request
from mega_rl.types import ASSISTANT, Prompt, Trajectory, TurnSpan

ENDS = ("stop", "length")  # why a response ends
TAKEN_OUT = "abort"  # why a tail ends
HALF = "\ufffd"  # stands for bytes that are no character
NUM_BEFORE = 8  # tokens of a prompt


def sample_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """The seed of one response, in [0, 2**63): the same whatever the layout, the batch and the order.

    It is the blake2b hash of the four numbers as text, so that neighbouring steps, prompts and samples have unrelated
    seeds.
    """
    key = f"sample-v1|{run_seed}|{step}|{prompt_index}|{sample_index}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


def make_requests(
    prompts: Sequence[Prompt],
    *,
    n: int,
    step: int,
    seed: int,
    max_tokens: int,
    temperature: float,
    with_routing: bool = False,
) -> list[Request]:
    """``n`` requests per prompt, a prompt's samples side by side.

    Args:
        n: samples per prompt, >= 1.
        step: the training step; together with ``seed``, the run's, it determines every response's own seed.
        max_tokens: limit of each response.
        temperature: 0 is greedy.
        with_routing: the trajectories bring the experts that the engine chose.
    """
    return [
        Request(prompt, index, sample_seed(seed, step, prompt.index, index), max_tokens, temperature, with_routing)
        for prompt in prompts
        for index in range(n)
    ]


def resumed(request: Request) -> Request:
    """What an engine is asked for the rest of a response: its prompt is all that there is of it.

    vLLM's generators cannot be moved on by so many tokens, so the rest has a seed of its own, which follows from the
    response's seed and from where the rest begins: what is sampled is a function of what a checkpoint holds.
    """
    if (tail := request.tail) is None:
        return request
    key = f"tail-v1|{request.seed}|{tail.num_sampled}"
    seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1
    prompt = replace(request.prompt, token_ids=tuple(tail.token_ids.tolist()))
    return replace(request, prompt=prompt, seed=seed, max_tokens=request.max_tokens - tail.num_sampled, tail=None)


def joined(tail: Trajectory | None, rest: Trajectory, decode: Callable[[Sequence[int]], str]) -> Trajectory:
    """A tail and what was sampled to ``resumed`` of its request, as one response to the prompt of the tail.

    Args:
        decode: tokens to text, without special tokens.
    """
    if tail is None:
        return rest
    num_before, first = len(tail.token_ids), len(tail.prompt.token_ids)
    assert np.array_equal(rest.prompt.token_ids, tail.token_ids), "the rest of another response"
    is_same = rest.spans[0].version == tail.newest_version
    return replace(
        rest,
        prompt=tail.prompt,
        loss_mask=np.concatenate([tail.loss_mask, rest.loss_mask[num_before:]]),
        logprobs=np.concatenate([tail.logprobs, rest.logprobs[num_before:]]),
        spans=tail.spans + rest.spans[is_same:],
        turns=(tail.turns[0], TurnSpan(ASSISTANT, first, len(rest.token_ids))),
        text=text_of(rest.token_ids.tolist(), first, rest.finish_reason, decode),
    )


def text_of(
    token_ids: Sequence[int], num_prompt: int, finish_reason: str, decode: Callable[[Sequence[int]], str]
) -> str:
    """The text of a response as an engine writes it that follows the text of every token.

    Texts of parts do not make it: a character may lie in the tokens of both. The token at which the response stopped is
    left out, and so are the bytes of a character that has not ended. Some tokenizers write a first token without the
    space before it, so the last ones of the prompt are written with them.
    """
    stop = len(token_ids) - (finish_reason == "stop")
    before = decode(token_ids[max(0, num_prompt - NUM_BEFORE) : num_prompt])
    text = decode(token_ids[max(0, num_prompt - NUM_BEFORE) : stop])
    return (text.removeprefix(before) if text.startswith(before) else decode(token_ids[num_prompt:stop])).rstrip(HALF)


def with_tail(request: Request, output: Any, version: int, decode: Callable[[Sequence[int]], str]) -> Request:
    """The request with all that there is of its response.

    Args:
        output: vLLM's, of ``resumed(request)``, which was taken out of the engine.
        version: of the weights that sampled it.
        decode: as of ``joined``.

    Raises:
        RuntimeError: as ``trajectory_of_output``.
    """
    (answer,) = output.outputs
    if not answer.token_ids:
        return request
    found = trajectory_of_output(resumed(request), output, version, ends=(TAKEN_OUT,))
    return replace(request, tail=joined(request.tail, found, decode))


def check_length(request: Request, max_model_len: int) -> None:
    """Raise InputError for a prompt that leaves no room for its response within ``max_model_len`` tokens."""
    length = len(request.prompt.token_ids)
    if length == 0 or length + request.max_tokens > max_model_len:
        raise InputError(
            f"Prompt {request.prompt.index} has {length} tokens, but with a response of {request.max_tokens} the "
            f"engine takes 1 to {max_model_len - request.max_tokens}: raise data.max_prompt_length or set "
            "data.filter_overlong_prompts=true."
        )


def trajectory_of_output(
    request: Request,
    output: Any,
    version: int,
    routed_experts: npt.NDArray[np.unsignedinteger[Any]] | None = None,
    ends: Collection[str] = ENDS,
) -> Trajectory:
    """One trajectory out of vLLM's ``RequestOutput`` (or its like) with one output.

    Args:
        output: with ``flat_logprobs``, one of each token, if the request asked for log-probabilities.
        version: the version of the weights that sampled it.
        routed_experts: [tokens, M, K], of all tokens but the last, as in ``Trajectory``; None: not asked for.
        ends: why it may have ended.

    Raises:
        RuntimeError: the engine gave up on the request, its log-probabilities are not finite (broken weights), or the
            experts are not those of all tokens.
    """
    (answer,) = output.outputs
    where = f"prompt {request.prompt.index}, sample {request.sample_index}"
    if answer.finish_reason not in ends:
        raise RuntimeError(f"The engine ended {where} with {answer.finish_reason!r} instead of {' or '.join(ends)}.")
    # float32 loses nothing: vLLM's log-probabilities are float32 values, handed out as Python's numbers
    logprobs = answer.logprobs.logprobs if request.with_logprobs else [0.0] * len(answer.token_ids)
    if not all(math.isfinite(value) for value in logprobs):
        raise RuntimeError(
            f"The engine's log-probabilities of {where} are not finite: weights of version {version} are broken."
        )
    num_inputs = len(request.prompt.token_ids) + len(answer.token_ids) - 1
    if routed_experts is not None and len(routed_experts) != num_inputs:
        raise RuntimeError(
            f"The engine returned the experts of {len(routed_experts)} tokens of {where}, which had {num_inputs} as "
            "inputs: set rollout.routing_replay=recompute or off with this release of vLLM."
        )
    sampled = answer.token_ids, logprobs, answer.text, answer.finish_reason
    trajectory = Trajectory.single_turn(request.prompt, request.sample_index, *sampled, version)
    return trajectory if routed_experts is None else replace(trajectory, routed_experts=routed_experts)
