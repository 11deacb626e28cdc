"""What a call of the sandbox costs: of a warm process against one that is started for the call, in one run.

A cold call starts the process that programs are forked from, runs one program and ends it; a warm one finds that
process there. Both make namespaces, directory and limits anew. CPU time is that of all processes of the call, the
caller's included; what the kernel does in threads of its own is not in it. The two ways alternate; medians are shown.

``--modules numpy sympy`` measures programs that import these, which a warm process has loaded before (``preload``).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from pathlib import Path

import psutil

from benchmarks.report import publish, table
from mega_rl.rewards.sandbox import sandbox
from mega_rl.rewards.sandbox.sandbox import ProgramLimits, has_namespaces, run_program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=100, help="warm calls of a round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--modules", nargs="*", default=[], help="that programs import, and a warm process has loaded")
    parser.add_argument("--limits", action="store_true", help="without namespaces; not for root")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if not arguments.limits and not has_namespaces():
        parser.error("this system allows no unprivileged namespaces; add --limits")
    calls, rounds = (3, 2) if arguments.quick else (arguments.calls, arguments.rounds)
    limits = ProgramLimits(60.0, 1 << 32, namespaces=not arguments.limits)
    source = "".join(f"import {name}\n" for name in arguments.modules) + "print(6 * 7)"
    cold, warm = [], []
    for _ in range(rounds):
        cold.append(measure(source, limits, (), 1))
        run(source, limits, tuple(arguments.modules))  # starts what the following calls find
        warm.append(measure(source, limits, tuple(arguments.modules), calls, is_warm=True))
    rows = [(name, *map(statistics.median, zip(*way, strict=True))) for name, way in (("cold", cold), ("warm", warm))]
    rows.append(("warm / cold", *(of / by for of, by in zip(rows[1][1:], rows[0][1:], strict=True))))
    header = (" ".join(["call", *arguments.modules]), "CPU time, ms", "time, ms")
    level = "limits" if arguments.limits else "namespaces"
    publish("Sandbox", table(header, rows), level, {"header": header, "rows": rows}, arguments.json)


def measure(
    source: str, limits: ProgramLimits, preload: tuple[str, ...], num_calls: int, is_warm: bool = False
) -> tuple[float, float]:
    """Milliseconds per call: of processors, and on the clock."""
    if not is_warm:
        sandbox.close_zygotes()
    own, before_s, started = own_cpu_s(), zygote_cpu_s(), time.perf_counter()
    spent_s = sum(run(source, limits, preload) for _ in range(num_calls))
    spent_s += zygote_cpu_s() - before_s
    if not is_warm:
        sandbox.close_zygotes()
    wall_s = time.perf_counter() - started
    spent_s += own_cpu_s() - own
    return spent_s / num_calls * 1e3, wall_s / num_calls * 1e3


def run(source: str, limits: ProgramLimits, preload: tuple[str, ...]) -> float:
    """Seconds of processors that a program took in the processes of its own."""
    ended = run_program(source, "", limits, preload=preload)
    assert (ended.exit_code, ended.output) == (0, "42\n"), ended
    return ended.cpu_s


def own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def zygote_cpu_s() -> float:
    """Of the processes that programs are forked from, the programs aside."""
    total_s = 0.0
    for pid in sandbox.zygote_pids():
        try:
            with open(f"/proc/{pid}/schedstat") as file:  # nanoseconds; other figures have ticks of ten milliseconds
                total_s += int(file.read().split()[0]) / 1e9
        except FileNotFoundError:  # a kernel without it
            times = psutil.Process(pid).cpu_times()
            total_s += times.user + times.system
    return total_s


if __name__ == "__main__":
    main()
