"""Our calls of vLLM against what its covered versions have, recorded in ``vllm_signatures``; nothing is imported."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
from abc import ABC, abstractmethod
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_rl.bridge.mapping.vllm import vllm_slices
from mega_rl.models.shape import parse_config
from mega_rl.rollout import receiver
from mega_rl.rollout.vllm.start import versions as vllm_versions
from mega_rl.rollout.vllm.start.versions import TransferMethods, parameter_name, start_arguments
from tests.contract.vllm_signatures import record
from tests.contract.vllm_signatures.uses import WORKER, Call, Use, uses
from tests.contract.vllm_signatures.wheel import Package
from tests.models import families

OLDEST, NEWEST = "0.23.0", "0.32.0"
ASCEND = "vllm_ascend-0.23.0"
TRANSFER = "vllm.distributed.weight_transfer.base"
VERSIONS = pytest.mark.parametrize("version", [OLDEST, NEWEST])


@cache
def recorded(name: str) -> dict[str, Any]:
    return json.loads((record.HERE / f"{name}.json").read_text(encoding="utf-8"))


def names(version: str) -> dict[str, Any]:
    return recorded(f"vllm-{version}")["names"]


def signature(entry: dict[str, Any]) -> inspect.Signature:
    kinds = {
        "positional": inspect.Parameter.POSITIONAL_OR_KEYWORD,
        "args": inspect.Parameter.VAR_POSITIONAL,
        "keyword": inspect.Parameter.KEYWORD_ONLY,
        "kwargs": inspect.Parameter.VAR_KEYWORD,
    }
    found = []
    for parameter in entry["parameters"]:
        is_single = parameter["kind"] in ("positional", "keyword")
        default = None if parameter["optional"] and is_single else inspect.Parameter.empty
        found.append(inspect.Parameter(parameter["name"], kinds[parameter["kind"]], default=default))
    return inspect.Signature(found)


def binds(entry: dict[str, Any], call: Call) -> bool:
    bind = signature(entry).bind_partial if call.is_open else signature(entry).bind
    try:
        bind(*[None] * call.num_positional, **dict.fromkeys(call.keywords))
    except TypeError:
        return False
    return True


def faults(found: list[Use], entries: dict[str, Any]) -> list[str]:
    """Uses of names that a version lacks, and calls that it would not take."""
    lacking = [f"{use.where}: no {use.path}" for use in found if entries[use.path] is None and not use.is_optional]
    calls = [(use, use.call, entries[use.path]) for use in found if use.call is not None]
    refused = [
        f"{use.where}: {use.path} does not take {call}"
        for use, call, entry in calls
        if entry is not None and "parameters" in entry and not binds(entry, call)
    ]
    return lacking + refused


def test_the_installed_vllm_is_the_recorded_one() -> None:
    """A new lock shows here: record it, and look at what has changed."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        pytest.skip("vLLM is not installed")
    package = Package(Path(found.origin).parent.parent)
    version, how = package.version("vllm"), f"run `python -m {record.__name__} vllm SITE_PACKAGES`"
    assert (record.HERE / f"vllm-{version}.json").is_file(), f"vLLM {version} is not recorded: {how}, and set NEWEST"
    assert record.read("vllm", package) == recorded(f"vllm-{version}"), how


def test_the_records_know_every_use() -> None:
    expected = record.paths()
    for version in (OLDEST, NEWEST):
        assert sorted(names(version)) == expected, f"record vLLM {version} again: see {record.__name__}"
    assert sorted(recorded(ASCEND)["names"]) == record.ascend_paths(), f"record again: see {record.__name__}"


@VERSIONS
def test_every_name_exists_and_every_call_fits(version: str) -> None:
    found = uses()
    assert len(found) > 60 and sum(use.call is not None for use in found) > 20, "the reader has lost sight of them"
    assert faults(found, names(version)) == []


def test_what_a_version_lacks_another_has() -> None:
    for path in {use.path for use in uses()} | set(record.BRANCHES):
        assert names(OLDEST)[path] or names(NEWEST)[path], path


@pytest.mark.parametrize(
    ("path", "call", "expected"),
    [
        ("vllm.LLM.sleep", Call(0, ("depth",), False), "does not take"),
        ("vllm.LLM.reset_prefix_cache", Call(3, (), False), "does not take"),
        ("vllm.LLM.update_weights", Call(0, (), False), "does not take"),
        (record.EXPERTS_MODULE, None, "no vllm"),
    ],
)
def test_a_wrong_use_is_found(path: str, call: Call | None, expected: str) -> None:
    (fault,) = faults([Use(path, call, "some.py:1")], names(OLDEST))
    assert expected in fault


@VERSIONS
def test_engine_arguments_and_values_exist(version: str) -> None:
    fields, said = names(version)["vllm.engine.arg_utils.EngineArgs"]["fields"], record.said()
    assert len(said) > 12
    parameters = signature(names(version)["vllm.LLM"]).parameters.values()
    assert any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters), "LLM passes arguments on no more"
    assert [name for name in said if name not in fields] == []
    for path, name in record.VALUES.items():
        assert names(version)[f"{path}.{said[name]}"], f"{name}={said[name]}"
    for name in record.variables():
        entries = recorded(ASCEND)["names"] if "ASCEND" in name else names(version)
        place = "vllm_ascend.envs.env_variables" if "ASCEND" in name else record.ENVIRONMENT
        assert entries[f"{place}.{name}"], f"nothing reads {name}"


@pytest.mark.parametrize("name", [f"vllm-{OLDEST}", f"vllm-{NEWEST}", ASCEND])
def test_the_worker_extension_hides_nothing(name: str) -> None:
    worker = record.ASCEND_WORKER if name == ASCEND else WORKER
    methods = record.extension_methods()
    assert "receiver_load" in methods
    assert [method for method in methods if recorded(name)["names"][f"{worker}.{method}"] is not None] == []


def test_the_ascend_worker_takes_the_calls_of_its_vllm() -> None:
    """Sleep, wake-up and weight transfer reach the worker by name, with the arguments of vLLM's own."""
    ours, theirs = recorded(ASCEND)["names"], names(OLDEST)
    checked = 0
    for path, entry in theirs.items():
        if path.startswith(f"{WORKER}.") and entry is not None:
            of_ascend = ours[record.ASCEND_WORKER + path.removeprefix(WORKER)]
            assert of_ascend is not None, path
            if "parameters" in entry:
                checked += 1
                assert [p["name"] for p in of_ascend["parameters"]] == [p["name"] for p in entry["parameters"]], path
    assert checked >= 6


def test_vllm_ascend_reads_the_options_that_we_set() -> None:
    ours = record.said()["additional_config"]
    assert "weight_nz_mode" in ours and set(ours) <= set(recorded(ASCEND)["additional_config"])


@pytest.mark.parametrize(("version", "expected"), [(OLDEST, {"is_checkpoint_format": False}), (NEWEST, {})])
def test_the_start_of_an_update_is_told_what_it_must_be(version: str, expected: dict[str, Any]) -> None:
    def start(*args: Any, **kwargs: Any) -> None: ...

    start.__signature__ = signature(names(version)["vllm.LLM.start_weight_update"])  # type: ignore[attr-defined]
    assert start_arguments(start) == expected
    start.__signature__.bind(**expected)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("version", "name"),
    [
        (OLDEST, "model.layers.0.mlp.experts.w13_weight"),
        (NEWEST, "model.layers.0.mlp.experts.routed_experts.w13_weight"),
    ],
)
def test_experts_have_one_name(version: str, name: str) -> None:
    assert (names(version)[record.EXPERTS_MODULE] is not None) == ("routed_experts" in name)
    assert parameter_name(name) == "model.layers.0.mlp.experts.routed_experts.w13_weight"
    assert parameter_name("model.layers.0.mlp.gate_up_proj.weight") == "model.layers.0.mlp.gate_up_proj.weight"


@VERSIONS
def test_models_that_see_have_the_modules_that_weights_are_written_to(version: str) -> None:
    """Tower, language model and mixture, by the names of every parameter that is sent; and what renders pictures."""
    for path, parts in record.SEEING.items():
        for part in parts:
            assert names(version)[f"{path}.{part}"] is not None, f"{version} has no {path}.{part}"
    known = {part for parts in record.SEEING.values() for part in parts}
    known |= {"layers", "routed_experts", "w13_weight", "w2_weight", "weight", "bias"}
    for family in ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"):
        sent = {piece.local_name for piece in vllm_slices(parse_config(families.CONTRACT.config(family), family), 1, 0)}
        assert {name.split(".")[0] for name in sent} == {"visual", "language_model"}
        words = {word for name in sent for word in name.split(".") if not word.isdecimal()}
        assert words <= known, words - known
    registered = "\n".join(recorded(f"vllm-{version}")["experts"])
    for name in ("w13_weight", "w2_weight"):
        assert f"layer.register_parameter('{name}'" in registered
    assert re.search(r"w13_weight = .*\(num_experts, w13_up_dim, hidden_size", registered)
    assert re.search(r"w2_weight = .*\(num_experts, hidden_size, intermediate_size_per_partition", registered)


@VERSIONS
def test_pictures_are_rendered_as_we_ask(version: str) -> None:
    """One call without a keyword, whose answer is changed and given to ``add_request``."""
    entry = names(version)["vllm.renderers.base.BaseRenderer.render_cmpl"]
    assert entry is not None and binds(entry, Call(1, (), False))
    assert {"limit_mm_per_prompt", "mm_processor_kwargs", "mm_encoder_tp_mode", "mm_processor_cache_gb"} <= set(
        record.said()
    )


def test_plain_experts_take_what_the_packed_ones_take() -> None:
    """0.23 calls by position, 0.32 by keyword."""
    old, new = names(OLDEST)[record.CPU_EXPERTS_023], names(NEWEST)[record.CPU_EXPERTS]
    inspect.signature(vllm_versions._apply_experts_023).bind(*old["parameters"])
    own = inspect.signature(vllm_versions._PlainExperts("layer").apply)
    own.bind(**{p["name"]: None for p in new["parameters"]})
    read = {vllm_versions.WEIGHTED_INPUTS, *own.parameters} - {"others"}
    assert read <= {p["name"] for p in new["parameters"]}


def transfer_base(version: str) -> type:
    """vLLM's base class of weight-transfer engines, as it is recorded: its constructor and its abstract methods."""
    entry = names(version)[f"{TRANSFER}.WeightTransferEngine"]

    def construct(self: Any, *args: Any) -> None:
        self.__dict__ |= signature(entry).bind(*args).arguments

    def declare(name: str) -> Any:
        def method(self: Any) -> None: ...

        method.__name__ = name
        return abstractmethod(method)

    return type("Base", (ABC,), {"__init__": construct, **{name: declare(name) for name in entry["abstract"]}})


class Sent:
    """Stands for the transfer: brings ones for the first two elements of ``bias``."""

    def run(self, read: Any, write: Any, dtype: torch.dtype) -> None:
        write("bias", "hf.bias", ((0, 2),), ((0, 2),), torch.ones(2, dtype=dtype))


@VERSIONS
def test_the_receiver_is_an_engine_of_every_version(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fills in what is abstract, takes what its methods are given, and is given the model."""
    joined = []
    monkeypatch.setattr(receiver, "join_group", lambda point, rank: joined.append((point, rank)))
    transfers = SimpleNamespace(next=Sent)
    monkeypatch.setattr(receiver.Link, "transfers", lambda link, group, device: transfers)
    entry, model = names(version)[f"{TRANSFER}.WeightTransferEngine"], torch.nn.Linear(3, 3)
    with torch.no_grad():
        model.bias.zero_()
    link = receiver.Link(None, 1, [[], []], [[], []], torch.float32, 1 << 16)  # type: ignore[arg-type]
    given = {"model": model, "init_info": type("Info", (), {"link": link})}
    engine = type("Engine", (TransferMethods, transfer_base(version)), {})(
        *[given.get(p["name"]) for p in entry["parameters"] if not p["optional"]]
    )
    order = ["init_transfer_engine", "start_weight_update", "receive_weights", "finish_weight_update", "shutdown"]
    assert {"init_transfer_engine", "receive_weights", "shutdown"} <= set(entry["abstract"])
    for name in [name for name in order if name in entry["abstract"]]:
        getattr(engine, name)(*[given.get(p["name"]) for p in entry["abstract"][name]])
    assert model.bias.tolist() == [1, 1, 0] and joined == [(link.point, 1)]
    for name in set(entry["abstract"]) - set(order):
        inspect.signature(getattr(engine, name)).bind(*entry["abstract"][name])


def test_slots_of_adapters_have_one_layout() -> None:
    """Per projection A [slots, 1, rank, columns] and B [slots, 1, own rows, rank], which ``live_slots`` views."""
    oldest, newest = (recorded(f"vllm-{version}")["slots"] for version in (OLDEST, NEWEST))
    assert oldest == newest and set(oldest) == set(record.SLOTS)
    assigned = "\n".join(statement for statements in oldest.values() for statement in statements)
    words = " ".join(assigned.split())
    assert "torch.zeros(max_loras, 1, lora_a_out_size, self.input_size" in words
    assert "torch.zeros(max_loras, 1, lora_b_out_size, lora_config.max_lora_rank" in words
