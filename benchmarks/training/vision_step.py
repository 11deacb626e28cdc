"""Tokens per second of a GRPO step on pictures: packed, with the cache of features, against transformers unpacked.

Both have the same model (Qwen2.5-VL's, small, random weights, float32, tower frozen) and the same batch: prompts with a
picture each, several samples of every prompt, responses of uneven lengths. A step is what GRPO computes of it: old and
reference log-probabilities without gradient, then forward, backward, clipping and AdamW. The ways take turns, step by
step, in one process:

``mega_rl``: micro-batches packed without padding; the tower looks at a picture once and keeps its features.
``transformers``: micro-batches padded to their longest sequence, the tower in every pass over every sample, as trl's
trainer calls it. Its pictures are decoded and cut into patches beforehand, which ours does in the step.

``mega_rl`` is timed twice: with pictures that it has never seen (the cache is emptied before the step), and with those
that it knows from an epoch before. The seconds in the tower are counted by pass. Training alone, without the two passes
before it, is timed too.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks.report import publish, table
from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.config.schema.sections import MemoryConfig, OptimizerConfig, ParallelConfig
from mega_rl.data.packing import pack
from mega_rl.megatron.engine import MegatronEngine, Optimization
from mega_rl.megatron.model.spec import TrainerSpec
from mega_rl.megatron.policy import MegatronPolicy, initialize_groups
from mega_rl.microbatch import Figures, Images, Microbatch, Sequence, TokenStats
from mega_rl.models.positions import Placed, image_positions, picture_places
from mega_rl.models.shape import read_model_shape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.parallel.schedule import balance

NEW, KNOWN, THEIRS = "mega_rl, new pictures", "mega_rl, known pictures", "transformers"
PASSES = ("old", "reference", "training")
PATCH, MERGE, VOCABULARY = 14, 2, 4096
IDS = {
    f"{name}_token_id": VOCABULARY - 1 - i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))
}
PICTURE_TOKEN = IDS["image_token_id"]
LR, CLIP = 1e-5, 1.0


@dataclass(frozen=True)
class Case:
    """One model and one batch."""

    width: int
    layers: int
    tower_width: int
    tower_layers: int
    num_prompts: int
    num_samples: int  # of each prompt
    text: int  # tokens of a prompt beside its picture
    responses: tuple[int, int]  # tokens, from and to
    pixels: tuple[int, int]  # of a picture's side, from and to
    max_tokens: int  # of a packed micro-batch; a padded one has as many samples as mega_rl's hold on average


CASES = {
    "tiny": Case(64, 2, 32, 2, 2, 2, 6, (4, 16), (56, 84), 256),
    "4M": Case(192, 6, 128, 8, 4, 4, 16, (8, 96), (140, 252), 1024),
}


@dataclass(frozen=True)
class Drawn:
    """A picture of chance."""

    image: Image.Image
    key: str
    grid: tuple[int, int]
    processor: Qwen2VLImageProcessorPil

    def patches(self) -> Tensor:
        made = self.processor(images=[self.image], return_tensors="np")
        return torch.from_numpy(np.ascontiguousarray(made["pixel_values"], dtype=np.float32))


@dataclass
class TowerTime:
    """Seconds in a tower by pass, and how often it was called."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PASSES, 0.0))
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PASSES, 0))
    now: str = PASSES[0]
    _begin: float = 0.0

    def reset(self) -> None:
        self.seconds, self.calls = dict.fromkeys(PASSES, 0.0), dict.fromkeys(PASSES, 0)

    def watch(self, module: torch.nn.Module) -> None:
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def _before(self, *_: Any) -> None:
        self._begin = time.process_time()

    def _after(self, *_: Any) -> None:
        self.seconds[self.now] += time.process_time() - self._begin
        self.calls[self.now] += 1


def write_model(case: Case, directory: Path) -> int:
    """Random weights as a Hugging Face directory; returns the number of parameters."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen2_5_vl",
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": case.width,
            "intermediate_size": 3 * case.width,
            "num_hidden_layers": case.layers,
            "num_attention_heads": case.width // 32,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
            "tie_word_embeddings": True,
        },
        vision_config={
            "depth": case.tower_layers,
            "hidden_size": case.tower_width,
            "intermediate_size": 3 * case.tower_width,
            "num_heads": case.tower_width // 16,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": list(range(case.tower_layers))[3::4],
            "out_hidden_size": case.width,
        },
        tie_word_embeddings=True,
        **IDS,
    )
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(directory)
    return int(sum(p.numel() for p in model.parameters()))


def make_sequences(case: Case) -> list[Sequence]:
    """A picture between two halves of text, then the response; only that is learnt from."""
    chance = np.random.default_rng(0)
    processor = Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE)
    processor.size = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": 1 << 20}
    found = []
    lengths = chance.permutation(np.linspace(*case.responses, case.num_prompts * case.num_samples).astype(int))
    for prompt in range(case.num_prompts):
        sides = [int(n) // (PATCH * MERGE) * PATCH * MERGE for n in chance.integers(*case.pixels, 2, endpoint=True)]
        image = Image.fromarray(chance.integers(0, 256, (*sides, 3), dtype=np.uint8))
        drawn = Drawn(image, str(prompt), (sides[0] // PATCH, sides[1] // PATCH), processor)
        placed = [Placed(case.text // 2, *drawn.grid)]
        text = chance.integers(VOCABULARY - 8, size=case.text)
        num_picture = drawn.grid[0] * drawn.grid[1] // MERGE**2
        head = np.concatenate([text[: case.text // 2], np.full(num_picture, PICTURE_TOKEN), text[case.text // 2 :]])
        for length in lengths[prompt * case.num_samples : (prompt + 1) * case.num_samples]:
            ids = torch.from_numpy(np.concatenate([head, chance.integers(VOCABULARY - 8, size=length)]))
            mask = torch.zeros(len(ids) - 1)
            mask[len(head) - 1 :] = 1
            images = Images((drawn,), picture_places(placed, MERGE))
            positions = image_positions(len(mask), placed, MERGE)
            found.append(replace(Sequence(ids, mask), images=images, position_ids=positions))
    return found


class Own:
    """``MegatronEngine`` on packed micro-batches, and a frozen copy of its model as the reference."""

    def __init__(self, directory: Path, case: Case, sequences: list[Sequence], layout: ParallelLayout) -> None:
        spec = TrainerSpec(torch.float32, ParallelConfig(), MemoryConfig(), 1.0, 1024, entropy_has_gradient=False)
        device = platform.current().set_device(0)
        parts = balance([s.loss_mask.numel() for s in sequences], 1, case.max_tokens)[0]
        self.microbatches = [pack(sequences, part, pad_to_multiple=1, pad_token_id=0) for part in parts]
        self.num_learnt = sum(float(m.loss_mask.sum()) for m in self.microbatches)
        shape, weights = read_model_shape(directory), HFReader(directory)
        optimizer = OptimizerConfig(lr=LR, weight_decay=0.0, clip_grad=CLIP)
        policy = MegatronPolicy(spec, shape, layout, device)
        self.engine = MegatronEngine(policy, weights, Optimization(optimizer, 1000))
        self.reference = MegatronPolicy(spec, shape, layout, device)
        self.reference.copy_from(self.engine.policy)
        self.time, self.towers = TowerTime(), []
        for policy in (self.engine.policy, self.reference):
            tower = policy.chunks[0].vision
            assert tower is not None
            self.time.watch(tower.module)
            self.towers.append(tower)

    def forget(self) -> None:
        """Every picture."""
        for tower in self.towers:
            tower._known._of_key.clear()
            tower._known._num_bytes = 0

    def step(self, passes: tuple[str, ...]) -> float:
        for name in passes[:-1]:
            self.time.now = name
            (self.engine if name == "old" else self.reference).token_stats(self.microbatches)
        self.time.now = passes[-1]

        def loss(stats: TokenStats, microbatch: Microbatch) -> tuple[Tensor, Figures]:
            return -(stats.logprobs * microbatch.loss_mask).sum() / self.num_learnt, Figures()

        reports = self.engine.forward_backward(self.microbatches, loss)
        self.engine.optimizer_step()
        return sum(float(report.sums["loss"]) for report in reports)


class Theirs:
    """The same model as a plain training script has it: padded, the tower in every pass, fused AdamW."""

    def __init__(self, directory: Path, sequences: list[Sequence], num_microbatches: int) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="sdpa"
        )
        tower = self.model.model.visual
        tower.requires_grad_(False)
        self.model.train()
        learnt = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(learnt, lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
        size = -(-len(sequences) // num_microbatches)
        groups = [sequences[i : i + size] for i in range(0, len(sequences), size)]
        self.batches = [_padded(group) for group in groups]
        self.num_learnt = sum(float(s.loss_mask.sum()) for s in sequences)
        self.time = TowerTime()
        self.time.watch(tower)

    def _logprobs(self, inputs: dict[str, Tensor], targets_BL: Tensor) -> Tensor:
        logits_BLV = self.model(**inputs, use_cache=False, logits_to_keep=targets_BL.shape[1]).logits
        return -torch.nn.functional.cross_entropy(logits_BLV.transpose(1, 2), targets_BL, reduction="none")

    def step(self, passes: tuple[str, ...]) -> float:
        for name in passes[:-1]:
            self.time.now = name
            with torch.no_grad():
                for inputs, targets_BL, _ in self.batches:
                    self._logprobs(inputs, targets_BL)
        self.time.now = passes[-1]
        self.optimizer.zero_grad()
        total = 0.0
        for inputs, targets_BL, mask_BL in self.batches:
            loss = -(self._logprobs(inputs, targets_BL) * mask_BL).sum() / self.num_learnt
            loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_([p for p in self.model.parameters() if p.requires_grad], CLIP)
        self.optimizer.step()
        return total


def _padded(group: list[Sequence]) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """The model's inputs, and targets and mask [B, L] of the end that holds all responses."""
    pad = torch.nn.utils.rnn.pad_sequence
    ids_BL = pad([s.token_ids[:-1] for s in group], batch_first=True)
    targets_BL = pad([s.token_ids[1:] for s in group], batch_first=True)
    mask_BL = pad([s.loss_mask for s in group], batch_first=True)
    pictures = [picture for s in group if s.images for picture in s.images.pictures]
    kept = ids_BL.shape[1] - int(mask_BL.any(0).nonzero()[0])  # no logits of what no response begins in
    inputs = {
        "input_ids": ids_BL,
        "attention_mask": pad([torch.ones(len(s.loss_mask), dtype=torch.int64) for s in group], batch_first=True),
        "mm_token_type_ids": (ids_BL == PICTURE_TOKEN).long(),
        "pixel_values": torch.cat([picture.patches() for picture in pictures]),
        "image_grid_thw": torch.tensor([(1, *picture.grid) for picture in pictures]),
    }
    return inputs, targets_BL[:, -kept:], mask_BL[:, -kept:]


def timed(step: Callable[[], float]) -> tuple[float, float]:
    """Seconds, and CPU seconds of this process: what other programs take does not count there."""
    begin, cpu_begin = time.perf_counter(), time.process_time()
    step()
    return time.perf_counter() - begin, time.process_time() - cpu_begin


def run_case(name: str, case: Case, layout: ParallelLayout, num_rounds: int) -> dict[str, Any]:
    sequences = make_sequences(case)
    with tempfile.TemporaryDirectory() as scratch:
        num_parameters = write_model(case, Path(scratch))
        own = Own(Path(scratch), case, sequences, layout)
        theirs = Theirs(Path(scratch), sequences, len(own.microbatches))
    losses = [own.step(PASSES), theirs.step(PASSES)]
    assert abs(losses[0] - losses[1]) <= 1e-5 * max(losses), f"losses differ: {losses}"
    result: dict[str, Any] = {"case": name, "num_parameters": num_parameters}
    result["num_tokens"] = sum(s.loss_mask.numel() for s in sequences)
    for what, passes in (("step", PASSES), ("training", PASSES[-1:])):
        times: dict[str, list[tuple[float, float]]] = {NEW: [], KNOWN: [], THEIRS: []}
        towers: dict[str, TowerTime] = {}
        for number in range(num_rounds):
            for way in list(times)[:: 1 if number % 2 == 0 else -1]:
                runner = theirs if way == THEIRS else own
                if way == NEW:
                    own.forget()
                elif way == KNOWN and number % 2:  # the round begins with this way
                    own.step(PASSES[-1:])
                runner.time.reset()
                times[way].append(timed(partial(runner.step, passes)))
                towers[way] = replace(runner.time)
        result[what] = _figures(times, towers)
    return result


def _figures(times: dict[str, list[tuple[float, float]]], towers: dict[str, TowerTime]) -> dict[str, Any]:
    medians = {way: [statistics.median(pair[k] for pair in found) for k in (0, 1)] for way, found in times.items()}
    return {
        "seconds": {way: [pair[0] for pair in found] for way, found in times.items()},
        "cpu_seconds": {way: [pair[1] for pair in found] for way, found in times.items()},
        "speedup": {way: medians[THEIRS][0] / medians[way][0] for way in (NEW, KNOWN)},
        "cpu_speedup": {way: medians[THEIRS][1] / medians[way][1] for way in (NEW, KNOWN)},
        "tower_seconds": {way: tower.seconds for way, tower in towers.items()},
        "tower_calls": {way: tower.calls for way, tower in towers.items()},
    }


def report(results: list[dict[str, Any]], num_rounds: int, path: Path | None) -> None:
    header = ["way", "step, tokens/s", "faster", "by CPU time", "training alone", "by CPU time"]
    header += [f"tower, {name} pass, CPU s" for name in PASSES]
    texts = []
    for found in results:
        rows = []
        for way in (NEW, KNOWN, THEIRS):
            row = [way, found["num_tokens"] / statistics.median(found["step"]["seconds"][way])]
            for what in ("step", "training"):
                for kind in ("speedup", "cpu_speedup"):
                    row.append("" if way == THEIRS else f"{found[what][kind][way]:.2f}x")
            rows.append([*row, *(f"{found['step']['tower_seconds'][way][name]:.2f}" for name in PASSES)])
        texts.append(f"{found['num_parameters'] / 1e6:.1f}M parameters, {found['num_tokens']} tokens\n")
        texts.append(table(header, rows))
    title = f"GRPO step on pictures (medians of {num_rounds} alternating rounds; speed-ups: ratios of medians)"
    publish(title, "\n".join(texts), platform.current().name, {"results": results}, path)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed steps of each way (default: 5)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, 2 rounds: that it works, not how fast")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args(argv)
    here = platform.current()
    here.set_device(0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group(here.backend)
    layout = ParallelLayout.create(1)
    initialize_groups(layout, seed=0)
    name, num_rounds = ("tiny", 2) if arguments.quick else ("4M", arguments.rounds)
    report([run_case(name, CASES[name], layout, num_rounds)], num_rounds, arguments.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
