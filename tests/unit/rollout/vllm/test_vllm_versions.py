"""What vllm-ascend 0.23 does otherwise than vLLM, on modules that behave like it; tests/npu runs vllm-ascend itself.

And what is kept of requests that are given up.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from mega_rl.rollout.engine import Request
from mega_rl.rollout.vllm.start import versions
from mega_rl.rollout.vllm.start.versions import live_parameters, undo_wake_up, use_logprobs_mode
from mega_rl.rollout.vllm.weight_changes import WeightChanges
from mega_rl.types import Prompt


def layer(working: torch.Tensor) -> torch.nn.Module:
    made = torch.nn.Module()
    made.experts, made.other = torch.nn.Module(), torch.nn.Linear(3, 5)
    made.experts.w13_weight = torch.nn.Parameter(working, requires_grad=False)
    return made


def test_a_wake_up_of_ascend_is_undone_before_an_update() -> None:
    """The layer works on [E, hidden, rows] and wakes up with a transposed view of that."""
    working = torch.arange(24.0).reshape(2, 3, 4)
    woken = layer(working.transpose(1, 2))
    undo_wake_up(woken)
    undo_wake_up(woken)  # what is as it should be stays
    assert woken.experts.w13_weight.data_ptr() == working.data_ptr() and woken.experts.w13_weight.is_contiguous()
    assert torch.equal(woken.experts.w13_weight, working) and woken.other.weight.shape == (5, 3)


@pytest.mark.parametrize("rows", [4, 3], ids=["wide", "square"])
def test_experts_of_ascend_are_shown_and_written_as_everywhere(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    working = torch.rand(2, 3, rows)  # [E, hidden, rows]
    assert live_parameters(layer(working))["experts.w13_weight"].shape == working.shape
    monkeypatch.setattr(versions, "TURNS_EXPERTS", "cpu")
    live = live_parameters(layer(working))
    new = torch.rand(2, rows, 3)
    live["experts.w13_weight"].copy_(new)
    assert torch.equal(working, new.transpose(1, 2)) and live["other.weight"].is_contiguous()


def test_a_sampler_returns_what_the_engine_was_asked_for() -> None:
    sampler = SimpleNamespace(logprobs_mode="raw", topk_topp_sampler=SimpleNamespace(logprobs_mode="raw"))
    use_logprobs_mode(sampler, "processed")
    assert sampler.logprobs_mode == sampler.topk_topp_sampler.logprobs_mode == "processed"


def test_what_is_given_up_is_forgotten_and_not_added_again() -> None:
    """Of three requests that wait for their first token, one is given up before weights change, and one after."""
    prompt = Prompt(0, (1, 2), "", "", "made")
    under_way = {number: Request(prompt, number, number, 8, 1.0) for number in (1, 2, 3)}
    waiting = SimpleNamespace(num_output_tokens=0, num_output_placeholders=0)
    scheduler = SimpleNamespace(requests={str(number): waiting for number in (2, 3)})
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core, abort_request=lambda names: None))
    changes = WeightChanges(llm, keeps_cache=True)
    for number in under_way:
        changes.salted(number, {})
    changes.forget([1])
    del under_way[1]
    assert list(changes.make(5, 4, under_way)) == [2, 3] and changes.num_mixed == 2
    changes.forget([2])
    assert changes.num_mixed == 1
    changes.forget()
    assert changes.num_mixed == 0
