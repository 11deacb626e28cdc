"""Adapters in PEFT's directories: read box by box under one name per projection, and written so.

Experts come in two formats. Per expert: ``...mlp.experts.3.gate_proj.lora_A.weight``, which is what we write. Fused, as
PEFT has them with transformers 5: one adapter of the stacked parameter of all E experts, with R ranks for each of them,

    gate and up   ...mlp.experts.base_layer.lora_A.weight [E R, hidden]   lora_B.weight [2 ffn, R E]
    down          ...mlp.experts.lora_A.weight [E R, ffn]                 lora_B.weight [hidden, R E]

The experts are the slowest dimension of A's rows and the fastest of B's columns. Gate and up share A. Where PEFT made
such an adapter from one per expert, the first half of the ranks is gate's alone and the second half up's: it is read
as what it was made from.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mega_rl.bridge.files.assembly import disk_error, fsync
from mega_rl.bridge.files.huggingface import FLOAT_DTYPES, shard_image
from mega_rl.bridge.files.peft.peft_config import (
    CONFIG_FILE,
    PeftConfig,
    check_base,
    config_fields,
    read_adapter_config,
)
from mega_rl.bridge.lora import Factors
from mega_rl.bridge.mapping.adapter import PREFIX, names_of
from mega_rl.bridge.mapping.tensors import hf_tensors, roles
from mega_rl.bridge.slices import Box
from mega_rl.errors import InputError, shortened, shown
from mega_rl.models.shape import ModelShape

WEIGHTS_FILE = "adapter_model.safetensors"
A_SUFFIX, B_SUFFIX = ".lora_A.weight", ".lora_B.weight"
ADAPTED_ROLES = ("linear", "router", "lm_head")


@dataclass(frozen=True)
class _Piece:
    """Where a file has the factors of one projection: rows of an A, rows and every so manieth column of a B."""

    a_name: str
    b_name: str
    rank: int
    scale: float
    first_a: int = 0  # row of A
    first_b: int = 0  # row of B
    first_column: int = 0  # of B
    stride: int = 1  # between columns of B


class PeftReader:
    """Reads boxes of the factors of one adapter directory, whatever its format for experts.

    Args:
        directory: with adapter_config.json and adapter_model.safetensors.
        shape: of the base model.
        model_dir: the base model's directory, whose name must be that of the adapter's base.
        key: who named the directory, for errors.

    Raises:
        InputError: a file that is missing or damaged, a kind of adapter that is not supported, or one of another base.
    """

    def __init__(self, directory: str | Path, shape: ModelShape, model_dir: str | Path, key: str) -> None:
        self.directory, self._where = Path(directory), f"{key} {shown(str(directory))}"
        self.config = read_adapter_config(self.directory, key)
        check_base(self.config.base, Path(model_dir), self._where)
        path = self.directory / WEIGHTS_FILE
        if not path.is_file():
            raise InputError(f"{self._where} has no {WEIGHTS_FILE}: save the adapter so, no pickle is read")
        try:
            self._file = safe_open(path, framework="pt", device="cpu")
            self._sizes = {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is truncated or damaged ({error}); copy the file again") from error
        self._shape, self._whole = shape, ("", torch.empty(0))
        self._pieces = self._locate()

    @property
    def weights(self) -> dict[str, int]:
        """The adapted weights in the model's order, each with its rank."""
        return {name: piece.rank for name, piece in self._pieces.items()}

    def scale_of(self, weight: str) -> float:
        return self._pieces[weight].scale

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """Every factor by its name, with its full shape."""
        shapes = hf_tensors(self._shape)
        found: dict[str, tuple[int, ...]] = {}
        for weight, piece in self._pieces.items():
            a, b = names_of(weight)
            (rows, columns), rank = shapes[weight], piece.rank
            found |= {a: (rank, columns), b: (rows, rank)}
        return found

    def read(self, name: str, box: Box) -> Tensor:
        """The box of a factor in the file's dtype.

        Raises:
            InputError: the file cannot be read any more, or a value is not finite.
        """
        is_a = name.endswith(A_SUFFIX)
        piece = self._pieces[name.removeprefix(PREFIX).removesuffix(A_SUFFIX if is_a else B_SUFFIX) + ".weight"]
        (start, end), (left, right) = box
        if is_a:
            source, rows, columns = piece.a_name, slice(piece.first_a + start, piece.first_a + end), slice(left, right)
        else:
            source, rows = piece.b_name, slice(piece.first_b + start, piece.first_b + end)
            first = piece.first_column + left * piece.stride
            columns = slice(first, first + (right - left) * piece.stride, piece.stride)
        return self._tensor(source)[rows, columns]

    def factors(self, weight: str) -> Factors:
        """The whole adapter of a weight."""
        sizes, (a, b) = hf_tensors(self._shape), names_of(weight)
        (rows, columns), rank = sizes[weight], self._pieces[weight].rank
        return Factors(
            self.read(a, ((0, rank), (0, columns))), self.read(b, ((0, rows), (0, rank))), self.scale_of(weight)
        )

    def _tensor(self, name: str) -> Tensor:
        """A whole tensor of the file; the last one is kept, of which a fused one is asked for expert by expert."""
        if self._whole[0] != name:
            path = self.directory / WEIGHTS_FILE
            try:
                tensor: Tensor = self._file.get_tensor(name)
            except (SafetensorError, OSError) as error:
                raise InputError(f"{path}: cannot read {name} ({error}); copy the file again") from error
            if not torch.isfinite(tensor).all():
                raise InputError(f"{path}: {name} has NaN or infinity in it; copy the file again")
            self._whole = name, tensor
        return self._whole[1]

    # --- which tensors of the file are the factors of which weight ---------------------------------------------------

    def _locate(self) -> dict[str, _Piece]:
        sizes, known = hf_tensors(self._shape), roles(self._shape)
        found: dict[str, _Piece] = {}
        for a_name in sorted(self._sizes):
            if a_name.endswith(B_SUFFIX) and a_name.removesuffix(B_SUFFIX) + A_SUFFIX in self._sizes:
                continue
            module = a_name.removeprefix(PREFIX).removesuffix(A_SUFFIX)
            b_name = a_name.removesuffix(A_SUFFIX) + B_SUFFIX
            if not (a_name.startswith(PREFIX) and a_name.endswith(A_SUFFIX) and b_name in self._sizes):
                raise InputError(
                    f"{self._where} has the tensor {shortened(a_name)}, which is no pair lora_A and lora_B of a linear "
                    "layer: save an adapter of linear layers only"
                )
            if f"{module}.weight" in sizes and known[f"{module}.weight"] in ADAPTED_ROLES:
                found[f"{module}.weight"] = self._plain(f"{module}.weight", a_name, b_name, sizes)
            else:
                found |= self._fused(module, a_name, b_name, sizes)
        if not found:
            raise InputError(f"{self._where}: {WEIGHTS_FILE} has no adapter of any layer: save the adapter again")
        return {name: found[name] for name in sizes if name in found}

    def _plain(self, weight: str, a_name: str, b_name: str, sizes: Mapping[str, tuple[int, ...]]) -> _Piece:
        module = weight.removesuffix(".weight")
        rank, (rows, columns) = self.config.rank_of(module), sizes[weight]
        self._expect(a_name, (rank, columns))
        self._expect(b_name, (rows, rank))
        return _Piece(a_name, b_name, rank, self.config.scale_of(module))

    def _expect(self, name: str, size: tuple[int, ...]) -> None:
        if self._sizes[name] != size:
            raise InputError(
                f"{self._where}: {shortened(name)} is of shape {list(self._sizes[name])}, and the model with its "
                f"{CONFIG_FILE} asks for {list(size)}: give the adapter of this model"
            )
        dtype = self._file.get_slice(name).get_dtype()
        if dtype not in FLOAT_DTYPES:
            raise InputError(f"{self._where}: {shortened(name)} is {dtype}: give an adapter that is not quantised")

    def _fused(self, module: str, a_name: str, b_name: str, sizes: Mapping[str, tuple[int, ...]]) -> dict[str, _Piece]:
        """The adapters of all experts of a layer in one pair of factors."""
        experts = module.removesuffix(".base_layer")
        gate, up, down = (f"{experts}.0.{part}_proj.weight" for part in ("gate", "up", "down"))
        mixture = self._shape.mixture
        if mixture is None or gate not in sizes:
            raise InputError(
                f"{self._where} adapts {shortened(module)}, which is no linear layer of the model: give the adapter of "
                "this model"
            )
        (ffn, hidden), num_experts = sizes[gate], mixture.num_experts
        is_gate_up = (self._sizes[a_name][-1:], self._sizes[b_name][:1]) == ((hidden,), (2 * ffn,))
        rank = self.config.rank_of(f"{experts}.{'gate_up_proj' if is_gate_up else 'down_proj'}")
        scale = self.config.scale_of(f"{experts}.{'gate_up_proj' if is_gate_up else 'down_proj'}")
        rows, columns = (2 * ffn, hidden) if is_gate_up else sizes[down]
        self._expect(a_name, (num_experts * rank, columns))
        self._expect(b_name, (rows, rank * num_experts))
        half = rank // 2 if is_gate_up and self._is_block_diagonal(b_name, ffn, rank * num_experts // 2, rank) else 0
        found = {}
        for expert in range(num_experts):

            def piece(number: int, first_b: int, expert: int = expert) -> _Piece:
                """Of the first or second projection that this pair adapts."""
                skipped = number * half
                places = expert * rank + skipped, first_b, skipped * num_experts + expert, num_experts
                return _Piece(a_name, b_name, half or rank, scale, *places)

            if is_gate_up:
                found[gate.replace(".0.gate", f".{expert}.gate")] = piece(0, 0)
                found[up.replace(".0.up", f".{expert}.up")] = piece(1, ffn)
            else:
                found[down.replace(".0.down", f".{expert}.down")] = piece(0, 0)
        return found

    def _is_block_diagonal(self, b_name: str, ffn: int, half: int, rank: int) -> bool:
        """Whether gate's rows [0, ffn) use only the first half of the ranks and up's only the second."""
        if rank % 2:
            return False
        b = self._tensor(b_name)
        return not (b[:ffn, half:].any() or b[ffn:, :half].any())


# --- writing ---------------------------------------------------------------------------------------------------------


def target_modules(weights: Collection[str], linear: Iterable[str]) -> list[str]:
    """PEFT's ``target_modules`` for these adapted weights: last names if they say it all, else whole names."""
    last = {name.split(".")[-2] for name in weights}
    others = [name for name in linear if name not in weights and name.split(".")[-2] in last]
    return sorted({name.removesuffix(".weight") for name in weights} if others else last)


def write_adapter(
    out_dir: Path, config: PeftConfig, targets: list[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Write an adapter directory; what an earlier run left at ``out_dir`` is replaced by it, whole.

    Args:
        targets: PEFT's ``target_modules``.
        tensors: every factor by its name, all of one dtype.
        metadata: for the header of the safetensors file.

    Raises:
        InputError: the disk.
    """
    fresh, replaced = out_dir.with_name(f".{out_dir.name}.new"), out_dir.with_name(f".{out_dir.name}.replaced")
    sizes = {name: tuple(tensor.shape) for name, tensor in sorted(tensors.items())}
    image, starts = shard_image(sizes, {name: tensor.dtype for name, tensor in tensors.items()}, metadata)
    try:
        for leftover in (fresh, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
        image.create(fresh / WEIGHTS_FILE)
        with (fresh / WEIGHTS_FILE).open("r+b") as file:
            for name, start in starts.items():
                file.seek(start)
                file.write(tensors[name].detach().cpu().contiguous().view(torch.uint8).flatten().numpy().data)
        (fresh / CONFIG_FILE).write_text(json.dumps(config_fields(config, targets), indent=2) + "\n", encoding="utf-8")
        for path in (fresh / WEIGHTS_FILE, fresh / CONFIG_FILE, fresh):
            fsync(path)
        if out_dir.exists():
            out_dir.rename(replaced)
        fresh.rename(out_dir)
        fsync(out_dir.parent)
        shutil.rmtree(replaced, ignore_errors=True)
    except OSError as error:
        raise disk_error(out_dir, error) from error
