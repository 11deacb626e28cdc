"""Activations in integers; that they are those of Megatron is tests/distributed/planning/test_memory_plan.py's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mega_rl.config.schema.sections import RunConfig
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.parallel.schedule import balance
from mega_rl.planning.activations import ActivationModel, Activations, PlannedTokens
from mega_rl.planning.steps import fullest_microbatches
from mega_rl.platform.operators.memory import OPERATOR_MEMORY
from tests.unit.planning.test_state import shape_of

TOKENS = PlannedTokens(num_tokens=16384, longest=2048, num_microbatches=8)


def planned(
    model: str = "Qwen2.5-7B-Instruct",
    stage: int = 0,
    platform: str = "npu",
    tokens: PlannedTokens = TOKENS,
    **keys: Any,
) -> Activations:
    config = RunConfig()
    sizes = {name: keys.pop(name) for name in ("tensor", "pipeline", "context", "expert") if name in keys}
    chunks = keys.pop("virtual_pipeline", None)
    for name, value in sizes.items():
        setattr(config.parallel, name, value)
    config.parallel.context_method = keys.pop("context_method", "gather")
    config.parallel.virtual_pipeline, config.parallel.sequence = chunks, keys.pop("sequence", False)
    for name, value in keys.items():
        setattr(config.memory, name, value)
    layout = ParallelLayout.create(16, **sizes, virtual_pipeline=chunks)
    return ActivationModel(config, shape_of(model), layout, OPERATOR_MEMORY[platform], tokens).of_stage(stage)


def test_one_layer_by_hand() -> None:
    """bfloat16, fused kernels: 2 norms, one qkv, rotation, attention's operands and result, SwiGLU."""
    t, d, q, k, f, heads = 16384, 3584, 3584, 512, 18944, 28
    norms = 2 * (2 * 2 * t * d + 4 * t)
    attention = 2 * t * ((q + 2 * k) + q + 4 * 128 + (q + k) + q) + 4 * 16 * t * heads  # rotation keeps its queries
    layer = norms + attention + 2 * t * 3 * f
    one, two = (planned(recompute="full", recompute_num_layers=28 - n).kept for n in (1, 2))
    assert two - one == layer - 2 * t * d  # kept whole instead of its input alone


@pytest.mark.parametrize("model", ["Qwen2.5-7B-Instruct", "Qwen3-8B", "Qwen3-30B-A3B"])
def test_less_is_kept_for_more_work(model: str) -> None:
    none, selective, full = (planned(model, recompute=mode) for mode in ("none", "selective", "full"))
    assert none.kept > 1.5 * selective.kept > 1.5 * full.kept
    assert full.training < selective.training < none.training
    assert full.working > none.working  # a layer is computed again beside its gradients
    assert none.forward_only == full.forward_only


def test_ranks_share_a_micro_batch() -> None:
    whole = planned()
    tensor, cut = planned(tensor=4), planned(tensor=4, sequence=True)
    assert whole.kept > tensor.kept > cut.kept > whole.kept / 4.5
    assert planned(context=2).kept < 0.7 * whole.kept
    half = planned(tokens=replace(TOKENS, num_tokens=8192))
    assert 0.49 < half.kept / whole.kept < 0.51


@pytest.mark.parametrize("platform", ["cuda", "npu"])
def test_exchanged_heads_keep_no_keys_of_other_ranks(platform: str) -> None:
    """Gathered keys and values are kept as both parts of a sequence see them: all, and those of one part again."""
    gathered, exchanged = (planned(platform=platform, context=4, context_method=m).kept for m in ("gather", "ulysses"))
    own, layers, width = TOKENS.num_tokens // 4, 28, 512
    assert gathered - exchanged == layers * 2 * 2 * width * (own * 9 // 2 - own)


@pytest.mark.parametrize(("stages", "total"), [(4, 8), (4, 2), (2, 1)])
def test_micro_batches_in_flight(stages: int, total: int) -> None:
    """As many as a walk through 1F1B finds: stage s runs ahead by the stages behind it."""
    for stage in range(stages):
        running, most = 0, 0
        ahead = min(total, stages - stage - 1)
        for step in "f" * ahead + "fb" * (total - ahead) + "b" * ahead:
            running += 1 if step == "f" else -1
            most = max(most, running)
        tokens = replace(TOKENS, num_microbatches=total)
        assert planned(stage=stage, pipeline=stages, tokens=tokens).in_flight == most


def test_interleaved_stages_keep_more() -> None:
    plain = [planned(stage=stage, pipeline=4) for stage in range(4)]
    chunks = [planned(stage=stage, pipeline=4, virtual_pipeline=7) for stage in range(4)]
    assert all(a.kept < b.kept for a, b in zip(plain, chunks, strict=True))
    # 6 rounds of 4 stages, twice as many as there are stages behind, and the one that runs
    assert [a.in_flight * 7 for a in chunks] == pytest.approx([6 * 4 + 2 * behind + 1 for behind in (3, 2, 1, 0)])


def test_kernels_differ_in_what_they_keep() -> None:
    kept = {name: planned(platform=name).kept for name in OPERATOR_MEMORY}
    assert kept["cuda"] < min(kept["npu"], kept["cpu"])
    more = 28 * 16384 * (28 * 15 * 4 + 3584 * 2)  # 15 more float32 numbers of each head's softmax; queries as rotated
    assert kept["npu"] - kept["cuda"] == more


def test_experts_are_counted_by_their_pairs() -> None:
    sparse = planned("Qwen3-30B-A3B", expert=8).kept
    pairs = 16384 * 8  # token-expert pairs of a rank, wherever the experts are
    assert sparse > 48 * pairs * (2048 + 3 * 768) * 2
    assert planned("Qwen3-30B-A3B").kept == sparse


@pytest.mark.parametrize(
    ("prompts", "length", "budget", "chunks"), [(8, 100, 350, None), (7, 64, 64, None), (6, 50, 180, 2)]
)
def test_micro_batches_are_those_of_the_schedule(prompts: int, length: int, budget: int, chunks: int | None) -> None:
    config = RunConfig()
    config.data.train_batch_size, config.rollout.n, config.trainer.max_tokens_per_microbatch = prompts, 4, budget
    config.data.max_prompt_length, config.data.max_response_length = 1, length  # as many positions predict
    config.parallel.pipeline, config.parallel.virtual_pipeline = (2, chunks) if chunks else (1, None)
    layout = ParallelLayout.create(6, pipeline=config.parallel.pipeline, virtual_pipeline=chunks)
    multiple = layout.pipeline if chunks else 1
    expected = balance([length] * prompts * 4, layout.data, budget, multiple)
    tokens = fullest_microbatches(config, layout)
    assert tokens.num_microbatches == len(expected[0]) and tokens.longest == length
    assert max(len(part) for rank in expected for part in rank) * length <= tokens.num_tokens


@pytest.mark.parametrize("budget", [200, 199, 100])
def test_answers_of_pairs_are_planned_apart_where_they_do_not_fit_together(budget: int) -> None:
    config = RunConfig()
    config.trainer.stage, config.trainer.max_tokens_per_microbatch, config.data.train_batch_size = "dpo", budget, 8
    config.data.max_prompt_length, config.data.max_response_length = 1, 100
    layout = ParallelLayout.create(2)
    lengths = [200] * 8 if budget == 200 else [100] * 16
    assert fullest_microbatches(config, layout).num_microbatches == len(balance(lengths, 2, budget)[0])
