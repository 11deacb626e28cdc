"""The published sets that can be prepared, and preparing one: read, convert, compare the two splits, count."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from mega_rl.data.rows.rows import write_jsonl, write_parquet
from mega_rl.data.sets.conversations import alpaca, sharegpt
from mega_rl.data.sets.counting import KeptRows, Make, RowCounts, collect, digest
from mega_rl.data.sets.files import TRAIN, VALIDATION, files_of_splits, rows_of
from mega_rl.data.sets.geometry import geo3k
from mega_rl.data.sets.preferences import kto, pair
from mega_rl.data.sets.problems import aime, dapo, gsm8k, hendrycks_math
from mega_rl.data.sets.retool import retool
from mega_rl.errors import InputError

OVERLAP = "its problem is in the validation data too"
HELD_OUT = 0.02  # of the problems, and at most MOST_HELD_OUT, where a set has no validation data
MOST_HELD_OUT = 500
_PROMPT = {"prompt", "question", "instruction", "input", "history", "system", "conversations", "messages"}


@dataclass(frozen=True)
class DataSet:
    """A published set, or a form in which many are published."""

    about: str  # what it is, and where its files come from
    make: Make
    columns: frozenset[str]  # those that are read
    kind: Literal["problems", "rows"] = "rows"  # problems have a published test; rows are parted by a seed
    validation: DataSet | None = None  # if the validation data is another set
    skip: re.Pattern[str] | None = None  # names of files that belong to another use of the set
    one_per_file: bool = False  # its .json files hold one row each


SETS: dict[str, DataSet] = {
    "gsm8k": DataSet(
        "GSM8K: grade-school mathematics, 7,473 and 1,319 problems. From openai/gsm8k on Hugging Face (directory "
        "main), or train.jsonl and test.jsonl of github.com/openai/grade-school-math.",
        gsm8k,
        frozenset({"question", "answer"}),
        "problems",
    ),
    "dapo": DataSet(
        "DAPO-Math-17k: competition mathematics with whole numbers as answers; the published file has every problem "
        "about 100 times. From BytedTsinghua-SIA/DAPO-Math-17k on Hugging Face, with BytedTsinghua-SIA/AIME-2024 (or "
        "HuggingFaceH4/aime_2024) as --validation.",
        dapo,
        frozenset({"prompt", "reward_model", "data_source", "ability", "extra_info"}),
        "problems",
        validation=DataSet(
            "AIME-2024: 30 problems of a competition, in DAPO's columns or with problem and answer.",
            aime,
            frozenset({"prompt", "reward_model", "data_source", "ability", "extra_info"})
            | {name for column in ("problem", "answer") for name in (column, column.title())},
        ),
    ),
    "math": DataSet(
        "MATH (Hendrycks et al.): competition mathematics, 7,500 and 5,000 problems; the answer is in the last "
        r"\boxed{} of the solution. From the directories MATH/train and MATH/test with one .json file per problem, or "
        "any parquet or .jsonl copy with problem and solution, such as EleutherAI/hendrycks_math on Hugging Face; "
        "MATH-500 as --validation.",
        hendrycks_math,
        frozenset({"problem", "solution", "answer", "level", "type", "subject"}),
        "problems",
        one_per_file=True,
    ),
    "geo3k": DataSet(
        "Geometry3K: problems of plane geometry with a drawing each, 2,101 for training, 300 and 601 held out. From "
        "hiyouga/geometry3k on Hugging Face (directory data); its test alone as --validation for verl's split.",
        geo3k,
        frozenset({"images", "problem", "answer"}),
        "problems",
    ),
    "alpaca": DataSet(
        "Instructions with responses, in the columns of Stanford's alpaca: tatsu-lab/alpaca or yahma/alpaca-cleaned on "
        "Hugging Face, and LLaMA-Factory's alpaca-like files. For supervised training.",
        alpaca,
        frozenset({"instruction", "input", "output", "system", "history"}),
    ),
    "sharegpt": DataSet(
        "Conversations in ShareGPT's or OpenAI's form: LLaMA-Factory's sharegpt-like files, "
        "HuggingFaceH4/ultrachat_200k (its files of split sft). For supervised training.",
        sharegpt,
        frozenset({"conversations", "messages", "system"}),
        skip=re.compile(r"_gen\b"),
    ),
    "retool": DataSet(
        "ReTool-SFT: 2,000 solutions that run code, JoeYing/ReTool-SFT on Hugging Face. What stands in <code> and "
        "<interpreter> there becomes calls of a tool and its answers. For supervised training.",
        retool,
        frozenset({"messages"}),
    ),
    "pairs": DataSet(
        "Pairs of a better and a worse response: TRL's forms with and without a prompt, LLaMA-Factory's, "
        "HuggingFaceH4/ultrafeedback_binarized (its files of splits prefs), Anthropic/hh-rlhf (unpacked). For DPO and "
        "reward models.",
        pair,
        frozenset({"chosen", "rejected", "margin", *_PROMPT}),
        skip=re.compile(r"_(sft|gen)\b"),
    ),
    "kto": DataSet(
        "Single responses that are good or bad: TRL's prompt, completion and label (trl-lib/kto-mix-14k on Hugging "
        "Face), LLaMA-Factory's conversations with a label. For KTO.",
        kto,
        frozenset({"completion", "label", "kto_tag", *_PROMPT}),
    ),
}


@dataclass(frozen=True)
class Prepared:
    """What is written, and what is said of it."""

    files: dict[str, list[dict[str, Any]]]  # name -> its rows
    lines: list[str]


def prepare(
    name: str,
    sources: Sequence[Path],
    validation: Sequence[Path] = (),
    *,
    num_validation: int | None = None,
    seed: int = 0,
    refuse_overlap: bool = False,
) -> Prepared:
    """Reads a set and makes its rows; nothing is written.

    Args:
        name: a key of ``SETS``.
        sources: files and directories; ``validation`` as well, if its data stands apart.
        num_validation: problems to hold out where a set has no validation data; 0: none; None: 2 %, at most 500.
        seed: of that choice, which does not depend on the order of the rows.
        refuse_overlap: a problem in both splits is an error; otherwise it is taken out of the training data.

    Raises:
        InputError: files that are not there or not of this set, no row left, an overlap that is refused.
    """
    data_set = SETS[name]
    files, skipped = files_of_splits(sources, validation, data_set.skip)
    counts: dict[str, RowCounts] = {}
    kept: dict[str, list[KeptRows]] = {TRAIN: [], VALIDATION: []}
    options = {TRAIN: "--source", VALIDATION: "--validation" if validation else "--source"}
    for split, of in ((TRAIN, data_set), (VALIDATION, data_set.validation or data_set)):
        if files[split]:
            rows = rows_of(files[split], options[split], of.one_per_file)
            kept[split], counts[split] = collect(rows, of.make, of.columns)
            _need_some(options[split], files[split], kept[split], counts[split])
    held_out = ""
    if files[VALIDATION]:
        _part(kept, counts[TRAIN], refuse_overlap)
        _need_some("--source", files[TRAIN], kept[TRAIN], counts[TRAIN])
    elif data_set.kind == "rows" or num_validation:
        held_out = _hold_out(kept, num_validation, seed)
    lines = [f"not read, since they are for something else: {', '.join(map(str, skipped))}"] if skipped else []
    for split, of_split in counts.items():
        read = f"{split}: {of_split.num_read:,} rows read, {of_split.num_read - of_split.num_dropped:,} kept"
        lines += [read, *(f"  {line}" for line in of_split.lines())]
        if of_split.unused:
            lines.append(f"  columns that are not used: {', '.join(sorted(of_split.unused))}")
    return Prepared(_files(data_set, kept), [*lines, held_out] if held_out else lines)


def _need_some(option: str, files: Sequence[Path], kept: Sequence[KeptRows], counts: RowCounts) -> None:
    if not kept:
        reasons = "; ".join(counts.lines())
        raise InputError(f"{option}: of {counts.num_read:,} rows in {len(files)} files none is left ({reasons})")


def _part(kept: dict[str, list[KeptRows]], counts: RowCounts, refuse: bool) -> None:
    """Takes problems of the validation data out of the training data."""
    held = {digest(one.record.problem) for one in kept[VALIDATION]}
    both = [one for one in kept[TRAIN] if digest(one.record.problem) in held]
    if both and refuse:
        raise InputError(
            f"{len(both):,} rows of the training data have a problem that is in the validation data too, the first is "
            f"{both[0].where}: correct the files, or leave out --refuse-overlap to take them out of the training data"
        )
    for one in both:
        counts.drop(OVERLAP, one.where)
    kept[TRAIN] = [one for one in kept[TRAIN] if digest(one.record.problem) not in held]


def _hold_out(kept: dict[str, list[KeptRows]], wanted: int | None, seed: int) -> str:
    """Moves problems, with all of their rows, to the validation data; returns a line that says so."""
    problems = sorted({digest(one.record.problem) for one in kept[TRAIN]})
    number = min(MOST_HELD_OUT, int(HELD_OUT * len(problems))) if wanted is None else wanted
    if number >= len(problems):
        raise InputError(f"--val-rows is {number}, but there are {len(problems)} different problems: give fewer")
    chosen = set(sorted(problems, key=lambda problem: digest(str(seed), problem.hex()))[:number])
    kept[VALIDATION] = [one for one in kept[TRAIN] if digest(one.record.problem) in chosen]
    kept[TRAIN] = [one for one in kept[TRAIN] if digest(one.record.problem) not in chosen]
    return (
        f"validation: {len(kept[VALIDATION]):,} of the kept rows held out, {number:,} of {len(problems):,} problems "
        f"(seed {seed})"
    )


def _files(data_set: DataSet, kept: dict[str, list[KeptRows]]) -> dict[str, list[dict[str, Any]]]:
    if data_set.kind == "rows":
        names = {TRAIN: "train.jsonl", VALIDATION: "val.jsonl"}
        return {names[split]: [one.record.fields for one in rows] for split, rows in kept.items() if rows}
    return {
        f"{name}.parquet": [_numbered(one.record.fields, name, place) for place, one in enumerate(kept[split])]
        for split, name in ((TRAIN, "train"), (VALIDATION, "test"))
        if kept[split]
    }


def _numbered(fields: dict[str, Any], split: str, place: int) -> dict[str, Any]:
    return {**fields, "extra_info": {"split": split, "index": place, **fields["extra_info"]}}


def write(prepared: Prepared, out: Path) -> list[Path]:
    """Writes every file, each whole or not at all."""
    writers: dict[str, Callable[[Path, list[dict[str, Any]]], None]] = {
        ".jsonl": write_jsonl,
        ".parquet": write_parquet,
    }
    for name, rows in prepared.files.items():
        writers[Path(name).suffix](out / name, rows)
    return [out / name for name in prepared.files]
