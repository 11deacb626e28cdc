"""Every rank is sent the tokens of its own share, and packs the same micro-batches as if it had the whole batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence as SequenceOf
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mega_rl.config.schema.sections import AlgorithmConfig
from mega_rl.data.packing import sequence_of
from mega_rl.evaluation.evaluate import AnsweredPrompt, EvaluationSettings, evaluate, summarized
from mega_rl.microbatch import Sequence
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.layout import EngineLayout, ParallelLayout
from mega_rl.parallel.rendezvous import Rendezvous
from mega_rl.parallel.sending import spread
from mega_rl.parallel.store import shared_store
from mega_rl.rollout.collect.collect import GroupSummary, PromptGroup, Quota, Round
from mega_rl.rollout.collect.replicas import collect_everywhere
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from mega_rl.rollout.engine import Ended, Request
from mega_rl.rollout.requests import make_requests
from mega_rl.stages.learn import learning
from mega_rl.stages.run.batch_share import BatchShare, denominators_of, pack_brought, pack_for_rank
from mega_rl.stages.sampling import rollout_metrics
from mega_rl.types import Prompt, RoutingShape, Score, Trajectory, TrajectorySummary, TrajectoryTokens
from tests.pretended.samplers import Modelless, answered
from tests.recorded.trajectories import two_turns

WORLD = 4
NUM_PROMPTS, NUM_SAMPLES = 6, 3
# The trainer's layout, and the ranks of one rollout engine.
LAYOUTS: dict[str, tuple[dict[str, int], int]] = {
    "data 2, tensor 2": ({"tensor": 2}, 2),
    "data 2, context 2, one engine for all": ({"context": 2}, 4),
    "data 2, pipeline 2": ({"pipeline": 2}, 1),
    "data 4": ({}, 2),
    "tensor 4": ({"tensor": 4}, 1),
}


def groups_of_all() -> list[PromptGroup]:
    """A batch as one rank would hold it: odd lengths, one trajectory of several turns, routes of some."""
    random = np.random.default_rng(0)
    groups = []
    for index in range(NUM_PROMPTS):
        prompt = Prompt(index, tuple(range(5, 7 + index)), f"prompt {index}", "7", "made")
        trajectories = []
        for number in range(NUM_SAMPLES):
            length = int(random.integers(1, 40))
            ids, logprobs = random.integers(0, 2**31, length).tolist(), random.normal(-1, 1, length).tolist()
            reason = "length" if number else "stop"
            one = Trajectory.single_turn(prompt, number, ids, logprobs, f"text {index} {number}", reason, index % 2)
            if index == 3:
                routed = random.integers(0, 200, (len(one.token_ids) - 1, 3, 1)).astype(np.uint8)
                one = dataclasses.replace(one, routed_experts=routed)
            trajectories.append(one)
        groups.append(PromptGroup(tuple(trajectories), tuple(map(Score, random.normal(size=NUM_SAMPLES).tolist()))))
    tools = two_turns()
    others = [dataclasses.replace(tools, sample_index=0), tools]
    return [*groups, PromptGroup(tuple(others), (Score(1.0), Score(float("nan"))))]


@contextmanager
def counted() -> Iterator[Callable[[], int]]:
    """How many bytes this rank has sent to single ranks, and as the source of broadcasts."""
    sent, isend, broadcast = [0], dist.isend, dist.broadcast

    def counting_isend(tensor: torch.Tensor, dst: int) -> Any:
        sent[0] += tensor.nbytes
        return isend(tensor, dst)

    def counting_broadcast(tensor: torch.Tensor, src: int, group: Any = None) -> None:
        sent[0] += tensor.nbytes * (dist.get_rank() == src) * (dist.get_world_size(group) - 1)
        broadcast(tensor, src=src, group=group)

    dist.isend, dist.broadcast = counting_isend, counting_broadcast  # type: ignore[assignment]
    try:
        yield lambda: sent[0]
    finally:
        dist.isend, dist.broadcast = isend, broadcast


def equal(a: Any, b: Any) -> bool:
    return a.equal(b) if isinstance(a, torch.Tensor) else a == b


def check(layout: ParallelLayout, engines: EngineLayout) -> int:
    """Returns the bytes that this rank sent for one batch."""
    rank, trajectory_store = dist.get_rank(), TrajectoryStore.open(layout, timeout_s=60)
    groups = groups_of_all()
    own = {
        ticket: GroupSummary(tuple(map(trajectory_store.add, group.trajectories)), group.scores)
        for ticket, group in enumerate(groups)
        if engines.replica_ranks(ticket % engines.num_replicas)[0] == rank
    }
    everywhere = {ticket: group for part in spread(own, engines.leaders()) for ticket, group in part.items()}
    batch = [everywhere[ticket] for ticket in range(len(groups))]
    samples = learning.with_advantages(batch, AlgorithmConfig())
    share = BatchShare(layout, rank, max_tokens=64, pad_multiple=4, pad_token_id=0, attention_slope=0.01)
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    sequences = [sequence_of(t, s.advantage) for t, s in zip(trajectories, samples, strict=True)]

    with counted() as sent:
        packed = learning.pack_samples(share, samples, trajectory_store)
        num_sent = sent()
        again = learning.pack_samples(share, samples[::-1], trajectory_store)
        moved = sum(gather_objects(sent() - num_sent))
        assert moved < sum(gather_objects(num_sent)), "tokens that are there are not sent again"
    for found, whole in ((packed, sequences), (again, sequences[::-1])):
        for one, expected in zip(found, pack_for_rank(share, whole), strict=True):
            names = [field.name for field in dataclasses.fields(one)]
            assert all(equal(getattr(one, name), getattr(expected, name)) for name in names)
    summaries = [sample.summary for sample in samples]
    assert sum(o.num_sampled for o in summaries) == denominators_of(sequences, 8).num_tokens
    few = learning.pack_samples(share, samples[:1], trajectory_store)
    assert len(few) == 1 and few[0].advantages is not None, "ranks without sequences take part"

    shown = trajectory_store.to_first(summaries[::2])
    assert shown == (trajectories[::2] if rank == 0 else []), "in order, and whole"
    first = trajectory_store.groups_to_first(batch[2:])
    assert [group.trajectories for group in first] == ([group.trajectories for group in groups[2:]] if first else [])
    assert str([group.scores for group in first]) == str([group.scores for group in groups[2:]] if rank == 0 else [])
    known = [sample for sample in samples if sample.score.is_known]
    metrics = rollout_metrics.sample_metrics(known)
    assert all(other == metrics for other in gather_objects(metrics))
    values = [t.sampled_logprobs.astype(np.float64) for t, s in zip(trajectories, samples, strict=True) if s in known]
    assert abs(metrics["rollout/entropy"] + np.concatenate(values).mean()) < 1e-12
    trajectory_store.drop(summaries)
    assert not trajectory_store._own and not trajectory_store._received and not any(trajectory_store._sent)
    return num_sent


def lengths_are_those_that_are_sent() -> None:
    for trajectory in (trajectory for group in groups_of_all() for trajectory in group.trajectories):
        summary = trajectory.summary()
        routed = trajectory.routed_experts
        assert summary.num_routing_bytes == (0 if routed is None else routed.nbytes)
        assert (summary.routing is None) == (routed is None)
        assert summary.routing is None or summary.routing == RoutingShape("uint8", 3, 1)


def a_reward_model_gets_its_share(layout: ParallelLayout) -> None:
    """Nothing but token ids of other lengths than the trainer's; one rank owns everything."""
    trajectory_store, rank = TrajectoryStore.open(layout, timeout_s=60), dist.get_rank()
    trajectories = [trajectory for group in groups_of_all() for trajectory in group.trajectories]
    summaries = trajectory_store.adopt(trajectories)
    share = BatchShare(layout, rank, max_tokens=64, pad_multiple=1, pad_token_id=0)

    def sequence(place: int, tokens: TrajectoryTokens) -> Sequence:
        ids = torch.from_numpy(tokens.token_ids.astype(np.int64))
        assert ids.tolist() == trajectories[place].token_ids.tolist()
        return Sequence(torch.cat([ids, ids[-1:]]), torch.ones(len(ids)))

    packed = pack_brought(share, summaries, [o.num_tokens for o in summaries], trajectory_store, sequence)
    seen = gather_objects(
        [i for m in packed for i in m.sequence_indices] if share.is_counted and share.is_last_stage else []
    )
    assert sorted(i for part in seen for i in part) == list(range(len(summaries)))


class EnginesElsewhere(Modelless):
    """Ends two responses in a step; like ``RemoteEngines`` it gives rank 0 the responses, the others the requests."""

    weight_version = 3

    def step(self) -> SequenceOf[Ended]:
        ended, self._under_way = self._under_way[:2], self._under_way[2:]
        return ended if dist.get_rank() else self.generate(ended)

    def answer(self, request: Request) -> Trajectory:
        return answered(request, [request.prompt.index, request.sample_index], [-1.0, -0.5], "", 3)


def engines_elsewhere_answer_rank_0_alone(layout: ParallelLayout) -> None:
    """Groups are sampled, dropped and replaced, and prompts evaluated, with all tokens on rank 0."""
    rank, engine, trajectory_store, store = (
        dist.get_rank(),
        EnginesElsewhere(),
        TrajectoryStore.open(layout, 60),
        shared_store(60),
    )
    engines, rendezvous = EngineLayout(WORLD, WORLD), Rendezvous(store, rank, WORLD)

    def draw(ticket: int) -> list[Request]:
        prompt = Prompt(10 + ticket, (1, 2), "", "", "made")
        return make_requests([prompt], n=3, step=0, seed=0, max_tokens=4, temperature=1.0)

    def score(trajectory: Trajectory) -> Future[Score]:
        assert rank == 0
        future: Future[Score] = Future()
        future.set_result(Score(float(trajectory.prompt.index % 2 * trajectory.sample_index)))  # every other is dropped
        return future

    quota = Quota(4, 4, 20, is_kept=lambda group: len({one.value for one in group.scores}) > 1)
    of_step = Round(0, quota, draw, score, store, rank == 0, dist.group.WORLD)
    shares = [list(range(4))]
    groups, *_ = collect_everywhere(engine, engines, of_step, shares, rendezvous, trajectory_store)  # type: ignore[arg-type]
    assert len(groups) == 8 and sum(quota.is_kept(group) for group in groups) == 4
    summaries = [summary for group in groups for summary in group.summaries]
    assert [(o.prompt_index, o.sample_index) for o in summaries] == [(10 + t, n) for t in range(8) for n in range(3)]
    assert {(o.owner, o.num_sampled, o.newest_version) for o in summaries} == {(0, 2, 3)}
    assert len(trajectory_store._own) == (len(summaries) if rank == 0 else 0)

    mine: list[AnsweredPrompt] = []
    settings = EvaluationSettings(engines, n=2, temperature=1.0, max_tokens=4, seed=0)
    scorer: Any = SimpleNamespace(start=score)
    prompts = [Prompt(index, (1, 2), "", "", "made") for index in range(3)]
    evaluate(engine, scorer, prompts, settings, mine.append, rendezvous)  # type: ignore[arg-type]
    rows = summarized(mine, engines, trajectory_store)
    assert [(row.summary.prompt_index, row.is_greedy) for row in rows] == [
        (i // n, n == 1) for n in (1, 2) for i in range(3 * n)
    ]
    assert all(other == rows for other in gather_objects(rows))
    dist.barrier()


def main() -> None:
    dist.init_process_group("gloo")
    lengths_are_those_that_are_sent()
    summaries: list[TrajectorySummary] = [t.summary() for group in groups_of_all() for t in group.trajectories]
    least = sum(o.num_token_bytes + -(-o.num_routing_bytes // 4) * 4 for o in summaries)
    for name, (sizes, engine_size) in LAYOUTS.items():
        layout = ParallelLayout.create(WORLD, **sizes)
        sent = sum(gather_objects(check(layout, EngineLayout(WORLD, engine_size))))
        copies = WORLD // layout.data  # of the ranks that learn from the same sequences
        # Once to a data-parallel rank, unless its first rank owns them, and from there to the others of its group.
        assert (copies - 1) * least <= sent <= copies * least, (name, sent, least)
        a_reward_model_gets_its_share(layout)
        engines_elsewhere_answer_rank_0_alone(layout)
        if dist.get_rank() == 0:
            print(f"ROUTED {name}: {sent} bytes of {least}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
