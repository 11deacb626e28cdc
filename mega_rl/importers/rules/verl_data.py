"""Data sets of verl, the rewards of their rows, and how many of these are read."""

from __future__ import annotations

from typing import Any

from mega_rl.importers.draft.data_sets import CODE, DAPO, GEOMETRY, GSM8K, KnownData, add_rewards, limit_rows
from mega_rl.importers.draft.draft import Draft

# As the function that chooses verl's reward by data_source has it. Of geometry a tenth is for the form.
_THOUGHT = r"\A<think>.*</think>.*\\boxed\{.*\}"
_GEOMETRY = (
    {"name": "boxed", "weight": 0.9},
    {"name": "format_regex", "weight": 0.1, "options": {"pattern": _THOUGHT}},
)
_MATH = ("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "hendrycks_math")
KNOWN = (
    KnownData("gsm8k", GSM8K, ({"name": "gsm8k"},)),
    KnownData("geo3k", GEOMETRY, _GEOMETRY),
    KnownData("geometry3k", GEOMETRY, _GEOMETRY),
    KnownData("dapo", DAPO, ({"name": "dapo_math"},)),
    KnownData("aime", DAPO, ({"name": "dapo_math"},)),
    KnownData("math", _MATH, ({"name": "boxed"},)),
    KnownData("code", CODE, ({"name": "code_tests"},)),
)


def rows(draft: Draft) -> None:
    """Theirs counts the rows of all files together, and draws them at random if it shuffles."""
    key = "data.train_max_samples"
    limit_rows(draft, key, is_each=False)
    if (
        draft.has(key)
        and draft.outcomes[key].became == "mapped"
        and draft.get("data.shuffle", default=draft.stage == "rl")
    ):
        draft.notes.append("data.train_files: the first rows here, as many as theirs, which are drawn at random")


def rewards(draft: Draft) -> None:
    keys = [key for key in draft.given.values if (entry := draft.table.find(key)) and entry.reason == "reward"]
    if draft.stage != "rl":
        return
    values: dict[str, Any] = {key.removeprefix("reward."): draft.get(key) for key in keys}
    custom = "custom_reward_function."
    path, name = values.get(f"{custom}path"), values.get(f"{custom}name") or "compute_score"
    options = {
        key.rpartition(".")[2]: value for key, value in values.items() if ".reward_kwargs." in key and custom in key
    }
    if path:
        draft.rewards.append({"name": f"{path}:{name}"} | ({"options": options} if options else {}))
    elif not draft.rewards:
        add_rewards(draft, [draft.get("data.train_files")], [draft.get("data.val_files")], KNOWN)
        if not draft.rewards and draft.get("reward_model.reward_manager") == "dapo":
            add_rewards(draft, ["dapo"], known=KNOWN)
    buffer = {key.rpartition(".")[2]: value for key, value in values.items() if "overlong_buffer" in key}
    if buffer.get("enable"):
        longest = values.get("reward_model.reward_kwargs.max_resp_len") or draft.count("data.max_response_length")
        found = {
            "max_length": longest,
            "buffer": buffer.get("len"),
            "factor": float(buffer.get("penalty_factor") or 1.0),
        }
        draft.rewards.append({"name": "overlong", "options": found})
    text = f"rewards: {', '.join(entry['name'] for entry in draft.rewards)}" if draft.rewards else "rewards: none found"
    for key in keys:
        is_used = draft.rewards and (buffer.get("enable") or "overlong" not in key)
        draft.note(key, "mapped" if is_used else "same", text if is_used else "off, as here")
