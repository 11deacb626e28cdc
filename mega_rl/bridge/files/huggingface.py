"""Hugging Face directories: safetensors read box by box and written tensor by tensor, never a whole model in memory."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from mega_rl.bridge.files.assembly import FileImage, disk_error, fsync, literal_file
from mega_rl.bridge.files.fused import DOWN, GATE_UP, ExpertPart, are_transposed, box_in_file, file_sizes, part_of
from mega_rl.bridge.files.stored import FilePlace, OpenTensors, StoredTensors
from mega_rl.bridge.mapping.tensors import LM_HEAD, hf_tensors
from mega_rl.bridge.slices import Box, indices, whole_box
from mega_rl.errors import InputError, shortened, shown
from mega_rl.models.files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, read_config, weights_problem
from mega_rl.models.shape import ModelShape

COPIED_FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
DTYPE_NAMES = {  # safetensors' spelling
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float64: "F64",
}
FLOAT_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


class HFReader:
    """Reads boxes of the tensors of one model directory, sharded or single."""

    def __init__(self, model_dir: str | Path) -> None:
        """Opens every shard's header; InputError for missing, truncated or inconsistent files."""
        self.model_dir = Path(model_dir)
        self._files: dict[str, Any] = {}  # shard file -> open handle
        self._file_of = self._locate()  # tensor -> shard file

    def names(self) -> list[str]:
        """Of the tensors of the files."""
        return list(self._file_of)

    def shape(self, name: str) -> tuple[int, ...]:
        """Of a tensor of the files, or of one expert's in them."""
        part = self._part(name)
        if part is None:
            return tuple(self._slice(name).get_shape())
        _, *matrix = self._slice(part.file_name).get_shape()
        rows, columns = reversed(matrix) if self._is_transposed(part.file_name) else matrix
        return (rows if part.file_name.endswith(DOWN) else rows // 2), columns

    def read(self, name: str, box: Box) -> torch.Tensor:
        """The box of a tensor in the checkpoint's dtype; only its bytes are read.

        Raises:
            InputError: the file cannot be read any more, or a weight is not finite.
        """
        place = self._place(name, self.shape(name))
        try:
            tensor: torch.Tensor = self._slice(self._file_name(name))[indices(place.in_array(box))]
        except (SafetensorError, OSError) as error:
            raise InputError(f"{self._path(name)}: cannot read {name} ({error}); copy the file again") from error
        if not torch.isfinite(tensor).all():
            raise InputError(f"{self._path(name)}: {name} has NaN or infinity in it; copy the file again")
        return place.in_order(tensor.view(tensor.shape[-len(box) :]) if box else tensor)

    def check(self, shape: ModelShape) -> None:
        """InputError unless the tensors are exactly those of the model, in shape and of a floating dtype."""
        expected = file_sizes(shape, hf_tensors(shape), self._has_transposed())
        missing = [name for name in expected if name not in self._file_of]
        if missing:
            raise InputError(f"{self.model_dir}: missing tensors {_some(missing)}; copy the model again")
        extra = [name for name in self._file_of if name not in expected and not _is_ignored(name, shape)]
        if extra:
            raise InputError(
                f"{self.model_dir}: unexpected tensors {_some(extra)}; the weights do not belong to this config.json"
            )
        for name, size in expected.items():
            if self.shape(name) != size:
                raise InputError(
                    f"{self._path(name)}: {name} has shape {list(self.shape(name))}, but config.json says {list(size)}"
                )
            dtype = self._slice(name).get_dtype()
            if dtype not in FLOAT_DTYPES:
                raise InputError(f"{self._path(name)}: {name} is {dtype}; give the unquantised model")

    def stored(self, shape: ModelShape) -> StoredTensors:
        """Where the tensors of a checked model lie in its files."""
        sizes, starts = hf_tensors(shape), {shard: self._starts(shard) for shard in self._files}
        places = {}
        for name, size in sizes.items():
            place, file_name = self._place(name, size), self._file_name(name)
            places[name] = [replace(place, offset=starts[place.file][file_name])]
        dtypes = {name: FLOAT_DTYPES[self._slice(self._file_name(name)).get_dtype()] for name in sizes}
        return StoredTensors(self.model_dir, sizes, dtypes, places)

    def _part(self, name: str) -> ExpertPart | None:
        """Where an expert's tensor lies that has no name of its own in the files; None: it has one."""
        return None if name in self._file_of else part_of(name)

    def _file_name(self, name: str) -> str:
        part = self._part(name)
        return name if part is None else part.file_name

    def _place(self, name: str, size: tuple[int, ...]) -> FilePlace:
        """Without the offset of its tensor in the file."""
        part = self._part(name)
        if part is None:
            return FilePlace(whole_box(size), self._file_of[name], 0, size, whole_box(size))
        is_transposed, shape = self._is_transposed(part.file_name), tuple(self._slice(part.file_name).get_shape())
        box = box_in_file(part, size, is_transposed)
        return FilePlace(whole_box(size), self._file_of[part.file_name], 0, shape, box, is_transposed)

    def _is_transposed(self, stack: str) -> bool:
        """The order of the experts in ``stack`` and its twin, as the shapes of both say."""
        experts = stack.removesuffix(DOWN).removesuffix(GATE_UP)
        gate_up, down = (tuple(self._slice(experts + end).get_shape()) for end in (GATE_UP, DOWN))
        return are_transposed(gate_up, down)

    def check_for_engines(self, shape: ModelShape) -> None:
        """InputError if engines do not read these files of a mixture: for the order of dimensions, or a missing key."""
        if shape.fused_experts and not self._has_transposed():
            raise InputError(
                f"{self.model_dir}: its files hold experts as transformers 5 writes them, [experts, rows, columns], "
                "and engines read them as on the hub, [experts, columns, rows]: write the model again with mega-rl "
                "convert, or take the hub's"
            )
        if shape.fused_experts and "norm_topk_prob" not in read_config(self.model_dir).get("text_config", {}):
            raise InputError(
                f"{self.model_dir / CONFIG_FILE}: text_config has no norm_topk_prob, which engines read: add "
                '"norm_topk_prob": true, which is what this family does'
            )

    def _has_transposed(self) -> bool:
        """Of the experts that the files hold together, if they are of one order."""
        stacks = (name for name in self._file_of if name.endswith(DOWN))
        return any(self._is_transposed(name) for name in stacks if name.removesuffix(DOWN) + GATE_UP in self._file_of)

    def _starts(self, shard: str) -> dict[str, int]:
        """Where each tensor's bytes begin in a shard whose header has been checked."""
        with (self.model_dir / shard).open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
        return {name: 8 + length + entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}

    def _path(self, name: str) -> Path:
        return self.model_dir / self._file_of[self._file_name(name)]

    def _slice(self, name: str) -> Any:
        return self._files[self._file_of[name]].get_slice(name)

    def _locate(self) -> dict[str, str]:
        """Which shard holds each tensor; a single file goes before an index, as in transformers."""
        if (self.model_dir / SINGLE_FILE).is_file():
            return {name: SINGLE_FILE for name in self._open(SINGLE_FILE)}
        index = self.model_dir / INDEX_FILE
        problem = weights_problem(self.model_dir)
        if problem is not None:
            raise InputError(problem)
        try:
            file_of = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            shards = sorted(set(file_of.values()))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            cause = shortened(str(error))
            raise InputError(f"{index} is not a safetensors index ({cause}); copy the model again") from error
        except OSError as error:
            raise InputError(f"{index} cannot be read ({error.strerror}); make it readable") from error
        for shard in shards:  # a path would lead out of the model's directory
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise InputError(f"{index} names the file {shown(shard)}: give the name of a file beside the index")
        present = {shard: set(self._open(shard)) for shard in shards}
        absent = [name for name, shard in file_of.items() if name not in present[shard]]
        if absent:
            raise InputError(f"{index} names tensors that its shards lack: {_some(absent)}; copy the model again")
        return dict(file_of)

    def _open(self, shard: str) -> list[str]:
        path = self.model_dir / shard
        if not os.path.isfile(path):
            raise InputError(f"{shortened(str(path))} is missing, but {INDEX_FILE} names it; copy the model again")
        try:
            self._files[shard] = safe_open(path, framework="pt", device="cpu")
            return list(self._files[shard].keys())
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path} is truncated or damaged ({error}); copy the file again") from error


class HFWriter:
    """Writes one model directory: tensors in any order, each straight to its place in its shard.

    Everything goes to a temporary directory beside ``out_dir``, which gets its name at the end of the
    ``with`` block, when all is on disk; an exception inside removes the temporary directory and leaves no ``out_dir``.

    Example::

        with HFWriter("out", shape, torch.bfloat16, 5 * 2**30, source_dir="model") as writer:
            for name, tensor in tensors:
                writer.write(name, tensor)
    """

    def __init__(
        self,
        out_dir: str | Path,
        shape: ModelShape,
        dtype: torch.dtype,
        max_shard_bytes: int,
        source_dir: str | Path,
        changes: Mapping[str, Any] | None = None,
    ) -> None:
        """``source_dir`` gives config, tokenizer and generation files; InputError if ``out_dir`` exists.

        ``changes``: keys of config.json that are otherwise.
        """
        self.out_dir, self.dtype = Path(out_dir), dtype
        if self.out_dir.exists():
            raise InputError(f"{self.out_dir} exists; choose another output directory or remove it")
        self._partial = self.out_dir.parent / f".{self.out_dir.name}.partial"
        self._stored, images = plan_huggingface(
            self._partial, shape, dict.fromkeys(hf_tensors(shape), dtype), max_shard_bytes
        )
        images |= metadata_files(source_dir, dtype, changes)
        self._missing = set(self._stored.shapes)
        try:
            shutil.rmtree(self._partial, ignore_errors=True)  # left by a killed writer
            for name, image in images.items():
                image.create(self._partial / name)
            self._files = OpenTensors(self._stored, is_writable=True)
        except OSError as error:
            shutil.rmtree(self._partial, ignore_errors=True)
            raise disk_error(self.out_dir, error) from error

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Puts one whole tensor, of the writer's dtype, into its shard."""
        size = self._stored.shapes[name]
        assert tuple(tensor.shape) == size and tensor.dtype == self.dtype, (
            f"{name}: {tuple(tensor.shape)} {tensor.dtype} instead of {size} {self.dtype}"
        )
        try:
            self._files.write(name, whole_box(size), tensor.detach().to("cpu"))
        except OSError as error:
            raise disk_error(self.out_dir, error) from error
        self._missing.discard(name)

    def _finish(self) -> None:
        """Makes the directory durable and gives it its name; every tensor must have been written."""
        assert not self._missing, f"not written: {_some(sorted(self._missing))}"
        try:
            for path in sorted(self._partial.iterdir()):
                fsync(path)
            fsync(self._partial)
            os.rename(self._partial, self.out_dir)
            fsync(self.out_dir.parent)
        except OSError as error:
            raise disk_error(self.out_dir, error) from error

    def __enter__(self) -> HFWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.__exit__(None, None, None)
        try:
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)


def value_changes(shape: ModelShape, pad_token_id: int | None) -> dict[str, Any]:
    """What makes the config.json of a language model that of its value model, for transformers.

    Args:
        pad_token_id: transformers reads the value at the last token that is another one; None: of one sequence at a
            time at its last token, of several at once not at all.
    """
    names = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [shape.architecture], "pad_token_id": pad_token_id, **names}


def metadata_files(
    source_dir: str | Path, dtype: torch.dtype, changes: Mapping[str, Any] | None = None
) -> dict[str, FileImage]:
    """config.json, which names ``dtype``, and the tokenizer and generation files that ``source_dir`` has."""
    config, source = read_config(source_dir), Path(source_dir)
    keys = [key for key in ("dtype", "torch_dtype") if key in config] or ["torch_dtype"]
    config |= dict.fromkeys(keys, str(dtype).removeprefix("torch.")) | dict(changes or {})
    files = {name: literal_file((source / name).read_bytes()) for name in COPIED_FILES if (source / name).is_file()}
    return files | {"config.json": literal_file(json.dumps(config, indent=2) + "\n")}


def plan_huggingface(
    root: Path, shape: ModelShape, dtypes: Mapping[str, torch.dtype], max_shard_bytes: int
) -> tuple[StoredTensors, dict[str, FileImage]]:
    """The safetensors files of a model under ``root`` without its weights, and the places of the weights in them."""
    sizes = hf_tensors(shape)
    parts = {name: part_of(name) if shape.fused_experts else None for name in sizes}
    in_file = {name: name if part is None else part.file_name for name, part in parts.items()}
    files, file_dtypes = file_sizes(shape, sizes), {in_file[name]: dtypes[name] for name in sizes}
    assert all(file_dtypes[in_file[name]] == dtypes[name] for name in sizes), "the experts of a layer have one dtype"
    num_bytes = {name: file_dtypes[name].itemsize * prod(size) for name, size in files.items()}
    shards = _group(num_bytes, max_shard_bytes)
    images: dict[str, FileImage] = {}
    located: dict[str, tuple[str, int]] = {}  # tensor of the files -> file, offset
    for i, names in enumerate(shards):
        single = len(shards) == 1
        file_name = SINGLE_FILE if single else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        images[file_name], starts = shard_image({name: files[name] for name in names}, file_dtypes)
        located |= {name: (file_name, start) for name, start in starts.items()}
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(num_bytes.values())},
            "weight_map": {name: file for name, (file, _) in located.items()},
        }
        images[INDEX_FILE] = literal_file(json.dumps(index, indent=2) + "\n")
    places = {}
    for name, size in sizes.items():
        part, stack = parts[name], in_file[name]
        box = whole_box(size) if part is None else box_in_file(part, size, is_transposed=True)
        places[name] = [FilePlace(whole_box(size), *located[stack], files[stack], box, part is not None)]
    return StoredTensors(root, sizes, dict(dtypes), places), images


def shard_image(
    sizes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, torch.dtype], metadata: Mapping[str, str] | None = None
) -> tuple[FileImage, dict[str, int]]:
    """A safetensors file without its tensors and the byte at which each begins; ``metadata`` goes into its header.

    Format: https://github.com/huggingface/safetensors#format (header length, JSON header, data).
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    starts: dict[str, int] = {}
    end = 0
    for name, size in sizes.items():
        starts[name], end = end, end + dtypes[name].itemsize * prod(size)
        header[name] = {"dtype": DTYPE_NAMES[dtypes[name]], "shape": list(size), "data_offsets": [starts[name], end]}
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    data_start = 8 + len(encoded)
    image = FileImage(data_start + end, ((0, struct.pack("<Q", len(encoded)) + encoded),))
    return image, {name: data_start + start for name, start in starts.items()}


def _group(num_bytes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Names in order, in shards of at most ``max_shard_bytes``; a larger tensor has a shard of its own."""
    shards: list[list[str]] = []
    filled = 0
    for name, size in num_bytes.items():
        if not shards or filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _is_ignored(name: str, shape: ModelShape) -> bool:
    """Tensors that some checkpoints carry and transformers does not load either."""
    return name.endswith("rotary_emb.inv_freq") or (shape.tied and name == LM_HEAD)


def _some(names: list[str]) -> str:
    first = shortened(", ".join(names[:5]))
    return first if len(names) <= 5 else f"{first} and {len(names) - 5} more"
