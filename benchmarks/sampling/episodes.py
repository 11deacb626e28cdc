"""Episodes whose tools hang, die, flood, raise or answer binary: every one must end, be counted, and leave nothing.

Episodes run side by side, each with a model that is scripted: a call of a bad tool, a call of a good one, an end. The
tools are plain functions (`ToolEnvironment`, a process for each call) and programs (`PythonSandbox`). Shown are, for
each kind, the episodes that ended by themselves, the replies that told an error, and what is still running at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import concurrent.futures
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from benchmarks.report import publish, table
from benchmarks.sampling.bad_tools import tool
from mega_rl.environments.built_in.python import PythonSandbox
from mega_rl.environments.episode import Episode, EpisodeLimits, run_episode
from mega_rl.environments.protocol import Environment, Message, Turn
from mega_rl.environments.tools import Parsed, ToolCall, ToolEnvironment
from mega_rl.rewards.sandbox import sandbox
from mega_rl.types import Prompt

KINDS = ("hang", "die", "flood", "raise", "binary")
PROGRAMS = {
    "hang": "import time; time.sleep(600)",
    "die": "import os; os.kill(os.getpid(), 11); os._exit(3)",
    "flood": "while True: print('x' * 10000)",
    "raise": "raise ValueError('no')",
    "binary": "import sys; sys.stdout.buffer.write(bytes(range(256)))",
    "good": "print('good')",
}


def parse(text: str) -> Parsed:
    return Parsed("", [ToolCall("tool", text)] if text.startswith("{") else [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=32, help="threads that wait for tools")
    parser.add_argument("--timeout-s", type=float, default=2.0, help="of one call")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    namespaces = sandbox.has_namespaces()
    if not namespaces and os.geteuid() == 0:
        parser.error("this system allows no unprivileged namespaces; run as another user than root")
    count = 20 if arguments.quick else arguments.episodes
    started = time.perf_counter()
    episodes = asyncio.run(run_all(count, arguments.workers, arguments.timeout_s, namespaces))
    seconds = time.perf_counter() - started
    processes = psutil.Process().children(recursive=True)
    sandbox.close_zygotes()
    _, left = psutil.wait_procs(processes, timeout=60)  # who has answered may still be about to end
    rows = []
    for kind in KINDS:
        own = [episode for number, episode in enumerate(episodes) if KINDS[number % len(KINDS)] == kind]
        stops = collections.Counter(episode.stop for episode in own)
        calls = sum(episode.metrics.get("tool_calls", 0) for episode in own)
        errors = sum(episode.metrics.get("tool_errors", 0) for episode in own)
        rows.append([kind, len(own), stops["environment"], stops["failed"], calls, errors])
    header = ("tools", "episodes", "ended by themselves", "failed", "calls", "errors told")
    text = f"{table(header, rows)}\n\n{count} episodes in {seconds:.0f} s; {len(left)} processes left of those tools"
    results = {"header": header, "rows": rows, "seconds": seconds, "left": len(left)}
    publish("Episodes with bad tools", text, f"{arguments.workers} threads", results, arguments.json)
    if left or sum(row[2] + row[3] for row in rows) != count:
        sys.exit("an episode or a process was lost")


async def run_all(count: int, num_threads: int, timeout_s: float, namespaces: bool) -> list[Episode]:
    with concurrent.futures.ThreadPoolExecutor(num_threads) as threads:
        asyncio.get_running_loop().set_default_executor(threads)
        return await asyncio.gather(*(one(number, timeout_s, namespaces) for number in range(count)))


async def one(number: int, timeout_s: float, namespaces: bool) -> Episode:
    """An episode; of each kind of tool half have functions and half programs."""
    kind, prompt = KINDS[number % len(KINDS)], Prompt(number, (1,), "?", "", "benchmark")
    environment: Environment
    if number // len(KINDS) % 2:
        environment = ToolEnvironment(prompt, 0, functions=[tool], parse=parse, timeout_s=timeout_s)
        texts = [json.dumps({"how": how}) for how in (kind, "good")]
    else:
        isolation = "namespaces" if namespaces else "limits"
        environment = PythonSandbox(prompt, 0, timeout_s=timeout_s, isolation=isolation)
        texts = [f"```python\n{PROGRAMS[how]}\n```" for how in (kind, "good")]
    left = iter([*texts, "done"])

    async def generate(messages: Sequence[Message]) -> Turn:
        return Turn(next(left))

    limits = EpisodeLimits(max_turns=3, step_timeout_s=3600.0)  # of the whole queue for a thread
    return await run_episode(environment, generate, limits)


if __name__ == "__main__":
    main()
