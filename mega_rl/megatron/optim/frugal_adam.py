"""AdamW that keeps its float32 masters itself, so that its state may be in host memory, or its moments in bfloat16.

Megatron has both only in TransformerEngine's FusedAdam, whose methods it asks for; here they are for every device. The
update is computed on the device by the kernel that is used otherwise, a window of elements at a time: state on the host
gives the bits that state on the device gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

import torch
from torch import Tensor

from mega_rl import platform
from mega_rl.megatron.optim.adam import MOMENTS, GroupStepAdam
from mega_rl.platform.rounding import NUM_BITS, round_stochastically
from mega_rl.platform.transfers import WINDOW_ELEMENTS, Kinds, Windows

MASTER = "master_param"  # as FusedAdam calls it
# Elements: a parameter begins at a multiple of it and is cut at multiples of it, so that the vector instructions of a
# CPU take the same elements together wherever the parameter lies.
ALIGNMENT = 64
# Elements of one tensor of pinned memory; torch takes it in powers of two, whatever is asked for.
BLOCK_ELEMENTS = 1 << 28


@dataclass(frozen=True)
class ParameterPiece:
    """Elements of a parameter that are updated in one go."""

    parameter: Tensor  # the rank's share of one, flat
    order: int  # of the parameter in the optimizer
    start: int
    end: int
    place: int  # of ``start`` in the tensors of its block


@dataclass
class Block:
    """Parameters of one group whose state lies together.

    Attributes:
        group: its number in the optimizer.
        parameters: with their orders, and where they begin in the tensors of ``state``.
        state: name -> flat tensor on the host; empty: each parameter's state is its own, on the device.
    """

    group: int
    parameters: list[tuple[Tensor, int, int]]
    state: dict[str, Tensor]

    def windows(self) -> Iterator[list[ParameterPiece]]:
        """All elements, in windows of at most ``WINDOW_ELEMENTS``. How a parameter is cut depends on nothing else."""
        window: list[ParameterPiece] = []
        for parameter, order, place in self.parameters:
            for start in range(0, parameter.numel(), WINDOW_ELEMENTS):
                end = min(start + WINDOW_ELEMENTS, parameter.numel())
                if window and place + end - window[0].place > WINDOW_ELEMENTS:
                    yield window
                    window = []
                window.append(ParameterPiece(parameter, order, start, end, place + start))
        if window:
            yield window


def placed(sizes: Sequence[int], block_elements: int) -> list[list[int]]:
    """Which tensors share a block: the first that has room for the next smaller one; a larger one has its own."""
    blocks: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        found = next((i for i, left in enumerate(room) if left >= sizes[index]), None)
        if found is None:
            blocks.append([])
            room.append(block_elements)
            found = len(blocks) - 1
        blocks[found].append(index)
        room[found] -= sizes[index]
    return blocks


class FrugalAdam(GroupStepAdam):
    """AdamW of parameters whose gradients stand in ``decoupled_grad``; float32 ones are their own masters.

    Moments in bfloat16 are rounded stochastically, with bits that follow from step, parameter and place in
    this rank's part: rounded to the nearest, a mean of squares could no longer follow gradients that change by less
    than its last bit.
    """

    on_host: bool  # whether the state is in host memory and passes the device in windows
    moment_dtype: torch.dtype

    def __init__(self, params: Any, **options: Any) -> None:
        self._blocks: list[Block] = []
        super().__init__(params, **options)

    def allocate(self) -> None:
        """Make the state of all parameters: masters of what they are now, moments of zero."""
        orders = count()
        for number, group in enumerate(self.param_groups):
            of_dtypes: dict[torch.dtype, list[tuple[Tensor, int]]] = {}
            for parameter in group["params"]:
                of_dtypes.setdefault(parameter.dtype, []).append((parameter, next(orders)))
            for parameters in of_dtypes.values():
                for chosen in self._chosen([parameter for parameter, _ in parameters]):
                    self._blocks.append(self._block(number, [parameters[index] for index in chosen]))

    def _chosen(self, parameters: Sequence[Tensor]) -> list[list[int]]:
        """Which parameters of a group make a block."""
        if self.on_host:
            return placed([_aligned(p.numel()) for p in parameters], BLOCK_ELEMENTS)
        return [list(range(len(parameters)))] if parameters else []

    def _block(self, group: int, parameters: Sequence[tuple[Tensor, int]]) -> Block:
        block, end = Block(group, [], {}), 0
        for parameter, order in parameters:
            block.parameters.append((parameter, order, end))
            end += _aligned(parameter.numel())
        is_master = parameters[0][0].dtype == torch.float32
        dtypes = dict.fromkeys(MOMENTS, self.moment_dtype) | ({} if is_master else {MASTER: torch.float32})
        if self.on_host:
            is_pinned = platform.current().has_own_memory
            # Longer than what lies in it, so that no parameter's state is a whole storage: then a checkpoint is written
            # from a copy, which the next step does not change and a forked writer may read.
            size = end + ALIGNMENT
            block.state = {name: torch.zeros(size, dtype=dtype, pin_memory=is_pinned) for name, dtype in dtypes.items()}
        for parameter, _, place in block.parameters:
            size, device = parameter.numel(), parameter.device
            if self.on_host:
                own = {name: flat[place : place + size] for name, flat in block.state.items()}
            else:
                own = {name: torch.zeros(size, dtype=dtype, device=device) for name, dtype in dtypes.items()}
            if is_master:
                own[MASTER] = parameter.detach()
            else:
                own[MASTER].copy_(parameter.detach())
            self.state[parameter] = own
        return block

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "Megatron computes the loss itself"
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
        if not self._blocks:
            return
        windows = self._windows() if self.on_host else None
        for block in self._blocks:
            for pieces in block.windows():
                with self._on_device(block, pieces, windows) as own:
                    self._step_window(self.param_groups[block.group], pieces, own)
        if windows is not None:
            windows.finish()

    def _windows(self) -> Windows:
        largest = max(flat.numel() for block in self._blocks for flat in block.state.values())
        dtypes = {name: flat.dtype for block in self._blocks for name, flat in block.state.items()}
        return Windows(self._blocks[0].parameters[0][0].device, min(WINDOW_ELEMENTS, largest), dtypes)

    @contextmanager
    def _on_device(self, block: Block, pieces: list[ParameterPiece], windows: Windows | None) -> Iterator[list[Kinds]]:
        """The state of each piece where the parameter is."""
        if windows is None:
            yield [{name: flat[p.start : p.end] for name, flat in self.state[p.parameter].items()} for p in pieces]
            return
        low, high = pieces[0].place, pieces[-1].place + pieces[-1].end - pieces[-1].start
        with windows.on_device({name: flat[low:high] for name, flat in block.state.items()}) as views:
            yield [{name: view[p.place - low :][: p.end - p.start] for name, view in views.items()} for p in pieces]

    def _step_window(self, group: dict[str, Any], pieces: list[ParameterPiece], states: Sequence[Kinds]) -> None:
        weights = [p.parameter.detach()[p.start : p.end] for p in pieces]
        masters = [own.get(MASTER, weight) for own, weight in zip(states, weights, strict=True)]
        gradients = [p.parameter.decoupled_grad[p.start : p.end] for p in pieces]  # type: ignore[attr-defined]
        moments = [[own[name].float() for own in states] for name in MOMENTS]  # float32 ones are not copied
        self._update(group, masters, gradients, *moments)
        for piece, own, master, weight, exp_avg, exp_avg_sq in zip(
            pieces, states, masters, weights, *moments, strict=True
        ):
            if self.moment_dtype != torch.float32:
                self._round(group["step"], piece, own, (exp_avg, exp_avg_sq))
            if weight.dtype != torch.float32:
                weight.copy_(master)

    def _round(self, step: int, piece: ParameterPiece, own: Kinds, moments: Sequence[Tensor]) -> None:
        seed = ((step * 1_000_003 + piece.order) * 65_537 + piece.start // WINDOW_ELEMENTS) % (1 << 62)
        device = piece.parameter.device
        generator = torch.Generator(device).manual_seed(seed)
        for name, moment in zip(MOMENTS, moments, strict=True):
            bits = torch.randint(1 << NUM_BITS, moment.shape, dtype=torch.int32, device=device, generator=generator)
            own[name].copy_(round_stochastically(moment, bits))

    # What Megatron asks of FusedAdam.

    def get_unscaled_state(self, parameter: Tensor, name: str) -> Tensor:
        found: Tensor = self.state[parameter][name]
        return found

    def set_scaled_state(self, parameter: Tensor, name: str, values: Tensor) -> None:
        self.state[parameter][name].copy_(values)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:  # type: ignore[override]
        """Of the groups alone: the state's tensors are set one by one, with ``set_scaled_state``."""
        state = self.state
        super().load_state_dict({**state_dict, "state": {}})
        self.state = state

    @torch.no_grad()
    def masters_from_weights(self) -> None:
        """The weights have been changed by something else than a step."""
        for parameter, own in self.state.items():
            own[MASTER].copy_(parameter.detach())


def frugal_adam(on_host: bool, moment_dtype: torch.dtype) -> type[FrugalAdam]:
    """The class that Megatron is given, which passes on no more than it knows."""
    return type("FrugalAdam", (FrugalAdam,), {"on_host": on_host, "moment_dtype": moment_dtype})


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
