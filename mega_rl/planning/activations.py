"""What a training step keeps of the forward pass, and what it takes besides at its fullest moment; bytes of one rank.

Every term is a tensor that an operator keeps for its backward pass, as Megatron-core's layers and the classes of
``mega_rl.megatron`` call them (the way of counting of arXiv 2205.05198, section 4, for these models).

Letters: T tokens of this rank, S of them if sequence parallelism cuts them further, D hidden width, F width of the
gate of an MLP on this rank, Q and K widths of this rank's queries and keys, N token-expert pairs of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

from mega_rl.bridge.mapping.megatron import padded_vocab_size
from mega_rl.config.schema.sections import RunConfig
from mega_rl.models.mixture import Mixture
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.platform.operators.memory import OperatorMemory
from mega_rl.types import DTYPES

TOKEN_BYTES = 64  # bytes of ids, positions, masks, advantages and log-probabilities of one packed token


@dataclass(frozen=True)
class PlannedTokens:
    """The fullest micro-batch, and how many of them an optimizer step has."""

    num_tokens: int  # packed, of all context-parallel ranks together
    longest: int  # tokens of its longest sequence
    num_microbatches: int


@dataclass(frozen=True)
class Layer:
    """One decoder layer's share of a micro-batch."""

    kept: int  # bytes for the backward pass, without recomputation
    attention: int  # of ``kept``: the core of attention, memory.recompute_modules core_attn
    mlp: int  # of ``kept``: the dense MLP
    experts: int  # of ``kept``: router, dispatch and experts
    shared: int  # of ``kept``: the expert that sees every token
    input: int  # only its input, all that full recomputation keeps
    forward: int  # what its forward pass takes besides at its fullest moment
    backward: int  # what its backward pass takes besides
    alone: int  # all that its forward pass takes without gradients


@dataclass(frozen=True)
class Activations:
    """Activation bytes on one rank while micro-batches are processed in sequence."""

    in_flight: float  # micro-batches, in shares of this rank's layers, whose forward pass waits for its backward
    kept: int  # bytes of all micro-batches in flight
    working: int  # most that a backward pass takes besides
    forward_only: int  # most that a forward pass without gradients takes

    @property
    def training(self) -> int:
        return self.kept + self.working


class ActivationModel:
    """The activations of a model under a configuration.

    Args:
        operators: of the platform that is trained on.
        tokens: the fullest micro-batch.
        trains_head: whether the output layer gets a gradient.
    """

    def __init__(
        self,
        config: RunConfig,
        shape: ModelShape,
        layout: ParallelLayout,
        operators: OperatorMemory,
        tokens: PlannedTokens,
        trains_head: bool = True,
    ) -> None:
        self.trains_head = trains_head
        self.config, self.shape, self.layout, self.operators, self.tokens = config, shape, layout, operators, tokens
        self.item = DTYPES[config.model.dtype].itemsize
        self.local = -(-tokens.num_tokens // layout.context)  # T
        self.cut = self.local // layout.tensor if config.parallel.sequence else self.local  # S

    # --- one layer ---------------------------------------------------------------------------------------------------

    def layer(self, has_experts: bool) -> Layer:
        shape, rows = self.shape, self.cut
        hidden = rows * shape.hidden_size
        attention = self._attention_core()
        kept = 2 * self._norm(hidden, rows) + self._projections() + attention
        mixture = shape.mixture if has_experts else None
        mlp = 0 if mixture else self._gated(self.local, shape.ffn_size // self.layout.tensor)
        experts = self._experts(mixture) if mixture else 0
        shared = self._shared(mixture) if mixture else 0
        return Layer(
            kept=kept + mlp + experts + shared,
            attention=attention,
            mlp=mlp,
            experts=experts,
            shared=shared,
            input=hidden * self.item,
            forward=2 * hidden * self.item + self._experts_forward(mixture),
            backward=2 * hidden * self.item + self._mlp_backward(mixture),
            alone=3 * hidden * self.item + self._forward_alone(mixture),
        )

    def _norm(self, num_elements: int, rows: int) -> int:
        """Its input, what it needs of its statistics, and its output, which the next matrix product keeps."""
        if self.operators.has_fused_norm:
            return num_elements * 2 * self.item + rows * 4
        return num_elements * (4 + 4 + self.item) + rows * 4

    def _projections(self) -> int:
        """Queries, keys and values before the core of attention, norms and rotation included."""
        shape, item, tokens = self.shape, self.item, self.local
        if shape.latent:
            return self._latent_projections()
        q, k = shape.q_size // self.layout.tensor, shape.kv_size // self.layout.tensor
        kept = self._angles(shape.head_dim)
        if not (self._exchanges and not self._norms_keep_projection):
            kept += tokens * (q + 2 * k) * item  # one tensor, of which the values are a view
        is_copied = shape.num_kv_heads > self.layout.tensor  # the queries of several groups, put side by side
        if self.operators.keeps_rotated:
            kept += tokens * item * (q + k if shape.qk_norm else q * is_copied)
        if shape.qk_norm:
            rows = tokens * (q + k) // shape.head_dim
            if self.operators.has_fused_norm:
                kept += tokens * q * item * is_copied + 4 * rows
            else:
                copies = 4 * (q + k) if item == 2 else 4 * q * is_copied  # bfloat16 is copied as float32
                kept += tokens * (copies + 4 * (q + k)) + 4 * rows
        return kept

    def _angles(self, width: int) -> int:
        """Cosine and sine, for queries and for keys, if a layer has them in another dtype than float32."""
        return 0 if self.item == 4 else 4 * self.local * width * self.item

    @property
    def _exchanges(self) -> bool:
        """Whether attention gets copies of its operands that context-parallel ranks have sent."""
        return self.layout.context > 1

    @property
    def _norms_keep_projection(self) -> bool:
        return self.shape.qk_norm and (self.operators.has_fused_norm or self.item == 4)

    def _attention_core(self) -> int:
        """Queries and keys as they are multiplied, outputs and softmax statistics."""
        shape, item, tokens, tensor = self.shape, self.item, self.local, self.layout.tensor
        q, k = shape.q_size // tensor, shape.kv_size // tensor
        out = shape.attention_size // tensor
        heads = shape.num_heads // tensor
        if shape.latent:
            k = q
        statistics = tokens * heads * 4 * self.operators.softmax_floats
        if not self._exchanges:
            return tokens * (q + k + self.operators.attention_outputs * out) * item + statistics
        if self.config.parallel.context_method == "ulysses":  # all tokens of fewer heads, the result there and here
            return tokens * (q + 2 * k + 2 * out) * item + statistics
        # The keys and values that the two parts of every sequence see: all, and those of a part once more. Without a
        # fused kernel also the masks of the longest sequence.
        parts = 2 * self.layout.context
        seen = tokens * (parts + 1) // 2
        needs_mask = not self.operators.has_fused_norm
        mask = (parts + 1) * (-(-self.tokens.longest // parts)) ** 2 * item if needs_mask else 0
        return (tokens * (q + 2 * out) + seen * 2 * k) * item + statistics + mask

    def _latent_projections(self) -> int:
        """Compressed queries, keys and values, and what they are multiplied out to."""
        shape, item, tokens, tensor = self.shape, self.item, self.local, self.layout.tensor
        latent = shape.latent
        assert latent is not None
        narrow = [latent.kv_rank] + ([latent.q_rank] if latent.q_rank else [])
        kept = sum(self._norm(self.cut * width, self.cut) for width in narrow)
        kept += tokens * (latent.kv_rank + latent.rope_dim) * item
        heads = shape.num_heads // tensor
        return kept + tokens * heads * (latent.nope_dim + latent.value_dim) * item + self._angles(latent.rope_dim)

    def _gated(self, tokens: int, width: int) -> int:
        """Gate and up projection, and their product."""
        return 3 * tokens * width * self.item

    # --- experts -----------------------------------------------------------------------------------------------------

    def _pairs(self, mixture: Mixture) -> int:
        """Token-expert pairs of a rank if the experts are chosen equally often."""
        return self.cut * mixture.experts_per_token * self.layout.expert_tensor

    def _experts(self, mixture: Mixture) -> int:
        pairs, rows = self._pairs(mixture), self.cut
        scores = 2 if mixture.scores == "sigmoid" or not mixture.normalize_weights else 1
        router = rows * mixture.num_experts * (4 * scores + 1)  # scores, and which are chosen
        router += rows * mixture.experts_per_token * 24 + pairs * 12  # choice, weights, places
        rows_in = pairs * self.shape.hidden_size * self.item
        return router + rows_in + self._gated(pairs, mixture.ffn_size // self.layout.expert_tensor)

    def _shared(self, mixture: Mixture) -> int:
        gated = self._gated(self.local, mixture.shared_ffn_size // self.layout.tensor)
        return gated + (self.cut * self.shape.hidden_size * self.item if mixture.shared_gate else 0)

    # --- working memory ----------------------------------------------------------------------------------------------

    def _experts_forward(self, mixture: Mixture | None) -> int:
        """Rows on their way to the experts and back, twice each; the shared expert's output, and its scaled."""
        if mixture is None:
            return 0
        shared = 2 * self.cut if mixture.shared_ffn_size else 0
        return (4 * self._pairs(mixture) + shared) * self.shape.hidden_size * self.item

    def _forward_alone(self, mixture: Mixture | None) -> int:
        """The fullest part of a layer without gradients, beside residual, input and output."""
        shape, tokens, tensor = self.shape, self.local, self.layout.tensor
        q, k = shape.q_size // tensor, shape.kv_size // tensor
        attention = tokens * (2 * q + 3 * k + self.operators.attention_outputs * q) * self.item
        if mixture:
            between = 3 if self.layout.expert > 1 else 1  # more copies of the rows: sent, received, put together
            rows = between * self._pairs(mixture) * shape.hidden_size * self.item
            return max(attention, self._experts_forward(mixture) + rows)
        gate = tokens * shape.ffn_size // tensor * (3 + self.operators.swiglu_temporaries) * self.item
        return max(attention, gate)

    def _mlp_backward(self, mixture: Mixture | None) -> int:
        """Gradients on the way through the MLP, the fullest part of a layer's backward pass."""
        hidden, more = self.shape.hidden_size, self.operators.swiglu_temporaries
        if mixture:
            pairs = self._pairs(mixture)
            width = mixture.ffn_size // self.layout.expert_tensor
            # The gradient of the weights makes the gate again in float32: itself, product, scaled gradient, gradient.
            copied = 8 if self.item == 2 else 0
            through_gate = pairs * width * (copied + 4 + 4 + 8 + 4 * more)
            return max(through_gate, (2 * pairs + 3 * width) * hidden * self.item)
        width = self.shape.ffn_size // self.layout.tensor
        through_gate = self.local * width * (2 + more)  # the product itself is free by then
        through_down = self.local * (width + hidden) + hidden * width
        return max(through_gate, through_down) * self.item

    @property
    def _vocabulary_rows(self) -> int:
        """Rows of the embedding on this rank, with padding."""
        return padded_vocab_size(self.shape.vocab_size, self.layout.tensor) // self.layout.tensor

    def _loss(self) -> tuple[int, int, int]:
        """Kept by the last norm and the loss; taken by the loss forward and backward."""
        shape, item, tokens, rows = self.shape, self.item, self.local, self._vocabulary_rows
        hidden = tokens * shape.hidden_size
        kept = self._norm(self.cut * shape.hidden_size, self.cut)
        if self.config.parallel.sequence:
            kept += 2 * hidden * item  # the whole sequence's hidden states, and the buffer that Megatron keeps for it
        if shape.head == "value":  # float32 hidden states of this rank's tokens, and their gradient
            of_values = 4 * self.cut * shape.hidden_size
            return self._norm(self.cut * shape.hidden_size, self.cut) + of_values, of_values, 2 * of_values
        bound = self.config.trainer.logprob_chunk_tokens * rows
        limit = max(1, bound // 2)
        num_tokens = min(tokens, limit)
        if self.operators.tile_logits is not None and self.operators.tile_tokens is not None:
            limit = min(limit, self.operators.tile_logits)
            num_tokens = min(tokens, self.operators.tile_tokens, limit)
        num_rows = max(1, min(rows, limit // num_tokens))
        tile = num_tokens * num_rows
        num_kept = min(-(-tokens * rows // tile), max(0, bound - 2 * tile) // tile)  # whose logits are not made again
        kept += 4 * min(num_kept * tile, tokens * rows)
        tiles = 2 * 4 * tile
        of_weight = rows * shape.hidden_size * item + num_rows * shape.hidden_size * (4 + max(4, item))
        of_weight = of_weight if self.trains_head else 0
        return kept, tiles, tiles + of_weight + hidden * (4 + item)

    # --- a rank ------------------------------------------------------------------------------------------------------

    def of_stage(self, stage: int) -> Activations:
        """The activations of the ranks of one pipeline stage."""
        layout, shape = self.layout, self.shape
        chunks = [layout.layers_of_chunk(shape.num_layers, stage, chunk) for chunk in range(layout.num_chunks)]
        layers = {has_experts: self.layer(has_experts) for has_experts in (False, True) if self._has(has_experts)}
        kept = [sum(self._kept(layers[shape.has_experts(i)], i - chunk.start) for i in chunk) for chunk in chunks]
        last = layers[shape.has_experts(chunks[-1][-1])]
        again = last.kept - self._kept(last, chunks[-1][-1] - chunks[-1].start)
        message = self.cut * shape.hidden_size * self.item if layout.pipeline > 1 else 0  # from stage to stage
        rotary = (self.local * (3 if self.item == 4 else 1) + self.tokens.longest) * shape.head_dim * 4
        each = message + rotary + self.local * TOKEN_BYTES
        flights = self._flights(stage)
        kept_of_all = sum(count * (size + each) for count, size in zip(flights, kept, strict=True))
        working = message * (3 if layout.num_chunks > 1 else 0)  # interleaved stages expect and send several at a time
        working += again + max(last.backward, last.forward if again else 0)
        if (
            shape.tied and layout.pipeline == 1 and self.trains_head
        ):  # the output layer's gradient waits for the embedding's
            working += self._vocabulary_rows * shape.hidden_size * self.item
        forward_only = max(layer.alone for layer in layers.values())
        if stage == layout.pipeline - 1:
            of_loss, tiles, backward = self._loss()
            kept_of_all += of_loss
            working = max(working - of_loss, backward)
            forward_only = max(forward_only, 2 * self.local * shape.hidden_size * self.item + tiles)
        share = sum(count * len(chunk) for count, chunk in zip(flights, chunks, strict=True))
        return Activations(share / sum(map(len, chunks)), kept_of_all, working, forward_only + each)

    def _has(self, has_experts: bool) -> bool:
        return self.shape.mixture is not None if has_experts else self.shape.has_dense_layers

    def _kept(self, layer: Layer, place: int) -> int:
        """Bytes that one layer keeps, by its place in its model chunk."""
        memory = self.config.memory
        if memory.recompute == "full":
            is_recomputed = memory.recompute_num_layers is None or place < memory.recompute_num_layers
            return layer.input if is_recomputed else layer.kept
        if memory.recompute == "none":
            return layer.kept
        modules = memory.recompute_modules or ("mlp", "moe")
        parts = {"mlp": layer.mlp, "moe": layer.experts + layer.shared, "shared_experts": layer.shared}
        dropped = sum(size for name, size in parts.items() if name in modules)
        if "moe" in modules and "shared_experts" in modules:
            dropped -= layer.shared
        if "core_attn" in modules:
            dropped += self._attention_again(layer)
        return layer.kept - dropped

    def _attention_again(self, layer: Layer) -> int:
        """What is made again of the core of attention: all but its input and one copy of its output."""
        shape, tensor = self.shape, self.layout.tensor
        q, k = shape.q_size // tensor, (shape.q_size if shape.latent else shape.kv_size) // tensor
        return layer.attention - self.local * (q + k + shape.attention_size // tensor) * self.item

    def _flights(self, stage: int) -> list[int]:
        """For each model chunk the micro-batches in flight at the fullest moment of Megatron's schedules.

        Without interleaving a stage is ahead of its backward passes by the stages behind it (1F1B, arXiv 2006.09503);
        with it, by twice as many and by a round of all chunks but one (arXiv 2104.04473, section 2.2).
        """
        stages, chunks, total = self.layout.pipeline, self.layout.num_chunks, self.tokens.num_microbatches
        if chunks == 1:
            return [min(total, stages - stage)]
        started = min(total * chunks, (stages - stage - 1) * 2 + (chunks - 1) * stages + 1)
        counts = [0] * chunks
        for index in range(started):  # rounds of as many micro-batches as stages through one chunk after another
            counts[index // stages % chunks] += 1
        return counts
