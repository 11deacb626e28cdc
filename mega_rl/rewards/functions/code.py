"""A reward that runs the program in a response against tests."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, Literal

from mega_rl.rewards.sandbox.remote import SandboxClient, ServiceError
from mega_rl.rewards.sandbox.sandbox import ProgramLimits, ProgramRun, obstacle, run_program

Runner = Callable[[str, str, ProgramLimits], ProgramRun]  # source, standard input
CODE_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL | re.IGNORECASE)


def code_tests(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    score: Literal["all", "fraction"] = "all",
    timeout_s: float = 4.0,
    memory_bytes: int = 536870912,
    isolation: Literal["namespaces", "limits"] = "namespaces",
    service: str = "",
) -> float:
    """Runs the last fenced code block of a response, as Python, against the tests in the ground truth.

    Args:
        ground_truth: JSON, either ``{"inputs": ["1 2", ...], "outputs": ["3", ...]}``: what the program reads from
            standard input and must print, whitespace at the ends of lines aside; or ``{"asserts": ["assert f(1) == 2",
            ...]}``: statements that run after the code, in the same interpreter.
        score: all gives 1 if every test passes, else 0; fraction gives the share that passes.
        timeout_s: per test. All tests of a sample must end within ``reward_workers.timeout_s``.
        memory_bytes: address space of each process of the program.
        isolation: limits is for systems without unprivileged namespaces, and leaves the program what the user of the
            run may do: files, network, other processes of that user. It is refused to root.
        service: the address of a sandbox service (http://HOST:PORT) that runs the programs instead, with its isolation.

    Raises:
        ValueError: a ground truth that is not in one of the two forms.
        OSError: no namespaces, if they are asked for; root, if they are not; a service that does not answer.
    """
    tests = _tests(ground_truth)
    blocks = CODE_BLOCK.findall(solution_str)
    if not blocks:
        return 0.0
    limits = ProgramLimits(timeout_s, memory_bytes, namespaces=isolation == "namespaces")
    run: Runner = SandboxClient(service).run if service else run_program
    num_passed = 0
    for given, expected in tests:
        passed = _passes(run, blocks[-1], given, expected, limits)
        num_passed += passed
        if score == "all" and not passed:
            return 0.0
    return num_passed / len(tests)


def _passes(run: Runner, code: str, given: str, expected: str | None, limits: ProgramLimits) -> bool:
    if expected is not None:
        ended = run(code, given, limits)
        return ended.exit_code == 0 and _lines(ended.output) == _lines(expected)
    # A program that ends early, with whatever status, has not come to this line.
    done = secrets.token_hex(16)
    return _ends_with(run(f"{code}\n\n{given}\nprint({done!r})\n", "", limits), done)


def _ends_with(run: ProgramRun, done: str) -> bool:
    return run.exit_code == 0 and run.output.rstrip().endswith(done)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _tests(ground_truth: str) -> list[tuple[str, str | None]]:
    """(standard input, expected output) or (statement, None) of every test."""
    try:
        spec = json.loads(ground_truth)
    except json.JSONDecodeError as error:
        raise ValueError(f"the ground truth {ground_truth!r:.60} is not JSON ({error})") from error
    match spec:
        case {"inputs": [_, *_] as inputs, "outputs": [*outputs]} if len(inputs) == len(outputs):
            pairs: list[tuple[str, str | None]] = list(zip(inputs, outputs, strict=True))
            if all(isinstance(text, str) for pair in pairs for text in pair):
                return pairs
        case {"asserts": [_, *_] as asserts} if all(isinstance(text, str) for text in asserts):
            return [(text, None) for text in asserts]
    raise ValueError(
        f"the ground truth {ground_truth!r:.60} holds no tests: give equally many inputs and outputs, or asserts"
    )


def check_isolation(isolation: str, service: str) -> None:
    """Raises ValueError if programs cannot be run in this way here: no namespaces, root without them, no service."""
    if service:
        try:
            return SandboxClient(service).check()
        except ServiceError as error:
            raise ValueError(f"{error}; start it with mega-rl sandbox-server, or correct the address") from error
    is_root = os.geteuid() == 0
    if isolation == "limits" and is_root:
        raise ValueError(
            "isolation is limits and the run is root's, so programs could end the trainer, read its memory and change "
            "the system; set it to namespaces, or run as another user"
        )
    if isolation == "namespaces" and (reason := obstacle()) is not None:
        way = "run as another user than root and " if is_root else ""
        raise ValueError(
            f"this system allows no unprivileged namespaces ({reason}), so programs cannot be cut off from files, "
            f"network and the trainer; allow them, or {way}set isolation to limits"
        )


def _check_code_tests(
    score: str = "all",
    timeout_s: float = 4.0,
    memory_bytes: int = 536870912,
    isolation: str = "namespaces",
    service: str = "",
) -> None:
    if timeout_s <= 0 or memory_bytes < 1 << 26:
        raise ValueError(f"timeout_s {timeout_s} must be above 0 and memory_bytes {memory_bytes} at least {1 << 26}")
    check_isolation(isolation, service)


code_tests.check_options = _check_code_tests  # type: ignore[attr-defined]
