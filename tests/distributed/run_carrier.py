"""Engines that die and stop while they have work: a steward, two engines on two nodes of Ray, a tiny model.

Started by ``test_carrier.py``. Steps 0 and 1 ask the same of the same weights, and so do steps 2 and 3 of others. In
step 1 an engine is killed, in step 3 one is stopped; both have work that they have not begun. Prints one line
``CHECK <name> 0 ok`` or what is wrong for each check.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from ray.cluster_utils import Cluster

from mega_rl import platform
from mega_rl.bridge.mapping.megatron import megatron_slices
from mega_rl.bridge.slices import Box, indices
from mega_rl.config.schema import RolloutConfig
from mega_rl.fleet import events
from mega_rl.fleet.engines import Limits
from mega_rl.fleet.steward import Steward
from mega_rl.fleet.tickets import Key, Rules
from mega_rl.models.shape import read_model_shape
from mega_rl.rollout.engine import Request
from mega_rl.rollout.remote import local_ray
from mega_rl.rollout.remote.carrier import RayCarrier
from mega_rl.rollout.remote.engine_process import EngineSpec
from mega_rl.rollout.remote.store_sink import StoreSink
from mega_rl.rollout.sinks import Weights
from tests.distributed.rollout_checks import MAX_MODEL_LEN, check
from tests.distributed.rollout_support import answer_of, hf_greedy, hf_weights, perturb, prompt, save, tiny_model
from tests.distributed.run_remote_engines import place

NUM_TOKENS = 24
RULES = Rules(num_groups=4, group_size=2, total_steps=4)
LIMITS = Limits(progress_s=10.0, start_s=1000.0, restarts=20)  # a slow machine may cost a life more
KILLED_IN, STOPPED_IN, NEW_WEIGHTS = 1, 3, 2  # steps, and the version that differs from the one before


def requests(key: Key, samples: Sequence[int]) -> list[Request]:
    """Sample 0 of every ticket is greedy; what is asked does not depend on the step."""
    question = prompt(key.ticket, 5 + key.ticket)
    return [
        Request(question, sample, seed=key.ticket, max_tokens=NUM_TOKENS, temperature=float(sample))
        for sample in samples
    ]


class World:
    def __init__(self, path: Path) -> None:
        self.model = tiny_model("qwen2", tied=False)
        save(self.model, path)
        shape = read_model_shape(path)
        self.slices = megatron_slices(shape, 1, 0, range(shape.num_layers), True, True, shape.vocab_size)
        rollout = RolloutConfig(placement="separate", num_engines=2, kv_cache_bytes=1 << 24)
        spec = EngineSpec(str(path), rollout, MAX_MODEL_LEN, "float32", "cpu", is_deterministic=False, num_threads=1)
        self.sink = StoreSink(Weights(shape, torch.float32, 1 << 16, torch.device("cpu")), 1, num_slots=2)
        self.sink.connect([self.slices])
        assert self.sink.store is not None
        self.carrier = RayCarrier(spec, 2, requests, self.sink.store, self.sink.stored)
        self.steward = Steward(RULES, LIMITS, range(2))
        self.told: list[Any] = []  # decisions and events, in their order
        self.batches: list[list[list[Any]]] = []  # by step and ticket
        self.expected: list[list[tuple[int, ...]]] = []  # by step and ticket: Hugging Face's greedy answer
        self.struck: dict[int, int] = {}  # step -> engine
        self.nodes: set[str] = set()

    def publish(self, version: int) -> None:
        if version == NEW_WEIGHTS:
            perturb(self.model, version, 0.05)
        shards = place(self.slices, dict(hf_weights(self.model)))

        def read(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
            return shards[local_name][indices(local_box)]

        self.sink.update(read, version)
        questions = [requests(Key(version, ticket), [0])[0].prompt for ticket in range(RULES.num_groups)]
        self.expected.append([hf_greedy(self.model, question, NUM_TOKENS) for question in questions])

    def run(self) -> None:
        self.publish(0)
        todo = self.steward.begin(time.monotonic())
        while not self.steward.has_ended:
            for event in [*self.do(todo), *self.carrier.events(0.2), events.Ticked()]:
                self.told.append(event)
                todo = [*todo, *self.steward.handle(event, time.monotonic())]
        self.do(todo)

    def do(self, todo: list[events.Decision]) -> list[events.Event]:
        """Carry decisions out; returns what is to be said of them at once."""
        found: list[events.Event] = []
        while todo:
            decision = todo.pop(0)
            self.told.append(decision)
            if isinstance(decision, events.Score):
                found.append(events.Scored(decision.key, is_kept=True))
            elif isinstance(decision, events.Deliver):
                self.batches.append([list(results) for _, results in decision.groups])
                self.publish(decision.step + 1)
                found.append(events.Published(decision.step + 1))
            elif isinstance(decision, events.Issue):
                self.issue(decision)
            elif isinstance(decision, events.Start | events.Kill | events.Load):
                self.carrier.carry(decision)
        return found

    def issue(self, decision: events.Issue) -> None:
        life, step = self.carrier._lives[decision.engine], decision.key.step
        self.nodes.add(life.node)
        (process,) = life.processes
        strikes = step in (KILLED_IN, STOPPED_IN) and step not in self.struck
        if strikes:
            self.struck[step] = decision.engine
            os.kill(process, signal.SIGSTOP)  # so that it cannot be done before it is struck
        self.carrier.carry(decision)
        if strikes and step == KILLED_IN:
            os.kill(process, signal.SIGKILL)


def everything_is_answered(world: World) -> None:
    assert [len(batch) for batch in world.batches] == [RULES.num_groups] * RULES.total_steps
    for step, batch in enumerate(world.batches):
        for ticket, results in enumerate(batch):
            where = step, ticket
            assert [r.prompt.index for r in results] == [ticket] * 2 and [r.sample_index for r in results] == [0, 1]
            assert {span.version for r in results for span in r.spans} == {step}, where
            assert answer_of(results[0]) == world.expected[step][ticket], where


def deaths_change_no_token(world: World) -> None:
    answers = [[answer_of(r) for results in batch for r in results] for batch in world.batches]
    assert answers[0] == answers[KILLED_IN] != answers[NEW_WEIGHTS] == answers[STOPPED_IN]


def both_were_replaced(world: World) -> None:
    """With the steward's reasons, and their work was given to others or to their next life."""
    kills = {(d.engine, d.why) for d in world.told if isinstance(d, events.Kill)}
    assert any(engine == world.struck[KILLED_IN] and "was gone while" in why for engine, why in kills), kills
    stopped = [why for engine, why in kills if engine == world.struck[STOPPED_IN]]
    assert any("10 s were not enough for it to go on with" in why for why in stopped), kills
    for step in world.struck:
        issues = [d for d in world.told if isinstance(d, events.Issue) and d.key.step == step]
        assert len(issues) > RULES.num_groups, f"step {step}: nothing was given out again"


def served_only_after_proof(world: World) -> None:
    """No life of an engine was given work before it had said that it holds these weights."""
    held: dict[tuple[int, int], int] = {}
    num_lives = len({(d.engine, d.life) for d in world.told if isinstance(d, events.Start)})
    assert num_lives >= 4
    for word in world.told:
        if isinstance(word, events.Loaded):
            held[word.engine, word.life] = word.version
        elif isinstance(word, events.Issue):
            assert held.get((word.engine, word.life)) == word.key.step, word


def versions_crossed_nodes(world: World) -> None:
    assert len(world.nodes) == 2, world.nodes


def main(path: Path) -> None:
    platform.select("cpu")
    settings = {"num_cpus": 1, "object_store_memory": local_ray.OBJECT_STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={**settings, "include_dashboard": False})
    cluster.add_node(**settings)
    os.environ["RAY_ADDRESS"] = cluster.address
    world = World(path)
    world.run()
    for body in (
        everything_is_answered,
        deaths_change_no_token,
        both_were_replaced,
        served_only_after_proof,
        versions_crossed_nodes,
    ):
        check(body.__name__, body, world)
    world.carrier.close()
    cluster.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
