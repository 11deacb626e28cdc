"""The scorer of every rank, and what is done about rewards that have no value."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing

import torch.distributed as dist

from mega_rl.config import RunConfig
from mega_rl.config.schema.sampling import RewardConfig, RewardWorkersConfig
from mega_rl.config.schema.sources import rewards_of
from mega_rl.errors import InputError, shown
from mega_rl.parallel.collectives import broadcast_object, gather_objects, together
from mega_rl.rewards.functions.images import Encoded
from mega_rl.rewards.functions.registry import needs_truth, part_name
from mega_rl.rewards.pool import node
from mega_rl.rewards.pool.dispatch import PoolError
from mega_rl.rewards.pool.nodes import MeetingAddress, NodePools, PoolOfNodes, lend
from mega_rl.rewards.pool.pool import Answers, Pool
from mega_rl.rewards.pool.worker import RAISED
from mega_rl.rewards.scorer import CollectiveReward, Scorer, start_workers, weighted
from mega_rl.rollout.collect.collect import GroupSummary
from mega_rl.rollout.collect.trajectory_store import TrajectoryStore
from mega_rl.types import Prompt, Score, TrajectorySummary

MAX_UNKNOWN_STEPS = 5  # in a row
MAX_SAMPLES_TOLD = 3  # per line


def scorer_of_node(
    rewards: Sequence[RewardConfig],
    workers: RewardWorkersConfig,
    collective: CollectiveReward | None = None,
    pictures: Mapping[str, Encoded] | None = None,
) -> Scorer:
    """A scorer on every rank; the ranks of a node use the workers of the first of them. Collective over all ranks.

    Args:
        collective, pictures: as `Scorer` has them.

    Raises:
        InputError: on every rank, what ``build_scorer`` raises on one.
    """
    if not rewards and collective is not None:
        return Scorer([], None, collective)
    machines = gather_objects(node.machine())
    rank = dist.get_rank() if dist.is_initialized() else 0
    here = [other for other, machine in enumerate(machines) if machine == machines[rank]]
    pool: Pool | None = None
    address: node.WorkerAddress | None = None
    with together("starting the reward workers"):
        names = weighted(rewards)
        if rank == here[0]:
            pool = start_workers(rewards, workers, len(here))
            address = node.offer(pool, len(here) - 1) if len(here) > 1 else None
    addresses = gather_objects(address)
    with together("reaching the reward workers"):
        if (found := addresses[here[0]]) is not None and pool is None:
            pool = node.reach(found, f"rank {here[0]}")
    assert pool is not None, "the block before this line raises or connects"
    return Scorer(names, pool, collective, pictures)


def share_nodes(scorer: Scorer, trajectory_store: TrajectoryStore) -> None:
    """Have rank 0 start scoring on all nodes, where it is the only one that does. Collective over all ranks.

    What engines handed to a rank is scored by the workers of that rank's node.

    Raises:
        InputError: nodes do not reach each other.
    """
    owners = node.owners_of(gather_objects(node.machine()))
    if len(owners) == 1 or scorer.pool is None:
        return
    rank, pools, own_pool = dist.get_rank(), None, scorer.pool

    def of_owned(number: int) -> Future[Answers]:
        return scorer.answers(trajectory_store.own(number), own_pool)

    if rank == 0:
        pools = NodePools(os.environ["MASTER_ADDR"])
    address: MeetingAddress = broadcast_object(None if pools is None else pools.address)
    with together("reaching the reward workers of other nodes"):
        try:
            if pools is not None:
                with closing(pools):
                    found = pools.meet(owners[1:], own_pool.takes_images)
                others = {owner: of_rank.submit_owned for owner, of_rank in zip(owners[1:], found, strict=True)}
                scorer.share(PoolOfNodes([own_pool, *found]), {0: of_owned, **others})
            elif rank in owners:
                scorer.on_close(lend(own_pool, address, rank, of_owned))
        except PoolError as error:
            raise InputError(str(error)) from error


def unknown_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """How many samples have no score, and how many values are unknown by cause; empty if all are known."""
    causes = Counter(unknown.cause for score in scores for unknown in score.unknown.values())
    if not causes:
        return {}
    counts = {f"reward/num_unknown/{cause}": float(count) for cause, count in causes.items()}
    return {"reward/num_unknown": float(sum(not score.is_known for score in scores))} | counts


def truth_is_needed(config: RunConfig, source: str) -> bool:
    """Whether a row of this data source without a ground truth is an error."""
    return needs_truth(rewards_of(config.rewards, source))


def check_sources(config: RunConfig, prompts: Iterable[Prompt], key: str) -> None:
    """
    Args:
        key: the configuration field that lists the files of the prompts, for messages.

    Raises:
        InputError: no reward scores a data source, and no environment either; or two of one name do.
    """
    for source in dict.fromkeys(prompt.data_source for prompt in prompts):
        rewards = rewards_of(config.rewards, source)
        names = [part_name(reward.name) for reward in rewards]
        if not names and config.environment.name is None:
            raise InputError(
                f"{key} has rows of the data source {shown(source)}, which no entry of rewards scores: add the source "
                f"to the list ``only`` of an entry, or add an entry for it, as {{name: NAME, only: [{source}]}}"
            )
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise InputError(
                f"rewards has {twice} twice for the data source {shown(source)}, and metrics go by name: let one of "
                "them name other sources in only"
            )


class RewardWatch:
    """Tells of unknown rewards, and ends a run in which nothing is known for `MAX_UNKNOWN_STEPS` steps in a row."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._steps_in_a_row = 0
        self._is_first = True

    def tell(self, summaries: Sequence[TrajectorySummary], scores: Sequence[Score]) -> None:
        """One line per reward and cause, with the samples and what happened to the first one."""
        found: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
        for summary, score in zip(summaries, scores, strict=True):
            sample = f"{summary.data_source} prompt {summary.prompt_index} sample {summary.sample_index}"
            for name, unknown in score.unknown.items():
                found[name, unknown.cause].append((sample, unknown.detail))
        for (name, cause), samples in found.items():
            listed = ", ".join(sample for sample, _ in samples[:MAX_SAMPLES_TOLD])
            rest = len(samples) - MAX_SAMPLES_TOLD
            more = f" and {rest} more" if rest > 0 else ""
            self._say(
                f"warning: the reward {name} is unknown ({cause}) for {len(samples)} of {len(scores)} samples: "
                f"{listed}{more}; on the first of them it {samples[0][1]}"
            )

    def check(self, groups: Sequence[GroupSummary]) -> None:
        """The same for a training step, whose groups are those of all ranks.

        Raises:
            InputError: no score has been known for `MAX_UNKNOWN_STEPS` steps, or a reward raised on every sample of the
                first one: no later one will fare better.
        """
        summaries = [summary for group in groups for summary in group.summaries]
        scores = [score for group in groups for score in group.scores]
        self.tell(summaries, scores)
        is_first, self._is_first = self._is_first and bool(scores), self._is_first and not scores
        if not scores or any(score.is_known for score in scores):
            self._steps_in_a_row = 0
            return
        causes = {unknown.cause for score in scores for unknown in score.unknown.values()}
        if is_first and causes == {RAISED}:
            name, unknown = next(iter(scores[0].unknown.items()))
            raise InputError(
                f"the reward {name} fails on all {len(scores)} samples of the first step: it {unknown.detail}"
            )
        self._steps_in_a_row += 1
        if self._steps_in_a_row >= MAX_UNKNOWN_STEPS:
            name, unknown = next(iter(scores[0].unknown.items()))
            raise InputError(
                f"no reward has been known for {MAX_UNKNOWN_STEPS} steps in a row: fix the reward {name}, which "
                f"{unknown.detail}"
            )
        self._say("warning: no reward of this step is known, so nothing is learnt from it")
