"""Setting a platform's environment variables: a user's own value wins, and what was done can be shown and undone."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from mega_rl.platform.contract.base import Setting


@dataclass(frozen=True)
class Applied:
    """One variable as it stands now."""

    setting: Setting
    value: str
    is_users: bool


def apply(settings: Sequence[Setting], environ: MutableMapping[str, str]) -> list[Applied]:
    """Set what is not set yet."""
    applied = []
    for setting in settings:
        own = environ.get(setting.variable)
        applied.append(Applied(setting, setting.value if own is None else own, own is not None))
        environ.setdefault(setting.variable, setting.value)
    return applied


def revert(applied: Sequence[Applied], environ: MutableMapping[str, str]) -> None:
    """Take back what ``apply`` set."""
    for item in applied:
        if not item.is_users:
            environ.pop(item.setting.variable, None)


def table(applied: Sequence[Applied]) -> list[str]:
    """A line for each variable: its name and value, whose value it is, and why it is set."""
    if not applied:
        return []
    names = max(len(item.setting.variable) for item in applied)
    values = max(len(item.value) for item in applied)
    return [
        f"  {item.setting.variable:<{names}}  {item.value:<{values}}  {'yours' if item.is_users else 'default':<7}  "
        f"{item.setting.why}"
        for item in applied
    ]
