"""From a file or a command line of a neighbour to its keys and values."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mega_rl.config.reading.yaml_text import parse_yaml
from mega_rl.errors import InputError, shortened
from mega_rl.importers.draft.words import (
    MAX_CHARACTERS,
    UNKNOWN,
    arrays,
    expanded,
    set_several_times,
    shell_lines,
    unknown_names,
    variables,
)

_HYDRA = re.compile(r"^[+~]{0,2}([A-Za-z_][\w-]*(?:\.[\w-]+)+)=(.*)$", re.DOTALL)
_TOP = re.compile(r"^\+{0,2}([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_FLAG = re.compile(r"^--([A-Za-z_][\w.-]*)(?:=(.*))?$", re.DOTALL)
_QUOTED = re.compile(r"(=)(['\"])(.*)\2$", re.DOTALL)  # a value in quotes of its own
_REFERENCE = re.compile(r"\$(?:\w+|\{\w+(?:\[[@*]\])?\})")
_ELEMENTS = re.compile(r"\$\{(\w+)\[[@*]\]\}")
_REDIRECTED = re.compile(r"^\d?>")
_UV = re.compile(r"^(?:\w+=\()?uv$")  # also at the beginning of an array
_NOT_TASKS = re.compile(r"^(?:\w+/)*(?:python3?|bash|sh|torchrun|accelerate|deepspeed|launch|ray|job|submit)$")
# Commands that configure nothing of a training, at the beginning of a line.
_OTHERS = frozenset(
    ("apt", "apt-get", "cd", "conda", "curl", "docker", "echo", "git", "gpg", "hf", "huggingface-cli", "mkdir")
    + ("modelscope", "nvidia-smi", "pip", "sky", "sudo", "systemctl", "wget")
)
_OTHER_TASKS = re.compile(r"(?:swift|megatron) (?:app|deploy|eval|export|infer|merge-lora|rollout|sample|web-ui)")
# Calls in Python whose keywords are no arguments of a training.
_OTHER_CALLS = ("basicConfig", "GenerationConfig", "ProcessorConfig")
# Flags of launchers, which stand before the program, take one value or none; all other flags take what follows them.
_PROGRAM = re.compile(
    r"\.py$|^[A-Za-z_]\w*(?:\.\w+)+$"
    r"|^(?:trl|llamafactory-cli|areal|megatron|swift|rlhf|pt|sft|grpo|dpo|kto|reward|rloo|train)$"
)


@dataclass
class Given:
    """What a neighbour's file or command line says."""

    values: dict[str, Any] = field(default_factory=dict)  # dotted key -> value
    program: list[str] = field(default_factory=list)  # words that name what is run, such as ``trl`` and ``grpo``
    twice: dict[str, Any] = field(default_factory=dict)  # key -> the value that a later one replaced
    unresolved: dict[str, str] = field(default_factory=dict)  # key -> the shell variable that its value needs
    several: dict[str, list[str]] = field(default_factory=dict)  # shell variable -> all values that the text gives it
    environment: dict[str, str] = field(default_factory=dict)  # the variables of a shell text

    def put(self, key: str, value: Any) -> None:
        if key in self.values and self.values[key] != value:
            self.twice[key] = self.values[key]
        self.values[key] = value


def read_given(words: list[str], known: Mapping[str, str]) -> Given:
    """Reads a file (YAML, JSON, a shell script, a Python script of TRL) if there is one of that name, else the words.

    Args:
        words: of the command line of the tool: a file with overrides behind it, or a command line of the neighbour.
        known: values of shell variables, over those of the text.

    Raises:
        InputError: a file that cannot be read, or a text without any key.
    """
    path = Path(words[0])
    if not os.path.isfile(path):  # also of a command line, which is too long for a path
        if len(words) == 1 and re.search(r"\.(ya?ml|json|sh|py)$", words[0]) and " " not in words[0]:
            raise InputError(f"{words[0]} is no file: correct the path")
        text = words[0] if len(words) == 1 else "\n".join(_quoted(word) + " \\" for word in words)
        return _from_shell(text, known)
    text = _text(path)
    if path.suffix in (".yaml", ".yml", ".json"):
        given = _from_yaml(text, path)
    elif path.suffix == ".py":
        given = _from_python(text, path, known)
    else:
        given = _from_shell(text, known)
    if words[1:]:
        later = _from_shell("\n".join(_quoted(word) + " \\" for word in words[1:]), known)
        for key, value in later.values.items():
            given.put(key, value)
        given.unresolved.update(later.unresolved)
    return given


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\"'\"'") + "'"


def _text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read ({error}): give a text file") from error
    if len(text) > MAX_CHARACTERS:
        raise InputError(f"{path} has more than {MAX_CHARACTERS} characters: give the configuration only")
    return text


def _from_yaml(text: str, path: Path) -> Given:
    try:
        tree = parse_yaml(text)
    except ValueError as error:
        raise InputError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(tree, dict) or not tree:
        raise InputError(f"{path} holds no keys: give a configuration file of the other trainer")
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except (OmegaConfBaseException, RecursionError, ValueError, TypeError):
        resolved = tree  # what cannot be resolved is reported key by key
    given = Given(dict(_flat(resolved, "")))
    for key, value in given.values.items():
        if isinstance(value, str) and "${" in value and "${oc.env:" not in value:
            given.unresolved[key] = value
    return given


def _flat(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _from_shell(text: str, known: Mapping[str, str]) -> Given:
    lines = shell_lines(text)
    values, listed = variables(lines) | dict(known), arrays(lines)
    given = Given(environment=values)
    for name, found in set_several_times(lines).items():
        others = {other: value for other, value in values.items() if other != name}  # ``A=${A:-1}`` is 1 at first
        told = list(dict.fromkeys(expanded(value, others) for value in found))
        if len(told) > 1 and name not in known and not any(UNKNOWN in value for value in told):
            given.several[name] = told
    for line in lines:
        words = [part for word in line for part in _elements(word, listed, values)]
        if words:
            _read_line(_command([part for word in words for part in _parts(word, values)]), given)
    if not given.values:
        raise InputError(
            f"{shortened(text.strip())!r} holds no keys: give a configuration file, a script or a whole command line"
        )
    return given


def _elements(word: str, listed: Mapping[str, list[str]], values: Mapping[str, str]) -> list[str]:
    """The word, or what is in an array; nothing of one that holds keys, which are read where they stand."""
    found = _ELEMENTS.fullmatch(word)
    if found is None or found[1] in values:
        return [word]
    inner = listed.get(found[1], [])
    return [] if any(_HYDRA.match(part) or _FLAG.match(part) for part in inner) else inner


def _parts(word: str, values: Mapping[str, str]) -> list[str]:
    """The word with its variables; one that is a variable of several keys, as in ``$ACTOR $ROLLOUT``, is those."""
    text = expanded(word, values)
    parts = text.split()
    if len(parts) > 1 and _REFERENCE.fullmatch(word) and any(_HYDRA.match(part) or _FLAG.match(part) for part in parts):
        return [_QUOTED.sub(r"\1\3", part).strip("'\"") for part in parts if part != "\\"]
    return [text]


def _command(words: list[str]) -> list[str]:
    """Without the flags of ``uv run`` and Ray, which are no keys; nothing of a command that starts no training."""
    if any(_OTHER_TASKS.fullmatch(f"{first} {second}") for first, second in pairwise(words)):
        return []
    if words[0] in _OTHERS or words[:2] in (["ray", "start"], ["ray", "stop"]):
        return []
    if words[:3] == ["ray", "job", "submit"] and "--" in words:
        words = words[words.index("--") + 1 :]
    start = next(
        (place for place, pair in enumerate(pairwise(words)) if _UV.search(pair[0]) and pair[1] == "run"), None
    )
    if start is None:
        return words
    rest = words[start:]
    begins = (place for place, word in enumerate(rest) if _NOT_TASKS.match(word.rstrip(")")) or _PROGRAM.search(word))
    return words[:start] + rest[next(begins, len(rest)) :]


def _read_line(words: list[str], given: Given) -> None:
    """Adds the keys of one command."""
    position, is_program = 0, False
    while position < len(words):
        word = words[position]
        position += 1
        if found := _FLAG.match(word):
            taken = [] if found[2] is None else [found[2]]
            while found[2] is None and position < len(words) and _is_value(words[position]):
                taken.append(words[position])
                position += 1
            key = found[1].replace("-", "_")
            # A program is no value of the flag of a launcher that stands before it.
            while len(taken) > 1 and any(_PROGRAM.search(part) for part in taken[1:]) and not is_program:
                given.program.append(taken.pop())
                is_program = not any(_PROGRAM.search(part) for part in taken[1:])
            _put(given, key, taken)
        elif (found := _HYDRA.match(word)) or (is_program and (found := _TOP.match(word))):
            _put(given, found[1], [found[2]])
        elif not _NOT_TASKS.match(word) and _PROGRAM.search(word) and "=" not in word:
            given.program.append(word)
            is_program = True


def _is_value(word: str) -> bool:
    return (
        not _FLAG.match(word)
        and not _HYDRA.match(word)
        and word not in (")", "--", "\\")
        and not _REDIRECTED.match(word)
    )


def _put(given: Given, key: str, texts: list[str]) -> None:
    for text in texts:
        if UNKNOWN in text:
            given.unresolved[key] = ", ".join(unknown_names(text))
    values = [_parsed(text) for text in texts]
    if not values and key.startswith("no_"):
        given.put(key.removeprefix("no_"), False)
    else:
        given.put(key, values if len(values) > 1 else values[0] if values else True)


def _parsed(text: str) -> Any:
    if text in ("None", "none", ""):
        return None if text == "None" or not text else text
    try:
        return parse_yaml(text)
    except ValueError:
        return text


def _from_python(text: str, path: Path, known: Mapping[str, str]) -> Given:
    """The constant keywords of calls such as ``GRPOConfig(learning_rate=1e-6)``; nothing is run.

    Args:
        known: values of variables and other expressions, over those that the text assigns constants to.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InputError(f"{path} is no Python program ({error}): correct it") from error
    values = _constants(tree) | {name: _parsed(value) for name, value in known.items()}
    given = Given()
    for node in ast.walk(tree):
        name = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
        if (
            not isinstance(node, ast.Call)
            or not re.search(r"(Config|Arguments|Trainer)$", name)
            or name in _OTHER_CALLS
        ):
            continue
        given.program.append(name)
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in ("args", "processing_class", "peft_config"):
                continue
            said = ast.unparse(keyword.value)
            if keyword.arg == "reward_funcs" and isinstance(keyword.value, ast.List | ast.Name) and said not in values:
                functions = keyword.value.elts if isinstance(keyword.value, ast.List) else [keyword.value]
                given.put(keyword.arg, [ast.unparse(function) for function in functions])
                continue
            try:
                given.put(keyword.arg, values[said] if said in values else ast.literal_eval(keyword.value))
            except ValueError:
                given.put(keyword.arg, said)
                given.unresolved[keyword.arg] = said
    _read_later(tree, given)
    if not given.values:
        raise InputError(f"{path} calls no ...Config(...) with keywords: give the arguments as a file or command line")
    return given


def _read_later(tree: ast.Module, given: Given) -> None:
    """Constants that a program gives to parsed arguments, as ``training_args.max_length = None``."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        target = node.targets[0]
        if isinstance(target.value, ast.Name) and target.value.id == "training_args":
            try:
                given.put(target.attr, ast.literal_eval(node.value))
            except ValueError:
                continue


def _constants(tree: ast.Module) -> dict[str, Any]:
    """Names that the top of a program gives one constant value."""
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            is_constant = isinstance(node.value, ast.Constant) and name not in found
            found[name] = node.value.value if is_constant and isinstance(node.value, ast.Constant) else node
    return {name: value for name, value in found.items() if not isinstance(value, ast.AST)}
