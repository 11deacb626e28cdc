"""Context parallelism at a length of real use: 16,384 tokens, where lists of positions and keys are long."""

from __future__ import annotations

import pytest

from tests.launching.launch import REPO, ranks


@pytest.mark.slow
def test_two_ranks_share_16k_tokens_exactly() -> None:
    """Output and gradients of queries, keys and values, in float32, relative to the largest number."""
    launched = ranks(REPO / "tests" / "distributed" / "megatron" / "layers" / "run_long_context.py", nproc=2).check()
    lines = [line.split()[1:] for line in launched.stdout.splitlines() if line.startswith("ERRORS")]
    assert sorted(line[:2] for line in lines) == [[m, r] for m in ("gather", "ulysses") for r in "01"]
    for method, rank, *errors in lines:
        assert len(errors) == 4 and max(map(float, errors)) < 2e-5, (method, rank, errors)
