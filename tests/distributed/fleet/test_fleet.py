"""Runs of the real loop whose engines are pretended: whatever those do, a pinned run learns the same.

``tests/pretended/fleet_engines.py`` makes tokens of the weights that sample them, so every difference goes on into all
metrics.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from mega_rl.observe.timeline import read_trace
from tests.launching.counted_collectives import MOST_OBJECTS, Asked, read, total
from tests.launching.launch import Launched, alive, free_port, ranks, run, started
from tests.launching.training import (
    FLEET_SETTINGS,
    PINNED_TWO,
    STRUCK_FLEET,
    VALIDATION_GATE,
    TinyWorld,
    learnt,
    metrics_of,
    sampled,
    steps_saved,
    whoever_answers,
)
from tests.pretended.struck_fleet import LOG, Told, go

pytestmark = pytest.mark.slow
SCRIPT = "tests/distributed/fleet/run_fleet.py"
STEPS = 4
PICKLED_INTEGERS = 64  # bytes by which a handful of other numbers may make an object longer
REWARD = """
def digits(data_source, solution_str, ground_truth, extra_info):
    return sum(map(int, solution_str)) % 4 / 3
"""


def train(
    world: TinyWorld,
    output_dir: Path,
    *settings: str,
    engines: int = 1,
    seed: int = 0,
    deaths: int = 0,
    crash: int = 0,
    nproc: int = 1,
    change: bool = False,
    nodes: bool = False,
    counted: Path | None = None,
) -> Launched:
    reward = output_dir.parent / "reward.py"
    reward.write_text(REWARD, encoding="utf-8")
    rewards = f"rewards=[{{name: '{reward}:digits'}}]"  # of every token, and so of the weights
    changes = ["--change"] * change + ["--nodes"] * nodes
    arguments = (
        *changes,
        *(() if counted is None else ("--counted", counted)),
        "--config",
        world.rl,
        f"trainer.output_dir={output_dir}",
        rewards,
        *FLEET_SETTINGS,
        *settings,
    )
    return ranks(SCRIPT, engines, seed, deaths, crash, *arguments, nproc=nproc)


def validated(run: Path) -> dict[int, dict[str, float]]:
    """The metrics of validations, by step."""
    rows = {step: {k: v for k, v in row.items() if k.startswith("val-")} for step, row in learnt(run).items()}
    return {step: row for step, row in rows.items() if row}


def without_validation(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if not name.startswith(("val-", VALIDATION_GATE))}


def died(launched: Launched) -> int:
    (found,) = re.findall(r"(\d+) died, closed: True", launched.check().stdout)
    return int(found)


def test_pinned_runs_do_not_depend_on_engines(tiny_world: TinyWorld, tmp_path: Path) -> None:
    pinned = ("rollout.mode=pinned", "rollout.max_staleness=1")
    one, four = tmp_path / "one", tmp_path / "four"
    assert died(train(tiny_world, one, *pinned)) == 0
    changed = train(tiny_world, four, *pinned, engines=4, seed=7, deaths=30, change=True)
    assert died(changed) > 3
    engines_come_and_go(changed, four)
    assert list(learnt(one)) == [0, 1, 2, 3, 4] and learnt(four) == learnt(one)
    found = validated(one)
    assert list(found) == [0, 2, 4] and found[0] != found[2] != found[4], "of other weights"
    assert sampled(four) == sampled(one) and any(row["outcome"] == "dropped" for row in sampled(one))
    of_steps = list(learnt(one).values())[1:]
    assert [row["rollout/staleness_max"] for row in of_steps] == [0, 1, 1, 1]
    assert [row["rollout/staleness_mean"] for row in of_steps] == [0, 1, 1, 1]
    assert steps_saved(one) == steps_saved(four) == [1, 2, 3, 4]


def engines_come_and_go(launched: Launched, run: Path) -> None:
    """Two joined and two left after the first step; nothing of it is in what was learnt."""
    added, removed, refused = re.findall(r"^change: (?:add|remove) (\d) (.*?) ?'(.*)'$", launched.stdout, re.MULTILINE)
    assert added[:2] == removed[:2] == ("0", "")
    of_add, of_remove = (json.loads(found[2].replace("\\n", "\n"))["engines"] for found in (added, removed))
    assert [engine["engine"] for engine in of_add] == [0, 1, 2, 3, 4, 5]
    assert [engine["engine"] for engine in of_remove if engine["condition"] == "out of use"] == [0, 1]
    assert refused[0] == "2" and refused[1].startswith("error: there was no room for 9 more engines within 0 s: there")
    assert "rollout engines that joined, as was asked for: 4, 5; 6 are in use" in (run / "run.log").read_text()
    rows = metrics_of(run)
    assert [rows[step]["fleet/engines"] for step in (2, 3, 4)] == [4.0] * 3
    assert (rows[4]["fleet/joined"], rows[4]["fleet/left"]) == (2.0, 2.0)
    activities = read_trace(run / "fleet" / "timeline.json")
    assert [a.name for a in activities if a.name.endswith(("joined", "left"))] == [
        *("engine 4 joined", "engine 5 joined"),
        *("engine 0 left", "engine 1 left"),
    ]
    phases = {(a.name, a.details.get("step")) for a in activities if a.lane == "trainer"}
    assert {("update", 0), ("waiting", 1), ("update", 3), ("save", 3)} <= phases, phases


@pytest.mark.parametrize("nodes", [False, True], ids=["one node", "two nodes"])
def test_a_killed_run_goes_on_exactly(nodes: bool, tiny_world: TinyWorld, tmp_path: Path) -> None:
    """With two steps in the air, on two data-parallel ranks, with other engines before and after.

    On two nodes engines hand responses to both ranks, which a checkpoint and the records have from there.
    """
    pinned = ("rollout.mode=pinned", "rollout.max_staleness=2", "checkpoint.async_save=true")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(tiny_world, whole, *pinned, nproc=2).check()
    assert train(tiny_world, cut, *pinned, engines=2, seed=3, deaths=30, crash=2, nproc=2, nodes=nodes).returncode != 0
    saved = steps_saved(cut)
    assert saved and max(saved) < 3
    again = train(tiny_world, cut, *pinned, engines=4, seed=4, deaths=30, nproc=2, nodes=nodes).check()
    (handed,) = re.findall(r"^handed: \[(.*)\]$", again.stdout, re.MULTILINE)
    assert re.fullmatch(r"\(0, \d+\), \(1, \d+\)" if nodes else "", handed), handed
    assert f"resuming after step {max(saved)}" in again.stdout
    assert learnt(cut) == learnt(whole) and sampled(cut) == sampled(whole)
    assert [row["rollout/staleness_max"] for row in list(learnt(whole).values())[1:]] == [0, 1, 2, 2]
    assert list(validated(whole)) == [0, 2, 4]  # the run was killed amid the step after the second of them
    progress = json.loads((cut / "checkpoints" / "step_00000002" / "progress.json").read_text())
    state = progress["data"]["fleet"]
    assert state["trained"] == 2 and sorted(state["steps"]) == ["2", "3"]  # sampled by weights that it has not


@pytest.mark.parametrize("mode", ["pinned", "synchronous"])
def test_a_step_asks_for_few_objects_and_no_larger_ones_of_more_ranks(
    mode: str, tiny_world: TinyWorld, tmp_path: Path
) -> None:
    found: list[dict[int, dict[str, Asked]]] = []
    for nproc in (2, 4):
        log = tmp_path / f"asked_{nproc}.jsonl"
        settings = (f"rollout.mode={mode}", "rollout.max_staleness=1")[: 1 + (mode == "pinned")]
        train(tiny_world, tmp_path / f"of_{nproc}", *settings, nproc=nproc, counted=log).check()
        found.append(read(log))
    for asked in found:
        assert all(0 < total(asked[step]) <= MOST_OBJECTS for step in range(1, STEPS + 1)), asked
    few, many = (asked[1] for asked in found)  # the weights, and so the samples, are still the same
    grown = {caller: (few[caller].num_bytes, many[caller].num_bytes) for caller in few}
    assert few.keys() == many.keys() and all(b <= a + PICKLED_INTEGERS for a, b in grown.values()), grown


def test_without_staleness_it_is_the_synchronous_run(tiny_world: TinyWorld, tmp_path: Path) -> None:
    plain = "algorithm.dynamic_sampling.enabled=false"  # replacements come of another order
    train(tiny_world, tmp_path / "synchronous", plain, "rollout.mode=synchronous").check()
    train(tiny_world, tmp_path / "pinned", plain, "rollout.mode=pinned", engines=3, seed=1, deaths=30).check()
    synchronous, pinned = learnt(tmp_path / "synchronous"), learnt(tmp_path / "pinned")
    carried = {"rollout/groups_carried_in", "rollout/groups_carried_out"}
    assert list(validated(tmp_path / "pinned")) == [0, 2, 4]
    assert pinned == {step: {k: v for k, v in row.items() if k not in carried} for step, row in synchronous.items()}


def test_a_run_in_flight_keeps_the_bound_and_is_replayed(tiny_world: TinyWorld, tmp_path: Path) -> None:
    # from the first validation on nothing holds responses back until there are two versions to mix
    mode = ("rollout.mode=in_flight", "rollout.max_staleness=2", "validation.val_before_train=false")
    first, cut = tmp_path / "first", tmp_path / "cut"
    assert died(train(tiny_world, first, *mode, engines=2, seed=5, deaths=30)) > 3
    rows = sampled(first)
    assert any(len(row["spans"]) > 1 for row in rows if "spans" in row)
    for row in rows:
        versions = [span["version"] for span in row["spans"]] if "spans" in row else [row["weight_version"]]
        assert row["sampled_for"] == row["step"] and row["step"] - 3 <= min(versions) <= max(versions) < row["step"]
    assert list(validated(first)) == [2, 4]
    metrics = {step: without_validation(row) for step, row in learnt(first).items()}
    shares = [sum(v for k, v in row.items() if "/tokens_of_staleness/" in k) for row in metrics.values()]
    assert shares == pytest.approx([1.0] * STEPS)
    assert all(0 < row["rollout/ess"] <= 1 for row in metrics.values())
    replayed = train(tiny_world, tmp_path / "again", *mode, f"rollout.replay={first / 'rollouts'}", engines=3)
    replayed.check()
    assert learnt(tmp_path / "again") == metrics  # without an engine to validate with
    # its partial responses are gone on with
    assert train(tiny_world, cut, *mode, engines=2, seed=6, crash=2).returncode != 0
    train(tiny_world, cut, *mode, engines=1, seed=7).check()
    assert list(learnt(cut)) == [1, 2, 3, 4]


def test_real_processes_that_are_killed_and_stopped_change_nothing(
    tiny_world: TinyWorld,
    pictures: tuple[str, str],
    calm_fleet: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines of Ray without vLLM, whose tokens depend on all bytes that they took from the store: one is killed, one
    is stopped, reward workers are killed, and then Ray itself is, which ends the run; the next one goes on.

    Prompts have pictures, which every engine must be given with them, also what its checkpoint holds no samples of.
    """
    limits = ("rollout.engine_timeout_s=8", "rollout.engine_restarts=1000")

    output = f"trainer.output_dir={tmp_path / 'struck'}"
    arguments = ("--config", str(tiny_world.rl), output, *FLEET_SETTINGS, *PINNED_TWO, *pictures, *limits)
    log = tmp_path / "struck.jsonl"
    monkeypatch.setenv(LOG, str(log))
    told = Told(log)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    command = (sys.executable, STRUCK_FLEET, "pretended,1,2", *arguments)
    with started(command, env={**alone, "MASTER_PORT": str(free_port())}) as running:
        told.wait_for(lambda: told.has("Held", step=1) and all(e["processes"] for e in told.alive.values()), running)
        trainer, (one,), (other,) = told.lines[-1]["pid"], *(told.alive[e]["processes"] for e in (0, 1))
        os.kill(one, signal.SIGKILL)
        os.kill(other, signal.SIGSTOP)
        children = psutil.Process(trainer).children()
        (raylet,) = (child for child in children if child.name() == "raylet")
        workers = [child for child in children if "mega_rl.rewards" in " ".join(child.cmdline())]
        for worker in workers:
            worker.kill()
        go(log, 1)
        told.wait_for(lambda: told.has("Held", step=2) and {0, 1} <= told.ended(), running)
        engines = [process for engine in told.alive.values() for process in engine["processes"]]
        raylet.kill()
        told.wait_for(lambda: not any(map(alive, engines)), running)  # as Ray has it; nobody samples the last step
        go(log, 2)
        assert running.wait(300) != 0 and workers
    command = (sys.executable, STRUCK_FLEET, "pretended", *arguments)
    run(command, env={**alone, "MASTER_PORT": str(free_port())}).check()
    assert whoever_answers(tmp_path / "struck") == whoever_answers(calm_fleet)
    rows = sampled(tmp_path / "struck")
    assert rows == sampled(calm_fleet)
    assert {len(row["prompt"].get("images", ())) for row in rows} == {0, 1, 2}  # type: ignore[attr-defined]
    assert [row["rollout/staleness_max"] for row in list(learnt(tmp_path / "struck").values())[1:]] == [0, 1, 1, 1]
