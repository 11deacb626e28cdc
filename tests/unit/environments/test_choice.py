"""Environments by their names in a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mega_rl.config.checks.environment import environment_problems
from mega_rl.config.schema.learning import EnvironmentConfig
from mega_rl.config.schema.sampling import RewardConfig
from mega_rl.config.schema.sections import RunConfig
from mega_rl.environments.built_in.guessing import NumberGuessing
from mega_rl.environments.choice import Maker
from mega_rl.environments.protocol import End
from mega_rl.environments.tools import Parsed
from mega_rl.errors import InputError
from mega_rl.types import Prompt

PROMPT = Prompt(3, (1,), "?", "", "test")
OWN = """
from mega_rl.environments.protocol import End

class Own:
    roles = ("user",)
    def __init__(self, prompt, sample_index, *, reward):
        self.reward = reward
    def step(self, turn):
        return End(self.reward)

class Stepless:
    def __init__(self, prompt, sample_index):
        pass

class Careful(Stepless):
    def step(self, turn):
        return End()

    def check_at_start(self):
        raise ConnectionError("the game is not installed")

def double(number: int) -> int:
    \"\"\"Double a number.

    Args:
        number: the number.
    \"\"\"
    return 2 * number
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("sys.path", ["", *__import__("sys").path])
    file = tmp_path / "environments_of_my_own.py"
    file.write_text(OWN)
    yield file
    __import__("sys").modules.pop(file.stem, None)


def maker(name: str, **options: Any) -> Maker:
    return Maker(EnvironmentConfig(name=name, options=options), lambda text: Parsed(text, []))


def test_built_in_ones_and_ones_own(own: Path) -> None:
    made = maker("number_guessing", highest=5)(PROMPT, 0)
    assert isinstance(made, NumberGuessing)
    chosen = maker(f"{own}:Own", reward=0.25)
    assert chosen.roles == ("user",) and list(chosen.tools) == []
    assert chosen(PROMPT, 1).step(None) == End(0.25)  # type: ignore[arg-type]


def test_tools_by_name_with_options_and_from_a_file(own: Path, tmp_path: Path) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("a\nb\n")
    search = {"name": "local_search", "options": {"path": str(texts)}}
    chosen = maker("tools", functions=["calculate", search, f"{own}:double"], is_in_process=True)
    assert [tool["function"]["name"] for tool in chosen.tools] == ["calculate", "search", "double"]
    assert chosen.roles == ("tool",)
    apart = maker("tools", functions=[f"{own}:double"])  # another process must find it too
    assert [tool["function"]["name"] for tool in apart.tools] == ["double"]


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("number_guessing", {"lowest": 3}, "cannot be made with environment.options .*lowest"),
        ("number_guessing", {"highest": 0}, "environment.options: guessing"),
        ("no_such.module:Thing", {}, "environment.name: 'no_such.module:Thing' cannot be imported"),
        ("mega_rl.environments.built_in.guessing:Nothing", {}, "has no class 'Nothing'"),
        ("tools", {"functions": [3]}, "environment.options.functions has 3"),
        ("tools", {"functions": [{"name": "local_search", "options": {"file": "x"}}]}, "does not take these options"),
        ("OWN:Own", {}, "cannot be made with environment.options"),
        ("OWN:Stepless", {}, "has no method step"),
    ],
)
def test_what_cannot_be_made_is_a_sentence(own: Path, name: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        maker(name.replace("OWN", str(own)), **options)


def test_a_file_with_the_name_of_another_module(tmp_path: Path) -> None:
    file = tmp_path / "json.py"
    file.write_text("class Own: ...")
    with pytest.raises(InputError, match="rename the file"):
        maker(f"{file}:Own")


def problems(**settings: Any) -> str:
    config = RunConfig(rewards=[RewardConfig(name="gsm8k")], environment=EnvironmentConfig(**settings))
    return "; ".join(environment_problems(config))


def test_problems_that_the_configuration_shows() -> None:
    assert problems() == problems(name="number_guessing") == problems(name="a.b:C") == ""
    assert "environment.name is null" in problems(options={"a": 1})
    assert "did you mean python_sandbox?" in problems(name="python_sandbx")
    assert "write package.module:Class" in problems(name="a:b c")
    assert "is not a file" in problems(name="nowhere.py:Own")
    assert "environment.options.functions" in problems(name="tools")
    never = RunConfig(environment=EnvironmentConfig(name="number_guessing"))
    never.data.chat_template, never.rollout.ignore_eos = "never", True
    assert len(environment_problems(never)) == 2
    assert "rewards is []" in "; ".join(environment_problems(RunConfig()))


def test_dynamic_sampling_compares_whole_rewards_of_episodes() -> None:
    config = RunConfig(rewards=[RewardConfig(name="gsm8k")], environment=EnvironmentConfig(name="number_guessing"))
    config.algorithm.dynamic_sampling.enabled = True
    assert environment_problems(config) == []
    config.algorithm.dynamic_sampling.metric = "gsm8k"
    (problem,) = environment_problems(config)
    assert "algorithm.dynamic_sampling.metric is 'gsm8k': set it to null" in problem


@pytest.mark.parametrize("name", ["python_sandbox", "tools"])
def test_an_interpreter_whose_service_is_gone_is_told_before_the_run(name: str) -> None:
    dead: dict[str, Any] = {"service": "http://127.0.0.1:9"}
    tools = {"functions": [{"name": "code_interpreter", "options": dead}], "is_in_process": True}
    chosen = maker(name, **(tools if name == "tools" else dead))
    with pytest.raises(InputError, match=r"environment.options: the Python interpreter: .*mega-rl sandbox-server"):
        chosen.check()


def test_an_environment_of_ones_own_says_what_it_lacks(own: Path) -> None:
    with pytest.raises(InputError, match=r"check_at_start of the environment failed .*the game is not installed"):
        maker(f"{own}:Careful").check()
    maker(f"{own}:Own", reward=1.0).check()  # has none
