"""What is asked of engines after a push: adapters that changed must change their answers; and what bfloat16 rounds away
is told once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch.distributed as dist

from mega_rl.config import RunConfig
from mega_rl.errors import GateFailure
from mega_rl.parallel.layout import EngineLayout
from mega_rl.rollout.engine_checks import PATIENCE
from mega_rl.stages.weights.engine_probe import EngineProbe, Rounding, check_plan
from mega_rl.stages.weights.weight_sync import Pushed


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Engines:
    """Two; each answers with its own number."""

    def __init__(self) -> None:
        self.values = self.without = [-1.0, -2.0]
        self.num_asked = 0

    def first_logprobs(
        self, prompt_ids: Sequence[int], temperature: float, with_adapter: bool = True
    ) -> list[dict[int, float]]:
        self.num_asked += 1
        values = self.values if with_adapter else self.without
        return [{prompt_ids[0]: value / temperature, 0: 0.0} for value in values]


def pushed(version: int, largest_b: float, sigma: float = 0.0, unchanged: float | None = None) -> Pushed:
    """Of merged adapters; ``unchanged`` None: few elements are."""
    shares = {"adapter/unchanged_fraction": unchanged or 0.0} if largest_b else {}
    return Pushed(version, sigma, {"adapter/largest_b": largest_b} | shares)


class Watch:
    """What a run does after every push."""

    def __init__(self, dtype: str, engines: Engines, said: list[str]) -> None:
        config = RunConfig()
        config.model.dtype = dtype  # type: ignore[assignment]
        self._probe = EngineProbe(engines, EngineLayout(1, 1), check_plan(config, 50, said.append))
        self._rounding = Rounding(config, said.append)

    def check(self, pushed: Pushed) -> None:
        self._rounding.tell(pushed)
        self._probe.check(pushed)


def delivery(dtype: str = "float32") -> tuple[Watch, Engines, list[str]]:
    engines, said = Engines(), list[str]()
    return Watch(dtype, engines, said), engines, said


def test_an_adapter_that_never_arrives_stops_the_run() -> None:
    """In one engine of two, which is named."""
    watch, engines, _ = delivery()
    watch.check(pushed(0, 0.0))
    watch.check(pushed(1, 0.0))  # a skipped step changes nothing
    engines.values[0] = -1.5
    with pytest.raises(GateFailure, match="rollout engine 1 answers with weight version 2") as failed:
        watch.check(pushed(2, 1e-3))
    assert "\n" not in str(failed.value) and "bridge.verify=all" in str(failed.value)


def test_adapters_beside_the_weights_must_change_the_answers_of_every_engine() -> None:
    """In slots, from the first push of a resumed run on; the second engine leaves its adapter out."""
    watch, engines, _ = delivery()
    engines.without = [-1.5, -2.0]
    with pytest.raises(GateFailure, match="rollout engine 1 answers with weight version 7 .* as without its adapter"):
        watch.check(Pushed(7, 0.0, {"adapter/largest_b": 1e-3}))


def test_engines_that_have_moved_are_asked_no_more() -> None:
    watch, engines, said = delivery()
    watch.check(pushed(0, 0.0))
    engines.values = [-1.1, -2.1]
    watch.check(pushed(1, 1e-3, unchanged=0.99))
    num_asked = engines.num_asked
    watch.check(pushed(2, 2e-3))
    assert engines.num_asked == num_asked and not said  # float32 keeps what it is said to have kept


def test_noise_says_nothing_of_adapters() -> None:
    watch, engines, _ = delivery()
    watch.check(pushed(0, 0.0, sigma=0.1))
    watch.check(pushed(1, 1e-3, sigma=0.1))
    assert engines.num_asked == 2, "for their temperature alone, once"


def test_bfloat16_may_hide_a_few_updates_and_is_told_of_once() -> None:
    watch, _, said = delivery("bfloat16")
    watch.check(pushed(0, 0.0))
    watch.check(pushed(1, 1e-5, unchanged=1.0))  # nothing changed: nothing can have moved
    for version in range(2, PATIENCE["bfloat16"] + 1):
        watch.check(pushed(version, version * 1e-5, unchanged=0.98))
    assert len(said) == 1 and "100.0%" in said[0]
    with pytest.raises(GateFailure):
        watch.check(pushed(99, 1.0, unchanged=0.9))


def test_runs_without_adapters_are_left_alone() -> None:
    watch, engines, _ = delivery()
    watch.check(Pushed(0, 0.0, {}))
    watch.check(Pushed(1, 0.0, {}))
    assert engines.num_asked == 2, "for their temperature alone, once"
