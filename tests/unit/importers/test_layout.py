"""Where a neighbour divides weights over all ranks, the layout that the plan says fits is proposed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config import load_config
from mega_rl.importers.layout import proposed
from mega_rl.planning.automatic import HEADROOM
from mega_rl.planning.memory_plan import Machine
from tools.import_config import main

GIB = 1 << 30
SHAPES: dict[str, dict[str, Any]] = {  # as the config.json of Qwen3's dense models has them
    "0.6B": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072},
    "32B": {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64, "intermediate_size": 25600},
}


def model(folder: Path, size: str) -> str:
    target = folder / size
    target.mkdir()
    more = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "max_position_embeddings": 40960}
    text = json.dumps({"architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu", **more, **SHAPES[size]})
    (target / "config.json").write_text(text)
    return str(target)


def imported(folder: Path, path: str, *options: str) -> Path:
    theirs, out = folder / "theirs.yaml", folder / "run.yaml"
    theirs.write_text(
        f"stage: sft\nmodel_name_or_path: {path}\nfinetuning_type: full\ndeepspeed: ds_z3_config.json\nbf16: true\n"
        "dataset: mine\ncutoff_len: 4096\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 2\n"
    )
    assert main(["--from", "llamafactory", str(theirs), "-o", str(out), "--devices", "32", *options]) == 0
    return out


def test_a_large_model_gets_sizes_with_which_it_fits(tmp_path: Path) -> None:
    out = imported(tmp_path, model(tmp_path, "32B"), "--device-memory", "64GiB")
    parallel = load_config(out).parallel
    assert parallel.tensor * parallel.pipeline > 1 and parallel.sequence == (parallel.tensor > 1)
    assert "proposed by the plan" in out.read_text() and "tools/plan.py" not in out.read_text()
    found = proposed(load_config(out), Machine(32, 64 * GIB, 4 * GIB, "npu"))
    assert found is not None
    assert found[0].parallel == parallel  # the fewest parts, whatever the configuration has
    assert -found[1].excess_bytes >= HEADROOM * 64 * GIB


def test_a_small_model_stays_whole(tmp_path: Path) -> None:
    out = imported(tmp_path, model(tmp_path, "0.6B"), "--device-memory", "64GiB")
    assert load_config(out).parallel.tensor == 1
    assert "the sizes as they are: proposed by the plan" in out.read_text()


def test_without_the_memory_of_a_device_the_command_is_named(tmp_path: Path) -> None:
    text = imported(tmp_path, model(tmp_path, "32B")).read_text()
    assert "tools/plan.py --config FILE --devices 32 --device-memory 64GiB" in text


@pytest.mark.parametrize(
    ("path", "memory", "why"),
    [("no/such/model", "64GiB", "does not exist"), (None, "8GiB", "no layout of 32 devices fits"), (None, "8", "unit")],
)
def test_what_cannot_be_planned_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], path: str | None, memory: str, why: str
) -> None:
    imported(tmp_path, path or model(tmp_path, "32B"), "--device-memory", memory)
    said = capsys.readouterr().out
    assert "no layout is proposed" in said and why in said
