"""The slices of ``gpu.py``: ``python benchmarks/gpu_slices.py NAME [--quick] --out FILE``, a process each.

MEGA_RL_PLATFORM says which device. Weights are random and made on the device, so that no file of a model is needed. A
slice writes its file after every part of it.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from report import machine
from torch import Tensor

from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.mapping.megatron import rank_series
from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.mapping.tuning import tuning_plan
from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.bridge.reshard.execute import Transfer, write_into
from mega_rl.bridge.reshard.plan import compile_plan
from mega_rl.bridge.series import slices_of
from mega_rl.bridge.slices import Box, Slice, extents, indices
from mega_rl.config.schema import MemoryConfig, OptimizerConfig, ParallelConfig, RunConfig
from mega_rl.data.packing import pack
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.logprob import VocabularyShard, token_logprobs
from mega_rl.megatron.offload import TrainerOffload
from mega_rl.megatron.policy import initialize_groups
from mega_rl.megatron.spec import TrainerSpec
from mega_rl.microbatch import Figures, Microbatch, Sequence as TokenSequence, TokenStats
from mega_rl.models.mixture import Mixture
from mega_rl.models.shape import ModelShape, read_model_shape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.planning.activations import ActivationModel, Tokens
from mega_rl.planning.state import stage_parameters, trainer_state
from mega_rl.platform.operators.memory import OPERATOR_MEMORY
from mega_rl.types import DTYPES
from tests import families
from tests.operator_cases import TOLERANCES, compare, operator_cases

MEMORY_SHARE = 0.8  # of the device, that the plan of a cut model may take
MICROBATCH_TOKENS = 16384  # at least; a longer sequence is a micro-batch by itself
SETTINGS = ((2048, "none"), (8192, "none"), (8192, "selective"), (32768, "none"), (131072, "selective"))
FAMILIES = ("qwen2", "llama", "qwen3_moe", "deepseek_v3")  # of the parity of a step
STEPS = 100  # of the compared losses


def shape_of(family: str, hidden: int, ffn: int, layers: int, heads: int, kv: int, vocabulary: int) -> ModelShape:
    width = hidden // heads
    return ModelShape(
        *(family, layers, hidden, ffn, heads, kv, width, vocabulary),
        tied=False,
        qkv_bias=family == "qwen2",
        qk_norm=family.startswith("qwen3"),
        norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling=None,
        max_position_embeddings=1 << 17,
    )


MODELS = {
    "0.5B": replace(shape_of("qwen2", 896, 4864, 24, 14, 2, 151936), tied=True),
    "1.5B": replace(shape_of("qwen2", 1536, 8960, 28, 12, 2, 151936), tied=True),
    "7B": shape_of("qwen2", 3584, 18944, 28, 28, 4, 152064),
    "8B": shape_of("llama", 4096, 14336, 32, 32, 8, 128256),
    # the layers of Qwen3-30B-A3B
    "mixture": replace(
        shape_of("qwen3_moe", 2048, 6144, 16, 32, 4, 151936),
        head_dim=128,
        mixture=Mixture(frozenset(range(16)), 128, 8, 768, normalize_weights=True),
    ),
}
TINY = shape_of("qwen2", 64, 128, 2, 4, 2, 512)
TINY_MIXTURE = replace(
    shape_of("qwen3_moe", 64, 128, 2, 4, 2, 512),
    mixture=Mixture(frozenset(range(2)), 8, 2, 32, normalize_weights=True),
)
TRAINED = shape_of("qwen2", 256, 768, 6, 4, 2, 4096)  # of the compared losses


class RandomWeights:
    """Weights from nothing, the same for the same tensor and box on one kind of device; read as a file is."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def read(self, name: str, box: Box) -> Tensor:
        size = extents(box)
        if len(size) == 1:
            return torch.full(size, 0.0 if name.endswith("bias") else 1.0, device=self._device)
        digest = hashlib.blake2b(f"{name} {box}".encode(), digest_size=6).digest()
        generator = torch.Generator(self._device).manual_seed(int.from_bytes(digest, "big"))
        return torch.randn(size, generator=generator, device=self._device) * 0.02


@dataclass
class Bench:
    """What every slice is given."""

    out: Path
    quick: bool
    device: torch.device
    layout: ParallelLayout
    document: dict[str, Any] = field(default_factory=dict)

    def write(self) -> None:
        self.out.write_text(json.dumps(self.document))

    def row(self, **figures: Any) -> None:
        """Another row of the slice's table, at once in the file."""
        self.document.setdefault("rows", []).append(figures)
        self.write()

    def model(self, name: str) -> ModelShape:
        return (TINY_MIXTURE if name == "mixture" else TINY) if self.quick else MODELS[name]

    def seconds(self, work: Callable[[], object], repeats: int = 5) -> float:
        """Of one call: the median, after one that does not count."""
        here, found = platform.current(), []
        for _ in range(1 if self.quick else repeats + 1):
            here.synchronize()
            begin = time.perf_counter()
            work()
            here.synchronize()
            found.append(time.perf_counter() - begin)
        return statistics.median(found[1:] or found)

    def engine(
        self, shape: ModelShape, dtype: str, recompute: str, weights: Any = None, lr: float = 1e-4
    ) -> MegatronEngine:
        memory = MemoryConfig(recompute=recompute)
        spec = TrainerSpec(DTYPES[dtype], ParallelConfig(), memory, temperature=1.0, chunk_tokens=1024)
        source = RandomWeights(self.device) if weights is None else weights
        optimizer = OptimizerConfig(lr=lr)
        return MegatronEngine(spec, optimizer, shape, self.layout, self.device, source, 1000, max_skipped_steps=0)


def random_batch(shape: ModelShape, lengths: Sequence[int], seed: int) -> Microbatch:
    """Sequences of random tokens, packed; every position is learnt from."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, shape.vocab_size, (length + 1,), generator=generator) for length in lengths]
    sequences = [TokenSequence(one, torch.ones(len(one) - 1)) for one in ids]
    return pack(sequences, list(range(len(sequences))), pad_to_multiple=1, pad_token_id=0)


def negative_loglikelihood(num_tokens: int) -> Callable[[TokenStats, Microbatch], tuple[Tensor, Figures]]:
    def loss(stats: TokenStats, microbatch: Microbatch) -> tuple[Tensor, Figures]:
        return -(stats.logprobs * microbatch.loss_mask).sum() / num_tokens, Figures()

    return loss


def operators(bench: Bench) -> None:
    """Every operator of the facade, forward and backward, against its reference."""
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        for case in operator_cases(dtype):
            try:
                largest = compare(case, dtype, str(bench.device))
                allowed = ", ".join(f"{value:g}" for value in TOLERANCES[dtype])
                bench.row(operator=case.name, dtype=name, largest=largest, allowed=allowed)
            except Exception as error:  # noqa: BLE001 - the other operators are compared all the same
                bench.row(operator=case.name, dtype=name, error=f"{type(error).__name__}: {str(error)[:200]}")


def step(bench: Bench) -> None:
    """A forward and backward pass of small models with weights that make mistakes visible."""
    for family in FAMILIES[:1] if bench.quick else FAMILIES:
        model = families.make(family)
        lengths = (24, 7, 40)
        with tempfile.TemporaryDirectory() as scratch:
            model.save_pretrained(scratch)
            shape, reader = read_model_shape(scratch), HFReader(scratch)
            batch = random_batch(shape, lengths, seed=0)
            expected_T, expected_norm = by_transformers(model, batch)
            for dtype in ("float32", "bfloat16"):
                engine = bench.engine(shape, dtype, "none", reader)
                difference_T = (engine.token_stats([batch])[0].logprobs - expected_T).abs()
                engine.forward_backward([batch], negative_loglikelihood(batch.num_tokens))
                norm = engine.optimizer_step().grad_norm
                bench.row(
                    model=family,
                    dtype=dtype,
                    mean=float(difference_T.mean()),
                    largest=float(difference_T.max()),
                    grad_norm=abs(norm / expected_norm - 1),
                )


def by_transformers(model: Any, batch: Microbatch) -> tuple[Tensor, float]:
    """Log-probabilities [T] of the targets, and the norm of their mean's gradient; one sequence after the other."""
    borders = batch.cu_seqlens.tolist()
    parts = []
    for start, end in zip(borders, borders[1:], strict=False):
        logits_LV = model(batch.token_ids[None, start:end]).logits[0].float()
        parts.append(logits_LV.log_softmax(-1).gather(1, batch.target_ids[start:end, None])[:, 0])
    logprobs_T = torch.cat(parts)
    (-logprobs_T.mean()).backward()
    squares = sum(float(p.grad.double().square().sum()) for p in model.parameters() if p.grad is not None)
    return logprobs_T.detach(), squares**0.5


def planned_bytes(bench: Bench, shape: ModelShape, recompute: str, length: int, num_tokens: int) -> int:
    """What the planner says of a step: all state, and the activations of one micro-batch."""
    config = RunConfig()
    config.model.dtype, config.trainer.stage, config.memory.recompute = "bfloat16", "sft", recompute
    name = platform.current().name
    model = ActivationModel(config, shape, bench.layout, OPERATOR_MEMORY[name], Tokens(num_tokens, length, 1))
    held = stage_parameters(config, shape, bench.layout, 0, tuning_plan(config.tuning, shape))
    state = trainer_state(config, bench.layout, 0, held, has_reference=False)
    return state.total + model.of_stage(0).training


def cut(shape: ModelShape, layers: int) -> ModelShape:
    mixture = shape.mixture
    if mixture is not None:
        mixture = replace(mixture, layers=frozenset(range(layers)))
    return replace(shape, num_layers=layers, mixture=mixture)


def fitting(bench: Bench, shape: ModelShape, recompute: str, length: int, num_tokens: int) -> int:
    """Layers of the model that the device holds by the plan."""
    room = platform.current().memory().device_total_bytes * MEMORY_SHARE
    layers = shape.num_layers
    while room and layers > 1 and planned_bytes(bench, cut(shape, layers), recompute, length, num_tokens) > room:
        layers -= 1
    return layers


def free() -> None:
    gc.collect()
    platform.current().empty_cache()
    platform.current().reset_peak_memory()


def mfu(bench: Bench, name: str) -> None:
    """Forward pass, backward pass and optimizer step at growing lengths."""
    shape = bench.model(name)
    for length, recompute in ((32, "none"), (64, "selective")) if bench.quick else SETTINGS:
        num_tokens = length if bench.quick else max(length, MICROBATCH_TOKENS)
        layers = fitting(bench, shape, recompute, length, num_tokens)
        while True:
            one = {"model": name, "length": length, "recompute": recompute, "layers": layers}
            try:
                bench.row(**one, **speed(bench, cut(shape, layers), recompute, length, num_tokens))
                break
            except torch.OutOfMemoryError as error:
                problem = f"out of memory with {layers} layers: {str(error)[:120]}"
            except Exception as error:  # noqa: BLE001 - the other lengths are measured all the same
                bench.row(**one, error=f"{type(error).__name__}: {str(error)[:200]}")
                break
            free()
            if layers == 1:
                bench.row(**one, error=problem)
                break
            layers = max(1, layers * 3 // 4)


def speed(bench: Bench, shape: ModelShape, recompute: str, length: int, num_tokens: int) -> dict[str, Any]:
    free()
    engine = bench.engine(shape, "bfloat16", recompute)
    batch = random_batch(shape, [length] * (num_tokens // length), seed=0)
    loss = negative_loglikelihood(batch.num_tokens)
    engine.forward_backward([batch], loss)
    engine.optimizer_step()
    platform.current().reset_peak_memory()
    both_s = bench.seconds(lambda: engine.forward_backward([batch], loss))
    peak_bytes = platform.current().memory().device_peak_bytes
    forward_s = bench.seconds(lambda: engine.token_stats([batch]))
    optimizer_s = bench.seconds(engine.optimizer_step)
    forward = engine.policy.flops.of(batch.lengths, with_gradient=False)
    both = engine.policy.flops.of(batch.lengths, with_gradient=True)
    peak = platform.current().peak_flops()
    backward_s = max(both_s - forward_s, 1e-9)

    def of_peak(flops: float, seconds: float) -> float | None:
        return None if peak is None else flops / seconds / peak

    return {
        "forward_s": forward_s,
        "backward_s": backward_s,
        "optimizer_s": optimizer_s,
        "tflops": both / both_s / 1e12,
        "mfu_forward": of_peak(forward, forward_s),
        "mfu_backward": of_peak(both - forward, backward_s),
        "mfu": of_peak(both, both_s),
        "peak_bytes": peak_bytes,
        "planned_bytes": planned_bytes(bench, shape, recompute, length, num_tokens),
    }


def memory(bench: Bench) -> None:
    """The device's peak in a step against the plan, with each way of recomputing."""
    num_tokens = 64 if bench.quick else MICROBATCH_TOKENS
    shape = bench.model("1.5B")
    for recompute in ("none", "selective", "full"):
        layers = fitting(bench, shape, recompute, num_tokens, num_tokens)
        found = speed(bench, cut(shape, layers), recompute, num_tokens, num_tokens)
        kept = {name: found[name] for name in ("peak_bytes", "planned_bytes")}
        bench.row(model="1.5B", layers=layers, recompute=recompute, **kept)


def logprob(bench: Bench) -> None:
    """Log-probabilities over a large vocabulary, beside the matrix products that they cannot do without."""
    tokens, vocabulary, width = (64, 2048, 32) if bench.quick else (8192, 151936, 3584)
    here, dtype = platform.current(), torch.bfloat16
    generator = torch.Generator(bench.device).manual_seed(0)
    hidden_TD, weight_VD = (
        (torch.randn(rows, width, generator=generator, device=bench.device) * width**-0.25).to(dtype).requires_grad_()
        for rows in (tokens, vocabulary)
    )
    target_ids_T = torch.arange(tokens, device=bench.device) % vocabulary
    shard = VocabularyShard(None, 0, vocabulary, 1.0, 1024)
    rows = min(1024, tokens)
    logits_CV = torch.empty(rows, vocabulary, dtype=dtype, device=bench.device)

    def products() -> None:
        """The logits of some tokens at a time, in memory that is used again."""
        with torch.no_grad():
            for start in range(0, tokens, rows):
                torch.mm(hidden_TD[start : start + rows], weight_VD.t(), out=logits_CV)

    def forward() -> None:
        with torch.no_grad():
            token_logprobs(hidden_TD, weight_VD, target_ids_T, shard)

    def both() -> None:
        hidden_TD.grad = weight_VD.grad = None
        logprobs_T, *_ = token_logprobs(hidden_TD, weight_VD, target_ids_T, shard)
        logprobs_T.sum().backward()

    products_s = bench.seconds(products)
    for name, work, num_products in (("forward", forward, 1), ("forward and backward", both, 3)):
        free()
        before = here.memory().device_allocated_bytes
        seconds = bench.seconds(work)
        peak_bytes = here.memory().device_peak_bytes - before
        size = f"{tokens} x {vocabulary} x {width}"
        row = {"size": size, "pass": name, "seconds": seconds, "products_s": num_products * products_s}
        bench.row(**row, peak_bytes=peak_bytes)


def buffers(slices: Sequence[Slice], device: torch.device) -> dict[str, Tensor]:
    """Parameters as large as the slices ask for."""
    sizes: dict[str, list[int]] = {}
    for piece in slices:
        ends = [end for _, end in piece.local_box]
        sizes[piece.local_name] = [max(a, b) for a, b in zip(sizes.get(piece.local_name, ends), ends, strict=True)]
    return {name: torch.empty(size, dtype=torch.bfloat16, device=device) for name, size in sizes.items()}


def sync(bench: Bench) -> None:
    """The trainer's weights into buffers of the engine's layout, against copying as many bytes."""
    here = platform.current()
    for name in ("1.5B", "mixture"):
        shape = bench.model(name)
        held, wanted = rank_series(shape, bench.layout, 0), vllm_series(shape, 1, 0)
        weights, engine = (buffers(slices_of(series), bench.device) for series in (held, wanted))
        for tensor in weights.values():
            tensor.normal_()
        transfer = Transfer(compile_plan([held], [wanted]), 0, 1, None, 1 << 28, bench.device, here.synchronize)
        write = write_into(engine)

        def read(local_name: str, hf_name: str, hf_box: Box, box: Box, held: Any = weights) -> Tensor:
            return held[local_name][indices(box)]

        def push(transfer: Transfer = transfer, read: Any = read, write: Any = write) -> None:
            transfer.run(read, write, torch.bfloat16)

        def copy(engine: dict[str, Tensor] = engine, source: Any = None) -> None:
            for local_name, tensor in engine.items():
                tensor.copy_(source[local_name])

        sync_s = bench.seconds(push)
        check_sync(shape, slices_of(held), weights, slices_of(wanted), engine)
        num_bytes = sum(2 * tensor.numel() for tensor in engine.values())
        source = {local_name: torch.empty_like(tensor).fill_(1) for local_name, tensor in engine.items()}
        copy_s = bench.seconds(lambda source=source, copy=copy: copy(source=source))
        bench.row(model=name, bytes=num_bytes, sync=num_bytes / sync_s / 1e9, copy=num_bytes / copy_s / 1e9)
        del weights, engine, source, transfer, write, read, push, copy
        free()


def check_sync(
    shape: ModelShape, held: list[Slice], weights: dict[str, Tensor], wanted: list[Slice], engine: dict[str, Tensor]
) -> None:
    """Every tensor put together from both sides is the same."""

    def assembled(pieces: Sequence[Slice], local: dict[str, Tensor], size: tuple[int, ...]) -> Tensor:
        whole = torch.full(size, float("nan"), dtype=torch.bfloat16, device=next(iter(local.values())).device)
        for piece in pieces:
            whole[indices(piece.hf_box)] = local[piece.local_name][indices(piece.local_box)].view(extents(piece.hf_box))
        return whole

    sides: list[dict[str, list[Slice]]] = [{}, {}]
    for side, pieces in zip(sides, (held, wanted), strict=True):
        for piece in pieces:
            side.setdefault(piece.hf_name, []).append(piece)
    for name, size in hf_tensors(shape).items():
        own, other = assembled(sides[0][name], weights, size), assembled(sides[1][name], engine, size)
        assert torch.equal(own, other), f"{name} differs after the sync"


def offload(bench: Bench) -> None:
    """Weights and optimizer state to the host and back, beside one large copy of pinned memory."""
    shape = bench.model("1.5B")
    engine = bench.engine(cut(shape, min(8, shape.num_layers)), "bfloat16", "none")
    batch = random_batch(shape, [64], seed=0)
    engine.forward_backward([batch], negative_loglikelihood(64))
    engine.optimizer_step()  # Adam makes its moments with the first step
    settings = MemoryConfig(offload=["weights", "optimizer"])
    parts = TrainerOffload(settings, engine.wrapped, engine.optimizer, is_active=True)
    on_device = torch.empty(1 << (20 if bench.quick else 30), dtype=torch.uint8, device=bench.device)
    on_host = torch.empty(on_device.shape, dtype=torch.uint8, pin_memory=platform.current().has_own_memory)
    out_s = bench.seconds(lambda: on_host.copy_(on_device, non_blocking=True))
    in_s = bench.seconds(lambda: on_device.copy_(on_host, non_blocking=True))
    for part, tensors in (("weights", parts._weights), ("optimizer", parts._optimizer_tensors)):
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors()}
        num_bytes = sum(storages.values())
        times: dict[str, list[float]] = {"out": [], "back": []}
        for _ in range(3):
            times["out"].append(timed(lambda part=part: parts.to_host(part)))
            times["back"].append(timed(lambda part=part: parts.to_device(part)))
        rates = {name: num_bytes / min(found) / 1e9 for name, found in times.items()}
        copies = {"copy_out": on_device.numel() / out_s / 1e9, "copy_in": on_device.numel() / in_s / 1e9}
        bench.row(part=part, bytes=num_bytes, **rates, **copies)


def timed(work: Callable[[], object]) -> float:
    platform.current().synchronize()
    begin = time.perf_counter()
    work()
    platform.current().synchronize()
    return time.perf_counter() - begin


def losses(bench: Bench, dtype: str) -> None:
    """The loss of every step of a training that is the same on every device."""
    shape = TINY if bench.quick else TRAINED
    engine = bench.engine(shape, dtype, "none", RandomWeights(torch.device("cpu")), lr=1e-3)
    lengths = [16, 8] if bench.quick else [512, 300, 212]
    batches = [random_batch(shape, lengths, seed) for seed in range(4)]
    found: list[float] = []
    for number in range(5 if bench.quick else STEPS):
        batch = batches[number % len(batches)]
        (report,) = engine.forward_backward([batch], negative_loglikelihood(batch.num_tokens))
        engine.optimizer_step()
        found.append(float(report.sums["loss"]))
    bench.document["losses"] = found
    bench.write()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="of the slice, such as logprob, mfu:7B or losses:device:bfloat16")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    here = platform.current()
    device = here.set_device(0)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)
    dist.init_process_group(here.backend)
    layout = ParallelLayout.create(1)
    initialize_groups(layout, seed=0)
    bench = Bench(arguments.out, arguments.quick, device, layout)
    bench.document["machine"] = machine(here.name)
    kind, _, rest = arguments.name.partition(":")
    plain = {f.__name__: f for f in (operators, step, logprob, sync, offload, memory)}
    try:
        if kind in plain:
            plain[kind](bench)
        elif kind == "mfu":
            mfu(bench, rest)
        else:
            losses(bench, rest.partition(":")[2])
    finally:
        bench.write()
    assert not {"vllm", "transformer_engine"} & set(sys.modules), "a slice measures the trainer alone"
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
