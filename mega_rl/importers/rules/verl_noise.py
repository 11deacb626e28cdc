"""Noise on the rollout policy, as verl's guide for Ascend writes it."""

from __future__ import annotations

from typing import get_args

from mega_rl.config.reading.tables import table
from mega_rl.config.schema.sampling import NormRole
from mega_rl.importers.draft.draft import Draft
from mega_rl.importers.draft.units import as_list

SECTION = "trainer.noise_injection"


def noise(draft: Draft) -> None:
    """Which norms get it; and a note on the schedule, of which the guide's words and the default here differ."""
    targets, excluded = table("verl").find_rule("noise")
    roles = get_args(NormRole)
    if draft.has(targets):
        chosen = as_list(draft.get(targets))
        known = [role for role in chosen if role in roles]
        draft.set("aqn.target_modules", known, [targets])
        if known != chosen:
            draft.lack([targets], "noise_options", f"no norm is called {', '.join(map(str, set(chosen) - set(known)))}")
    if draft.has(excluded):
        patterns = as_list(draft.get(excluded))
        draft.set("aqn.exclude_patterns", [text for text in patterns if "norm" in str(text)], [excluded])
    if draft.get(f"{SECTION}.enabled") and not draft.has(f"{SECTION}.schedule"):
        draft.notes.append(
            "aqn.schedule: exponential with a first stage without noise, as QeRL's code has it; the guide for Ascend "
            "says in words that sigma falls linearly: set linear if that is meant"
        )
