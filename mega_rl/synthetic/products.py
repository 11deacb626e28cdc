"""Products of two numbers as conversations with a calculator, for the quickstart of tools: made on the spot.

A small model cannot multiply, but it can copy: the numbers into a call, and the result into its answer. The supervised
part calls the calculator in only some of its rows and answers with a question mark in the others, so that reinforcement
learning has something to find out. Numbers of one kind have one width, which makes them quick to copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from mega_rl.data.stream import generator
from mega_rl.errors import InputError

PRODUCTS_SOURCE = "products"
CALCULATOR = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Compute the value of an arithmetic expression.",
        "parameters": {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "the expression"}},
            "required": ["expression"],
        },
    },
}
# Names of tools and of their arguments only, so that a tiny model reads few tokens; calls as Hermes writes them.
TOOLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\ntools:{% for tool in tools %} {{ tool.function.name }}"
    "({{ tool.function.parameters.properties | join(', ') }}){% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# What the template writes around numbers: a tokenizer that is trained on it has whole words.
WORDS = 50 * [
    "<|im_start|>system\ntools: calculate(expression)<|im_end|>\n<|im_start|>user\n<|im_start|>assistant\n<tool_call>\n"
    '{"name": "calculate", "arguments": {"expression": "1*2"}}\n</tool_call><|im_end|>\n<|im_start|>tool\n'
]


@dataclass(frozen=True)
class ProductsSpec:
    """How many products, and how often the supervised part asks the calculator."""

    digits: int = 3  # of each factor
    num_train: int = 2000  # prompts
    num_val: int = 100  # prompts, none of whose pairs of factors is in train
    num_sft: int = 20000  # conversations, over factors of their own
    call_fraction: float = 0.4  # share of the conversations that call
    seed: int = 0


@dataclass(frozen=True)
class ProductsData:
    """A table for each file."""

    train: list[dict[str, Any]]  # {"prompt": "473*892=?", "answer": "421916", "data_source": "products"}
    val: list[dict[str, Any]]  # the same, held out
    sft: list[dict[str, Any]]  # {"messages": [...], "tools": [...]}


def products_data(spec: ProductsSpec) -> ProductsData:
    """Prompts for training and validation, and conversations about other products.

    Raises:
        InputError: a count below 1, a fraction outside of [0, 1], or more products than there are.
    """
    for name in ("digits", "num_train", "num_val", "num_sft"):
        if getattr(spec, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(spec, name)}; give at least 1")
    if not 0 <= spec.call_fraction <= 1:
        raise InputError(f"--call-fraction is {spec.call_fraction}; give a number from 0 to 1")
    wanted = spec.num_train + spec.num_val
    if wanted + spec.num_sft > 20 * 100 ** (spec.digits - 1) or spec.digits > 6:
        raise InputError(f"--digits {spec.digits} has too few products, or more than 6; choose 2 to 6")
    pairs = _pairs(spec)
    prompts = [_prompt(*next(pairs)) for _ in range(wanted)]
    sft = [_conversation(*next(pairs), item, spec) for item in range(spec.num_sft)]
    return ProductsData(prompts[: spec.num_train], prompts[spec.num_train :], sft)


def _pairs(spec: ProductsSpec) -> Iterator[tuple[int, int]]:
    """Pairs of factors with the longest products, none of them twice in either order."""
    chance, seen = generator("products", spec.seed), set[tuple[int, int]]()
    while True:
        a, b = (int(x) for x in chance.integers(10 ** (spec.digits - 1), 10**spec.digits, 2))
        if a * b >= 10 ** (2 * spec.digits - 1) and (min(a, b), max(a, b)) not in seen:
            seen.add((min(a, b), max(a, b)))
            yield a, b


def _prompt(a: int, b: int) -> dict[str, Any]:
    return {"data_source": PRODUCTS_SOURCE, "prompt": f"{a}*{b}=?", "answer": str(a * b)}


def _conversation(a: int, b: int, item: int, spec: ProductsSpec) -> dict[str, Any]:
    function = {"name": "calculate", "arguments": {"expression": f"{a}*{b}"}}
    answers: list[dict[str, Any]] = [{"role": "assistant", "content": "?"}]
    if generator("products-sft", spec.seed, item).random() < spec.call_fraction:
        answers = [
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": str(a * b)},
            {"role": "assistant", "content": str(a * b)},
        ]
    return {"messages": [{"role": "user", "content": f"{a}*{b}=?"}, *answers], "tools": [CALCULATOR]}
