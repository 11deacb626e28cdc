"""Batches of a data set in an order that depends only on (seed, epoch), and that a checkpoint can resume."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from mega_rl.errors import InputError, shown

MOST_EPOCHS = 2**31 - 1
Item = TypeVar("Item")
ItemOut = TypeVar("ItemOut", covariant=True)


class Dataset(Protocol[ItemOut]):
    """What a stream reads: items by position, and a fingerprint of their content."""

    @property
    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...

    def __getitem__(self, position: int) -> ItemOut: ...


def _is_within(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= most


def fingerprint(parts: list[bytes]) -> str:
    """A digest of the parts in their order; each is preceded by its length, so that moved borders show."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def generator(*key: int | str) -> np.random.Generator:
    """Random numbers that depend only on the key: the same on every rank, machine and process."""
    digest = hashlib.blake2b("/".join(map(str, key)).encode(), digest_size=16).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(digest, "little")))


def epoch_order(num_items: int, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    """The positions of an epoch: [num_items] int64, a permutation."""
    return generator("data-order", seed, epoch).permutation(num_items) if shuffle else np.arange(num_items)


@functools.lru_cache(maxsize=2)
def _remembered_order(num_items: int, shuffle: bool, seed: int, epoch: int) -> np.ndarray:
    return epoch_order(num_items, shuffle, seed, epoch)


@functools.lru_cache(maxsize=2)
def _spare_order(num_items: int, seed: int, batch: int) -> np.ndarray:
    return generator("spare-order", seed, batch).permutation(num_items)


@dataclass(frozen=True)
class BatchOrder(Generic[Item]):
    """Which items the batches of a run hold that takes only whole batches, by the number of the batch.

    Nothing in it changes, so it can be asked in any thread.
    """

    dataset: Dataset[Item]
    batch_size: int
    shuffle: bool
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return len(self.dataset) // self.batch_size

    def item(self, batch: int, place: int) -> Item:
        """One item of a batch."""
        return self.dataset[int(self._batch(batch)[place])]

    def spare(self, batch: int, place: int) -> Item:
        """An item that this batch has not: in an order of its own for every batch, each at most once."""
        order = _spare_order(len(self.dataset), self.seed, batch)
        return self.dataset[int(order[~np.isin(order, self._batch(batch))][place])]

    def _batch(self, batch: int) -> np.ndarray:
        epoch, number = divmod(batch, self.steps_per_epoch)
        order = _remembered_order(len(self.dataset), self.shuffle, self.seed, epoch)
        return order[number * self.batch_size : (number + 1) * self.batch_size]


class Stream(Generic[Item]):
    """An endless run of full batches; what an epoch leaves over below a full batch is left out of that epoch.

    Every rank holds the same stream and takes the same batches.

    Args:
        batch_size: items per batch, ``data.train_batch_size``.
        seed: of the order, ``data.seed``.

    Raises:
        InputError: a batch larger than the data set.
    """

    def __init__(self, dataset: Dataset[Item], batch_size: int, shuffle: bool, seed: int) -> None:
        if not 1 <= batch_size <= len(dataset):
            raise InputError(
                f"data.train_batch_size is {batch_size} but the data set has {len(dataset)} usable rows; "
                f"set it between 1 and {len(dataset)}"
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.batch_order = BatchOrder(dataset, batch_size, shuffle, seed)
        self._move_to(epoch=0, position=0)

    @property
    def steps_per_epoch(self) -> int:
        return self.batch_order.steps_per_epoch

    @property
    def epoch(self) -> int:
        """The epoch of the batch taken last."""
        return self._epoch

    @property
    def epochs(self) -> float:
        """How often the data set was drawn, in epochs; what an epoch leaves over counts when the next one begins."""
        return self._epoch + self._position / len(self.dataset)

    def next_batch(self) -> list[Item]:
        if self._position + self.batch_size > len(self.dataset):
            self._move_to(self._epoch + 1, 0)
        positions = self._order[self._position : self._position + self.batch_size]
        self._position += self.batch_size
        return [self.dataset[int(position)] for position in positions]

    def next_item(self) -> Item:
        """The next item by itself; an epoch that is taken item by item is taken to its last one."""
        if self._position == len(self.dataset):
            self._move_to(self._epoch + 1, 0)
        self._position += 1
        return self.dataset[int(self._order[self._position - 1])]

    def is_after(self, num_batches: int) -> bool:
        """Whether what was taken are so many whole batches, and nothing else."""
        epoch, number = divmod(num_batches - 1, self.steps_per_epoch) if num_batches else (0, -1)
        return (self._epoch, self._position) == (epoch, (number + 1) * self.batch_size)

    def state_dict(self) -> dict[str, Any]:
        """Where the next batch starts, and of what data: plain values."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "fingerprint": self.dataset.fingerprint,
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken; the batch size may have changed, data and order may not.

        Raises:
            InputError: the state is of other data or of another order.
        """
        mine = self.state_dict()
        if absent := sorted(mine.keys() - state.keys()):
            raise InputError(f"the checkpoint's data position lacks {', '.join(absent)}; resume from another one")
        if state["fingerprint"] != mine["fingerprint"]:
            raise InputError(
                "data.train_files (with the tokenizer, chat template and length limits) give other rows than those of "
                "the checkpoint; restore them or start a new run with another trainer.output_dir"
            )
        for key in ("shuffle", "seed"):
            if state[key] != mine[key]:
                raise InputError(
                    f"data.{key} is {mine[key]} but the checkpoint was trained with {shown(state[key])}; set it back"
                )
        epoch, position = state["epoch"], state["position"]
        if not (_is_within(epoch, MOST_EPOCHS) and _is_within(position, len(self.dataset))):
            raise InputError(
                f"the checkpoint's data position is {shown(position)} of epoch {shown(epoch)}, and the data has "
                f"{len(self.dataset)} rows; resume from another one"
            )
        self._move_to(epoch, position)

    def _move_to(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position  # items of this epoch already taken
        self._order = epoch_order(len(self.dataset), self.shuffle, self.seed, epoch)
