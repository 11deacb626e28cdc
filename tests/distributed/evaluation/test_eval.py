"""``tools/eval.py`` with real engines: killed and continued, in two layouts, from an export and a checkpoint."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from mega_rl.models.shape import read_model_shape
from tests.launching.launch import ENGINE, REPO, Launched, ranks, run, torchrun
from tests.launching.training import TinyWorld
from tests.models import adapters

EVAL = REPO / "tools" / "eval.py"
KEYS = (
    *("--reward", "exact_match", "--samples", "3", "--k", "1", "3", "--resamples", "50"),
    *("data.max_prompt_length=8", "data.max_response_length=5", "rollout.kv_cache_bytes=16777216"),
    "rollout.vllm={max_num_seqs: 4}",  # so that there is a middle to be killed in
)
KILLED = """
import os, signal, sys
from mega_rl.evaluation.records import RecordPart
from tools import eval
append = RecordPart.append
def append_and_die(self, answered):
    append(self, answered)
    if self.num_problems == 3:
        os.kill(os.getpid(), signal.SIGKILL)
RecordPart.append = append_and_die
eval.main(sys.argv[1:])
"""


@pytest.fixture(scope="module")
def whole(sft_run: Path, tiny_world: TinyWorld, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Launched]:
    """The directory of an evaluation by two engines of the export of a run, and what was printed."""
    out = tmp_path_factory.mktemp("eval") / "whole"
    arguments = (str(sft_run), "--data", str(tiny_world.prompts), "--out", str(out), "--engines", "2", *KEYS)
    return out, torchrun(EVAL, *arguments, nproc=2).check()


@pytest.mark.slow
def test_killed_and_continued_from_the_checkpoint_by_one_engine_it_is_the_same(
    whole: tuple[Path, Launched], sft_run: Path, tiny_world: TinyWorld, tmp_path: Path
) -> None:
    """The newest checkpoint holds the weights of the export."""
    newest = max((sft_run / "checkpoints").iterdir())
    out = tmp_path / "cut"
    arguments = [str(newest), "--data", str(tiny_world.prompts), "--out", str(out), *KEYS]
    killed = run([sys.executable, "-c", KILLED, *arguments])
    assert killed.returncode == -signal.SIGKILL, killed.stdout
    continued = ranks(EVAL, *arguments, nproc=0, modules=ENGINE).check()
    assert "continuing: " in continued.stdout and "exporting" not in continued.stdout, continued.stdout
    for name in ("results.jsonl", "summary.json", "plot.png"):
        assert (out / name).read_bytes() == (whole[0] / name).read_bytes(), name
    assert sorted(path.name for path in out.iterdir() if not path.name.startswith(".")) == [
        "plot.png",
        "results.jsonl",
        "settings.json",
        "summary.json",
    ]


@pytest.mark.slow
def test_figures_are_those_of_the_answers(whole: tuple[Path, Launched]) -> None:
    out, launched = whole
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert [row["problem"] for row in rows] == list(range(60)) and "60 problems, " in launched.stdout
    greedy = [row["responses"][0] for row in rows]
    assert all(
        r["score"] == float(r["text"].strip() == row["ground_truth"]) for row, r in zip(rows, greedy, strict=True)
    )
    assert all(len(response["token_ids"]) == response["num_tokens"] for row in rows for response in row["responses"])
    summary = json.loads((out / "summary.json").read_text())
    (source,) = summary["sources"].values()
    assert source["metrics"]["greedy"]["value"] == pytest.approx(sum(r["score"] for r in greedy) / 60)
    assert {"pass@1", "pass@3", "maj@1", "maj@3"} <= source["metrics"].keys()


@pytest.mark.slow
def test_other_settings_in_the_same_directory_are_refused(
    whole: tuple[Path, Launched], sft_run: Path, tiny_world: TinyWorld
) -> None:
    out, _ = whole
    arguments = (sft_run, "--data", tiny_world.prompts, "--out", out, *KEYS, "--seed", 7)
    refused = ranks(EVAL, *arguments, nproc=0, modules=ENGINE)
    assert refused.returncode == 2 and "other settings: answers.seed is 0 there and 7 here" in refused.stdout


@pytest.mark.slow
def test_with_an_adapter_the_answers_are_those_of_the_merged_model(
    whole: tuple[Path, Launched], sft_run: Path, tiny_world: TinyWorld, tmp_path: Path
) -> None:
    model, merged = sft_run / "huggingface", tmp_path / "merged"
    adapter = adapters.save(tmp_path / "adapter", adapters.state(adapters.pairs(read_model_shape(model))), model)
    run([sys.executable, str(REPO / "tools" / "merge_lora.py"), str(model), str(adapter), "-o", str(merged)]).check()
    answers = []
    for name, given in (("one", (str(model), "--adapter", str(adapter))), ("two", (str(merged),))):
        out = tmp_path / name
        arguments = (
            *given,
            "--config",
            str(sft_run / "config.yaml"),
            "--data",
            str(tiny_world.prompts),
            "--out",
            str(out),
            *KEYS,
        )
        ranks(EVAL, *arguments, nproc=0, modules=ENGINE).check()
        answers.append((out / "results.jsonl").read_bytes())
        assert not (out / "model").exists()
    assert answers[0] == answers[1] != (whole[0] / "results.jsonl").read_bytes()
