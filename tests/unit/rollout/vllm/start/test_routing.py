"""The experts that an engine sends tokens to, on their way into trajectories."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.errors import InputError
from mega_rl.rollout.vllm.start import versions
from mega_rl.rollout.vllm.start.cpu_routing import RoutingCapture
from mega_rl.rollout.vllm.start.options import ROUTING, engine_arguments

BLOCK = 2
NUM_LAYERS = 2  # of three; the first one has no experts


class Runner:
    """A stand-in for vLLM's: every token goes to its own number, and to the number of the layer."""

    def __init__(self) -> None:
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList([torch.nn.Module() for _ in range(3)])
        for layer in list(self.model.layers)[1:]:
            layer.experts = torch.nn.Module()
            layer.experts.w13_weight = torch.nn.Parameter(torch.zeros(1))
        self.cache_config = SimpleNamespace(num_gpu_blocks=6, block_size=BLOCK)
        self.input_batch = SimpleNamespace(req_ids=[])
        self.requests: dict[str, Any] = {}

    def get_model(self) -> torch.nn.Module:
        return self.model

    def execute_model(self, scheduled: Any) -> None:
        self.input_batch.req_ids = list(scheduled.num_scheduled_tokens)
        rows = []
        for name, (blocks, start, token_ids) in scheduled.work.items():
            self.requests[name] = SimpleNamespace(block_ids=(blocks,), num_computed_tokens=start)
            rows += token_ids
        for index, layer in enumerate(self.model.layers):
            if index and rows:
                getattr(layer.experts, versions.CAPTURE)(torch.tensor([[token, index] for token in rows]))


def step(runner: Runner, finished: tuple[str, ...] = (), **work: tuple[list[int], int, list[int]]) -> None:
    named = {f"{name[1:]}-abc": what for name, what in work.items()}
    sizes = {name: len(token_ids) for name, (_, _, token_ids) in named.items()}
    runner.execute_model(SimpleNamespace(num_scheduled_tokens=sizes, work=named, finished_req_ids=finished))


def test_a_shared_prefix_and_interleaved_responses_keep_their_experts() -> None:
    runner = Runner()
    capture = RoutingCapture(runner)
    step(runner, r1=([0, 1], 0, [10, 11, 12]), r12=([3], 0, [50]))
    step(runner, r12=([3], 1, [51]), r1=([0, 1], 3, [13]))
    step(runner, r2=([0, 4], 2, [22, 23]))  # its first two tokens are those of the first response
    assert capture.of("1", 4).tolist() == [[[token, layer] for layer in (1, 2)] for token in (10, 11, 12, 13)]
    assert capture.of("12", 2)[:, 0, 0].tolist() == [50, 51]
    assert capture.of("2", 4)[:, 1, 0].tolist() == [10, 11, 22, 23]
    step(runner, finished=("2-abc",), r1=([0, 1, 5], 4, [14]))
    assert capture.of("1", 5)[:, 0, 0].tolist() == [10, 11, 12, 13, 14]
    step(runner)  # nothing to compute
    with pytest.raises(ValueError, match="unpack"):
        capture.of("2", 4)


def arguments(rollout: RolloutConfig, device_type: str, *known: str) -> dict[str, Any]:
    return engine_arguments(
        rollout, model_path="m", dtype="float32", max_model_len=8, device_type=device_type, known=known, external=False
    )


@pytest.mark.parametrize("mode", ["rollout", "recompute", "off"])
def test_an_engine_on_an_accelerator_is_asked_for_its_experts(mode: Any) -> None:
    assert arguments(RolloutConfig(routing_replay=mode), "cuda", ROUTING).get(ROUTING) == (mode == "rollout" or None)
    assert ROUTING not in arguments(RolloutConfig(routing_replay=mode), "cpu", ROUTING)


def test_an_engine_that_cannot_is_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match=r"rollout\.routing_replay is 'rollout', but the installed vLLM"):
        arguments(RolloutConfig(routing_replay="rollout"), "npu")
    with pytest.raises(InputError, match=rf"rollout\.vllm\.{ROUTING} is set by mega_rl itself: set rollout\.routing"):
        arguments(RolloutConfig(vllm={ROUTING: True}), "cuda", ROUTING)


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("fields", [{"aux_output_connector": "connector"}, {}])
def test_only_the_first_rank_of_an_engine_is_asked(
    is_first: bool, fields: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.32 has the connector, 0.23 has not."""
    module = ModuleType("vllm.distributed.parallel_state")
    module.get_tp_group = lambda: SimpleNamespace(is_first_rank=is_first)  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", module)
    scheduler = SimpleNamespace(**fields)
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    versions.leave_routing_to_first_rank(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core)))
    assert vars(scheduler) == ({} if not fields else {"aux_output_connector": "connector" if is_first else None})


def test_our_experts_report_the_choice() -> None:
    seen: list[np.ndarray] = []
    capture = {versions.CAPTURE: lambda ids: seen.append(ids.numpy())}
    layer = SimpleNamespace(**capture, expert_map=None)
    hidden, ids = torch.ones(2, 4), torch.tensor([[0, 1], [1, 0]])
    weights = torch.ones(2, 6, 4), torch.ones(2, 4, 3), torch.ones(2, 2)
    versions._PlainExperts(layer).apply(torch.empty(2, 4), hidden, *weights, ids)
    versions._PlainExperts(SimpleNamespace(expert_map=None)).apply(torch.empty(2, 4), hidden, *weights, ids)
    assert [found.tolist() for found in seen] == [ids.tolist()]


def test_workers_with_whole_experts_add_up_to_one_with_all() -> None:
    generator = torch.Generator().manual_seed(0)
    w1, w2, hidden, shares = (torch.randn(n, generator=generator) for n in ((3, 6, 4), (3, 4, 3), (5, 4), (5, 2)))
    ids = torch.tensor([[0, 1], [2, 0], [1, 2], [2, 1], [0, 2]], dtype=torch.int32)
    whole, parts = torch.empty(5, 4), torch.empty(2, 5, 4)
    versions._PlainExperts(SimpleNamespace(expert_map=None)).apply(whole, hidden, w1, w2, shares, ids)
    for part, places, own in zip(parts, ([0, 1, -1], [-1, -1, 0]), (slice(0, 2), slice(2, 3)), strict=True):
        layer = SimpleNamespace(expert_map=torch.tensor(places, dtype=torch.int32))
        versions._PlainExperts(layer).apply(part, hidden, w1[own], w2[own], shares, ids)
    torch.testing.assert_close(parts.sum(0), whole)
