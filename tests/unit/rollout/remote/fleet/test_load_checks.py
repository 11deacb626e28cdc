"""The engines of a fleet are compared with a load of their own, one of each kind, before any of that kind serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.errors import InputError
from mega_rl.fleet import events
from mega_rl.rollout.remote.engine_process import EngineProcess, EngineSpec
from mega_rl.rollout.remote.fleet import kept_engine, places
from mega_rl.rollout.remote.fleet.kept_engine import KeptEngine
from mega_rl.rollout.remote.load_checks import LoadChecks
from mega_rl.rollout.vllm.start.options import without_weights
from tests.distributed.bridge.test_bridge_execute import SHAPE
from tests.pretended.remote.fake_ray import Worker
from tests.unit.rollout.remote.fleet.test_ray_executor import Run

GATE = "model.layers.2.mlp.gate_proj.weight"
SPEC = EngineSpec("", RolloutConfig(mode="pinned"), 64, "float32", "cpu", is_deterministic=False, num_threads=1)


def swap_gate_and_up(live: dict[str, torch.Tensor]) -> None:
    """As a kernel that wants the halves the other way round: names and shapes stay."""
    fused = live["model.layers.2.mlp.gate_up_proj.weight"]
    fused.copy_(fused.roll(len(fused) // 2, 0))


def spawned(monkeypatch: pytest.MonkeyPatch, run: Run, change: Callable[[int, list[Worker]], None]) -> None:
    """``change(number of the engine's start, its workers)`` of every engine that is started."""
    spawn, starts = run.ray.spawn, iter(range(100))

    def changed(*arguments: Any) -> list[Worker]:
        workers = spawn(*arguments)
        change(next(starts), workers)
        return workers

    monkeypatch.setattr(places, "spawn", changed)


def swapping(is_it: Callable[[int], bool], card: str = "card A") -> Callable[[int, list[Worker]], None]:
    def change(start: int, workers: list[Worker]) -> None:
        if is_it(start):
            for worker in workers:
                worker.card, worker.rearrange = card, swap_gate_and_up

    return change


def refusal(run: Run) -> str:
    with pytest.raises(InputError) as found:
        run.go()
    return str(found.value)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("trained", [0, 1])
def test_an_engine_that_swaps_gate_and_up_ends_the_run_by_name(
    monkeypatch: pytest.MonkeyPatch, trained: int, size: int
) -> None:
    """Fresh, and after a resume."""
    run = Run(monkeypatch, size, shape=SHAPE, trained=trained)
    spawned(monkeypatch, run, swapping(lambda start: True))
    said = refusal(run)
    assert said.startswith(f"rollout.mode=pinned cannot write {GATE}, of which engine 0 holds other values than model.")
    assert "(engines of kind card A): set rollout.vllm.kernel_config to a kernel" in said
    assert not any(isinstance(decision, events.Load | events.Issue) for decision in run.told), "none of them served"
    assert not any(worker.is_accepted for worker in run.ray.workers) and not run.ray.said


@pytest.mark.parametrize("trained", [0, 1])
def test_honest_engines_serve_and_only_the_first_of_them_loads(monkeypatch: pytest.MonkeyPatch, trained: int) -> None:
    run = Run(monkeypatch, size=2, shape=SHAPE, trained=trained)
    assert not run.go().is_failure and len(run.batches) == 3 - trained
    assert run.readers() == run.ray.workers[:2] and len(run.ray.workers) == 4
    assert run.ray.said == ["engine 0 of kind card A holds model.path as the trainer does"]


def test_an_engine_that_joins_on_another_kind_of_card_shows_its_own_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's second life is on a card whose kernel swaps halves; the first lives' card does not."""
    run = Run(monkeypatch, shape=SHAPE)
    spawned(monkeypatch, run, swapping(lambda start: start == 2, card="card B"))
    struck: list[int] = []

    def on_issue(decision: events.Issue, workers: list[Worker]) -> None:
        if decision.key.step == 1 and not struck:
            struck.append(decision.engine)
            workers[0].state = "gone"

    run.on_issue = on_issue
    said = refusal(run)
    assert f"cannot write {GATE}, of which engine {struck[0]} holds" in said and "(engines of kind card B)" in said
    issues = [d for d in run.told if isinstance(d, events.Issue | events.Load)]
    assert issues and not any((d.engine, d.life) == (struck[0], 1) for d in issues), "no token of it is learnt"


def test_every_kind_is_shown_once_and_a_life_that_starts_again_loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, shape=SHAPE)

    def change(start: int, workers: list[Worker]) -> None:
        workers[0].card = "card B" if start == 1 else "card A"

    spawned(monkeypatch, run, change)
    struck: list[int] = []

    def on_issue(decision: events.Issue, workers: list[Worker]) -> None:
        if decision.engine == 0 and not struck:
            struck.append(0)
            workers[0].state = "gone"

    run.on_issue = on_issue
    assert not run.go().is_failure and len(run.ray.workers) == 3
    assert [worker.card for worker in run.readers()] == ["card A", "card B"]
    assert sorted(run.ray.said) == [
        f"engine {i} of kind card {c} holds model.path as the trainer does" for i, c in ((0, "A"), (1, "B"))
    ]


def test_if_the_engine_that_loads_dies_one_that_waits_loads_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, shape=SHAPE)

    def change(start: int, workers: list[Worker]) -> None:
        if start == 0:
            workers[0].failures["inspect"] = RuntimeError("out of memory")

    spawned(monkeypatch, run, change)
    assert not run.go().is_failure and run.whys()[0] == "it failed while showing what it has loaded: out of memory"
    assert len(run.ray.said) == 1 and "engine 1 of kind card A" in run.ray.said[0]
    assert [worker.process for worker in run.readers()] in ([0, 2], [0, 3]), "the waiting engine began anew"
    assert len([d for d in run.told if isinstance(d, events.Start) and d.engine == 1]) == 1, "which is no restart of it"


def test_an_engine_whose_shapes_are_others_ends_the_run_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    run, name = Run(monkeypatch, shape=SHAPE), "model.layers.0.mlp.down_proj.weight"

    def transpose(live: dict[str, torch.Tensor]) -> None:
        live[name] = live[name].t().contiguous()

    def change(start: int, workers: list[Worker]) -> None:
        workers[0].rearrange = transpose

    spawned(monkeypatch, run, change)
    assert f"rollout.mode=pinned cannot write {name}: the engine holds it as" in refusal(run)


def test_weights_that_are_made_up_cannot_be_compared() -> None:
    spec = replace(SPEC, rollout=without_weights(SPEC.rollout))
    with pytest.raises(
        InputError, match="load_format is 'dummy', but one engine of each kind loads model.path.*remove"
    ):
        LoadChecks(spec, None, print)  # type: ignore[arg-type]


def test_a_kept_engine_is_of_use_to_the_next_trainer_once_it_is_accepted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whether it has loaded weights by itself does not matter to the next one."""
    monkeypatch.setattr(EngineProcess, "start", lambda *_: None)
    monkeypatch.setattr(EngineProcess, "whereabouts", lambda _: ("here", 1, 2))
    spec = replace(SPEC, model_path=str(tmp_path))
    wanted = kept_engine.digest(replace(spec, rollout=without_weights(spec.rollout)))
    engine = KeptEngine("mine")
    engine.call("mine", "start", spec, 0, None)
    assert engine.hold("mine").digest == ""
    engine.call("mine", "accept")
    assert engine.hold("next").digest == wanted


def test_the_kind_of_an_engine_is_what_decides_about_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineProcess, "device", lambda *_: (None, 0))
    for name in ("VLLM_USE_FLASHINFER_MOE_FP16", "VLLM_PORT"):
        monkeypatch.delenv(name, raising=False)
    before = EngineProcess().kind(SPEC)
    assert f"torch {torch.__version__}".split("+")[0] in before and torch.backends.cpu.get_cpu_capability() in before
    monkeypatch.setenv("VLLM_PORT", "1234")
    assert EngineProcess().kind(SPEC) == before
    monkeypatch.setenv("VLLM_USE_FLASHINFER_MOE_FP16", "1")
    assert EngineProcess().kind(SPEC) == f"{before}, VLLM_USE_FLASHINFER_MOE_FP16=1"


def test_an_engine_that_starts_after_the_one_that_loads_has_died_loads_itself() -> None:
    """However late it is: no engine waits for one that is out of use."""
    proof: Any = None
    checks = LoadChecks(SPEC, proof, print)
    first, second = events.Start(0, 0), events.Start(1, 0)
    assert checks.spec_of(first, "card A") is SPEC and checks.spec_of(second, "card A") is checks.spec
    checks.left(first)
    assert checks.abandoned() == [] and checks.started(second) == []
    assert checks.abandoned() == [second]
    checks.left(second)
    assert checks.abandoned() == [] and checks.spec_of(second, "card A") is SPEC
