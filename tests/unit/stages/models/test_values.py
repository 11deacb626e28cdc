"""Value models opened from directories: new heads, tokenizers, padding tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_rl.bridge.files.huggingface import value_changes
from mega_rl.bridge.mapping.tensors import SCORE, hf_tensors
from mega_rl.data.tokens.tokenizer import load_tokenizer, padding_token
from mega_rl.errors import InputError
from mega_rl.megatron.model.value import NewScore
from mega_rl.models.shape import VALUE
from mega_rl.stages.models.values import check_same_tokenizer, open_value_model, scored_at_end
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer
from mega_rl.synthetic.tiny_model import TinyModelSpec, write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    spec = TinyModelSpec(hidden_size=64, num_layers=1, ffn=32)
    return write_tiny_model(tmp_path_factory.mktemp("model") / "model", spec, arithmetic_tokenizer())


def test_a_language_model_gets_a_head(model: Path) -> None:
    shape, weights = open_value_model(model, "model.path", seed=1)
    assert isinstance(weights, NewScore) and shape.head == "value" and hf_tensors(shape)[SCORE] == (1, 64)
    box = ((0, 1), (0, 64))
    first, again, other, zeros = (
        open_value_model(model, "model.path", seed)[1].read(SCORE, box) for seed in (1, 1, 2, None)
    )
    assert torch.equal(first, again) and not torch.equal(first, other) and not zeros.any()
    assert 0.5 * 65**-0.5 < float(first.std()) < 2 * 65**-0.5
    with pytest.raises(InputError, match=r"critic\.path.*ForSequenceClassification"):
        open_value_model(model, "critic.path", None, allowed=VALUE)
    assert value_changes(shape, 7)["architectures"] == ["Qwen2ForSequenceClassification"]


def test_another_tokenizer_is_refused_with_the_first_token_that_differs(model: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    check_same_tokenizer(tokenizer, model, "critic.path")
    other = load_tokenizer(str(model))
    other.add_tokens(["abc"])
    other.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"critic\.path=.*'abc' has the id \d+ there and None here"):
        check_same_tokenizer(tokenizer, tmp_path, "critic.path")


@pytest.mark.parametrize(
    ("pad", "vocab_size", "expected"),
    [(0, 10, 0), (2, 10, None), (2, 16, 15), (None, 10, None), (None, 11, 10)],
)
def test_a_padding_token_stands_in_no_text(pad: int | None, vocab_size: int, expected: int | None) -> None:
    class Tokenizer(SimpleNamespace):
        def __len__(self) -> int:
            return 10

    tokenizer: Any = Tokenizer(pad_token_id=pad, eos_token_id=2)
    assert padding_token(tokenizer, vocab_size) == expected


def test_the_last_token_is_the_position_that_counts() -> None:
    sequence = scored_at_end(torch.tensor([5, 6, 7]))
    assert sequence.token_ids[:-1].tolist() == [5, 6, 7] and sequence.loss_mask.tolist() == [0.0, 0.0, 1.0]
