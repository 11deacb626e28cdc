"""Environment and fixtures shared by all tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import fuzzing

REPO = Path(__file__).resolve().parent.parent

# Before anything imports torch: small tensors are slowest on many threads, and no test may reach for a network.
for key, value in {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "MPLBACKEND": "Agg",
}.items():
    os.environ.setdefault(key, value)

# What a shell starts with & ignores interrupts, and so would all that it starts; tests send some and wait for the end.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Machines are busy: how long an example takes says nothing.
# The same examples in every run of the suite: what is found at random belongs into `make fuzz`.
settings.register_profile("mega_rl", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("mega_rl")


def pytest_report_header() -> str | None:
    if "NPU_STUB_DEVICES" in os.environ:
        return None
    return "tests/npu is not collected here: `make test-npu` runs it in a process that imports torch_npu"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for test, tally in fuzzing.TALLIES.items() if fuzzing.NUM_EXAMPLES else ():
        terminalreporter.write_line(
            f"{test}: {tally.accepted} accepted, {tally.refused} refused, {tally.traceback} tracebacks, "
            f"slowest {tally.slowest_s:.2f} s"
        )


@pytest.fixture(scope="session")
def gsm8k_dir() -> Path:
    """The directory with GSM8K's ``train.jsonl`` and ``test.jsonl``; skips where there is none."""
    named = os.environ.get("MEGA_RL_GSM8K_DIR")
    directory = Path(named) if named else REPO.parent / "shared" / "data" / "gsm8k"
    missing = [name for name in ("train.jsonl", "test.jsonl") if not (directory / name).is_file()]
    if named and missing:
        pytest.fail(f"MEGA_RL_GSM8K_DIR={named} has no {' and no '.join(missing)}")
    if missing:
        pytest.skip("no GSM8K here: set MEGA_RL_GSM8K_DIR to the directory with its train.jsonl and test.jsonl")
    return directory
