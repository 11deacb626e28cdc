"""Two ranks as on two nodes, one of which is lost with its copy server: its copy comes from the other one's."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch.distributed as dist

from mega_rl.errors import InputError
from mega_rl.parallel.watch import state_copies
from mega_rl.parallel.watch.state_copies import StateCopies


def node() -> subprocess.Popen[bytes]:
    """What stands for torchrun on this rank's node; the ranks see no other parent."""
    launcher = subprocess.Popen(("sleep", "600"))
    state_copies.os.getppid = lambda: launcher.pid  # type: ignore[attr-defined]
    return launcher


def content(rank: int, step: int) -> bytes:
    return f"rank {rank} after {step}".encode() * (1000 + rank)


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    launcher = node()
    os.environ["LOCAL_WORLD_SIZE"] = str(1 + rank)
    with pytest.raises(InputError, match="the nodes of this run have from 1 to 2 ranks"):
        StateCopies("run")
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    copies = StateCopies("run")
    assert copies.newest() is None
    for step in (1, 2, 3):
        copies.keep(step, content(rank, step))
    if rank == 0:
        copies._put(0, 4, content(0, 4))  # the other rank was killed before it had put its own
    dist.barrier()
    assert copies.newest() == 3
    assert StateCopies("another run").newest() is None
    if rank == 1:
        launcher.kill()
        launcher.wait()
        launcher = node()
    after = StateCopies("run")
    assert after.newest() == 3
    assert (rank, 3) in after._here or rank == 1
    assert after.get(3) == content(rank, 3)
    dist.barrier()
    launcher.kill()
    launcher.wait()
    if rank == 0:
        print("PASSED", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
