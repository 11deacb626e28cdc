"""What the trainer's ranks put into the weight store: two ranks, tensor parallel 2, a tiny model.

Started by ``test_weight_store.py``. Every rank prints one line ``CHECK <name> <rank> ok`` or what is wrong.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.bridge.lora import Factors, merged
from mega_rl.bridge.mapping.adapter import adapter_series, adapter_tensors, names_of
from mega_rl.bridge.mapping.megatron import ModelChunk, Shard, megatron_series
from mega_rl.bridge.mapping.tensors import hf_tensors, roles
from mega_rl.bridge.mapping.tuning import AdapterPlan
from mega_rl.bridge.outgoing.merge import LoraMerge
from mega_rl.bridge.series import slices_of
from mega_rl.bridge.slices import Box, indices, num_elements, whole_box
from mega_rl.errors import InputError
from mega_rl.fleet.tickets import held_out
from mega_rl.models.shape import parse_config
from mega_rl.parallel.collectives import broadcast_object, gather_objects
from mega_rl.rollout.remote import weight_store
from mega_rl.rollout.remote.fleet.store_sink import StoreSink
from mega_rl.rollout.remote.weight_store import RewrittenError, Store, StoredVersion, take
from mega_rl.rollout.sinks import SentWeights
from tests.distributed.bridge.test_bridge_execute import local_parameters
from tests.distributed.rollout.remote.run_remote_engines import place
from tests.distributed.rollout.rollout_checks import check
from tests.models.families import FILES

SHAPE = parse_config(FILES.config("qwen3"), "qwen3")
CHANGING = frozenset({"model.layers.1.self_attn.q_proj.weight"})
QKV = "model.layers.1.self_attn.qkv_proj."


class World:
    """The ranks' shards, and a store for engines of so many workers."""

    def __init__(self, engine_size: int, num_here: int | None, changing: frozenset[str] | None = None) -> None:
        self.rank = dist.get_rank()
        layers = range(SHAPE.num_layers)
        self.sources = [megatron_series(SHAPE, ModelChunk(layers, Shard(rank, 2))) for rank in range(2)]
        weights = SentWeights(SHAPE, torch.float32, 1 << 14, torch.device("cpu"), changing)
        self.sink = StoreSink(weights, engine_size, num_slots=2, num_here=num_here, has_validation=True)
        self.sink.connect(self.sources)

    def full(self, version: int) -> dict[str, torch.Tensor]:
        """Of every version, tensors of its own; what does not change is that of version 0."""
        names = {s.hf_name: s for rank in self.sources for s in slices_of(rank)}
        changing = self.sink._weights.changing
        return {name: _random(name, version if changing is None or name in changing else 0) for name in names}

    def put(self, version: int, exact: bool = False) -> None:
        shards = place(slices_of(self.sources[self.rank]), self.full(version))

        def read(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
            return shards[local_name][indices(local_box)]

        self.transfer_count = self.sink.update(read, version, exact)

    def live(self, worker: int) -> dict[str, torch.Tensor]:
        """Parameters of an engine's worker, with rows of padding and rubbish in them."""
        places = [part.places for part in self.sink.form.plan(worker).parts]
        sizes = {name: list(found.size) for of_part in places for name, found in of_part.items()}
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            sizes[name][0] += 15
        return {name: torch.full(size, 7.0) for name, size in sizes.items()}


def _random(name: str, version: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(name.encode()) * 1000 + version)
    return torch.randn(hf_tensors(SHAPE)[name], generator=generator)


def versions_arrive(engine_size: int, num_here: int) -> None:
    """Another process of the node takes both versions, bit for bit; a third one takes the place of the first.

    The weights of a validation have a place of their own, which those of the next one take.
    """
    world = World(engine_size, num_here)
    for version in range(3):
        world.put(version)
        if version < 2:
            world.put(version, exact=True)
    assert world.sink.weight_version == 2
    location, stored = broadcast_object((world.sink.store and world.sink.store.location, world.sink.stored))
    assert sorted(stored) == [held_out(1), 1, 2], "two slots, and that of validations"
    store = Store(world.sink.form, location)  # as an engine's process attaches
    for version in stored:
        full = world.full(held_out(version) if version < 0 else version)
        for worker in range(engine_size):
            live = world.live(worker)
            take(store, worker, store.form.slot(version), stored[version].of(worker), live)
            for piece in slices_of(world.sink.form.workers[worker]):
                ours = full[piece.hf_name][indices(piece.hf_box)]
                assert torch.equal(live[piece.local_name][indices(piece.local_box)], ours), piece
    dist.barrier()


def every_byte_is_written_once() -> None:
    world = World(engine_size=2, num_here=2)
    world.put(0)
    written = sum(found.bytes_local for found in gather_objects(world.transfer_count))
    needed = 4 * sum(found.numel() for found in world.full(0).values())
    norms = 4 * (SHAPE.num_layers * (2 * SHAPE.hidden_size + 2 * SHAPE.head_dim) + SHAPE.hidden_size)
    assert written == needed + norms, "each worker has all norms, and half of the rest"
    assert world.transfer_count.bytes_sent == world.transfer_count.num_buckets == 0, "nothing is sent"


def only_what_changes_is_written(num_here: int) -> None:
    """Once everything is there; a part that shares a parameter with what changes is written too."""
    world = World(1, num_here, CHANGING)
    moved = []
    for version in range(4):
        world.put(version)
        moved.append(sum(part.bytes_local + part.bytes_sent for part in gather_objects(world.transfer_count)))
    changing = [s for s in slices_of(world.sink.form.workers[0]) if ".qkv_proj." in s.local_name]
    num_changing = 4 * sum(num_elements(piece.hf_box) for piece in changing)
    assert moved[0] > moved[1] == moved[2] == moved[3] == num_changing, (moved, num_changing)
    if world.rank == 0:
        store = world.sink.store
        assert len(store.form.plan(0).slot.places) == SHAPE.num_layers, "q's series is of all layers"
        live = world.live(0)
        first = take(store, 0, store.form.slot(2), world.sink.stored[2].of(0), live)
        assert first == moved[0] and live[f"{QKV}weight"].equal(store.parameters(0, 2)[f"{QKV}weight"])
        then = take(store, 0, store.form.slot(3), world.sink.stored[3].of(0), live, has_fixed=True)
        assert then == num_changing and live[f"{QKV}weight"].equal(store.parameters(0, 3)[f"{QKV}weight"])


def engines_add_adapters(num_here: int) -> None:
    """Later versions bring factors alone; an engine that has added them holds the bits of the trainer's own sums."""
    linear = [name for name, role in roles(SHAPE).items() if role == "linear"]
    plan = AdapterPlan(dict.fromkeys(linear, 2), alpha=3.0)
    sizes, rank = adapter_tensors(SHAPE, plan), dist.get_rank()
    sources = [megatron_series(SHAPE, ModelChunk(range(SHAPE.num_layers), Shard(one, 2))) for one in range(2)]
    changing = frozenset(plan.ranks)
    weights = SentWeights(SHAPE, torch.bfloat16, 1 << 14, torch.device("cpu"), changing, merged=plan)
    sink = StoreSink(weights, 2, num_slots=2, num_here=num_here)
    with_adapters = [[*held, *adapter_series(held, plan)] for held in sources]
    sink.connect(with_adapters)
    base = {name: _random(name, 0).bfloat16() for name in hf_tensors(SHAPE)}
    live, moved = [dict[str, torch.Tensor]() for _ in range(2)], list[int]()
    for version in range(3):
        factors = {name: torch.full(size, 0.5 * version).bfloat16() for name, size in sizes.items()}
        factors |= {name: tensor * torch.arange(1, len(tensor) + 1)[:, None] for name, tensor in factors.items()}
        whole = {name: Factors(*(factors[part] for part in names_of(name)), plan.scale(2)) for name in plan.ranks}
        placed = place(slices_of(with_adapters[rank]), base | factors)
        shards = {name: tensor.bfloat16() for name, tensor in placed.items()}

        def read(local_name: str, hf_name: str, hf_box: Box, local_box: Box, shards: Any = shards) -> torch.Tensor:
            return shards[local_name][indices(local_box)]

        merge = LoraMerge(lambda whole=whole: whole, read, torch.bfloat16)  # type: ignore[misc]
        count = sink.update(merge.for_sync(read, version).read, version)
        moved.append(sum(one.bytes_local + one.bytes_sent for one in gather_objects(count)))
        location, stored = broadcast_object((sink.store and sink.store.location, sink.stored))
        sums = base | {name: merged(base[name], own, whole_box(base[name].shape)) for name, own in whole.items()}
        store = Store(sink.form, location)
        for worker, series in enumerate(sink.form.workers):
            wanted = local_parameters(slices_of(series), sums, torch.bfloat16)
            live[worker] = live[worker] or {name: torch.full_like(tensor, 7.0) for name, tensor in wanted.items()}
            take(store, worker, store.form.slot(version), stored[version].of(worker), live[worker], version > 0)
            assert all(torch.equal(live[worker][name], tensor) for name, tensor in wanted.items()), version
        dist.barrier()  # the next version takes a place that was read
    of_factors = sum(
        num_elements(piece.hf_box) for worker in range(2) for piece in slices_of(sink.form.factors(worker))
    )
    assert moved[0] > 2 * moved[1] and moved[1:] == [2 * of_factors] * 2, (moved, of_factors)


def other_bytes_are_refused() -> None:
    """A bit that has changed in memory, a version that has been written over, and parameters of another shape."""
    world = World(1, 2)
    world.put(0)
    if world.rank == 0:
        store, stored = world.sink.store, world.sink.stored[0]
        store.parameters(0, 0)["model.norm.weight"].view(torch.int32)[3] ^= 1
        live = world.live(0)
        words = refusal(RuntimeError, store, stored, live)
        assert "holds another model.norm.weight than version 0" in words, words
        live["model.norm.weight"] = torch.zeros(5)
        words = refusal(InputError, store, stored, live)
        assert "cannot be written in place: model.norm.weight" in words, words
    old = world.sink.stored.copy()
    dist.barrier()  # what follows writes over what was just looked at
    world.put(2)
    if world.rank == 0:
        assert sorted(world.sink.stored) == [2]
        refusal(RewrittenError, store, old[0], world.live(0))


def refusal(kind: type[Exception], store: Store, stored: StoredVersion, live: dict[str, torch.Tensor]) -> str:
    try:
        take(store, 0, store.form.slot(stored.version), stored.of(0), live)
    except kind as error:
        return str(error)
    raise AssertionError("taken")


def host_without_room_is_refused() -> None:
    """Before anything is allocated, in one sentence, on every rank."""
    available, weight_store.available_bytes = weight_store.available_bytes, lambda: 1000
    try:
        World(1, 2)
    except InputError as error:
        assert "the weight store takes 0.0 GB" in str(error) and "this host has 0.0 GB left" in str(error), error
    else:
        raise AssertionError("no error")
    finally:
        weight_store.available_bytes = available


def nodes_of_several_sizes() -> None:
    """Rank 1 has a neighbour on a node of its own: where the store is says rank 0's launcher."""
    given = os.environ["LOCAL_WORLD_SIZE"]
    os.environ["LOCAL_WORLD_SIZE"] = str(1 + dist.get_rank())
    try:
        world = World(2, None)
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = given
    assert (world.sink.store is not None) == (world.rank == 0), "a store of another node is none of ours"
    world.put(0)
    sent = gather_objects(world.transfer_count.bytes_sent)
    assert sent[0] == 0 < sent[1], sent


def main() -> None:
    platform.select("cpu")
    dist.init_process_group("gloo")
    for engine_size in (1, 2):
        for num_here in (2, 1):
            check(f"versions_arrive_{engine_size}_{num_here}", versions_arrive, engine_size, num_here)
    for num_here in (2, 1):
        check(f"only_what_changes_is_written_{num_here}", only_what_changes_is_written, num_here)
        check(f"engines_add_adapters_{num_here}", engines_add_adapters, num_here)
    bodies = (every_byte_is_written_once, other_bytes_are_refused, host_without_room_is_refused, nodes_of_several_sizes)
    for body in bodies:
        check(body.__name__, body)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
