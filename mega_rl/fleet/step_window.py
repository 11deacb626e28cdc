"""What has been asked for, what has come, and what has been decided about it; nothing is lost, nothing counts twice.

A sample waits, is under way on one engine (by the number of its attempt), or has ended. A group of ended samples is
scored, and kept or dropped. A step whose groups are all decided is whole.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mega_rl.errors import InputError
from mega_rl.fleet.tickets import Key, Rules, held_out

STATE_VERSION = 1


@dataclass
class SampleGroup:
    """The samples of one ticket."""

    results: list[Any]  # by sample number
    num_missing: int
    prefixes: dict[int, Any] = field(default_factory=dict)  # of samples that an engine did not finish
    is_kept: bool | None = None  # None: not scored yet
    has_ended: set[int] = field(default_factory=set)


@dataclass
class Step:
    """The tickets of one step."""

    groups: dict[int, SampleGroup] = field(default_factory=dict)  # by ticket
    num_undecided: int = 0
    num_dropped: int = 0


@dataclass
class Attempt:
    """Samples of one group on one engine."""

    key: Key
    engine: int
    left: set[int]  # sample numbers that have not ended


class StepWindow:
    """Steps from the oldest that is not trained yet to the newest that may begin."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.trained = 0  # steps; also the newest version
        self.num_begun = 0  # steps
        self.num_refused = 0  # answers and scores that came twice, or after their attempt was given up
        self.num_waiting = self.num_under_way = 0  # samples
        self._steps: dict[int, Step] = {}
        self._attempts: dict[int, Attempt] = {}
        self._of_engine: dict[int, set[int]] = {}  # engine -> its attempts
        self._next_attempt = 0
        # Parts of groups, by the version that they are pinned to (unpinned ones: by 0), in the order of their tickets.
        self._waiting: dict[int, list[tuple[Key, tuple[int, ...]]]] = {}
        self._num_waiting: dict[int, int] = {}  # samples, by the same

    def begin_steps(self) -> None:
        """Begin every step that the newest version allows."""
        for step in range(self.num_begun, self.rules.num_steps(self.trained)):
            self._steps[step] = Step()
            for ticket in range(self.rules.num_groups):
                self._draw(Key(step, ticket), self.rules.parts())
            self.num_begun = step + 1

    def begin_validation(self, version: int, num_groups: int, group_size: int) -> None:
        """Have so many groups sampled with the weights of a version's validation."""
        number = held_out(version)
        assert number not in self._steps and num_groups and group_size, f"the validation of version {version}"
        self._steps[number] = Step()
        for ticket in range(num_groups):
            self._draw(Key(number, ticket), [tuple(range(group_size))])

    def end_validation(self, version: int) -> tuple[tuple[Key, tuple[Any, ...]], ...] | None:
        """Forget a validation and return its groups in the order of their tickets; None while it is not whole."""
        groups = self.batch(held_out(version))
        if groups is not None:
            del self._steps[held_out(version)]
        return groups

    @property
    def is_validating(self) -> bool:
        """Whether a validation has begun and not ended."""
        return any(step < 0 for step in self._steps)

    def _draw(self, key: Key, parts: Sequence[tuple[int, ...]]) -> None:
        step, size = self._steps[key.step], sum(map(len, parts))
        step.groups[key.ticket] = SampleGroup([None] * size, size)
        step.num_undecided += 1
        for part in parts:
            self._wait(key, part)

    def _wait(self, key: Key, samples: tuple[int, ...]) -> None:
        line = self._line(key.step)
        heapq.heappush(self._waiting.setdefault(line, []), (key, samples))
        self._num_waiting[line] = self._num_waiting.get(line, 0) + len(samples)
        self.num_waiting += len(samples)

    def _line(self, step: int) -> int:
        return self.rules.oldest_version(step) if self.rules.is_pinned_step(step) else 0

    def _line_of(self, version: int) -> int:
        """What an engine with this version may have."""
        return version if self.rules.is_pinned_step(version) else 0

    def waiting(self) -> list[tuple[int, int]]:
        """(version, samples) that wait to be issued, oldest first; of unpinned tickets all stand under version 0."""
        return sorted(self._num_waiting.items())

    def num_waiting_for(self, version: int) -> int:
        """Samples that wait for a version; of unpinned tickets all stand under version 0."""
        return self._num_waiting.get(version, 0)

    def head(self, version: int) -> tuple[Key, int] | None:
        """The first ticket that an engine with this version may take, and its number of samples."""
        parts = self._waiting.get(self._line_of(version))
        if not parts or self.rules.oldest_version(parts[0][0].step) > version:
            return None
        return parts[0][0], len(parts[0][1])

    def issue(self, engine: int, version: int) -> tuple[Key, tuple[int, ...], int, tuple[Any, ...]]:
        """Give the head of the line to an engine: its key, samples, number of the attempt, and prefixes of samples."""
        line = self._line_of(version)
        key, samples = heapq.heappop(self._waiting[line])
        self._num_waiting[line] -= len(samples)
        if not self._num_waiting[line]:
            del self._num_waiting[line], self._waiting[line]
        self.num_waiting -= len(samples)
        self.num_under_way += len(samples)
        attempt = self._next_attempt
        self._next_attempt += 1
        self._attempts[attempt] = Attempt(key, engine, set(samples))
        self._of_engine.setdefault(engine, set()).add(attempt)
        prefixes = self._steps[key.step].groups[key.ticket].prefixes
        return key, samples, attempt, tuple(prefixes.get(sample) for sample in samples)

    def step_of(self, attempt: int) -> int:
        """The step of samples that are under way."""
        return self._attempts[attempt].key.step

    def attempt(self, number: int, sample: int) -> Attempt | None:
        """The attempt, if it still waits for this sample; else what came is late or has come before."""
        found = self._attempts.get(number)
        if found is None or sample not in found.left:
            self.num_refused += 1
            return None
        return found

    def advance(self, attempt: Attempt, sample: int, prefix: Any) -> None:
        """Keep what there is of a response."""
        self._steps[attempt.key.step].groups[attempt.key.ticket].prefixes[sample] = prefix

    def end_sample(self, number: int, sample: int, result: Any) -> tuple[Any, ...] | None:
        """Take a response in; returns the results of its group if it was the last of them."""
        attempt = self._attempts[number]
        attempt.left.remove(sample)
        self.num_under_way -= 1
        if not attempt.left:
            del self._attempts[number]
            self._of_engine[attempt.engine].remove(number)
        group = self._steps[attempt.key.step].groups[attempt.key.ticket]
        group.results[sample] = result
        group.has_ended.add(sample)
        group.num_missing -= 1
        group.prefixes.pop(sample, None)
        return None if group.num_missing else tuple(group.results)

    def give_up(self, engine: int) -> int:
        """The engine is gone: all that it had under way waits again. Returns the number of samples."""
        number = 0
        for attempt in sorted(self._of_engine.pop(engine, ())):
            found = self._attempts.pop(attempt)
            self._wait(found.key, tuple(sorted(found.left)))
            number += len(found.left)
        self.num_under_way -= number
        return number

    def decide(self, key: Key, is_kept: bool) -> bool:
        """Take a group's scores in, and draw a ticket for it if it is dropped; False if that was decided already."""
        step = self._steps.get(key.step)
        group = step.groups.get(key.ticket) if step else None
        if step is None or group is None or group.num_missing or group.is_kept is not None:
            self.num_refused += 1
            return False
        group.is_kept = is_kept
        step.num_undecided -= 1
        if not is_kept:
            step.num_dropped += 1
            ticket = self.rules.replacement(step.num_dropped)
            if ticket is not None:
                self._draw(Key(key.step, ticket), self.rules.parts())
        return True

    def batch(self, step: int) -> tuple[tuple[Key, tuple[Any, ...]], ...] | None:
        """The kept groups of a step in the order of their tickets, or None while it is not whole."""
        found = self._steps.get(step)
        if found is None or found.num_undecided:
            return None
        groups = sorted(found.groups.items())
        return tuple((Key(step, ticket), tuple(group.results)) for ticket, group in groups if group.is_kept)

    def train(self, version: int) -> None:
        """The step before this version has been trained: what it learned from is forgotten."""
        assert version == self.trained + 1, f"version {version} follows {self.trained}"
        self.trained = version
        del self._steps[version - 1]

    def undecided(self) -> list[tuple[Key, tuple[Any, ...]]]:
        """Whole groups without scores, and their results."""
        return [
            (Key(number, ticket), tuple(group.results))
            for number, step in sorted(self._steps.items())
            for ticket, group in sorted(step.groups.items())
            if not group.num_missing and group.is_kept is None
        ]

    def step_state(self, step: int) -> list[dict[str, Any]]:
        """One row per group: ``ticket``, ``is_kept``, ``results`` and ``prefixes`` by sample number."""
        return [
            {
                "ticket": ticket,
                "is_kept": group.is_kept,
                "results": {sample: group.results[sample] for sample in sorted(group.has_ended)},
                "prefixes": dict(group.prefixes),
            }
            for ticket, group in sorted(self._steps[step].groups.items())
        ]

    def state_dict(self, trained: int | None = None) -> dict[str, Any]:
        """All that has been sampled and not trained; what is under way counts as waiting.

        Args:
            trained: steps that have been, if that has not been told yet.
        """
        first = self.trained if trained is None else trained
        steps = {step: self.step_state(step) for step in sorted(self._steps) if step >= first}
        return {"format": STATE_VERSION, "trained": first, "steps": steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from ``state_dict``; what has no result waits to be issued again.

        Keys that are numbers may have become texts, as JSON makes them.
        """
        assert state["format"] == STATE_VERSION and not self._steps, state["format"]
        self.trained = self.num_begun = int(state["trained"])
        for number, rows in sorted((int(step), rows) for step, rows in state["steps"].items()):
            assert number == self.num_begun, f"step {number} follows {self.num_begun}"
            self.num_begun = number + 1
            step = self._steps[number] = Step()
            for row in rows:
                self._load_group(step, Key(number, int(row["ticket"])), row)
        most = self.rules.num_steps(self.trained)
        if self.num_begun > max(most, self.trained):
            raise InputError(
                f"the checkpoint of version {self.trained} holds samples up to step {self.num_begun - 1}, which are "
                f"older than eta={self.rules.eta} allows: go on with the eta and the total_steps that it was made with"
            )

    def _load_group(self, step: Step, key: Key, row: Mapping[str, Any]) -> None:
        size = self.rules.group_size
        results = {int(sample): result for sample, result in row["results"].items()}
        prefixes = {int(sample): prefix for sample, prefix in row["prefixes"].items()}
        group = SampleGroup(
            [results.get(i) for i in range(size)], size - len(results), prefixes, row["is_kept"], {*results}
        )
        step.groups[key.ticket] = group
        step.num_undecided += group.is_kept is None
        step.num_dropped += group.is_kept is False
        for part in self.rules.parts():
            if missing := tuple(sample for sample in part if sample not in results):
                self._wait(key, missing)
