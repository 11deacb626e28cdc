"""Makes the data files that training reads.

``gsm8k`` turns a copy of the GSM8K JSONL files (train.jsonl and test.jsonl with ``question`` and ``answer``) into
train.parquet and test.parquet with the fields data_source, prompt, ability, reward_model and extra_info.

``arithmetic`` makes up additions: train.jsonl and val.jsonl (``07+25=`` and ``32``, operand pairs of val held out of
train in either order) and sft.jsonl, supervised responses over the train pairs. These hold the right sum in several
styles, and only --plain-fraction of them in the plain one that counts as an answer, so that a model warmed up on them
has something to learn by reinforcement. pairs.jsonl and pairs_val.jsonl have a plain right answer and a worse one;
texts.jsonl and texts_val.jsonl are documents of sums.

Every file appears whole or not at all.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

from mega_rl.data.rows import Row, read_rows, write_jsonl, write_parquet
from mega_rl.data.synthetic import ArithmeticSpec, arithmetic_data
from mega_rl.errors import InputError

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def gsm8k_record(row: Row, split: str, index: int) -> dict[str, Any]:
    """One prompt row; the ground truth is what stands after the solution's last ``####``, without commas."""
    question, answer = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str):
        raise row.missing("`question` and `answer`, both text")
    _, marker, truth = answer.rpartition("####")
    if not marker or not truth.strip():
        raise InputError(f"{row.where}: the answer does not end with '#### <number>'; fix that row")
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{question} {GSM8K_INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth.strip().replace(",", "")},
        "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
    }


def prepare_gsm8k(source: Path, out: Path) -> list[Path]:
    """Writes both parquet files of ``source`` into ``out``; both are read before the first is written."""
    splits = {split: read_rows([str(source / f"{split}.jsonl")], "--source") for split in ("train", "test")}
    records = {
        split: [gsm8k_record(row, split, index) for index, row in enumerate(rows)] for split, rows in splits.items()
    }
    for split, table in records.items():
        write_parquet(out / f"{split}.parquet", table)
    return [out / f"{split}.parquet" for split in records]


def prepare_arithmetic(out: Path, spec: ArithmeticSpec) -> list[Path]:
    """Writes a file for every table of ``ArithmeticData`` into ``out``."""
    data = arithmetic_data(spec)
    tables = {field.name: getattr(data, field.name) for field in fields(data)}
    for name, records in tables.items():
        write_jsonl(out / f"{name}.jsonl", records)
    return [out / f"{name}.jsonl" for name in tables]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    gsm8k = commands.add_parser("gsm8k", help="GSM8K JSONL files to parquet")
    gsm8k.add_argument("--source", type=Path, required=True, help="directory with train.jsonl and test.jsonl")
    gsm8k.add_argument("--out", type=Path, required=True, help="directory to write to")
    arithmetic = commands.add_parser("arithmetic", help="additions, answered in several styles in the supervised part")
    arithmetic.add_argument("--out", type=Path, required=True, help="directory to write to")
    for field in fields(ArithmeticSpec):
        arithmetic.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=float if field.name == "plain_fraction" else int,
            default=field.default,
            help=f"default {field.default}",
        )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        if arguments.command == "gsm8k":
            written = prepare_gsm8k(arguments.source, arguments.out)
        else:
            spec = ArithmeticSpec(**{field.name: getattr(arguments, field.name) for field in fields(ArithmeticSpec)})
            written = prepare_arithmetic(arguments.out, spec)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --out {arguments.out} cannot be written ({error}); choose another directory", file=sys.stderr)
        return 2
    print("wrote " + ", ".join(map(str, written)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
