"""Runs across machines that are namespaces of this host: an engine's machine is lost, and the trainer is killed.

``python -m tests.faults.machines`` is the same by hand, with more engines of vLLM.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.machines import SAMPLES, Cluster, cluster_of, on_one_machine, scene
from tests.launching.launch import REPO, alive, once
from tests.launching.machines import machines, obstacle
from tests.launching.training import TinyWorld

pytest.importorskip("ray", reason="engines in other processes need Ray: install mega_rl[separate]")
pytestmark = pytest.mark.slow

ROWS = 80  # of 5 steps of 4 prompts
ABOUT_ITSELF = """
import os, pathlib, socket, sys
for place in map(pathlib.Path, ("/tmp", "/dev/shm", "/tmp/user", sys.argv[1])):
    place.mkdir(exist_ok=True)
    print(sorted(file.name for file in place.iterdir() if file.suffix == ".mark"))
    (place / f"{socket.gethostname()}.mark").touch()
try:
    other = pathlib.Path(sys.argv[2], "not_there.mark")
    other.touch()
    other.unlink()
except OSError as error:
    print(error.strerror)
print(open("/proc/sys/kernel/random/boot_id").read().strip(), os.getppid())
"""


@pytest.fixture(scope="module", autouse=True)
def _possible() -> None:
    if (reason := obstacle()) is not None:
        pytest.skip(f"this host cannot have machines: {reason}")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("machines")


@pytest.fixture(scope="module")
def cluster(tiny_world: TinyWorld, root: Path) -> Iterator[Cluster]:
    """Two machines that train and two with an engine; the network file system has the model, the data and the runs."""
    with cluster_of(4, tiny_world.rl.parent, root) as found:
        yield found


@once
def alone(tiny_world: TinyWorld, root: Path) -> Path:
    """The same run on this machine, without namespaces."""
    on_one_machine("vllm", tiny_world.rl, root / "alone")
    return root / "alone"


def test_a_machine_has_its_own_name_disks_and_processes(tmp_path: Path) -> None:
    """And is gone with all of them when it is lost, or when the block ends, though a test failed in it."""
    shared = tmp_path / "shared"
    shared.mkdir()
    command = (sys.executable, "-c", ABOUT_ITSELF, str(shared), str(REPO))
    with pytest.raises(ZeroDivisionError), machines(2, [shared]) as hosts:
        said = [hosts.run(number, command).check().stdout.splitlines() for number in (0, 1)]
        assert said[0][:-1] == ["[]", "[]", "[]", "[]", "Read-only file system"], said
        assert said[1][:-1] == ["[]", "[]", "[]", "['machine0.mark']", "Read-only file system"], said
        assert len({line for *_, line in said}) == 2, "their boots"
        assert sorted(file.name for file in shared.iterdir()) == ["machine0.mark", "machine1.mark"]
        sleep = (sys.executable, "-c", "print('begun', flush=True); import time; time.sleep(600)")
        with hosts.started(0, sleep) as first, hosts.started(1, sleep) as second:
            for running in (first, second):
                running.wait_for("begun", timeout=60)
            processes = [process.pid for number in (0, 1) for process in hosts.processes(number)]
            assert len(processes) == 2
            hosts.lose(1)
            assert second.wait(timeout=60) != 0 and first.process.poll() is None
            assert not alive(processes[1]) and alive(processes[0])
        hosts.add(1)
        assert hosts.run(1, command).check().stdout.splitlines()[0] == "[]", "a disk that is lost is lost"
        raise ZeroDivisionError
    assert not any(map(alive, processes)) and 0 not in hosts


def test_a_pinned_run_across_machines_learns_what_it_learns_on_one(
    tiny_world: TinyWorld, cluster: Cluster, root: Path
) -> None:
    """Ranks on two machines, engines of vLLM on two others, of which one is lost; the trainer is killed and resumed."""
    reference = alone(tiny_world, root)
    found = scene(cluster, "vllm", "pinned", tiny_world.rl, root / "pinned", reference)
    assert 0 < found["in_hand"] <= 4 * SAMPLES and found["resumed_after"] == 2 and found["engines_kept"] == 1, found
    assert (found["rows"], found["lost"], found["doubled"], found["different"]) == (ROWS, 0, 0, 0), found
    assert found["metrics_equal"] and found["oldest"] == 1, found


def test_a_run_in_flight_across_machines_loses_and_doubles_nothing(
    tiny_world: TinyWorld, cluster: Cluster, root: Path
) -> None:
    """The same, with engines that have no vLLM."""
    reference = alone(tiny_world, root)
    found = scene(cluster, "pretended", "in_flight", tiny_world.rl, root / "in_flight", reference)
    assert found["in_hand"] > 0 and found["resumed_after"] >= 2 and found["engines_kept"] == 1, found
    assert (found["rows"], found["lost"], found["doubled"]) == (ROWS, 0, 0) and found["oldest"] <= 1, found
