"""Requests out of prompts, and trajectories out of what the engine returns. Knows no engine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mega_rl.errors import InputError
from mega_rl.rollout.engine import Request
from mega_rl.types import Prompt, Trajectory

CONTEXT = 8  # tokens of the prompt that a response's text is read behind


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
) -> Trajectory:
    """One trajectory out of vLLM's ``RequestOutput`` (or its like) with one output.

    Args:
        output: with ``flat_logprobs``, one of each token, if the request asked for log-probabilities.
        version: the version of the weights that sampled it.
        routed_experts: [tokens, M, K], of all tokens but the last, as in ``Trajectory``; None: not asked for.

    Raises:
        RuntimeError: the engine gave up on the request, its log-probabilities are not finite (broken weights), or the
            experts are not those of all tokens.
    """
    (answer,) = output.outputs
    where = f"prompt {request.prompt.index}, sample {request.sample_index}"
    if answer.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"The engine ended {where} with {answer.finish_reason!r} instead of 'stop' or 'length'.")
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
    return Trajectory.single_turn(
        request.prompt,
        request.sample_index,
        answer.token_ids,
        logprobs,
        answer.text,
        answer.finish_reason,
        version,
        routed_experts,
    )


def text_of_response(
    decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int], token_ids: Sequence[int]
) -> str:
    """The text that ``token_ids`` add to a prompt's.

    It is what a decoder gives with them less what it gives without them: by themselves they would lose a space that
    they begin with, as of tokenizers that mark words and not spaces.
    """
    context = list(prompt_ids[-CONTEXT:])
    before, whole = decode(context), decode([*context, *token_ids])
    return whole[len(before) :] if whole.startswith(before) else decode(token_ids)
