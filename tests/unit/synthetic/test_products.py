"""Products with a calculator: what the rows hold, and what the chat template writes of them."""

from __future__ import annotations

import pytest

from mega_rl.data.tokens.replies import ReplyTokens
from mega_rl.data.tokens.template import apply_template, check_written
from mega_rl.environments.built_in.functions import calculate
from mega_rl.errors import InputError
from mega_rl.synthetic.arithmetic import bpe_tokenizer
from mega_rl.synthetic.products import CALCULATOR, TOOLS_TEMPLATE, WORDS, ProductsSpec, products_data

SPEC = ProductsSpec(num_train=50, num_val=20, num_sft=100)


def test_held_out_products_are_in_no_other_file() -> None:
    data = products_data(SPEC)
    assert data == products_data(SPEC)
    asked = [row["prompt"] for row in data.train + data.val] + [row["messages"][0]["content"] for row in data.sft]
    assert len(set(asked)) == 170
    assert all(calculate(row["prompt"].removesuffix("=?")) == row["answer"] for row in data.train + data.val)
    calling = [row["messages"] for row in data.sft if len(row["messages"]) == 4]
    assert 20 < len(calling) < 60
    for _, call, reply, answer in calling:
        expression = call["tool_calls"][0]["function"]["arguments"]["expression"]
        assert calculate(expression) == reply["content"] == answer["content"] and len(answer["content"]) == 6


def test_the_template_writes_all_of_a_conversation_and_only_appends() -> None:
    tokenizer = bpe_tokenizer(WORDS, 400, TOOLS_TEMPLATE)
    ReplyTokens(tokenizer, [CALCULATOR], roles=["tool"])
    messages = next(row["messages"] for row in products_data(SPEC).sft if len(row["messages"]) == 4)
    check_written(tokenizer, messages, [CALCULATOR])
    text = apply_template(tokenizer, messages, add_generation_prompt=False, tools=[CALCULATOR])
    assert text.startswith("<|im_start|>system\ntools: calculate(expression)<|im_end|>\n<|im_start|>user\n")
    assert '<tool_call>\n{"name": "calculate", "arguments": {"expression": "' in text


@pytest.mark.parametrize("changes", [{"digits": 0}, {"num_val": 0}, {"call_fraction": 1.5}, {"digits": 2}])
def test_impossible_tables_are_a_sentence(changes: dict[str, float]) -> None:
    with pytest.raises(InputError, match="--"):
        products_data(ProductsSpec(**changes))  # type: ignore[arg-type]
