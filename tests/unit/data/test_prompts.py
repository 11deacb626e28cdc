"""Prompts and supervised conversations from files, with and without a chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from mega_rl.config.schema.sections import DataConfig
from mega_rl.data.conversations import ConversationDataset
from mega_rl.data.prompts import PromptDataset, PromptStream
from mega_rl.data.rows.rows import DataFiles, write_jsonl, write_parquet
from mega_rl.data.tokens.tokenizer import render_prompt
from mega_rl.errors import InputError
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer, bpe_tokenizer

CHAT = [{"role": "user", "content": "Hi"}]
VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": CHAT,
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "72"},
    "extra_info": {"split": "train", "index": 0},
}


@pytest.fixture(scope="module")
def plain() -> PreTrainedTokenizerFast:
    return arithmetic_tokenizer()


@pytest.fixture(scope="module")
def chatty() -> PreTrainedTokenizerFast:
    return bpe_tokenizer(["Hi there", "user", "assistant", "system"], 300)


def prompts_of(tmp_path: Path, rows: list[dict[str, Any]], tokenizer: Any, **data: Any) -> PromptDataset:
    write_jsonl(tmp_path / "rows.jsonl", rows)
    return PromptDataset.from_files(DataFiles([str(tmp_path / "rows.jsonl")]), tokenizer, DataConfig(**data))


def conversation_text(tmp_path: Path, row: dict[str, Any], tokenizer: Any, **data: Any) -> tuple[str, str]:
    """All text of the row's sequence, and the part that is learnt from."""
    write_jsonl(tmp_path / "rows.jsonl", [row])
    (item,) = ConversationDataset.from_files(
        DataFiles([str(tmp_path / "rows.jsonl")]), tokenizer, DataConfig(**data)
    ).sequences
    assert len(item.loss_mask) == len(item.token_ids) - 1
    return tokenizer.decode(item.token_ids), tokenizer.decode(item.token_ids[1:][item.loss_mask.bool()])


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_both_schemas_make_the_same_kind_of_prompt(tmp_path: Path, chatty: Any, suffix: str) -> None:
    path = tmp_path / f"mine.{suffix}"
    (write_jsonl if suffix == "jsonl" else write_parquet)(path, [VERL_ROW])
    write_jsonl(tmp_path / "other.jsonl", [{"prompt": "Hi", "answer": 7}])
    first, second = PromptDataset.from_files(
        DataFiles([str(path), str(tmp_path / "other.jsonl")]), chatty, DataConfig()
    ).prompts
    assert first.text == second.text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert first.token_ids == second.token_ids and chatty.decode(first.token_ids) == first.text
    assert (first.index, first.ground_truth, first.data_source) == (0, "72", "openai/gsm8k")
    assert first.extra_info == {"split": "train", "index": 0}
    assert (second.index, second.ground_truth, second.data_source, second.extra_info) == (1, "7", "other", {})


def test_a_prompt_without_a_template_is_its_text(tmp_path: Path, plain: Any) -> None:
    (prompt,) = prompts_of(tmp_path, [{"prompt": "17+25=", "answer": "42"}], plain).prompts
    assert (prompt.text, len(prompt.token_ids)) == ("17+25=", 6)


def test_chat_template_modes_and_system_prompt(plain: Any, chatty: Any) -> None:
    assert render_prompt(chatty, "Hi", "never")[0] == "Hi"
    assert render_prompt(chatty, CHAT, "always", "Be")[0].startswith(
        "<|im_start|>system\nBe<|im_end|>\n<|im_start|>user"
    )
    own = [{"role": "system", "content": "Mine"}, *CHAT]
    assert "Be" not in render_prompt(chatty, own, "auto", "Be")[0]
    assert render_prompt(plain, "1+1=", "auto", "3")[0] == "3\n1+1="
    with pytest.raises(InputError, match="data.chat_template is always but the tokenizer has no chat template"):
        render_prompt(plain, "1+1=", "always")
    with pytest.raises(InputError, match="data.chat_template is 'on'"):
        render_prompt(plain, "1+1=", "on")


def test_an_end_of_sequence_that_the_tokenizer_adds_does_not_end_the_prompt() -> None:
    tokenizer = arithmetic_tokenizer()
    backend = tokenizer.backend_tokenizer
    backend.post_processor = TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)])
    _, ids = render_prompt(tokenizer, "1+1=")
    assert tokenizer.decode(ids) == "<bos>1+1="


def test_overlong_prompts_are_dropped_or_refused_and_keep_the_row_numbers(tmp_path: Path, plain: Any) -> None:
    rows = [{"prompt": text, "answer": "0"} for text in ("1+1=", "10000+1=", "2+2=")]
    kept = prompts_of(tmp_path, rows, plain, max_prompt_length=4)
    assert ([prompt.index for prompt in kept.prompts], kept.num_dropped) == ([0, 2], 1)
    with pytest.raises(InputError, match="rows.jsonl line 2 has a prompt of 8 tokens but data.max_prompt_length is 4"):
        prompts_of(tmp_path, rows, plain, max_prompt_length=4, filter_overlong_prompts=False)
    with pytest.raises(InputError, match="all 3 prompts are longer than data.max_prompt_length"):
        prompts_of(tmp_path, rows, plain, max_prompt_length=1)


def test_max_samples_takes_the_first_rows(tmp_path: Path, plain: Any) -> None:
    write_jsonl(tmp_path / "v.jsonl", [{"prompt": f"{i}=", "answer": "0"} for i in range(5)])
    taken = PromptDataset.from_files(DataFiles([str(tmp_path / "v.jsonl")], "data.val_files", 2), plain, DataConfig())
    assert [prompt.text for prompt in taken.prompts] == ["0=", "1="]


def test_the_fingerprint_changes_with_the_truth_and_the_tokenizer(tmp_path: Path, plain: Any, chatty: Any) -> None:
    row = {"prompt": "1+1=", "answer": "2"}
    prints = [
        prompts_of(tmp_path, rows, tokenizer).fingerprint
        for rows, tokenizer in [([row], plain), ([row | {"answer": "3"}], plain), ([row], chatty), ([row, row], plain)]
    ]
    assert len(set(prints)) == 4
    assert prompts_of(tmp_path, [row], plain).fingerprint == prints[0]


def test_a_stream_of_prompts(tmp_path: Path, plain: Any) -> None:
    dataset = prompts_of(tmp_path, [{"prompt": f"{i}=", "answer": "0"} for i in range(5)], plain)
    batch = PromptStream(dataset, batch_size=2, shuffle=False, seed=0).next_batch()
    assert [prompt.text for prompt in batch] == ["0=", "1="]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": "1", "answer": "2"}, "line 1 has answer, text but needs `prompt`, `question`"),
        (
            {"prompt": "1=", "answer": "2", "images": ["a.png"]},
            "line 1 has the column images, but only stages sft and rl",
        ),
        (
            {"prompt": "1=", "answer": "2", "tools": [{"name": "f"}]},
            "line 1 has the column tools, but a policy",
        ),
        ({"prompt": "1="}, "line 1 has prompt but needs"),
        ({"prompt": "1=", "reward_model": {"style": "rule"}}, "has prompt, reward_model but needs"),
        ({"prompt": "1=", "reward_model": "rule"}, "reward_model is 'rule'; make it an object"),
        ({"prompt": "1=", "answer": "1", "extra_info": "x"}, "extra_info is 'x'"),
        ({"prompt": "", "answer": "1"}, "line 1: the prompt is empty"),
        ({"prompt": 3, "answer": "1"}, "line 1: a prompt is text or a list of chat messages, not 3"),
        ({"prompt": [], "answer": "1"}, r"line 1: a prompt is text or a list of chat messages, not \[\]"),
        ({"prompt": [{"role": "user"}], "answer": "1"}, "a chat message needs role and content"),
        ({"prompt": [{"role": "user", "content": [{}]}], "answer": "1"}, "needs role and content, both text"),
    ],
)
def test_rows_that_are_no_prompts(tmp_path: Path, plain: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        prompts_of(tmp_path, [row], plain)


@pytest.mark.parametrize("field", ["response", "answer"])
def test_a_plain_response_is_learnt_with_its_end(tmp_path: Path, plain: Any, field: str) -> None:
    assert conversation_text(tmp_path, {"prompt": "1+1=", field: "2"}, plain) == ("1+1=2<eos>", "2<eos>")


def test_supervised_prompts_are_the_tokens_that_are_sampled_from(tmp_path: Path, plain: Any, chatty: Any) -> None:
    for tokenizer in (plain, chatty):
        write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "1+1=", "response": "2"}])
        data = DataConfig(system_prompt="3")
        item = ConversationDataset.from_files(DataFiles([str(tmp_path / "rows.jsonl")]), tokenizer, data)[0]
        _, prompt_ids = render_prompt(tokenizer, "1+1=", data.chat_template, data.system_prompt)
        assert item.token_ids[: len(prompt_ids)].tolist() == prompt_ids
        assert item.loss_mask.tolist().index(1.0) == len(prompt_ids) - 1


def test_every_assistant_turn_is_learnt_through_its_end(tmp_path: Path, chatty: Any) -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    text, learnt = conversation_text(tmp_path, {"messages": [{"role": r, "content": c} for r, c in turns]}, chatty)
    assert text == "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns).removesuffix("\n")
    assert learnt == "b<|im_end|>d<|im_end|>"


def test_a_template_without_an_end_of_sequence_gets_one(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer(["x"], 300)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }};{% endfor %}"
    row = {"prompt": [{"role": "user", "content": "a"}], "response": "b"}
    assert conversation_text(tmp_path, row, tokenizer) == ("a;b;<|im_end|>", "b;<|im_end|>")


def test_templates_that_refuse_or_rewrite_are_told(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer(["x"], 300)
    turns = [{"role": role, "content": "x"} for role in ("user", "assistant", "user", "assistant")]
    tokenizer.chat_template = "{{ messages | length }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(InputError, match="line 1: the tokenizer's chat template rewrites .* 2; correct the template"):
        conversation_text(tmp_path, {"messages": turns}, tokenizer)
    tokenizer.chat_template = "{{ raise_exception('only users') }}"
    with pytest.raises(InputError, match=r"line 1: the tokenizer's chat template refuses the messages \(only users\)"):
        conversation_text(tmp_path, {"messages": turns}, tokenizer)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "1="}, "line 1 has prompt but needs `messages`, or `prompt`, `question` or `instruction` with"),
        ({"text": "1="}, "line 1 has text but needs"),
        ({"messages": CHAT}, "line 1: a conversation needs a prompt and ends with"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "a conversation needs a prompt"),
        ({"prompt": "1=", "response": ""}, "ends with a non-empty message of the assistant"),
        ({"prompt": "1=", "response": 3}, "a chat message needs role and content, both text"),
        ({"messages": [{"role": "assistant", "content": "1"}] * 2}, "several assistant messages need a chat template"),
    ],
)
def test_rows_that_are_no_conversations(tmp_path: Path, plain: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        conversation_text(tmp_path, row, plain)


def test_overlong_conversations_are_dropped_or_refused(tmp_path: Path, plain: Any) -> None:
    file = tmp_path / "rows.jsonl"
    write_jsonl(file, [{"prompt": "1+1=", "response": "2"}, {"prompt": "1+1=", "response": "222"}])
    kept = ConversationDataset.from_files(
        DataFiles([str(file)]), plain, DataConfig(max_prompt_length=4, max_response_length=2)
    )
    assert (len(kept), kept.num_dropped) == (1, 1)
    strict = DataConfig(max_prompt_length=4, max_response_length=2, filter_overlong_prompts=False)
    with pytest.raises(InputError, match="line 2 has 8 tokens but .* is 6"):
        ConversationDataset.from_files(DataFiles([str(file)]), plain, strict)
    with pytest.raises(InputError, match="all 2 conversations are longer"):
        ConversationDataset.from_files(
            DataFiles([str(file)]), plain, DataConfig(max_prompt_length=1, max_response_length=1)
        )


GSM8K = {"question": "1+1?", "answer": "1+1 is two.\n#### 2"}
ALPACA = {"instruction": "Add.", "input": "1+1", "output": "2"}
SHAREGPT = {"system": "S", "conversations": [{"from": "human", "value": "1+1"}, {"from": "gpt", "value": "2"}]}


@pytest.mark.parametrize(
    ("row", "text", "truth"),
    [
        (GSM8K, "1+1?", "2"),
        ({"prompt": "1+1", "solution": "2"}, "1+1", "2"),
        (ALPACA, "Add.\n1+1", "2"),
        (SHAREGPT | {"answer": "2"}, "S\n1+1", "2"),
        ({"messages": [{"role": "user", "content": "1+1"}], "answer": 2, "tools": None, "images": []}, "1+1", "2"),
    ],
)
def test_rows_of_others_are_prompts(tmp_path: Path, chatty: Any, row: dict[str, Any], text: str, truth: str) -> None:
    (prompt,) = prompts_of(tmp_path, [row], chatty, chat_template="never").prompts
    assert (prompt.text, prompt.ground_truth) == (text, truth)


@pytest.mark.parametrize(("row", "learnt"), [(ALPACA, "2"), (SHAREGPT, "2"), (GSM8K, GSM8K["answer"])])
def test_rows_of_others_are_conversations(tmp_path: Path, chatty: Any, row: dict[str, Any], learnt: str) -> None:
    whole, response = conversation_text(tmp_path, row, chatty)
    assert response.startswith(learnt) and "1+1" in whole and ("S" in whole or row is not SHAREGPT)


def test_a_json_array_and_rows_without_a_truth(tmp_path: Path, plain: Any) -> None:
    path = tmp_path / "rows.json"
    path.write_text('[{"prompt": "1="}, {"prompt": "2="}]')
    prompts = PromptDataset.from_files(DataFiles([str(path)]), plain, DataConfig(), needs_truth=lambda _: False).prompts
    assert [(prompt.text, prompt.ground_truth) for prompt in prompts] == [("1=", ""), ("2=", "")]
    with pytest.raises(InputError, match=r"rows.json row 1 has prompt but needs .* as a reward compares with it"):
        PromptDataset.from_files(DataFiles([str(path)]), plain, DataConfig())
    path.write_text('{"prompt": "1="}')
    with pytest.raises(InputError, match="is a JSON dict, not an array of objects"):
        PromptDataset.from_files(DataFiles([str(path)]), plain, DataConfig())
