"""What engines in other processes are checked for; two trainer ranks, and two engines of one worker each.

Started by ``test_remote_engines.py``. Every rank prints one line ``CHECK <name> <rank> ok`` or what is wrong. The
trainer ranks hold Megatron's shards of a tiny model, tensor parallel 2, without a Megatron around them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from mega_rl import platform
from mega_rl.bridge.mapping.megatron import ModelChunk, Shard, megatron_slices
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.mapping.vllm import vllm_series, vllm_slices
from mega_rl.bridge.reshard.execute import TransferCount
from mega_rl.bridge.reshard.proof import LoadProof, Proof
from mega_rl.bridge.slices import Box, Slice, indices
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.models.shape import read_model_shape
from mega_rl.observe.heartbeat import HEART, Wait
from mega_rl.parallel.collectives import together
from mega_rl.rollout.engine import Request, whole
from mega_rl.rollout.remote.engine_process import EngineProcess, EngineSpec
from mega_rl.rollout.remote.engines import RemoteEngines
from mega_rl.rollout.remote.sink import RemoteSink
from mega_rl.rollout.requests import make_requests
from mega_rl.rollout.sinks import SentWeights
from mega_rl.rollout.temperature_probe import probe_prompt
from mega_rl.types import Trajectory
from tests.distributed.rollout.rollout_checks import LONG, MAX_MODEL_LEN, check
from tests.launching.launch import MARK, marked
from tests.launching.listening import open_to_others
from tests.models.rollout_support import answer_of, hf_greedy, hf_weights, perturb, prompt, save, tiny_model
from tests.pretended.tokens import measured_temperatures

NUM_ENGINES = 2
NUM_TOKENS = 12
PROMPTS = [prompt(0, 5), prompt(1, LONG)]  # the second fills two blocks of the prefix cache; one prompt per engine


class Trainer:
    """One rank's shards of a Hugging Face model, and the engines that are given them."""

    def __init__(self, model: PreTrainedModel, path: Path) -> None:
        self.model, self.rank = model, dist.get_rank()
        self.shape = shape = read_model_shape(path)
        size = dist.get_world_size()
        layers = range(shape.num_layers)
        self.slices = [megatron_slices(shape, ModelChunk(layers, Shard(rank, size))) for rank in range(size)]
        self.wanted = vllm_slices(shape, 1, 0)
        rollout = RolloutConfig(placement="separate", num_engines=NUM_ENGINES, kv_cache_bytes=1 << 24)
        spec = EngineSpec(str(path), rollout, MAX_MODEL_LEN, "float32", "cpu", is_deterministic=False, num_threads=1)
        self.engines = RemoteEngines(spec, NUM_ENGINES)
        self.sink = RemoteSink(self.engines, SentWeights(shape, torch.float32, 1 << 16, torch.device("cpu")))
        self.shards = place(self.slices[self.rank], dict(hf_weights(model)))
        load = LoadProof(hf_tensors(shape), self.slices[self.rank], [vllm_series(shape, 1, 0)], 1, self.read)
        assert self.sink.obstacle(load) is None
        self.sink.connect(self.slices)

    def read(self, local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
        return self.shards[local_name][indices(local_box)]

    def run(self) -> TransferCount:
        """This rank's part of a sync of the model's present weights."""
        self.shards = place(self.slices[self.rank], dict(hf_weights(self.model)))
        return self.sink._send(self.read)

    def push(self, version: int) -> TransferCount:
        self.shards = place(self.slices[self.rank], dict(hf_weights(self.model)))
        return self.sink.update(self.read, version)

    def keep_prefixes(self, keep: bool) -> None:
        """Make the reset of the engines' prefix caches do nothing, or work again; collective."""
        with together("reaching into the engines"):
            fleet = self.engines.fleet
            if fleet is not None:
                fleet._ray.get([w.__ray_call__.remote(replace_reset, keep) for w in fleet._workers])

    def greedy(self) -> list[Trajectory]:
        return self.engines.generate(
            make_requests(PROMPTS, n=1, step=0, seed=0, max_tokens=NUM_TOKENS, temperature=0.0)
        )


def place(slices: list[Slice], full: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The local parameters that these slices make up; what no slice covers is zero."""
    ends: dict[str, list[list[int]]] = defaultdict(list)
    for piece in slices:
        ends[piece.local_name].append([end for _, end in piece.local_box])
    local = {name: torch.zeros([max(sizes) for sizes in zip(*boxes, strict=True)]) for name, boxes in ends.items()}
    for piece in slices:
        local[piece.local_name][indices(piece.local_box)] = full[piece.hf_name][indices(piece.hf_box)]
    return local


def copies(parameters: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in parameters.items()}


def replace_reset(process: EngineProcess, keep: bool) -> None:
    llm = process.engine._llm
    if keep:
        llm.reset_prefix_cache = lambda: True
    else:
        del llm.reset_prefix_cache


def abandon(process: EngineProcess) -> int:
    process.engine.abandon()
    return process.engine.num_unfinished


def flip_a_bit(parameters: dict[str, torch.Tensor], name: str, is_meant: bool) -> None:
    parameters[name].view(torch.int32)[3] ^= is_meant


def temperature_is_probed(trainer: Trainer) -> None:
    """Of every engine, the second one included, which has no weights before the first push."""
    trainer.push(0)
    found = measured_temperatures(trainer.engines, probe_prompt(trainer.shape.vocab_size))
    assert len(found) == NUM_ENGINES and all(value is not None and abs(value - 2) < 1e-3 for value in found), found


def equals_hf(trainer: Trainer) -> None:
    for trajectory in trainer.greedy():
        expected = hf_greedy(trainer.model, trajectory.prompt, NUM_TOKENS)
        assert answer_of(trajectory) == expected, trajectory.prompt.index


def every_parameter_is_the_trainers(trainer: Trainer) -> None:
    """Bit for bit, in both engines, before and after new weights; rows of padding are left out."""
    for version in (1, 2):
        perturb(trainer.model, version, 0.05)
        trainer.push(version)
        full = dict(hf_weights(trainer.model))
        for live in trainer.sink.inspect(copies, [()] * NUM_ENGINES).values():
            assert live.keys() == {piece.local_name for piece in trainer.wanted}
            for piece in trainer.wanted:
                ours = full[piece.hf_name][indices(piece.hf_box)]
                assert torch.equal(live[piece.local_name][indices(piece.local_box)], ours), piece


def bytes_are_the_minimum(trainer: Trainer) -> None:
    transfer_count = trainer.push(3)
    needed = 4 * sum(tensor.numel() for _, tensor in hf_weights(trainer.model)) * NUM_ENGINES
    sent = torch.tensor(transfer_count.bytes_sent)
    dist.all_reduce(sent)
    assert (int(sent), transfer_count.bytes_local, transfer_count.bytes_received) == (needed, 0, 0), (
        sent,
        needed,
        transfer_count,
    )
    assert transfer_count.num_buckets > 1


def output_follows_the_weights(trainer: Trainer) -> None:
    """Greedy answers are Hugging Face's before and after a sync, for a prompt whose prefix was cached before it."""
    equals_hf(trainer)
    before = [answer_of(trajectory) for trajectory in trainer.greedy()]
    perturb(trainer.model, 4, 0.05)
    trainer.push(4)
    equals_hf(trainer)
    after = trainer.greedy()
    assert all(answer_of(new) != old for new, old in zip(after, before, strict=True)), "the same answers"
    assert [trajectory.newest_version for trajectory in after] == [4, 4] and trainer.engines.weight_version == 4


def kept_prefixes_are_wrong(trainer: Trainer) -> None:
    """Without the reset the long prompt's answer is a mixture of two policies: the check above would see it."""
    trainer.keep_prefixes(True)
    perturb(trainer.model, 5, 0.05)
    trainer.push(5)
    trainer.keep_prefixes(False)
    long = trainer.greedy()[1]
    assert answer_of(long) != hf_greedy(trainer.model, long.prompt, NUM_TOKENS)
    trainer.push(6)
    equals_hf(trainer)


def flipped_bit_is_found(trainer: Trainer) -> None:
    """The proof passes, and after one bit of one engine has changed it names tensor and engine on every rank."""
    held, engine = trainer.slices[trainer.rank], [vllm_series(trainer.shape, 1, 0)]
    proof = Proof(hf_tensors(trainer.shape), held, engine, NUM_ENGINES, is_sample=False, seed=0)
    assert proof.check(trainer.read, trainer.sink.inspect, version=6) > 10
    trainer.sink.inspect(flip_a_bit, [("model.norm.weight", worker == 1) for worker in range(NUM_ENGINES)])
    try:
        proof.check(trainer.read, trainer.sink.inspect, version=6)
    except RuntimeError as error:
        assert "the engine on rank 1 holds another model.norm.weight" in str(error), error
    else:
        raise AssertionError("the flipped bit was not noticed")
    trainer.push(7)
    equals_hf(trainer)


def responses_come_as_they_end(trainer: Trainer) -> None:
    """Submitted bit by bit, the responses are those of one batch, and an engine with less to do is done before.

    Rank 0 has the responses; the other ranks know which requests they answer.
    """
    requests = make_requests(PROMPTS, n=2, step=1, seed=3, max_tokens=NUM_TOKENS, temperature=1.0)
    expected = {(t.prompt.index, t.sample_index): answer_of(t) for t in trainer.engines.generate(requests)}
    trainer.engines.submit(requests[:2])
    found = list(trainer.engines.step())
    trainer.engines.submit(requests[2:])
    while trainer.engines.num_unfinished:
        found += trainer.engines.step()
    assert {(one.prompt.index, one.sample_index) for one in found} == expected.keys() and len(found) == 4
    if dist.get_rank() == 0:
        assert {(t.prompt.index, t.sample_index): answer_of(t) for t in whole(found)} == expected
    else:
        assert all(isinstance(one, Request) for one in found), "no tokens are sent to those who do not learn from them"


def dropped_work_leaves_no_trace(trainer: Trainer) -> None:
    """Engines that drop what they have in hand, as for the next trainer, sample the same afterwards."""
    requests = make_requests(PROMPTS, n=2, step=1, seed=3, max_tokens=NUM_TOKENS, temperature=1.0)
    expected = [answer_of(trajectory) for trajectory in trainer.engines.generate(requests)]
    with together("dropping work"):
        if (fleet := trainer.engines.fleet) is not None:
            fleet.call("submit", [(requests,)] * NUM_ENGINES, "taking requests")
            fleet.call("advance", [(1,)] * NUM_ENGINES, "sampling")
            assert fleet.results([worker.__ray_call__.remote(abandon) for worker in fleet._workers], "dropping") == [
                0,
                0,
            ]
    assert [answer_of(trajectory) for trajectory in trainer.engines.generate(requests)] == expected


def stopped_engine_is_known(trainer: Trainer) -> None:
    """While an engine is stopped, a watch over rank 0 can tell which one it waits for; then the engine goes on."""
    requests = make_requests(PROMPTS, n=1, step=2, seed=3, max_tokens=NUM_TOKENS, temperature=1.0)
    waits: list[Wait | None] = []

    def awaited(victim: int) -> Wait:
        return Wait(f"rollout engine 1, worker 0 (process {victim}), sampling", is_for_ranks=False)

    def look(victim: int) -> None:
        deadline = time.monotonic() + 100
        while HEART.wait != awaited(victim) and time.monotonic() < deadline:
            time.sleep(0.05)
        waits.append(HEART.wait)
        os.kill(victim, signal.SIGCONT)

    with together("stopping"):
        if trainer.engines.fleet is not None:
            victim = trainer.engines.fleet._process_ids[1]
            os.kill(victim, signal.SIGSTOP)
            watch = threading.Thread(target=look, args=(victim,))
            watch.start()
    assert len(trainer.engines.generate(requests)) == len(requests)
    if trainer.engines.fleet is not None:
        watch.join()
        assert waits == [awaited(victim)], waits


def dead_engine_is_named(trainer: Trainer) -> None:
    """An engine that is killed while a sync goes on ends the sync, and every later call, on both ranks; none hangs."""
    trainer.sink._begin()
    with together("killing"):
        if trainer.engines.fleet is not None:
            victim = trainer.engines.fleet._process_ids[1]
            os.kill(victim, signal.SIGKILL)
    begin = time.monotonic()
    for action in (trainer.run, trainer.greedy, trainer.sink._begin):
        try:
            action()
        except RuntimeError as error:
            expected = ["rollout engine 1, worker 0" if action != trainer.run or trainer.rank == 0 else "the weights"]
            if action == trainer.greedy:  # the other engine, amid an update for ever, may be the first to answer
                expected.append("rollout engine 0, worker 0")
            assert any(part in str(error) for part in expected), error
        else:
            raise AssertionError(f"{action.__name__} went on with a dead engine")
    assert time.monotonic() - begin < 120, "that took the patience of a collective"


def nobody_else_can_connect(trainer: Trainer) -> None:
    """All sockets of this launch are at loopback: trainer ranks, Ray, engines, the group of both; torchrun's is not."""
    if trainer.rank == 0:
        launch = os.environ[MARK]
        ours = [process for process in marked(launch) if process.pid != os.getppid()]
        names = {process.name() for process in ours}
        assert len(ours) > 2 + NUM_ENGINES and {"gcs_server", "raylet"} <= names, names
        assert open_to_others(ours) == []


CHECKS = (
    temperature_is_probed,
    every_parameter_is_the_trainers,
    nobody_else_can_connect,
    bytes_are_the_minimum,
    output_follows_the_weights,
    kept_prefixes_are_wrong,
    responses_come_as_they_end,
    dropped_work_leaves_no_trace,
    flipped_bit_is_found,
    stopped_engine_is_known,
    dead_engine_is_named,
)


def main(path: Path) -> None:
    platform.select("cpu")
    dist.init_process_group("gloo")
    model = tiny_model("qwen2", tied=False)
    with together("saving the model"):
        if dist.get_rank() == 0:
            save(model, path)
    trainer = Trainer(model, path)
    for body in CHECKS:
        check(body.__name__, body, trainer)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
