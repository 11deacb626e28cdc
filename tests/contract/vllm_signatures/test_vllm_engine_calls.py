"""What an engine calls and when: a stand-in that takes only what the recorded vLLM takes, and writes it down."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.rollout.receiver import Link
from mega_rl.rollout.vllm import engine as vllm_engine, receiving_engine
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.rollout.vllm.receiving_engine import ReceivingEngine
from tests.contract.vllm_signatures.test_vllm_signatures import NEWEST, OLDEST, names, signature

PARAMETERS = {"model.norm.weight": torch.zeros(2)}
ANSWERS = {"receiver_parameters": PARAMETERS, "receiver_load": set(PARAMETERS)}
VERSIONS = pytest.mark.parametrize("version", [OLDEST, NEWEST])


class StandIn:
    """``vllm.LLM`` of a recorded version."""

    def __init__(self, version: str, can_sleep: bool = True) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.resets = True  # what reset_prefix_cache says
        self._entries = names(version)
        config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=can_sleep))
        self.llm_engine = SimpleNamespace(vllm_config=config)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        taken = signature(self._entries[f"vllm.LLM.{name}"])

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = taken.bind(*args, **kwargs)
            self.calls.append((bound.arguments["method"] if name == "collective_rpc" else name, bound.arguments))
            return [ANSWERS.get(self.calls[-1][0])] if name == "collective_rpc" else self.resets

        call.__signature__ = taken  # type: ignore[attr-defined]
        return call

    def since(self) -> list[str]:
        """The calls since the last question."""
        found, self.calls = [name for name, _ in self.calls], []
        return found


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, StandIn]]:
    """An engine on Ascend and the stand-in behind it."""
    monkeypatch.setattr(receiving_engine, "_register", lambda: None)
    monkeypatch.setattr(vllm_engine, "set_environment", lambda device_type: None)
    monkeypatch.setattr(receiving_engine, "set_environment", lambda device_type: None)

    def engine(version: str, kind: type = VLLMEngine, can_sleep: bool = True, **keys: Any) -> tuple[Any, StandIn]:
        llm = StandIn(version, can_sleep)
        monkeypatch.setattr(vllm_engine, "construct", lambda *_: llm)
        made = kind("model", RolloutConfig(**keys), max_model_len=8, device_type="npu", dtype="bfloat16")
        assert llm.since() == ["receiver_set_up", "receiver_parameters"]
        return made, llm

    return engine


@VERSIONS
def test_an_update_in_place_wakes_writes_and_forgets_prefixes(version: str, build: Any) -> None:
    engine, llm = build(version)
    engine.wake_weights()
    engine.begin_update()
    assert engine.parameters() is PARAMETERS
    engine.finish_update(1)
    engine.wake_cache()
    engine.sleep()
    assert [given for name, given in llm.calls if name == "wake_up"] == [{"tags": ["weights"]}, {"tags": ["kv_cache"]}]
    assert llm.calls[-1] == ("sleep", {"level": 1})
    update = ["receiver_begin_update", "receiver_parameters", "reset_prefix_cache"]
    assert llm.since() == ["wake_up", *update, "wake_up", "sleep"]
    assert engine.weight_version == 1


@VERSIONS
def test_weights_taken_between_two_steps_put_requests_back(version: str, build: Any) -> None:
    engine, llm = build(version)
    taken: list[Any] = []
    engine.exchange(taken.append, 4)
    assert taken == [PARAMETERS] and engine.weight_version == 4
    assert llm.calls[-1][1]["reset_running_requests"] is True
    assert llm.since() == ["receiver_begin_update", "receiver_parameters", "reset_prefix_cache"]
    llm.resets = False
    with pytest.raises(RuntimeError, match="kept prefixes computed before weight version 5"):
        engine.exchange(taken.append, 5)


@VERSIONS
def test_weights_between_two_steps_leave_kept_keys_and_values_alone(version: str, build: Any) -> None:
    engine, llm = build(version, kv_on_update="keep")
    engine.exchange(lambda parameters: None, 4)
    assert llm.since() == ["receiver_begin_update", "receiver_parameters"] and engine.weight_version == 4


@VERSIONS
def test_a_reload_unpacks_before_and_packs_after(version: str, build: Any) -> None:
    engine, llm = build(version)
    engine.use_loader()
    engine.wake_weights()
    engine.begin_update()
    engine.load_hf_weights(iter(()))
    engine.finish_update(3)
    reload = ["receiver_begin_update", "receiver_begin_reload", "receiver_load", "receiver_finish_reload"]
    assert llm.since() == ["wake_up", *reload, "reset_prefix_cache"]


@VERSIONS
def test_prefixes_that_stay_end_the_run(version: str, build: Any) -> None:
    engine, llm = build(version)
    llm.resets = False
    engine.begin_update()
    with pytest.raises(RuntimeError, match="kept prefixes computed before weight version 2"):
        engine.finish_update(2)


@VERSIONS
def test_an_engine_that_cannot_sleep_is_left_awake(version: str, build: Any) -> None:
    engine, llm = build(version, can_sleep=False)
    engine.sleep()
    engine.wake_weights()
    engine.wake_cache()
    assert llm.since() == []


@VERSIONS
def test_a_transfer_starts_updates_and_finishes(version: str, build: Any) -> None:
    engine, llm = build(version, ReceivingEngine, placement="separate")
    link = Link(None, 1, [], [], torch.bfloat16, 1)  # type: ignore[arg-type]
    engine.connect(link)
    engine.begin_update()
    engine.receive()
    arguments = dict(llm.calls)
    assert arguments["init_weight_transfer_engine"] == {"request": {"init_info": {"link": link}}}
    assert arguments["start_weight_update"] == ({"is_checkpoint_format": False} if version == OLDEST else {})
    assert arguments["update_weights"] == {"request": {"update_info": {}}}
    transfer = ["start_weight_update", "update_weights", "finish_weight_update"]
    assert llm.since() == ["init_weight_transfer_engine", "receiver_begin_update", *transfer]
