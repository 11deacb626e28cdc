"""What the runs of ``tools/train.py`` are given: made once per session, from the functions behind the tools."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM

from mega_rl.data.rows.rows import write_jsonl
from mega_rl.synthetic.arithmetic import ArithmeticSpec, arithmetic_data, arithmetic_tokenizer
from mega_rl.synthetic.tiny_model import TinyModelSpec, write_tiny_model
from tests.launching.launch import ranks
from tests.launching.training import (
    FLEET_SETTINGS,
    PINNED_TWO,
    REWARD,
    RL,
    SFT,
    STRUCK_FLEET,
    STRUCK_LOG,
    TinyWorld,
    train,
)
from tests.models import vision_models


def make_mistakes_visible(model_dir: Path) -> None:
    """Take norms and biases away from one and zero, and let answers depend on their prompts."""
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif "embed" not in name:
                parameter.mul_(4.0)
    model.save_pretrained(model_dir)


@pytest.fixture(scope="session")
def tiny_world(tmp_path_factory: pytest.TempPathFactory) -> TinyWorld:
    return write_world(tmp_path_factory.mktemp("tiny_world"))


def write_world(root: Path) -> TinyWorld:
    spec = TinyModelSpec(hidden_size=128, num_layers=2, ffn=96)
    model = write_tiny_model(root / "model", spec, arithmetic_tokenizer())
    make_mistakes_visible(model)
    data = arithmetic_data(ArithmeticSpec(max_operand=9, num_train=60, num_val=8, num_sft=240))
    tables = {"train": data.train, "val": data.val, "sft": data.sft[:200], "sft_val": data.sft[200:]}
    files = {name: root / f"{name}.jsonl" for name in tables}
    for name, rows in tables.items():
        write_jsonl(files[name], rows)
    reward = root / "reward.py"
    reward.write_text(REWARD)
    configs = {"rl": RL, "sft": SFT}
    for name, text in configs.items():
        (root / f"{name}.yaml").write_text(text.format(model=model, reward=reward, **files))
    return TinyWorld(model, files["sft"], files["train"], root / "rl.yaml", root / "sft.yaml")


@pytest.fixture(scope="session")
def sft_run(tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of an uninterrupted supervised run, one step of it recorded; not to be written to."""
    output_dir = tmp_path_factory.mktemp("sft") / "run"
    profile = "trainer.profile={steps: [3], ranks: [1]}"
    train(tiny_world.sft, output_dir, profile, "platform.peak_tflops=2.0").check()
    return output_dir


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """What makes a run one of a model that learns to see, whose prompts have none to two pictures."""
    root, rows = tmp_path_factory.mktemp("pictures"), []
    for number in range(12):
        names = [f"{number}_{place}.png" for place in range(number % 3)]
        for place, name in enumerate(names):
            Image.new("RGB", (16 + 4 * number, 20 + 8 * place), (20 * number, 9, 99)).save(root / name)
        rows.append({"prompt": f"{'<image>' * len(names)}{number}?", "answer": "1", "images": names})
    file = root / "rows.jsonl"
    write_jsonl(file, rows)
    model = vision_models.write(root / "model", "qwen3_vl")
    seeing = f"model={{path: {model}, vision: {{freeze: false, freeze_merger: false}}}}"
    return seeing, f"data={{train_files: [{file}], val_files: [{file}], max_prompt_length: 96}}"


@pytest.fixture(scope="session")
def calm_fleet(tiny_world: TinyWorld, pictures: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run whose pretended engines nobody strikes; not to be written to."""
    root = tmp_path_factory.mktemp("calm_fleet")
    settings = (f"trainer.output_dir={root / 'run'}", *FLEET_SETTINGS, *PINNED_TWO, *pictures)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STRUCK_LOG, str(root / "told.jsonl"))
        ranks(STRUCK_FLEET, "calm", "--config", tiny_world.rl, *settings, nproc=1).check()
    return root / "run"
