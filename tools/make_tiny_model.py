"""Makes a small Hugging Face model directory with random weights and its own tokenizer.

For the quickstarts and for tests: the model knows nothing until it is trained. Tokenizers: ``arithmetic`` has one token
per digit and sign; ``products`` and ``shapes`` have the words of these data sets and a chat template for tools or for
pictures; ``bpe`` is a byte-level BPE trained on the given text files (of .jsonl files, on every text inside), with a
ChatML template. A model of ``qwen2_5_vl`` sees pictures, and takes the tokenizer ``shapes``.

Example: python tools/make_tiny_model.py --family qwen2 --tokenizer arithmetic --out runs/tiny
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from mega_rl.data.rows.rows import read_rows
from mega_rl.errors import InputError
from mega_rl.synthetic import products, shapes
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer, bpe_tokenizer
from mega_rl.synthetic.tiny_model import FAMILIES, TinyModelSpec, write_tiny_model
from mega_rl.types import DTYPES

# The tokenizers of the quickstarts' tasks.
OF_A_TASK: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "arithmetic": arithmetic_tokenizer,
    "products": lambda: bpe_tokenizer(products.WORDS, 400, products.TOOLS_TEMPLATE),
    "shapes": lambda: bpe_tokenizer(shapes.WORDS, 400, shapes.PICTURES_TEMPLATE, shapes.SPECIALS),
}


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = TinyModelSpec()
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument("--overwrite", action="store_true", help="replace --out where it exists")
    parser.add_argument("--family", choices=sorted(FAMILIES), default=default.family)
    parser.add_argument("--tokenizer", choices=[*OF_A_TASK, "bpe"], default="arithmetic")
    parser.add_argument("--bpe-text", nargs="+", default=[], metavar="FILE", help="what --tokenizer bpe trains on")
    parser.add_argument("--vocab-size", type=int, default=None, help="tokens of --tokenizer bpe (default 2048)")
    for name in ("hidden_size", "num_layers", "num_heads", "num_kv_heads", "ffn", "max_positions", "seed"):
        value = getattr(default, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}")
    parser.add_argument(
        "--tied", action=argparse.BooleanOptionalAction, default=default.tied, help="share embedding and output head"
    )
    parser.add_argument("--untied", dest="tied", action="store_false", help="the same as --no-tied")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default=default.dtype)
    return parser.parse_args(argv)


def make_tokenizer(kind: str, text_files: list[str], vocab_size: int | None) -> PreTrainedTokenizerFast:
    if kind != "bpe":
        if text_files or vocab_size is not None:
            raise InputError("--bpe-text and --vocab-size belong to --tokenizer bpe; leave them out or choose it")
        return OF_A_TASK[kind]()
    if not text_files:
        raise InputError("--tokenizer bpe needs --bpe-text with at least one file to train on")
    return bpe_tokenizer(read_texts(text_files), 2048 if vocab_size is None else vocab_size)


def read_texts(files: list[str]) -> Iterator[str]:
    """Lines of text files; every string inside the rows of .jsonl and .parquet files."""
    for file in files:
        if file.endswith((".jsonl", ".parquet")):
            for row in read_rows([file], "--bpe-text"):
                yield from _strings(dict(row.fields))
            continue
        try:
            yield from Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--bpe-text: {file} cannot be read as text ({error}); correct the path") from error


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _strings(part)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    logging.disable_progress_bar()
    try:
        tokenizer = make_tokenizer(arguments.tokenizer, arguments.bpe_text, arguments.vocab_size)
        spec = TinyModelSpec(**{field.name: getattr(arguments, field.name) for field in fields(TinyModelSpec)})
        write_tiny_model(arguments.out, spec, tokenizer, arguments.overwrite)
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --out {arguments.out} cannot be written ({error}); choose another directory", file=sys.stderr)
        return 2
    print(f"wrote {arguments.out}: {spec.family}, {len(tokenizer)} tokens, {spec.dtype}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
