"""Options of ``rollout.vllm``, and the environment that vLLM is started in."""

from __future__ import annotations

import os
import random
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.config.schema.sections import RunConfig
from mega_rl.errors import InputError
from mega_rl.planning.engine import engine_share
from mega_rl.rollout.vllm.start.environment import (
    EngineGenerators,
    preserved_process,
    set_batch_invariance,
    set_environment,
)
from mega_rl.rollout.vllm.start.options import (
    additional_config,
    check_options,
    engine_arguments,
    engine_settings,
    num_loading_engines,
    option_names,
)
from mega_rl.rollout.vllm.start.versions import check_batch_invariance

KNOWN = (
    "model",
    "max_num_seqs",
    "enforce_eager",
    "enable_sleep_mode",
    "enable_chunked_prefill",
    "max_num_batched_tokens",
    "additional_config",
    "tensor_parallel_size",
    "kv_cache_memory_bytes",
    "gpu_memory_utilization",
)


def arguments(rollout: RolloutConfig, device_type: str = "cpu", external: bool = False) -> dict[str, Any]:
    return engine_arguments(
        rollout,
        model_path="model",
        dtype="bfloat16",
        max_model_len=64,
        device_type=device_type,
        known=KNOWN,
        external=external,
    )


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"rollout\.vllm\.max_num_seq is not .* rollout\.vllm\.max_num_seqs"):
        arguments(RolloutConfig(vllm={"max_num_seq": 4}))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("model", "model.path"),
        ("tensor_parallel_size", "rollout.tensor_parallel_size"),
        ("kv_cache_memory_bytes", "rollout.kv_cache_bytes"),
        ("worker_extension_cls", "remove it"),
    ],
)
def test_owned_option_names_the_key_to_set(name: str, key: str) -> None:
    with pytest.raises(InputError, match=rf"rollout\.vllm\.{name} is set by mega_rl itself: .*{key}"):
        arguments(RolloutConfig(vllm={name: 1}))


def test_cpu_arguments() -> None:
    found = arguments(RolloutConfig(kv_cache_bytes=123, vllm={"max_num_seqs": 7}), external=True)
    assert found["max_num_seqs"] == 7 and found["kv_cache_memory_bytes"] == 123
    assert found["enforce_eager"] is True and found["enable_sleep_mode"] is False
    assert found["dtype"] == "bfloat16" and found["distributed_executor_backend"] == "external_launcher"
    assert found["logprobs_mode"] == "processed_logprobs"


def test_a_default_gives_way() -> None:
    assert arguments(RolloutConfig(vllm={"enforce_eager": False}))["enforce_eager"] is False
    assert arguments(RolloutConfig(dtype="float32"))["dtype"] == "float32"


def test_prompts_of_seeded_requests_stay_whole_on_a_cpu() -> None:
    assert arguments(RolloutConfig())["enable_chunked_prefill"] is False
    assert "enable_chunked_prefill" not in arguments(RolloutConfig(seeds="engine"))
    assert "enable_chunked_prefill" not in arguments(RolloutConfig(), "npu")
    with pytest.raises(InputError, match="enable_chunked_prefill does not go with seeds of requests"):
        arguments(RolloutConfig(vllm={"enable_chunked_prefill": True}))
    with pytest.raises(InputError, match="max_num_batched_tokens is 8, but a prompt and its response have up to"):
        arguments(RolloutConfig(vllm={"max_num_batched_tokens": 8}))
    assert arguments(RolloutConfig(seeds="engine", vllm={"max_num_batched_tokens": 8}))


def test_accelerator_arguments() -> None:
    found = arguments(RolloutConfig(vllm={"additional_config": {"other": 1}, "kv_cache_memory_bytes": 5}), "npu")
    assert found["additional_config"] == {"enable_cpu_binding": False, "weight_nz_mode": 0, "other": 1}
    assert found["enable_sleep_mode"] is True and found["kv_cache_memory_bytes"] == 5
    assert found["enforce_eager"] is False, "graphs are the default where there is a device"
    assert arguments(RolloutConfig(vllm={"enforce_eager": True}), "npu")["enforce_eager"] is True
    assert "distributed_executor_backend" not in found


def test_the_plan_knows_the_share_that_an_engine_gets() -> None:
    config = RunConfig()
    assert arguments(config.rollout, "cuda")["gpu_memory_utilization"] == engine_share(config)
    config.rollout.vllm = {"gpu_memory_utilization": 0.7}
    assert arguments(config.rollout, "cuda")["gpu_memory_utilization"] == engine_share(config) == 0.7


def test_a_typing_error_in_what_vllm_ascend_would_ignore_names_the_nearest() -> None:
    known = ("weight_nz_mode", "enable_cpu_binding")
    assert additional_config({"enable_cpu_binding": True}, known) == {"weight_nz_mode": 0, "enable_cpu_binding": True}
    with pytest.raises(InputError, match=r"config\.enable_cpu_bindings is read by nothing .*enable_cpu_binding"):
        additional_config({"enable_cpu_bindings": True}, known)
    with pytest.raises(InputError, match=r"additional_config is \['a'\]: give vllm-ascend's options"):
        additional_config(["a"], known)


def test_a_layout_that_updates_in_place_would_scramble_is_refused() -> None:
    assert additional_config({"weight_nz_mode": 0}, ()) == {"weight_nz_mode": 0}
    with pytest.raises(InputError, match=r"rollout\.vllm\.additional_config\.weight_nz_mode is 2.*set it to 0"):
        arguments(RolloutConfig(vllm={"additional_config": {"weight_nz_mode": 2}}), "npu")


def test_options_of_vllm_ascend_are_read_from_its_sources(tmp_path: Path) -> None:
    (tmp_path / "ascend_config.py").write_text(
        """
def read(self, vllm_config):
    additional_config = vllm_config.additional_config or {}
    self.a = additional_config.get("first", {}).get("inner")
    self.b = self._get_config_value(additional_config, "second", "VARIABLE", 0)
    self.c = other.get("not_one")
"""
    )
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "more.py").write_text(
        """
def f(config):
    if "third" in config.additional_config:
        return config.additional_config["fourth"]
"""
    )
    (tmp_path / "broken_but_silent.py").write_text("nothing of it is parsed (")
    assert set(option_names(tmp_path)) == {"first", "second", "third", "fourth"}


def test_separate_engines_have_their_devices_to_themselves() -> None:
    found = arguments(RolloutConfig(placement="separate"), "npu")
    assert found["weight_transfer_config"] == {"backend": "mega_rl"}
    assert found["additional_config"] == {"weight_nz_mode": 0}
    assert found["enable_sleep_mode"] is False and "gpu_memory_utilization" not in found
    assert "weight_transfer_config" not in arguments(RolloutConfig(), "npu")


def test_environment_defaults_leave_the_users_values() -> None:
    environ = {"VLLM_LOGGING_LEVEL": "DEBUG", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    set_environment("cpu", environ)
    assert environ["VLLM_LOGGING_LEVEL"] == "DEBUG" and environ["HF_HUB_OFFLINE"] == "1"
    assert environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind" and environ["TORCHDYNAMO_DISABLE"] == "1"
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    other: dict[str, str] = {}
    set_environment("npu", other)
    assert other["HF_HUB_OFFLINE"] == "1" and "TORCHDYNAMO_DISABLE" not in other


def test_generators_are_read_and_put_back_once_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not around every step; what environments draw meanwhile from python's and numpy's is drawn."""
    asked: list[str] = []
    for name in ("get_rng_state", "set_rng_state"):
        original = getattr(torch, name)
        monkeypatch.setattr(torch, name, lambda *given, n=name, f=original: asked.append(n) or f(*given))
    generators = EngineGenerators("cpu", is_seeded=False)
    for _ in range(2):
        before, of_python = torch.random.default_generator.get_state(), random.getstate()
        for _ in range(50):
            with generators.in_use():
                torch.rand(3)
            random.random()
        assert not torch.equal(torch.random.default_generator.get_state(), before)
        generators.give_back()
        assert torch.equal(torch.random.default_generator.get_state(), before) and random.getstate() != of_python
    generators.give_back()
    assert asked == ["get_rng_state", "set_rng_state"] * 2


def test_an_engine_with_generators_of_its_own_goes_on_with_them() -> None:
    def drawn() -> list[float]:
        with generators.in_use():
            return [random.random(), float(np.random.rand()), float(torch.rand(()))]

    generators, before = EngineGenerators("cpu", is_seeded=True), torch.get_rng_state()
    generators.seed(5)
    first, second = drawn(), drawn()
    generators.give_back()
    assert torch.equal(torch.get_rng_state(), before) and first != second
    torch.rand(1)
    generators.seed(5)
    assert [drawn(), drawn()] == [first, second]


def test_preserved_process_puts_everything_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    before = (random.getstate(), str(np.random.get_state()), torch.get_rng_state(), torch.set_num_threads)
    with pytest.raises(KeyError), preserved_process("cpu"):
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)
        torch.set_num_threads = None  # type: ignore[assignment]
        os.environ.update(LOCAL_WORLD_SIZE="1", LD_PRELOAD="nothing.so", VLLM_KEPT="1")
        raise KeyError
    monkeypatch.delenv("VLLM_KEPT")
    assert os.environ["LOCAL_WORLD_SIZE"] == "4" and os.environ.get("LD_PRELOAD") != "nothing.so"
    assert random.getstate() == before[0] and str(np.random.get_state()) == before[1]
    assert torch.equal(torch.get_rng_state(), before[2]) and torch.set_num_threads is before[3]


@pytest.mark.parametrize(
    ("annotation", "value", "fits"),
    [
        ("bool", "maybe", False), ("bool", True, True), ("int | None", "abc", False), ("int | None", None, True),
        ("int", None, False), ("int", True, False), ("float", 1, True), ("str | None", 3, False),
        ("QuantizationMethods | str | None", 3, True), ("'auto' | 'fp8'", "int3", False),
        ("'auto' | None", "auto", True),
        ("'auto' | None", None, True), ("'auto' | Other", "int3", True), ("'auto' | str", "int3", True),
    ],
)  # fmt: skip
def test_a_value_must_be_of_the_type_that_vllm_declares(annotation: str, value: object, fits: bool) -> None:
    try:
        check_options({"some": value}, {"some": annotation}, "cpu")
    except InputError as error:
        assert not fits and str(error).startswith("rollout.vllm.some is ") and ": give " in str(error)
    else:
        assert fits


def test_only_the_first_of_several_engines_reads_weights_if_all_are_written_live() -> None:
    live = RolloutConfig(vllm={"max_num_seqs": 4})
    assert engine_settings(live, 0) is live and num_loading_engines(live, 3) == 1
    assert engine_settings(live, 2).vllm == {"max_num_seqs": 4, "load_format": "dummy"}
    for own in (RolloutConfig(weight_update="reload"), RolloutConfig(vllm={"load_format": "auto"})):
        assert engine_settings(own, 2) is own and num_loading_engines(own, 3) == 3


@pytest.mark.parametrize(("value", "is_taken"), [(-1, True), (20, True), (0, False), ("20", False)])
def test_a_probe_needs_its_log_probabilities(value: Any, is_taken: bool) -> None:
    options = {"max_logprobs": value}
    if is_taken:
        check_options(options, None, "cpu")
        return
    with pytest.raises(InputError, match=r"rollout\.vllm\.max_logprobs is .*: remove it"):
        check_options(options, None, "cpu")


def test_batch_invariant_kernels_are_asked_for_where_there_are_any() -> None:
    environ: dict[str, str] = {}
    set_batch_invariance("cuda", environ)
    assert environ == {"VLLM_BATCH_INVARIANT": "1"}
    for device, why in (("cpu", "no such kernels for a CPU"), ("npu", "vllm-ascend has no such kernels")):
        with pytest.raises(InputError, match=why):
            set_batch_invariance(device, environ := {})
        assert environ == {}


@pytest.mark.parametrize(
    ("names", "capability", "words"),
    [
        (["VLLM_BATCH_INVARIANT"], 90, None),
        (["VLLM_BATCH_INVARIANT"], 80, "this device: it needs compute capability 9.0"),
        ([], 90, "this version of vLLM"),
    ],
)
def test_batch_invariant_kernels_are_looked_for(names: list[str], capability: int, words: str | None) -> None:
    envs = SimpleNamespace(environment_variables=names, VLLM_BATCH_INVARIANT=True)
    here = SimpleNamespace(has_device_capability=lambda least: capability >= least)
    with pytest.raises(InputError, match=words) if words else nullcontext():
        check_batch_invariance(envs, here)
    envs.VLLM_BATCH_INVARIANT = False
    if words is None:
        with pytest.raises(AssertionError, match="imported before"):
            check_batch_invariance(envs, here)
