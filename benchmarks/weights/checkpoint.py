"""Checkpoints written by all ranks against one writer.

    torchrun --nproc-per-node 4 -m benchmarks.weights.checkpoint [--repeats N] [--json PATH]

All ranks are data-parallel, so that each holds the same weights and a share of the optimizer state. In turn, in the
same run: a save as the trainer does it, and a load of it; a save for which the state is gathered and rank 0 writes
everything. Every file is synced to disk, and removed afterwards.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.report import publish, table
from mega_rl import platform
from mega_rl.bridge.files.torch_dist.manifest import WEIGHTS

platform.select("cpu")

from mega_rl.bridge.files.huggingface import HFReader  # noqa: E402
from mega_rl.config import RunConfig  # noqa: E402
from mega_rl.megatron.checkpoint import checkpoint, writers  # noqa: E402
from mega_rl.megatron.checkpoint.saving import CheckpointWriter  # noqa: E402
from mega_rl.megatron.engine import MegatronEngine, Optimization  # noqa: E402
from mega_rl.megatron.optim.optimizer import chained  # noqa: E402
from mega_rl.megatron.policy import MegatronPolicy, initialize_groups  # noqa: E402
from mega_rl.models.shape import read_model_shape  # noqa: E402
from mega_rl.parallel.collectives import broadcast_object  # noqa: E402
from mega_rl.parallel.layout import ParallelLayout  # noqa: E402
from mega_rl.stages.models.trainer import trainer_spec  # noqa: E402
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer  # noqa: E402
from mega_rl.synthetic.tiny_model import TinyModelSpec, write_tiny_model  # noqa: E402

WAYS = ("all ranks", "one writer")
STATE_BYTES = 16  # per parameter: float32 weight, its master copy and two moments


def build(model: Path) -> MegatronEngine:
    config = RunConfig()
    config.trainer.stage, config.model.dtype = "sft", "float32"
    layout = ParallelLayout.of(config.parallel, dist.get_world_size())
    initialize_groups(layout, 0, 600.0)
    shape, reader = read_model_shape(model), HFReader(model)
    policy = MegatronPolicy(trainer_spec(config), shape, layout, torch.device("cpu"))
    return MegatronEngine(policy, reader, Optimization(config.optimizer, 10))


def with_one_writer(engine: MegatronEngine) -> Callable[[], None]:
    """Megatron's own way of 'fully_reshardable', and nothing shared out; returns what undoes it."""
    share = writers.determine_main_replica_uniform_distribution
    writers.determine_main_replica_uniform_distribution = lambda *_: None
    writers.distribute_main_replicas_with_precomputed_distribution, distribute = (
        lambda *_: None,
        writers.distribute_main_replicas_with_precomputed_distribution,
    )
    own = [part.__dict__.pop("sharded_param_state_fully_reshardable") for part in chained(engine.optimizer)]

    def undo() -> None:
        writers.determine_main_replica_uniform_distribution = share
        writers.distribute_main_replicas_with_precomputed_distribution = distribute
        for part, method in zip(chained(engine.optimizer), own, strict=True):
            part.sharded_param_state_fully_reshardable = method

    return undo


def save(root: Path, way: str, engine: MegatronEngine) -> tuple[float, list[int]]:
    """Seconds, and the bytes that each rank has written."""
    undo = with_one_writer(engine) if way == "one writer" else lambda: None
    dist.barrier()
    begin = time.monotonic()
    CheckpointWriter(root, 0, is_async=False).save(1, engine, {"data": {}, "validations": {}})
    dist.barrier()
    seconds = time.monotonic() - begin
    undo()
    shards = checkpoint.directory_of(root, 1) / WEIGHTS
    sizes = [sum(p.stat().st_size for p in shards.glob(f"__{rank}_*")) for rank in range(dist.get_world_size())]
    return seconds, sizes


def load(root: Path, engine: MegatronEngine) -> float:
    dist.barrier()
    begin = time.monotonic()
    found, _ = checkpoint.find(root, "auto")
    assert found is not None
    checkpoint.load(found, engine)
    dist.barrier()
    return time.monotonic() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=500, help="of state")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--work-dir", type=Path, help="on the file system to measure (default: the temporary one)")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    dist.init_process_group(platform.current().backend)
    is_first = dist.get_rank() == 0
    work = Path(broadcast_object(tempfile.mkdtemp(dir=arguments.work_dir) if is_first else None))
    if is_first:
        # 8 layers: attention 3 h^2, gated MLP 12 h^2
        hidden = round((arguments.megabytes * 1e6 / STATE_BYTES / (8 * 15)) ** 0.5 / 64) * 64
        spec = TinyModelSpec(hidden_size=hidden, num_layers=8, ffn=4 * hidden)
        write_tiny_model(work / "model", spec, arithmetic_tokenizer())
    dist.barrier()
    engine = build(work / "model")
    seconds: dict[str, list[float]] = {way: [] for way in (*WAYS, "load")}
    sizes: dict[str, list[int]] = {}
    for number in range(arguments.repeats):
        for way in WAYS:
            took, sizes[way] = save(work / f"{number}", way, engine)
            seconds[way].append(took)
            if way == "all ranks":
                seconds["load"].append(load(work / f"{number}", engine))
            dist.barrier()
            if is_first:
                shutil.rmtree(work / f"{number}")
            dist.barrier()
    if is_first:
        shutil.rmtree(work)
        report(sizes, seconds, arguments.json)
    dist.destroy_process_group()


def report(sizes: dict[str, list[int]], seconds: dict[str, list[float]], path: Path | None) -> None:
    median = {name: statistics.median(values) for name, values in seconds.items()}
    rows = [
        [way, sum(sizes[way]) / 1e6, max(sizes[way]) / (sum(sizes[way]) / len(sizes[way])), median[way]] for way in WAYS
    ]
    text = table(["save", "MB", "largest writer / mean", "seconds"], rows)
    text += f"\n\nload by all ranks, every byte hashed: {median['load']:.3g} s"
    results = {"bytes": sizes, "seconds": seconds, "median_s": median}
    publish(f"Checkpoint of {dist.get_world_size()} data-parallel ranks", text, "cpu", results, path)


if __name__ == "__main__":
    main()
