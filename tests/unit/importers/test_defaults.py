"""A file that says nothing means what the neighbour does by default, for every key that is mapped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config.reading.tables import NEIGHBOURS, Entry, table
from mega_rl.importers.convert import NO_LIMIT, convert
from mega_rl.importers.draft.defaults import ENGINE, NAMED, default_of, programs, read
from mega_rl.importers.draft.draft import ONLY_RL
from mega_rl.importers.draft.reading import Given
from tests.launching.launch import REPO
from tests.unit.importers.meaning import INTERPRETERS, differing, ours

# Keys that name a program and say nothing else.
BEGINNINGS: dict[str, dict[str, Given]] = {
    "verl": {"rl": Given({"algorithm.adv_estimator": "gae"}), "sft": Given({}, ["verl.trainer.sft_trainer"])},
    "areal": {kind: Given({"train_dataset.type": {"rm": "rw"}.get(kind, kind)}) for kind in ("rl", "sft", "dpo", "rm")},
    "openrlhf": {
        program: Given({}, [f"openrlhf.cli.train_{'ppo_ray' if program == 'rl' else program}"])
        for program in ("rl", "sft", "dpo", "rm")
    },
    "trl": {task: Given({}, ["trl", task]) for task in programs("trl")},
    "llamafactory": {"v0": Given({"stage": "sft"}), "v1": Given({"model": "m"})},
    "swift": {
        "megatron": Given({"rlhf_type": "grpo"}, ["megatron", "rlhf"]),
        "sft": Given({}, ["swift", "sft"]),
        "rlhf": Given({"rlhf_type": "grpo"}, ["swift", "rlhf"]),
    },
    "slime": {"all": Given({"rollout_batch_size": 8})},
    "mindspeed_rl": {kind: Given({"megatron_training.stage": kind}) for kind in ("rl", "dpo")},
}
CASES = [(name, program) for name in NEIGHBOURS for program in programs(name)]
# What another key of theirs decides, or a rule that a test of meanings holds.
BY_RULES = {
    "rollout.temperature",  # of LLaMA-Factory: read by its PPO alone
    "checkpoint.save_freq",  # -1 is never there
}


def plain(entry: Entry | None, key: str, stage: str) -> bool:
    """Whether a default has to stand in the result as it is."""
    if entry is None or entry.kind != "set" or entry.to[0].startswith(NAMED):
        return False
    return stage == "rl" or not entry.to[0].startswith(ONLY_RL)


@pytest.mark.parametrize(("neighbour", "program"), CASES)
def test_a_file_that_says_nothing_has_their_defaults(neighbour: str, program: str) -> None:
    given = BEGINNINGS[neighbour][program]
    draft = convert(neighbour, Given(dict(given.values), list(given.program)), 8)
    sections = [key for key in draft.table.entries if key.endswith(".")]
    assert sections == []
    wanted: dict[str, list[Any]] = {}
    for key, value in read(neighbour)[program].items():
        entry = table(neighbour).entries.get(key)
        if key in draft.defaults and plain(entry, key, draft.stage) and entry is not None:
            found = entry.words.get(value, value) if entry.words else value
            is_without = entry.to[0] in NO_LIMIT and (found is None or found == -1)
            found = NO_LIMIT[entry.to[0]] if is_without else found
            if found is not None:
                wanted.setdefault(entry.to[0], []).append(found)
    assert len(wanted) > 3
    for name, values in wanted.items():
        assert draft.result.get(name, default_of(name)) in values or name in BY_RULES, name


@pytest.mark.parametrize("neighbour", ["areal", "openrlhf", "trl", "llamafactory", "mindspeed_rl", "slime", "swift"])
def test_what_rules_compute_of_nothing_is_what_their_code_computes(neighbour: str) -> None:
    least: dict[str, dict[str, Any]] = {
        "areal": {"actor.backend": "fsdp:d8", "train_dataset.max_length": 512},
        "openrlhf": {"rollout.batch_size": 1024},
        "trl": {"num_generations": 8},
        "llamafactory": {"stage": "sft"},
        "swift": {"rlhf_type": "grpo", "max_length": 512, "global_batch_size": 16},
        "slime": {"rollout_batch_size": 8, "rollout_max_response_len": 1024},
        "mindspeed_rl": {f"actor_config.{key}": 1 for key in ("global_batch_size", "micro_batch_size", "lr")},
    }
    given = least[neighbour]
    assert differing(ours(convert(neighbour, Given(dict(given)), 8).result), INTERPRETERS[neighbour](given, 8)) == {}


def test_a_section_that_is_absent_by_default_has_no_defaults_until_it_is_named() -> None:
    empty = convert("areal", Given({"gconfig.n_samples": 8}), 8)
    named = convert("areal", Given({"gconfig.n_samples": 8, "actor.reward_norm.group_size": 8}), 8)
    assert "actor.reward_norm.mean_level" not in empty.defaults
    assert named.defaults["actor.reward_norm.mean_level"] == "batch"


@pytest.mark.parametrize("neighbour", NEIGHBOURS)
def test_the_data_say_where_they_come_from(neighbour: str) -> None:
    assert len(str(read(neighbour)["commit"])) == 40
    assert programs(neighbour) == list(BEGINNINGS[neighbour])
    for program in programs(neighbour):
        for key in read(neighbour)[program]:
            assert key.endswith(".") or table(neighbour).entries[key].kind in ("set", "rules", "none"), key


def test_arguments_of_the_engine_that_need_no_words_are_named_once() -> None:
    assert all(default_of(name) is value for name, value in ENGINE.items())


def test_the_script_reads_dataclasses_flags_and_composed_files(tmp_path: Path) -> None:
    """A checkout of a few lines in the place of OpenRLHF: flags of a loop, tuples, conditions, and a commit."""
    cli = tmp_path / "openrlhf" / "cli"
    cli.mkdir(parents=True)
    (tmp_path / "COMMIT").write_text("0" * 40)
    text = (
        "parser.add_argument('--rollout.n_samples_per_prompt', type=int, default=2 * 3)\n"
        "parser.add_argument('--train.full_determinism_enable', action='store_true')\n"
        "for prefix in ('actor', 'critic'):\n"
        "    parser.add_argument(f'--{prefix}.adam.betas', default=(0.9, 0.95))\n"
        "    parser.add_argument(f'--{prefix}.adam.lr', type=float, default=1e-6 if prefix == \"actor\" else 9e-6)\n"
        "parser.add_argument('--not.in.the.table', default=1)\n"
    )
    for name in ("train_ppo_ray", "train_sft", "train_dpo", "train_rm"):
        (cli / f"{name}.py").write_text(text)
    program = (
        "import sys; from pathlib import Path; import tools.neighbour_defaults as t; "
        "t.TARGET = Path(sys.argv[1]) / 'out'; sys.argv = ['x', '--from', 'openrlhf', sys.argv[1]]; t.main()"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, cwd=REPO)
    written = (tmp_path / "out" / "openrlhf.yaml").read_text()
    assert "commit: '" + "0" * 40 in written and "not.in" not in written
    assert "rollout.n_samples_per_prompt: 6" in written and "train.full_determinism_enable: false" in written
    assert "actor.adam.betas:\n  - 0.9\n  - 0.95" in written
    assert "actor.adam.lr: 1.0e-06" in written and "critic.adam.lr: 9.0e-06" in written
