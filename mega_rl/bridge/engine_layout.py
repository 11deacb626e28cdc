"""What a destination wants of the HF tensors: the live fused parameters of a vLLM worker, or every tensor whole.

Names and order follow vLLM's Qwen2ForCausalLM, Qwen3ForCausalLM, LlamaForCausalLM, MistralForCausalLM and the
mixture-of-experts models of Qwen (``model_executor/models``), UnquantizedFusedMoEMethod (``layers/fused_moe``),
QKVParallelLinear and MergedColumnParallelLinear (``layers/linear.py``) and VocabParallelEmbedding
(``layers/vocab_parallel_embedding.py``) of vLLM 0.23 to 0.32;
the module ``routed_experts`` that holds the experts is 0.32's.
"""

from __future__ import annotations

from mega_rl.bridge.families import EMBEDDING, FINAL_NORM, LM_HEAD, hf_tensors, layer_name
from mega_rl.bridge.shape import ModelShape
from mega_rl.bridge.slices import Slice, into_stack, stack_rows, take_columns, whole
from mega_rl.types import InputError

VOCAB_PADDING = 64  # rows; vLLM's DEFAULT_VOCAB_PADDING_SIZE


def full_slices(shape: ModelShape) -> list[Slice]:
    """Every HF tensor whole, under its own name: for export and for engines that load through their own loader."""
    return [whole(name, name, size) for name, size in hf_tensors(shape).items()]


def vllm_slices(shape: ModelShape, tensor_parallel: int, tp_rank: int) -> list[Slice]:
    """Every HF element in one vLLM worker's parameters; vocabulary padding is in no slice.

    Key-value heads are replicated where there are fewer of them than workers. A tied output layer shares the
    embedding's parameter and has no slice. Experts are cut by their width, as without the engine's expert parallelism.

    Raises:
        InputError: sizes that do not divide, or a family whose engine parameters are not known here.
    """
    check_engine(shape, tensor_parallel)
    slices = _vocab_rows(EMBEDDING, shape, tensor_parallel, tp_rank)
    for layer in range(shape.num_layers):
        slices += _layer(shape, tensor_parallel, tp_rank, layer)
    slices.append(whole(FINAL_NORM, FINAL_NORM, (shape.hidden_size,)))
    if not shape.tied:
        slices += _vocab_rows(LM_HEAD, shape, tensor_parallel, tp_rank)
    return slices


def engine_vocab_size(shape: ModelShape) -> int:
    """Rows of vLLM's padded embedding over all workers."""
    return -(-shape.vocab_size // VOCAB_PADDING) * VOCAB_PADDING


def check_engine(shape: ModelShape, tensor_parallel: int) -> None:
    """InputError where an engine of this size could not be given the model's weights."""
    if shape.latent:
        raise InputError(
            f"trainer.stage: rl does not take a {shape.family} model, whose latent attention the engine keeps in "
            "weights of its own; train it with sft"
        )
    field = f"rollout.tensor_parallel_size: {tensor_parallel}"
    sizes = [("num_attention_heads", shape.num_heads), ("padded vocabulary", engine_vocab_size(shape))]
    if shape.has_dense_layers:
        sizes.append(("intermediate_size", shape.ffn_size))
    if shape.mixture:
        sizes += [("moe_intermediate_size", shape.mixture.ffn_size)]
        sizes += [("shared_expert_intermediate_size", shape.mixture.shared_ffn_size)]
    for name, size in sizes:
        if size % tensor_parallel:
            raise InputError(f"{field} does not divide the model's {name} {size}; choose a divisor of it")
    if shape.num_kv_heads % tensor_parallel and tensor_parallel % shape.num_kv_heads:
        raise InputError(
            f"{field} neither divides nor is a multiple of the model's num_key_value_heads {shape.num_kv_heads}; "
            "choose one that does"
        )


def _vocab_rows(name: str, shape: ModelShape, tensor_parallel: int, tp_rank: int) -> list[Slice]:
    rows = engine_vocab_size(shape) // tensor_parallel
    start, end = (min(i * rows, shape.vocab_size) for i in (tp_rank, tp_rank + 1))
    return stack_rows(name, [(name, start, end)], shape.hidden_size)


def _layer(shape: ModelShape, tensor_parallel: int, tp_rank: int, layer: int) -> list[Slice]:
    def name(suffix: str) -> str:
        return layer_name(layer, suffix)

    hidden = shape.hidden_size
    q_start, q_end = (i * shape.q_size // tensor_parallel for i in (tp_rank, tp_rank + 1))
    slices = _qkv(shape, tensor_parallel, tp_rank, layer)
    o_proj = name("self_attn.o_proj.weight")
    slices.append(take_columns(o_proj, o_proj, hidden, q_start, q_end))
    if shape.qk_norm:
        norms = [name(f"self_attn.{part}_norm.weight") for part in ("q", "k")]
        slices += [whole(norm, norm, (shape.head_dim,)) for norm in norms]
    if shape.has_experts(layer):
        slices += _mixture(shape, tensor_parallel, tp_rank, name("mlp"))
    else:
        slices += _gated_mlp(name("mlp"), hidden, shape.ffn_size, tensor_parallel, tp_rank)
    norms = [name("input_layernorm.weight"), name("post_attention_layernorm.weight")]
    slices += [whole(norm, norm, (hidden,)) for norm in norms]
    return slices


def _gated_mlp(mlp: str, hidden: int, ffn: int, tensor_parallel: int, tp_rank: int) -> list[Slice]:
    start, end = (i * ffn // tensor_parallel for i in (tp_rank, tp_rank + 1))
    gate_up = [(f"{mlp}.{part}_proj.weight", start, end) for part in ("gate", "up")]
    down = f"{mlp}.down_proj.weight"
    return [*stack_rows(f"{mlp}.gate_up_proj.weight", gate_up, hidden), take_columns(down, down, hidden, start, end)]


def _mixture(shape: ModelShape, tensor_parallel: int, tp_rank: int, mlp: str) -> list[Slice]:
    """Router and shared expert under their own names; the experts stacked: [expert, gate and up rows, hidden]."""
    mixture, hidden = shape.mixture, shape.hidden_size
    assert mixture is not None
    router, gate = f"{mlp}.gate.weight", f"{mlp}.shared_expert_gate.weight"
    slices = [whole(router, router, (mixture.num_experts, hidden))]
    if mixture.shared_ffn_size:
        shared = f"{mlp}.{mixture.shared_name}"
        slices += _gated_mlp(shared, hidden, mixture.shared_ffn_size, tensor_parallel, tp_rank)
    if mixture.shared_gate:
        slices.append(whole(gate, gate, (1, hidden)))
    stacked = f"{mlp}.experts.routed_experts"
    for expert in range(mixture.num_experts):
        pieces = _gated_mlp(f"{mlp}.experts.{expert}", hidden, mixture.ffn_size, tensor_parallel, tp_rank)
        gate_up, down = pieces[:-1], pieces[-1]
        slices += [into_stack(piece, f"{stacked}.w13_weight", expert) for piece in gate_up]
        slices.append(into_stack(down, f"{stacked}.w2_weight", expert))
    return slices


def _qkv(shape: ModelShape, tensor_parallel: int, tp_rank: int, layer: int) -> list[Slice]:
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
            parts = [(layer_name(layer, f"self_attn.{part}_proj.{kind}"), *ranges[part]) for part in ("q", "k", "v")]
            slices += stack_rows(layer_name(layer, f"self_attn.qkv_proj.{kind}"), parts, width)
    return slices
