"""Memory of one worker of a rollout engine: weights in vLLM's fused parameters, key-value blocks, working memory."""

from __future__ import annotations

from dataclasses import dataclass

from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.bridge.slices import num_elements
from mega_rl.config.schema.sampling import COLOCATED_MEMORY_SHARE
from mega_rl.config.schema.sections import RunConfig
from mega_rl.config.schema.stage import has_whole_experts
from mega_rl.models.fit import engine_vocab_size
from mega_rl.models.shape import ModelShape
from mega_rl.platform.operators.memory import OPERATOR_MEMORY
from mega_rl.types import DTYPES

# vLLM's own defaults, which count if rollout.vllm does not say otherwise.
BATCHED_TOKENS = 8192  # max_num_batched_tokens
NUM_SEQUENCES = 256  # max_num_seqs
SEPARATE_SHARE = 0.9  # gpu_memory_utilization of an engine that has its devices to itself
CACHE_BYTES = {"auto": None, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of one worker, and what its key-value memory holds."""

    share: int  # all that the engine takes of a device while it is awake
    has_share: bool  # gpu_memory_utilization says how much the engine takes; else the key-value memory is given
    weights: int
    working: int  # estimate: activations of the largest batch, logits of all sequences
    cache: int  # key-value memory, what the share leaves
    bytes_per_token: int
    num_blocks: int
    num_sequences: int  # sequences of the greatest length that fit at the same time
    sequences_per_engine: int  # sequences that a step asks of one engine

    @property
    def fits(self) -> bool:
        """Whether the share has room for one sequence of the greatest length."""
        return self.num_sequences >= 1


def engine_share(config: RunConfig) -> float:
    """``gpu_memory_utilization`` as the engine gets it."""
    default = COLOCATED_MEMORY_SHARE if config.rollout.placement == "colocated" else SEPARATE_SHARE
    return float(config.rollout.vllm.get("gpu_memory_utilization", default))


def engine_weight_bytes(config: RunConfig, shape: ModelShape) -> int:
    """Parameters of one worker, the padding of its vocabulary included; workers hold equally much."""
    tensor = config.rollout.tensor_parallel_size
    series = vllm_series(shape, tensor, 0, has_whole_experts(config.rollout))
    elements = sum(num_elements(s.hf_box) * len(s.layers) * len(s.experts) for s in series)
    rows = engine_vocab_size(shape) // tensor
    padding = (rows - min(rows, shape.vocab_size)) * shape.hidden_size * (1 if shape.tied else 2)
    return (elements + padding) * DTYPES[config.rollout.dtype or config.model.dtype].itemsize


def engine_memory(
    config: RunConfig, shape: ModelShape, platform: str, device_bytes: int, num_engines: int
) -> EngineMemory:
    """One worker of an engine on a device of so many bytes."""
    rollout, options = config.rollout, config.rollout.vllm
    item = DTYPES[rollout.dtype or config.model.dtype].itemsize
    tensor = rollout.tensor_parallel_size
    weights = engine_weight_bytes(config, shape)
    cache_item = CACHE_BYTES.get(str(options.get("kv_cache_dtype", "auto"))) or item
    bytes_per_token = shape.num_layers * 2 * max(1, shape.num_kv_heads // tensor) * shape.head_dim * cache_item
    working = _working(config, shape, item)
    given = rollout.kv_cache_bytes if platform == "cpu" else options.get("kv_cache_memory_bytes")
    if given is None:
        share = int(engine_share(config) * device_bytes)
        cache = max(0, share - weights - working)
    else:
        cache = int(given)
        share = weights + working + cache
    block_tokens = int(options.get("block_size", OPERATOR_MEMORY[platform].engine_block_tokens))
    num_blocks = cache // (bytes_per_token * block_tokens)
    longest = config.data.max_prompt_length + config.data.max_response_length
    return EngineMemory(
        share=share,
        has_share=given is None,
        weights=weights,
        working=working,
        cache=cache,
        bytes_per_token=bytes_per_token,
        num_blocks=num_blocks,
        num_sequences=num_blocks // -(-longest // block_tokens),
        sequences_per_engine=-(-config.data.train_batch_size // num_engines) * rollout.n,
    )


def _working(config: RunConfig, shape: ModelShape, item: int) -> int:
    """Bytes of the largest forward pass: tensors of the widest layer, float32 logits of every sequence, copied once."""
    options, tensor = config.rollout.vllm, config.rollout.tensor_parallel_size
    tokens = int(options.get("max_num_batched_tokens", BATCHED_TOKENS))
    sequences = int(options.get("max_num_seqs", NUM_SEQUENCES))
    width = 3 * shape.ffn_size // tensor if shape.has_dense_layers else 0
    if shape.mixture:
        chosen = shape.mixture.experts_per_token
        width = max(width, chosen * (3 * shape.mixture.ffn_size // tensor + shape.hidden_size))
    width = max(width, (shape.q_size + 2 * shape.kv_size) // tensor) + 3 * shape.hidden_size
    return tokens * width * item + 2 * 4 * sequences * shape.vocab_size
