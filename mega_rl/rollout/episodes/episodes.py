"""Episodes in place of responses: a sampler that lets environments answer between the turns of the model.

Every turn is a request of its own to the engine: all tokens so far are its prompt, which the engine's prefix cache
mostly has. No turn waits for another episode's: the next one is submitted as soon as the environment has answered. The
seed of a turn follows from its episode's and its number, so neither the speed of tools nor that of engines changes a
token.

Environments live with the first rank of an engine, its leader, in an event loop in a thread of its own. The leader
tells the other ranks what to submit next, before the same step of the engine.
"""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from operator import itemgetter
from queue import Empty, SimpleQueue
from typing import Any

from mega_rl.environments.episode import Episode
from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel.collectives import broadcast_list, broadcast_object
from mega_rl.rollout.engine import Ended, ProbedSampler, Request
from mega_rl.rollout.episodes.episode_tokens import Conversation, EpisodePlan, Next
from mega_rl.rollout.episodes.waiting_threads import WaitingThreads
from mega_rl.types import Prompt, Trajectory

CLOSE_S = 10.0  # for environments that are cancelled
MAX_WAIT_S = 0.5  # for environments, where no turn is being sampled: the other ranks wait in a collective meanwhile

Key = tuple[int, int]  # of one episode among those under way: its prompt and sample, or its number and 0


@dataclass(frozen=True)
class _Said:
    """What the leader found out: the next turn of an episode, or its end."""

    key: Key
    next: Next | None  # None: it has ended


@dataclass
class _UnderWay:
    """One episode, on every rank."""

    number: int  # of submission
    request: Request
    num_turns: int = 0  # that were submitted
    conversation: Conversation | None = None  # on the leader
    answered: asyncio.Future[Trajectory] | None = None  # on the leader: what the turn under way is waited for with
    ended: Future[Episode] | None = None  # on the leader


def turn_seed(seed: int, turn: int) -> int:
    """The seed of one turn of an episode, in [0, 2**63); that of its first turn is the episode's own."""
    if turn == 0:
        return seed
    digest = hashlib.blake2b(f"turn-v1|{seed}|{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class EpisodeSampler:
    """A ``Sampler`` whose responses are whole episodes: trajectories of several turns, sampled by another sampler.

    ``max_tokens`` of a request is the limit of all turns and replies together. Whatever an environment does, its
    episode ends: with a failure if it must.
    """

    def __init__(
        self,
        engine: ProbedSampler,
        plan: EpisodePlan,
        is_leader: bool = True,
        ranks: Any = None,
        is_numbered: bool = False,
    ) -> None:
        """
        Args:
            engine: samples the turns; nobody else submits to it while episodes are under way.
            is_leader: whether this is the engine's first rank, which runs the environments.
            ranks: process group of the engine's ranks, if it has several.
            is_numbered: a sample of a prompt may be under way several times, for several steps. The engine is then
                given numbers of episodes in place of those of prompts.
        """
        self._is_numbered = is_numbered
        self._engine, self._plan, self._is_leader, self._ranks = engine, plan, is_leader, ranks
        self._under_way: dict[Key, _UnderWay] = {}
        self._with_environment: set[Key] = set()  # episodes of which no turn is under way; the same on all ranks
        self._num_submitted = 0
        self._events: SimpleQueue[_Said] = SimpleQueue()  # from the event loop
        self._loop: asyncio.AbstractEventLoop | None = None
        self._slots = asyncio.Semaphore(plan.workers)

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    @property
    def num_unfinished(self) -> int:
        return len(self._under_way)

    def check(self, requests: Sequence[Request]) -> None:
        self._engine.check(requests)

    def first_logprobs(
        self, prompt_ids: Sequence[int], temperature: float, with_adapter: bool = True
    ) -> list[dict[int, float]]:
        return self._engine.first_logprobs(prompt_ids, temperature, with_adapter)

    def submit(self, requests: Sequence[Request]) -> None:
        self.enter(requests)

    def enter(self, requests: Sequence[Request]) -> list[int]:
        """``submit``; returns the episodes' numbers, which ``numbered_step`` gives back with them."""
        self.check(requests)
        first = self._num_submitted
        for request in requests:
            key = (self._num_submitted, 0) if self._is_numbered else (request.prompt.index, request.sample_index)
            assert key not in self._under_way, f"sample {key[1]} of prompt {key[0]} is under way twice"
            one = self._under_way[key] = _UnderWay(self._num_submitted, request)
            self._num_submitted += 1
            self._with_environment.add(key)
            if self._is_leader:
                self._begin(key, one)
        return list(range(first, self._num_submitted))

    def step(self) -> Sequence[Ended]:
        return [one for _, one in self.numbered_step()]

    def numbered_step(self) -> list[tuple[int, Ended]]:
        """``step``, with the numbers of the episodes that have ended, ascending."""
        ended: list[tuple[int, Ended]] = []
        if self._with_environment:
            said = self._told() if self._is_leader else []
            requests: list[Request] = []
            for one in said if self._ranks is None else broadcast_list(said, self._ranks):
                self._with_environment.remove(one.key)
                if one.next is None:
                    ended.append(self._end(one.key))
                else:
                    requests.append(self._next_request(one.key, one.next))
            self._engine.submit(requests)
        if self._engine.num_unfinished:
            for turn in self._engine.step():
                self._with_environment.add((turn.prompt.index, turn.sample_index))
                if isinstance(turn, Trajectory) and self._is_leader:
                    self._hand_over(turn)
        return sorted(ended, key=itemgetter(0))

    def generate(self, requests: Sequence[Request]) -> list[Trajectory]:
        """As ``Sampler.generate``; every rank of the engine has the trajectories, so it is for few of them."""
        assert not self._under_way, "generation while other episodes are under way"
        self.submit(requests)
        found: dict[Key, Ended] = {}
        while self._under_way:
            found |= {(one.prompt.index, one.sample_index): one for one in self.step()}
        if self._ranks is not None:
            found = broadcast_object(found, self._ranks)
        ended = [found[request.prompt.index, request.sample_index] for request in requests]
        return [one for one in ended if isinstance(one, Trajectory)]

    def close(self) -> None:
        """End the event loop; environments of episodes under way are cancelled and closed."""
        if self._loop is None:
            return
        loop, self._loop = self._loop, None

        async def cancel() -> None:
            others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
            for task in others:
                task.cancel()
            if others:
                await asyncio.wait(others, timeout=CLOSE_S)

        asyncio.run_coroutine_threadsafe(cancel(), loop).result()
        loop.call_soon_threadsafe(loop.stop)

    def anew(self) -> EpisodeSampler:
        """Another one in its place, with no episode under way; this one is closed. The engine's turns go on."""
        self.close()
        return EpisodeSampler(self._engine, self._plan, self._is_leader, self._ranks, self._is_numbered)

    def _begin(self, key: Key, one: _UnderWay) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._loop.set_default_executor(WaitingThreads())
            threading.Thread(target=self._loop.run_forever, name="environments", daemon=True).start()

        async def sample(wanted: Next) -> Trajectory:
            one.answered = asyncio.get_running_loop().create_future()
            self._events.put(_Said(key, wanted))
            return await one.answered

        one.conversation = Conversation(self._plan, one.request, sample)
        one.ended = asyncio.run_coroutine_threadsafe(one.conversation.run(self._slots), self._loop)
        one.ended.add_done_callback(lambda _: self._events.put(_Said(key, None)))

    def _told(self) -> list[_Said]:
        """What has come from the environments since the last call; waits a little if the engine has nothing to do."""
        said: list[_Said] = []
        try:
            if self._engine.num_unfinished == 0:
                with HEART.waiting("the environments", is_for_ranks=False):
                    said.append(self._events.get(timeout=MAX_WAIT_S))
                HEART.mark()
            while True:
                said.append(self._events.get_nowait())
        except Empty:
            return said

    def _next_request(self, key: Key, wanted: Next) -> Request:
        one = self._under_way[key]
        request, turn = one.request, one.num_turns
        one.num_turns += 1
        prompt = Prompt(key[0], tuple(wanted.token_ids.tolist()), "", "", request.prompt.data_source)
        seed = turn_seed(request.seed, turn)
        return replace(request, prompt=prompt, sample_index=key[1], seed=seed, max_tokens=wanted.max_tokens, turn=turn)

    def _hand_over(self, turn: Trajectory) -> None:
        """A turn to the episode that waits for it."""
        answered = self._under_way[turn.prompt.index, turn.sample_index].answered
        assert self._loop is not None and answered is not None, "a turn that no episode asked for"
        self._loop.call_soon_threadsafe(answered.set_result, turn)

    def _end(self, key: Key) -> tuple[int, Ended]:
        """Its number of submission, and the trajectory, on the leader."""
        one = self._under_way.pop(key)
        if one.conversation is None or one.ended is None:
            return one.number, one.request
        return one.number, one.conversation.trajectory(one.ended.result(), self.weight_version)
