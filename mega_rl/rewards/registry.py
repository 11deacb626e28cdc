"""From the name of a reward to a function with its options bound. Runs in the reward workers: imports no torch.

A reward is a callable ``(data_source, solution_str, ground_truth, extra_info) -> float`` of one sample, or
``(data_sources, solution_strs, ground_truths, extra_infos) -> list[float]`` of several; either may be ``async``. It is
called with these as keywords and its configured options beside them, and gets ``num_response_tokens`` if it names
that parameter (a list, of several samples). It is named as a built-in, as ``package.module:function`` or as
``path/to/file.py:function``.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, Protocol, get_args, get_origin, get_type_hints

CONTRACT = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_CONTRACT = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
NUM_RESPONSE_TOKENS = "num_response_tokens"
CHECK = "check_options"  # the attribute of a reward function that refuses impossible options with a ValueError

BUILT_IN: dict[str, str] = {
    "exact_match": "mega_rl.rewards.math:exact_match",
    "gsm8k": "mega_rl.rewards.math:gsm8k",
    "boxed": "mega_rl.rewards.math:boxed",
    "dapo_math": "mega_rl.rewards.math:dapo_math",
    "math_verify": "mega_rl.rewards.symbolic:math_verify",
    "format_regex": "mega_rl.rewards.text:format_regex",
    "repetition": "mega_rl.rewards.text:repetition",
    "overlong": "mega_rl.rewards.text:overlong",
    "code_tests": "mega_rl.rewards.code:code_tests",
}


class Reward(Protocol):
    """A reward of one sample with its options bound."""

    def __call__(
        self, *, data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any]
    ) -> float: ...


@dataclass(frozen=True)
class BoundReward:
    """A reward function with its options."""

    function: Callable[..., Any]
    options: Mapping[str, Any]
    is_batch: bool  # takes lists
    takes_num_tokens: bool

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    def arguments(self, samples: list[tuple[Any, ...]]) -> dict[str, Any]:
        """The keywords of one call.

        Args:
            samples: data source, response, ground truth, extra info and number of response tokens of each; a single one
                for a function that takes one.
        """
        names = (*(BATCH_CONTRACT if self.is_batch else CONTRACT), NUM_RESPONSE_TOKENS)
        columns = [list(column) for column in zip(*samples, strict=True)] if self.is_batch else samples[0]
        given = dict(zip(names, columns, strict=True))
        if not self.takes_num_tokens:
            del given[NUM_RESPONSE_TOKENS]
        return given | dict(self.options)


def part_name(name: str) -> str:
    """What a reward is called in scores and metrics: the built-in, or the function behind the colon."""
    return name.rpartition(":")[2]


def bind(name: str, options: Mapping[str, Any]) -> BoundReward:
    """The reward of that name with its options checked.

    Raises:
        ValueError: an unknown or unimportable reward, a callable without the arguments of the contract, or unknown,
            missing or impossible options.
    """
    function = load_reward(name)
    parameters = inspect.signature(function).parameters
    _check_options(name, function, options)
    is_batch = any(key in parameters for key in BATCH_CONTRACT)
    return BoundReward(function, options, is_batch, NUM_RESPONSE_TOKENS in parameters)


def load_reward(name: str) -> Callable[..., Any]:
    """The callable behind a built-in name, ``package.module:function`` or ``path/to/file.py:function``.

    Raises:
        ValueError: nothing of that name can be imported.
    """
    if ":" not in name and name not in BUILT_IN:
        raise ValueError(
            f"rewards: {name!r} is not a built-in reward{_nearest(name, BUILT_IN)}; choose from "
            f"{', '.join(BUILT_IN)}, or write package.module:function or path/file.py:function"
        )
    source, _, function_name = BUILT_IN.get(name, name).rpartition(":")
    module = _module_of_file(name, Path(source)) if source.endswith(".py") else _module(name, source)
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        raise ValueError(
            f"rewards: {source} has no function {function_name!r}{_nearest(function_name, functions)}; correct the name"
        )
    return function


def _check_options(name: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {key: p for key, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    contract = BATCH_CONTRACT if any(key in named for key in BATCH_CONTRACT) else CONTRACT
    absent = [key for key in contract if key not in named]
    if absent and not takes_any:
        raise ValueError(f"rewards: {name} does not take {', '.join(absent)}; add them to its parameters")
    given = (*contract, NUM_RESPONSE_TOKENS)
    own = {key: parameter for key, parameter in named.items() if key not in given}
    for key in options:
        if key in given:
            raise ValueError(f"rewards: the option {key} of {name} is an argument of every reward; leave it out")
        if key not in own and not takes_any:
            listed = f"it has {', '.join(own)}" if own else "it has none"
            raise ValueError(f"rewards: {name} has no option {key!r}{_nearest(key, own)}; {listed}")
    for key, parameter in own.items():
        if parameter.default is parameter.empty and key not in options:
            raise ValueError(f"rewards: {name} needs the option {key}; set it under options")
    for key, hint in get_type_hints(function).items() if inspect.isfunction(function) else ():
        if key in options:
            _check_value(name, key, options[key], hint)
    if check := getattr(function, CHECK, None):
        try:
            check(**options)
        except ValueError as error:
            raise ValueError(f"rewards: the options of {name} are impossible: {error}") from error


def _check_value(name: str, key: str, value: Any, hint: Any) -> None:
    """Plain types and lists of alternatives; other annotations are the function's own affair."""
    if get_origin(hint) is Literal and value not in get_args(hint):
        choices = ", ".join(map(str, get_args(hint)))
        raise ValueError(f"rewards: the option {key} of {name} is {value!r}; choose from {choices}")
    kinds = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}.get(hint) if isinstance(hint, type) else None
    is_wrong_bool = isinstance(value, bool) and hint is not bool  # bool is an int to Python
    if kinds is not None and (is_wrong_bool or not isinstance(value, kinds)):
        raise ValueError(f"rewards: the option {key} of {name} is {value!r}; give a value of type {hint.__name__}")


def _module(name: str, source: str) -> ModuleType:
    try:
        return importlib.import_module(source)
    except BaseException as error:  # importing runs the user's code
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"rewards: {name} cannot be imported ({cause}); correct the name, or fix or install the module"
        ) from error


def _module_of_file(name: str, path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"rewards: {name} names {path}, which is no file; correct the path")
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=8).hexdigest()
    spec = importlib.util.spec_from_file_location(f"mega_rl_reward_{path.stem}_{digest}", path)
    assert spec is not None and spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look their module up there
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # importing runs the user's code
        del sys.modules[spec.name]
        cause = f"{type(error).__name__}: {error}"
        raise ValueError(f"rewards: {path} cannot be imported ({cause}); fix that file") from error
    return module


def _nearest(name: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(choices), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
