"""Reading what Megatron's checkpoints hold without running any of it: a pickle may name any function of this process.

Megatron and torch unpickle a checkpoint in three places: its index, the objects beside its tensors, and the common
state. The first gets no more than the classes of an index, the other two no more than tensors and plain containers.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelLoadStrategyWrapper
from torch import Tensor

from mega_rl.bridge.files.torch_dist.plain import open_plain
from mega_rl.bridge.files.torch_dist.torch_dist import read_index

_FORCE, _FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def load_sharded(state: dict[str, Any], weights_dir: Path) -> dict[str, Any]:
    """What the checkpoint in ``weights_dir`` (the torch_dist format) has for a sharded state. All ranks call it.

    Data-parallel ranks read each a share of what they all need, and send it to the others.

    Raises:
        InputError: its index is damaged, or names something that no index is made of.
        pickle.UnpicklingError: another file holds something else than tensors and plain values.
    """
    read_index(weights_dir)
    with _tensors_only():
        strategy = get_default_load_sharded_strategy(str(weights_dir))
        if parallel_state.is_initialized():
            replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
            strategy = FullyParallelLoadStrategyWrapper(strategy, replicas)
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(weights_dir), sharded_strategy=strategy)
    return loaded


def load_generators(path: Path) -> list[Mapping[str, Tensor]]:
    """torch's random states of every rank, as the platform's ``rng_state`` gave them.

    Raises:
        pickle.UnpicklingError: the file holds something else than tensors in plain containers.
        ValueError: it holds something else than states.
    """
    with open_plain(path) as file:
        states: Any = torch.load(file, weights_only=True)
    if not (isinstance(states, list) and all(_is_state(state) for state in states)):
        raise ValueError(f"{path.name} holds no states of random generators")
    return states


def _is_state(state: Any) -> bool:
    return isinstance(state, Mapping) and all(
        isinstance(value, Tensor) and value.dtype == torch.uint8 and value.dim() == 1 for value in state.values()
    )


@contextmanager
def _tensors_only() -> Iterator[None]:
    """``torch.load`` takes tensors and plain values only, whatever its caller or the environment asks for."""
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
    os.environ[_FORCE] = "1"
    try:
        yield
    finally:
        del os.environ[_FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})
