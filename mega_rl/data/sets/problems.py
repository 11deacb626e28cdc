"""Problems with a known answer, for reinforcement learning: GSM8K, DAPO-Math-17k with AIME-2024, and MATH."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mega_rl.data.rows.rows import Row
from mega_rl.data.sets.counting import Dropped, Record, fold
from mega_rl.data.sets.turns import EMPTY, turns_of
from mega_rl.data.tokens.tokenizer import Message
from mega_rl.rewards.functions.math import last_boxed

NO_ANSWER = "without answer"
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
# DAPO's problems come with these words around them; the reward dapo_math looks for the line that they ask for.
DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'


def gsm8k(row: Row) -> Record:
    """``question`` and ``answer``: the truth is what stands after the solution's last ``####``, without commas."""
    question, answer = texts(row, "question", "answer")
    _, marker, truth = answer.rpartition("####")
    truth = truth.strip().replace(",", "")
    return problem_record(
        "openai/gsm8k",
        turns_of(f"{question} {GSM8K_INSTRUCTION}"),
        truth if marker else "",
        {"question": question, "answer": answer},
        question,
    )


def hendrycks_math(row: Row) -> Record:
    r"""``problem`` and ``solution``, or ``answer`` if there is one: else the truth is in the last ``\boxed{}``."""
    problem = texts(row, "problem")[0]
    answer, solution = row.get("answer"), row.get("solution")
    if answer is None and solution is None:
        raise row.missing("`solution` or `answer`")
    truth = answer if isinstance(answer, str) else last_boxed(str(solution)) or ""
    more = {"level": str(row.get("level") or ""), "type": str(row.get("type") or row.get("subject") or "")}
    return problem_record("hendrycks_math", turns_of(f"{problem} {MATH_INSTRUCTION}"), truth, more, problem)


def dapo(row: Row) -> Record:
    """DAPO-Math-17k: ``prompt`` and ``reward_model.ground_truth``."""
    prompt, reward_model = row.get("prompt"), row.get("reward_model")
    if prompt is None or not isinstance(reward_model, Mapping):
        raise row.missing("`prompt` and `reward_model.ground_truth`, as DAPO-Math-17k has them")
    turns = turns_of(prompt)
    truth = reward_model.get("ground_truth")
    problem = turns[-1]["content"].removeprefix(DAPO_BEFORE).removesuffix(DAPO_AFTER)
    return problem_record("math_dapo", turns, "" if truth is None else str(truth), {}, problem)


def aime(row: Row) -> Record:
    """AIME-2024 in the columns of DAPO-Math-17k, or as ``problem`` and ``answer``, in either case of the letters."""
    if row.get("reward_model") is not None:
        record = dapo(row)
        return Record(record.fields | {"data_source": "aime_2024"}, record.problem, truth=record.truth)
    lower = Row(row.file, row.number, {name.lower(): value for name, value in row.fields.items()})
    if lower.get("problem") is None or lower.get("answer") is None:
        raise row.missing("`prompt` and `reward_model`, or `problem` and `answer`")
    problem, truth = str(lower.get("problem")), str(lower.get("answer"))
    return problem_record("aime_2024", turns_of(f"{DAPO_BEFORE}{problem}{DAPO_AFTER}"), truth, {}, problem)


def texts(row: Row, *names: str) -> list[str]:
    """The columns' texts; a row in which one is empty is dropped."""
    found = [row.get(name) for name in names]
    if any(not isinstance(text, str) for text in found):
        raise row.missing(" and ".join(f"`{name}`" for name in names) + ", text")
    if not all(str(text).strip() for text in found):
        raise Dropped(EMPTY)
    return [str(text) for text in found]


def problem_record(source: str, prompt: list[Message], truth: str, more: dict[str, Any], problem: str) -> Record:
    if not problem.strip():
        raise Dropped(EMPTY)
    if not truth.strip():
        raise Dropped(NO_ANSWER)
    fields = {
        "data_source": source,
        "prompt": prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth.strip()},
        "extra_info": more,
    }
    return Record(fields, fold(problem), truth=fold(truth))
