"""The pictures of a sample on their way to a reward: references, which a worker reads where it needs the picture."""

from __future__ import annotations

import hashlib
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from mega_rl.rewards.sandbox.scratch import Scratch

Reference = tuple[str, str, str]  # where a picture is from (for messages), the SHA-256 of its encoded bytes, its path


class Encoded(Protocol):
    """A picture of the data, as its file or its encoded bytes."""

    @property
    def where(self) -> str: ...

    @property
    def digest(self) -> str: ...

    @property
    def source(self) -> bytes | Path: ...


class Lent:
    """The pictures of the samples under way: each that no file of the data holds is a temporary file meanwhile.

    However many samples of a prompt are under way, its pictures are kept once. Any thread may call the methods.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users: Counter[str] = Counter()  # by the digests of pictures in temporary files
        self._scratch: Scratch | None = None
        self.close: Callable[[], object] = lambda: None

    def take(self, pictures: Sequence[Encoded]) -> list[Reference]:
        """What is sent to the worker; the files stay until ``give_back``."""
        with self._lock:
            return [(one.where, one.digest, self._file(one.digest, one.source)) for one in pictures]

    def _file(self, digest: str, source: bytes | Path) -> str:
        if isinstance(source, Path):
            return str(source)
        if self._scratch is None:
            self._scratch = Scratch()
            self.close = weakref.finalize(self, self._scratch.remove)
        path = Path(self._scratch.path, digest)
        if not self._num_users[digest]:
            path.write_bytes(source)
        self._num_users[digest] += 1
        return str(path)

    def give_back(self, pictures: Sequence[Encoded]) -> None:
        """A sample that had taken these is answered."""
        with self._lock:
            for one in pictures:
                if isinstance(one.source, bytes) and self._scratch is not None:
                    self._num_users[one.digest] -= 1
                    if not self._num_users[one.digest]:
                        del self._num_users[one.digest]
                        Path(self._scratch.path, one.digest).unlink(missing_ok=True)


def read(references: Sequence[Reference]) -> list[bytes]:
    """The encoded bytes of every picture. Raises ValueError or OSError: one is not there any more as the run had it."""
    return [_read(*one) for one in references]


def _read(where: str, digest: str, path: str) -> bytes:
    content = Path(path).read_bytes()
    if hashlib.sha256(content).hexdigest() != digest:
        raise ValueError(f"{where} has changed since the run began: put it back as it was")
    return content
