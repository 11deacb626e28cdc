"""The world of many ranks: who is connected with whom, and work that is shared between ranks."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from mega_rl.config.schema.sections import DataConfig
from mega_rl.data import prompts as prompts_module
from mega_rl.data.pictures.pictures import FoundPicture, PictureReader
from mega_rl.data.prompts import PromptDataset
from mega_rl.data.rows.rows import DataFiles, Row
from mega_rl.errors import InputError
from mega_rl.microbatch import Figures
from mega_rl.parallel.collectives import (
    broadcast_list,
    broadcast_object,
    column_sums,
    gather_objects,
    gather_to_first,
    is_any,
    join_world,
    numbers_to_first,
    placed,
    reduced,
    smallest,
    summed,
    together,
    told_numbers,
    work_shared,
)
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.stages.learn.logprob_difference import LogprobDifference, merged, over_ranks
from mega_rl.stages.run.batch_share import BatchShare, Totals, totals_of
from mega_rl.synthetic.arithmetic import arithmetic_tokenizer

GATHERED: list[Any] = []  # what this process gave to gathers of objects


def num_sockets() -> int:
    descriptors = Path("/proc/self/fd").iterdir()
    return sum(os.path.islink(fd) and os.readlink(fd).startswith("socket:") for fd in descriptors)


def connects_neighbours_only() -> int:
    """Sockets that the group took, after every kind of collective of the loop."""
    before = num_sockets()
    join_world("gloo", timeout_s=60)
    gather_objects(dist.get_rank())
    broadcast_object("value")
    gather_to_first("value")
    reduced([1.0], column_sums, 1)
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    return num_sockets() - before


def figures_are_those_of_all_ranks() -> None:
    """Sums of floats in the order of the ranks, as a loop over what each has would add them; nothing is an object."""
    rank, size = dist.get_rank(), dist.get_world_size()
    values = [math.sin(1.0 + other) / 3 for other in range(size)]
    num_before = len(GATHERED)
    assert reduced([values[rank], rank], column_sums, 2) == [sum(values), size * (size - 1) / 2]
    assert reduced([values[rank]], lambda rows: [max(rows)[0], min(rows)[0]], 2) == [max(values), min(values)]
    assert not is_any(False) and is_any(rank == size - 1) and smallest(100 - rank) == 101 - size
    assert summed([1 << 40, rank]) == [size << 40, size * (size - 1) // 2]
    given = {place: math.nan if place == 3 else values[place] for place in range(rank, 24, size) if place < size}
    found = placed(given, size)
    assert found[:3] + found[4:] == values[:3] + values[4:] and math.isnan(found[3])
    rows = numbers_to_first([values[rank]] * (rank % 3))
    assert rows == ([[values[other]] * (other % 3) for other in range(size)] if rank == 0 else [])
    assert told_numbers([0.1, -2] if rank == 0 else [9.0]) == [0.1, -2] and told_numbers([]) == []
    assert broadcast_list(["one"] if rank == 0 else []) == ["one"] and broadcast_list([]) == []
    with together("a block without a failure"):
        pass
    assert len(GATHERED) == num_before, "agreement on nothing takes no object"
    try:
        with together("a block"):
            if rank == 5:
                raise InputError("rank 5 says so")
    except InputError as error:
        assert str(error) == "rank 5 says so"
    else:
        raise AssertionError("rank 5 failed and nobody said so")
    assert len(GATHERED) == num_before + 1


def totals_and_differences_are_those_of_objects() -> None:
    """Names that only some ranks know, those that a later batch brings, and ranks that have nothing."""
    rank, size = dist.get_rank(), dist.get_world_size()
    share = BatchShare(ParallelLayout.create(size, pipeline=2), rank, 16, 1, 0)

    def reports(other: int, late: bool) -> list[Figures]:
        sums = {"loss": torch.tensor(math.cos(other)), **({f"own/{other % 3}": torch.tensor(0.1)} if late else {})}
        figures = Figures(sums, {"ratio": torch.tensor(1.0 + other)})
        return [figures, figures] if BatchShare(share.layout, other, 16, 1, 0).is_last_stage else []

    for late in (False, False, True, False):
        wanted = Totals()
        for other in range(size):
            own = Totals()
            for report in reports(other, late):
                own.include(report)
            wanted.include(own)
        before = len(GATHERED)
        found = totals_of(share, reports(rank, late))
        assert (found.sums, found.maxima) == (wanted.sums, wanted.maxima), late
        num_new = len(GATHERED) - before
        assert num_new <= 1, "names are exchanged once"
    assert num_new == 0

    def own(other: int) -> LogprobDifference | None:
        return (
            LogprobDifference(1.0 + other % 5, math.exp(other), other, other, 2, 3, (0.5, -other))
            if other % 2
            else None
        )

    worst = over_ranks({"engine": own(rank), "ppo_kl": None})
    assert worst == {"engine": merged(map(own, range(size))), "ppo_kl": None}


def count_gathered() -> None:
    original = dist.all_gather_object

    def counted(gathered: list[Any], value: Any, **keys: Any) -> None:
        GATHERED.append(value)
        original(gathered, value, **keys)

    dist.all_gather_object = counted


def shares_work() -> None:
    worked: list[int] = []

    def square(item: int) -> int:
        worked.append(item)
        return item * item

    assert work_shared(range(21), square) == [item * item for item in range(21)]
    assert len(worked) in (21 // dist.get_world_size(), 21 // dist.get_world_size() + 1), worked

    def refuse(item: int) -> int:
        if item in (5, 20):
            raise InputError(f"item {item}")
        return item

    try:
        work_shared(range(21), refuse)
    except InputError as error:
        assert str(error) == "item 5"
    else:
        raise AssertionError("nobody refused")


def tokenises_once(directory: Path) -> None:
    """Every rank has every prompt, in order, and tokenised a share of them."""
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(24)]
    file = directory / "rows.jsonl"
    if dist.get_rank() == 0:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dist.barrier()
    tokenizer = arithmetic_tokenizer()
    calls: list[str] = []
    encode = prompts_module.render_prompt
    prompts_module.render_prompt = lambda tokenizer, text, *rest: calls.append(text) or encode(tokenizer, text, *rest)
    prompts = PromptDataset.from_files(DataFiles([str(file)]), tokenizer, DataConfig(chat_template="never")).prompts
    assert [prompt.text for prompt in prompts] == [row["prompt"] for row in rows]
    assert [prompt.index for prompt in prompts] == list(range(24))
    assert len(calls) == 24 // dist.get_world_size(), calls
    assert len(set(gather_objects(PromptDataset(prompts).fingerprint))) == 1

    mine = directory / f"rows_{dist.get_rank() % 2}.jsonl"  # as on nodes with files of their own
    if dist.get_rank() < 2:
        mine.write_text("".join(json.dumps(row) + "\n" for row in rows[dist.get_rank() :]))
    dist.barrier()
    try:
        PromptDataset.from_files(DataFiles([str(mine)]), tokenizer, DataConfig(chat_template="never"))
    except InputError as error:
        assert "24 rows on rank 0 and 23 on rank 1" in str(error)
    else:
        raise AssertionError("different files were accepted")


class CountingReader(PictureReader):
    looked = 0

    def _look(self, found: FoundPicture) -> tuple[str, tuple[int, int]]:
        self.looked += 1
        return super()._look(found)


def opens_pictures_once(directory: Path) -> None:
    """Every rank knows every picture and opened a share of them; what one finds, all of them say."""
    here = directory / f"pictures_{dist.get_rank()}"  # as on nodes with disks of their own
    here.mkdir()
    for number in range(24):
        Image.new("RGB", (16 + 4 * number, 16)).save(here / f"{number}.png")
    size = {"shortest_edge": 64, "longest_edge": 1 << 20}

    def rows(count: int = 24) -> list[Row]:
        fields = ({"prompt": "<image>?", "images": [f"{number}.png"]} for number in range(count))
        return [Row(here / "rows.jsonl", i + 1, of_row) for i, of_row in enumerate(fields)]

    def refused(count: int = 24) -> str:
        try:
            reader.take(rows(count), "data.train_files")
        except InputError as error:
            (sentence,) = set(gather_objects(str(error)))
            return sentence
        raise AssertionError("nobody refused")

    reader = CountingReader(Qwen2VLImageProcessorPil(size=size, patch_size=4, merge_size=2), "<one>", 1, 1)
    taken = reader.take(rows(), "data.train_files")
    assert reader.looked == 24 // dist.get_world_size(), reader.looked
    assert [row.get("prompt") for row, _ in taken] == ["<one>?"] * 24
    assert len(set(gather_objects(tuple(picture.key for _, pictures in taken for picture in pictures)))) == 1
    assert "24 pictures on rank 0 and 23 on rank 3" in refused(24 - (dist.get_rank() == 3))
    for bad in (21, 9):
        (here / f"{bad}.png").write_bytes(b"no picture")
    assert "rows.jsonl line 10, picture 1 cannot be read" in refused()
    if dist.get_rank() == 7:
        (here / "2.png").unlink()
    os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = "0", "1"
    assert "pictures_7/rows.jsonl line 3, picture 1: " in (sentence := refused()) and "is no file" in sentence


def main(directory: Path) -> None:
    sockets = connects_neighbours_only()
    count_gathered()
    figures_are_those_of_all_ranks()
    totals_and_differences_are_those_of_objects()
    shares_work()
    tokenises_once(directory)
    opens_pictures_once(directory)
    print(f"SOCKETS {sockets}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
