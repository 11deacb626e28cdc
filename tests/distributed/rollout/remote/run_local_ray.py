"""One rank of a run that has started a Ray of its own, with an engine process in it that holds no engine yet.

It prints ``READY <the engine's process> <address of Ray>`` and waits to be killed. Started by ``test_local_ray.py``.
"""

from __future__ import annotations

import os
import time

from mega_rl import platform
from mega_rl.rollout.remote.placement import connected_ray, place
from tools.train import end_with_torchrun, fail


def main() -> None:
    platform.select("cpu")
    if os.environ["RANK"] != "0":
        time.sleep(3600)
    ray, _ = connected_ray(1)
    (worker,) = place(ray, 1, platform.current().actor_options)
    engine = ray.get(worker.process_id.remote())
    print(f"READY {engine} {ray.get_runtime_context().gcs_address}\n", end="", flush=True)
    while True:  # as a trainer that samples: it notices that an engine has died
        ray.get(worker.process_id.remote())
        time.sleep(0.1)


if __name__ == "__main__":
    end_with_torchrun()
    try:
        main()
    except Exception as error:  # noqa: BLE001 - as tools/train.py
        fail(error)
