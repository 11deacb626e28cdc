"""The arithmetic data set and the two home-made tokenizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from mega_rl.data.tokens.tokenizer import load_tokenizer
from mega_rl.errors import InputError
from mega_rl.synthetic.arithmetic import (
    ARITHMETIC_CHARACTERS,
    ArithmeticSpec,
    arithmetic_data,
    arithmetic_tokenizer,
    bpe_tokenizer,
)
from mega_rl.synthetic.tiny_model import FAMILIES, SEEING, TinyModelSpec, write_tiny_model

OF_TEXT = [family for family in FAMILIES if family != SEEING]  # test_shapes.py has the other one
TINY = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "ffn": 8}
TEXTS = ["Natalia sold 48/2 = 24 clips in May.", "How many clips did Natalia sell altogether?"] * 3
ODD_TEXT = "Naïve: 12+34= 46\n\n  don't <|im_end|>\t数"


def operands(row: dict[str, Any]) -> tuple[int, int]:
    a, b = row["prompt"].removesuffix("=").split("+")
    return int(a), int(b)


def test_the_answers_are_right_and_validation_is_held_out_in_either_order() -> None:
    data = arithmetic_data(ArithmeticSpec(max_operand=19, num_train=300, num_val=64, num_sft=0))
    assert (len(data.train), len(data.val), data.sft) == (300, 64, [])
    assert all(int(row["answer"]) == sum(operands(row)) for row in data.train + data.val)
    train, val = ({tuple(sorted(operands(row))) for row in rows} for rows in (data.train, data.val))
    assert not train & val
    assert len({row["prompt"] for row in data.train + data.val}) == 364
    assert {row["data_source"] for row in data.train} == {"arithmetic"}


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_the_stated_fraction_of_the_supervised_responses_is_plain(fraction: float) -> None:
    spec = ArithmeticSpec(max_operand=19, num_train=300, num_val=64, num_sft=2000, plain_fraction=fraction)
    data = arithmetic_data(spec)
    assert {row["prompt"] for row in data.sft} == {row["prompt"] for row in data.train}
    assert all(int(row["response"].lstrip("+=")) == sum(operands(row)) for row in data.sft)
    plain = [row["response"].isdigit() for row in data.sft]
    assert sum(plain) / len(plain) == pytest.approx(fraction, abs=0.04 * (0 < fraction < 1))
    if fraction == 0.0:
        assert {row["response"][0] for row in data.sft} == {"=", "+"}


def test_numbers_are_padded_to_one_width() -> None:
    data = arithmetic_data(ArithmeticSpec(max_operand=60, num_train=300, num_val=20, num_sft=100))
    assert {len(row["prompt"]) for row in data.train + data.val} == {len("07+25=")}
    assert {len(row["answer"]) for row in data.train + data.val} == {len("120")}


def test_data_depend_on_the_seed_alone_and_longer_ones_begin_the_same() -> None:
    assert arithmetic_data(ArithmeticSpec(seed=3)) == arithmetic_data(ArithmeticSpec(seed=3))
    assert arithmetic_data(ArithmeticSpec(seed=3)).train != arithmetic_data(ArithmeticSpec(seed=4)).train
    short, long = (arithmetic_data(ArithmeticSpec(num_sft=count)).sft for count in (50, 500))
    assert long[:50] == short


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_operand": 3, "num_train": 10, "num_val": 10}, "--max-operand 3 gives .* fewer than"),
        ({"num_train": 0}, "--num-train is 0"),
        ({"num_sft": -1}, "--num-sft is -1"),
        ({"plain_fraction": 1.5}, "--plain-fraction is 1.5"),
        ({"plain_fraction": float("nan")}, "--plain-fraction is nan"),
    ],
)
def test_impossible_data(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        arithmetic_data(ArithmeticSpec(**changes))


@pytest.mark.parametrize("family", OF_TEXT)
def test_saved_and_loaded_a_tokenizer_means_the_same_in_every_family(tmp_path: Path, family: str) -> None:
    for made, text in (
        (arithmetic_tokenizer(), ARITHMETIC_CHARACTERS + "  12 "),
        (bpe_tokenizer(TEXTS, 290), ODD_TEXT),
    ):
        out = write_tiny_model(tmp_path / "m", TinyModelSpec(family, **TINY), made, overwrite=True)
        loaded = load_tokenizer(str(out))
        assert len(loaded) == len(made) == AutoConfig.from_pretrained(out).vocab_size
        assert loaded(text)["input_ids"] == made(text)["input_ids"]
        assert loaded.decode(loaded(text)["input_ids"]) == text
        assert (loaded.eos_token, loaded.pad_token) == (made.eos_token, made.pad_token)
        assert loaded.chat_template == made.chat_template


def test_arithmetic_tokens_are_characters() -> None:
    tokenizer = arithmetic_tokenizer()
    assert len(tokenizer) == 4 + len(ARITHMETIC_CHARACTERS)
    assert tokenizer("17+25=")["input_ids"] == [5, 11, 14, 6, 9, 17]
    assert tokenizer.decode([5, 11, tokenizer.eos_token_id], skip_special_tokens=True) == "17"


def test_bpe_learns_the_text_and_needs_all_bytes() -> None:
    tokenizer = bpe_tokenizer(TEXTS, 290)
    assert len(tokenizer) == 290
    assert len(tokenizer("Natalia")["input_ids"]) < len("Natalia")
    with pytest.raises(InputError, match="--vocab-size is 258; .* at least 259"):
        bpe_tokenizer(TEXTS, 258)


@pytest.mark.parametrize("family", OF_TEXT)
@pytest.mark.parametrize("tied", [True, False])
def test_a_tiny_model_loads_and_is_the_same_for_a_seed(tmp_path: Path, family: str, tied: bool) -> None:
    models = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        spec = TinyModelSpec(family, **TINY, tied=tied, seed=seed, dtype="bfloat16")
        out = write_tiny_model(tmp_path / name, spec, arithmetic_tokenizer())
        models.append(AutoModelForCausalLM.from_pretrained(out))
    a, b, c = ([p for p in model.state_dict().values()] for model in models)
    assert all(x.equal(y) for x, y in zip(a, b, strict=True)) and not all(x.equal(y) for x, y in zip(a, c, strict=True))
    config = models[0].config
    assert (config.model_type, config.tie_word_embeddings, str(config.dtype)) == (family, tied, "torch.bfloat16")
    assert (models[0].lm_head.weight.data_ptr() == models[0].model.embed_tokens.weight.data_ptr()) is tied
    assert models[0].model.layers[0].self_attn.k_proj.out_features == 8
    assert models[0].generation_config.eos_token_id == config.eos_token_id == 2
    assert models[0].generation_config.pad_token_id == config.pad_token_id == 0


def test_the_default_tiny_model_has_about_half_a_million_parameters(tmp_path: Path) -> None:
    out = write_tiny_model(tmp_path / "m", TinyModelSpec(), arithmetic_tokenizer())
    assert 0.3e6 < AutoModelForCausalLM.from_pretrained(out).num_parameters() < 0.6e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "gpt2"}, "--family is 'gpt2'; choose one of qwen2"),
        ({"dtype": "int8"}, "--dtype is 'int8'"),
        ({"num_heads": 3}, "--num-heads 3 does not divide --hidden-size 16"),
        ({"num_heads": 16}, "into heads of even width"),
        ({"num_kv_heads": 3}, "--num-kv-heads 3 does not divide --num-heads 2"),
        ({"num_layers": 0}, "--num-layers is 0"),
    ],
)
def test_impossible_models_leave_nothing_behind(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        write_tiny_model(tmp_path / "m", TinyModelSpec(**(TINY | changes)), arithmetic_tokenizer())
    assert not list(tmp_path.iterdir())


def test_a_directory_is_replaced_only_when_asked(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "precious").touch()
    with pytest.raises(InputError, match="exists already"):
        write_tiny_model(tmp_path / "m", TinyModelSpec(**TINY), arithmetic_tokenizer())
    write_tiny_model(tmp_path / "m", TinyModelSpec(**TINY), arithmetic_tokenizer(), overwrite=True)
    assert not (tmp_path / "m" / "precious").exists()
    assert [entry.name for entry in tmp_path.iterdir()] == ["m"]


def test_malformed_model_directories(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="model.path: .*absent is no directory"):
        load_tokenizer(str(tmp_path / "absent"))
    out = write_tiny_model(tmp_path / "m", TinyModelSpec(**TINY), arithmetic_tokenizer())
    whole = (out / "tokenizer.json").read_text()
    for content in (whole[: len(whole) // 2], "{}", ""):
        (out / "tokenizer.json").write_text(content)
        with pytest.raises(InputError, match="model.path: the tokenizer in .* cannot be loaded"):
            load_tokenizer(str(out))
    (out / "tokenizer.json").unlink()
    with pytest.raises(InputError, match="has no tokenizer: .*tokenizer.json"):
        load_tokenizer(str(out))


def test_a_tokenizer_without_padding_or_end(tmp_path: Path) -> None:
    tokenizer = bpe_tokenizer(TEXTS, 290)
    tokenizer.pad_token = None
    out = write_tiny_model(tmp_path / "m", TinyModelSpec("llama", **TINY), tokenizer)
    assert load_tokenizer(str(out)).pad_token == "<|im_end|>"
    tokenizer.eos_token = None
    out = write_tiny_model(tmp_path / "n", TinyModelSpec("llama", **TINY), tokenizer)
    with pytest.raises(InputError, match="has no eos_token"):
        load_tokenizer(str(out))
