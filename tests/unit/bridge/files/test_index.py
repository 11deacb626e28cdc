"""The index of a checkpoint as the Python that wrote it pickles it."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from mega_rl.bridge.files.torch_dist.torch_dist import INDEX, _IndexUnpickler, read_index
from mega_rl.errors import InputError

MEMBER = _MEM_FORMAT_ENCODING.TORCH_PRESERVE_FORMAT


class Reached:
    """Is pickled as the attribute of something, as Python 3.11.0 to 3.11.3 pickles members of enums."""

    def __init__(self, kind: Any, name: str) -> None:
        self._of = kind, name

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self._of


def test_members_of_enums_are_read_however_python_wrote_them() -> None:
    for value in (MEMBER, Reached(_MEM_FORMAT_ENCODING, MEMBER.name)):
        assert _IndexUnpickler(io.BytesIO(pickle.dumps(value))).load() is MEMBER


@pytest.mark.parametrize(("kind", "name"), [(_MEM_FORMAT_ENCODING, "__class__"), (torch.Size, "__init__")])
def test_nothing_else_is_reached_through_it(tmp_path: Path, kind: Any, name: str) -> None:
    with pytest.raises(InputError, match="asks for"):
        (tmp_path / INDEX).write_bytes(pickle.dumps(Reached(kind, name)))
        read_index(tmp_path)
