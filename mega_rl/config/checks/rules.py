"""The rule of every key, as the schema says it; conditions between keys stand in ``validate``.

Keys whose type says all (booleans, free text) have none; a test lists them.
"""

from __future__ import annotations

import typing
from typing import Annotated, Any, Literal

from mega_rl.config.reading.typed import is_nullable, leaves, not_null
from mega_rl.config.schema.limits import Rule, list_of, nullable, one_of


def rule_of_type(hint: Any) -> Rule | None:
    """The rule of a type that is annotated with one or has choices; None for any other type."""
    if typing.get_origin(hint) is Annotated:
        return next(part for part in typing.get_args(hint) if isinstance(part, Rule))
    if typing.get_origin(hint) is Literal:
        return one_of(*typing.get_args(hint))
    if is_nullable(hint):
        rule = rule_of_type(not_null(hint))
        return rule and nullable(rule)
    if typing.get_origin(hint) is list:
        rule = rule_of_type(*typing.get_args(hint))
        return rule and list_of(rule)
    return None


RULES = {name: rule for name, hint in leaves(has_rules=True) if (rule := rule_of_type(hint))}

# Beginnings of the keys that one stage reads alone: sections, and keys of sections that other stages read otherwise.
READ_BY = {
    "rl": (
        "rollout.", "environment.", "bridge.", "algorithm.", "critic.", "aqn.", "reward_workers.", "trainer.gates.",
        "validation.n", "validation.temperature",
    ),
    "dpo": ("preference.",),
    "kto": ("kto.",),
    "rm": ("reward_model.",),
}  # fmt: skip


def rules(stage: str | None = None) -> dict[str, Rule]:
    """Dotted key -> its rule, in the order of the schema, without the keys that only other stages read; None: all."""
    of_others = tuple(start for other, starts in READ_BY.items() if stage not in (None, other) for start in starts)
    return {name: rule for name, rule in RULES.items() if not name.startswith(of_others)}
