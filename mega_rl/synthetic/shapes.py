"""Pictures of shapes and questions about how many there are, for the quickstart of pictures: drawn on the spot.

A picture is a grid of places; some of them hold a disc, a square or a triangle in one of three colours. The question is
how many discs there are. Every number is equally frequent, whatever the number of other shapes: without the picture
nothing is better than a guess among ``max_count``. The supervised part writes the number in several styles, only a
stated fraction of them in the one that the reward accepts, so that reinforcement learning has something to find out.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from mega_rl.data.pictures.pictures import MARK
from mega_rl.data.stream import generator
from mega_rl.errors import InputError

SHAPES_SOURCE = "shapes"
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 70, 230)}
KINDS = ("disc", "square", "triangle")
ASKED = "disc"
QUESTION = f"discs?{MARK}"
BACKGROUND = (128, 128, 128)  # near nothing, once an image processor has centred it
MAX_REPEATS = 1000  # drawings in a row that were drawn before: as good as all there are have been
PLACE_PIXELS = 8  # of a place's side: one token of the tiny model
SHAPE_PIXELS = 6  # of a shape's; where in its place it stands is chance
SPECIALS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# As Qwen2.5-VL's, without its system message: a tiny model reads few tokens.
PICTURES_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What stands around pictures and numbers: a tokenizer that is trained on it has whole words.
WORDS = 50 * ["user\nassistant\n discs?"]
STYLES = ("{count}", "={count}", "+{count}")  # the first is the one that counts; the others are equally frequent


@dataclass(frozen=True)
class ShapesSpec:
    """How many pictures of which size, and how often the supervised part answers as asked."""

    side: int = 4  # places of a picture's side
    max_count: int = 4  # discs, of which there is at least 1; and other shapes
    num_train: int = 1000  # prompts
    num_val: int = 128  # prompts, whose pictures are in no other file
    num_sft: int = 8000  # prompts with a response
    plain_fraction: float = 0.2  # share of the responses in the style that the reward accepts
    seed: int = 0


@dataclass(frozen=True)
class ShapesData:
    """A table for each file."""

    train: list[
        dict[str, Any]
    ]  # {"prompt": "discs?<image>", "answer": "3", "images": ["data:..."], "data_source": "shapes"}
    val: list[dict[str, Any]]  # the same, held out
    sft: list[dict[str, Any]]  # {"prompt": "discs?<image>", "response": "=2", "images": ["data:..."]}


@dataclass(frozen=True)
class Shape:
    """One that is drawn."""

    kind: str
    colour: str
    left: int  # pixels
    top: int


def shapes_data(spec: ShapesSpec) -> ShapesData:
    """Prompts for training and validation, and supervised rows, no two about the same picture.

    Raises:
        InputError: a count below 1, a fraction outside of [0, 1], more shapes than places, or more rows than pictures.
    """
    for name in ("side", "max_count", "num_train", "num_val", "num_sft"):
        if getattr(spec, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(spec, name)}; give at least 1")
    if not 0 <= spec.plain_fraction <= 1:
        raise InputError(f"--plain-fraction is {spec.plain_fraction}; give a number from 0 to 1")
    if spec.side > 16 or 2 * spec.max_count > spec.side**2 or spec.max_count > 9:
        raise InputError(
            f"--max-count {spec.max_count} and as many others do not fit into a picture of --side {spec.side}; give at "
            "most 9 and 16, and more places than shapes"
        )
    asked = _asked(spec)
    rows = [next(asked) for _ in range(spec.num_val + spec.num_train + spec.num_sft)]
    prompts = [{"data_source": SHAPES_SOURCE, **row} for row in rows[: spec.num_val + spec.num_train]]
    sft = [_answered(row, item, spec) for item, row in enumerate(rows[len(prompts) :])]
    return ShapesData(prompts[spec.num_val :], prompts[: spec.num_val], sft)


def draw(shapes: list[Shape], side: int) -> Image.Image:
    """A picture of ``side`` x ``side`` places."""
    image = Image.new("RGB", (side * PLACE_PIXELS, side * PLACE_PIXELS), BACKGROUND)
    pen = ImageDraw.Draw(image)
    for shape in shapes:
        left, top, end = shape.left, shape.top, SHAPE_PIXELS - 1
        colour = COLOURS[shape.colour]
        if shape.kind == "disc":
            pen.ellipse((left, top, left + end, top + end), fill=colour)
        elif shape.kind == "square":
            pen.rectangle((left, top, left + end, top + end), fill=colour)
        else:
            pen.polygon(((left, top + end), (left + end, top + end), (left + end // 2, top)), fill=colour)
    return image


def _asked(spec: ShapesSpec) -> Iterator[dict[str, Any]]:
    """Rows with prompt, answer and picture; no picture twice. Raises InputError where no other can be found."""
    chance, seen = generator("shapes", spec.seed), set[frozenset[Shape]]()
    while True:
        count = 1 + int(chance.integers(spec.max_count))  # not drawn again with the shapes: few discs repeat most often
        shapes = _new_shapes(count, chance, spec, seen)
        seen.add(frozenset(shapes))
        encoded = io.BytesIO()
        draw(shapes, spec.side).save(encoded, "PNG")
        url = "data:image/png;base64," + base64.b64encode(encoded.getvalue()).decode()
        yield {"prompt": QUESTION, "answer": str(count), "images": [url]}


def _new_shapes(count: int, chance: np.random.Generator, spec: ShapesSpec, seen: set[frozenset[Shape]]) -> list[Shape]:
    """``_shapes`` that are not in ``seen`` in any order; InputError if ``MAX_REPEATS`` drawings are."""
    for _ in range(MAX_REPEATS):
        shapes = _shapes(count, chance, spec)
        if frozenset(shapes) not in seen:
            return shapes
    raise InputError(
        f"fewer pictures exist than rows are asked for: after {len(seen)} of them no new one with {count} {ASKED}s was "
        "found; give a larger --side, or smaller --num-train, --num-val and --num-sft"
    )


def _shapes(count: int, chance: np.random.Generator, spec: ShapesSpec) -> list[Shape]:
    """``count`` of what is asked for and up to ``max_count`` others, each in a place of its own."""
    made, others = [], [kind for kind in KINDS if kind != ASKED]
    num_shapes = count + int(chance.integers(spec.max_count + 1))
    for number, place in enumerate(chance.permutation(spec.side**2)[:num_shapes]):
        kind = ASKED if number < count else others[int(chance.integers(len(others)))]
        colour = list(COLOURS)[int(chance.integers(len(COLOURS)))]
        row, column = divmod(int(place), spec.side)
        down, right = (int(pixels) for pixels in chance.integers(PLACE_PIXELS - SHAPE_PIXELS + 1, size=2))
        made.append(Shape(kind, colour, column * PLACE_PIXELS + right, row * PLACE_PIXELS + down))
    return made


def _answered(row: dict[str, Any], item: int, spec: ShapesSpec) -> dict[str, Any]:
    is_plain, choice = generator("shapes-sft", spec.seed, item).random(2)
    style = STYLES[0] if is_plain < spec.plain_fraction else STYLES[1 + int(choice * (len(STYLES) - 1))]
    return {"prompt": row["prompt"], "response": style.format(count=row["answer"]), "images": row["images"]}
