"""Data and tokenizers made on the spot, for the quickstart and for tests: no download, no real-world content.

The arithmetic data set is additions such as ``07+25=`` with the answer ``32``, numbers padded to equal width. Its
supervised part writes the sum in several styles, and only a stated fraction of the responses in the one that the
reward accepts: a model warmed up on it can add, but seldom answers as asked, so that its samples differ in reward.
Reinforcement learning in earnest starts from such a state, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from mega_rl.data.stream import generator
from mega_rl.errors import InputError

ARITHMETIC_SOURCE = "arithmetic"
ARITHMETIC_CHARACTERS = "0123456789+-*= "
ARITHMETIC_SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
BPE_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# AutoTokenizer rebuilds the tokenizer of every qwen2 directory with this expression and byte-level pieces, whatever
# tokenizer.json says: only a tokenizer that is made so means the same before and after it is saved.
QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHATML_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


PLAIN_STYLE = "{sum}"
OTHER_STYLES = ("={sum}", "+{sum}")  # equally frequent when the style is not the plain one
OTHER_STYLE_FRACTION = 0.75  # of the rejected answers; the others are wrong sums
SUMS_PER_TEXT = 8


@dataclass(frozen=True)
class ArithmeticSpec:
    """How much arithmetic, and how often its supervised part answers as asked."""

    max_operand: int = 49  # operands are 0 .. max_operand
    num_train: int = 2000  # prompts
    num_val: int = 128  # prompts whose operand pairs, in either order, are not in train
    num_sft: int = 20000  # prompt and response rows over the train pairs
    num_pairs: int = 2000  # pairs of a right and a worse answer, over the train prompts
    num_texts: int = 2000  # documents of SUMS_PER_TEXT sums each, over the train prompts
    plain_fraction: float = 0.2  # share of the sft rows, on average, in the style that the reward accepts
    seed: int = 0


@dataclass(frozen=True)
class ArithmeticData:
    train: list[dict[str, Any]]  # {"prompt": "07+25=", "answer": "32", "data_source": "arithmetic"}
    val: list[dict[str, Any]]  # the same, held out
    sft: list[dict[str, Any]]  # {"prompt": "07+25=", "response": "+32"}
    pairs: list[dict[str, Any]]  # {"prompt": "07+25=", "chosen": "32", "rejected": "=32"}
    pairs_val: list[dict[str, Any]]  # the same over the val prompts, each once
    texts: list[dict[str, Any]]  # {"text": "07+25=32 40+02=42 ..."}
    texts_val: list[dict[str, Any]]  # the same over the val prompts, each once


def arithmetic_data(spec: ArithmeticSpec) -> ArithmeticData:
    """Prompts for training and validation with disjoint operand pairs, and supervised rows over the training pairs.

    Raises:
        InputError: a count below its minimum, a fraction outside [0, 1], or more prompts asked for than there are.
    """
    _check(spec)
    unordered = [(a, b) for a in range(spec.max_operand + 1) for b in range(a, spec.max_operand + 1)]
    shuffled = [unordered[i] for i in generator("arithmetic-pairs", spec.seed).permutation(len(unordered))]
    # Both orders of a pair stand together, so that held out means held out in either order.
    groups = [[(a, b), (b, a)] if a != b else [(a, a)] for a, b in shuffled]
    val: list[tuple[int, int]] = []
    while groups and len(val) < spec.num_val:
        val += groups.pop()
    rest = [pair for group in groups for pair in group]
    if len(val) < spec.num_val or len(rest) < spec.num_train:
        raise InputError(
            f"--max-operand {spec.max_operand} gives {len(rest)} training prompts beside {len(val)} held-out ones, "
            f"fewer than --num-train {spec.num_train} and --num-val {spec.num_val}; raise it or ask for fewer"
        )
    train = [rest[i] for i in generator("arithmetic-train", spec.seed).permutation(len(rest))[: spec.num_train]]
    return ArithmeticData(
        train=[_prompt_row(a, b, spec) for a, b in train],
        val=[_prompt_row(a, b, spec) for a, b in val[: spec.num_val]],
        sft=[_sft_row(train[item % len(train)], item, spec) for item in range(spec.num_sft)],
        pairs=[_pair_row(train[item % len(train)], item, spec) for item in range(spec.num_pairs)],
        pairs_val=[_pair_row(pair, -1 - item, spec) for item, pair in enumerate(val[: spec.num_val])],
        texts=[_text_row(train, item, spec) for item in range(spec.num_texts)],
        texts_val=[_text_row(val, item, spec) for item in range(max(1, len(val) // SUMS_PER_TEXT))],
    )


def _check(spec: ArithmeticSpec) -> None:
    for name in ("max_operand", "num_train", "num_val"):
        if getattr(spec, name) < 1:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(spec, name)}; give at least 1")
    for name in ("num_sft", "num_pairs", "num_texts"):
        if getattr(spec, name) < 0:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(spec, name)}; give 0 or more")
    if not 0.0 <= spec.plain_fraction <= 1.0:
        raise InputError(f"--plain-fraction is {spec.plain_fraction}; give a number from 0 to 1")


def _texts(a: int, b: int, spec: ArithmeticSpec) -> tuple[str, str]:
    """Prompt and sum, every number of a data set as wide as the largest of its kind."""
    width, sum_width = len(str(spec.max_operand)), len(str(2 * spec.max_operand))
    return f"{a:0{width}d}+{b:0{width}d}=", f"{a + b:0{sum_width}d}"


def _prompt_row(a: int, b: int, spec: ArithmeticSpec) -> dict[str, Any]:
    prompt, answer = _texts(a, b, spec)
    return {"data_source": ARITHMETIC_SOURCE, "prompt": prompt, "answer": answer}


def _sft_row(pair: tuple[int, int], item: int, spec: ArithmeticSpec) -> dict[str, Any]:
    prompt, answer = _texts(*pair, spec)
    is_plain, choice = generator("arithmetic-sft", spec.seed, item).random(2)
    style = PLAIN_STYLE if is_plain < spec.plain_fraction else OTHER_STYLES[int(choice * len(OTHER_STYLES))]
    return {"prompt": prompt, "response": style.format(sum=answer)}


def _pair_row(pair: tuple[int, int], item: int, spec: ArithmeticSpec) -> dict[str, Any]:
    """The plain right sum is better than the same in another style, and than a plain wrong one."""
    prompt, answer = _texts(*pair, spec)
    is_style, choice = generator("arithmetic-pairs-of-answers", spec.seed, item).random(2)
    other = OTHER_STYLES[int(choice * len(OTHER_STYLES))].format(sum=answer)
    wrong = f"{(int(answer) + 1 + int(choice * 9)) % 10 ** len(answer):0{len(answer)}d}"
    return {"prompt": prompt, "chosen": answer, "rejected": other if is_style < OTHER_STYLE_FRACTION else wrong}


def _text_row(pairs: list[tuple[int, int]], item: int, spec: ArithmeticSpec) -> dict[str, Any]:
    chosen = [pairs[(item * SUMS_PER_TEXT + place) % len(pairs)] for place in range(SUMS_PER_TEXT)]
    return {"text": " ".join("".join(_texts(*pair, spec)) for pair in chosen)}


def arithmetic_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character of ``ARITHMETIC_CHARACTERS`` after <pad>, <bos>, <eos>, <unk>; adds nothing by itself.

    Other characters are not for it: they become <unk> or nothing.
    """
    characters = [character.replace(" ", "\u0120") for character in ARITHMETIC_CHARACTERS]  # byte-level for space
    vocab = {token: index for index, token in enumerate([*ARITHMETIC_SPECIALS, *characters])}
    tokenizer = _byte_level(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ARITHMETIC_SPECIALS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def bpe_tokenizer(
    texts: Iterable[str], vocab_size: int, template: str = CHATML_TEMPLATE, more_specials: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on the texts, with a ChatML template; <|im_end|> ends a sequence.

    Args:
        vocab_size: tokens in all, the 256 bytes and all special tokens included; texts too short give fewer.
        template: of chats.
        more_specials: special tokens besides the three of ChatML.

    Raises:
        InputError: a vocabulary too small for the bytes.
    """
    specials = [*BPE_SPECIALS, *more_specials]
    smallest = len(specials) + 256
    if vocab_size < smallest:
        raise InputError(f"--vocab-size is {vocab_size}; a byte-level vocabulary needs at least {smallest}")
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        chat_template=template,
        additional_special_tokens=list(more_specials),
        clean_up_tokenization_spaces=False,
    )


def _byte_level(model: models.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.NFC()
    words = pre_tokenizers.Split(Regex(QWEN2_WORDS), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
