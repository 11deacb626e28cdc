"""Which memory of an engine is dropped while it sleeps: on segments as torch's allocator describes them."""

from __future__ import annotations

from typing import Any

import torch

from mega_rl.rollout.vllm.sleeping_memory import only_parameters

KIB = 1024


def segment(address: int, *blocks: tuple[int, str]) -> dict[str, Any]:
    return {"address": address, "blocks": [{"size": size, "state": state} for size, state in blocks]}


def test_a_segment_is_dropped_only_if_nothing_but_rewritten_parameters_lies_in_it() -> None:
    first, second, whole = torch.zeros(KIB // 4), torch.zeros(KIB // 4), torch.zeros(KIB // 2)
    part = whole[: KIB // 4]  # a parameter that shares its storage with something else
    here, there, shared = first.data_ptr(), second.data_ptr(), whole.data_ptr()
    alone = segment(here, (KIB, "active_allocated"), (KIB, "inactive"))
    beside_another = segment(there, (KIB, "active_allocated"), (512, "active_allocated"))
    awaiting = segment(there, (KIB, "active_allocated"), (512, "active_awaiting_free"))
    parameters = [first, second, part]
    assert only_parameters([alone, segment(there, (KIB, "active_allocated"))], parameters) == {here, there}
    for kept in (
        beside_another,
        awaiting,
        segment(there, (512, "active_allocated")),  # smaller than what is said to lie there
        segment(there - 512, (512, "active_allocated"), (KIB, "active_allocated")),
        segment(shared, (2 * KIB, "active_allocated")),
        segment(there, (KIB, "inactive")),
    ):
        assert only_parameters([alone, kept], parameters) == {here}, kept
    after_a_gap = segment(there - 512, (512, "inactive"), (KIB, "active_allocated"))
    assert only_parameters([after_a_gap], parameters) == {there - 512}
