"""The vision part of a vision-language model, as its config.json describes it: Qwen2.5-VL and Qwen3-VL.

A *tower* turns the patches of a picture into embeddings of the language model: its blocks attend over patches, and its
*merger* makes one token of ``merge`` x ``merge`` neighbours. Qwen3-VL's language model also adds features of the
tower's inner blocks to its own first layers (*DeepStack*, arXiv 2406.04334).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from mega_rl.errors import shown
from mega_rl.models.config_values import ConfigValues

TOWER = "visual"  # in the name of every tensor of a tower
NUM_AXES = 3  # of a token's position: time, height, width
MAX_BLOCKS = 4096
Kind = Literal["qwen2_5_vl", "qwen3_vl"]
# Of a device, at most: features that a tower which is trained keeps for a pass over micro-batches, and their gradients.
MAX_KEPT_BYTES = 1 << 30
GRADIENT_BYTES = 8  # of a kept number whose gradients are gathered: it and their sum, both float32


@dataclass(frozen=True)
class Tower:
    """The sizes of a vision tower; equal towers have equal tensors."""

    kind: Kind
    num_blocks: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    channels: int  # of a picture
    patch: int  # pixels along each side of a patch
    frames: int  # of a patch; a picture is repeated so often
    merge: int  # patches of one token along each side
    out_size: int  # the language model's hidden size
    window: int | None  # pixels along each side that a block sees, but for ``whole_blocks``; None: all of them
    whole_blocks: tuple[int, ...]  # blocks that see the whole picture; where there is a window
    num_positions: int  # rows of the table of learnt positions; 0: there is none
    deepstack: tuple[int, ...]  # blocks whose features go to the language model's first layers, in this order
    rope_sections: tuple[int, int, int]  # pairs of channels of a head that time, height and width turn
    interleaved: bool  # the pairs take turns between the axes, else one axis follows the other

    @property
    def patch_numbers(self) -> int:
        """Numbers in one patch, as an image processor gives it."""
        return self.channels * self.frames * self.patch**2

    @property
    def feature_numbers(self) -> int:
        """Numbers that the tower makes of one merged patch, DeepStack's among them."""
        return self.out_size * (1 + len(self.deepstack))


def tower_tensors(tower: Tower) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tower's tensors in its own order: name and shape."""
    hidden, ffn, merged = tower.hidden_size, tower.ffn_size, tower.hidden_size * tower.merge**2

    def linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (rows, columns)
        yield f"{name}.bias", (rows,)

    def layer_norm(name: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (size,)
        yield f"{name}.bias", (size,)

    is_third = tower.kind == "qwen3_vl"
    yield "patch_embed.proj.weight", (hidden, tower.channels, tower.frames, tower.patch, tower.patch)
    if is_third:
        yield "patch_embed.proj.bias", (hidden,)
        yield "pos_embed.weight", (tower.num_positions, hidden)
    for block in range(tower.num_blocks):
        name = f"blocks.{block}"
        for norm in ("norm1", "norm2"):
            yield from layer_norm(f"{name}.{norm}", hidden) if is_third else [(f"{name}.{norm}.weight", (hidden,))]
        yield from linear(f"{name}.attn.qkv", 3 * hidden, hidden)
        yield from linear(f"{name}.attn.proj", hidden, hidden)
        up = ("linear_fc1",) if is_third else ("gate_proj", "up_proj")
        for part in up:
            yield from linear(f"{name}.mlp.{part}", ffn, hidden)
        yield from linear(f"{name}.mlp.{'linear_fc2' if is_third else 'down_proj'}", hidden, ffn)
    if not is_third:
        yield "merger.ln_q.weight", (hidden,)
        yield from linear("merger.mlp.0", merged, merged)
        yield from linear("merger.mlp.2", tower.out_size, merged)
        return
    mergers = {"merger": hidden, **{f"deepstack_merger_list.{i}": merged for i in range(len(tower.deepstack))}}
    for name, normed in mergers.items():
        yield from layer_norm(f"{name}.norm", normed)
        yield from linear(f"{name}.linear_fc1", merged, merged)
        yield from linear(f"{name}.linear_fc2", tower.out_size, merged)


def is_of_merger(name: str) -> bool:
    """Whether a tensor of the tower stands behind its blocks: between them and the language model."""
    return name.startswith(("merger.", "deepstack_merger_list."))


def read_qwen2_5_tower(config: ConfigValues, text: ConfigValues) -> Tower:
    """Qwen2.5-VL's; what is malformed or unsupported is in ``config.problems`` afterwards."""
    values = _tower_values(config)
    values.require("hidden_act", "silu")
    tower = Tower(
        kind="qwen2_5_vl",
        **_sizes(values, blocks=32, hidden=3584, ffn=3420, patch=14),
        window=values.integer("window_size", 112),
        whole_blocks=_numbers(values, "fullatt_block_indexes", (7, 15, 23, 31)),
        num_positions=0,
        deepstack=(),
        **_axes(text, interleaved=False),
    )
    return _checked(tower, config, values, text)


def read_qwen3_tower(config: ConfigValues, text: ConfigValues) -> Tower:
    """Qwen3-VL's, likewise."""
    values = _tower_values(config)
    values.require("hidden_act", "gelu_pytorch_tanh")
    tower = Tower(
        kind="qwen3_vl",
        **_sizes(values, blocks=27, hidden=1152, ffn=4304, patch=16),
        window=None,
        whole_blocks=(),
        num_positions=values.integer("num_position_embeddings", 2304),
        deepstack=_numbers(values, "deepstack_visual_indexes", (8, 16, 24)),
        **_axes(text, interleaved=True),
    )
    root = round(tower.num_positions**0.5)
    if values.good("num_position_embeddings") and root**2 != tower.num_positions:
        values.add(f"num_position_embeddings is {tower.num_positions}; it must be a square", "num_position_embeddings")
    return _checked(tower, config, values, text)


ReadTower = Callable[[ConfigValues, ConfigValues], Tower]


def text_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's part of a vision-language config.json: ``text_config``, or the file itself (Qwen2.5-VL's).

    Keys beside ``text_config`` that concern the whole model count before those within.
    """
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return dict(config)
    above = ("architectures", "tie_word_embeddings", "quantization_config")
    return {**text, **{key: config[key] for key in above if key in config}}


def _tower_values(config: ConfigValues) -> ConfigValues:
    section = config.section("vision_config")
    if not section and config.good("vision_config"):
        config.add("vision_config is missing; give the whole config.json of the model", "vision_config")
    return ConfigValues(section, f"{config.where}, vision_config")


def _sizes(values: ConfigValues, blocks: int, hidden: int, ffn: int, patch: int) -> dict[str, Any]:
    """What both kinds have, with transformers' defaults."""
    return {
        "num_blocks": values.integer("depth", blocks, most=MAX_BLOCKS),
        "hidden_size": values.integer("hidden_size", hidden),
        "ffn_size": values.integer("intermediate_size", ffn),
        "num_heads": values.integer("num_heads", 16),
        "channels": values.integer("in_channels", 3),
        "patch": values.integer("patch_size", patch),
        "frames": values.integer("temporal_patch_size", 2),
        "merge": values.integer("spatial_merge_size", 2),
        "out_size": values.integer("out_hidden_size", 3584),
    }


def _numbers(values: ConfigValues, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of blocks, ascending."""
    found = values.get(key, list(default))
    depth = values.get("depth", MAX_BLOCKS)
    is_list = isinstance(found, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in found)
    if not is_list or sorted(set(found)) != list(found) or (found and not 0 <= found[0] <= found[-1] < depth):
        values.add(f"{key} is {shown(found)}; it must be a list of numbers of blocks, ascending, below depth", key)
        return ()
    return tuple(found)


def _axes(text: ConfigValues, interleaved: bool) -> dict[str, Any]:
    """Which of a head's channels each axis of the position turns; ``interleaved`` is the family's order."""
    rope = {**text.section("rope_scaling"), **text.section("rope_parameters")}
    sections = rope.get("mrope_section")
    if (
        not isinstance(sections, list)
        or len(sections) != NUM_AXES
        or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sections)
    ):
        text.add(f"mrope_section is {shown(sections)}; it must be three positive numbers", "mrope_section")
        sections = [1, 1, 1]
    if bool(rope.get("mrope_interleaved", interleaved)) is not interleaved:
        text.add(f"mrope_interleaved is {shown(rope['mrope_interleaved'])}; only {interleaved} is supported here")
    return {"rope_sections": tuple(sections), "interleaved": interleaved}


def _checked(tower: Tower, config: ConfigValues, values: ConfigValues, text: ConfigValues) -> Tower:
    """The tower; conditions between its values and the language model's are added to the problems."""
    if values.good("hidden_size", "num_heads") and tower.hidden_size % tower.num_heads:
        values.add(f"hidden_size {tower.hidden_size} is not a multiple of num_heads {tower.num_heads}")
    hidden = text.get("hidden_size")
    if values.good("out_hidden_size") and tower.out_size != hidden:
        values.add(f"out_hidden_size is {tower.out_size}, but the language model's hidden_size is {shown(hidden)}")
    layers = text.get("num_hidden_layers")
    if isinstance(layers, int) and len(tower.deepstack) > layers:
        values.add(
            f"deepstack_visual_indexes has {len(tower.deepstack)} entries, more than the model's {layers} layers"
        )
    config.problems += values.problems
    return tower
