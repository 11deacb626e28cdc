"""Runs of ``tools/train.py`` on storage that is not as it should be; only inside of ``tests.launching.enclosure``.

``run_storage.py``: starts two ranks for each of the scenarios and prints what became of them, as JSON.
``run_storage.py SCENARIO OUTPUT_DIR ARGUMENTS``: one rank.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mega_rl import platform
from mega_rl.bridge.files.torch_dist import visible

CLONE_NEWNS = 0x20000
ROOT = Path(tempfile.gettempdir()) / "storage"
ANSWER = "RANK "  # begins the line that each rank ends with
SMALL_FILES = ("progress.json", "generators.pt", "megatron/common.pt", "megatron/metadata.json")  # of rank 0, first


def mount(path: Path, options: str) -> None:
    path.mkdir(parents=True, exist_ok=True)
    subprocess.run(("mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)), check=True)


def remount_read_only(path: Path) -> None:
    subprocess.run(("mount", "-o", "remount,bind,ro", str(path)), check=True)


def alone(change: Callable[[], object]) -> None:
    """Change the file systems of rank 1 only: it is on another machine."""
    if os.environ["RANK"] == "1":
        assert ctypes.CDLL(None).unshare(CLONE_NEWNS) == 0
        change()


def fill(directory: Path, left: int) -> None:
    """Leave no more than so many bytes free."""
    free = shutil.disk_usage(directory).free
    with (directory / "filler").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, free - left))


def on_disk(paths: list[Path]) -> int:
    """Bytes that a tmpfs takes for files of such sizes."""
    return sum(-(-path.stat().st_size // 4096) * 4096 for path in paths)


def before_second_save(output_dir: Path, act: Callable[[Path], None], is_every_rank: bool = False) -> None:
    """Have rank 0 (or every rank) do something, given the first checkpoint, as the second one begins."""
    saving = importlib.import_module("mega_rl.megatron.checkpoint.saving")
    save = saving.CheckpointWriter.save

    def changed(self: Any, step: int, engine: Any, progress: Any) -> None:
        if step == 2:
            self.finish()
            if is_every_rank or os.environ["RANK"] == "0":
                act(output_dir / "checkpoints" / "step_00000001")
        save(self, step, engine, progress)

    saving.CheckpointWriter.save = changed


def full_at(is_index: bool) -> Callable[[Path], None]:
    """The disk takes the first checkpoint, and of the second one what comes before the shards, or the index."""

    def act(first: Path) -> None:
        small = on_disk([first / name for name in SMALL_FILES])
        shards = on_disk(list(first.glob("megatron/*.distcp")))
        fill(first.parents[1], small + (shards if is_index else 8192))

    return lambda output_dir: before_second_save(output_dir, act)


def lose_shards(output_dir: Path) -> None:
    def act(_: Path) -> None:
        alone(lambda: mount(output_dir, "size=64m"))

    before_second_save(output_dir, act, is_every_rank=True)


def read_only_for_one(output_dir: Path) -> None:
    """From the moment when the configuration has been found to be right."""
    opening = importlib.import_module("mega_rl.stages.run.opening")
    take = opening.take_output

    def changed(*arguments: Any) -> Any:
        alone(lambda: remount_read_only(output_dir))
        return take(*arguments)

    opening.take_output = changed


# What is done to the output directory before the ranks begin, and in each of them.
SCENARIOS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "two_nodes_with_disks_of_their_own": (lambda _: None, lambda out: alone(lambda: mount(out, "size=64m"))),
    "read_only_for_one": (lambda _: None, read_only_for_one),
    "full": (lambda out: fill(out, 0), lambda _: None),
    "full_within_the_shards": (lambda _: None, full_at(is_index=False)),
    "full_at_the_index": (lambda _: None, full_at(is_index=True)),
    "shards_lost": (lambda _: None, lose_shards),
}


def rank(scenario: str, output_dir: Path, arguments: list[str]) -> None:
    visible.PATIENCE_S = 0.5
    answer = "finished"
    try:
        SCENARIOS[scenario][1](output_dir)
        importlib.import_module("tools.train").main(arguments)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the user would see
        answer = f"{type(error).__name__}: {error}"
    line = ANSWER + json.dumps([os.environ["RANK"], answer]) + "\n"
    os.write(1, line.encode())
    os._exit(0)  # the other rank says something too


def loopback_up() -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh14x", b"lo", 0x1 | 0x40))  # SIOCSIFFLAGS, IFF_UP | IFF_RUNNING
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def main() -> None:
    loopback_up()
    platform.select("cpu")
    conftest = importlib.import_module("tests.distributed.conftest")
    warm = importlib.import_module("tests.launching.warm")
    world = conftest.write_world(ROOT / "world")
    importlib.import_module("mega_rl.stages.sft")
    checkpoint = importlib.import_module("mega_rl.megatron.checkpoint.checkpoint")
    found = {}
    for number, name in enumerate(SCENARIOS):
        output_dir, log = ROOT / name, ROOT / f"{name}.log"
        mount(output_dir, "size=24m")
        SCENARIOS[name][0](output_dir)
        log.touch()
        overrides = ["trainer.total_steps=2", "checkpoint.save_freq=1", "checkpoint.export_hf=false"]
        overrides += [
            "data.val_files=[]",
            "validation.test_freq=-1",
            "logging.tensorboard=false",
            "optimizer.warmup_steps=0",
        ]
        overrides += [f"trainer.output_dir={output_dir}", f"checkpoint.async_save={name == 'shards_lost'}"]
        argv = (__file__, name, str(output_dir), "--config", str(world.sft), *overrides)
        request = warm.Request(argv, 2, 20000 + number, {**os.environ, "OMP_NUM_THREADS": "1"}, str(log))
        begin = time.monotonic()
        pid = os.fork()
        if pid == 0:
            os._exit(warm._launch(request))
        os.waitpid(pid, 0)
        seconds = time.monotonic() - begin
        lines = [json.loads(line.partition(ANSWER)[2]) for line in log.read_text().splitlines() if ANSWER in line]
        saved = output_dir / "checkpoints"
        found[name] = {
            "answers": dict(lines),
            "checkpoints": {path.name: checkpoint.damage(path) for path in sorted(saved.glob("step_*"))},
            "left": sorted(path.name for path in output_dir.iterdir()),
            "log": log.read_text(),
            "seconds": seconds,  # from the start of the ranks until both had ended
        }
    print(json.dumps(found))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        rank(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
    else:
        main()
