"""What a token costs: the weights that multiply it, and the attention to the tokens before it."""

from __future__ import annotations

from mega_rl.models.shape import ModelShape


def matmul_weights(shape: ModelShape) -> int:
    """Weights that one token is multiplied by: of its own experts only, the output layer included, no embedding."""
    layers = sum(_attention_weights(shape) + _mlp_weights(shape, layer) for layer in range(shape.num_layers))
    return layers + shape.hidden_size * shape.vocab_size


def attention_slope(shape: ModelShape) -> float:
    """1 / the number of tokens of a sequence at which causal attention costs as much as all matrix products.

    A token's matrix products take 2 FLOPs a weight. Its attention, to n / 2 keys on average in a sequence of n tokens,
    takes 2 FLOPs for each key and column of the queries, and 2 for each key and column of the values.
    """
    query_columns = shape.num_heads * (shape.latent.key_dim if shape.latent else shape.head_dim)
    return shape.num_layers * (query_columns + shape.attention_size) / (2 * matmul_weights(shape))


def _attention_weights(shape: ModelShape) -> int:
    hidden, heads, latent = shape.hidden_size, shape.num_heads, shape.latent
    out = shape.attention_size * hidden
    if latent is None:
        return hidden * (shape.q_size + 2 * shape.kv_size) + out
    queries = heads * latent.key_dim
    q = hidden * queries if latent.q_rank is None else latent.q_rank * (hidden + queries)
    down = hidden * (latent.kv_rank + latent.rope_dim)
    return q + down + latent.kv_rank * heads * (latent.nope_dim + latent.value_dim) + out


def _mlp_weights(shape: ModelShape, layer: int) -> int:
    """Gate, up and down projections, and the router of a layer with experts."""
    mixture = shape.mixture
    if mixture is None or not shape.has_experts(layer):
        return 3 * shape.hidden_size * shape.ffn_size
    width = mixture.experts_per_token * mixture.ffn_size + mixture.shared_ffn_size
    return shape.hidden_size * (3 * width + mixture.num_experts + mixture.shared_gate)
