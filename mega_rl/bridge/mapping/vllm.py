"""What a destination wants of the HF tensors: the live fused parameters of a vLLM worker.

Names and order follow vLLM's Qwen2ForCausalLM, Qwen3ForCausalLM, LlamaForCausalLM, MistralForCausalLM and the
mixture-of-experts models of Qwen (``model_executor/models``), UnquantizedFusedMoEMethod (``layers/fused_moe``),
QKVParallelLinear and MergedColumnParallelLinear (``layers/linear.py``) and VocabParallelEmbedding
(``layers/vocab_parallel_embedding.py``) of vLLM 0.23 to 0.32;
the module ``routed_experts`` that holds the experts is 0.32's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mega_rl.bridge.mapping.tensors import LM_HEAD, embedding_name, final_norm_name, layer_name
from mega_rl.bridge.mapping.tower import engine_tower, within_language_model
from mega_rl.bridge.series import EXPERT, LAYER, Numbers, Series, numbered, slices_of
from mega_rl.bridge.slices import Slice, stack_rows, take_columns, whole
from mega_rl.models.fit import engine_problems, engine_vocab_size
from mega_rl.models.shape import ModelShape


def vllm_slices(shape: ModelShape, tensor_parallel: int, tp_rank: int, expert_parallel: bool = False) -> list[Slice]:
    """``vllm_series`` tensor by tensor."""
    return slices_of(vllm_series(shape, tensor_parallel, tp_rank, expert_parallel))


def vllm_series(shape: ModelShape, tensor_parallel: int, tp_rank: int, expert_parallel: bool = False) -> list[Series]:
    """Every HF element in one vLLM worker's parameters; vocabulary padding is in no series.

    Key-value heads are replicated if there are fewer of them than workers. A tied output layer shares the
    embedding's parameter and has no series. Experts are cut by their width; with ``expert_parallel`` (vLLM's
    ``enable_expert_parallel``, an engine without data parallelism of its own) every worker has some experts whole:
    consecutive ones, one more for each of the first workers if they do not divide (``determine_expert_map``). A vision
    tower is whole on every worker (vLLM's ``mm_encoder_tp_mode=data``).
    """
    misfits = engine_problems(shape, tensor_parallel, has_whole_experts=expert_parallel)
    assert not misfits, misfits
    series = numbered(_vocab_rows(embedding_name(shape), shape, tensor_parallel, tp_rank))
    for layers in shape.like_layers(range(shape.num_layers)):
        numbers = Numbers(layers)
        series += numbered(_attention(shape, tensor_parallel, tp_rank), numbers)
        if shape.has_experts(layers[0]):
            series += numbered(_shared_part(shape, tensor_parallel, tp_rank, layer_name(shape, LAYER, "mlp")), numbers)
            series += _experts(shape, tensor_parallel, tp_rank, expert_parallel, layers)
        else:
            mlp = _gated_mlp(
                layer_name(shape, LAYER, "mlp"), shape.hidden_size, shape.ffn_size, tensor_parallel, tp_rank
            )
            series += numbered(mlp, numbers)
    last = [whole(final_norm_name(shape), final_norm_name(shape), (shape.hidden_size,))]
    if not shape.tied:
        last += _vocab_rows(LM_HEAD, shape, tensor_parallel, tp_rank)
    return within_language_model(shape, series + numbered(last)) + engine_tower(shape)


def _vocab_rows(name: str, shape: ModelShape, tensor_parallel: int, tp_rank: int) -> list[Slice]:
    rows = engine_vocab_size(shape) // tensor_parallel
    start, end = (min(i * rows, shape.vocab_size) for i in (tp_rank, tp_rank + 1))
    return stack_rows(name, [(name, start, end)], shape.hidden_size)


def _attention(shape: ModelShape, tensor_parallel: int, tp_rank: int) -> list[Slice]:
    """Attention and the layer's two norms."""

    def name(suffix: str) -> str:
        return layer_name(shape, LAYER, suffix)

    hidden = shape.hidden_size
    q_start, q_end = (i * shape.q_size // tensor_parallel for i in (tp_rank, tp_rank + 1))
    slices = _qkv(shape, tensor_parallel, tp_rank)
    o_proj = name("self_attn.o_proj.weight")
    slices.append(take_columns(o_proj, o_proj, hidden, q_start, q_end))
    if shape.qk_norm:
        norms = [name(f"self_attn.{part}_norm.weight") for part in ("q", "k")]
        slices += [whole(norm, norm, (shape.head_dim,)) for norm in norms]
    norms = [name("input_layernorm.weight"), name("post_attention_layernorm.weight")]
    slices += [whole(norm, norm, (hidden,)) for norm in norms]
    return slices


def _gated_mlp(mlp: str, hidden: int, ffn: int, tensor_parallel: int, tp_rank: int) -> list[Slice]:
    start, end = (i * ffn // tensor_parallel for i in (tp_rank, tp_rank + 1))
    gate_up = [(f"{mlp}.{part}_proj.weight", start, end) for part in ("gate", "up")]
    down = f"{mlp}.down_proj.weight"
    return [*stack_rows(f"{mlp}.gate_up_proj.weight", gate_up, hidden), take_columns(down, down, hidden, start, end)]


def _shared_part(shape: ModelShape, tensor_parallel: int, tp_rank: int, mlp: str) -> list[Slice]:
    """What every token passes in a layer with experts: the router, and the shared expert if there is one."""
    mixture, hidden = shape.mixture, shape.hidden_size
    assert mixture is not None
    router, gate = f"{mlp}.gate.weight", f"{mlp}.shared_expert_gate.weight"
    slices = [whole(router, router, (mixture.num_experts, hidden))]
    if mixture.shared_ffn_size:
        shared = f"{mlp}.{mixture.shared_name}"
        slices += _gated_mlp(shared, hidden, mixture.shared_ffn_size, tensor_parallel, tp_rank)
    if mixture.shared_gate:
        slices.append(whole(gate, gate, (1, hidden)))
    return slices


def _experts(
    shape: ModelShape, tensor_parallel: int, tp_rank: int, expert_parallel: bool, layers: Sequence[int]
) -> list[Series]:
    """The experts stacked: [expert, gate and up rows, hidden] and [expert, hidden, columns]."""
    mixture = shape.mixture
    assert mixture is not None
    experts, cut = range(mixture.num_experts), (tensor_parallel, tp_rank)
    if expert_parallel:
        experts, cut = engine_experts(mixture.num_experts, tensor_parallel, tp_rank), (1, 0)
    *gate_up, down = _gated_mlp(
        layer_name(shape, LAYER, f"mlp.experts.{EXPERT}"), shape.hidden_size, mixture.ffn_size, *cut
    )
    stacked = layer_name(shape, LAYER, "mlp.experts.routed_experts")
    pieces = [replace(piece, local_name=f"{stacked}.w13_weight") for piece in gate_up]
    pieces.append(replace(down, local_name=f"{stacked}.w2_weight"))
    return numbered(pieces, Numbers(layers, experts=experts, first_expert=experts.start), is_stacked=True)


def engine_experts(num_experts: int, num_workers: int, rank: int) -> range:
    """The experts of one worker of an engine with expert parallelism, vLLM's linear placement."""
    each, more = divmod(num_experts, num_workers)
    start = rank * each + min(rank, more)
    return range(start, start + each + (rank < more))


def _qkv(shape: ModelShape, tensor_parallel: int, tp_rank: int) -> list[Slice]:
    """vLLM's fused order: all of the worker's query heads, then its keys, then its values."""
    kv_heads = max(1, shape.num_kv_heads // tensor_parallel)
    replicas = max(1, tensor_parallel // shape.num_kv_heads)  # consecutive workers that hold the same key-value head
    q_start, q_end = (i * shape.q_size // tensor_parallel for i in (tp_rank, tp_rank + 1))
    kv_start = tp_rank // replicas * kv_heads * shape.head_dim
    kv_end = kv_start + kv_heads * shape.head_dim
    ranges = {"q": (q_start, q_end), "k": (kv_start, kv_end), "v": (kv_start, kv_end)}
    slices: list[Slice] = []
    for kind, width in (("weight", shape.hidden_size), ("bias", None)):
        if kind == "weight" or shape.qkv_bias:
            parts = [
                (layer_name(shape, LAYER, f"self_attn.{part}_proj.{kind}"), *ranges[part]) for part in ("q", "k", "v")
            ]
            slices += stack_rows(layer_name(shape, LAYER, f"self_attn.qkv_proj.{kind}"), parts, width)
    return slices
