"""A trainer on a Ray cluster of the user's own: ``run_kept_engines.py OUTPUT_DIR ENGINES FIRST_STEP LEASE_S``.

It learns nothing: the weights of a version are made of its number. With a lease it kills itself as soon as an engine
has work of its second step in hand; without (0) it ends as runs do, and looks at what is left of it. Started by
``test_kept_engines.py``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from mega_rl import platform
from mega_rl.bridge.reshard.proof import LoadProof
from mega_rl.bridge.series import Series, slices_of
from mega_rl.bridge.slices import Box, Slice, extents
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.fleet.engines import Condition, EngineLimits
from mega_rl.fleet.scheduler import FleetScheduler
from mega_rl.fleet.step_window import STATE_VERSION
from mega_rl.fleet.tickets import Key, Rules
from mega_rl.rollout.engine import Request
from mega_rl.rollout.engine_checks import CheckPlan, FleetChecks, Held
from mega_rl.rollout.remote.engine_process import EngineSpec
from mega_rl.rollout.remote.fleet import leases
from mega_rl.rollout.remote.fleet.ray_executor import RayExecutor, Work
from mega_rl.rollout.remote.load_checks import LoadChecks
from mega_rl.rollout.remote.weight_store import Store, StoredVersion
from mega_rl.rollout.requests import make_requests
from mega_rl.rollout.scheduling.scheduler_thread import SchedulerThread
from mega_rl.rollout.store_form import StoreForm
from mega_rl.types import Prompt, Score, Trajectory
from tests.pretended.engine_process import PretendedKeptProcess, sealed

NORM = Series("model.norm.weight", ((0, 5),), "model.norm.weight", ((0, 5),))
RULES = Rules(num_groups=4, group_size=2, total_steps=4)
LIMIT_S = 200.0


def requests(key: Key, samples: Sequence[int]) -> list[Request]:
    prompt = Prompt(RULES.num_groups * key.step + key.ticket, (1, 2), "", "", "test")
    made = make_requests([prompt], n=RULES.group_size, step=key.step, seed=3, max_tokens=60, temperature=1.0)
    return [made[sample] for sample in samples]


def score(key: Key, trajectory: Trajectory) -> Future[Score]:
    found: Future[Score] = Future()
    found.set_result(Score(1.0))
    return found


def value(version: int) -> float:
    """Of every number of a version's weights."""
    return version + 0.5


class PretendedKeptZeros(PretendedKeptProcess):
    def loaded(self, slices: list[Slice], dtype: torch.dtype, *_: Any) -> dict[str, torch.Tensor]:
        """Of a model whose weights are zeros."""
        return {piece.local_name: torch.zeros(extents(piece.hf_box), dtype=dtype) for piece in slices}


def read_zeros(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
    return torch.zeros(extents(hf_box))


class Trainer:
    def __init__(self, output_dir: Path, num_engines: int, first: int) -> None:
        self.store, self.stored = (
            Store(StoreForm(((NORM,),), torch.float32, 2, salt=os.getpid())),
            dict[int, StoredVersion](),
        )
        self.checks = FleetChecks(CheckPlan(50, 0.7, "float32", print))
        self.put(first)
        rollout = RolloutConfig(placement="separate", num_engines=num_engines, mode="pinned")
        spec = EngineSpec(str(output_dir), rollout, 64, "float32", "cpu", is_deterministic=False, num_threads=1)
        kept_by = leases.keeping(output_dir, lease_s=10_000)
        norm = [NORM]
        proof = LoadProof({NORM.hf_name: (5,)}, slices_of(norm), [norm], 1, read_zeros)
        loads = LoadChecks(spec, proof, partial(print, flush=True))
        self.executor = RayExecutor(loads, num_engines, Work(requests, self.checks), self.store, self.stored, kept_by)
        print(f"ATTACHED {self.executor.num_survivors}", flush=True)
        state: dict[str, Any] = {"format": STATE_VERSION, "trained": first, "steps": {}}
        self.scheduler = FleetScheduler(RULES, EngineLimits(restarts=1), range(num_engines), state)
        self.thread = SchedulerThread(self.scheduler, self.executor, score, lambda scores: True, {}, LIMIT_S)

    def put(self, version: int) -> None:
        self.store.parameters(0, version)["model.norm.weight"].fill_(value(version))
        self.stored[version] = sealed(self.store, version)
        self.checks.tell(Held(version))

    def processes(self) -> list[int]:
        return sorted(process for life in self.executor._lives.values() for process in life.processes)

    def train(self, first: int, lease_s: float) -> None:
        for step in range(first, RULES.total_steps):
            kept = self.thread.take(step).kept
            tokens = [[t.sampled_ids.tolist() for t in group.trajectories] for _, group in sorted(kept.items())]
            print(f"STEP {step} {tokens}", flush=True)
            if step == first:
                self.wait_for_engines()
            self.put(step + 1)
            self.thread.published(step + 1)
            if lease_s and step == first:
                while not any(life.load and life.num_sampling for life in list(self.executor._lives.values())):
                    time.sleep(0.001)
                places: Any = self.executor._places  # the lease is short from here on: the start may take its time
                places._ray.get(places._keeper.attach.remote(places._token, lease_s))
                os.kill(os.getpid(), signal.SIGKILL)

    def wait_for_engines(self) -> None:
        """Until all serve."""
        until = time.monotonic() + LIMIT_S
        engines = self.scheduler.engines.values()
        while not all(engine.condition is Condition.SERVING for engine in engines) and time.monotonic() < until:
            time.sleep(0.01)
        print(f"ENGINES {self.processes()} LIVES {[engine.life for engine in engines]}", flush=True)

    def look_back(self) -> None:
        """Print what is in the cluster, once nothing is or the time is over."""
        import ray

        ray.init(log_to_driver=False, logging_level="ERROR")
        until = time.monotonic() + 30
        while True:
            groups = [g["state"] for g in ray.util.placement_group_table().values() if g["state"] != "REMOVED"]
            taken = ray.cluster_resources()["CPU"] - ray.available_resources().get("CPU", 0)
            left = [*ray.util.list_named_actors(all_namespaces=True), *groups, *[f"{taken:g} CPU"] * bool(taken)]
            engines = [p.info["cmdline"] for p in psutil.process_iter(["cmdline"]) if _is_of_us(p)]
            if not left + engines or time.monotonic() > until:
                break
            time.sleep(0.1)
        print(f"LEFT {left + engines}", flush=True)
        ray.shutdown()


def _is_of_us(process: Any) -> bool:
    return any(name in " ".join(process.info["cmdline"] or ()) for name in ("ray::LeaseActor", "ray::PretendedKept"))


def main(output_dir: Path, num_engines: int, first: int, lease_s: float) -> None:
    leases.KeptEngine = PretendedKeptZeros  # type: ignore[misc]
    platform.select("cpu")
    trainer = Trainer(output_dir, num_engines, first)
    trainer.train(first, lease_s)
    trainer.thread.close()
    trainer.look_back()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
