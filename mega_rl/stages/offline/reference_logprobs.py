"""Log-probabilities of answers under the weights that training starts from, computed once and kept in a file.

So a run that compares with its starting weights holds no second model while it trains.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mega_rl.bridge.files.peft.peft_config import CONFIG_FILE
from mega_rl.bridge.files.sampled_digest import weights_digest
from mega_rl.data.rows.rows import atomic_path
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.microbatch import Sequence
from mega_rl.observe.heartbeat import HEART
from mega_rl.parallel.collectives import broadcast_object, is_first, together
from mega_rl.stages.offline.answers import summed_logprobs
from mega_rl.stages.run.job import Job

VALUES = "logprobs"  # the tensor in the file


class PreferenceRow(Protocol):
    """A row of preference data."""

    @property
    def index(self) -> int: ...

    @property
    def sequences(self) -> tuple[Sequence, Sequence]: ...


@dataclass(frozen=True)
class ReferenceLogprobs:
    """The seam between objectives and reference: whatever knows the reference's log-probabilities answers ``of``."""

    table_N2: Tensor  # float64, nats: of both sequences of every row, summed over the learnt tokens

    def of(self, rows: SequenceOf[PreferenceRow]) -> Tensor:
        """[2 x rows]: of the rows' sequences, in their order."""
        return self.table_N2[[row.index for row in rows]].flatten()


class Rows(Protocol):
    """A data set of them."""

    @property
    def items(self) -> SequenceOf[PreferenceRow]: ...

    @property
    def fingerprint(self) -> str: ...  # the tokenizer, the template and the length limits have a part in it


def reference_logprobs(job: Job, model: MegatronEngine, dataset: Rows, name: str) -> ReferenceLogprobs:
    """Of all rows, out of the file of an earlier start if it is of the same model and data. Collective.

    Args:
        model: with the weights of ``model.path``: it must not have been resumed yet.
        name: of the file, one per data set.
    """
    rows, fingerprint = dataset.items, dataset.fingerprint
    path = job.output_dir / f"reference_logprobs_{name}.safetensors"
    with together("reading the reference's log-probabilities"):
        key = _key(job, fingerprint, len(rows)) if is_first() else ""
        table, reason = _read(path, key, len(rows)) if is_first() else (None, "")
    table, reason = broadcast_object((table, reason))
    if table is None:
        job.say(f"reference: computing the log-probabilities of {len(rows)} rows for {path.name} ({reason})")
        with HEART.during("the reference's log-probabilities"):
            table = _computed(job, model, rows)
        with together("writing the reference's log-probabilities"):
            if is_first():
                _write(path, key, table)
    return ReferenceLogprobs(table)


def _computed(job: Job, model: MegatronEngine, rows: SequenceOf[PreferenceRow]) -> Tensor:
    size = job.config.data.train_batch_size
    parts = [rows[start : start + size] for start in range(0, len(rows), size)]
    sums = [summed_logprobs(job, model, [one for row in part for one in row.sequences]) for part in parts]
    return torch.cat(sums).view(-1, 2)


def _key(job: Job, fingerprint: str, num_rows: int) -> str:
    config, adapter = job.config, job.config.tuning.adapter
    parts = [weights_digest(Path(config.model.path)), config.model.dtype, fingerprint, str(num_rows)]
    if adapter.path is not None:
        parts += [weights_digest(Path(adapter.path), CONFIG_FILE), f"merged: {adapter.new}"]
    return hashlib.blake2b("/".join(parts).encode(), digest_size=16).hexdigest()


def _digest(table_N2: Tensor) -> str:
    return hashlib.blake2b(table_N2.numpy().tobytes(), digest_size=16).hexdigest()


def _read(path: Path, key: str, num_rows: int) -> tuple[Tensor | None, str]:
    """The table of the file, or None and why it cannot be used."""
    if not path.is_file():
        return None, "no file yet"
    try:
        with safe_open(path, framework="pt") as file:
            noted, table = file.metadata() or {}, file.get_tensor(VALUES)
    except (OSError, SafetensorError, ValueError) as error:
        return None, f"the file cannot be read: {type(error).__name__}"
    if noted.get("key") != key:
        return None, "the file is of another model or of other data"
    if table.shape != (num_rows, 2) or table.dtype != torch.float64 or noted.get("digest") != _digest(table):
        return None, "the file is damaged"
    return table, ""


def _write(path: Path, key: str, table_N2: Tensor) -> None:
    with atomic_path(path) as temporary:
        save_file({VALUES: table_N2.contiguous()}, temporary, metadata={"key": key, "digest": _digest(table_N2)})
