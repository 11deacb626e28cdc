"""The benchmarks run in their quick form, and what they print can be read by a person and by a program."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import pytest

from mega_rl.platform.operators import products
from mega_rl.rewards.sandbox.sandbox import has_namespaces
from tests.launching.launch import ranks, run, run_copy


def tables(output: str) -> list[list[list[str]]]:
    """The markdown tables of a text, each a list of rows of cells, the rule below the header left out."""
    found: list[list[list[str]]] = [[]]
    for line in output.splitlines():
        if not line.startswith("|"):
            found.append([])
        elif not set(line) <= set("|-: "):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
    return [rows for rows in found if rows]


def module(script: str) -> str:
    return script.removesuffix(".py").replace("/", ".")


def figure(cell: str) -> float:
    return float(cell.replace(",", "").removesuffix("x"))


@pytest.mark.slow
@pytest.mark.parametrize("script", ["benchmarks/training/logprob.py", "benchmarks/training/step.py"])
def test_quick_run_prints_a_table_and_writes_json(script: str, tmp_path: Path) -> None:
    path = tmp_path / "figures" / "result.json"
    launched = ranks(script, "--quick", "--json", path, nproc=0).check()
    (rows,) = tables(launched.stdout)
    header, *body = rows
    assert body and all(len(row) == len(header) for row in body)
    if "logprob" in script:
        assert [row[0] for row in body] == ["mega_rl", "plain", "mega_rl / plain"]
        # A small case of ours fits into pages that the process already holds: its memory may be 0, the plain way's not.
        assert all(figure(cell) > 0 for row in body for cell in row[1:3])
        assert 0 <= figure(body[0][3]) < figure(body[1][3])
    else:
        assert [row[0] for row in body] == ["tiny float32"]
        assert all(figure(cell) > 0 for cell in body[0][2:8])
    command = shlex.join(["python", "-m", module(script), "--quick", "--json", str(path)])
    assert f"Command: `{command}`" in launched.stdout
    document = json.loads(path.read_text())
    assert document["command"] == command and "cpu" in document["machine"]
    if "logprob" in script:
        assert set(document["ratios"]) == {"seconds", "cpu_seconds", "peak_bytes"} and len(document["rounds"]) == 1
    else:
        (case,) = document["results"]
        assert case["num_tokens"] == int(figure(body[0][2])) and all(len(s) == 2 for s in case["seconds"].values())


@pytest.mark.slow
def test_matrix_products_are_measured_on_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    launched = ranks("benchmarks/training/products.py", "--quick", "--json", path, nproc=0).check()
    ((_, *body),) = tables(launched.stdout)
    assert len(body) == 36 and all(figure(cell) > 0 for row in body for cell in row[1:])
    document = json.loads(path.read_text())
    assert {row[0] for row in body} <= set(document) and document["onednn"] == products.is_onednn_faster()


@pytest.mark.slow
def test_the_tower_looks_at_a_picture_once(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    ranks("benchmarks/training/vision_step.py", "--quick", "--json", path, nproc=0).check()
    (case,) = json.loads(path.read_text())["results"]
    calls = case["step"]["tower_calls"]
    new, known, theirs = calls["mega_rl, new pictures"], calls["mega_rl, known pictures"], calls["transformers"]
    assert new["old"] > 0 and (new["reference"], new["training"]) == (0, 0)
    assert set(known.values()) == {0} and min(theirs.values()) > 0


@pytest.mark.slow
def test_weight_sync_moves_the_minimum(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    launched = run((sys.executable, "-m", "benchmarks.weights.sync", "--quick", "--json", str(path))).check()
    ((header, *body),) = tables(launched.stdout)
    results = json.loads(path.read_text())["results"]
    assert [row[0] for row in body] == [found["case"] for found in results] and len(body[0]) == len(header)
    for found in results:
        assert found["bytes_sent"] == found["bytes_minimum"] and found["bytes_local"] > 0
    assert results[0]["bytes_sent"] > 0 and results[1]["bytes_sent"] == 0  # the second has the engines' layout


@pytest.mark.slow
def test_adapters_take_the_bytes_that_are_planned(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    ranks("benchmarks/training/lora.py", "--quick", "--json", path, nproc=0).check()
    (case,) = json.loads(path.read_text())["results"]
    ways = case["ways"]
    assert list(ways) == ["full", "lora, rank 16", "freeze, last quarter"] and case["num_parameters"] > 0
    assert all(way["bytes"] == way["planned_bytes"] >= 12 * way["trained"] for way in ways.values())
    assert ways["full"]["ratio"] == 1.0 and ways["lora, rank 16"]["bytes"] < 0.4 * ways["full"]["bytes"]


@pytest.mark.slow
def test_the_optimizers_state_takes_the_bytes_that_are_planned(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    launched = ranks("benchmarks/training/optimizer.py", "--quick", "--json", path, nproc=0).check()
    document = json.loads(path.read_text())
    (case,), losses = document["results"], document["losses"]
    ways = case["ways"]
    assert list(ways)[:2] == ["device, float32", "host, float32"] and len(ways) == 4
    assert all(way["bytes"] == way["planned_bytes"] > 0 for way in ways.values())
    assert ways["host, bfloat16"]["bytes"] < ways["host, float32"]["bytes"] == ways["device, float32"]["bytes"]
    assert list(losses) == ["0.95", "0.999"] and all(len(one) == 3 for way in losses.values() for one in way.values())
    assert [len(rows) for rows in tables(launched.stdout)] == [5, 3]


@pytest.mark.slow
def test_plan_of_a_large_model(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    launched = run_copy(Path("benchmarks/weights/plan.py"), "--quick", "--json", path).check()
    ((header, *body),) = tables(launched.stdout)
    cases = json.loads(path.read_text())["cases"]
    assert [row[0] for row in body] == list(cases) and all(len(row) == len(header) for row in body)
    for found in cases.values():
        assert found["moves"] > found["buckets"] > 1 and found["total_s"] > 0
        assert 1 <= found["balance"] < 1.2  # owners of experts that stay where they are have less to send


@pytest.mark.slow
def test_proofs_of_weights_cost_a_rank_no_more_in_a_larger_world(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    launched = run_copy(Path("benchmarks/weights/proof_at_scale.py"), "--quick", "--json", path).check()
    few, many = json.loads(path.read_text())["worlds"].values()
    assert few["slices"] == many["slices"] > 0
    assert (few["exchanges"], few["exchanged_mb"]) == (many["exchanges"], many["exchanged_mb"])
    assert [len(rows) for rows in tables(launched.stdout)] == [3]


def test_loads_of_a_fleet(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    launched = run_copy(Path("benchmarks/weights/fleet_load.py"), "--quick", "--json", path).check()
    ((header, row),) = tables(launched.stdout)
    (found,) = [one for one in json.loads(path.read_text()).values() if isinstance(one, dict)]
    assert len(row) == len(header) and found["bytes"] < 400 and found["form_bytes"] < 100_000


def test_relay_to_few_nodes(tmp_path: Path) -> None:
    arguments = ("--nodes", "4", "--gigabytes", "4", "--json", tmp_path / "result.json")
    launched = run_copy(Path("benchmarks/weights/relay.py"), *arguments).check()
    ((header, *body),) = tables(launched.stdout)
    assert [row[0] for row in body] == ["nobody", "node 1", "node 3", "node 4"]
    assert all(len(row) == len(header) for row in body)


@pytest.mark.parametrize("script", ["benchmarks/training/logprob.py", "benchmarks/training/step.py"])
def test_help(script: str) -> None:
    launched = run_copy(Path(script), "--help").check()
    assert all(flag in launched.stdout for flag in ("--quick", "--json", "MEGA_RL_PLATFORM"))


def test_too_large_a_case_is_refused() -> None:
    launched = run_copy(Path("benchmarks/training/logprob.py"), "--tokens", 10**9)
    assert launched.returncode == 1 and "error: --tokens 1000000000" in launched.stdout


@pytest.mark.slow
def test_routed_tokens_are_sent_once(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    launched = ranks("benchmarks/overhead/data_plane.py", "--quick", "--json", path, nproc=4).check()
    ways, parts = tables(launched.stdout)
    assert [row[0] for row in ways[1:]] == ["lists", "whole", "routed"]
    assert [row[0] for row in parts[-2:]] == ["all of it", "tokens"]
    figures = json.loads(path.read_text())["ways"]
    # Responses of 100 tokens behind prompts of 200: ids of 300, log-probabilities of 100, a bit for each, a summary.
    assert 4 * 4 < figures["routed"][0] < 4 * 4 + 2 < figures["whole"][0] < figures["lists"][0]
    # Two data-parallel ranks with two ranks each: once to one of them, once from there to the other.
    assert figures["routed"][1] < 2 * figures["routed"][0]
    assert figures["whole"][1] >= 3 * figures["whole"][0], "every rank gets all of it"


def test_bytes_through_rank_0_are_counted(tmp_path: Path) -> None:
    path, script = tmp_path / "result.json", Path("benchmarks/asynchronous/first_rank_bytes.py")
    run_copy(script, "--prompt", 10, "--response", 100, "--responses", 3, "--json", path).check()
    dense, mixture = json.loads(path.read_text())["rows"].values()
    to_learn, from_engine = "one node: to the rank that learns from it", "one node: whole, from its engine"
    told, asked = "several: what rank 0 is told of it", "several: to the node that scores it"
    learnt = dense[to_learn]
    assert learnt == 4 * (110 + 4 + 100) and dense["both, in_flight: its pieces before"] == 8 * 100
    assert mixture[to_learn] - learnt == 109 * 48 * 8, "a byte for each choice"
    assert dense[told] + dense[asked] < 400 < learnt < dense[from_engine]
    assert mixture[told] - dense[told] < 64 < mixture[from_engine] - dense[from_engine], "of the experts a shape only"


def test_overlap_is_measured_in_every_mode(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    launched = run_copy(Path("benchmarks/asynchronous/overlap.py"), "--quick", "--json", path).check()
    equal, slow, reference = tables(launched.stdout)
    modes = ["synchronous, 0", "pinned, 1", "pinned, 2", "pinned, 4", "in_flight, 1", "in_flight, 2"]
    assert [row[0] for row in equal[1:]] == [row[0] for row in slow[1:]] == modes
    results = json.loads(path.read_text())
    assert all(row["step_s"] > 0 for part in ("equal", "slow") for row in results[part])
    parts, groups, parts_ended, groups_ended = [[float(share) for share in row[1:]] for row in reference[1:]]
    for less, more in ((parts, groups), (parts, parts_ended), (groups, groups_ended), (parts_ended, groups_ended)):
        assert all(0 <= a <= b < 1 for a, b in zip(less, more, strict=True)), "what may begin sooner hides more"


def test_overlap_refuses_what_leaves_nothing_to_count() -> None:
    launched = run_copy(Path("benchmarks/asynchronous/overlap.py"), "--steps", 4)
    assert launched.returncode == 2 and "--steps 4: the first 4 are not counted" in launched.stdout


@pytest.mark.slow
def test_every_sink_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    launched = run_copy(Path("benchmarks/overhead/sinks.py"), "--quick", "--json", path).check()
    (rows,) = tables(launched.stdout)
    assert [row[0] for row in rows[1:]] == ["console", "metrics.jsonl", "TensorBoard", "run.log", "all"]
    document = json.loads(path.read_text())
    assert {len(seconds) for seconds in document["seconds"].values()} == {5} and document["share"] > 0


def test_the_sandbox_is_measured_cold_and_warm(tmp_path: Path) -> None:
    level = () if has_namespaces() else ("--limits",)
    if level and os.geteuid() == 0:
        pytest.skip("no program is run here")
    path = tmp_path / "result.json"
    launched = run_copy(Path("benchmarks/sampling/sandbox.py"), "--quick", "--json", path, *level).check()
    (rows,) = tables(launched.stdout)
    assert [row[0] for row in rows[1:]] == ["cold", "warm", "warm / cold"]
    assert all(figure > 0 for row in json.loads(path.read_text())["rows"] for figure in row[1:])


@pytest.mark.slow
def test_episodes_with_bad_tools_all_end_and_leave_nothing() -> None:
    if not has_namespaces() and os.geteuid() == 0:
        pytest.skip("no program is run here")
    launched = run_copy(Path("benchmarks/sampling/episodes.py"), "--quick").check()
    (rows,) = tables(launched.stdout)
    assert [row[:3] for row in rows[1:]] == [[kind, "4", "4"] for kind in ("hang", "die", "flood", "raise", "binary")]
    assert "0 processes left" in launched.stdout


@pytest.mark.slow
def test_the_control_of_a_fleet_does_not_grow_with_its_engines(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    arguments = ("--engines", "16", "48", "--whole", "8", "--json", path)
    launched = run_copy(Path("benchmarks/asynchronous/fleet_control.py"), *arguments).check()
    control, whole = tables(launched.stdout)
    assert control[0] == ["cost", "16 engines", "48 engines"]
    few, many = json.loads(path.read_text())["control"]
    counts = [name for name in few if name.endswith(("functions", "looked_at"))]
    assert len(counts) == 7 and {name: few[name] for name in counts} == {name: many[name] for name in counts}
    assert ["responses lost", "0"] in whole and ["responses doubled", "0"] in whole
