"""Applies a neighbour's table to what its file or command line says."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from mega_rl.config.checks.rules import RULES as RULES_OF_KEYS
from mega_rl.config.reading.tables import NEIGHBOURS, Entry, Table, reason, table
from mega_rl.config.reading.typed import is_nullable, leaf_names, leaves, not_null
from mega_rl.errors import shown
from mega_rl.importers.draft.defaults import NAMED, default_of, defaults
from mega_rl.importers.draft.draft import Draft, Rule
from mega_rl.importers.draft.reading import Given
from mega_rl.importers.draft.words import COMMAND, without_unknown
from mega_rl.importers.rules import areal, hf, hf_learned, mindspeed_rl, openrlhf, slime, swift, verl
from mega_rl.rollout.vllm.start.options import OWNED

PROGRAMS: dict[str, Callable[[Draft], str]] = {
    "verl": verl.program,
    "trl": hf_learned.trl_program,
    "llamafactory": hf_learned.llamafactory_program,
    "areal": areal.program,
    "openrlhf": openrlhf.program,
    "mindspeed_rl": mindspeed_rl.program,
    "slime": slime.program,
    "swift": swift.program,
}
RULES: dict[str, dict[str, Rule]] = {
    "verl": verl.RULES,
    "trl": hf.TRL_RULES,
    "llamafactory": hf.LLAMAFACTORY_RULES,
    "areal": areal.RULES,
    "openrlhf": openrlhf.RULES,
    "mindspeed_rl": mindspeed_rl.RULES,
    "slime": slime.RULES,
    "swift": swift.RULES,
}
assert RULES.keys() == PROGRAMS.keys() == NEIGHBOURS.keys()
NO_LIMIT = {"checkpoint.keep_checkpoints": 0, "data.max_val_samples": None}
NAMES = ("trainer.output_dir", "logging.")  # keys of ours that name a run and change nothing that it computes
FIRST = "stage"  # the rule that says what is run, on which the meaning of other keys depends


def _without_held_out(draft: Draft) -> None:
    """Theirs validate nothing where they are given no held-out data, whatever the frequency."""
    frequency = draft.result.get("validation.test_freq", -1)
    if frequency > 0 and not draft.result.get("data.val_files"):
        draft.result["validation.test_freq"] = -1
        draft.notes.append(f"validation.test_freq: -1 for {frequency}, as no held-out data is named (data.val_files)")


def convert(neighbour: str, given: Given, num_devices: int | None = None) -> Draft:
    """A configuration of ours, with the outcome of every key of theirs.

    Args:
        neighbour: a name in ``NEIGHBOURS``.
        num_devices: devices of the run, where their configuration does not say it.

    Raises:
        InputError: a value that cannot be read, or units that need the number of devices.
    """
    _rename(table(neighbour), given)
    draft = Draft(table(neighbour), given, num_devices)
    rules = RULES[neighbour]
    _resolve(draft)
    draft.defaults = defaults(neighbour, PROGRAMS[neighbour](draft), given.values)
    rules[FIRST](draft)
    entries = {key: draft.table.find(key) for key in given.values}
    for key in draft.defaults.keys() - entries.keys():
        _apply_default(draft, key, draft.table.entries[key])
    for key, entry in entries.items():
        if entry is not None and key not in given.unresolved and entry.kind != "rules":
            _apply(draft, key, entry)
    for name, rule in rules.items():
        if name != FIRST:
            rule(draft)
    if "trainer.total_steps" in draft.result and draft.result.pop("trainer.total_epochs", None) is not None:
        for key in ("trainer.total_epochs", "total_train_epochs"):
            draft.outcomes.pop(key, None)
            draft.note(key, "same", "not read, as the number of steps is given")
    _without_held_out(draft)
    for key in given.values:
        if entries[key] is None:
            draft.note(key, "unknown", "no key that the table knows: look it up and set it by hand")
        elif key not in draft.outcomes:
            draft.note(key, "same", "read together with the keys beside it, but changes nothing here")
    for name, told in given.several.items():
        text = ", ".join(shown(value) for value in told)
        draft.notes.append(f"{name}: the script sets it to {text}; the last counts, --set {name}=VALUE takes another")
    for key, value in given.twice.items():
        draft.notes.append(f"{key} is given twice, first as {shown(value)}: the last value counts")
    if draft.stage == "rl" and not draft.rewards:
        draft.notes.append("rewards: name at least one reward (docs/rewards.md); their configuration names none")
    elif draft.stage == "rl":
        draft.result["rewards"] = draft.rewards
    return draft


def _resolve(draft: Draft) -> None:
    """Keys whose values the text does not say: needless and refused ones need none, a name is what is left of it."""
    given = draft.given
    for key, cause in list(given.unresolved.items()):
        entry, value = draft.table.find(key), given.values[key]
        is_name = entry is not None and bool(entry.to) and all(ours.startswith(NAMES) for ours in entry.to)
        if entry is not None and entry.kind in ("same", "none"):
            draft.note(key, entry.kind, reason(entry))
        elif is_name and isinstance(value, str) and (rest := without_unknown(value)) not in ("", value):
            given.values[key] = rest
            del given.unresolved[key]
            draft.notes.append(f"{key}: {rest}, without {cause}, which the text does not say")
        elif cause == COMMAND:
            draft.note(
                key, "none", "what a command prints, which --set cannot say: write the key with a value behind the file"
            )
        else:
            text = f"its value needs {cause}, which the text does not set: give it with --set NAME=VALUE"
            draft.note(key, "none", text)


def _rename(theirs: Table, given: Given) -> None:
    """Earlier names become the present ones, which count before them."""
    values = given.values
    first = {theirs.renamed(key): value for key, value in values.items()}
    given.values = first | {key: value for key, value in values.items() if theirs.renamed(key) == key}
    given.unresolved = {theirs.renamed(key): cause for key, cause in given.unresolved.items()}


def _apply_default(draft: Draft, key: str, entry: Entry) -> None:
    """What holds there without being given is set here, unless it holds here too."""
    ours = next(iter(entry.to), "")
    value = _unlimited(ours, draft.defaults[key])
    if entry.kind != "set" or value is None or ours.startswith(NAMED) or ours in draft.result:
        return
    value = entry.words.get(value, value) if entry.words else value
    if value != default_of(ours):
        draft.set(ours, value)


def _apply(draft: Draft, key: str, entry: Entry) -> None:
    value = draft.get(key)
    if entry.kind == "same":
        draft.note(key, "same", reason(entry))
    elif entry.kind == "none":
        is_off = value is None or _is_among(value, entry.off) or _is_off(draft, key, entry, value)
        text = reason(entry)
        draft.note(key, "same" if is_off else "none", "as it is here" if is_off else text)
    elif entry.kind == "passed":
        ours = entry.to[0] + key.removeprefix(entry.pattern)
        _set_passed(draft, key, ours, value)
    elif entry.words:
        if isinstance(value, str) and value in entry.words:
            draft.set(entry.to[0], entry.words[value], [key])
        else:
            draft.lack([key], "other_word", f"{shown(value)}; there are {', '.join(map(str, entry.words))}")
    elif (value := _unlimited(entry.to[0], value)) is None:
        draft.note(key, "same", "not set, so that our default holds")
    elif is_number_key(entry.to[0]) and not is_number(value):
        draft.lack([key], "other_word", f"{shown(value)}, where a number is expected")
    elif is_number_key(entry.to[0]) and (rule := RULES_OF_KEYS.get(entry.to[0])) and not rule.holds(value):
        draft.lack([key], "other_word", f"{shown(value)}; {entry.to[0]} is {rule.expected}")
    else:
        is_list = entry.to[0] in ("data.train_files", "data.val_files", "rollout.stop", "rollout.stop_token_ids")
        draft.set(entry.to[0], [value] if is_list and not isinstance(value, list) else value, [key])


def _unlimited(ours: str, value: Any) -> Any:
    """The word of ours for a limit that is not there, which is null or -1 in theirs."""
    if ours in NO_LIMIT and (value is None or (is_number(value) and value < 0)):
        return NO_LIMIT[ours]
    return value


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@cache
def _number_keys() -> frozenset[str]:
    plain = ((name, not_null(hint) if is_nullable(hint) else hint) for name, hint in leaves())
    return frozenset(name for name, hint in plain if hint in (int, float))


def is_number_key(ours: str) -> bool:
    return ours in _number_keys()


def _is_among(value: Any, off: tuple[Any, ...]) -> bool:
    return any(value == wanted and isinstance(value, bool) == isinstance(wanted, bool) for wanted in off)


def _is_off(draft: Draft, key: str, entry: Entry, value: Any) -> bool:
    """False is off where their default is not true; an empty list or section is."""
    return value in ([], {}, "") or (value is False and True not in entry.off and draft.defaults.get(key) is not True)


def _set_passed(draft: Draft, key: str, ours: str, value: Any) -> None:
    if isinstance(value, dict):
        for name, inner in value.items():
            _set_passed(draft, key, f"{ours}.{name}", inner)
        if not value:
            draft.note(key, "same", "empty")
    elif value is None:
        draft.note(key, "same", "not set, so that our default holds")
    elif (name := ours.removeprefix("rollout.vllm.")) in OWNED:
        draft.lack([key], "engine_argument", OWNED[name] or "it has no key")
    else:
        draft.set(ours, value, [key])


def _parent(dotted: str) -> str:
    """The key with free content that a key of vLLM or of an option lies under."""
    return ".".join(dotted.split(".")[:2])


def as_tree(result: dict[str, Any]) -> dict[str, Any]:
    """The nested sections of dotted keys, in the order of the schema."""
    tree: dict[str, Any] = {}
    order = {name.partition("[]")[0]: place for place, name in reversed(list(enumerate(leaf_names())))}
    for dotted, value in sorted(result.items(), key=lambda item: order.get(item[0], order.get(_parent(item[0]), 0))):
        *sections, last = dotted.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return tree
