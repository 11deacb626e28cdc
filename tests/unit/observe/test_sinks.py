"""The console line, the files that survive a kill and a resume, and the observer in front of them."""

from __future__ import annotations

import io
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from mega_rl.config.schema import LoggingConfig
from mega_rl.errors import InputError
from mega_rl.observe import Observer, before_after_table, read_jsonl
from mega_rl.observe.console import ConsoleSink, format_line
from mega_rl.observe.sinks import JsonlSink, TensorBoardSink, WandbSink

STEP = {
    "time/step_s": 1.43,
    "reward/mean": 0.431,
    "actor/loss": -0.012,
    "actor/kl": 0.0003,
    "actor/entropy": 1.92,
    "actor/grad_norm": 0.81,
    "rollout/logprob_diff_mean": 3e-7,
    "aqn/sigma": 0.0158,
    "throughput/tokens_per_s": 812.3,
    "actor/lr": 1e-6,
}
LINE = (
    "step  12/60 | reward 0.431 | loss -0.012 | kl 0.0003 | entropy 1.92 | grad 0.81 | diff 3e-07 | sigma 0.0158"
    " | 812 tok/s | 1.4 s"
)


class TestConsole:
    def test_the_line_of_a_step(self):
        assert format_line(12, 60, STEP) == LINE

    def test_validation_names_its_data(self):
        line = format_line(0, 60, {"val-core/gsm8k/acc/mean@4": 0.25, "val-core/gsm8k/greedy/acc": 0.5})
        assert line == "step   0/60 | gsm8k greedy 0.500 | gsm8k mean@4 0.250"

    def test_what_is_not_finite_is_always_shown(self):
        line = format_line(1, 9, {"actor/loss": math.nan, "actor/pg_loss": math.inf, "actor/ppo_kl": 0.0})
        assert line == "step  1/9 | loss +nan | NOT FINITE: actor/pg_loss inf"

    def test_no_line_without_anything_to_show(self):
        assert format_line(1, 9, {"actor/lr": 1e-6}) is None

    @pytest.mark.parametrize("progress", [True, False])
    def test_without_a_terminal_there_are_only_plain_whole_lines(self, progress):
        out = io.StringIO()
        sink = ConsoleSink(60, progress, console=Console(file=out, width=40))
        sink.log(12, STEP)
        sink.text(12, "val", "a long completion")
        sink.close()
        sink.message("[bold]7[/bold] :smile:")
        assert out.getvalue() == f"{LINE}\n[bold]7[/bold] :smile:\n"

    @pytest.mark.parametrize(("progress", "bar"), [(True, True), (False, False)])
    def test_a_bar_on_a_terminal_unless_switched_off(self, progress, bar):
        out = io.StringIO()
        console = Console(file=out, force_terminal=True, width=200, color_system=None)
        sink = ConsoleSink(60, progress, first_step=11, console=console)
        sink.log(12, STEP)
        sink.close()
        sink.close()
        assert LINE in out.getvalue()
        assert ("training" in out.getvalue()) == bar
        assert ("12/60 0:" in out.getvalue()) == bar

    def test_the_table(self):
        out = io.StringIO()
        before_after_table("held-out [x]", [("greedy", 0.25, 0.9375), ("len", 8.0, 5.0)], Console(file=out, width=80))
        text = out.getvalue()
        assert "held-out [x]" in text
        assert [part for part in ("0.250", "0.938", "+0.688", "-3.000") if part not in text] == []


class TestJsonl:
    def rows(self, path: Path) -> list[dict]:
        return [json.loads(line) for line in path.read_text().splitlines()]

    def test_rows_are_there_at_once_and_nonfinite_values_are_named(self, tmp_path):
        sink = JsonlSink(tmp_path / "m.jsonl", 0)
        sink.log(1, {"actor/loss": -0.5, "actor/kl": math.nan, "actor/ratio_max": math.inf})
        metrics = {"actor/loss": -0.5, "actor/kl": None, "actor/ratio_max": None}
        expected = [{"step": 1, "metrics": metrics, "nonfinite": ["actor/kl", "actor/ratio_max"]}]
        assert self.rows(tmp_path / "m.jsonl") == expected  # before close
        sink.log(2, {"actor/loss": 0.1})
        sink.close()
        assert self.rows(tmp_path / "m.jsonl")[1] == {"step": 2, "metrics": {"actor/loss": 0.1}}

    @pytest.mark.parametrize(("first_step", "kept"), [(0, []), (3, [1, 2]), (9, [1, 2, 3, 4])])
    def test_a_resumed_run_repeats_no_step(self, tmp_path, first_step, kept):
        path = tmp_path / "m.jsonl"
        first = JsonlSink(path, 0)
        for step in (1, 2, 3, 4):
            first.log(step, {"actor/loss": float(step)})
        first.close()
        with path.open("a") as file:
            file.write('{"step": 5, "metrics": {"actor/l')  # killed in the middle of a line
        second = JsonlSink(path, first_step)
        second.log(first_step, {"actor/loss": -1.0})
        second.close()
        assert [row["step"] for row in self.rows(path)] == [*kept, first_step]

    def test_damage_in_the_middle_is_an_error_and_the_file_stays(self, tmp_path):
        path = tmp_path / "m.jsonl"
        path.write_text('{"step": 1, "metrics": {}}\ngarbage\n{"step": 3, "metrics": {}}\n')
        before = path.read_bytes()
        with pytest.raises(InputError, match="damaged at line 2"):
            JsonlSink(path, 3)
        assert path.read_bytes() == before

    def test_rows_survive_kill_9(self, tmp_path):
        code = (
            "import os, signal; from pathlib import Path; from mega_rl.observe.sinks import JsonlSink\n"
            f"sink = JsonlSink(Path({str(tmp_path / 'm.jsonl')!r}), 0)\n"
            "sink.log(1, {'actor/loss': 0.5})\n"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        repo = Path(__file__).resolve().parents[3]
        done = subprocess.run([sys.executable, "-c", code], cwd=repo, env={**os.environ, "PYTHONPATH": str(repo)})
        assert done.returncode == -signal.SIGKILL
        assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1, "metrics": {"actor/loss": 0.5}}]


def test_tensorboard_shows_a_repeated_step_once(tmp_path):
    first = TensorBoardSink(tmp_path, 0)
    for step in (1, 2, 3):
        first.log(step, {"actor/loss": float(step)})
    first.text(3, "val/sample", "2+2=4")
    first.close()
    second = TensorBoardSink(tmp_path, 3)
    for step in (3, 4):
        second.log(step, {"actor/loss": -float(step)})
    second.close()
    seen = EventAccumulator(str(tmp_path)).Reload()
    assert [(event.step, event.value) for event in seen.Scalars("actor/loss")] == [(1, 1), (2, 2), (3, -3), (4, -4)]
    assert "val/sample/text_summary" in seen.Tags()["tensors"]


class TestWandb:
    def test_missing_package_is_one_sentence(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "wandb", None)
        with pytest.raises(InputError, match=r"logging.wandb_project is 'p', but wandb is not installed: pip install"):
            WandbSink("p", tmp_path, 0)

    def test_a_resumed_run_keeps_its_id(self, tmp_path, monkeypatch):
        calls = []
        run = SimpleNamespace(id="abc", log=lambda *a, **k: calls.append((a, k)), finish=lambda: calls.append("end"))
        init = []
        wandb = SimpleNamespace(init=lambda **kwargs: init.append(kwargs) or run)
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        for first_step in (0, 7, 0):
            WandbSink("p", tmp_path, first_step).close()
        assert [kwargs["id"] for kwargs in init] == [None, "abc", None]
        sink = WandbSink("p", tmp_path, 7)
        sink.log(7, {"actor/kl": 1.0})
        assert calls[-1] == (({"actor/kl": 1.0},), {"step": 7})


class TestObserver:
    def create(self, directory: Path, **changes) -> Observer:
        arguments = {"is_main": True, "resume_step": 0, "total_steps": 60} | changes
        return Observer.create(LoggingConfig(progress=False), directory, **arguments)

    def test_every_sink_gets_everything(self, tmp_path, capsys):
        with self.create(tmp_path / "run") as observer:
            observer.log(12, STEP)
            observer.message("saved")
        assert capsys.readouterr().out == f"{LINE}\nsaved\n"
        assert read_jsonl(tmp_path / "run" / "metrics.jsonl") == [{"step": 12, "metrics": STEP}]
        seen = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
        assert set(seen.Tags()["scalars"]) == set(STEP)

    def test_an_undeclared_metric_raises_and_writes_nothing(self, tmp_path):
        with self.create(tmp_path) as observer, pytest.raises(KeyError, match="actor/los"):
            observer.log(1, {"actor/loss": 1.0, "actor/los": 1.0})
        assert read_jsonl(tmp_path / "metrics.jsonl") == []

    def test_other_ranks_do_nothing(self, tmp_path, capsys):
        with self.create(tmp_path / "run", is_main=False) as observer:
            observer.log(1, STEP)
            observer.text(1, "a", "b")
            observer.message("c")
        assert capsys.readouterr().out == ""
        assert not (tmp_path / "run").exists()

    def test_sinks_can_be_switched_off(self, tmp_path):
        logging = LoggingConfig(progress=False, tensorboard=False, jsonl=False)
        with Observer.create(logging, tmp_path, is_main=True, resume_step=0, total_steps=3) as observer:
            observer.log(1, STEP)
        assert list(tmp_path.iterdir()) == []

    def test_all_sinks_are_closed_when_one_fails(self):
        closed = []

        def sink(name, error=None):
            def close():
                closed.append(name)
                if error:
                    raise error

            return SimpleNamespace(close=close)

        with pytest.raises(OSError, match="full"):
            Observer([sink("a"), sink("b", OSError("full")), sink("c")]).close()
        assert sorted(closed) == ["a", "b", "c"]
