"""Ray as on an Ascend host, without one: nodes that claim NPUs, and the actors that would hold engines.

Started by ``test_ray_ascend.py``. Every check prints one line ``CHECK <name> 0 ok`` or what is wrong.
"""

from __future__ import annotations

import os
from typing import Any

import ray
import ray.util.scheduling_strategies

from mega_rl import platform
from mega_rl.config.schema import RolloutConfig
from mega_rl.platform.ascend_devices import MASK, RAY_KEEPS_MASK
from mega_rl.platform.cpu import CpuPlatform
from mega_rl.platform.npu import NpuPlatform
from mega_rl.rollout import fleet
from mega_rl.rollout.ray_room import bundle, check_room
from mega_rl.types import InputError
from tests.distributed.rollout_checks import check

PHYSICAL = ("4", "6")  # the mask of the node
OPTIONS = NpuPlatform.actor_options
NEVER_S = 3  # long enough for a placement that is possible


def start(**resources: Any) -> None:
    ray.init(
        include_dashboard=False,
        object_store_memory=fleet.OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="ERROR",
        **resources,
    )


def refused(num_engines: int, engine_size: int) -> str:
    try:
        check_room(fleet._nodes(ray), bundle(OPTIONS), num_engines, engine_size)
    except InputError as error:
        return str(error)
    raise AssertionError("accepted")


def devices(actor_options: dict[str, Any]) -> list[tuple[str | None, int]]:
    """The mask and the index of both workers of one engine, which then goes."""
    workers = fleet.place(ray, 2, actor_options)
    found = ray.get([worker.device.remote("npu") for worker in workers])
    for worker in workers:
        ray.kill(worker)
    return sorted(found)


def ray_masks_each_worker() -> None:
    """Each sees its own device alone, under the physical id that the node's mask has, and as device 0."""
    assert devices(dict(OPTIONS)) == [(PHYSICAL[0], 0), (PHYSICAL[1], 0)]


def physical_ids_are_mapped_by_the_mask() -> None:
    """Where Ray is told to keep the node's mask, ids are physical and devices are found by their index."""
    variables = {"env_vars": {RAY_KEEPS_MASK: "1"}}
    assert devices({**OPTIONS, "runtime_env": variables}) == [(",".join(PHYSICAL), 0), (",".join(PHYSICAL), 1)]


def too_few_devices_are_counted() -> None:
    """At once, and rightly: Ray itself never places the engine."""
    assert "needs NPU: 3 (rollout.num_engines 1 x" in refused(1, 3) and "has 2" in refused(1, 3)
    group = ray.util.placement_group([bundle(OPTIONS)] * 3, strategy="STRICT_PACK")
    assert not group.wait(NEVER_S)
    ray.util.remove_placement_group(group)


def a_cluster_of_gpus_is_named() -> None:
    assert ray.cluster_resources()["GPU"] == 2
    sentence = refused(1, 1)
    assert "GPU: 2" in sentence and """ray start --resources='{"NPU": 8}'""" in sentence and "--num-gpus" in sentence
    assert not ray.util.placement_group([bundle(OPTIONS)], strategy="STRICT_PACK").wait(NEVER_S), "it was placed"


def a_fleet_says_so_before_it_starts_anything() -> None:
    """The same from where a run asks."""
    platform.select("cpu")
    spec = fleet.EngineSpec("model", RolloutConfig(), 8, "float32", "cpu", is_deterministic=False, num_threads=1)
    CpuPlatform.actor_options = OPTIONS  # a CPU that wants NPUs: this host has none to select
    try:
        fleet.Fleet(spec, 1)
    except InputError as error:
        assert "of which this cluster has none" in str(error), error
    else:
        raise AssertionError("a fleet without devices")


if __name__ == "__main__":
    os.environ[MASK] = ",".join(PHYSICAL)
    start(num_cpus=4, num_gpus=0, resources={"NPU": 2})
    for body in (ray_masks_each_worker, physical_ids_are_mapped_by_the_mask, too_few_devices_are_counted):
        check(body.__name__, body)
    ray.shutdown()
    del os.environ[MASK]
    start(num_cpus=2, num_gpus=2)
    for body in (a_cluster_of_gpus_is_named, a_fleet_says_so_before_it_starts_anything):
        check(body.__name__, body)
    ray.shutdown()
