"""Room for engines in a Ray cluster, from the resources of its nodes."""

from __future__ import annotations

import pytest

from mega_rl.errors import InputError
from mega_rl.platform.cpu import CpuPlatform
from mega_rl.platform.cuda import CudaPlatform
from mega_rl.platform.npu import NpuPlatform
from mega_rl.rollout.remote.ray_room import bundle, check_room

NPU = {"CPU": 1, "NPU": 1}
NODE = {"CPU": 64.0, "memory": 1e11, "NPU": 8.0}


def test_what_a_worker_takes_is_what_its_actor_asks_for() -> None:
    assert bundle(NpuPlatform.actor_options) == {"CPU": 1, "NPU": 1}
    assert bundle(CudaPlatform.actor_options) == {"CPU": 1, "GPU": 1}
    assert bundle(CpuPlatform.actor_options) == {"CPU": 1}


@pytest.mark.parametrize(("num_engines", "size"), [(16, 1), (2, 8), (4, 4), (4, 3)])
def test_engines_that_fit_are_accepted(num_engines: int, size: int) -> None:
    check_room([NODE, NODE], NPU, num_engines, size)


def test_a_cluster_of_gpus_is_named_with_the_fix() -> None:
    nodes = [{"CPU": 64.0, "GPU": 8.0, "accelerator_type:Ascend910B": 1.0}] * 2
    with pytest.raises(InputError, match="GPU: 16.*wait for ever") as caught:
        check_room(nodes, NPU, 1, 1)
    assert """ray start --resources='{"NPU": 8}'`, not with --num-gpus""" in str(caught.value)


@pytest.mark.parametrize(
    ("nodes", "num_engines", "size", "words"),
    [
        ([NODE], 3, 4, r"needs NPU: 12 \(rollout.num_engines 3 x .*size 4\), and the Ray cluster has 8: lower"),
        ([{"CPU": 4.0}], 1, 1, r"needs NPU: 1 .* has 0"),
        ([{"CPU": 1.0, "NPU": 8.0}], 2, 1, r"needs CPU: 2 .* has 1"),
        ([NODE, {"CPU": 8.0, "NPU": 2.0}], 3, 3, r"room for 2 such engines \(CPU: 64, NPU: 8; CPU: 8, NPU: 2\)"),
        ([{"CPU": 8.0, "NPU": 2.0}] * 4, 1, 4, r"room for 0 such engines"),
        ([], 1, 1, r"has 0"),
    ],
)
def test_too_little_room_is_counted(nodes: list, num_engines: int, size: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_room(nodes, NPU, num_engines, size)
