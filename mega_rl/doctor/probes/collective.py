"""Two ranks sum a vector, on the host and, if there are two devices, on the devices. Rank 0 starts rank 1."""

from __future__ import annotations

import datetime
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.doctor.probes import report

NUM_RANKS = 2
NUM_VALUES = 1 << 20
TIMEOUT = datetime.timedelta(seconds=60)


def is_summed(device: torch.device) -> bool:
    """Whether the sum over ranks of ``rank + 1 + arange`` is what it must be, exactly."""
    values = torch.arange(NUM_VALUES, dtype=torch.float32, device=device) % 1024
    mine = values + dist.get_rank() + 1
    dist.all_reduce(mine)
    return bool(torch.equal(mine, NUM_RANKS * values + sum(range(1, NUM_RANKS + 1))))


def join(rank: int, store_file: Path) -> None:
    here = platform.current()
    device_type = here.name
    num_devices = 0 if device_type == "cpu" else torch.get_device_module(device_type).device_count()
    on_device = num_devices >= NUM_RANKS
    device = here.set_device(rank) if on_device else torch.device("cpu")
    store = dist.FileStore(str(store_file), NUM_RANKS)
    dist.init_process_group(here.backend, store=store, rank=rank, world_size=NUM_RANKS, timeout=TIMEOUT)
    host = is_summed(torch.device("cpu"))
    if rank == 0:
        report(host=host, num_devices=num_devices)
    if on_device:
        right = is_summed(device)
        if rank == 0:
            report(device=right)
    dist.destroy_process_group()


def main() -> None:
    if len(sys.argv) > 1:
        join(1, Path(sys.argv[1]))
        return
    with tempfile.TemporaryDirectory() as folder:
        store_file = Path(folder) / "store"
        other = subprocess.Popen([sys.executable, "-m", "mega_rl.doctor.probes.collective", str(store_file)])
        try:
            join(0, store_file)
            status = other.wait()
        finally:
            other.kill()  # if this rank failed, the other would wait for it
    sys.exit(status)


if __name__ == "__main__":
    main()
