"""What lies beside a model's weights is never run, whoever is at the keyboard: code of its own, and pickles."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, dynamic_module_utils

from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.data.tokens.tokenizer import load_tokenizer
from mega_rl.errors import InputError
from mega_rl.models.shape import read_model_shape
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer
from mega_rl.synthetic.tiny_model import TinyModelSpec, write_tiny_model

CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast, Qwen2Config
Path({mark!r}).touch()
class Tokenizer(PreTrainedTokenizerFast): ...
class Config(Qwen2Config): ...
"""


class Runs:
    """Unpickled it makes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "whole", TinyModelSpec(), arithmetic_tokenizer())


@pytest.fixture
def hostile(whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model with code and a pickle; whoever is asked whether they may run says yes."""
    model, mark = tmp_path / "model", tmp_path / "ran"
    shutil.copytree(whole, model)
    (model / "evil.py").write_text(CODE.format(mark=str(mark)))
    for name, kinds in (
        ("config.json", {"AutoConfig": "evil.Config"}),
        ("tokenizer_config.json", {"AutoTokenizer": [None, "evil.Tokenizer"]}),
    ):
        content = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps(content | {"auto_map": kinds}))
    torch.save(Runs(mark), model / "pytorch_model.bin")
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    return model


def of_a_kind_of_its_own(directory: Path) -> None:
    """A model that transformers knows by its code only."""
    for name, changes in (("config.json", {"model_type": "x"}), ("tokenizer_config.json", {"tokenizer_class": "X"})):
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_code_beside_a_tokenizer_is_not_run(hostile: Path) -> None:
    assert load_tokenizer(str(hostile)).encode("1+1=") == arithmetic_tokenizer().encode("1+1=")
    of_a_kind_of_its_own(hostile)
    with pytest.raises(InputError, match="the tokenizer in .* cannot be loaded"):
        load_tokenizer(str(hostile))
    assert not (hostile.parent / "ran").exists()
    AutoTokenizer.from_pretrained(hostile, local_files_only=True)
    assert (hostile.parent / "ran").exists(), "the code is one that would run"


def test_pickles_beside_or_in_the_place_of_the_weights_are_not_read(hostile: Path) -> None:
    shape = read_model_shape(hostile)
    HFReader(hostile).check(shape)
    shutil.move(hostile / "pytorch_model.bin", hostile / "model.safetensors")
    with pytest.raises(InputError, match="model.safetensors"):
        HFReader(hostile)
    (hostile / "model.safetensors").rename(hostile / "pytorch_model.bin")
    with pytest.raises(InputError, match="safetensors"):
        HFReader(hostile)
    assert not (hostile.parent / "ran").exists()
