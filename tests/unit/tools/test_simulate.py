"""tools/simulate.py: its table, its JSON, its pictures, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mega_rl.errors import InputError
from tests.launching.launch import REPO
from tests.unit.config.test_shipped import model_config
from tools.recipes import recipe

SPEEDS = ["--fixed-ms", "10", "--per-response-ms", "0.1", "--train-s", "20"]
BATCH = ["data.train_batch_size=8", "rollout.n=4", "rollout.tensor_parallel_size=2", "data.max_response_length=4000"]
GIVEN = [
    *recipe("grpo_gsm8k/qwen2.5_7b").options(),
    "--devices",
    "16",
    "--lengths",
    "lognormal:400:0.8",
    "--steps",
    "8",
    *BATCH,
]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("simulate_tool", REPO / "tools" / "simulate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()


def simulated(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert TOOL.main([*GIVEN, "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_table_has_every_run_and_a_recommendation(capsys: pytest.CaptureFixture[str]) -> None:
    assert TOOL.main([*GIVEN, *SPEEDS, "--trainer-devices", "8", "--eta", "1", "2"]) == 0
    out = capsys.readouterr().out
    assert all(label in out for label in ("synchronous", "pinned eta=1", "pinned eta=2", "in_flight eta=2"))
    assert out.startswith("8 x 4 responses a step, mean ") and "recommended: pinned, eta=" in out.splitlines()[-1]


def test_json_and_splits(capsys: pytest.CaptureFixture[str]) -> None:
    found = simulated(capsys, *SPEEDS, "--modes", "pinned", "--eta", "1")
    assert [(t["mode"], t["trainer_devices"], t["cluster"]["engines"]) for t in found["trials"]] == [
        ("synchronous", 16, 8),
        *(("pinned", trainer, (16 - trainer) // 2) for trainer in (4, 8, 12)),  # parallel.tensor is 4
    ]
    synchronous, *pinned = found["trials"]
    assert synchronous["cluster"]["train_s"] == 20.0 and [t["cluster"]["train_s"] for t in pinned] == [80, 40, 80 / 3]
    assert all(t["max_staleness"] <= t["eta"] and t["step_s"] > 0 for t in found["trials"])
    assert found["recommended"] in found["trials"]
    again = simulated(capsys, *SPEEDS, "--modes", "pinned", "--eta", "1")
    assert again == found
    kept = simulated(capsys, *SPEEDS, "--modes", "in_flight", "--trainer-devices", "8", "rollout.kv_on_update=keep")
    assert pinned[0]["cluster"]["prefill_tokens_per_s"] > 0
    assert not any("prefill_tokens_per_s" in trial["cluster"] for trial in kept["trials"]), "it takes no time"


def test_speeds_of_a_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model_config("Qwen2.5-7B-Instruct")))
    more = ["--device", "910b", f"model.path={tmp_path}", "--modes", "pinned", "--eta", "1", "--trainer-devices", "8"]
    more += ["trainer.max_tokens_per_microbatch=32768"]
    cluster = simulated(capsys, *more)["trials"][1]["cluster"]
    assert cluster["fixed_s"] == pytest.approx(7.6e9 / (0.6 * 1.6e12), rel=0.02)  # 15.2 GB over two devices
    assert cluster["train_s"] == 0 and cluster["train_token_s"] > 0
    measured = simulated(capsys, *more, "--fixed-ms", "9", "--train-s", "5")["trials"][1]["cluster"]
    assert measured["fixed_s"] == 0.009 and measured["train_s"] == 5.0 and measured["train_token_s"] == 0
    assert measured["per_response_s"] == cluster["per_response_s"]


def test_trace_and_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace, picture = tmp_path / "new" / "trace.json", tmp_path / "run.svg"
    files = ["--trace", str(trace), "--picture", str(picture), "--draw", "pinned:1"]
    simulated(capsys, *SPEEDS, "--eta", "1", "--trainer-devices", "8", *files)
    events = json.loads(trace.read_text())["traceEvents"]
    lanes = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert lanes == ["trainer", *(f"engine {number}" for number in range(4))]
    assert {event["name"] for event in events if event["ph"] == "X"} == {
        "training",
        "waiting",
        "sampling",
        "loading weights",
    }
    assert "<svg" in picture.read_text()[:1000]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--lengths", "lognormal:9"], "--lengths is 'lognormal:9': write constant:TOKENS or lognormal:MEDIAN:SIGMA"),
        (["--lengths", "constant:x"], "--lengths is 'constant:x': write"),
        (["--lengths", "lognormal:nan:1"], "--lengths is 'lognormal:nan:1': write"),
        (["--lengths", "no/such/run"], "no/such/run does not exist: name a run's directory"),
        (["--eta", "0"], "--eta 0: give whole numbers from 1 to 64"),
        (["--devices", "1"], "--devices is 1, but one engine takes rollout.tensor_parallel_size=2"),
        (["--trainer-devices", "15"], "--trainer-devices is 15 of 16: leave at least the 2 of one engine"),
        (["--fixed-ms", "0", "--per-response-ms", "0"], "are both 0"),
        (["--hours-between-deaths", "0"], "--hours-between-deaths is 0: give a number from 1e-06 to 1e+09"),
        (["--hours-between-deaths", "1e-9"], "--hours-between-deaths is 1e-09: give a number from"),
        (["--hours-between-deaths", "1e-6"], "die every 1e-06 hours do so more than 100 times each before a step"),
        (["--train-s", "0"], "--train-s is 0: give a number from"),
        (["--colocated-train-s", "0"], "--colocated-train-s is 0: give a number from"),
        (["--load-s", "1e308"], "--load-s is 1e+308: give 0, or a number from 1e-06 to 1e+09"),
        (["--per-response-ms", "1e308"], "--per-response-ms is 1e+308: give 0, or a number from"),
        (["--fixed-ms", "1e-320"], "--fixed-ms is 9.99989e-321: give 0, or a number from"),
        (["parallel.tensor=0"], "parallel.tensor is 0: set it to"),
        (["parallel.pipeline=-1"], "parallel.pipeline is -1: set it to"),
        (["parallel.context=0"], "parallel.context is 0: set it to"),
        (["rollout.vllm.max_num_seqs=true"], "rollout.vllm.max_num_seqs is True: set it to a whole number of at least"),
        (["rollout.n=0"], "rollout.n is 0: set it to"),
        (["rollout.vllm.max_num_seqs=-3"], "rollout.vllm.max_num_seqs is -3: set it to a whole number of at least 1"),
        (["--picture", "a.nothing"], "the timeline cannot be written"),
        (["--picture", "a.png", "--draw", "pinned:9"], "--draw is 'pinned:9': choose one of in_flight:1, pinned:1"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as error:
        TOOL.main([*GIVEN, *SPEEDS, "--eta", "1", "--steps", "2", *arguments])
    assert part in str(error.value) and "\n" not in str(error.value)


def test_without_speeds_it_says_which_are_missing() -> None:
    with pytest.raises(InputError, match="there are no speeds: give --device, or all of --fixed-ms"):
        TOOL.main([*GIVEN, "--fixed-ms", "3"])
