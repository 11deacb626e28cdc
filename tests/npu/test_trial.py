"""``tools/check_env.py --trial loop``: the first command on a new Ascend machine, on pretended devices."""

from __future__ import annotations

import pytest

from tests.distributed.doctor.test_trial import figures_of_the_loop
from tests.npu import emulation

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not emulation.has_rollout(), reason=emulation.missing_rollout()),
]


def test_the_trial_of_the_loop_on_npu() -> None:
    """In bfloat16, as on a real device: the engine's figure is a rounding, not zero."""
    assert 0 < figures_of_the_loop("npu")["trainer and engine, mean of the tokens"] < 1e-2
