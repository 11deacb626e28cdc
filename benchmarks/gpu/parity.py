"""Slices of ``run.py`` that compare: every operator, a step, the losses of a training."""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from benchmarks.gpu.bench import TINY, Bench, RandomWeights, negative_loglikelihood, random_batch, shape_of
from benchmarks.training import step as train_step
from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.config.schema.device import Kernels
from mega_rl.microbatch import Microbatch
from mega_rl.models.shape import read_model_shape
from mega_rl.platform import cuda, dispatch
from mega_rl.platform.operators.attention import VarlenPacking, place_borders
from mega_rl.platform.operators.compiled import check_kernels, fused
from mega_rl.platform.operators.torch_kernels import TorchOperators
from tests.models import families
from tests.operator_cases import TOLERANCES, compare, operator_cases

FAMILIES = ("qwen2", "llama", "qwen3_moe", "deepseek_v3")  # of the parity of a step
STEPS = 100  # of the compared losses
TRAINED = shape_of("qwen2", 256, 768, 6, 4, 2, 4096)  # of the compared losses


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


def kernels(bench: Bench) -> None:
    """Norms, SwiGLU and rotary embedding by each value of ``platform.kernels``: against the reference, and how fast."""
    plain = platform.current().operators
    tokens, width, ffn, heads = (64, 32, 64, 4) if bench.quick else (16384, 4096, 14336, 32)

    def random(*size: int) -> Tensor:
        return torch.randn(size, device=bench.device).bfloat16().requires_grad_()

    x, residual, weight = random(tokens, width), random(tokens, width), random(width)
    gates = random(tokens, 2 * ffn)
    rotated = random(tokens, heads, 128)
    angles_TD = torch.rand(tokens, 128, device=bench.device)
    tables = angles_TD.cos().bfloat16(), angles_TD.sin().bfloat16()
    calls: dict[str, tuple[tuple[Tensor, ...], Callable[[], Sequence[Tensor]]]] = {
        "rms_norm": ((x, weight), lambda: [dispatch.rms_norm(x, weight, 1e-6)]),
        "add_rms_norm": ((x, residual, weight), lambda: dispatch.add_rms_norm(x, residual, weight, 1e-6)),
        "swiglu": ((gates,), lambda: [dispatch.swiglu(gates)]),
        "rotary": ((rotated,), lambda: [dispatch.rotary(rotated, *tables)]),
    }
    for kind in get_args(Kernels):
        try:
            check_kernels(kind, "cuda")  # what is installed; the rest goes anywhere
            platform.current().operators = fused(plain, kind)
            for name, (inputs, call) in calls.items():
                cases = [case for case in operator_cases(torch.bfloat16) if case.name == name]
                largest = max(compare(case, torch.bfloat16, str(bench.device)) for case in cases)
                upstream = [torch.randn_like(output) for output in call()]

                def both(inputs: Any = inputs, call: Any = call, upstream: list[Tensor] = upstream) -> None:
                    torch.autograd.grad(call(), inputs, upstream)

                with torch.no_grad():
                    forward_s = bench.seconds(call)
                bench.row(operator=name, kernels=kind, largest=largest, forward_s=forward_s, both_s=bench.seconds(both))
        except Exception as error:  # noqa: BLE001 - the other kernels are measured all the same
            bench.row(operator="all", kernels=kind, error=f"{type(error).__name__}: {str(error)[:200]}")
        finally:
            platform.current().operators = plain


def attention(bench: Bench) -> None:
    """Causal attention in bfloat16 by each way that the device has, for packs of many and of few sequences."""
    heads, kv_heads, width = (4, 2, 8) if bench.quick else (32, 8, 128)
    for number, length in ((4, 8),) if bench.quick else ((64, 256), (8, 2048), (2, 8192), (1, 32768)):
        borders = place_borders([length] * number, bench.device)
        packing = VarlenPacking(borders, borders, length, length)
        qkv = [
            torch.randn(number * length, count, width, device=bench.device).bfloat16().requires_grad_()
            for count in (heads, kv_heads, kv_heads)
        ]
        upstream = torch.randn_like(qkv[0])
        with torch.no_grad():
            exact = by_sdpa(*(x.float() for x in qkv), packing=packing)
        for name, way in ways_of_attention(bench.device).items():

            def forward(way: Any = way, qkv: Any = qkv, packing: Any = packing) -> Any:
                with torch.no_grad():
                    return way(*qkv, packing=packing)

            def both(way: Any = way, qkv: Any = qkv, packing: Any = packing, upstream: Any = upstream) -> None:
                torch.autograd.grad(way(*qkv, packing=packing), qkv, upstream)

            one = {"pack": f"{number} x {length}", "way": name}
            try:
                largest = float((forward().float() - exact).abs().max())
                seconds = {"forward_s": bench.seconds(forward), "both_s": bench.seconds(both)}
                flops = 2 * number * length**2 * heads * width  # the half of both products that causality leaves
                bench.row(**one, **seconds, largest=largest, tflops=3.5 * flops / seconds["both_s"] / 1e12)
            except Exception as error:  # noqa: BLE001 - the other ways are measured all the same
                bench.row(**one, error=f"{type(error).__name__}: {str(error)[:200]}")


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, packing: VarlenPacking) -> Tensor:
    return TorchOperators().varlen_attention(q, k, v, packing, softmax_scale=q.shape[-1] ** -0.5, causal=True)


def ways_of_attention(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """SDPA, and the kernels for packs that are installed, by name."""

    def packed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, packing: VarlenPacking) -> Tensor:
            borders = packing.cu_seqlens_q, packing.cu_seqlens_k, packing.max_seqlen_q, packing.max_seqlen_k
            return function(q, k, v, *borders, softmax_scale=q.shape[-1] ** -0.5, causal=True)

        return attend

    kernels = {"torch's for packs": cuda.torch_attention, "flash_attn": cuda.flash_attention}
    known = {name: kernel() for name, kernel in kernels.items()} if device.type == "cuda" else {}
    return {"SDPA": by_sdpa} | {name: packed(kernel) for name, kernel in known.items() if kernel is not None}


def cpu_step(bench: Bench) -> None:
    """A training step on the CPU against transformers, as ``benchmarks/training/step.py`` has it."""
    settings = argparse.Namespace(steps=1 if bench.quick else 5, peak_tflops=None)
    name = "tiny" if bench.quick else "10M"
    found = train_step.run_case(name, train_step.CASES[name], bench.layout, settings)
    for way, speedup in found["speedup"].items():
        bench.row(case=name, against=way, speedup=speedup, by_cpu_time=found["cpu_speedup"][way])


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
