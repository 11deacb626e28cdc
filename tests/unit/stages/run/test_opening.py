"""What ``open_job`` gives to all that comes after it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from mega_rl.parallel.layout import EngineLayout
from mega_rl.rollout.collect import replicas
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer
from mega_rl.synthetic.tiny_model import TinyModelSpec, write_tiny_model
from tests.launching.launch import run_copy

# The groups of a run, those of the trainer with its engines included, and the seconds that each lets a rank wait.
TIMEOUTS = """
import sys
import torch, torch.distributed as dist
from mega_rl import platform
from mega_rl.config import RunConfig
from mega_rl.parallel.joint_group import join_group, open_meeting
platform.select("cpu")
from mega_rl.stages.run.opening import open_job

config = RunConfig()
config.model.path, config.trainer.output_dir, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3])
config.trainer.collective_timeout_s = seconds
with open_job(config):
    point, store = open_meeting("127.0.0.1", "gloo", 1, seconds)
    joint = join_group(point, 0, store)
    for group in [*dist.distributed_c10d._world.pg_map]:
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        print("group", "joint" if group is joint else "trainer", timeout.total_seconds())
"""


@pytest.mark.slow
def test_every_group_ends_a_wait_in_the_time_that_the_configuration_gives(tmp_path: Path) -> None:
    spec = TinyModelSpec(hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=1, ffn=8)
    model = write_tiny_model(tmp_path / "model", spec, arithmetic_tokenizer())
    launched = run_copy(TIMEOUTS, model, tmp_path / "run", 45.5).check()
    groups = [line.split()[1:] for line in launched.stdout.splitlines() if line.startswith("group ")]
    assert {kind for kind, _ in groups} == {"trainer", "joint"} and len(groups) > 5
    assert {seconds for _, seconds in groups} == {"45.5"}, groups


def test_the_ranks_of_an_engine_wait_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}

    def made(_: object, **settings: object) -> tuple[None, None]:
        found.update(settings)
        return None, None

    monkeypatch.setattr(dist, "new_subgroups_by_enumeration", made)
    replicas.engine_ranks(EngineLayout(4, 2), 45.5)
    assert found["timeout"].total_seconds() == 45.5
