"""The memory of an engine that sleeps: what its next update writes anew is dropped, and not copied to the host.

vLLM's allocators, of CUDA and of Ascend, hold a model in segments of memory with the tag of weights. At level 1 they
copy each of these to the host and back again, at level 2 they drop all of them, also what is no parameter: rotary
tables, slots of adapters, weights that were computed at loading. Between the two lies what is done here: a segment is
dropped if all that lies in it is parameters that the next update writes whole. For that it has another tag while the
engine falls asleep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, get_device_module

WEIGHTS, REWRITTEN = "weights", "rewritten"  # tags; the second is known to nobody else, so its memory is dropped
INACTIVE = "inactive"  # torch's state of a block in which nothing lies


@contextmanager
def dropped(parameters: Iterable[Tensor], device_type: str) -> Iterator[None]:
    """Within, an engine that falls asleep drops what these parameters hold as far as nothing else lies beside them."""
    segments = only_parameters(get_device_module(device_type).memory_snapshot(), parameters)
    held = _allocator(device_type).pointer_to_data
    chosen = [data for address, data in held.items() if address in segments and data.tag == WEIGHTS]
    for data in chosen:
        data.tag = REWRITTEN
    try:
        yield
    finally:
        for data in chosen:
            data.tag = WEIGHTS  # by which the memory is taken again, empty


def only_parameters(snapshot: Sequence[Mapping[str, Any]], parameters: Iterable[Tensor]) -> set[int]:
    """The addresses of the segments in which nothing lies but these parameters, each of which has its storage alone.

    Args:
        snapshot: of torch's allocator.
    """
    own = {one.data_ptr(): one.nbytes for one in parameters if one.nbytes == one.untyped_storage().nbytes()}
    found = set()
    for segment in snapshot:
        address, in_use = segment["address"], []
        for block in segment["blocks"]:
            if block["state"] != INACTIVE:
                in_use.append(0 < own.get(address, 0) <= block["size"])
            address += block["size"]
        if in_use and all(in_use):
            found.add(segment["address"])
    return found


def _allocator(device_type: str) -> Any:
    if device_type == "npu":
        from vllm_ascend.device_allocator.camem import CaMemAllocator

        return CaMemAllocator.get_instance()
    from vllm.device_allocator import get_mem_allocator_instance

    return get_mem_allocator_instance()
