"""Engines on several nodes of a Ray cluster, of which some go and some come while a run goes on."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from tests.launching.launch import run
from tests.launching.training import FLEET_SETTINGS, PINNED_TWO, TinyWorld, sampled, whoever_answers

pytest.importorskip("ray", reason="engines in other processes need Ray: install mega_rl[separate]")
pytestmark = pytest.mark.slow

SCRIPT = "tests/distributed/rollout/remote/fleet/run_ray_nodes.py"
LOOPBACK_ONLY = {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}


def test_nodes_that_go_and_come_change_nothing(
    tiny_world: TinyWorld, pictures: tuple[str, str], calm_fleet: Path, tmp_path: Path
) -> None:
    """A trainer's node, two with an engine each, and two that come later. The first node that goes does so without a
    word, with the lease actor of the engines, and nowhere is room; the second one goes amid a validation.
    """
    output, log = tmp_path / "run", tmp_path / "told.jsonl"
    arguments = ("--config", str(tiny_world.rl), *FLEET_SETTINGS, *PINNED_TWO, *pictures)
    with TemporaryDirectory(prefix="ray") as scratch:  # Ray's sockets lie there: a long path is refused
        env = {**LOOPBACK_ONLY, "RAY_TMPDIR": scratch, "RAY_worker_niceness": "0"}
        launched = run((sys.executable, SCRIPT, str(log), str(output), *arguments), env=env).check()
    (told,) = re.findall("^TOLD (.*)$", launched.stdout, re.MULTILINE)
    nodes, lines = (json.loads(told)[name] for name in ("nodes", "lines"))
    engines_are_where_there_is_room(nodes, lines)
    the_run_goes_on_without_a_node(lines)
    weights_reach_each_node_once(nodes, lines)
    (added,) = re.findall("^ADDED (.*)$", launched.stdout, re.MULTILINE)
    assert [engine["engine"] for engine in json.loads(added)["engines"]] == [0, 1, 2]
    assert whoever_answers(output) == whoever_answers(calm_fleet) and sampled(output) == sampled(calm_fleet)


def engines_are_where_there_is_room(nodes: dict[str, str], lines: list[dict[str, Any]]) -> None:
    names = {node: name for name, node in nodes.items()}
    placed = [(line["engine"], names[line["node"]]) for line in lines if line["what"] == "Placed"]
    assert sorted(placed[:2]) == [(0, "first"), (1, "second")]
    assert placed[2:] == [(1, "third"), (2, "third"), (0, "fourth")]


def the_run_goes_on_without_a_node(lines: list[dict[str, Any]]) -> None:
    """From the loss of the first node until another one came."""
    words = [line["what"] for line in lines]
    begin, end = words.index("strike"), words.index("no room")
    between = lines[begin:end]
    assert {line["engine"] for line in between if line["what"] == "Kill"} == {1}
    assert {line["engine"] for line in between if line["what"] == "Answered"} == {0}
    assert {"what": "Deliver", "step": 2}.items() <= next(x for x in between if x["what"] == "Deliver").items()


def weights_reach_each_node_once(nodes: dict[str, str], lines: list[dict[str, Any]]) -> None:
    """Every node has one process with a store, which is not the trainer's."""
    taken = [line for line in lines if line["what"] == "Taken"]
    stores = {node: {line["store"] for line in taken if line["node"] == node} for node in nodes.values()}
    assert [len(found) for found in stores.values()] == [1, 1, 1, 1]
    assert len(set.union(*stores.values(), {taken[0]["pid"]})) == 5
