"""How the writer process of a checkpoint reports to its rank, and what rank 0 makes of all plans."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.strategies import filesystem_async
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from mega_rl.megatron.checkpoint import writers


def test_a_copy_of_a_process_reads_no_other_ones_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem_async, "_results_queue", None)
    writers.prepare_writers()
    first = filesystem_async._results_queue
    writers.prepare_writers()
    assert filesystem_async._results_queue is first  # a second writer of the process may report at the same time
    process_id = os.getpid()
    monkeypatch.setattr(os, "getpid", lambda: process_id + 1)
    writers.prepare_writers()
    second = filesystem_async._results_queue
    first.put("of the first")
    second.put("of the second")
    assert (first.get_nowait(), second.get_nowait()) == ("of the first", "of the second")


def part(key: str, start: int, length: int, size: int = 8, dtype: torch.dtype = torch.float32) -> WriteItem:
    place = torch.Size([start])
    tensor = TensorWriteData(
        ChunkStorageMetadata(place, torch.Size([length])), TensorProperties(dtype), torch.Size([size])
    )
    return WriteItem(MetadataIndex(key, place), WriteItemType.SHARD, tensor_data=tensor)


def item(place: str) -> WriteItem:
    return WriteItem(MetadataIndex(f"state/shard_{place}"), WriteItemType.BYTE_IO)


WHOLE = [part("a", 0, 4), item("0_2")], [part("a", 4, 4), item("1_2")]


@pytest.mark.parametrize(
    ("plans", "words"),
    [
        (WHOLE, None),
        ((WHOLE[0], [part("a", 5, 3), item("1_2")]), "invalid fill tensor-volume"),
        ((WHOLE[0], [part("a", 3, 5), item("1_2")]), "overlapping chunks|Failed to validate"),
        ((WHOLE[0], [part("a", 4, 4, dtype=torch.bfloat16), item("1_2")]), "parts of a as of tensors of other sizes"),
        ((WHOLE[0], [part("a", 4, 4, size=9), item("1_2")]), "parts of a as of tensors of other sizes or dtypes"),
        ((WHOLE[0], [part("a", 4, 4)]), "1 of 2 parts of state were written"),
    ],
)
def test_an_index_is_of_tensors_that_are_whole_and_written_once(
    plans: tuple[list[WriteItem], ...], words: str | None, tmp_path: Path
) -> None:
    written: list[Any] = []
    writer: Any = SimpleNamespace(finish=lambda index, results: written.append((index, results)))
    shards = writers.Shards(tmp_path, writer, SavePlan([]))
    given = [SavePlan(items) for items in plans]
    if words is not None:
        with pytest.raises((RuntimeError, ValueError), match=words):
            shards.write_index(given, [[], []])
        assert not written
        return
    shards.write_index(given, [[], []])
    ((index, results),) = written
    assert results == [[], []] and index.all_local_plans == given
    assert sorted(index.state_dict_metadata) == ["a", "state/shard_0_2", "state/shard_1_2"]
    assert [chunk.offsets for chunk in index.state_dict_metadata["a"].chunks] == [torch.Size([0]), torch.Size([4])]
