"""What the parts of a run are made of, and the order in which they take the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_rl.bridge.outgoing.noise import AqnNoise
from mega_rl.config import RunConfig
from mega_rl.megatron.offload import PARTS
from mega_rl.parallel.layout import EngineLayout
from mega_rl.stages.models import trainer
from mega_rl.stages.weights import engines
from tests.unit.planning.test_state import shape_of


@pytest.mark.parametrize("weight_update", ["auto", "reload"])
def test_the_actor_makes_room_while_the_engine_is_built(monkeypatch: pytest.MonkeyPatch, weight_update: str) -> None:
    """Its weights are hashed before it goes, and compared with the engine's before that sleeps."""
    done: list[Any] = []
    config = RunConfig()
    config.rollout.weight_update = weight_update  # type: ignore[assignment]
    proofs = [] if weight_update == "reload" else ["hashed"]

    def hash_weights(*_: Any) -> str:
        done.append("hashed")
        return "proof"

    def choose_sink(*_: Any, load: str | None, **__: Any) -> str:
        done.append(("compared", load))
        return "sink"

    def engine(*_: Any, **__: Any) -> Any:
        done.append("built")
        return SimpleNamespace(sleep=lambda: done.append("asleep"))

    offload = SimpleNamespace(
        to_host=lambda *parts: done.append(("to host", parts)), to_device=lambda: done.append("to device")
    )
    monkeypatch.setattr(engines.outgoing, "load_proof", hash_weights)
    for name, stand_in in (("VLLMEngine", engine), ("colocated_sink", choose_sink)):
        monkeypatch.setattr(engines, name, stand_in)
    monkeypatch.setattr(engines, "colocated_layout", lambda *_: [])
    monkeypatch.setattr(engines.dist, "get_rank", lambda: 0)
    cpu, layout = SimpleNamespace(type="cpu"), EngineLayout(1, 1)
    session: Any = SimpleNamespace(
        config=config, device=cpu, shape=None, engine_layout=layout, say=print, picture_set=None
    )
    actor: Any = SimpleNamespace(offload=offload)
    weights: Any = None
    assert engines.colocated_engine(session, actor, weights, None)[1] == "sink"
    compared = ("compared", "proof" if proofs else None)
    assert done == [*proofs, ("to host", PARTS), "built", compared, "asleep", "to device"]


@pytest.mark.parametrize("is_whole", [True, False])
def test_an_engine_with_whole_experts_is_sent_them(is_whole: bool) -> None:
    """What the configuration asks of vLLM reaches the layout that the plan of the sync is made for."""
    config = RunConfig()
    config.rollout.vllm = {"enable_expert_parallel": True} if is_whole else {}
    shape, device = shape_of("Qwen3-30B-A3B"), torch.device("cpu")
    session: Any = SimpleNamespace(config=config, shape=shape, device=device, say=print)
    plan = SimpleNamespace(is_full=True, adapters=SimpleNamespace(ranks={}))
    actor: Any = SimpleNamespace(policy=SimpleNamespace(shape=shape, plan=plan))
    weights, slots = engines.engine_weights(session, actor, AqnNoise(config.aqn, 10))
    colocated = engines.colocated_layout(weights, EngineLayout(8, 4))
    assert slots is None and colocated == engines.remote_layout(weights, 4, 8)
    assert weights.worker_layout(4, 1) == colocated[5]
    experts = [(len(series.experts), series.hf_box) for series in colocated[5] if series.is_stacked]
    num_own, width = (32, 768) if is_whole else (128, 192)
    assert {number for number, _ in experts} == {num_own}
    assert {box[0][1] - box[0][0] for _, box in experts[:2]} == {width}


@pytest.mark.parametrize(("stage", "temperature"), [("rl", 0.7), ("sft", 1.0)])
def test_the_stage_decides_the_temperature_of_the_trainer(stage: str, temperature: float) -> None:
    config = RunConfig()
    config.trainer.stage, config.rollout.temperature = stage, 0.7
    config.model.dtype, config.trainer.logprob_chunk_tokens = "float32", 12
    spec = trainer.trainer_spec(config)
    assert spec.temperature == temperature
    assert (spec.dtype, spec.chunk_tokens) == (torch.float32, 12)
    assert not spec.entropy_has_gradient
    config.algorithm.entropy_coefficient = 0.01  # which only a stage that samples reads
    assert trainer.trainer_spec(config).entropy_has_gradient == (stage == "rl")
    assert (spec.parallel, spec.memory) == (config.parallel, config.memory)
