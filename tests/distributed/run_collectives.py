"""The world of many ranks: who is connected with whom, and work that is shared between ranks."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from mega_rl.config.schema import DataConfig
from mega_rl.data import prompts as prompts_module
from mega_rl.data.prompts import PromptDataset
from mega_rl.data.synthetic import arithmetic_tokenizer
from mega_rl.errors import InputError
from mega_rl.parallel.collectives import broadcast_object, gather_objects, join_world, work_shared


def num_sockets() -> int:
    descriptors = Path("/proc/self/fd").iterdir()
    return sum(os.path.islink(fd) and os.readlink(fd).startswith("socket:") for fd in descriptors)


def connects_neighbours_only() -> int:
    """Sockets that the group took, after every kind of collective of the loop."""
    before = num_sockets()
    join_world("gloo", timeout_s=60)
    gather_objects(dist.get_rank())
    broadcast_object("value")
    dist.all_reduce(torch.ones(3))
    dist.barrier()
    return num_sockets() - before


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
    prompts = PromptDataset.from_files([str(file)], tokenizer, DataConfig(chat_template="never")).prompts
    assert [prompt.text for prompt in prompts] == [row["prompt"] for row in rows]
    assert [prompt.index for prompt in prompts] == list(range(24))
    assert len(calls) == 24 // dist.get_world_size(), calls
    assert len(set(gather_objects(PromptDataset(prompts).fingerprint))) == 1

    mine = directory / f"rows_{dist.get_rank() % 2}.jsonl"  # as on nodes with files of their own
    if dist.get_rank() < 2:
        mine.write_text("".join(json.dumps(row) + "\n" for row in rows[dist.get_rank() :]))
    dist.barrier()
    try:
        PromptDataset.from_files([str(mine)], tokenizer, DataConfig(chat_template="never"))
    except InputError as error:
        assert "24 rows on rank 0 and 23 on rank 1" in str(error)
    else:
        raise AssertionError("different files were accepted")


def main(directory: Path) -> None:
    sockets = connects_neighbours_only()
    shares_work()
    tokenises_once(directory)
    print(f"SOCKETS {sockets}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
