"""Requests out of prompts, and completions out of what the engine returns. Knows no engine."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

from mega_rl.errors import InputError
from mega_rl.rollout.engine import Request
from mega_rl.types import Completion, Prompt


def sample_seed(run_seed: int, step: int, prompt_index: int, sample_index: int) -> int:
    """The seed of one response, in [0, 2**63): the same whatever the layout, the batch and the order.

    blake2b of the four numbers in words, so that neighbouring steps, prompts and samples have unrelated seeds.
    """
    key = f"sample-v1|{run_seed}|{step}|{prompt_index}|{sample_index}"
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") >> 1


def make_requests(
    prompts: Sequence[Prompt], *, n: int, step: int, seed: int, max_tokens: int, temperature: float
) -> list[Request]:
    """``n`` requests per prompt, a prompt's samples side by side.

    Args:
        n: samples per prompt, >= 1.
        step: of training; with ``seed``, the run's, it keys every response's own seed.
        max_tokens: limit of each response.
        temperature: 0 is greedy.
    """
    return [
        Request(prompt, index, sample_seed(seed, step, prompt.index, index), max_tokens, temperature)
        for prompt in prompts
        for index in range(n)
    ]


def check_length(request: Request, max_model_len: int) -> None:
    """InputError for a prompt that leaves no room for its response within ``max_model_len`` tokens."""
    length = len(request.prompt.token_ids)
    if length == 0 or length + request.max_tokens > max_model_len:
        raise InputError(
            f"Prompt {request.prompt.index} has {length} tokens, but with a response of {request.max_tokens} the "
            f"engine takes 1 to {max_model_len - request.max_tokens}: raise data.max_prompt_length or set "
            "data.filter_overlong_prompts=true."
        )


def to_completion(request: Request, output: Any, weight_version: int) -> Completion:
    """One completion out of vLLM's ``RequestOutput`` (or its like) with one output and ``logprobs=0``.

    Raises:
        RuntimeError: the engine gave up on the request, or its log-probabilities are not finite (broken weights).
    """
    (answer,) = output.outputs
    token_ids = tuple(int(token) for token in answer.token_ids)
    where = f"prompt {request.prompt.index}, sample {request.sample_index}"
    if answer.finish_reason not in ("stop", "length"):
        raise RuntimeError(f"The engine ended {where} with {answer.finish_reason!r} instead of 'stop' or 'length'.")
    logprobs = tuple(float(row[token].logprob) for token, row in zip(token_ids, answer.logprobs, strict=True))
    if not all(math.isfinite(value) for value in logprobs):
        raise RuntimeError(
            f"The engine's log-probabilities of {where} are not finite: weights of version {weight_version} are broken."
        )
    return Completion(
        request.prompt, request.sample_index, token_ids, logprobs, answer.text, answer.finish_reason, weight_version
    )
