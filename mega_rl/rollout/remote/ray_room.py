"""Whether the engines fit into a Ray cluster, checked before they start: Ray waits for ever for what never fits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mega_rl.errors import InputError


def bundle(actor_options: Mapping[str, Any]) -> dict[str, float]:
    """What one worker takes from its node, by resource name; read from the options of its actor."""
    amounts = {"CPU": actor_options["num_cpus"], "GPU": actor_options.get("num_gpus", 0)}
    return {name: amount for name, amount in {**amounts, **actor_options.get("resources", {})}.items() if amount}


def check_room(
    nodes: Sequence[Mapping[str, float]], bundle: Mapping[str, float], num_engines: int, engine_size: int
) -> None:
    """Raise InputError if Ray could never place all engines, each on one node.

    Args:
        nodes: the resources of every node that is alive.
        bundle: the resources that one worker takes.
        engine_size: number of workers of one engine.
    """
    num_workers = num_engines * engine_size
    wanted = f"rollout.num_engines {num_engines} x rollout.tensor_parallel_size {engine_size}"
    for name, amount in bundle.items():
        total, needed = sum(node.get(name, 0) for node in nodes), amount * num_workers
        if total >= needed:
            continue
        gpus = sum(node.get("GPU", 0) for node in nodes)
        if name == "NPU" and total == 0 and gpus:
            raise InputError(
                "rollout.placement=separate asks Ray for NPU, of which this cluster has none, and it offers GPU: "
                f"{gpus:g}, so that engines would wait for ever: start its nodes with "
                "`ray start --resources='{\"NPU\": 8}'`, not with --num-gpus."
            )
        raise InputError(
            f"rollout.placement=separate needs {name}: {needed:g} ({wanted}), and the Ray cluster has {total:g}: lower "
            "one of the two, or add nodes."
        )
    workers = [int(min(node.get(name, 0) // amount for name, amount in bundle.items())) for node in nodes]
    room = sum(number // engine_size for number in workers)
    if room < num_engines:
        held = "; ".join(", ".join(f"{name}: {node.get(name, 0):g}" for name in bundle) for node in nodes)
        raise InputError(
            f"rollout.placement=separate needs {wanted}, an engine's {engine_size} processes on one node, and the "
            f"nodes of the Ray cluster have room for {room} such engines ({held}): lower rollout.tensor_parallel_size "
            "or rollout.num_engines, or add nodes."
        )
