"""What the slices of ``run.py`` share: models with random weights made on the device, batches, the table, the clock."""

import gc
import hashlib
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mega_rl import platform
from mega_rl.bridge.slices import Box, extents
from mega_rl.config.schema.sections import MemoryConfig, OptimizerConfig, ParallelConfig
from mega_rl.data.packing import pack
from mega_rl.megatron.engine import MegatronEngine, Optimization
from mega_rl.megatron.model.spec import TrainerSpec
from mega_rl.megatron.policy import MegatronPolicy
from mega_rl.microbatch import Figures, Microbatch, Sequence as TokenSequence, TokenStats
from mega_rl.models.mixture import Mixture
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.types import DTYPES


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


def cut(shape: ModelShape, layers: int) -> ModelShape:
    mixture = shape.mixture
    if mixture is not None:
        mixture = replace(mixture, layers=frozenset(range(layers)))
    return replace(shape, num_layers=layers, mixture=mixture)


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
        spec = TrainerSpec(
            DTYPES[dtype], ParallelConfig(), memory, temperature=1.0, chunk_tokens=1024, entropy_has_gradient=False
        )
        source = RandomWeights(self.device) if weights is None else weights
        policy = MegatronPolicy(spec, shape, self.layout, self.device)
        return MegatronEngine(policy, source, Optimization(OptimizerConfig(lr=lr), 1000))


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


def free() -> None:
    gc.collect()
    platform.current().empty_cache()
    platform.current().reset_peak_memory()


def timed(work: Callable[[], object]) -> float:
    platform.current().synchronize()
    begin = time.perf_counter()
    work()
    platform.current().synchronize()
    return time.perf_counter() - begin
