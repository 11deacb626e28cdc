"""The shared memory in which ranks of one engine meet, by the code that vLLM runs on every processor.

vLLM's own communicator asks for the name only if its build for the processor has shared memory: AVX-512 has, AVX2 not.
"""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

cpu_communicator = pytest.importorskip(
    "vllm.distributed.device_communicators.cpu_communicator", reason="vLLM is not installed"
)

from mega_rl.rollout.vllm.start.cpu_adjustments import (  # noqa: E402
    PREFIX,
    SHARED_MEMORY,
    cpu_adjustments,
)

GROUP = SimpleNamespace(unique_name="tp:0", ranks=[2, 3])


def group_name(job: str) -> str:
    with cpu_adjustments(live_weights=True, job=job):
        name: str = cpu_communicator._CPUSHMDistributed.make_group_name(GROUP)
    return name


@pytest.mark.parametrize("identifier", [None, "//"])  # without an engine there is none; "//" is an external launcher's
def test_names_differ_by_job_alone(identifier: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if identifier is None:
        monkeypatch.delenv("VLLM_DIST_IDENT", raising=False)
    else:
        monkeypatch.setenv("VLLM_DIST_IDENT", identifier)
    names = [group_name(job) for job in ("one", "other", "one")]
    assert names[0] == names[2] != names[1]
    assert all(name.startswith(f"{PREFIX}{job}-") for name, job in zip(names, ("one", "other", "one"), strict=True))
    assert all(name.endswith("tp:0-[2-3]-cpushm") for name in names)
    assert os.environ.get("VLLM_DIST_IDENT") == identifier


def test_the_name_is_gone_once_all_ranks_have_met() -> None:
    left = SHARED_MEMORY / f"{PREFIX}gone-0-cpushm"
    with cpu_adjustments(live_weights=True, job="gone"):
        left.touch()
    assert not left.exists()
