"""What a plan says of a vision tower: an estimate, on the ranks that have it."""

from __future__ import annotations

import math

from mega_rl.bridge.mapping.tower import tower_names
from mega_rl.bridge.mapping.tuning import tuning_plan
from mega_rl.config.schema.learning import VisionConfig
from mega_rl.config.schema.sections import RunConfig
from mega_rl.models.shape import ModelShape, parse_config
from mega_rl.models.vision import MAX_KEPT_BYTES
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.planning.activations import PlannedTokens
from mega_rl.planning.state import stage_parameters, trainer_state
from mega_rl.planning.tower import TowerMemory, tower_memory
from tests.models import families


def shape_of(family: str = "qwen3_vl") -> ModelShape:
    return parse_config(families.CONTRACT.config(family), family)


def memory(
    vision: VisionConfig, shape: ModelShape, stage: str = "sft", num_tokens: int = 100, minibatches: int = 1
) -> TowerMemory:
    config = RunConfig()
    config.algorithm.minibatches_per_step = minibatches
    config.trainer.stage, config.model.dtype, config.model.vision = stage, "bfloat16", vision  # type: ignore[assignment]
    plan = tuning_plan(config.tuning, shape, vision)
    return tower_memory(config, shape, plan, PlannedTokens(num_tokens, 50, 2))


def test_a_frozen_tower_by_hand() -> None:
    """400 patches of 96 numbers; width 32, MLP 48; three levels of 100 features of width 32."""
    frozen = memory(VisionConfig(cache_bytes=7), shape_of())
    patches, features = 400 * 96 * (4 + 2), 100 * 32 * 3 * 2
    fullest = 400 * max(2 * 32 * 2 + 4 * 32 * 2 + 2 * 32 * 4, (2 * 32 + 2 * 48) * 2)
    assert frozen == TowerMemory(patches + features + fullest, patches + features + fullest, 7)


def test_what_is_trained_takes_more_and_keeps_no_features() -> None:
    shape = shape_of()
    frozen, merger, whole = (
        memory(VisionConfig(*given), shape) for given in ((True, True), (True, False), (False, False))
    )
    assert frozen.training < merger.training < whole.training and merger.features == whole.features == 0
    assert frozen.forward_only < merger.forward_only == whole.forward_only
    assert memory(VisionConfig(), shape, num_tokens=200).training == 2 * frozen.training


def test_a_trained_tower_keeps_pictures_of_several_micro_batches_up_to_a_bound() -> None:
    """Half of the tokens of two micro-batches, three levels of width 32; more than the bound of very long ones."""
    for num_tokens, stage, steps in ((100, "sft", 1), (100, "rl", 3), (10**8, "sft", 1)):
        frozen, merger = (memory(VisionConfig(True, f), shape_of(), stage, num_tokens, steps) for f in (True, False))
        numbers = num_tokens * 32 * 3
        kept = merger.forward_only - frozen.forward_only
        assert kept == min(numbers * 2 * steps, MAX_KEPT_BYTES)
        mergers = (2 + 2) * 3 * 4 * num_tokens * 32 * 2
        assert merger.training - frozen.training == mergers + min(numbers * 8, MAX_KEPT_BYTES)


def test_where_nothing_is_seen_nothing_is_taken() -> None:
    assert memory(VisionConfig(), shape_of("qwen3")) == TowerMemory()
    assert memory(VisionConfig(), shape_of(), stage="dpo") == TowerMemory()


def test_the_weights_are_those_of_the_first_stage() -> None:
    config, shape = RunConfig(), shape_of("qwen3_vl_moe")
    layout = ParallelLayout.create(4, tensor=2, pipeline=2)
    plan, sizes = tuning_plan(config.tuning, shape, config.model.vision), []
    for stage in range(2):
        held = stage_parameters(config, shape, layout, stage, plan)
        state = trainer_state(config, layout, layout.rank(0, 0, 0, stage), held, has_reference=False)
        sizes.append(state.by_kind.get("vision tower", 0))
    num_elements = sum(math.prod(size) for _, _, size in tower_names(shape))
    item = 2 if config.model.dtype == "bfloat16" else 4
    assert sizes == [item * num_elements, 0]
