"""The probe of an engine's log-probabilities: what it measures, and what a run says to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mega_rl.errors import InputError
from mega_rl.parallel.layout import EngineLayout
from mega_rl.rollout.collect.replay import ReplayEngine
from mega_rl.rollout.engine_checks import CheckPlan
from mega_rl.rollout.remote.engines import RemoteEngines
from mega_rl.rollout.temperature_probe import (
    NUM_LOGPROBS,
    Probed,
    is_sampled_from,
    measured_temperature,
    probe_prompt,
)
from mega_rl.stages.weights.engine_probe import EngineProbe
from mega_rl.stages.weights.weight_sync import Pushed
from tests.pretended.tokens import measured_temperatures

LOGITS = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 3


def top(logits: torch.Tensor) -> dict[int, float]:
    values, tokens = torch.log_softmax(logits, -1).topk(NUM_LOGPROBS)
    return dict(zip(tokens.tolist(), values.tolist(), strict=True))


class Engines:
    """Two engines; ``second`` says what the second one makes of its logits."""

    def __init__(self, second: Callable[[torch.Tensor, float], torch.Tensor], logits: torch.Tensor = LOGITS) -> None:
        self.second, self.logits = second, logits

    def first_logprobs(
        self, prompt_ids: Sequence[int], temperature: float, with_adapter: bool = True
    ) -> list[dict[int, float]]:
        assert len(prompt_ids) == 4 and all(0 <= token < 50 for token in prompt_ids)
        return [top(self.logits / temperature), top(self.second(self.logits, temperature))]


def processed(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits / temperature


def raw(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits


def divided_twice(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    return logits / temperature**2


@pytest.mark.parametrize(
    ("second", "measured"),
    [(processed, 2.0), (raw, 1.0), (divided_twice, 4.0)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_the_temperature_of_log_probabilities_is_measured(second: Callable[..., torch.Tensor], measured: float) -> None:
    found = measured_temperatures(Engines(second), probe_prompt(50))
    assert found == [pytest.approx(2.0, rel=1e-4), pytest.approx(measured, rel=1e-4)]
    assert [is_sampled_from(value) for value in found] == [True, measured == 2.0]


def test_what_cannot_be_measured() -> None:
    flat = {token: -1.0 + 1e-5 * token for token in range(20)}
    assert measured_temperature(flat, flat) is None and is_sampled_from(None)
    for broken in ({}, {**top(LOGITS), 3: math.nan}, {3: -math.inf}):
        assert not is_sampled_from(measured_temperature({3: -1.0, **top(LOGITS)}, broken))
    assert not is_sampled_from(measured_temperature(top(LOGITS), dict.fromkeys(top(LOGITS), -1.0)))


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def probe_engines(engines: Probed, temperature: float, lines: list[str]) -> None:
    plan = CheckPlan(50, temperature, "float32", lines.append)
    EngineProbe(engines, EngineLayout(world_size=1, tensor_parallel_size=1), plan).check(Pushed(0, 0.0))


def test_raw_log_probabilities_are_refused_by_engine_and_key(one_rank: None) -> None:
    lines: list[str] = []
    with pytest.raises(InputError, match=r"rollout engine 1 returns .* they show 1\), so rollout\.temperature=0\.7 "):
        probe_engines(Engines(raw), 0.7, lines)
    probe_engines(Engines(processed), 0.7, lines)
    assert lines == []


def test_a_probe_that_nobody_answers_has_shown_nothing(one_rank: None) -> None:
    nobody: Any = SimpleNamespace(first_logprobs=lambda *question: [])
    with pytest.raises(AssertionError, match="no rollout engine has answered"):
        probe_engines(nobody, 0.7, [])
    with pytest.raises(AssertionError, match="no engine that could be asked"):
        probe_engines(ReplayEngine.__new__(ReplayEngine), 0.7, [])


def test_every_engine_elsewhere_answers_once(one_rank: None) -> None:
    def call(method: str, arguments: Sequence[tuple[Any, ...]], doing: str) -> list[Any]:
        assert method == "first_logprobs" and arguments == [((5, 6), 2.0, True)] * 4
        return [[{worker: -1.0}] for worker in range(4)]

    engines = RemoteEngines.__new__(RemoteEngines)
    engines.engine_size, engines.num_workers = 2, 4
    engines._fleet = SimpleNamespace(call=call)  # type: ignore[assignment]
    assert engines.first_logprobs((5, 6), 2.0) == [{0: -1.0}, {2: -1.0}]


def test_what_changes_nothing_is_only_told(one_rank: None) -> None:
    lines: list[str] = []
    probe_engines(Engines(raw), 1.0, lines)
    probe_engines(Engines(processed, torch.zeros(50)), 0.7, lines)
    raw_line, flat_line = lines
    assert raw_line.startswith("warning: rollout engine 1 ") and "cannot be probed" in flat_line
