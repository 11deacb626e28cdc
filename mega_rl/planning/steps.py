"""How long a run is: rows, steps and tokens, as far as the files are here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq

from mega_rl.config.schema.data_file import DataFile
from mega_rl.config.schema.sections import RunConfig
from mega_rl.config.schema.stage import samples, sequences_per_row
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.planning.activations import PlannedTokens


@dataclass(frozen=True)
class RunLength:
    """None if the data files are not here."""

    num_rows: int | None  # rows of the training files; those that are too long are still among them
    steps_per_epoch: int | None
    total_steps: int | None
    sequences_per_step: int
    max_tokens_per_step: int  # all sequences at their greatest length


def run_length(config: RunConfig) -> RunLength:
    data, trainer = config.data, config.trainer
    counts = [_count_rows(DataFile.of(entry)) for entry in data.train_files]
    num_rows = sum(count for count in counts if count is not None) if counts and None not in counts else None
    per_epoch = None if num_rows is None else num_rows // data.train_batch_size
    total = trainer.total_steps
    if total is None and per_epoch is not None and trainer.total_epochs is not None:
        total = trainer.total_epochs * per_epoch
    sequences = data.train_batch_size * (config.rollout.n if samples(config) else sequences_per_row(config))
    longest = data.max_prompt_length + data.max_response_length
    return RunLength(num_rows, per_epoch, total, sequences, sequences * longest)


def _count_rows(file: DataFile) -> int | None:
    path = Path(file.path)
    if not path.is_file():
        return None
    if path.suffix == ".parquet":
        count = int(pq.read_metadata(path).num_rows)
    else:
        with path.open("rb") as lines:
            count = sum(1 for line in lines if line.strip())
    return count if file.max_rows is None else min(count, file.max_rows)


def budget_of(config: RunConfig) -> int:
    """Tokens of a micro-batch, of a configuration that leaves nothing to the plan any more."""
    budget = config.trainer.max_tokens_per_microbatch
    assert budget is not None, "see automatic.py"
    return budget


def fullest_microbatches(config: RunConfig, layout: ParallelLayout) -> PlannedTokens:
    """Micro-batches of an optimizer step whose sequences all have their greatest length."""
    data, is_sampled = config.data, samples(config)
    parts = config.algorithm.minibatches_per_step if is_sampled else 1
    num_units = data.train_batch_size * (config.rollout.n if is_sampled else 1) // parts
    longest = data.max_prompt_length + data.max_response_length - 1  # the last token predicts nothing
    budget = budget_of(config)
    unit_tokens = sequences_per_row(config) * longest  # what shares a micro-batch: one sequence, or those of a pair
    if unit_tokens > budget:  # the answers of a pair lie apart
        num_units, unit_tokens = sequences_per_row(config) * num_units, longest
    multiple = layout.pipeline if layout.num_chunks > 1 else 1
    # What parallel.schedule.balance comes to for equal lengths.
    num_microbatches = multiple * -(-num_units // (layout.data * multiple * (budget // unit_tokens)))
    # Sequences of other lengths fill a micro-batch up to its limit.
    fullest = min(budget, -(-num_units // layout.data) * unit_tokens)
    unit = layout.tensor * 2 * layout.context
    return PlannedTokens(-(-fullest // unit) * unit, longest, num_microbatches)
