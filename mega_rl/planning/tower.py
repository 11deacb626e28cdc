"""What a vision tower takes beside the language model, on the ranks of the first pipeline stage: estimates.

The fullest micro-batch is taken to be pictures alone, and every picture to be in two micro-batches, so that what a
tower which is trained keeps of them for a pass is the most that it can be. Letters: P patches, D width of the tower, F
width of its MLP.
"""

from __future__ import annotations

from dataclasses import dataclass

from mega_rl.bridge.mapping.tower import tower_names
from mega_rl.bridge.mapping.tuning import TuningPlan
from mega_rl.config.schema.sections import RunConfig
from mega_rl.config.schema.stage import reads_pictures, samples
from mega_rl.models.shape import ModelShape
from mega_rl.models.vision import GRADIENT_BYTES, MAX_KEPT_BYTES
from mega_rl.planning.activations import PlannedTokens
from mega_rl.types import DTYPES


@dataclass(frozen=True)
class TowerMemory:
    """Bytes of one rank; all zero where there is no tower."""

    training: int = 0  # of a micro-batch that is learnt from
    forward_only: int = 0
    features: int = 0  # at most, of host memory: what a frozen tower has made of pictures


def tower_memory(config: RunConfig, shape: ModelShape, tuning: TuningPlan, tokens: PlannedTokens) -> TowerMemory:
    """Of the first stage, whose ranks all compute the pictures of a whole micro-batch."""
    tower = shape.tower
    if tower is None or not reads_pictures(config):
        return TowerMemory()
    item = DTYPES[config.model.dtype].itemsize
    num_patches = tokens.num_tokens * tower.merge**2
    widths = 3 if tower.kind == "qwen2_5_vl" else 2  # gate, up and their product; up and what follows it
    hidden, ffn = tower.hidden_size, tower.ffn_size
    pixels = num_patches * tower.patch_numbers * (4 + item)  # as read, and in the dtype of the weights
    made = tokens.num_tokens * tower.feature_numbers * item
    # Residual and input, beside queries, keys, values, both rotated in float32, and the result; or beside the MLP.
    attention = 2 * hidden * item + (4 * hidden * item + 2 * hidden * 4)
    alone = pixels + made + num_patches * max(attention, (2 * hidden + widths * ffn) * item)
    names = {name for name, _, _ in tower_names(shape)}
    blocks = {name for name in names if ".blocks." in name or "patch_embed" in name}
    if not names & tuning.trained:
        return TowerMemory(alone, alone, config.model.vision.cache_bytes)
    shared = tokens.num_tokens * tokens.num_microbatches // 2 * tower.feature_numbers  # of an optimizer step
    num_steps = config.algorithm.minibatches_per_step if samples(config) else 1  # that a pass without gradient is for
    forward_only = alone + min(MAX_KEPT_BYTES, num_steps * shared * item)
    alone += min(MAX_KEPT_BYTES, shared * GRADIENT_BYTES)
    if not blocks & tuning.trained:  # the mergers' input and what is between their two products
        return TowerMemory(alone + (2 + len(tower.deepstack)) * 3 * num_patches * hidden * item, forward_only)
    of_block = 4 * hidden * item + 8 * hidden * item + 2 * hidden * 4 + widths * ffn * item
    return TowerMemory(alone + tower.num_blocks * num_patches * of_block, forward_only)
