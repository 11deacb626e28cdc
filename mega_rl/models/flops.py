"""Floating-point operations of one pass of a model, counted tensor by tensor from what the model has to compute.

A matrix product of n weights takes 2 n operations (a multiplication and an addition) per token in the forward pass, 2 n
for the gradient of its weights where they are trained, and 2 n for the gradient of its input where something before it
is trained. Attention is counted for the pairs of a query and a key that it sees, so one half of the square of a
sequence's length; the head for the positions whose predictions are wanted. Not counted: what an implementation does
more than that (recomputed activations, masked or padded positions, logits that are computed twice) and what is no
matrix product. Vision towers are counted apart, per picture, where they are computed: what a cache gives again costs
nothing. Source of the convention: PaLM (arXiv 2204.02311, appendix B), here with frozen weights and the masked half of
attention taken as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from mega_rl.models.shape import ModelShape
from mega_rl.models.vision import Tower, tower_tensors

Sizes = Mapping[str, tuple[int, ...]]  # Hugging Face tensor -> its shape


@dataclass(frozen=True)
class PassFlops:
    """Operations of one pass over packed sequences; a pair is a query and a key that it sees, in all layers and heads.

    The gradient's operations come on top of those of the forward pass.
    """

    forward_per_token: float  # of all layers
    forward_per_pair: float
    forward_per_prediction: float  # of the head
    backward_per_token: float
    backward_per_pair: float
    backward_per_prediction: float

    def of(self, lengths: Iterable[int], with_gradient: bool, num_predictions: int | None = None) -> float:
        """Operations of sequences of so many tokens each: their forward pass, or forward and backward pass.

        Args:
            num_predictions: tokens of them that the head is asked about; None: all.
        """
        tokens = pairs = 0
        for length in lengths:
            tokens += length
            pairs += length * (length + 1) // 2
        asked = tokens if num_predictions is None else num_predictions
        total = self.forward_per_token * tokens + self.forward_per_pair * pairs + self.forward_per_prediction * asked
        if with_gradient:
            total += self.backward_per_token * tokens + self.backward_per_pair * pairs
            total += self.backward_per_prediction * asked
        return total

    @property
    def forward_products(self) -> float:
        """Of a token that the head is asked about, without attention."""
        return self.forward_per_token + self.forward_per_prediction

    @property
    def attention_slope(self) -> float:
        """1 / the number of tokens of a sequence at which its attention costs as much as all matrix products."""
        return self.forward_per_pair / (2 * self.forward_products)


def pass_flops(
    shape: ModelShape, sizes: Sizes, trained: Collection[str] | None = None, ranks: Mapping[str, int] | None = None
) -> PassFlops:
    """What a pass of the model costs.

    Args:
        shape: the model.
        sizes: every tensor of its checkpoint.
        trained: the tensors that are trained whole; None: all.
        ranks: weight -> rank of the adapter beside it.
    """
    count = _Count(sizes, trained, ranks or {})
    embedding = f"{shape.decoder}.embed_tokens.weight"
    needs = count.trains(embedding)
    for layer in range(shape.num_layers):
        name = f"{shape.decoder}.layers.{layer}."
        needs = _attention(count, shape, name, needs) or needs
        normed = needs or count.trains(f"{name}post_attention_layernorm.weight")
        is_mixture = shape.has_experts(layer)
        needs = (_experts(count, shape, name, normed) if is_mixture else _mlp(count, f"{name}mlp", normed)) or needs
    needs = needs or count.trains(f"{shape.decoder}.norm.weight")
    head = _Count(sizes, trained, ranks or {})
    head.product("score.weight" if shape.head == "value" else embedding if shape.tied else "lm_head.weight", needs)
    forward = count.forward, count.pair_forward, head.forward
    return PassFlops(*forward, count.backward, count.pair_backward, head.backward)


@dataclass(frozen=True)
class TowerFlops:
    """Operations of a vision tower; a pair is two patches of a picture, or of a window of it, in all heads."""

    tower: Tower
    forward_per_patch: float
    backward_per_patch: float
    trained_blocks: range  # those that a gradient passes
    forward_per_pair: float  # of one block
    backward_per_pair: float

    def of(self, grids: Iterable[tuple[int, int]], with_gradient: bool) -> float:
        """Operations of pictures of so many rows and columns of patches."""
        whole, total = set(self.tower.whole_blocks), 0.0
        per_patch = self.forward_per_patch + with_gradient * self.backward_per_patch
        side = None if self.tower.window is None else self.tower.window // self.tower.patch
        for rows, columns in grids:
            total += per_patch * rows * columns
            for block in range(self.tower.num_blocks):
                is_whole = side is None or block in whole
                pairs = (rows * columns) ** 2 if is_whole else _squares(rows, side) * _squares(columns, side)
                backward = with_gradient and block in self.trained_blocks
                total += pairs * (self.forward_per_pair + backward * self.backward_per_pair)
        return total


def _squares(length: int, side: int | None) -> int:
    """The sum of the squared lengths of the pieces that windows of ``side`` cut a side of a picture into."""
    assert side is not None
    return length // side * side**2 + (length % side) ** 2


def tower_flops(tower: Tower, trained: Collection[str]) -> TowerFlops:
    """What a pass of the tower costs.

    Args:
        trained: the tensors that are trained, by the tower's own names.
    """
    count = _Count(dict(tower_tensors(tower)), trained, {})
    needs = count.product("patch_embed.proj.weight", False) or count.trains("pos_embed.weight")
    first = tower.num_blocks
    mergers = {block: f"deepstack_merger_list.{i}" for i, block in enumerate(tower.deepstack)}
    for block in range(tower.num_blocks):
        qkv = count.product(f"blocks.{block}.attn.qkv.weight", needs or count.trains_some(f"blocks.{block}.norm1."))
        first = min(first, block) if qkv else first
        needs = count.product(f"blocks.{block}.attn.proj.weight", qkv) or needs
        *up, down = (n for n in count.sizes if n.startswith(f"blocks.{block}.mlp.") and n.endswith(".weight"))
        normed = needs or count.trains_some(f"blocks.{block}.norm2.")
        between = [count.product(name, normed) for name in up]
        needs = count.product(down, any(between)) or needs
        if block in mergers:
            _merger(count, tower, mergers[block], needs)
    _merger(count, tower, "merger", needs)
    pair = 4.0 * tower.hidden_size  # the scores of all heads, and the sums that they weigh
    return TowerFlops(tower, count.forward, count.backward, range(first, tower.num_blocks), pair, 2 * pair)


def _merger(count: _Count, tower: Tower, name: str, needs: bool) -> None:
    """The two products of a merger, which one token passes for ``merge`` x ``merge`` patches."""
    needs = needs or count.trains_some(f"{name}.norm.") or count.trains_some(f"{name}.ln_q.")
    for weight in (n for n, size in count.sizes.items() if n.startswith(f"{name}.") and len(size) == 2):
        needs = count.product(weight, needs, 1 / tower.merge**2)


@dataclass
class _Count:
    """Operations so far. ``needs``: whether a gradient is wanted of a value, as something before it is trained."""

    sizes: Sizes
    trained: Collection[str] | None
    ranks: Mapping[str, int]
    forward: float = field(default=0.0, init=False)  # per token
    backward: float = field(default=0.0, init=False)
    pair_forward: float = field(default=0.0, init=False)
    pair_backward: float = field(default=0.0, init=False)

    def trains(self, name: str) -> bool:
        """Whether the model has this tensor and trains it."""
        return name in self.sizes and (self.trained is None or name in self.trained)

    def trains_some(self, beginning: str) -> bool:
        return any(self.trains(name) for name in self.sizes if name.startswith(beginning))

    def product(self, weight: str, needs: bool, share: float = 1.0) -> bool:
        """A linear layer that ``share`` of the tokens pass, with its adapter; returns whether its output ``needs``."""
        rows, *inner = self.sizes[weight]
        columns = prod(inner)
        own = rows * columns * share
        is_trained = self.trains(weight)
        self.forward += 2 * own
        self.backward += 2 * own * (is_trained + needs)
        rank = self.ranks.get(weight, 0)
        a, b = rank * columns * share, rank * rows * share
        self.forward += 2 * (a + b)
        self.backward += 2 * (a + b) + 2 * b + 2 * a * needs
        return needs or is_trained or rank > 0 or self.trains(f"{weight.removesuffix('weight')}bias")

    def attention(self, shape: ModelShape, q: bool, k: bool, v: bool) -> bool:
        scores = 2 * shape.num_heads * (shape.latent.key_dim if shape.latent else shape.head_dim)
        values = 2 * shape.attention_size
        self.pair_forward += scores + values
        # The gradients of the probabilities, the values, the queries and the keys.
        self.pair_backward += values * ((q or k) + v) + scores * (q + k)
        return q or k or v


def _attention(count: _Count, shape: ModelShape, name: str, needs: bool) -> bool:
    x = needs or count.trains(f"{name}input_layernorm.weight")
    name += "self_attn."
    if shape.latent is None:
        q, k, v = (count.product(f"{name}{part}_proj.weight", x) for part in "qkv")
        q, k = (value or count.trains(f"{name}{part}_norm.weight") for part, value in (("q", q), ("k", k)))
    else:
        if shape.latent.q_rank is not None:
            x_of_q = count.product(f"{name}q_a_proj.weight", x) or count.trains(f"{name}q_a_layernorm.weight")
            q = count.product(f"{name}q_b_proj.weight", x_of_q)
        else:
            q = count.product(f"{name}q_proj.weight", x)
        down = count.product(f"{name}kv_a_proj_with_mqa.weight", x)
        k = v = count.product(f"{name}kv_b_proj.weight", down or count.trains(f"{name}kv_a_layernorm.weight"))
    return count.product(f"{name}o_proj.weight", count.attention(shape, q, k, v))


def _mlp(count: _Count, name: str, needs: bool, share: float = 1.0) -> bool:
    gate, up = (count.product(f"{name}.{part}_proj.weight", needs, share) for part in ("gate", "up"))
    return count.product(f"{name}.down_proj.weight", gate or up, share)


def _experts(count: _Count, shape: ModelShape, name: str, needs: bool) -> bool:
    """A router, the experts, of which every one takes its even share of the tokens, and what all tokens pass."""
    mixture = shape.mixture
    assert mixture is not None
    found = [count.product(f"{name}mlp.gate.weight", needs)]
    share = mixture.experts_per_token / mixture.num_experts
    found += [_mlp(count, f"{name}mlp.experts.{expert}", needs, share) for expert in range(mixture.num_experts)]
    if mixture.shared_ffn_size:
        found.append(_mlp(count, f"{name}mlp.{mixture.shared_name}", needs))
    if mixture.shared_gate:
        found.append(count.product(f"{name}mlp.shared_expert_gate.weight", needs))
    return any(found)
