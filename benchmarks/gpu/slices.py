"""The slices of ``run.py``: ``python -m benchmarks.gpu.slices NAME [--quick] --out FILE``, a process each.

MEGA_RL_PLATFORM says which device. Weights are random and made on the device, so that no file of a model is needed. A
slice writes its file after every part of it.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import get_args

import torch.distributed as dist

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.parity import attention, cpu_step, kernels, losses, operators, step
from benchmarks.gpu.speed import logprob, memory, mfu
from benchmarks.gpu.transfer import offload, sync
from benchmarks.report import machine
from mega_rl import platform
from mega_rl.config.schema.device import Kernels
from mega_rl.megatron.policy import initialize_groups
from mega_rl.parallel.layout import ParallelLayout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the slice, such as logprob, mfu:7B or losses:device:bfloat16")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--kernels", choices=get_args(Kernels), default="torch", help="platform.kernels")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    here = platform.current()
    device = here.set_device(0)
    platform.use_kernels(arguments.kernels)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group(here.backend)
    layout = ParallelLayout.create(1)
    initialize_groups(layout, seed=0)
    bench = Bench(arguments.out, arguments.quick, device, layout)
    bench.document["machine"] = machine(here.name)
    kind, _, rest = arguments.name.partition(":")
    plain = {f.__name__: f for f in (operators, kernels, attention, step, logprob, sync, offload, memory, cpu_step)}
    try:
        if kind in plain:
            plain[kind](bench)
        elif kind == "mfu":
            mfu(bench, rest)
        else:
            losses(bench, rest.partition(":")[2])
    finally:
        bench.write()
    assert not {"vllm", "transformer_engine"} & set(sys.modules), "a slice measures the trainer alone"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
