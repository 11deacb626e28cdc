"""What every rank of a large run pays for the others."""

from __future__ import annotations

from pathlib import Path

from tests.launching.launch import REPO, ranks

NUM_RANKS = 12


def test_ranks_connect_with_few_others_and_share_the_work(tmp_path: Path) -> None:
    """A full mesh takes a socket for each other rank, and its own store's beside them."""
    launched = ranks(
        REPO / "tests" / "distributed" / "parallel" / "run_collectives.py", tmp_path, nproc=NUM_RANKS, timeout=250
    )
    sockets = [int(line.split()[1]) for line in launched.check().stdout.splitlines() if line.startswith("SOCKETS")]
    assert len(sockets) == NUM_RANKS
    assert sorted(sockets)[NUM_RANKS // 2] < NUM_RANKS - 1, sockets
