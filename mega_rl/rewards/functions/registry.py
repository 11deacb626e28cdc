"""From the name of a reward to a function with its options bound. Runs in the reward workers: imports no torch.

A reward is a callable ``(data_source, solution_str, ground_truth, extra_info) -> float`` of one sample, or
``(data_sources, solution_strs, ground_truths, extra_infos) -> list[float]`` of several; either may be ``async``. It is
called with these as keywords and its configured options beside them, and gets ``num_response_tokens`` and ``images``
(the encoded bytes of the prompt's pictures) if it names that parameter (a list with one entry for each of several
samples). ``(prompts, completions, **columns)`` of TRL and plain names such as
``(response, answer)`` are known by their parameters (`signature`). A value is a number, or an object with a ``score``,
whose other numbers are metrics. It is named as a built-in, as ``package.module:function`` or as
``path/to/file.py:function``.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, get_args, get_origin, get_type_hints

from mega_rl.config.schema.sampling import RewardConfig
from mega_rl.config.schema.stage import MODEL_REWARD
from mega_rl.own_code import is_own, load, nearest
from mega_rl.rewards.functions import images

CONTRACT = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_CONTRACT = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
NUM_RESPONSE_TOKENS, IMAGES = "num_response_tokens", "images"
ON_DEMAND = (NUM_RESPONSE_TOKENS, IMAGES)  # fields that a function gets only if it names them
WITHOUT_TRUTH = ("format_regex", "repetition", "overlong")  # built-in rewards of the response alone
# Names of parameters -> which entry of a sample they are; of several samples, also with an s; None: the prompt.
# A sample has the entry of pictures only if it has any and a reward of the run takes them.
FIELDS: dict[str, int | None] = {
    "data_source": 0,
    "solution_str": 1, "response": 1, "completion": 1,
    "ground_truth": 2, "answer": 2, "solution": 2,
    "extra_info": 3,
    NUM_RESPONSE_TOKENS: 4,
    IMAGES: 5,
    "prompt": None,
}  # fmt: skip
RESPONSES = ("solution_str", "response", "completion")
CHECK = "check_options"  # the attribute of a reward function that refuses impossible options with a ValueError

BUILT_IN: dict[str, str] = {
    "exact_match": "mega_rl.rewards.functions.math:exact_match",
    "gsm8k": "mega_rl.rewards.functions.math:gsm8k",
    "boxed": "mega_rl.rewards.functions.math:boxed",
    "dapo_math": "mega_rl.rewards.functions.math:dapo_math",
    "math_verify": "mega_rl.rewards.functions.symbolic:math_verify",
    "format_regex": "mega_rl.rewards.functions.text:format_regex",
    "repetition": "mega_rl.rewards.functions.text:repetition",
    "overlong": "mega_rl.rewards.functions.text:overlong",
    "code_tests": "mega_rl.rewards.functions.code:code_tests",
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
    is_batch: bool = False  # takes lists
    names: tuple[str, ...] = CONTRACT  # of its parameters that are fields of a sample
    columns: tuple[str, ...] = ()  # of its parameters that are entries of extra_info: columns of TRL
    takes_columns: bool = False  # takes every entry of extra_info by its name, besides: ``**columns`` of TRL

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.function)

    @property
    def takes_images(self) -> bool:
        return IMAGES in self.names

    def arguments(self, samples: list[tuple[Any, ...]]) -> dict[str, Any]:
        """The keywords of one call.

        Args:
            samples: data source, response, ground truth, extra info, number of response tokens and references of
                pictures of each; a single one for a function that takes one.

        Raises:
            ValueError, OSError: a picture is not there any more as the run had it.
        """
        columns = self.columns
        if self.takes_columns:
            entries = {str(key) for sample in samples for key in sample[3]}
            columns = (*columns, *sorted(entries - {*self.names, *columns, *self.options}))
        rows = [
            {name: _field(sample, name) for name in self.names} | {name: sample[3].get(name) for name in columns}
            for sample in samples
        ]
        given = {name: [row[name] for row in rows] for name in rows[0]} if self.is_batch else rows[0]
        return given | dict(self.options)


def _field(sample: tuple[Any, ...], name: str) -> Any:
    place = FIELDS.get(name, FIELDS.get(name.removesuffix("s")))
    if name == IMAGES:
        return images.read(sample[5]) if len(sample) > 5 else []
    return sample[3].get("prompt") if place is None else sample[place]


def _is_field(name: str, is_batch: bool) -> bool:
    """Whether a parameter is a field of a sample; of several samples, in the singular (TRL) or the plural."""
    return name in FIELDS or (is_batch and name.removesuffix("s") in FIELDS)


def signature(function: Callable[..., Any]) -> BoundReward:
    """How a reward is called, by the names of its parameters; it has no options yet.

    All four names of the contract, or a catch-all instead: verl's functions, whose other parameters are options.
    ``completions``: TRL's, whose other parameters are columns of the data. Else some fields of a sample under their
    plain names, at least the response.

    Raises:
        ValueError: no parameter takes the response.
    """
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    names = [parameter.name for parameter in named]
    wanted = tuple(name for name in ON_DEMAND if name in names)
    if "completions" in names:
        fields = [name for name in names if _is_field(name, is_batch=True)]
        more = ("prompts", "ground_truth", "answer", "solution") if takes_any else ()
        fields += [name for name in more if name not in fields]
        required = [p.name for p in named if p.default is p.empty and p.name not in fields]
        return BoundReward(function, {}, True, tuple(fields), tuple(required), takes_any)
    for contract, is_batch in ((CONTRACT, False), (BATCH_CONTRACT, True)):
        is_meant = any(name in names for name in contract) or (takes_any and not is_batch and not names)
        if all(name in names for name in contract) or (takes_any and is_meant):
            return BoundReward(function, {}, is_batch, (*contract, *wanted))
    is_batch = any(name in names for name in ("solution_strs", "responses"))
    if not is_batch and not any(name in names for name in RESPONSES):
        takes = ", ".join(names) or "nothing"
        raise ValueError(f"takes {takes}, but no solution_str; name a parameter so, or response, or completions")
    fields = [name for name in names if _is_field(name, is_batch)]
    return BoundReward(function, {}, is_batch, tuple(fields))


def needs_truth(rewards: Iterable[RewardConfig]) -> bool:
    """Whether a row without a ground truth is an error: a built-in reward compares with it.

    A reward of the user's own gets an empty text for it.
    """
    return any(reward.name in BUILT_IN and reward.name not in WITHOUT_TRUTH for reward in rewards)


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
    try:
        reward = signature(function)
    except ValueError as error:
        raise ValueError(f"rewards: {name} {error}") from error
    _check_options(name, reward, options)
    own = tuple(column for column in reward.columns if column not in options)
    return replace(reward, options=options, columns=own)


def load_reward(name: str) -> Callable[..., Any]:
    """The callable behind a built-in name, ``package.module:function`` or ``path/to/file.py:function``.

    Raises:
        ValueError: nothing of that name can be imported.
    """
    if name == MODEL_REWARD:
        raise ValueError(
            f"rewards: {name!r} is computed by the trainer's processes of a run, which are not here; remove it"
        )
    if not is_own(name) and name not in BUILT_IN:
        raise ValueError(
            f"rewards: {name!r} is not a built-in reward{nearest(name, BUILT_IN)}; choose from "
            f"{', '.join(BUILT_IN)}, {MODEL_REWARD}, or write package.module:function or path/file.py:function"
        )
    return load(BUILT_IN.get(name, name), "rewards")


def _check_options(name: str, reward: BoundReward, options: Mapping[str, Any]) -> None:
    function = reward.function
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {key: p for key, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    given = (*reward.names, *ON_DEMAND)
    own = {key: parameter for key, parameter in named.items() if key not in given}
    for key in options:
        if key in given:
            raise ValueError(f"rewards: the option {key} of {name} is an argument of every reward; leave it out")
        if key not in own and not takes_any:
            listed = f"it has {', '.join(own)}" if own else "it has none"
            raise ValueError(f"rewards: {name} has no option {key!r}{nearest(key, own)}; {listed}")
    for key, parameter in own.items():
        if parameter.default is parameter.empty and key not in options and key not in reward.columns:
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
    if name in BUILT_IN and isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"rewards: the option {key} of {name} is {value!r}; give a finite number")
