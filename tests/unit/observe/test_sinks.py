"""The console line, the files that survive a kill and a resume, and the observer in front of them."""

from __future__ import annotations

import html
import io
import json
import math
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugin_util import markdown_to_safe_html
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from mega_rl.config.schema.sections import LoggingConfig
from mega_rl.errors import InputError
from mega_rl.observe.metrics.declared import SECTIONS
from mega_rl.observe.observer import Observer
from mega_rl.observe.sinks.console import ConsoleSink, before_after_table, format_line
from mega_rl.observe.sinks.sinks import JsonlSink, ShownSample, read_jsonl
from mega_rl.observe.sinks.tensorboard import TensorBoardSink, heading, markdown_table, tag
from mega_rl.observe.sinks.trackers import SwanlabSink, WandbSink

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
            "import os, signal; from pathlib import Path; from mega_rl.observe.sinks.sinks import JsonlSink\n"
            f"sink = JsonlSink(Path({str(tmp_path / 'm.jsonl')!r}), 0)\n"
            "sink.log(1, {'actor/loss': 0.5})\n"
            "os.kill(os.getpid(), signal.SIGKILL)"
        )
        repo = Path(__file__).resolve().parents[3]
        done = subprocess.run([sys.executable, "-c", code], cwd=repo, env={**os.environ, "PYTHONPATH": str(repo)})
        assert done.returncode == -signal.SIGKILL
        assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1, "metrics": {"actor/loss": 0.5}}]


HOSTILE = "![x](http://evil/x.png) <script>alert(1)</script> a|b\n```\n[y](javascript:z) http://evil/ &lt;"
SAMPLE = ShownSample(HOSTILE, "4", "4", 1.0, 2, "stop")


class TestTensorBoard:
    def test_a_repeated_step_is_shown_once(self, tmp_path):
        first = TensorBoardSink(tmp_path, 0)
        for step in (1, 2, 3):
            first.log(step, {"actor/loss": float(step)})
        first.text(3, "environment", "2+2=4")
        first.close()
        second = TensorBoardSink(tmp_path, 3)
        for step in (3, 4):
            second.log(step, {"actor/loss": -float(step)})
        second.close()
        seen = EventAccumulator(str(tmp_path)).Reload()
        values = [(event.step, event.value) for event in seen.Scalars("1 learning/actor/loss")]
        assert values == [(1, 1), (2, 2), (3, -3), (4, -4)]
        assert "environment/text_summary" in seen.Tags()["tensors"]

    def test_what_was_logged_before_a_step_survives_kill_9(self, tmp_path):
        code = (
            "import os, signal, sys; from pathlib import Path\n"
            "from mega_rl.observe.sinks.tensorboard import TensorBoardSink\n"
            "sys.setswitchinterval(1000)  # the writing thread gets its turn only where this one waits for it\n"
            f"sink = TensorBoardSink(Path({str(tmp_path)!r}), 0)\n"
            "for step in range(1, 5): sink.log(step, {'actor/loss': 0.5})\n"
            "sink.distribution(5, 'rewards', [1.0]); os.kill(os.getpid(), signal.SIGKILL)"
        )
        repo = Path(__file__).resolve().parents[3]
        subprocess.run([sys.executable, "-c", code], cwd=repo, env={**os.environ, "PYTHONPATH": str(repo)})
        seen = EventAccumulator(str(tmp_path)).Reload()
        assert [event.step for event in seen.Scalars("1 learning/actor/loss")] == [1, 2, 3, 4]

    def test_the_pictures_of_an_answer_stand_beside_it(self, tmp_path):
        made = [io.BytesIO(), io.BytesIO()]
        for number, file in enumerate(made):
            Image.new("RGB", (30 + 10 * number, 20 + 5 * number), "red").save(file, "JPEG")
        sink = TensorBoardSink(tmp_path, 0)
        sink.samples(1, "rollout", [SAMPLE, replace(SAMPLE, pictures=lambda: tuple(file.getvalue() for file in made))])
        sink.close()
        seen = EventAccumulator(str(tmp_path)).Reload()
        (event,) = seen.Images("samples/rollout/2")
        assert (event.width, event.height) == (70, 25) and seen.Tags()["images"] == ["samples/rollout/2"]
        assert Image.open(io.BytesIO(event.encoded_image_string)).getpixel((69, 0))[0] > 250
        told = seen.SummaryMetadata("samples/rollout/2").summary_description
        assert "response" in told and "<script" not in told and "http:" not in told

    def test_the_page_has_what_was_logged_in_reading_order(self, tmp_path):
        sink = TensorBoardSink(tmp_path, 0, {"optimizer": {"lr": 1e-6, "schedule": "cosine"}, "rewards": []})
        sink.distribution(1, "response_lengths", [3.0, 3.0, 9.0])
        sink.samples(1, "rollout", [SAMPLE])
        sink.log(1, STEP)
        sink.log(2, STEP | {"val-core/gsm8k/acc/mean@4": 0.5})
        sink.close()
        seen = EventAccumulator(str(tmp_path)).Reload()
        assert set(seen.Tags()["scalars"]) == {tag(name) for name in [*STEP, "val-core/gsm8k/acc/mean@4"]}
        assert seen.Tags()["histograms"] == ["8 rollout lengths/response_lengths"]
        assert {"configuration/text_summary", "samples/rollout/text_summary"} <= set(seen.Tags()["tensors"])
        newest = seen.Tensors("custom_scalars__config__")[-1].tensor_proto.string_val[0]
        page = Layout.FromString(newest)
        keys = ("learning", "validation", "health", "agreement", "speed", "aqn")
        assert [category.title for category in page.category] == [heading(s) for s in SECTIONS if s.key in keys]
        patterns = [p for category in page.category for chart in category.chart for p in chart.multiline.tag]
        for name in (*STEP, "val-core/gsm8k/acc/mean@4"):
            assert [bool(re.match(pattern, tag(name))) for pattern in patterns].count(True) == 1
        data = seen.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
        values = HParamsPluginData.FromString(data).session_start_info.hparams
        assert (values["optimizer.lr"].number_value, values["rewards"].string_value) == (1e-6, "[]")

    def test_nothing_in_a_table_is_more_than_text(self):
        shown = markdown_to_safe_html(markdown_table(("prompt",), [(HOSTILE,)]))
        assert [mark for mark in ("<img", "<a ", "<script", "<code", "<pre") if mark in shown] == []
        (cell,) = re.findall("<td>(.*)</td>", shown)
        assert html.unescape(cell.replace("<br>", "\n")) == HOSTILE

    def test_a_long_text_keeps_its_ends(self):
        (cell,) = re.findall(r"\| (a.*b) \|", markdown_table(("x",), [("a" * 5000 + "b",)]))
        assert len(cell) < 4100 and "(1001 characters left out)" in html.unescape(cell)


def pretended_wandb(calls: list) -> SimpleNamespace:
    """Not wandb, which the locks do not have: what it is asked for, written down."""
    run = SimpleNamespace(id="abc", log=lambda *a, **k: calls.append((a, k)), finish=lambda: calls.append("end"))
    return SimpleNamespace(
        init=lambda **kwargs: calls.append(kwargs) or run,
        Table=lambda columns, data: ("table", columns, data),
        Histogram=lambda values: ("histogram", values),
    )


class TestWandb:
    def test_missing_package_is_one_sentence(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "wandb", None)
        with pytest.raises(InputError, match=r"logging.wandb_project is 'p', but wandb is not installed: pip install"):
            WandbSink("p", tmp_path, 0)

    def test_a_resumed_run_keeps_its_id(self, tmp_path, monkeypatch):
        calls = []
        monkeypatch.setitem(sys.modules, "wandb", pretended_wandb(calls))
        for first_step in (0, 7, 0):
            WandbSink("p", tmp_path, first_step).close()
        assert [call["id"] for call in calls if call != "end"] == [None, "abc", None]

    def test_names_stand_behind_their_sections(self, tmp_path, monkeypatch):
        calls = []
        monkeypatch.setitem(sys.modules, "wandb", pretended_wandb(calls))
        sink = WandbSink("p", tmp_path, 7, {"optimizer": {"lr": 1e-6}})
        sink.samples(7, "rollout", [SAMPLE])
        sink.distribution(7, "rewards", [0.0, 1.0])
        sink.log(7, {"actor/kl": 1.0})
        (init, (samples, _), (distribution, _), logged) = calls
        assert init["config"] == {"optimizer": {"lr": 1e-6}} and logged == (({"health/actor/kl": 1.0},), {"step": 7})
        assert samples[0]["samples/rollout"][2] == [[HOSTILE, "4", "4", "1", "2", "stop"]]
        assert distribution == ({"learning/rewards": ("histogram", [0.0, 1.0])},)


def pretended_swanlab(calls: list) -> SimpleNamespace:
    """Not SwanLab, which the locks do not have: what it is asked for, written down."""
    return SimpleNamespace(
        init=lambda **kwargs: calls.append(kwargs),
        log=lambda values, step: calls.append((values, step)),
        Text=lambda text: f"text: {text}",
        finish=lambda: calls.append("end"),
    )


class TestSwanlab:
    def test_missing_package_is_one_sentence(self, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "swanlab", None)
        with pytest.raises(InputError, match=r"logging.swanlab_project is 'p', but swanlab is not installed: pip"):
            SwanlabSink("p", tmp_path, 0)

    def test_a_resumed_run_keeps_its_id(self, tmp_path, monkeypatch):
        calls = []
        monkeypatch.setitem(sys.modules, "swanlab", pretended_swanlab(calls))
        for first_step in (0, 7, 0):
            SwanlabSink("p", tmp_path, first_step).close()
        ids = [call["id"] for call in calls if call != "end"]
        assert ids[0] == ids[1] != ids[2] and {len(own) for own in ids} == {21}

    def test_names_stand_behind_their_sections(self, tmp_path, monkeypatch):
        calls = []
        monkeypatch.setitem(sys.modules, "swanlab", pretended_swanlab(calls))
        sink = SwanlabSink("p", tmp_path, 0)
        sink.log(7, {"actor/kl": 1.0, "actor/loss": math.nan})
        sink.samples(7, "rollout", [SAMPLE])
        sink.distribution(7, "rewards", [0.0])
        assert calls[1] == ({"health/actor/kl": 1.0}, 7) and len(calls) == 3
        assert calls[2][0]["samples/rollout"][0].startswith(f"text: prompt: {HOSTILE}")


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
        assert set(seen.Tags()["scalars"]) == {tag(name) for name in STEP}

    def test_an_undeclared_metric_raises_and_writes_nothing(self, tmp_path):
        with self.create(tmp_path) as observer, pytest.raises(KeyError, match="actor/los"):
            observer.log(1, {"actor/loss": 1.0, "actor/los": 1.0})
        assert read_jsonl(tmp_path / "metrics.jsonl") == []

    def test_other_ranks_do_nothing(self, tmp_path, capsys):
        with self.create(tmp_path / "run", is_main=False) as observer:
            observer.log(1, STEP)
            observer.text(1, "a", "b")
            observer.samples(1, "rollout", [SAMPLE])
            observer.distribution(1, "rewards", [1.0])
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
