"""The directory of an evaluation: cut and continued, torn, taken by another, of other settings."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from mega_rl.config.schema.sampling import RewardConfig
from mega_rl.errors import InputError
from mega_rl.evaluation.evaluate import EvaluationSettings, evaluate
from mega_rl.evaluation.grading import Grading, outcomes
from mega_rl.evaluation.records import PARTS, RESULTS, SETTINGS, Directory, RecordPart, read_results, read_settings
from mega_rl.evaluation.summary import Bootstrap, summarise
from mega_rl.parallel.layout import EngineLayout
from mega_rl.types import Prompt, Trajectory
from tests.pretended.answering import FakeEngine, FakeScorer

PROMPTS = [Prompt(i, (1, 2), f"{i}?", "é", f"source {i % 2}") for i in range(40)]
SETTINGS_HERE = {"weights": {"a": "1"}, "answers": {"n": 3, "stop": []}}
GRADING = Grading.of([RewardConfig("r.py:r")])


class Cut(BaseException):
    """The end of a process."""


class MortalEngine(FakeEngine):
    """Ends its process after so many answers; they come in another order each time."""

    def __init__(self, num_answers: int, chance: random.Random) -> None:
        super().__init__()
        self.num_answers, self.chance = num_answers, chance

    def step(self) -> list[Trajectory]:
        if self.num_answers == 0:
            raise Cut
        self.num_answers -= 1
        self.chance.shuffle(self._under_way)
        return super().step()


def advance(out: Path, engine: FakeEngine, rank: int = 0) -> None:
    """One process of an evaluation, to its end."""
    directory = Directory(out, SETTINGS_HERE)
    part: RecordPart | None = None
    try:
        done = directory.done()
        part = RecordPart(out, rank)
        settings = EvaluationSettings(EngineLayout(1, 1), n=3, temperature=1.0, max_tokens=9, seed=0)
        missing = [prompt for prompt in PROMPTS if prompt.index not in done]
        evaluate(engine, FakeScorer(), missing, settings, part.append)  # type: ignore[arg-type]
        directory.merge()
    finally:
        if part is not None:
            part.close()
        directory.release()


def figures(out: Path) -> dict[str, Any]:
    return summarise(outcomes(read_results(out), GRADING), [1, 2, 3], GRADING, Bootstrap(0, 50))


def test_killed_at_ten_random_points_and_continued_it_is_the_same(tmp_path: Path) -> None:
    advance(tmp_path / "whole", FakeEngine())
    whole = (tmp_path / "whole" / RESULTS).read_bytes()
    for seed in range(3):
        chance, out = random.Random(seed), tmp_path / f"cut {seed}"
        for cut in range(10):
            with pytest.raises(Cut):
                advance(out, MortalEngine(chance.randrange(4, 24), chance), rank=cut % 3)
            part = out / PARTS / f"rank_{cut % 3:05d}.jsonl"
            if part.stat().st_size and chance.random() < 0.7:  # the last line is torn, within a character or not
                last = part.read_bytes().splitlines(keepends=True)[-1]
                with part.open("r+b") as file:
                    file.truncate(part.stat().st_size - chance.randrange(1, len(last)))
            assert not (out / RESULTS).exists()
        advance(out, MortalEngine(10_000, chance))
        assert (out / RESULTS).read_bytes() == whole
        assert not (out / PARTS).exists() and figures(out) == figures(tmp_path / "whole")
    assert [row["problem"] for row in read_results(tmp_path / "whole")] == list(range(40))


def test_every_response_is_kept_whole(tmp_path: Path) -> None:
    advance(tmp_path, FakeEngine())
    row = json.loads((tmp_path / RESULTS).read_text(encoding="utf-8").splitlines()[0])
    assert (row["problem"], row["data_source"], row["ground_truth"], row["prompt"]) == (0, "source 0", "é", "0?")
    greedy, *sampled = row["responses"]
    assert greedy["kind"] == "greedy" and greedy["seed"] is None and greedy["token_ids"] == [5]
    assert [response["sample"] for response in sampled] == [0, 1, 2]
    assert len({response["seed"] for response in sampled}) == 3
    assert sampled[1]["score"] == 1.0 and sampled[1]["parts"] == {"r": 1.0} and sampled[1]["num_tokens"] == 2
    unknown = json.loads((tmp_path / RESULTS).read_text(encoding="utf-8").splitlines()[1])["responses"][0]
    assert unknown["score"] is None and unknown["unknown"] == {"r": "raised: raised ValueError: x"}


def test_a_line_that_is_no_record_ends_what_is_taken(tmp_path: Path) -> None:
    directory = Directory(tmp_path, SETTINGS_HERE)
    part = tmp_path / PARTS / "rank_00000.jsonl"
    part.write_bytes(b'{"problem": 3}\n\0\0\0\n{"problem": 4}\n')
    assert directory.done() == {3} and part.read_bytes() == b'{"problem": 3}\n'


def test_other_settings_are_refused(tmp_path: Path) -> None:
    Directory(tmp_path, SETTINGS_HERE).release()
    other = {"weights": {"a": "1"}, "answers": {"n": 4, "stop": []}}
    with pytest.raises(InputError, match=r"other settings: answers.n is 3 there and 4 here; choose another"):
        Directory(tmp_path, other)
    assert read_settings(tmp_path) == SETTINGS_HERE
    with pytest.raises(InputError, match="weights.b is None there and '2' here"):
        Directory(tmp_path, SETTINGS_HERE | {"weights": {"a": "1", "b": "2"}})


def test_a_directory_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(InputError, match=r"no evaluation \(it has 'thesis.tex'\)"):
        Directory(tmp_path, SETTINGS_HERE)
    assert [entry.name for entry in tmp_path.iterdir()] == ["thesis.tex"]
    assert not (tmp_path / SETTINGS).exists()


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    first = Directory(tmp_path, SETTINGS_HERE)
    with pytest.raises(InputError, match="in use by another evaluation"):
        Directory(tmp_path, SETTINGS_HERE)
    first.release()
    Directory(tmp_path, SETTINGS_HERE).release()


def test_an_unfinished_or_damaged_evaluation_is_not_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no evaluation"):
        read_settings(tmp_path)
    Directory(tmp_path, SETTINGS_HERE).release()
    with pytest.raises(InputError, match="has no results.jsonl: finish it"):
        list(read_results(tmp_path))
    (tmp_path / RESULTS).write_text('{"responses": []}\n{"problem"\n')
    with pytest.raises(InputError, match="line 2 is damaged"):
        list(read_results(tmp_path))
