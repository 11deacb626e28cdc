"""Tokens between the ranks that sample them and those that learn from them."""

from __future__ import annotations

from tests.distributed.rollout.run_trajectory_store import LAYOUTS, WORLD
from tests.launching.launch import ranks


def test_every_rank_is_sent_its_share_and_packs_what_it_would_pack_of_the_whole() -> None:
    launched = ranks("tests/distributed/rollout/run_trajectory_store.py", nproc=WORLD).check()
    assert [line.split(":")[0] for line in launched.stdout.splitlines() if "ROUTED" in line] == [
        f"ROUTED {name}" for name in LAYOUTS
    ]
