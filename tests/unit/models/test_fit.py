"""Every misfit of model, layout, lengths and processes as a sentence that names the field, its value and the fix."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from mega_rl.config.schema.sections import ParallelConfig
from mega_rl.models.fit import engine_problems, layer_problems, length_problems, trainer_problems
from mega_rl.models.latent import LatentAttention
from mega_rl.models.mixture import Mixture
from mega_rl.models.shape import ModelShape

DENSE = ModelShape(
    family="qwen3",
    num_layers=12,
    hidden_size=64,
    ffn_size=96,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    vocab_size=100,  # 128 rows in the engine
    tied=False,
    qkv_bias=False,
    qk_norm=True,
    norm_eps=1e-6,
    rope_theta=1e4,
    rope_scaling=None,
    max_position_embeddings=64,
)
SPARSE = replace(DENSE, mixture=Mixture(frozenset(range(12)), 8, 2, 24, True, shared_ffn_size=36))
LATENT = replace(
    DENSE,
    family="deepseek_v3",
    num_kv_heads=8,
    mixture=Mixture(frozenset(range(1, 12)), 8, 2, 24, True, shared_ffn_size=48),
    latent=LatentAttention(q_rank=20, kv_rank=15, nope_dim=8, rope_dim=4, value_dim=8),
)
TENSOR = "parallel.tensor is {}, which does not divide the model's {}: set it to a divisor of {}"


def layout(**sizes: Any) -> ParallelConfig:
    return ParallelConfig(**({"sequence": sizes.get("tensor", 1) > 1} | sizes))


@pytest.mark.parametrize(
    "module", ["mega_rl.models.fit", "mega_rl.models.shape", "mega_rl.config", "mega_rl.config.checks.model"]
)
def test_no_torch_is_needed(module: str) -> None:
    """A dry run and ``--help`` start at once, and plans are made on machines without torch."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("shape", "sizes", "world_size"),
    [
        (None, {}, None),
        (None, {"tensor": 2, "pipeline": 3, "context": 2}, 24),
        (DENSE, {"tensor": 4, "pipeline": 3, "virtual_pipeline": 4}, 12),
        (DENSE, {"tensor": 2, "sequence": False}, 2),  # dense models train without
        (SPARSE, {"tensor": 4, "expert": 8, "expert_tensor": 1}, 8),
        (SPARSE, {"tensor": 2, "expert": 4, "pipeline": 2}, 16),
        (LATENT, {"expert": 8, "pipeline": 12}, 96),
        (replace(SPARSE, ffn_size=5), {"tensor": 4}, 4),  # no layer has an MLP of that width
    ],
)
def test_layouts_that_fit(shape: ModelShape | None, sizes: dict[str, Any], world_size: int | None) -> None:
    assert trainer_problems(shape, layout(**sizes), world_size) == []


@pytest.mark.parametrize(
    ("shape", "sizes", "world_size", "sentences"),
    [
        (
            DENSE,
            {"tensor": 2, "context": 3},
            4,
            [
                "parallel.tensor 2 x parallel.context 3 x parallel.pipeline 1 = 6 does not divide the world size 4: "
                "start a multiple of 6 processes, or make the product one of 1, 2, 4"
            ],
        ),
        (
            SPARSE,
            {"tensor": 2, "expert": 4, "pipeline": 2},
            8,
            [
                "parallel.expert 4 x parallel.expert_tensor 2 does not divide the 4 processes of a pipeline stage: "
                "make the product one of 1, 2, 4"
            ],
        ),
        (
            None,
            {"sequence": True},
            1,
            ["parallel.sequence is True: set it to false, or parallel.tensor to more than 1"],
        ),
        (
            None,
            {"virtual_pipeline": 2},
            1,
            ["parallel.virtual_pipeline is 2: set it to null, or parallel.pipeline to more than 1"],
        ),
        (
            DENSE,
            {"pipeline": 5},
            None,
            ["parallel.pipeline is 5, which does not divide the model's num_hidden_layers: set it to a divisor of 12"],
        ),
        (
            DENSE,
            {"pipeline": 4, "virtual_pipeline": 2},
            None,
            [
                "parallel.pipeline 4 x parallel.virtual_pipeline 2 does not divide the model's num_hidden_layers: make "
                "the product a divisor of 12"
            ],
        ),
        (DENSE, {"tensor": 8}, None, [TENSOR.format(8, "num_key_value_heads", 4)]),
        (replace(DENSE, ffn_size=98), {"tensor": 4}, None, [TENSOR.format(4, "intermediate_size", 98)]),
        (replace(LATENT, ffn_size=98), {"tensor": 4}, 4, [
            TENSOR.format(4, "intermediate_size", 98),  # its first layer is dense
            TENSOR.format(4, "kv_lora_rank + qk_rope_head_dim", 19),
        ]),
        (SPARSE, {"tensor": 4, "expert_tensor": 1}, None, []),
        (
            replace(SPARSE, num_kv_heads=8),
            {"tensor": 8},
            None,
            [TENSOR.format(8, "shared expert's width", 36)],
        ),
        (
            replace(LATENT, num_heads=15, num_kv_heads=15, ffn_size=15),
            {"tensor": 3},
            None,
            [
                TENSOR.format(3, "kv_lora_rank + qk_rope_head_dim", 19),
                TENSOR.format(3, "q_lora_rank", 20),
            ],
        ),
        (
            SPARSE,
            {"expert": 3},
            None,
            ["parallel.expert is 3, which does not divide the model's number of experts: set it to a divisor of 8"],
        ),
        (
            SPARSE,
            {"expert_tensor": 5},
            None,
            [
                "parallel.expert_tensor is 5, which does not divide the model's moe_intermediate_size: set it to a "
                "divisor of 24"
            ],
        ),
        (
            replace(SPARSE, mixture=Mixture(frozenset(range(12)), 8, 2, 23, True)),
            {"tensor": 4},
            None,
            [
                "parallel.expert_tensor (null: as parallel.tensor) is 4, which does not divide the model's "
                "moe_intermediate_size: set it to a divisor of 23"
            ],
        ),
        (
            SPARSE,
            {"tensor": 2, "sequence": False},
            None,
            ["parallel.sequence is False: set it to true, which experts need with parallel.tensor 2"],
        ),
        (
            DENSE,
            {"expert": 2, "expert_tensor": 1},
            2,
            [
                "parallel.expert is 2, but the model has no experts: set it to 1",
                "parallel.expert_tensor is 1, but the model has no experts: set it to null",
            ],
        ),
    ],
)  # fmt: skip
def test_layouts_that_do_not_fit(
    shape: ModelShape | None, sizes: dict[str, Any], world_size: int | None, sentences: list[str]
) -> None:
    assert trainer_problems(shape, layout(**sizes), world_size) == sentences


@pytest.mark.parametrize(
    ("shape", "tensor", "world_size", "has_whole_experts"),
    [
        (None, 4, None, False),
        (None, 4, 8, False),
        (DENSE, 8, 8, False),  # twice as many ranks as key/value heads
        (SPARSE, 4, None, False),
        (replace(SPARSE, mixture=Mixture(frozenset(range(12)), 8, 2, 23, True)), 4, 4, True),
    ],
)
def test_engines_that_fit(
    shape: ModelShape | None, tensor: int, world_size: int | None, has_whole_experts: bool
) -> None:
    assert engine_problems(shape, tensor, world_size, has_whole_experts) == []


ENGINE = "rollout.tensor_parallel_size is {}"


@pytest.mark.parametrize(
    ("shape", "tensor", "world_size", "sentences"),
    [
        (None, 4, 6, [ENGINE.format(4) + ", which does not divide the world size 6: set it to one of 1, 2, 3, 6"]),
        (None, 48, 24, [
            ENGINE.format(48) + ", which does not divide the world size 24: set it to one of 1, 2, 3, 4, 6, 8, 12, 24"
        ]),
        (DENSE, 16, None, [
            ENGINE.format(16) + ", which does not divide the model's num_attention_heads: set it to a divisor of 8"
        ]),
        (replace(DENSE, num_heads=12, num_kv_heads=3), 2, None, [
            ENGINE.format(2) + ": set it to a divisor or a multiple of the model's num_key_value_heads, 3"
        ]),
        (replace(DENSE, ffn_size=98), 4, None, [
            ENGINE.format(4) + ", which does not divide the model's intermediate_size: set it to a divisor of 98"
        ]),
        (replace(DENSE, num_heads=6, num_kv_heads=3), 3, None, [
            ENGINE.format(3) + ", which does not divide the model's padded vocabulary: set it to a divisor of 128"
        ]),
        (replace(SPARSE, mixture=Mixture(frozenset(range(12)), 8, 2, 23, True, shared_ffn_size=37)), 4, None, [
            ENGINE.format(4) + ", which does not divide the model's moe_intermediate_size: set it to a divisor of 23",
            ENGINE.format(4) + ", which does not divide the model's shared expert's width: set it to a divisor of 37",
        ]),
        (LATENT, 1, 1, [
            "trainer.stage is 'rl', which does not take a deepseek_v3 model, whose latent attention the engine keeps "
            "in weights of its own: train it with sft"
        ]),
    ],
)  # fmt: skip
def test_engines_that_do_not_fit(
    shape: ModelShape | None, tensor: int, world_size: int | None, sentences: list[str]
) -> None:
    assert engine_problems(shape, tensor, world_size) == sentences


def test_many_divisors_are_not_all_listed() -> None:
    (line,) = engine_problems(None, 7, 360)
    assert line.endswith("set it to one of 1, 2, 3, 4, 5, 6, 8, 9, ...")


@pytest.mark.parametrize(
    ("shape", "lengths", "sentences"),
    [
        (DENSE, (32, 32, 64, 32), []),
        (None, (10_000, 10_000, None, None), []),
        (DENSE, (40, 25, None, None), [
            "data.max_prompt_length 40 + data.max_response_length 25 is 65 tokens: make the sum at most the model's "
            "max_position_embeddings, 64"
        ]),
        (None, (32, 32, 63, None), [
            "trainer.max_tokens_per_microbatch is 63: set it to at least the longest sequence, 64"
        ]),
        (DENSE, (4, 3, 7, 4), ["parallel.context is 4: set it to at most half of the longest sequence, 7 tokens"]),
        (DENSE, (1, 0, 1, 1), []),  # one rank does not cut
    ],
)  # fmt: skip
def test_lengths(
    shape: ModelShape | None, lengths: tuple[int, int, int | None, int | None], sentences: list[str]
) -> None:
    assert length_problems(shape, *lengths) == sentences


def test_layers_that_fit() -> None:
    assert layer_problems(LATENT, "local") == layer_problems(DENSE, "transformer_engine") == []
    (line,) = layer_problems(LATENT, "transformer_engine")
    assert line.startswith("platform.layers is 'transformer_engine'") and "latent attention" in line
