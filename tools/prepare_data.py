"""Makes the data files that training reads.

From files that you have, ``prepare_data.py SET --source FILES --out DIRECTORY`` makes rows that training takes:
``gsm8k``, ``dapo``, ``math`` and ``geo3k`` (with pictures) become train.parquet and test.parquet (prompts with a
ground truth), ``alpaca`` and ``sharegpt`` train.jsonl and val.jsonl (messages for supervised training), ``retool`` the
same files with calls of a tool, ``pairs`` and ``kto`` the same files (preferences). ``prepare_data.py SET --help`` says
where a set's files come from. Every row is kept, or dropped for a reason that is counted; docs/data.md has the forms
and the reasons.

``arithmetic`` makes up additions: train.jsonl and val.jsonl (``07+25=`` and ``32``, operand pairs of val held out of
train in either order) and sft.jsonl, supervised responses over the train pairs. These hold the right sum in several
styles, and only --plain-fraction of them in the plain one that counts as an answer, so that a model warmed up on them
has something to learn by reinforcement. pairs.jsonl and pairs_val.jsonl have a plain right answer and a worse one;
texts.jsonl and texts_val.jsonl are documents of sums.

``products`` makes up products of two numbers: train.jsonl and val.jsonl (``473*892=?`` and ``421916``) and sft.jsonl,
conversations of which only --call-fraction ask a calculator; the others end without an answer.

``shapes`` draws pictures of coloured shapes: train.jsonl and val.jsonl (``discs?<image>`` and ``3``, the picture as a
data URL) and sft.jsonl, whose responses have the right number in several styles, only --plain-fraction of them in the
one that counts as an answer.

Every file appears whole or not at all.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from mega_rl.data.rows.rows import write_jsonl
from mega_rl.data.sets.table import SETS, prepare, write
from mega_rl.errors import InputError
from mega_rl.synthetic.arithmetic import ArithmeticData, ArithmeticSpec, arithmetic_data
from mega_rl.synthetic.products import ProductsData, ProductsSpec, products_data
from mega_rl.synthetic.shapes import ShapesData, ShapesSpec, shapes_data


def prepare_arithmetic(out: Path, spec: ArithmeticSpec) -> list[Path]:
    """Writes a file for every table of ``ArithmeticData`` into ``out``."""
    return write_tables(out, arithmetic_data(spec))


def write_tables(out: Path, data: ArithmeticData | ProductsData | ShapesData) -> list[Path]:
    tables = {field.name: getattr(data, field.name) for field in fields(data)}
    for name, records in tables.items():
        write_jsonl(out / f"{name}.jsonl", records)
    return [out / f"{name}.jsonl" for name in tables]


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, data_set in SETS.items():
        command = commands.add_parser(name, help=data_set.about.partition(":")[0], description=data_set.about)
        command.add_argument("--source", type=Path, nargs="+", required=True, help="files or directories of the set")
        command.add_argument(
            "--validation", type=Path, nargs="+", default=[], help="files or directories; default: what is named so"
        )
        command.add_argument("--out", type=Path, required=True, help="directory to write to")
        command.add_argument(
            "--val-rows",
            type=int,
            metavar="N",
            help="problems to hold out where the set has no validation data; 0: none"
            + ("; default: 2 %%, at most 500" if data_set.kind == "rows" else "; default: none"),
        )
        command.add_argument("--seed", type=int, default=0, help="of what is held out; default 0")
        command.add_argument(
            "--refuse-overlap",
            action="store_true",
            help="end with an error if a problem is in both splits; default: take it out of the training data",
        )
    arithmetic = commands.add_parser("arithmetic", help="additions, answered in several styles in the supervised part")
    arithmetic.add_argument("--out", type=Path, required=True, help="directory to write to")
    add_fields(arithmetic, ArithmeticSpec)
    products = commands.add_parser("products", help="products, and conversations with a calculator about them")
    products.add_argument("--out", type=Path, required=True, help="directory to write to")
    add_fields(products, ProductsSpec)
    shapes = commands.add_parser("shapes", help="pictures of shapes, and how many discs are among them")
    shapes.add_argument("--out", type=Path, required=True, help="directory to write to")
    add_fields(shapes, ShapesSpec)
    return parser.parse_args(argv)


def add_fields(command: argparse.ArgumentParser, spec: type[ArithmeticSpec | ProductsSpec | ShapesSpec]) -> None:
    for field in fields(spec):
        kind = float if field.name.endswith("_fraction") else int
        option = f"--{field.name.replace('_', '-')}"
        command.add_argument(option, type=kind, default=field.default, help=f"default {field.default}")


def prepare_set(arguments: argparse.Namespace) -> list[Path]:
    """Reads, writes and tells what became of the rows."""
    if arguments.val_rows is not None and arguments.val_rows < 0:
        raise InputError(f"--val-rows is {arguments.val_rows}: give 0 or more")
    prepared = prepare(
        arguments.command,
        arguments.source,
        arguments.validation,
        num_validation=arguments.val_rows,
        seed=arguments.seed,
        refuse_overlap=arguments.refuse_overlap,
    )
    print("\n".join(prepared.lines))
    return write(prepared, arguments.out)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    try:
        if arguments.command in SETS:
            written = prepare_set(arguments)
        elif arguments.command == "products":
            made = ProductsSpec(**{field.name: getattr(arguments, field.name) for field in fields(ProductsSpec)})
            written = write_tables(arguments.out, products_data(made))
        elif arguments.command == "shapes":
            drawn = ShapesSpec(**{field.name: getattr(arguments, field.name) for field in fields(ShapesSpec)})
            written = write_tables(arguments.out, shapes_data(drawn))
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
