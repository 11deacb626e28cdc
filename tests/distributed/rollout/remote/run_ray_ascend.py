"""Ray as on an Ascend host, without one: nodes that claim NPUs, and the actors that would hold engines.

Started by ``test_ray_ascend.py``. Every check prints one line ``CHECK <name> 0 ok`` or what is wrong.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import ray
import ray.util.scheduling_strategies

from mega_rl import platform
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.errors import InputError
from mega_rl.platform.ascend.devices import MASK, RAY_KEEPS_MASK
from mega_rl.platform.cpu import CpuPlatform
from mega_rl.platform.npu import NpuPlatform
from mega_rl.rollout.remote import placement as fleet
from mega_rl.rollout.remote.local_ray import OBJECT_STORE_BYTES
from mega_rl.rollout.remote.ray_room import bundle, check_room
from tests.distributed.rollout.rollout_checks import check

PHYSICAL = ("2", "4", "6", "7")  # the mask of the node
OPTIONS = NpuPlatform.actor_options
NEVER_S = 3  # long enough for a placement that is possible


def start(**resources: Any) -> None:
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="ERROR",
        **resources,
    )


def refused(num_engines: int, engine_size: int) -> str:
    try:
        check_room(fleet.nodes(ray), bundle(OPTIONS), num_engines, engine_size)
    except InputError as error:
        return str(error)
    raise AssertionError("accepted")


def devices(actor_options: Mapping[str, Any]) -> list[tuple[str | None, int]]:
    """The mask and the index of both workers of an engine, whose devices stay taken."""
    return ray.get([worker.device.remote("npu") for worker in fleet.place(ray, 2, actor_options)])


def each_worker_finds_its_own_device() -> None:
    """Where Ray masks, a worker sees one device, under its physical id and as device 0; where it is told to keep the
    node's mask, a worker finds its device by index: together the four workers have all four.
    """
    masked = devices(OPTIONS)
    assert all(mask in PHYSICAL and index == 0 for mask, index in masked), masked
    kept = devices({**OPTIONS, "runtime_env": {"env_vars": {RAY_KEEPS_MASK: "1"}}})
    assert all(mask == ",".join(PHYSICAL) for mask, _ in kept), kept
    taken = sorted([mask for mask, _ in masked] + [PHYSICAL[index] for _, index in kept])
    assert taken == sorted(PHYSICAL), (masked, kept)


def too_few_devices_are_counted() -> None:
    """At once, and rightly: Ray itself never places the engine."""
    assert "needs NPU: 5 (rollout.num_engines 1 x" in refused(1, 5) and "has 4" in refused(1, 5)
    group = ray.util.placement_group([bundle(OPTIONS)] * 5, strategy="STRICT_PACK")
    assert not group.wait(NEVER_S)
    ray.util.remove_placement_group(group)


def devices_in_use_are_waited_for_and_said() -> None:
    fleet.PLACEMENT_TIMEOUT_S = NEVER_S
    try:
        fleet.place(ray, 2, OPTIONS)
    except InputError as error:
        assert "found no room for an engine of 2" in str(error) and "'NPU': 0" in str(error), error
    else:
        raise AssertionError("placed on devices that others have")


def a_cluster_of_gpus_is_named() -> None:
    assert ray.cluster_resources()["GPU"] == 2
    sentence = refused(1, 1)
    assert "GPU: 2" in sentence and """ray start --resources='{"NPU": 8}'""" in sentence and "--num-gpus" in sentence
    assert not ray.util.placement_group([bundle(OPTIONS)], strategy="STRICT_PACK").wait(NEVER_S), "it was placed"


def a_fleet_says_so_before_it_starts_anything() -> None:
    """The same from where a run asks, which is connected already."""
    platform.select("cpu")
    fleet.connected_ray = lambda num_workers: (ray, None)
    spec = fleet.EngineSpec("model", RolloutConfig(), 8, "float32", "cpu", is_deterministic=False, num_threads=1)
    CpuPlatform.actor_options = OPTIONS  # a CPU that wants NPUs: this host has none to select
    try:
        fleet.EngineGroup(spec, 1)
    except InputError as error:
        assert "of which this cluster has none" in str(error), error
    else:
        raise AssertionError("a fleet without devices")


if __name__ == "__main__":
    os.environ[MASK] = ",".join(PHYSICAL)
    start(num_cpus=8, num_gpus=0, resources={"NPU": 4})
    for body in (each_worker_finds_its_own_device, too_few_devices_are_counted, devices_in_use_are_waited_for_and_said):
        check(body.__name__, body)
    ray.shutdown()
    del os.environ[MASK]
    start(num_cpus=2, num_gpus=2)
    for body in (a_cluster_of_gpus_is_named, a_fleet_says_so_before_it_starts_anything):
        check(body.__name__, body)
    ray.shutdown()
