"""Which rewards score a row: those that name its data source in ``only``, and those that name none."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from mega_rl.config.schema.sampling import RewardConfig


def claims(only: Iterable[str], source: str) -> bool:
    """Whether a reward with this ``only``, a list of shell patterns, scores the rows of a data source."""
    patterns = list(only)
    return not patterns or any(fnmatchcase(source, pattern) for pattern in patterns)


def rewards_of(rewards: Iterable[RewardConfig], source: str) -> list[RewardConfig]:
    """The rewards that score the rows of a data source, in their order."""
    return [reward for reward in rewards if claims(reward.only, source)]


def repeated(names: Sequence[str], rewards: Sequence[RewardConfig]) -> str | None:
    """The first name that stands twice, where not every entry of it names its data sources; None: there is none.

    Args:
        names: of the rewards, in their order.
    """
    bare = {name for name, reward in zip(names, rewards, strict=True) if not reward.only}
    return next((name for place, name in enumerate(names) if name in names[:place] and name in bare), None)
