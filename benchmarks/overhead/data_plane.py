"""Sampled tokens on their way to the ranks that learn from them, and what a step of a large job costs besides.

    torchrun --nproc-per-node 4 -m benchmarks.overhead.data_plane [--responses N] [--tokens N] [--slices N] [--quick]
        [--json F]

Ranks 0 and 2 sample, each for an engine of two ranks; the trainer has two data-parallel ranks of two tensor-parallel
ones. Three ways from there to packed micro-batches, in turn on each slice of the batch:
- lists: every rank gets the whole batch as lists of Python's numbers, and makes tensors of all of it.
- whole: the same with arrays.
- routed: what a run does. Every rank gets the summaries; a data-parallel rank gets the tokens of its own share.
Sent: bytes of one copy of the batch, with all that is said about it. Moved: bytes into all four ranks together.
Resident: how much the rank that holds most has grown, its micro-batches left out. All per response token of the batch.

Then rank 0 of a job of 1,024 ranks, with torch's fake process group, whose collectives move nothing: the CPU seconds of
everything that a step does with the summaries of the whole batch, all of which come from this rank. Copying the tokens
themselves is told apart. The latency of a network is not in it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import pickle
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.report import publish, table
from mega_rl.config.schema.sections import AlgorithmConfig
from mega_rl.data.packing import sequence_of
from mega_rl.microbatch import Microbatch, Sequence
from mega_rl.observe.metrics.declared import Metrics
from mega_rl.parallel.collectives import gather_objects, join_world
from mega_rl.parallel.layout import EngineLayout, ParallelLayout
from mega_rl.parallel.sending import spread
from mega_rl.rollout.collect.collect import GroupSummary
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from mega_rl.stages.learn import learning
from mega_rl.stages.run.batch_share import BatchShare, pack_for_rank
from mega_rl.stages.sampling import rollout_metrics
from mega_rl.stages.score.scoring import RewardWatch
from mega_rl.types import Prompt, Sample, Score, Trajectory, TrajectorySummary

STEP_S = 60.0
NUM_PROMPT, GROUP = 200, 16  # tokens of a prompt, samples of it
WORLD, MODEL_RANKS = 1024, 8  # of the job that is simulated: ranks, and those that learn from the same sequences
WAYS = ("lists", "whole", "routed")
HEADER = ["way", "bytes sent", "bytes moved", "bytes resident", "seconds", "CPU seconds of all ranks"]


def trajectory(number: int, num_tokens: int, random: np.random.Generator) -> Trajectory:
    prompt = Prompt(number // GROUP, tuple(range(NUM_PROMPT)), "", "", "made")
    ids, logprobs = random.integers(0, 150_000, num_tokens), random.normal(-1, 1, num_tokens)
    return Trajectory.single_turn(prompt, number % GROUP, ids.tolist(), logprobs.tolist(), "", "stop", 0)


class World:
    """Four ranks, of which two have sampled."""

    def __init__(self, num_tokens: int) -> None:
        self.rank, self.num_tokens = dist.get_rank(), num_tokens
        layout, self.engines = ParallelLayout.create(4, tensor=2), EngineLayout(4, 2)
        self.share = BatchShare(layout, self.rank, 8 * (NUM_PROMPT + num_tokens), 1, 0)
        self.trajectory_store = TrajectoryStore.open(layout, timeout_s=600)
        self.sent, self.moved = 0, 0  # bytes of what this rank owns, and bytes into this rank

    def sampled(self, first: int, count: int) -> dict[int, Trajectory]:
        """The slice's trajectories that this rank owns."""
        random, half = np.random.default_rng(first + self.rank), count // 2
        if self.engines.tensor_rank(self.rank):
            return {}
        begin = first + half * self.engines.replica(self.rank)
        return {number: trajectory(number, self.num_tokens, random) for number in range(begin, begin + half)}

    def lists(self, own: dict[int, Trajectory]) -> Any:
        columns = {number: (t.token_ids.tolist(), t.logprobs.tolist(), t.num_sampled) for number, t in own.items()}
        everything = self._gathered(columns)

        def sequence(ids: list[int], logprobs: list[float], num_sampled: int) -> Sequence:
            mask = torch.zeros(len(ids) - 1)
            mask[-num_sampled:] = 1
            return Sequence(torch.tensor(ids), mask, mask * 0.5, torch.tensor(logprobs[1:]))

        sequences = [sequence(*everything[number]) for number in sorted(everything)]
        return everything, sequences, pack_for_rank(self.share, sequences)

    def whole(self, own: dict[int, Trajectory]) -> Any:
        everything = self._gathered(own)
        sequences = [sequence_of(everything[number], 0.5) for number in sorted(everything)]
        return everything, sequences, pack_for_rank(self.share, sequences)

    def routed(self, own: dict[int, Trajectory]) -> Any:
        with self._counted():
            parts = spread({number: self.trajectory_store.add(t) for number, t in own.items()}, self.engines.leaders())
            summaries: dict[int, TrajectorySummary] = {
                number: summary for part in parts for number, summary in part.items()
            }
            own_outlines = [summaries[number] for number in own]
            self.sent = sum(o.num_token_bytes for o in own_outlines) + len(pickle.dumps(own_outlines))
            samples = [Sample(summaries[number], Score(1.0), 0.5) for number in sorted(summaries)]
            return summaries, samples, learning.pack_samples(self.share, samples, self.trajectory_store)

    def _gathered(self, own: dict[int, Any]) -> dict[int, Any]:
        self.sent = len(pickle.dumps(own)) if own else 0
        largest = max(gather_objects(self.sent))
        self.moved += largest * (dist.get_world_size() - 1)  # every rank's value is padded to the largest
        return {number: one for part in gather_objects(own) for number, one in part.items()}

    @contextmanager
    def _counted(self) -> Iterator[None]:
        irecv, broadcast = dist.irecv, dist.broadcast

        def counting_irecv(tensor: torch.Tensor, src: int) -> Any:
            self.moved += tensor.nbytes
            return irecv(tensor, src)

        def counting_broadcast(tensor: torch.Tensor, src: int, group: Any = None) -> None:
            self.moved += tensor.nbytes * (self.rank != src)
            broadcast(tensor, src=src, group=group)

        dist.irecv, dist.broadcast = counting_irecv, counting_broadcast  # type: ignore[assignment]
        try:
            yield
        finally:
            dist.irecv, dist.broadcast = irecv, broadcast


def resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def sizes_of(microbatches: list[Microbatch]) -> int:
    tensors = [value for m in microbatches for value in vars(m).values() if isinstance(value, torch.Tensor)]
    return sum(tensor.nbytes for tensor in tensors)


def compare(num_responses: int, num_tokens: int, num_slices: int) -> dict[str, list[float]]:
    """Way -> [bytes sent, moved and resident, seconds, CPU seconds], the bytes per token."""
    world, per_slice = World(num_tokens), num_responses // num_slices
    found = {way: [0.0] * 5 for way in WAYS}
    for number in range(num_slices):
        for way in WAYS:
            own = world.sampled(number * per_slice, per_slice)
            before, world.moved = resident() - sum(_nbytes(t) for t in own.values()), 0
            dist.barrier()
            begin, cpu = time.perf_counter(), time.process_time()
            held = getattr(world, way)(own)
            seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
            grown = resident() - before - sizes_of(held[-1])
            everywhere = gather_objects((world.sent, world.moved, grown, seconds, cpu))
            sent, moved, grown_of_all, seconds_of_all, cpu_of_all = zip(*everywhere, strict=True)
            tokens = per_slice * num_tokens * num_slices
            figures = [sum(sent) / tokens, sum(moved) / tokens, max(grown_of_all) / tokens]
            figures += [max(seconds_of_all), sum(cpu_of_all)]
            found[way] = [total + part for total, part in zip(found[way], figures, strict=True)]
            if way == "routed":
                world.trajectory_store.drop(held[0].values())
            del held, own
    return found


def _nbytes(one: Trajectory) -> int:
    return one.token_ids.nbytes + one.loss_mask.nbytes + one.logprobs.nbytes


def control_plane(num_responses: int, num_tokens: int) -> tuple[dict[str, float], float]:
    """CPU seconds of rank 0 of a large job for all but the tokens, by what is done; and for copying the tokens."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    layout = ParallelLayout.create(WORLD, tensor=MODEL_RANKS)
    trajectory_store, share = (
        TrajectoryStore(layout, 0, dist.group.WORLD),
        BatchShare(layout, 0, 8 * (NUM_PROMPT + num_tokens), 1, 0),
    )
    random, found = np.random.default_rng(0), dict[str, float]()
    lengths = random.integers(1, 2 * num_tokens, num_responses).tolist()
    some = {length: trajectory(0, length, random) for length in sorted(lengths)[:: max(1, num_responses // 64)]}
    nearest = sorted(some)
    sampled = [some[nearest[int(np.searchsorted(nearest, n, "right")) - 1]] for n in lengths]

    def timed(what: str, work: Callable[[], Any]) -> Any:
        begin = time.process_time()
        result = work()
        found[what] = time.process_time() - begin
        return result

    def summarized() -> dict[int, GroupSummary]:
        numbers = range(0, num_responses, GROUP)
        scores = tuple(Score(float(i % 2), {"exact_match": float(i % 2)}) for i in range(GROUP))
        return {n: GroupSummary(tuple(map(trajectory_store.add, sampled[n : n + GROUP])), scores) for n in numbers}

    own = timed("summaries of what was sampled", summarized)
    groups = list(timed("summaries to all ranks", lambda: spread(own, [0]))[0].values())
    data = pickle.dumps([own], protocol=5)
    timed("the same on another rank", lambda: pickle.loads(data))
    timed("looking at the rewards", lambda: RewardWatch(print).check(groups))
    samples = timed("advantages", lambda: learning.with_advantages(groups, AlgorithmConfig()))
    summaries = [sample.summary for sample in samples]
    plan = timed("which rank learns from what", lambda: share.plan([o.num_tokens - 1 for o in summaries]))
    parts = [[summaries[i] for indices in of_rank for i in indices] for of_rank in plan]
    copying = _Stopwatch(trajectory_store._pack)
    trajectory_store._pack = copying  # type: ignore[method-assign]
    timed("sends and receives", lambda: trajectory_store.bring(parts))
    found["sends and receives"] -= copying.seconds
    timed("metrics", lambda: rollout_metrics.sample_metrics(samples))
    timed("times of all ranks", lambda: Metrics().merge(gather_objects(Metrics())))
    timed("forgetting", lambda: trajectory_store.drop(summaries))
    dist.destroy_process_group()
    return found, copying.seconds


class _Stopwatch:
    """A function that counts the CPU seconds of its calls."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function, self.seconds = function, 0.0

    def __call__(self, *arguments: Any) -> None:
        begin = time.process_time()
        self._function(*arguments)
        self.seconds += time.process_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description="Sampled tokens on their way to the trainer.")
    parser.add_argument("--responses", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4000, help="of a response")
    parser.add_argument("--slices", type=int, default=16, help="parts of the batch, one after the other")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    size = (128, 100, 2) if arguments.quick else (arguments.responses, arguments.tokens, arguments.slices)
    torch.set_num_threads(1)
    join_world("gloo", timeout_s=1800)
    ways = compare(*size)
    is_first = dist.get_rank() == 0
    dist.destroy_process_group()
    if not is_first:
        return
    seconds, copying = control_plane(*size[:2])
    total = sum(seconds.values())
    rows = [[what, 1000 * value] for what, value in [*seconds.items(), ("all of it", total), ("tokens", copying)]]
    text = table(HEADER, [[way, *row] for way, row in ways.items()]) + (
        f"\n\nRank 0 of {WORLD:,} with {size[0]:,} responses: {100 * total / STEP_S:.2f} % of a step of "
        f"{STEP_S:.0f} s\n\n"
    )
    text += table(["what", "CPU ms"], rows)
    results = {"ways": ways, "control_plane_s": seconds, "copying_s": copying, "size": size}
    publish("Data plane", text, "cpu", results, arguments.json)


if __name__ == "__main__":
    main()
