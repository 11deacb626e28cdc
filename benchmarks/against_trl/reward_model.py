"""Seconds of one step of a reward model: MegatronEngine against TRL's RewardTrainer, same model, same pairs.

Pairs and model are those of preference.py: 8 pairs whose prompts and answers differ in length; a step is forward,
backward, clipping and AdamW, and the two take turns in one process. TRL pads the 16 sequences to the longest one; here
they are packed. The losses must agree, step by step.

The environment has no TRL. preference.py says how to make one beside it that has; there:

    PYTHONPATH=$PWD peer/bin/python -m benchmarks.against_trl.reward_model

Without TRL only our own time is printed. MEGA_RL_PLATFORM chooses cpu, cuda or npu; TRL runs on the CPU here.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from benchmarks.against_trl.peer import TrlPeer, settings
from benchmarks.against_trl.preference import (
    BETAS,
    CLIP,
    LR,
    MAX_TOKENS,
    MODEL,
    NUM_PAIRS,
    QUICK,
    TOLERANCE,
    WEIGHT_DECAY,
    make_inputs,
    timed,
)
from benchmarks.report import publish, table
from mega_rl import platform
from mega_rl.algorithms.value import PairwiseObjective
from mega_rl.config.schema.sections import DataConfig, MemoryConfig, OptimizerConfig, ParallelConfig
from mega_rl.data.pairs import PairDataset
from mega_rl.data.rows.rows import DataFiles
from mega_rl.megatron.engine import MegatronEngine, Optimization
from mega_rl.megatron.model.spec import TrainerSpec
from mega_rl.megatron.policy import MegatronPolicy, initialize_groups
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.stages.models.values import open_value_model, scored_at_end
from mega_rl.stages.run.batch_share import BatchShare, pack_for_rank

OWN, PEER = "mega_rl", "TRL RewardTrainer"


def make_reward_model(directory: Path, sizes: dict[str, int], longest: int) -> None:
    """The inputs of the preference benchmark, the model with a value head."""
    make_inputs(directory, sizes, longest)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        directory, num_labels=1, pad_token_id=tokenizer.pad_token_id, dtype=torch.float32
    )
    model.save_pretrained(directory)


class Own:
    """``MegatronEngine`` on packed pairs."""

    def __init__(self, directory: Path, longest: int, layout: ParallelLayout) -> None:
        device = platform.current().set_device(0)
        spec = TrainerSpec(torch.float32, ParallelConfig(), MemoryConfig(), temperature=1.0, chunk_tokens=1024)
        optimizer = OptimizerConfig(lr=LR, weight_decay=WEIGHT_DECAY, clip_grad=CLIP, beta1=BETAS[0], beta2=BETAS[1])
        shape, weights = open_value_model(directory, "model.path", seed=None)
        policy = MegatronPolicy(spec, shape, layout, device)
        self.engine = MegatronEngine(policy, weights, Optimization(optimizer, 1000))
        data = DataConfig(max_prompt_length=longest, max_response_length=longest, filter_overlong_prompts=False)
        pairs = PairDataset.from_files(
            DataFiles([str(directory / "pairs.jsonl")]), AutoTokenizer.from_pretrained(directory), data
        )
        sequences = [scored_at_end(one.token_ids) for pair in pairs.items for one in pair.sequences]
        self.microbatches = pack_for_rank(BatchShare(layout, 0, MAX_TOKENS, 1, 0), sequences, unit=2)
        self.num_tokens = sum(microbatch.num_tokens for microbatch in self.microbatches)
        self.padding = 1 - self.num_tokens / (len(sequences) * max(s.loss_mask.numel() for s in sequences))
        self.loss = partial(PairwiseObjective(0.0), margins_P=torch.zeros(len(pairs)), num_pairs=len(pairs))

    def step(self) -> float:
        reports = self.engine.forward_backward(self.microbatches, self.loss)
        self.engine.optimizer_step()
        return sum(float(report.sums["loss"]) for report in reports)


class Peer(TrlPeer):
    """TRL's trainer, step by step: its batch, its loss, its optimizer."""

    def __init__(self, directory: Path, longest: int) -> None:
        from datasets import load_dataset
        from trl import RewardConfig, RewardTrainer

        common = RewardConfig, directory, NUM_PAIRS, LR, BETAS, WEIGHT_DECAY
        own = settings(*common, max_length=2 * longest)
        model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
        rows = load_dataset("json", data_files=str(directory / "pairs.jsonl"), split="train", cache_dir=str(directory))
        tokenizer = AutoTokenizer.from_pretrained(directory)
        trainer = RewardTrainer(model=model, args=own, train_dataset=rows, processing_class=tokenizer)
        super().__init__(trainer, CLIP)


def measure(directory: Path, longest: int, steps: int, layout: ParallelLayout) -> dict[str, Any]:
    own = Own(directory, longest, layout)
    ways: dict[str, Any] = {OWN: own} | ({PEER: Peer(directory, longest)} if find_spec("trl") is not None else {})
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for _ in range(steps + 1):  # the first one warms up
        for name, way in ways.items():
            found[name].append(timed(way))
    losses = {name: [loss for *_, loss in measured] for name, measured in found.items()}
    worst = max(abs(a - b) for a, b in zip(losses[OWN], losses.get(PEER, losses[OWN]), strict=True))
    assert worst < TOLERANCE, f"the losses differ by {worst}: {losses}"
    seconds, cpu = ({name: [one[k] for one in measured[1:]] for name, measured in found.items()} for k in (0, 1))
    return {
        "num_tokens": own.num_tokens,
        "padding": own.padding,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "losses": losses,
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each way (default: 5)")
    parser.add_argument("--longest", type=int, default=512, help="tokens of the longest sequence (default: 512)")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads (default: torch's choice)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 steps: shows that it works, not how fast")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args(argv)
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    sizes, longest, steps = (QUICK, 32, 2) if arguments.quick else (MODEL, arguments.longest, arguments.steps)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group(platform.current().backend)
    layout = ParallelLayout.create(1)
    initialize_groups(layout, seed=0)
    with tempfile.TemporaryDirectory() as scratch:
        make_reward_model(Path(scratch), sizes, longest)
        found = measure(Path(scratch), longest, steps, layout)
    kinds = ("seconds", "cpu_seconds")
    rows: list[list[Any]] = [
        [name, *(statistics.median(found[kind][name]) for kind in kinds)] for name in found["seconds"]
    ]
    ratios = {}
    if PEER in found["seconds"]:
        for kind in kinds:
            own, peer = found[kind][OWN], found[kind][PEER]
            ratios[kind] = statistics.median(a / b for a, b in zip(own, peer, strict=True))
        rows.append([f"{OWN} / {PEER}", *ratios.values()])
    else:
        print("TRL is not installed: only our own time is measured; see --help\n")
    text = f"{table(['step of a reward model, 8 pairs', 'time, s', 'CPU time, s'], rows)}\n\n"
    text += f"{found['num_tokens']} tokens; padded to the longest sequence {found['padding']:.0%} would be padding."
    title = f"Step of a reward model (medians of {steps} alternating steps; ratios: medians of pairs)"
    publish(title, text, platform.current().name, {**found, "ratios": ratios}, arguments.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
