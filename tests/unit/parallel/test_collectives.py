"""What a process asks of its host before it has ranks."""

from __future__ import annotations

import resource

import pytest

from mega_rl.parallel.collectives import MAX_FILES, allow_files

NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limits", "set_to"),
    [
        ((1024, 20_000), [(20_000, 20_000)]),
        ((1024, NO_LIMIT), [(MAX_FILES, NO_LIMIT)]),
        ((1024, 1 << 20), [(MAX_FILES, 1 << 20)]),
        ((20_000, 20_000), []),
        ((1 << 20, 1 << 20), []),
        ((NO_LIMIT, NO_LIMIT), []),
    ],
)
def test_as_many_files_as_the_host_allows_are_opened(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], set_to: list[tuple[int, int]]
) -> None:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, to: found.append(to))
    allow_files()
    assert found == set_to, "never fewer than there were"
