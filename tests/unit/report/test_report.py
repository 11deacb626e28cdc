"""The report: everything of a run is on the page, nothing on it is believed, and what is damaged is said."""

from __future__ import annotations

import html
import json
import math
import random
import re
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st

from mega_rl.errors import InputError
from mega_rl.observe.metrics.from_files import FROM_FILES
from mega_rl.report.charts import MAX_POINTS, Curve, chart, short, thinned, ticks
from mega_rl.report.page import page
from mega_rl.report.read import read_run
from mega_rl.report.samples import card, pieces, probability_class, spread
from tests.recorded.observed_run import HOSTILE, SECTIONS_LOGGED, bytes_tokenizer, leave_run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return leave_run(tmp_path_factory.mktemp("observed") / "grpo")


TOKENIZER = bytes_tokenizer()


def decoder():
    return lambda ids: TOKENIZER.decode(ids, skip_special_tokens=False)


class TestPage:
    def test_every_part_of_a_run_is_there(self, run_dir):
        text = page([read_run(run_dir, "grpo")], {"grpo": decoder()}, 8)
        headings = re.findall(r'<section id="(\w+)">', text)
        assert headings == ["overview", *SECTIONS_LOGGED, "samples", "configuration", "warnings", "environment"]
        assert text.count("<article>") == 4 and {f'class="p{number}"' for number in range(5)} <= set(
            re.findall(r'class="p\d"', text)
        )
        assert "peak host memory of each phase" in text and "transfers of the weight syncs" in text
        assert "<th>optimizer.lr</th><td>0.2</td>" in text and "engine: slow, said" in text

    def test_what_a_model_wrote_is_only_text(self, run_dir):
        name = "<b>run</b>"
        text = page([read_run(run_dir, name)], {name: decoder()}, 8)
        (script,) = re.findall(r"<script>.*?</script>", text, re.DOTALL)
        rest = text.replace(script, "")
        assert "taken" in rest and not re.search(r"<script|<img|<b>run|</pre><s", rest)
        plain = html.unescape(re.sub(r"</?span[^>]*>", "", rest))
        assert plain.count(HOSTILE) > 8, "cut into tokens, it is whole again without the marks around them"
        assert "default-src 'none'" in text and not re.search(r"(src|href)=.?https?:", text)

    def test_pictures_stand_above_the_prompts_that_have_them(self, run_dir):
        run = read_run(run_dir, "grpo")
        assert [row["pictures"] for row in run.rollouts] == [[]] * 4
        row, asked = run.rollouts[0] | {"index": 7, "pictures": ["d0", "d1", "d2"]}, []
        shown = card(row, None, lambda *found: asked.append(found) or [b"jpeg"])
        assert asked == [(7, ["d0", "d1", "d2"])]
        assert '<img src="data:image/jpeg;base64,anBlZw==" alt="picture 1">' in shown and "2 more not shown" in shown
        assert shown.index("<img") < shown.index('class="prompt"') and "<img" not in card(run.rollouts[0], None)
        assert "3 more not shown" in card(row, None), "the data is not here"
        told = card(row, None, lambda *_: [b"jpeg", "<b>"])
        assert "picture 2 is not shown: &lt;b&gt;</i>" in told and "1 more not shown" in told

    def test_several_runs_lie_over_each_other_and_differences_come_first(self, run_dir, tmp_path):
        other = leave_run(tmp_path / "slow", num_steps=5, rate=0.1)
        text = page([read_run(run_dir, "fast"), read_run(other, "slow")], {}, 2)
        figure = re.search(r"<figure[^>]*><figcaption>reward/mean.*?</figure>", text, re.DOTALL)
        assert figure and figure[0].count('class="curve') == 2 and "fast" in figure[0] and "slow" in figure[0]
        differing = text[text.index("keys differ") : text.index("<summary>all")]
        assert "optimizer.lr" in differing and "data.seed" not in differing
        assert "no colours, since no tokenizer of the run was found" in text

    def test_metrics_that_nothing_declares_and_no_number_are_left_out(self, run_dir, tmp_path):
        values = {"no/such": 1.0, "actor/kl": "1", "reward/mean": True, "reward/max": 10**400, "aqn/stage": None}
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "metrics": values}) + "\n")
        text = page([read_run(tmp_path, "x")], {}, 2)
        assert "no/such" not in text and text.count("no finite value") == 3  # kl, the three rewards, stage

    @pytest.mark.parametrize("stage", FROM_FILES)
    def test_the_overview_has_the_losses_of_every_stage_from_files(self, tmp_path, stage):
        rows = [{"step": i, "metrics": {f"{stage}loss": 3 / i, f"{stage}val_loss": 4 / i}} for i in (1, 2)]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        text = page([read_run(tmp_path, "x")], {}, 2)
        overview = text[: text.index("<section id", text.index('<section id="overview"') + 1)]
        assert f"{stage}loss 3 → 1.5" in overview and f"{stage}val_loss 4 → 2" in overview


class TestDamage:
    def test_each_is_a_sentence_and_the_rest_is_shown(self, tmp_path):
        run_dir = leave_run(tmp_path / "run")
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write('garbage\n{"step": "x", "metrics": {}}\n' + "[" * 100_000 + '\n{"step": 13, "metr')
        (run_dir / "config.yaml").write_bytes(b"\xff\x00")
        (run_dir / "run.log").unlink()
        (run_dir / "environment.txt").write_bytes(b"\xff bytes")
        with (run_dir / "rollouts" / "step_000012.jsonl").open("a") as file:
            file.write('{"text": 3}\n')
            row = json.loads((run_dir / "rollouts" / "step_000012.jsonl").read_text().split("\n")[0])
            file.write(json.dumps(row | {"loss_mask": [1]}) + "\n")
        run = read_run(run_dir, "run")
        text = html.unescape(page([run], {"run": decoder()}, 2))
        for part in (
            "metrics.jsonl is damaged in 3 of its lines, which are left out: 13, 14, 15",
            "config.yaml cannot be read (",
            "there is no run.log, so its warnings are not shown",
            "rollouts/step_000012.jsonl is damaged in 2 of its lines",
        ):
            assert part in text
        assert len(run.series["reward/mean"]) == 12 and len(run.rollouts) == 4

    @pytest.mark.parametrize(("metric", "is_said"), [("sft/loss", False), ("response_length/mean", True)])
    def test_only_a_run_that_samples_should_have_samples(self, tmp_path, metric, is_said):
        (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "metrics": {metric: 1.0}}) + "\n")
        said = read_run(tmp_path, "x").problems
        assert any("there is no rollouts, so there are no samples" in sentence for sentence in said) == is_said

    @pytest.mark.parametrize("place", ["nowhere", "."])
    def test_no_run_is_one_sentence(self, tmp_path, place):
        with pytest.raises(InputError, match="name the output directory of a run"):
            read_run(tmp_path / place, "x")

    @settings(max_examples=30)
    @given(content=st.binary(max_size=200), place=st.sampled_from(["metrics.jsonl", "config.yaml", "run.log"]))
    def test_whatever_a_file_holds_there_is_a_page(self, tmp_path_factory, content, place):
        directory = tmp_path_factory.mktemp("fuzz")
        (directory / place).write_bytes(content)
        assert "</html>" in page([read_run(directory, "x")], {}, 2)


class TestCharts:
    def test_a_long_curve_keeps_its_spikes_and_ends_small(self):
        generator = random.Random(0)
        points = [(step, generator.random()) for step in range(100_000)]
        points[77_777] = (77_777, 50.0)
        few = thinned(points)
        assert (few[0], few[-1]) == (points[0], points[-1])
        assert len(few) <= MAX_POINTS and (77_777, 50.0) in few and few == sorted(few)
        assert len(chart("t", "s", "", [Curve("a", points)])) < 20_000

    def test_what_is_not_finite_is_a_gap_with_a_mark(self):
        drawn = chart("t", "s", "", [Curve("a", [(1, 1.0), (2, None), (3, 2.0), (4, 3.0)])])
        (path,) = re.findall(r'<path d="([^"]+)"/>', drawn)
        assert path.count("M") == 2 and path.count("L") == 1 and "step 2: not finite" in drawn

    @given(st.lists(st.floats(-1e299, 1e299) | st.none(), min_size=1, max_size=5))
    def test_any_values_are_drawn(self, values):
        assert "</figure>" in chart("t", "", "", [Curve("a", list(enumerate(values)))])

    @given(st.floats(-1e9, 1e9, allow_subnormal=False), st.floats(1e-6, 1e9))
    def test_ticks_are_few_and_inside(self, low, size):
        found = ticks(low, low + size, 5)
        slack = 1e-6 * size + 1e-15 * abs(low)  # of rounding
        assert len(found) <= 12 and all(low - slack <= tick <= low + size + slack for tick in found)

    @pytest.mark.parametrize(
        ("value", "shown"),
        [(0, "0"), (0.00015, "1.5e-4"), (3e-7, "3e-7"), (0.25, "0.25"), (1234.0, "1234"), (47_600_000, "47.6M")],
    )
    def test_numbers_are_short(self, value, shown):
        assert short(value) == shown


class TestSamples:
    def test_low_rewards_and_high_ones_alike(self):
        rows = [{"reward": 1.0, "n": n} for n in range(50)] + [{"reward": 0.0, "n": 50}, {"reward": None, "n": 51}]
        assert [row["reward"] for row in spread(rows, 4)] == [None, 0.0, 1.0, 1.0]
        assert [row["reward"] for row in spread([{"reward": r / 9} for r in range(10)], 4)] == [0, 3 / 9, 6 / 9, 1]
        assert spread(rows, 0) == [] and len(spread(rows, 1)) == 1 and len(spread(rows, 99)) == 52

    @given(st.text(alphabet="aé數😀 \n<", max_size=8))
    def test_pieces_are_the_text_and_no_character_is_torn(self, text):
        ids = TOKENIZER.encode(text).ids
        found = pieces(ids, decoder())
        assert "".join(piece for piece, _ in found) == text and sum(length for _, length in found) == len(ids)
        assert [piece for piece, _ in found] == list(text)

    def test_classes_of_probability(self):
        found = [probability_class(math.log(p)) for p in (0.001, 0.05, 0.3, 0.7, 0.95, 1.0)]
        assert found == [0, 1, 2, 3, 4, 4] and probability_class(1e-7) == 4
