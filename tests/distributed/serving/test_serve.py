"""``tools/serve.py`` as a whole: one server with a real engine, asked through OpenAI's client, ended by a signal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.launching.launch import ENGINE, once, ranks

SCRIPT = "tests/distributed/serving/run_serve.py"
CHECKS = ("starts", "seeds_and_streams", "logprobs", "stops", "tools", "gives_up", "records")
pytest.importorskip("openai")


@once
def launched(scratch: Path) -> str:
    return ranks(SCRIPT, scratch, nproc=1, modules=ENGINE).check().stdout


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    return launched(tmp_path_factory.mktemp("serve"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_check(output: str, name: str) -> None:
    assert re.findall(rf"^CHECK {name} (.*)$", output, re.MULTILINE) == ["ok"], output[-3000:]


@pytest.mark.slow
def test_a_signal_ends_it_well(output: str) -> None:
    assert "ENDED 0" in output and "serving tiny at http://127.0.0.1:" in output
