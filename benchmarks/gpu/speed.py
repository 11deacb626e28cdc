"""Slices of ``run.py`` that measure the trainer's steps: speed, memory against the plan, log-probabilities."""

from typing import Any

import torch

from benchmarks.gpu.bench import Bench, cut, free, negative_loglikelihood, random_batch
from mega_rl import platform
from mega_rl.bridge.mapping.tuning import tuning_plan
from mega_rl.config.schema.sections import RunConfig
from mega_rl.megatron.model.logprob import VocabularyShard, token_logprobs
from mega_rl.models.shape import ModelShape
from mega_rl.planning.activations import ActivationModel, PlannedTokens
from mega_rl.planning.state import stage_parameters, trainer_state
from mega_rl.platform.operators.memory import OPERATOR_MEMORY

MEMORY_SHARE = 0.8  # of the device, that the plan of a cut model may take
MICROBATCH_TOKENS = 16384  # at least; a longer sequence is a micro-batch by itself
SETTINGS = ((2048, "none"), (8192, "none"), (8192, "selective"), (32768, "none"), (131072, "selective"))


def planned_bytes(bench: Bench, shape: ModelShape, recompute: str, length: int, num_tokens: int) -> int:
    """What the planner says of a step: all state, and the activations of one micro-batch."""
    config = RunConfig()
    config.model.dtype, config.trainer.stage, config.memory.recompute = "bfloat16", "sft", recompute
    name = platform.current().name
    model = ActivationModel(config, shape, bench.layout, OPERATOR_MEMORY[name], PlannedTokens(num_tokens, length, 1))
    held = stage_parameters(config, shape, bench.layout, 0, tuning_plan(config.tuning, shape))
    state = trainer_state(config, bench.layout, 0, held, has_reference=False)
    return state.total + model.of_stage(0).training


def fitting(bench: Bench, shape: ModelShape, recompute: str, length: int, num_tokens: int) -> int:
    """Layers of the model that the device holds by the plan."""
    room = platform.current().memory().device_total_bytes * MEMORY_SHARE
    layers = shape.num_layers
    while room and layers > 1 and planned_bytes(bench, cut(shape, layers), recompute, length, num_tokens) > room:
        layers -= 1
    return layers


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
    shard = VocabularyShard(None, 0, vocabulary, 1.0, 1024, entropy_has_gradient=False)
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
