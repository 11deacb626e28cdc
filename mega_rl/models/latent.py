"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), as a model's config.json describes it."""

from __future__ import annotations

from dataclasses import dataclass

from mega_rl.models.config_values import ConfigValues

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


def read_latent(config: ConfigValues) -> LatentAttention:
    """The latent attention of a config.json; what is malformed or unsupported is in ``config.problems`` afterwards."""
    config.require("rope_interleave", True)
    config.require("rms_norm_eps", LATENT_NORM_EPS)
    heads = config.get("num_attention_heads")
    if config.get("num_key_value_heads") is not None and config.good("num_attention_heads", "num_key_value_heads"):
        config.require("num_key_value_heads", heads)
    has_whole_queries = config.get("q_lora_rank", DEFAULT_Q_RANK) is None
    return LatentAttention(
        q_rank=None if has_whole_queries else config.integer("q_lora_rank", DEFAULT_Q_RANK),
        kv_rank=config.integer("kv_lora_rank"),
        nope_dim=config.integer("qk_nope_head_dim"),
        rope_dim=config.integer("qk_rope_head_dim"),
        value_dim=config.integer("v_head_dim"),
    )
