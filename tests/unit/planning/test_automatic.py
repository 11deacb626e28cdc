"""What is left to the plan: the least recomputation that fits, the longest micro-batches; a CPU has its defaults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega_rl.config.schema.sections import TOKENS_PER_MICROBATCH, RunConfig
from mega_rl.data.rows.rows import write_jsonl, write_parquet
from mega_rl.models.shape import ModelShape, read_model_shape
from mega_rl.planning.automatic import HEADROOM, automatic
from mega_rl.planning.memory_plan import Machine, make_plan
from mega_rl.planning.steps import run_length

GIB = 1 << 30
MODEL = {  # Qwen2.5-1.5B's layers
    "architectures": ["Qwen2ForCausalLM"],
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "num_hidden_layers": 28,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    config = RunConfig()
    config.model.path, config.trainer.stage, config.trainer.total_steps = str(tmp_path), "sft", 1
    config.data.train_files, config.data.max_prompt_length, config.data.max_response_length = ["x.jsonl"], 1024, 2048
    config.memory.recompute, config.trainer.max_tokens_per_microbatch = "auto", None
    config.parallel.overlap_grad_reduce = config.parallel.overlap_param_gather = False
    return config


def shape_of(config: RunConfig) -> ModelShape:
    return read_model_shape(config.model.path)


def machine(gib: float, platform: str = "npu", num_devices: int = 8) -> Machine:
    return Machine(num_devices, int(gib * GIB), 4 * GIB, platform)


def test_the_first_that_leaves_room_is_taken(config: RunConfig) -> None:
    """Every device is large enough for the choice, and too small for any that would have come before it."""
    found = {}
    for gib in (192, 96, 64, 48, 32, 24):
        chosen, lines = automatic(config, shape_of(config), machine(gib))
        found[gib] = chosen.memory.recompute, chosen.trainer.max_tokens_per_microbatch
        plan = make_plan(chosen, shape_of(config), machine(gib), with_sync=False)
        assert plan.fits and -plan.excess_bytes >= HEADROOM * gib * GIB
        assert [line.partition(":")[0] for line in lines] == [
            "memory.recompute auto",
            "trainer.max_tokens_per_microbatch null",
        ]
    assert found[192] == ("none", TOKENS_PER_MICROBATCH)
    order = [(way, budget) for way in ("none", "selective", "full") for budget in (16384, 8192)]
    places = [[*order, ("full", 4096), ("full", 3072)].index(choice) for choice in found.values()]
    assert places == sorted(places) and len(set(places)) >= 3, found
    assert config.memory.recompute == "auto" and config.trainer.max_tokens_per_microbatch is None, "it was changed"


def test_one_may_be_left_to_the_plan_without_the_other(config: RunConfig) -> None:
    config.trainer.max_tokens_per_microbatch = 4096
    chosen, (line,) = automatic(config, shape_of(config), machine(192))
    assert chosen.memory.recompute == "none" and chosen.trainer.max_tokens_per_microbatch == 4096
    assert line.startswith("memory.recompute auto: none; by the plan ") and line.endswith("GiB of a device are taken")
    config.trainer.max_tokens_per_microbatch, config.memory.recompute = None, "full"
    config.data.max_response_length = 31744  # as long as the default is not
    chosen, _ = automatic(config, shape_of(config), machine(192))
    assert (chosen.memory.recompute, chosen.trainer.max_tokens_per_microbatch) == ("full", 32768)


def test_what_never_fits_is_as_small_as_it_can_be(config: RunConfig) -> None:
    chosen, lines = automatic(config, shape_of(config), machine(8))
    assert (chosen.memory.recompute, chosen.trainer.max_tokens_per_microbatch) == ("full", 3072)
    assert all("nothing smaller was left to try" in line for line in lines)


def test_a_cpu_has_the_defaults(config: RunConfig) -> None:
    config.parallel.overlap_grad_reduce = config.parallel.overlap_param_gather = None
    chosen, lines = automatic(config, shape_of(config), machine(0, "cpu"))
    assert (chosen.memory.recompute, chosen.trainer.max_tokens_per_microbatch) == ("none", TOKENS_PER_MICROBATCH)
    assert (chosen.parallel.overlap_grad_reduce, chosen.parallel.overlap_param_gather) == (False, False)
    assert all(line.endswith("as always on a CPU") for line in lines) and len(lines) == 2


@pytest.mark.parametrize(
    ("given", "method", "devices", "platform", "expected"),
    [
        (None, "full", 8, "npu", True),
        (None, "full", 8, "cuda", True),
        (None, "full", 1, "cuda", False),
        (None, "lora", 8, "cuda", False),
        (False, "full", 8, "cuda", False),
        (True, "full", 1, "cpu", True),
    ],
)
def test_sums_overlap_where_they_can(
    config: RunConfig, given: bool | None, method: str, devices: int, platform: str, expected: bool
) -> None:
    config.parallel.overlap_grad_reduce, config.tuning.method = given, method  # type: ignore[assignment]
    config.memory.recompute, config.trainer.max_tokens_per_microbatch = "full", 4096
    chosen, lines = automatic(config, shape_of(config), machine(64, platform, devices))
    assert chosen.parallel.overlap_grad_reduce is expected
    assert len(lines) == (given is None and expected)


@pytest.mark.parametrize(
    ("given", "sums", "stage", "minibatches", "method", "devices", "platform", "expected"),
    [
        (None, None, "sft", 1, "full", 8, "npu", True),
        (None, None, "rl", 4, "full", 8, "cuda", True),
        (None, None, "rl", 1, "full", 8, "cuda", False),  # the weight sync reads them at once
        (None, None, "kto", 1, "full", 8, "cuda", False),  # the estimate of the divergence does
        (None, False, "sft", 1, "full", 8, "cuda", False),
        (None, None, "sft", 1, "lora", 8, "cuda", False),
        (None, None, "sft", 1, "full", 1, "cuda", False),
        (None, True, "sft", 1, "full", 8, "cpu", False),
        (False, None, "sft", 1, "full", 8, "cuda", False),
        (True, None, "rl", 1, "lora", 8, "cpu", True),
    ],
)
def test_weights_are_collected_late_where_the_next_pass_is_the_first_to_read_them(
    config: RunConfig,
    given: bool | None,
    sums: bool | None,
    stage: str,
    minibatches: int,
    method: str,
    devices: int,
    platform: str,
    expected: bool,
) -> None:
    parallel = config.parallel
    parallel.overlap_param_gather, parallel.overlap_grad_reduce = given, sums
    config.trainer.stage, config.tuning.method = stage, method  # type: ignore[assignment]
    config.algorithm.minibatches_per_step = minibatches
    config.memory.recompute, config.trainer.max_tokens_per_microbatch = "full", 4096
    chosen, lines = automatic(config, shape_of(config), machine(64, platform, devices))
    assert chosen.parallel.overlap_param_gather is expected
    assert chosen.parallel.overlap_grad_reduce is not None and chosen.parallel.overlap_grad_reduce >= expected
    assert any(line.startswith("parallel.overlap_param_gather") for line in lines) == (given is None and expected)


def test_rows_are_counted_as_they_are_read(config: RunConfig, tmp_path: Path) -> None:
    lines, table = tmp_path / "a.jsonl", tmp_path / "b.parquet"
    write_jsonl(lines, [{"prompt": "1"}] * 50)
    write_parquet(table, [{"prompt": "1"}] * 50)
    config.data.train_batch_size = 10
    for entries, number in (([lines], 50), ([f"{lines}[:20]", f"{table}[:30]"], 50), ([f"{lines}[:70]", table], 100)):
        config.data.train_files = list(map(str, entries))
        assert run_length(config).num_rows == number and run_length(config).steps_per_epoch == number // 10
