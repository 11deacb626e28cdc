"""Which engines join a fleet and which leave it, when somebody asks for more or fewer while a run goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mega_rl.errors import InputError
from mega_rl.fleet.engines import Condition, Engine


def in_use(engines: Mapping[int, Engine]) -> list[int]:
    """The engines that have not been taken out of use."""
    return [number for number, engine in engines.items() if engine.condition is not Condition.GONE]


def joining(engines: Mapping[int, Engine], promised: Sequence[int], count: int) -> list[int]:
    """Numbers that no engine of the run has had: what is said of one is said of one only.

    Args:
        promised: numbers that have been given away already.
    """
    first = max([-1, *engines, *promised]) + 1
    return list(range(first, first + count))


def leaving(engines: Mapping[int, Engine], named: Sequence[int], count: int) -> list[int]:
    """The engines to take out of use: those that are named, or else ``count`` of those that lose least.

    An engine that is not ready yet loses nothing, one with responses in hand loses what it has of them.

    Raises:
        InputError: there is no such engine, or none would be left.
    """
    found = in_use(engines)
    if unknown := sorted(set(named) - set(found)):
        raise InputError(f"there is no engine {unknown[0]} in use: name some of {', '.join(map(str, found)) or 'none'}")
    if not named:
        # Weights of a validation have a negative number too; -1 is none.
        cheapest = sorted(found, key=lambda n: (engines[n].version != -1, engines[n].load, -n))
        named = cheapest[:count]
    chosen = sorted(set(named))
    if len(chosen) >= len(found):
        raise InputError(
            f"{len(chosen)} of {len(found)} engines cannot be removed, since at least one must go on: remove fewer, "
            "or end the run"
        )
    return chosen
