"""Sockets with names in the temporary folder, by which the ranks of an engine meet."""

from __future__ import annotations

import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

SOCKETS = Path("/proc/net/unix")  # of Linux: their inodes and names
_NAME = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")  # as vLLM chooses them


def remove_socket_names() -> None:
    """Take the names away from the sockets that an engine has opened in this process.

    Once all ranks of the engine have met nobody looks for them any more, connections stay, and a socket without a name
    leaves no file behind, however its process ends.
    """
    directory = os.environ.get("VLLM_RPC_BASE_PATH", tempfile.gettempdir())
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            own.add(os.readlink(descriptor))
    for line in SOCKETS.read_text(errors="replace").splitlines()[1:]:
        fields = line.split(maxsplit=7)
        if len(fields) < 8 or f"socket:[{fields[6]}]" not in own:
            continue
        path = Path(fields[7])
        if str(path.parent) == directory and _NAME.fullmatch(path.name):
            path.unlink(missing_ok=True)
