"""The whole loop, ``tools/train.py`` on platform npu: Megatron-core on torch_npu, the bridge, vLLM-Ascend.

Every run records its rollouts, and the CPU platform repeats its training on them: losses, rewards and gradient norms
must be the same. What is real and what stands in for it is said in ``test_rollout.py``; collectives go over gloo.
Measured in float32: losses, norms and metrics of the objective to 2e-6 of their values, trainer against engine
3e-7 nats.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from mega_rl.platform.ascend.devices import MASK
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer
from tests.distributed.conftest import tiny_world  # noqa: F401 - a fixture
from tests.distributed.stages.test_vision_rl import configuration
from tests.launching.launch import Launched, started, torchrun, torchrun_command
from tests.launching.ray_cluster import cluster
from tests.launching.training import HELD, TRAIN, TinyWorld, metrics_of, steps_saved
from tests.models.families import ENGINE
from tests.npu import emulation
from tests.npu.platforms import HAS_MINDSPEED, NEEDS_MINDSPEED, NPU, on_cpu

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not emulation.has_rollout(), reason=emulation.missing_rollout()),
]
FLOAT32 = 1e-5  # relative, of everything that the training computes
AGREES = 2e-6  # nats, trainer against engine
ENGINE_KEYS = ("enforce_eager: true", "kv_cache_memory_bytes: 67108864", "max_num_seqs: 16")
COMMON = (f"rollout.vllm={{{', '.join(ENGINE_KEYS)}}}", "logging.dump_rollouts=-1", "aqn.num_stages=2")
BRIEF = ("trainer.total_steps=2", "checkpoint.save_freq=-1", "checkpoint.export_hf=false", "validation.test_freq=-1")
ONE_RANK = ("rollout.tensor_parallel_size=1", "parallel.tensor=1", "parallel.sequence=false")
# The operators without which a mixture, or a dense model, would have gone another way than on an NPU.
DENSE = ("npu::npu_fusion_attention", "npu::npu_fused_infer_attention_score", "atb::_npu_reshape_and_cache")
EXPERTS = (*DENSE, "_C_ascend::moe_gating_top_k", "npu::npu_grouped_matmul")


@dataclass(frozen=True)
class Case:
    overrides: tuple[str, ...]
    num_ranks: int
    num_steps: int
    operators: tuple[str, ...]
    is_mixture: bool = False
    has_pictures: bool = False
    is_separate: bool = False  # the engine has a device of its own, in a Ray cluster


CASES = {
    "two ranks, killed and resumed": Case((*COMMON, "trainer.total_steps=4", "validation.test_freq=2"), 2, 4, DENSE),
    "pictures at temperature 0.6": Case(
        (
            *COMMON,
            *BRIEF,
            *ONE_RANK,
            "rollout.temperature=0.6",
            "aqn={enabled: true, sigma_start: 0.2, sigma_end: 0.05}",
        ),
        1,
        2,
        (*DENSE, "aten::matmul_backward"),  # of the trainer's tower
        has_pictures=True,
    ),
    "experts in place": Case((*COMMON, *BRIEF, *ONE_RANK), 1, 2, EXPERTS, True),
    "experts through the loader": Case(
        (*COMMON, *BRIEF, *ONE_RANK, "rollout.weight_update=reload", "bridge.verify=off"), 1, 2, EXPERTS, True
    ),
    "experts in another process": Case(
        (*COMMON, *BRIEF, *ONE_RANK, "rollout.placement=separate"), 1, 2, EXPERTS, True, is_separate=True
    ),
}
WITH_MINDSPEED = {
    "experts over two ranks": Case(
        (*COMMON, *BRIEF, "rollout.tensor_parallel_size=1", "parallel.tensor=1", "parallel.sequence=false")
        + ("parallel.expert=2", "platform.mindspeed.mode=required"),
        2,
        2,
        EXPERTS,
        True,
    )
}
RESUMED = "two ranks, killed and resumed"


NAMES = [*CASES, *(pytest.param(name, marks=NEEDS_MINDSPEED) for name in WITH_MINDSPEED)]
ALL = CASES | WITH_MINDSPEED


@dataclass(frozen=True)
class Ran:
    npu: Path  # output directories
    cpu: Path
    output: str
    operators: Counter[str]  # of all processes


@pytest.fixture(scope="module")
def mixture(tiny_world: TinyWorld) -> Path:  # noqa: F811
    """A model with experts that answers the same prompts."""
    tokenizer, path = arithmetic_tokenizer(), tiny_world.model.parent / "mixture"
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = ENGINE.new_model("qwen3_moe", **tokens, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def ran(
    tiny_world: TinyWorld,  # noqa: F811
    mixture: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], Ran]]:
    """What a case left behind; all that can run do so once, two at a time, in the order of ``ALL``."""
    root = tmp_path_factory.mktemp("loop")
    with ThreadPoolExecutor(2) as pool:
        futures: dict[str, Future[Ran]] = {}
        for number, (name, case) in enumerate((ALL if HAS_MINDSPEED else CASES).items()):
            directory = root / str(number)
            directory.mkdir()
            config = configuration(directory, "qwen2_5_vl", tied=False) if case.has_pictures else tiny_world.rl
            arguments = ("--config", str(config), *case.overrides)
            if case.is_mixture:
                arguments = (*arguments, f"model.path={mixture}")
            futures[name] = pool.submit(both_platforms, name, directory, arguments)
        yield lambda name: futures[name].result()


def both_platforms(name: str, root: Path, arguments: tuple[str, ...]) -> Ran:
    counts = root / "counts"
    counts.mkdir()
    env = NPU | {emulation.COUNTS_VARIABLE: str(counts)}
    own = (*arguments, "platform.name=npu", f"trainer.output_dir={root / 'npu'}")
    launch = kill_and_resume if name == RESUMED else beside_a_cluster if ALL[name].is_separate else torchrun_on
    output = launch(own, ALL[name].num_ranks, env).check().stdout
    replayed = (*arguments, "platform.name=cpu", f"trainer.output_dir={root / 'cpu'}", "rollout.vllm={}")
    replayed += (f"rollout.replay={root / 'npu' / 'rollouts'}",)
    replayed += ("rollout.placement=colocated", "bridge.verify=off", "logging.dump_rollouts=0")
    replayed += ("checkpoint.save_freq=-1", "validation.test_freq=-1", "platform.mindspeed.mode=auto")
    on_cpu(TRAIN, *replayed, nproc=ALL[name].num_ranks).check()
    operators: Counter[str] = Counter()
    for file in counts.glob("*.json"):
        operators.update(json.loads(file.read_text()))
    return Ran(root / "npu", root / "cpu", output, operators)


def torchrun_on(arguments: tuple[str, ...], num_ranks: int, env: Mapping[str, str]) -> Launched:
    return torchrun(TRAIN, *arguments, nproc=num_ranks, timeout=600, env=env)


def beside_a_cluster(arguments: tuple[str, ...], num_ranks: int, env: Mapping[str, str]) -> Launched:
    """The trainer on the first device, and a cluster that has the second one, as a user starts it."""
    env = {**env, "RAY_AUTH_MODE": "disabled"}  # whatever token another Ray of this user has left
    with cluster("--num-cpus", "2", "--resources", '{"NPU": 1}', env={**env, MASK: "1"}) as address:
        return torchrun_on(arguments, num_ranks, {**env, MASK: "0", "RAY_ADDRESS": address})


def kill_and_resume(arguments: tuple[str, ...], num_ranks: int, env: Mapping[str, str]) -> Launched:
    """Killed when step 3 is logged, after the checkpoint of step 2; what was logged of step 3 is kept beside."""
    command = torchrun_command(HELD, "log", "3", *arguments, nproc=num_ranks)
    with started(command, env=env) as running:
        running.wait_for("held at log 3", timeout=600)
    directory = Path(arguments[-1].partition("=")[2])
    shutil.copy(directory / "metrics.jsonl", directory.with_name("killed.jsonl"))
    return torchrun_on(arguments, num_ranks, env)


def steps_of(directory: Path) -> list[dict[str, float]]:
    return [row for step, row in sorted(metrics_of(directory).items()) if step]


@pytest.mark.parametrize("name", NAMES)
def test_training_is_that_of_the_cpu(ran: Callable[[str], Ran], name: str) -> None:
    npu, cpu = steps_of(ran(name).npu), steps_of(ran(name).cpu)
    assert len(npu) == len(cpu) == ALL[name].num_steps
    for own, expected in zip(npu, cpu, strict=True):
        compared = [key for key in expected if key.startswith(("actor/", "reward/", "response_length/"))]
        assert {"actor/loss", "actor/grad_norm", "reward/mean"} <= set(compared), compared
        for key in compared:
            assert own[key] == pytest.approx(expected[key], rel=FLOAT32, abs=1e-7), key


@pytest.mark.parametrize("name", NAMES)
def test_trainer_and_engine_agree(ran: Callable[[str], Ran], name: str) -> None:
    for row in steps_of(ran(name).npu):
        if row["aqn/sigma"] == 0:
            assert row["rollout/logprob_diff_mean"] < AGREES
            assert row["rollout/logprob_diff_max"] < 10 * AGREES
        else:  # the engine's policy is the noisy one
            assert 1e-3 < row["rollout/logprob_diff_mean"] < 1.0


@pytest.mark.parametrize("name", NAMES)
def test_the_operators_of_ascend_ran(
    ran: Callable[[str], Ran], name: str, report_operators: Callable[[str, Mapping[str, int]], None]
) -> None:
    operators = ran(name).operators
    assert all(operators[operator] for operator in ALL[name].operators), operators
    report_operators(f"tools/train.py, {name}", operators)


def test_every_sync_is_proved(ran: Callable[[str], Ran]) -> None:
    """Live experts, which the engine holds turned, are among what is compared."""
    for name in (RESUMED, "pictures at temperature 0.6", "experts in place", "experts in another process"):
        assert all(row["bridge/verified_tensors"] > 0 for row in steps_of(ran(name).npu)), name


def test_a_killed_run_goes_on_as_it_would_have(ran: Callable[[str], Ran]) -> None:
    """Step 3, which both halves computed, is the same bit for bit; checkpoint, validation and export are there."""
    directory = ran(RESUMED).npu
    lines = directory.with_name("killed.jsonl").read_text().splitlines()
    rows = {row["step"]: row["metrics"] for row in map(json.loads, lines)}
    assert steps_saved(directory) == [2, 4]
    again = metrics_of(directory)
    kept = [key for key in again[3] if key.startswith(("actor/", "reward/", "rollout/logprob", "val-core/"))]
    assert {key: again[3][key] for key in kept} == {key: rows[3][key] for key in kept}
    assert any(key.startswith("val-core/") for key in again[4])
    exported = AutoModelForCausalLM.from_pretrained(directory / "huggingface", dtype=torch.float32)
    assert sum(p.numel() for p in exported.parameters()) > 0
