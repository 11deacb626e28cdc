"""A trainer whose engines are on nodes that come and go: ``run_ray_nodes.py LOG OUTPUT_DIR ARGUMENTS``.

The nodes are those of a ``ray.cluster_utils.Cluster`` of this machine: raylets with resources of their own, of which
the first one has the trainer and no engine. The trainer is ``run_struck_fleet.py`` with these arguments, held before
its steps; its engines have no vLLM. Two nodes are taken away while their engines have responses in hand. Started by
``test_ray_nodes.py``, which says what must have come of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray.cluster_utils import Cluster

from mega_rl.fleet.tickets import held_out
from tests.launching.launch import REPO, Running, free_port, started
from tests.launching.training import STRUCK_FLEET
from tests.pretended.engine_process import PAUSE
from tests.pretended.struck_fleet import LOG, Told, go

ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
SMALL = {"object_store_memory": 80 << 20, "include_dashboard": False}
# A node that does not answer five times is lost: until then Ray takes it for alive.
LOOKS = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 2000, "health_check_failure_threshold": 5}
VALIDATION = held_out(4)  # of the last step
LIMIT_S = 600.0


def take_away(cluster: Cluster, node: Any, allow_graceful: bool) -> None:
    """A node with all of its processes, whatever they do."""
    raylet = node.all_processes[ray_constants.PROCESS_TYPE_RAYLET][0].process.pid
    processes = psutil.Process(raylet).children(recursive=True)
    cluster.remove_node(node, allow_graceful=allow_graceful)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


class Scene:
    """A run on a cluster, and what is done to it."""

    def __init__(self, cluster: Cluster, told: Told, running: Running, log: Path, run: Path) -> None:
        self.cluster, self.told, self.running, self.log, self.run = cluster, told, running, log, run

    def wait(self, is_so: Callable[[], bool]) -> None:
        self.told.wait_for(is_so, self.running, LIMIT_S)

    def serves(self, engine: int, node: Any) -> bool:
        found = self.told.alive.get(engine, {})
        return bool(found.get("serves")) and found["node"] == node.node_id

    def say(self, what: str) -> None:
        """To the test, in the order in which things happened."""
        self.told.read()
        self.told.lines.append({"what": what})
        print(f"{time.monotonic():.1f} {what}", flush=True)

    def strike(self, step: int, engine: int, node: Any, allow_graceful: bool) -> None:
        """Take a node away while its engine has responses of the next step in hand; engines go on when told so."""
        pause = Path(f"{self.log}{PAUSE}")
        pause.touch()
        go(self.log, step)
        wanted = step + 1 if step < 3 else VALIDATION
        life = self.told.alive[engine]["life"]
        self.wait(lambda: self.told.has("Issue", engine=engine, life=life, step=wanted))
        self.say("strike")
        take_away(self.cluster, node, allow_graceful)

    def go_on(self) -> None:
        Path(f"{self.log}{PAUSE}").unlink()

    def play(self, first: Any, second: Any) -> None:
        """``first``, ``second``: the nodes of engines 0 and 1."""
        self.wait(lambda: self.told.has("Held", step=1) and self.serves(0, first) and self.serves(1, second))
        self.strike(1, engine=1, node=second, allow_graceful=False)
        self.go_on()
        self.wait(lambda: self.told.has("Deliver", step=2))  # which the node had responses of
        self.say("no room")
        third = self.cluster.add_node(num_cpus=2, **SMALL)
        self.wait(lambda: self.serves(1, third))
        tool = (sys.executable, str(REPO / "tools" / "fleet.py"), "add", str(self.run), "1", "--wait", str(LIMIT_S))
        added = subprocess.run([*tool, "--json"], check=True, capture_output=True, text=True)
        print(f"ADDED {json.dumps(json.loads(added.stdout))}", flush=True)
        self.wait(lambda: self.serves(2, third))
        go(self.log, 2)
        self.wait(lambda: self.told.has("Held", step=3))
        self.strike(3, engine=0, node=first, allow_graceful=True)
        fourth = self.cluster.add_node(num_cpus=1, **SMALL)
        self.wait(lambda: self.serves(0, fourth))
        self.go_on()
        assert self.running.wait(LIMIT_S) == 0, self.running.output()[-8000:]
        self.told.read()
        nodes = {
            name: node.node_id
            for name, node in zip(("first", "second", "third", "fourth"), (first, second, third, fourth), strict=True)
        }
        print(f"TOLD {json.dumps({'nodes': nodes, 'lines': self.told.lines})}", flush=True)


def main(log: Path, run: Path, arguments: list[str]) -> None:
    told = Told(log)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "_system_config": LOOKS, **SMALL})
    os.environ |= {"RAY_ADDRESS": cluster.address, LOG: str(log)}
    second = cluster.add_node(num_cpus=1, **SMALL)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")  # to say when engine 0 has its place
    occupant = ray.util.placement_group([{"CPU": 1}])
    ray.get(occupant.ready(), timeout=LIMIT_S)
    first = cluster.add_node(num_cpus=1, **SMALL)
    command = (sys.executable, STRUCK_FLEET, "pretended,1,2,3", *arguments, f"trainer.output_dir={run}")
    with started(command, env={**ALONE, "MASTER_PORT": str(free_port())}) as running:
        told.wait_for(lambda: not ray.available_resources().get("CPU"), running, LIMIT_S)  # engine 0 has its place
        ray.util.remove_placement_group(occupant)
        ray.shutdown()
        Scene(cluster, told, running, log, run).play(first, second)
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
