"""Run untrusted programs for other machines: ``python tools/sandbox_server.py [--host HOST] [--port PORT]``.

The protocol is in docs/sandbox.md. Listens on loopback unless told otherwise; on any other address a token is needed:
put it into MEGA_RL_SANDBOX_TOKEN, here and where the programs come from. Exit status 0: ended by a signal, 2: bad
input.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from mega_rl.errors import InputError
from mega_rl.rewards.sandbox import sandbox
from mega_rl.rewards.sandbox.remote import TOKEN, token_of
from mega_rl.rewards.sandbox.service import LOOPBACK, Server, Service

MIN_TOKEN = 16  # characters


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, default=8200, help="0: any free one (default: 8200)")
    parser.add_argument("--workers", type=int, default=os.cpu_count(), help="programs at once (default: one per core)")
    parser.add_argument("--max-waiting", type=int, default=256, help="requests that wait for a worker (default: 256)")
    parser.add_argument("--max-timeout-s", type=float, default=60.0, help="of one program (default: 60)")
    parser.add_argument("--max-memory-bytes", type=int, default=1 << 32, help="of one program (default: 4294967296)")
    parser.add_argument("--isolation", choices=("namespaces", "limits"), default="namespaces")
    parser.add_argument("--preload", nargs="*", default=[], help="modules that programs often import")
    return parser.parse_args(arguments)


def service_of(options: argparse.Namespace) -> Service:
    """Raises InputError."""
    try:
        token = token_of(os.environ.pop(TOKEN, "")) or None  # no program, and no process of one, inherits it
    except ValueError as error:
        raise InputError(f"{error}; make another one") from error
    if token is None and options.host not in LOOPBACK:
        raise InputError(f"--host {options.host} can be reached from elsewhere; put a token into {TOKEN}")
    if token is not None and len(token) < MIN_TOKEN:
        raise InputError(f"the token in {TOKEN} has {len(token)} characters; give it at least {MIN_TOKEN}")
    if min(options.workers, options.max_waiting, options.max_timeout_s) <= 0 or options.max_memory_bytes < 1 << 26:
        raise InputError(
            f"--workers, --max-waiting and --max-timeout-s must be above 0, --max-memory-bytes at least {1 << 26}"
        )
    namespaces = options.isolation == "namespaces"
    if not namespaces and os.geteuid() == 0:
        raise InputError("--isolation limits runs no programs as root; use namespaces, or start as another user")
    if namespaces and (reason := sandbox.obstacle()) is not None:
        raise InputError(
            f"this system allows no unprivileged namespaces ({reason}); allow them, or give --isolation limits as "
            "another user than root"
        )
    return Service(
        token,
        options.workers,
        options.max_waiting,
        options.max_timeout_s,
        options.max_memory_bytes,
        namespaces,
        tuple(options.preload),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        service = service_of(options)
        try:
            server = Server(options.host, options.port, service)
        except (OSError, OverflowError) as error:
            raise InputError(f"--host {options.host} --port {options.port} cannot be listened on: {error}") from error
    except InputError as error:
        print(f"sandbox_server: {error}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, _end)
    host, port = server.server_address[:2]
    shown = f"[{host!s}]" if ":" in str(host) else str(host)
    print(f"sandbox service at http://{shown}:{port}, {service.num_workers} programs at once", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
        sandbox.close_zygotes()
    return 0


def _end(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
