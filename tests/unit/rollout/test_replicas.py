"""Splitting requests over engines."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mega_rl.errors import InputError
from mega_rl.parallel.layout import EngineLayout
from mega_rl.rollout.engine import Request
from mega_rl.rollout.replicas import generate_everywhere, split_requests
from mega_rl.rollout.requests import make_requests
from mega_rl.types import Prompt, Trajectory


def requests_for(num_prompts: int, n: int) -> list[Request]:
    prompts = [Prompt(10 + i, (1,), "", "", "test") for i in range(num_prompts)]
    return make_requests(prompts, n=n, step=0, seed=0, max_tokens=4, temperature=1.0)


@given(st.integers(0, 12), st.integers(1, 4), st.integers(1, 6))
def test_parts_are_contiguous_whole_prompts_and_balanced(num_prompts: int, n: int, num_replicas: int) -> None:
    requests = requests_for(num_prompts, n)
    parts = split_requests(requests, num_replicas)
    assert len(parts) == num_replicas
    assert [request for part in parts for request in part] == requests
    sizes = [len({request.prompt.index for request in part}) for part in parts]
    assert sum(sizes) == num_prompts and max(sizes) - min(sizes) <= 1


class Echo:
    """Answers a request with the end of its seed; refuses more than ``limit`` requests."""

    weight_version = 0

    def __init__(self, limit: int = 100) -> None:
        self.limit = limit

    def check(self, requests: Sequence[Request]) -> None:
        if len(requests) > self.limit:
            raise InputError("too many")

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        return [
            Trajectory.single_turn(r.prompt, r.sample_index, [r.seed % 1000], [0.0], "", "stop", 0) for r in requests
        ]


def test_one_process_needs_no_group() -> None:
    requests = requests_for(3, 2)
    trajectories = generate_everywhere(Echo(), EngineLayout(1, 1), requests)  # type: ignore[arg-type]
    assert [t.sampled_ids.tolist() for t in trajectories] == [[r.seed % 1000] for r in requests]


def test_the_engines_own_error_arrives() -> None:
    with pytest.raises(InputError, match="too many"):
        generate_everywhere(Echo(limit=1), EngineLayout(1, 1), requests_for(1, 2))  # type: ignore[arg-type]
