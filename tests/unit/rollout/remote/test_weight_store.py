"""What a version costs to tell of: the form that travels once, and the arguments of loads."""

from __future__ import annotations

import pickle
import re
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor

from mega_rl.bridge.mapping.adapter import adapter_tensors
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.mapping.tuning import AdapterPlan
from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.bridge.series import having, slices_of, with_neighbours
from mega_rl.errors import InputError
from mega_rl.models.shape import parse_config
from mega_rl.rollout.remote.fleet.node_agent import chunks_of
from mega_rl.rollout.remote.weight_store import Store, check_room, take
from mega_rl.rollout.store_form import ALIGNMENT, StoreForm
from tests.distributed.bridge.test_bridge_execute import local_parameters
from tests.models.families import CONTRACT
from tests.pretended.adapted_model import AdaptedModel, adapted_form
from tests.pretended.engine_process import sealed

ENGINE_SIZE = 2
SHAPE = parse_config(CONTRACT.config("qwen3_moe"), "qwen3_moe")
MANY = replace(SHAPE, num_layers=12)


def form_of(shape: Any, **other: Any) -> StoreForm:
    workers = tuple(tuple(vllm_series(shape, ENGINE_SIZE, rank)) for rank in range(ENGINE_SIZE))
    return StoreForm(workers, torch.bfloat16, num_slots=2, salt=1, **other)


def test_a_form_travels_without_what_follows_from_it() -> None:
    form = form_of(MANY)
    before = len(pickle.dumps(form))
    store = Store(form)
    assert len(pickle.dumps(store.form)) == before < 20_000
    found = pickle.loads(pickle.dumps(store.form))
    assert found == form and found.plan(1).slot.places == form.plan(1).slot.places
    store.close()


@pytest.mark.parametrize("shape", [SHAPE, MANY])
def test_what_a_worker_is_told_of_a_version_does_not_grow_with_the_model_or_the_engine(shape: Any) -> None:
    store = Store(form_of(shape))
    store.parameters(1, 1)["model.norm.weight"].fill_(1.0)
    stored = sealed(store, 1)
    told = [len(pickle.dumps((store.location_of(1), stored.of(worker)))) for worker in range(ENGINE_SIZE)]
    assert max(told) < 400, told
    assert stored.of(0).proofs != stored.of(1).proofs, "each is told of its own part"
    store.close()


def test_parameters_that_change_nowhere_lie_there_once() -> None:
    whole = form_of(MANY)
    changing = tuple(
        tuple(with_neighbours(of_worker, having(of_worker, {"model.layers.3.self_attn.q_proj.weight"})))
        for of_worker in whole.workers
    )
    form = form_of(MANY, changing=changing)
    plan, everything = form.plan(0), whole.plan(0).slot
    assert {name.rsplit(".", 2)[1] for name in plan.slot.places} == {"qkv_proj"}, "what the layers' q shares with k, v"
    assert plan.fixed.places.keys() | plan.slot.places.keys() == everything.places.keys()
    assert plan.num_bytes(4) < everything.num_bytes * 2 < whole.plan(0).num_bytes(4)


@pytest.mark.parametrize("way", ["slots", "sums", "factors"])
def test_a_version_of_adapters_moves_what_they_are_and_no_base_weights(way: str) -> None:
    """To a node whole slots, and to an engine what its worker's slot has; the base is there once."""
    shape = parse_config(CONTRACT.config("qwen3"), "qwen3")
    plan = AdapterPlan({name: 16 for name in hf_tensors(shape) if ".q_proj." in name})
    factors = adapter_tensors(shape, plan)
    form = adapted_form(shape, plan, ENGINE_SIZE, way)
    together = {n: size for n, size in hf_tensors(shape).items() if n.split(".")[-2] in ("q_proj", "k_proj", "v_proj")}
    wanted = together if way == "sums" else factors
    hashed = {hf_name for plan in form.plans for _, hf_name in plan.slot.numbers}
    assert hashed == (factors if way == "slots" else together).keys(), "what shares a parameter with the sums too"
    to_worker = [sum(2 * prod(place.size) for place in plan.slot.places.values()) for plan in form.plans]
    least = sum(2 * prod(size) for size in wanted.values()) / ENGINE_SIZE
    assert all(least <= num_bytes <= 2 * least for num_bytes in to_worker), (to_worker, least)
    to_node = sum(stop - start for _, start, stop in chunks_of(form, is_fixed=False))
    assert to_node == sum(plan.slot.num_bytes - ALIGNMENT for plan in form.plans)
    later = {one.hf_name for one in form.later(0)}
    assert later == {re.sub(r"\.layers\.\d+\.", ".layers.{layer}.", name) for name in wanted}
    base = sum(2 * prod(size) for size in hf_tensors(shape).values())
    assert sum(stop - start for _, start, stop in chunks_of(form, is_fixed=True)) + to_node >= base


def test_weights_that_change_otherwise_beside_an_adapter_bring_sums() -> None:
    """Where both are in one parameter of the engine; where they are not, they come beside the factors."""
    shape = parse_config(CONTRACT.config("qwen3"), "qwen3")
    plan = AdapterPlan({name: 4 for name in hf_tensors(shape) if ".q_proj." in name})
    norm, beside = "model.norm.weight", "model.layers.0.self_attn.k_proj.weight"
    form = adapted_form(shape, plan, ENGINE_SIZE, "factors", [norm])
    assert form.merged and norm in form.plan(0).slot.places and norm not in form.plan(0).fixed.places
    form = adapted_form(shape, plan, ENGINE_SIZE, "factors", [beside])
    assert form == adapted_form(shape, plan, ENGINE_SIZE, "sums", [beside]) and not form.merged


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_an_engine_that_adds_adapters_holds_the_bits_of_the_sums(family: str) -> None:
    """In all versions, and in stacked experts too, whose adapters have another rank."""
    model = AdaptedModel(parse_config(CONTRACT.config(family), family), ENGINE_SIZE)
    store, form = model.store, model.form
    live = [local_parameters(slices_of(series), None, torch.bfloat16) for series in form.workers]
    before = list[dict[str, Tensor]]()
    for version in range(3):
        stored, wanted = model.put(version)
        for worker, of_worker in enumerate(wanted):
            plan = form.plan(worker)
            num_bytes = take(store, worker, form.slot(version), stored.of(worker), live[worker], has_fixed=version > 0)
            equal = {
                n: torch.equal(live[worker][n].view(torch.int16), t.view(torch.int16)) for n, t in of_worker.items()
            }
            assert all(equal.values()), equal
            frozen = sum(tensor.nbytes for name, tensor in of_worker.items() if name in plan.merges)
            factors = sum(2 * prod(place.size) for place in plan.slot.places.values())
            assert not version or num_bytes == frozen + factors
        if version:
            changed = {name for name, tensor in wanted[0].items() if not torch.equal(tensor, before[0][name])}
            assert changed == {name for name, merges in form.plan(0).merges.items() if merges}
        before = wanted
    name = next(merge.a for merges in form.plan(1).merges.values() for merge in merges)
    store.parameters(1, 2)[name].view(torch.int16)[0, 0] ^= 1
    with pytest.raises(RuntimeError, match=r"holds another .* than version 2 .*\(1 tensors differ\)"):
        take(store, 1, form.slot(2), stored.of(1), live[1], has_fixed=True)
    store.close()


def test_a_node_without_room_is_told_what_it_needs() -> None:
    form = form_of(SHAPE, has_validation=True)
    with pytest.raises(InputError, match=r"\(3 versions of 0.0 GB\).*lower rollout.max_staleness, set data.val_files"):
        check_room(form, 0, form.all_slots)
    with pytest.raises(InputError, match=r"\(2 versions of 0.0 GB\), and this host has 0.0 GB left: set rollout.dtype"):
        check_room(form, 0, 2)
    check_room(form, 10**9, 2)
