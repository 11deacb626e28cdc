"""Real vLLM engines, started once per launch and shared by the checks of ``rollout_checks.py``."""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from tests.launching.launch import ENGINE, REPO, once, ranks

SCRIPT = REPO / "tests" / "distributed" / "rollout" / "rollout_checks.py"
PER_FAMILY = ("layout", "equals_hf", "live_writes", "live_loader")
FAMILIES = ("qwen2", "qwen3", "llama")
SINGLE = [f"{family}_{name}" for family in FAMILIES for name in (*PER_FAMILY, "reload", "reload_again")] + [
    "process_is_untouched",
    "groups_survive_a_dropped_engine",
    "same_samples_in_any_batch",
    "episodes",
    "prompts_stay_whole",
    "seeds_of_the_engine",
    "limits_are_per_request",
    "probe_of_the_temperature",
    "stops",
    "bad_input",
    "weights_change_under_way",
    "tokens_are_of_their_version",
    "kept_keys_and_values_show",
    "fifty_updates_under_way",
    "unfinished_responses_go_on",
    "tails_are_functions_of_what_is_kept",
    "tail_tokens_are_of_their_version",
    "pieces_are_the_responses",
    "live_equals_fresh_engine",
    "reload_equals_fresh_engine",
    "live_then_reload",
    "incomplete_reload",
]
TENSOR = [f"{family}_{name}" for family in FAMILIES for name in PER_FAMILY] + [
    "experts_layout",
    "experts_sync",
    "experts_loader",
    "qwen2_probe",
    "episodes",
    "qwen2_reload",
]
LATER = [
    f"{family}_{name}"
    for family in ("mistral", "qwen2_moe", "qwen3_moe")
    for name in ("layout", "live_writes", "reload", "live_then_reload")
] + ["adapters_are_added_under_way"]
REPLICAS = ["everywhere", "equals_hf", "fewer_prompts_than_replicas", "failure_is_everybodys"]
EPISODES = "EPISODES "  # begins the lines with their tokens
LAUNCHES = {  # name -> ranks, arguments of the script
    "single": (1, ("single",)),
    "families": (1, ("families",)),
    "tensor": (2, ("tensor",)),
    "replicas_2x1": (2, ("replicas", "1")),
    "replicas_2x2": (4, ("replicas", "2")),
}


@once
def lines(launch: str) -> list[str]:
    nproc, arguments = LAUNCHES[launch]
    return ranks(SCRIPT, *arguments, nproc=nproc, modules=ENGINE).check().stdout.splitlines()


def verdicts(launch: str) -> dict[str, list[str]]:
    """What every check said, on every rank."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in lines(launch):
        if line.startswith("CHECK "):
            _, name, _, verdict = line.split(" ", 3)
            found[name].append(verdict)
    return found


@pytest.mark.parametrize("name", SINGLE)
def test_one_process(name: str) -> None:
    assert verdicts("single")[name] == ["ok"]


@pytest.mark.slow
@pytest.mark.parametrize("name", LATER)
def test_later_families(name: str) -> None:
    assert verdicts("families")[name] == ["ok"]


@pytest.mark.parametrize("name", TENSOR)
def test_tensor_parallel(name: str) -> None:
    assert verdicts("tensor")[name] == ["ok"] * 2


@pytest.mark.parametrize("name", REPLICAS)
def test_two_replicas(name: str) -> None:
    assert verdicts("replicas_2x1")[name] == ["ok"] * 2


def test_episodes_have_the_same_tokens_on_one_rank_on_two_and_on_two_engines() -> None:
    assert verdicts("replicas_2x1")["episodes"] == ["ok"] * 2
    found = {}
    for launch in ("single", "tensor", "replicas_2x1"):
        parts = [json.loads(line.removeprefix(EPISODES)) for line in lines(launch) if line.startswith(EPISODES)]
        found[launch] = {name: ids for part in parts for name, ids in part.items()}
    assert len(found["single"]) == 4
    assert found["single"] == found["tensor"] == found["replicas_2x1"]


@pytest.mark.slow
@pytest.mark.parametrize("name", REPLICAS)
def test_two_replicas_of_two_ranks(name: str) -> None:
    assert verdicts("replicas_2x2")[name] == ["ok"] * 4
