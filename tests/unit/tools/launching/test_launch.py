"""The launcher of the tests: output, exit status, time limit and orphans."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.launching.launch import Launched, alive, once, ranks, run, run_copy, started, torchrun

DETACHED_CHILD = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("child", child.pid, flush=True)
"""


def test_output_and_status() -> None:
    result = run([sys.executable, "-c", "import sys; print('out'); print('err', file=sys.stderr); sys.exit(3)"])
    assert result.returncode == 3
    assert "out" in result.stdout and "err" in result.stdout


def test_lines_are_whole_whatever_the_tests_were_started_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    code = "import sys; print(sys.stdout.write_through, sys.stderr.write_through)"
    for launched in (run([sys.executable, "-c", code]), run_copy(code)):
        assert launched.check().stdout == "False False\n"


def test_check_shows_the_output() -> None:
    with pytest.raises(AssertionError, match="the reason"):
        run([sys.executable, "-c", "print('the reason'); raise SystemExit(1)"]).check()


def test_a_child_in_another_session_does_not_survive() -> None:
    result = run([sys.executable, "-c", DETACHED_CHILD]).check()
    assert not alive(int(result.stdout.split()[1]))


def cut_short(launch: Callable[[float], Launched]) -> str:
    """What is said of a launch that does not end; a busy machine gets a longer limit, so that its child can start."""
    for limit_s in (3.0, 100.0):
        with pytest.raises(AssertionError, match=f"did not end in {limit_s:.0f} s") as caught:
            launch(limit_s)
        if "child " in str(caught.value):
            break
    return str(caught.value)


def test_time_limit_kills_the_tree_and_shows_the_output() -> None:
    command = [sys.executable, "-c", DETACHED_CHILD + "import time; time.sleep(600)"]
    said = cut_short(lambda limit_s: run(command, timeout=limit_s))
    assert not alive(int(said.split("child ")[-1]))


def test_wait_for_sees_text_and_early_end() -> None:
    with started([sys.executable, "-c", "print('ready', flush=True); import time; time.sleep(600)"]) as running:
        running.wait_for("ready", timeout=60)
        assert running.process.poll() is None
    assert not alive(running.process.pid)
    with pytest.raises(AssertionError, match="ended without"), started([sys.executable, "-c", "pass"]) as running:
        running.wait_for("ready", timeout=60)


@pytest.mark.slow
def test_torchrun_starts_every_rank(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    line = "f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n\""  # one write: no rank cuts the other's line
    script.write_text(f"import os\nprint({line}, end='', flush=True)\n")
    result = torchrun(script, nproc=2, timeout=250).check()
    assert "rank 0 of 2" in result.stdout and "rank 1 of 2" in result.stdout


def test_a_copy_is_a_process_of_its_own_with_arguments_and_variables(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nprint(__name__, sys.argv[1:], os.getpid(), os.environ['OWN'])\nsys.exit(4)\n")
    results = [run_copy(script, 1, "two", env={"OWN": word}) for word in ("a", "b")]
    assert [result.returncode for result in results] == [4, 4]
    lines = [result.stdout.split() for result in results]
    assert [(line[0], line[1:3], line[4]) for line in lines] == [("__main__", ["['1',", "'two']"], w) for w in "ab"]
    assert len({line[3] for line in lines}) == 2
    failed = run_copy("import torch; os = 1; raise KeyError('the reason')")
    assert failed.returncode == 1 and "KeyError: 'the reason'" in failed.stdout


def test_a_copy_has_the_promises_of_a_command() -> None:
    result = run_copy(DETACHED_CHILD).check()
    assert not alive(int(result.stdout.split()[1]))
    said = cut_short(lambda limit_s: run_copy(DETACHED_CHILD + "import time; time.sleep(600)", timeout=limit_s))
    assert not alive(int(said.split("child ")[-1]))


@pytest.mark.slow
def test_ranks_end_together_and_have_the_promises_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "ranks.py"
    script.write_text(
        "import os, sys\nimport torch.distributed as dist\ndist.init_process_group('gloo')\n"
        "print(f'rank {dist.get_rank()} of {dist.get_world_size()} {sys.argv[1:]}')\n"
        "dist.barrier()\nif sys.argv[1] == 'fail' and dist.get_rank() == 1:\n    raise KeyError('the reason')\n"
        "import time\nif sys.argv[1] != 'end':\n    time.sleep(600)\n"
    )
    for num_ranks in (2, 3):
        result = ranks(script, "end", nproc=num_ranks, timeout=250).check()
        assert all(f"rank {rank} of {num_ranks} ['end']" in result.stdout for rank in range(num_ranks))
    failed = ranks(script, "fail", timeout=250)
    assert failed.returncode == 1 and "KeyError: 'the reason'" in failed.stdout
    with pytest.raises(AssertionError, match=r"did not end in 1 s"):
        ranks(script, "hang", nproc=1, timeout=1)
    main = threading.main_thread().ident
    interrupt = threading.Timer(1.0, signal.pthread_kill, (main, signal.SIGINT))
    interrupt.start()
    with pytest.raises(KeyboardInterrupt):
        ranks(script, "hang", nproc=1)
    interrupt.join()
    ranks(script, "end").check()  # not taken for the end of the one before
    script.write_text("import os, sys\nprint('RANK' in os.environ, sys.argv[1:])\nsys.exit(3)\n")
    alone = ranks(script, "alone", nproc=0)
    assert (alone.returncode, alone.stdout) == (3, "False ['alone']\n")


def test_a_launch_that_died_is_not_started_again() -> None:
    starts = []

    @once
    def launch(name: str) -> str:
        starts.append(name)
        assert name != "dies", "the reason"
        return name

    assert [launch("lives"), launch("lives")] == ["lives"] * 2
    for _ in range(2):
        with pytest.raises(AssertionError, match="the reason"):
            launch("dies")
    assert starts == ["lives", "dies"]
