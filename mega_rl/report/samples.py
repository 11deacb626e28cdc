"""Sampled answers, token by token, in the colour of how probable each token was to the policy that sampled it."""

from __future__ import annotations

import base64
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

Decode = Callable[[Sequence[int]], str]  # token ids -> their text
# Row of the data, digests of its pictures -> of the first ones the JPEG file, or why there is none.
Thumbnails = Callable[[int, Sequence[str]], Sequence[bytes | str]]

MAX_TOKENS = 2000  # of one sample
MAX_PROMPT_CHARACTERS = 4000
BOUNDS = (0.01, 0.1, 0.5, 0.9)  # between the classes p0 (least probable) .. p4
CLASS_NAMES = ("under 1 %", "to 10 %", "to 50 %", "to 90 %", "above")


def spread(rows: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """So many samples, low rewards and high ones alike, from the lowest to the highest; unknown ones stand first.

    Each reward that occurs has about as many samples as every other, as far as there are so many.
    """
    by_reward: dict[float, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_reward.setdefault(-math.inf if row["reward"] is None else row["reward"], []).append(row)
    rewards = sorted(by_reward)
    if len(rewards) > count > 1:
        rewards = [rewards[position * (len(rewards) - 1) // (count - 1)] for position in range(count)]
    turns = max((len(by_reward[reward]) for reward in rewards), default=0)
    in_turn = [reward for turn in range(turns) for reward in rewards if turn < len(by_reward[reward])]
    counts = sorted(Counter(in_turn[:count]).items())
    return [by_reward[reward][i * len(by_reward[reward]) // number] for reward, number in counts for i in range(number)]


def pieces(ids: Sequence[int], decode: Decode) -> list[tuple[str, int]]:
    """The text of the tokens, cut where tokens end: (text, number of tokens); more than one where a character needs it.

    A token is decoded behind the one before it, for its text may depend on it (a leading space).
    """
    found: list[tuple[str, int]] = []
    start = 0
    while start < len(ids):
        before = ids[max(0, start - 1) : start]
        offset = len(decode(before)) if before else 0
        for end in range(start + 1, min(start + 8, len(ids)) + 1):  # a character has at most four bytes
            text = decode([*before, *ids[start:end]])[offset:]
            if not text.endswith("\ufffd"):
                break
        found.append((text, end - start))
        start = end
    return found


def probability_class(logprob: float) -> int:
    return bisect_right(BOUNDS, math.exp(min(0.0, logprob)))


def tokens(row: Mapping[str, Any], decode: Decode | None) -> str:
    """The response with a coloured mark around every sampled token."""
    ids, logprobs, sampled = row["token_ids"][:MAX_TOKENS], row["logprobs"], row["sampled"]
    if decode is None:
        return escape(row["text"][: MAX_TOKENS * 8])
    parts, position = [], 0
    for text, length in pieces(ids, decode):
        here = range(position, position + length)
        known = [logprobs[index] for index in here if sampled[index] and logprobs[index] is not None]
        shown = escape(text).replace("\n", "⏎\n")
        if known:
            total = sum(known)
            title = f"probability {math.exp(min(0.0, total)):.3g}, log-probability {total:.3g}, token {here[0] + 1}"
            parts.append(f'<span class="p{probability_class(total)}" title="{title}">{shown}</span>')
        else:
            parts.append(f'<span class="given" title="not sampled">{shown}</span>')
        position += length
    if len(row["token_ids"]) > MAX_TOKENS:
        parts.append(f'<i class="note"> ... {len(row["token_ids"]) - MAX_TOKENS} more tokens</i>')
    return "".join(parts)


def conversation(row: Mapping[str, Any], decode: Decode | None) -> str:
    """What followed the prompt: a response, or the turns of an episode, each with who wrote it."""
    if not row["turns"] or decode is None:
        return f'<pre class="response">{tokens(row, decode)}</pre>'
    parts = []
    for role, start, stop in row["turns"]:
        part = {key: row[key][start:stop] for key in ("token_ids", "logprobs", "sampled")}
        kind = "response" if any(part["sampled"]) else "reply"
        parts.append(f'<h5>{escape(role)}</h5><pre class="{kind}">{tokens({**row, **part}, decode)}</pre>')
    return "".join(parts)


def pictures(row: Mapping[str, Any], thumbnails: Thumbnails | None) -> str:
    """The pictures of the prompt, within the page itself."""
    if not row["pictures"]:
        return ""
    made = [] if thumbnails is None else thumbnails(row["index"], row["pictures"])
    shown = "".join(
        f'<i class="note">picture {number} is not shown: {escape(one)}</i>'
        if isinstance(one, str)
        else f'<img src="data:image/jpeg;base64,{base64.b64encode(one).decode()}" alt="picture {number}">'
        for number, one in enumerate(made, start=1)
    )
    left = len(row["pictures"]) - len(made)
    return f'<p class="pictures">{shown}{f"<i class=note> {left} more not shown</i>" if left else ""}</p>'


def card(row: Mapping[str, Any], decode: Decode | None, thumbnails: Thumbnails | None = None) -> str:
    """One sample with its prompt and its pictures, its reward and what the step made of it."""
    facts = [f"{len(row['token_ids'])} tokens", f"ended by {row['finish_reason']}"]
    facts += [f"advantage {row['advantage']:.3g}"] if row["advantage"] is not None else []
    facts += [f"|trainer - engine| {row['logprob_diff']:.1e} nats"] if row["logprob_diff"] is not None else []
    facts += [row["outcome"]] if row["outcome"] else []
    facts += [f"{len(row['turns'])} turns and replies, stopped by {row['stop']}"] if row["turns"] else []
    if len(row["parts"]) > 1:
        facts += [f"{name} {'unknown' if value is None else f'{value:.3g}'}" for name, value in row["parts"].items()]
    reward = "unknown" if row["reward"] is None else f"{row['reward']:.3g}"
    prompt = row["prompt"]
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        prompt = f"... {prompt[-MAX_PROMPT_CHARACTERS:]}"
    return (
        f'<article><header><b class="reward">reward {reward}</b> <span>{escape(" · ".join(facts))}</span></header>'
        f'{pictures(row, thumbnails)}<pre class="prompt">{escape(prompt)}</pre>{conversation(row, decode)}'
        f'<p class="note">expected <code>{escape(row["expected"][:MAX_PROMPT_CHARACTERS])}</code></p></article>'
    )


def legend() -> str:
    marks = "".join(f'<span class="p{number}">{escape(name)}</span> ' for number, name in enumerate(CLASS_NAMES))
    return f'<p class="scale">probability of a token: {marks}</p>'
