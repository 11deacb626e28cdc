"""From the ``rewards`` of a configuration to scores.

A reward is any callable ``(data_source, solution_str, ground_truth, extra_info) -> float``; it is called with these as
keywords and with its configured options beside them. It is named as a built-in, as ``package.module:function`` or as
``path/to/file.py:function``.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, get_args, get_origin, get_type_hints

from mega_rl.config.schema import RewardConfig
from mega_rl.rewards.math import boxed, exact_match, gsm8k
from mega_rl.rewards.text import format_regex
from mega_rl.types import Completion, InputError, Score

CONTRACT = ("data_source", "solution_str", "ground_truth", "extra_info")


class Reward(Protocol):
    """A reward with its options bound."""

    def __call__(
        self, *, data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
    ) -> float: ...


BUILT_IN: dict[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "gsm8k": gsm8k,
    "boxed": boxed,
    "format_regex": format_regex,
}


@dataclass(frozen=True)
class WeightedReward:
    name: str  # of the part in a Score: the built-in, or the function behind the colon
    weight: float
    function: Callable[..., float]
    options: Mapping[str, Any]


class Scorer:
    """Scores completions by the weighted sum of its rewards."""

    def __init__(self, rewards: list[WeightedReward]) -> None:
        self.rewards = rewards

    def score(self, completions: list[Completion]) -> list[Score]:
        """One score per completion, in order.

        Raises:
            InputError: a reward raised, or returned something that is not a finite number.
        """
        return [self._score(completion) for completion in completions]

    def _score(self, completion: Completion) -> Score:
        parts = {reward.name: _call(reward, completion) for reward in self.rewards}
        return Score(sum(reward.weight * parts[reward.name] for reward in self.rewards), parts)


def build_scorer(rewards: list[RewardConfig]) -> Scorer:
    """Finds every reward and checks its options, so that a wrong name shows before the first sample.

    Raises:
        InputError: no rewards, an unknown or unimportable one, a callable that does not take the four arguments,
            unknown, missing or impossible options, a weight that is not finite, or the same name twice.
    """
    if not rewards:
        raise InputError(f"rewards is empty: list at least one, such as {', '.join(BUILT_IN)}")
    built = [_build(reward) for reward in rewards]
    names = [reward.name for reward in built]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(f"rewards lists {twice[0]} twice: keep one, or give the functions different names")
    return Scorer(built)


def load_reward(name: str) -> Callable[..., float]:
    """The callable behind a built-in name, ``package.module:function`` or ``path/to/file.py:function``."""
    source, colon, function_name = name.rpartition(":")
    if not colon:
        if name not in BUILT_IN:
            raise InputError(
                f"rewards: {name!r} is not a built-in reward{_nearest(name, BUILT_IN)}; choose from "
                f"{', '.join(BUILT_IN)}, or write package.module:function or path/file.py:function"
            )
        return BUILT_IN[name]
    module = _module_of_file(name, Path(source)) if source.endswith(".py") else _module(name, source)
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise InputError(
            f"rewards: {source} has no function {function_name!r}{_nearest(function_name, functions)}; correct the name"
        )
    return function


def _build(config: RewardConfig) -> WeightedReward:
    function = load_reward(config.name)
    if not math.isfinite(config.weight):
        raise InputError(f"rewards: the weight of {config.name} is {config.weight}; give a finite number")
    options = dict(config.options)
    _check_options(config.name, function, options)
    return WeightedReward(config.name.rpartition(":")[2], config.weight, function, options)


def _check_options(name: str, function: Callable[..., float], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {key: p for key, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    absent = [key for key in CONTRACT if key not in named]
    if absent and not takes_any:
        raise InputError(f"rewards: {name} does not take {', '.join(absent)}; add them to its parameters")
    own = {key: parameter for key, parameter in named.items() if key not in CONTRACT}
    for key in options:
        if key in CONTRACT:
            raise InputError(f"rewards: the option {key} of {name} is an argument of every reward; leave it out")
        if key not in own and not takes_any:
            listed = f"it has {', '.join(own)}" if own else "it has none"
            raise InputError(f"rewards: {name} has no option {key!r}{_nearest(key, own)}; {listed}")
    for key, parameter in own.items():
        if parameter.default is parameter.empty and key not in options:
            raise InputError(f"rewards: {name} needs the option {key}; set it under options")
    for key, hint in get_type_hints(function).items() if inspect.isfunction(function) else ():
        if key in options and get_origin(hint) is Literal and options[key] not in get_args(hint):
            choices = ", ".join(map(str, get_args(hint)))
            raise InputError(f"rewards: the option {key} of {name} is {options[key]!r}; choose from {choices}")


def _call(reward: WeightedReward, completion: Completion) -> float:
    prompt = completion.prompt
    sample = f"{prompt.data_source} prompt {prompt.index} sample {completion.sample_index}"
    try:
        value = reward.function(
            data_source=prompt.data_source,
            solution_str=completion.text,
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
            **reward.options,
        )
    except Exception as error:  # a reward is the user's code: whatever it raises is told with the sample it was given
        cause = f"{type(error).__name__}: {error}"
        raise InputError(
            f"the reward {reward.name} failed on {sample} ({cause}); mend the reward or that row"
        ) from error
    if not isinstance(value, Real) or not math.isfinite(value):
        raise InputError(f"the reward {reward.name} returned {value!r:.60} on {sample}; it must return a finite number")
    return float(value)


def _module(name: str, source: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except Exception as error:  # importing runs the user's code
        cause = f"{type(error).__name__}: {error}"
        raise InputError(
            f"rewards: {name} cannot be imported ({cause}); correct the name or mend the module"
        ) from error


def _module_of_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"rewards: {name} names {path}, which is no file; correct the path")
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()
    spec = importlib.util.spec_from_file_location(f"mega_rl_reward_{path.stem}_{digest}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # importing runs the user's code
        del sys.modules[spec.name]
        cause = f"{type(error).__name__}: {error}"
        raise InputError(f"rewards: {path} cannot be imported ({cause}); mend that file") from error
    return module


def _nearest(name: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(choices), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
