"""``tools/train.py`` that writes down every collective on Python objects of the default group, step by step.

    python -m tests.launching.counted_collectives LOG ARGUMENTS

Every rank writes one line for each: its rank, the step, the function that asked for it, and the bytes that it gave.
"""

from __future__ import annotations

import inspect
import json
import pickle
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel import sending
from tools import train

# Parts of the paths of what moves objects, and asks for nothing itself.
TRANSPORT = ("/torch/", "/mega_rl/parallel/", "/contextlib.py", "/counted_collectives.py")


MOST_OBJECTS = 4  # collectives on objects in a step, whatever is in it


class Asked(NamedTuple):
    """What one function asked of the default group in one step."""

    count: int  # of the rank that took part most often
    num_bytes: int  # that a rank gave at most, in one of them


def watch(log: Path) -> None:
    """Write down what this process asks for from now on."""

    def counted(original: Callable[..., Any], given: Callable[[Mapping[str, Any]], Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)

        def asked(*arguments: Any, **keys: Any) -> Any:
            named = signature.bind(*arguments, **keys).arguments
            if named.get("group") in (None, dist.group.WORLD):
                size = len(pickle.dumps(given(named), protocol=5))
                line = json.dumps([dist.get_rank(), HEART.step, _caller(), size])
                with log.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
            return original(*arguments, **keys)

        return asked

    def sent(named: Mapping[str, Any]) -> Any:
        return named["object_list"][0] if dist.get_rank() == 0 else None

    dist.all_gather_object = counted(dist.all_gather_object, lambda named: named["obj"])
    dist.gather_object = counted(dist.gather_object, lambda named: named["obj"])
    dist.broadcast_object_list = counted(dist.broadcast_object_list, sent)
    sending._as_tensor = counted(sending._as_tensor, lambda named: named["value"])


def _caller() -> str:
    """The innermost function that is no transport."""
    frame = inspect.currentframe()
    while frame is not None and any(part in frame.f_code.co_filename for part in TRANSPORT):
        frame = frame.f_back
    assert frame is not None
    return f"{Path(frame.f_code.co_filename).stem}.{frame.f_code.co_name}"


def read(log: Path) -> dict[int, dict[str, Asked]]:
    """Step -> caller -> what it asked for."""
    counts: dict[tuple[int, str], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    sizes: dict[tuple[int, str], int] = defaultdict(int)
    for line in log.read_text(encoding="utf-8").splitlines():
        rank, step, caller, size = json.loads(line)
        counts[step, caller][rank] += 1
        sizes[step, caller] = max(sizes[step, caller], size)
    found: dict[int, dict[str, Asked]] = defaultdict(dict)
    for (step, caller), of_ranks in counts.items():
        found[step][caller] = Asked(max(of_ranks.values()), sizes[step, caller])
    return dict(found)


def total(step: Mapping[str, Asked]) -> int:
    return sum(asked.count for asked in step.values())


if __name__ == "__main__":
    log, *arguments = sys.argv[1:]
    watch(Path(log))
    train.main(arguments)
