"""The sockets by which the ranks of an engine met leave no file behind."""

from __future__ import annotations

import socket
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from mega_rl.rollout.vllm.start.sockets import SOCKETS, remove_socket_names

OTHER = (
    "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); print('bound', flush=True); input()"
)


@pytest.mark.skipif(not SOCKETS.exists(), reason="this system has no list of its sockets")
def test_only_this_process_loses_its_names_and_no_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    own, other, named = tmp_path / str(uuid.uuid4()), tmp_path / str(uuid.uuid4()), tmp_path / "of_somebody"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as kept:
        listener.bind(str(own))
        listener.listen()
        kept.bind(str(named))
        command = (sys.executable, "-c", OTHER, str(other))
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None and process.stdout.readline() == "bound\n"
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(str(own))
                answer, _ = listener.accept()
                remove_socket_names()
                with answer:
                    caller.sendall(b"still here")
                    assert answer.recv(10) == b"still here"
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted([other.name, named.name])
            process.communicate("\n")
