"""Simulated 4-bit weights: the outgoing stream is quantised and dequantised, the trainer's weights are not touched.

The engine then samples from the policy that it would hold in four bits, in its ordinary dtype and kernels. Both formats
keep E2M1 elements (1 sign, 2 exponent, 1 mantissa bit: 0, 0.5, 1, 1.5, 2, 3, 4, 6) and share a scale between blocks of
consecutive elements along the input dimension, the last one of a Hugging Face weight:
  - ``mxfp4``: blocks of 32, scale a power of two (E8M0). OCP Microscaling Formats (MX) Specification 1.0, section 6.3.
  - ``nvfp4``: blocks of 16, scale in E4M3 times one float32 scale of the whole tensor, its largest magnitude / (6 x
    448). NVIDIA, "Introducing NVFP4 for Efficient and Accurate Low-Precision Inference" (2025).
All arithmetic is float32 and rounds to nearest, ties to even. A value depends on its block and on the whole tensor's
largest magnitude alone, so every layout gives the same bits.

Letters in shapes: N blocks, S elements of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl.bridge.outgoing.transform import Changed
from mega_rl.bridge.reshard.execute import Read
from mega_rl.bridge.slices import Box, Slice
from mega_rl.errors import InputError

E2M1_MAX, E2M1_MIN_EXPONENT, E2M1_MAX_EXPONENT = 6.0, 0, 2  # exponents of the smallest normal and of the largest
E4M3_MAX, E4M3_MIN_EXPONENT = 448.0, -6
E8M0_MIN_EXPONENT = -127
MAX_ELEMENTS_AT_A_TIME = 1 << 22  # the arithmetic takes several float32 copies of what it works on
QUANTIZED_ROLE = "linear"  # projections and experts; not embeddings, head, norms, routers, biases


def round_to_float(values: Tensor, mantissa_bits: int, min_exponent: int, largest: float) -> Tensor:
    """The nearest numbers of a small float format, ties to even, saturating; float32 in and out, any shape.

    Args:
        mantissa_bits: stored bits of the mantissa.
        min_exponent: of the smallest normal number; numbers below it are spaced as there (subnormal).
        largest: the largest finite magnitude.
    """
    _, exponents = torch.frexp(values)  # value = m x 2^e with 0.5 <= |m| < 1
    spacing = torch.ldexp(torch.ones_like(values), (exponents - 1).clamp_min(min_exponent) - mantissa_bits)
    return (torch.round(values / spacing) * spacing).clamp(-largest, largest)  # torch.round takes ties to even


def mxfp4(blocks_NS: Tensor, tensor_amax: float) -> Tensor:
    """Blocks [N, S] float32 as MXFP4 holds them; ``tensor_amax`` is not used.

    The shared exponent is ``floor(log2(largest magnitude)) - 2``, so elements above 6 scales saturate (section 6.3).
    """
    _, exponents = torch.frexp(blocks_NS.abs().amax(1, keepdim=True))
    shared = (exponents - 1 - E2M1_MAX_EXPONENT).clamp_min(E8M0_MIN_EXPONENT)
    # Scaled in two exact steps: 2^-shared itself can be beyond float32.
    half = torch.div(shared, 2, rounding_mode="floor")
    scaled = torch.ldexp(torch.ldexp(blocks_NS, -half), half - shared)
    elements = round_to_float(scaled, 1, E2M1_MIN_EXPONENT, E2M1_MAX)
    return torch.ldexp(torch.ldexp(elements, half), shared - half)


def nvfp4(blocks_NS: Tensor, tensor_amax: float) -> Tensor:
    """Blocks [N, S] float32 as NVFP4 holds them; ``tensor_amax`` is the whole tensor's largest magnitude."""
    tensor_scale = (torch.tensor(tensor_amax, dtype=torch.float32) / (E2M1_MAX * E4M3_MAX)).item()
    if tensor_scale == 0:
        return torch.zeros_like(blocks_NS)
    wanted = blocks_NS.abs().amax(1, keepdim=True) / E2M1_MAX / tensor_scale
    scales = round_to_float(wanted, 3, E4M3_MIN_EXPONENT, E4M3_MAX) * tensor_scale
    # A block far below the tensor's largest has scale 0, and so has every element.
    elements = round_to_float(blocks_NS / scales.where(scales > 0, 1.0), 1, E2M1_MIN_EXPONENT, E2M1_MAX)
    return elements * scales


FORMATS: dict[str, tuple[int, Callable[[Tensor, float], Tensor]]] = {"nvfp4": (16, nvfp4), "mxfp4": (32, mxfp4)}


def quantize_dequantize(weight: Tensor, format_name: str, tensor_amax: float) -> Tensor:
    """What is left of a weight [rows, columns] whose first column begins a block; float32, a new tensor.

    A last block with fewer columns than the others is a block of its own.
    """
    size, function = FORMATS[format_name]
    rows, columns = weight.shape
    result = torch.empty(rows, columns, dtype=torch.float32, device=weight.device)
    num_rows = max(1, MAX_ELEMENTS_AT_A_TIME // columns)
    for part, place in zip(weight.split(num_rows), result.split(num_rows), strict=True):
        padded = torch.nn.functional.pad(part.float(), (0, -columns % size))  # zeros change no largest magnitude
        place.copy_(function(padded.reshape(-1, size), tensor_amax).view(len(part), -1)[:, :columns])
    return result


class SimulatedQuantization:
    """The ``Transform`` that quantises what a reader gives of the linear weights.

    Args:
        format_name: a key of ``FORMATS``.
        shapes: HF name -> full shape, of the whole model.
        roles: HF name -> role, of the whole model.
        held: what this rank holds.
        device: where the group's collectives take tensors.

    Raises:
        InputError: tensor parallelism cuts a weight of this rank inside a block.
    """

    def __init__(
        self,
        format_name: str,
        shapes: Mapping[str, tuple[int, ...]],
        roles: Mapping[str, str],
        held: Sequence[Slice],
        device: torch.device,
    ) -> None:
        self.format_name, self.device = format_name, device
        self.block, _ = FORMATS[format_name]
        self.widths = {name: shapes[name][-1] for name, role in roles.items() if role == QUANTIZED_ROLE}
        self.own = [piece for piece in held if piece.hf_name in self.widths]
        for piece in self.own:
            self._check(piece)

    def _check(self, piece: Slice) -> None:
        width, columns = self.widths[piece.hf_name], piece.hf_box[-1]
        if any(edge % self.block and edge != width for edge in columns):
            raise InputError(
                f"rollout.simulated_quantization is {self.format_name!r}, whose blocks of {self.block} columns the "
                f"trainer's tensor parallelism cuts: a rank holds columns {columns[0]} to {columns[1]} of "
                f"{piece.hf_name} ({width} columns); lower parallel.tensor or parallel.expert_tensor"
            )

    def for_sync(self, read: Read, version: int) -> Changed:
        """``read`` with the linear weights quantised, for the weights as they are now; collective.

        Asks ``read`` for whole blocks around what is wanted, and for every own slice once to find the largest
        magnitudes.
        """
        largest = self._largest(read)

        def quantized(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> Tensor:
            if hf_name not in self.widths:
                return read(local_name, hf_name, hf_box, local_box)
            start, end = hf_box[-1]
            before, after = start % self.block, min(-end % self.block, self.widths[hf_name] - end)
            clean = read(local_name, hf_name, _widened(hf_box, before, after), _widened(local_box, before, after))
            values = quantize_dequantize(clean, self.format_name, largest[hf_name])
            return values[:, before : before + end - start].to(clean.dtype)

        return Changed(quantized)

    def _largest(self, read: Read) -> dict[str, float]:
        """HF name -> largest magnitude of the whole tensor, over all ranks."""
        index = {name: i for i, name in enumerate(self.widths)}
        largest = torch.zeros(len(index), device=self.device)
        for piece in self.own:
            part = read(piece.local_name, piece.hf_name, piece.hf_box, piece.local_box).abs().amax().float()
            largest[index[piece.hf_name]] = torch.maximum(largest[index[piece.hf_name]], part)
        if dist.is_initialized():
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        return dict(zip(index, largest.tolist(), strict=True))


def _widened(box: Box, before: int, after: int) -> Box:
    start, end = box[-1]
    return (*box[:-1], (start - before, end + after))
