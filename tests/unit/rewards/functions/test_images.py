"""Rewards that see the pictures of prompts: they are sent references, and read what the run had."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mega_rl.config.schema.sampling import RewardConfig, RewardWorkersConfig
from mega_rl.rewards.functions.images import read
from mega_rl.rewards.functions.registry import bind
from mega_rl.rewards.pool.answers import read_kinds
from mega_rl.rewards.pool.dispatch import PoolError
from mega_rl.rewards.pool.process import WorkerFailure
from mega_rl.rewards.pool.worker import RAISED
from mega_rl.rewards.scorer import Scorer, WeightedReward, start_workers, weighted
from mega_rl.types import Prompt, PromptImage, Trajectory

REWARDS = """
def sizes(solution_str, images): return sum(len(image) * 100**place for place, image in enumerate(images))
def verl(data_source, solution_str, ground_truth, extra_info, images): return len(images)
def trl(completions, images): return [float(len(pictures)) for pictures in images]
def blind(solution_str): return 1.0
"""


@dataclass(frozen=True)
class Encoded:
    where: str
    source: bytes | Path

    @property
    def digest(self) -> str:
        content = b"file" if isinstance(self.source, Path) else self.source
        return hashlib.sha256(content).hexdigest()


def seeing(*keys: str) -> Trajectory:
    images = tuple(PromptImage(key, place, 1) for place, key in enumerate(keys))
    prompt = Prompt(7, (5,) * max(1, len(keys)), "?", "t", "src", images=images)
    return Trajectory.single_turn(prompt, 0, (1,), (0.0,), "abc", "stop", 0)


@pytest.fixture
def pictures(tmp_path: Path) -> dict[str, Encoded]:
    file = tmp_path / "a.png"
    file.write_bytes(b"file")
    return {
        "a": Encoded("rows.jsonl line 3, picture 1", file),
        "b": Encoded("rows.parquet row 4, picture 1", b"seven!!"),
    }


def test_a_reward_reads_the_pictures_that_the_run_had(pictures: dict[str, Encoded], tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    rewards = [RewardConfig(f"{file}:{name}") for name in ("sizes", "verl", "trl", "blind")]
    pool = start_workers(rewards, RewardWorkersConfig(num_workers=1))
    assert pool.takes_images
    scorer = Scorer(weighted(rewards), pool, pictures=pictures)
    both, none = scorer.score([seeing("a", "b"), seeing()])
    assert both.parts == {"sizes": 704.0, "verl": 2.0, "trl": 2.0, "blind": 1.0}
    assert none.parts == {"sizes": 0.0, "verl": 0.0, "trl": 0.0, "blind": 1.0}
    (tmp_path / "a.png").write_bytes(b"other")
    (changed,) = scorer.score([seeing("a")])
    assert changed.unknown["sizes"].cause == RAISED and changed.parts == {"blind": 1.0}
    assert "rows.jsonl line 3, picture 1 has changed since the run began" in changed.unknown["sizes"].detail
    scorer.close()


@pytest.mark.parametrize("takes_images", [True, False])
def test_references_go_out_only_where_a_reward_takes_them(pictures: dict[str, Encoded], takes_images: bool) -> None:
    sent: list[Any] = []

    def submit(samples: list[bytes], rewards: Sequence[int]) -> Future[list[list[float]]]:
        sent.extend(map(pickle.loads, samples))
        result: Future[list[list[float]]] = Future()
        result.set_result([[1.0] * len(samples)])
        return result

    pool: Any = SimpleNamespace(submit=submit, takes_images=takes_images)
    Scorer([WeightedReward("r", 1.0)], pool, pictures=pictures).score([seeing("a"), seeing()])
    assert len(sent[1]) == 5
    expected = [("rows.jsonl line 3, picture 1", pictures["a"].digest, str(pictures["a"].source))]
    assert sent[0][5:] == ((expected,) if takes_images else ())


def test_samples_under_way_share_the_file_of_a_picture(pictures: dict[str, Encoded]) -> None:
    """Their messages hold no bytes of pictures; when they are answered, nothing is left."""
    under_way: list[tuple[list[bytes], Future[list[list[float]]]]] = []

    def submit(samples: list[bytes], rewards: Sequence[int]) -> Future[list[list[float]]]:
        under_way.append((samples, Future()))
        return under_way[-1][1]

    pool: Any = SimpleNamespace(submit=submit, takes_images=True, close=lambda: None)
    scorer = Scorer([WeightedReward("r", 1.0)], pool, pictures=pictures)
    started = [scorer.start(seeing("b", "b")) for _ in range(2)]
    assert not any(b"seven!!" in sample for samples, _ in under_way for sample in samples)
    references = [one for samples, _ in under_way for one in pickle.loads(samples[0])[5]]
    (path,) = {Path(reference[2]) for reference in references}
    assert len(references) == 4 and read(references) == [b"seven!!"] * 4
    under_way[0][1].set_result([[1.0]])
    assert path.exists() and started[0].result().value == 1.0
    under_way[1][1].set_exception(PoolError("over"))
    assert not path.exists() and started[1].exception() is not None
    scorer.start(seeing("b"))
    assert path.exists(), "once more, when it is under way again"
    scorer.close()
    assert not path.parent.exists()


def test_a_worker_says_whether_it_takes_pictures(tmp_path: Path) -> None:
    assert read_kinds({"ready": ["batch"], "images": True}, 1) == ["batch"]
    for message in ({"ready": ["batch"], "images": 1}, {"images": True}, {"ready": ["batch"], "pictures": True}):
        with pytest.raises(WorkerFailure):
            read_kinds(message, 1)
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    assert [bind(f"{file}:{name}", {}).takes_images for name in ("sizes", "blind")] == [True, False]
    with pytest.raises(ValueError, match="the option images of .* is an argument of every reward"):
        bind(f"{file}:sizes", {"images": []})
