"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), as a model's config.json describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mega_rl.models.config_values import positive_integer, refuse_unless

DEFAULT_Q_RANK = 1536  # transformers'; only an explicit null leaves queries whole
LATENT_NORM_EPS = 1e-6  # transformers' latent norms have it whatever rms_norm_eps says


@dataclass(frozen=True)
class LatentAttention:
    """Widths of the compressed queries, keys and values; head widths are per query head."""

    q_rank: int | None  # None: queries are not compressed
    kv_rank: int
    nope_dim: int  # part of a key or query head without position
    rope_dim: int  # part with rotary position; the key's is shared by all heads
    value_dim: int

    @property
    def key_dim(self) -> int:
        return self.nope_dim + self.rope_dim


def read_latent(config: Mapping[str, Any], where: str) -> LatentAttention:
    """InputError for what is malformed or unsupported."""
    refuse_unless(config, "rope_interleave", True, where)
    refuse_unless(config, "rms_norm_eps", LATENT_NORM_EPS, where)
    if config.get("num_key_value_heads") is not None:
        heads = positive_integer(config, "num_attention_heads", where)
        refuse_unless(config, "num_key_value_heads", heads, where)
    queries = {"q_lora_rank": DEFAULT_Q_RANK, **config}
    return LatentAttention(
        q_rank=None if queries["q_lora_rank"] is None else positive_integer(queries, "q_lora_rank", where),
        kv_rank=positive_integer(config, "kv_lora_rank", where),
        nope_dim=positive_integer(config, "qk_nope_head_dim", where),
        rope_dim=positive_integer(config, "qk_rope_head_dim", where),
        value_dim=positive_integer(config, "v_head_dim", where),
    )
