"""Whether a model, a layout, lengths and a number of processes go together: every such question, answered once.

Each function gives a sentence for every misfit and an empty list if all is well. ``config.model`` asks them for the
dry run, the session and the planner, ``tools/convert.py`` for itself; code below asserts what it relies on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from mega_rl.models.shape import ModelShape

VOCAB_PADDING = 64  # rows; vLLM's DEFAULT_VOCAB_PADDING_SIZE
MAX_DIVISORS = 8  # the most divisors that a sentence lists
# The values of memory.recompute_modules -> whether a model has such modules.
RECOMPUTABLE: Mapping[str, Callable[[ModelShape], bool]] = {
    "core_attn": lambda shape: True,
    "mlp": lambda shape: any(not shape.has_experts(layer) for layer in range(shape.num_layers)),
    "moe": lambda shape: shape.mixture is not None,
    "shared_experts": lambda shape: shape.mixture is not None and shape.mixture.shared_ffn_size > 0,
}


class TrainerSizes(Protocol):
    """The ``parallel`` section; all sizes are 1 or more."""

    @property
    def tensor(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def pipeline(self) -> int: ...
    @property
    def virtual_pipeline(self) -> int | None: ...  # model chunks per rank; None: one
    @property
    def expert(self) -> int: ...
    @property
    def expert_tensor(self) -> int | None: ...  # None: as tensor
    @property
    def sequence(self) -> bool: ...


def trainer_problems(shape: ModelShape | None, parallel: TrainerSizes, world_size: int | None) -> list[str]:
    """Why the model cannot be trained at this layout.

    Args:
        shape: None if the model is not known, which leaves out what depends on it.
        world_size: number of processes; None if it is not known, which leaves out what depends on it.
    """
    found = [*_layout_problems(parallel), *_world_problems(parallel, world_size)]
    if shape is not None:
        found += _layer_problems(shape, parallel)
        found += tensor_problems(shape, parallel.tensor)
        found += expert_problems(shape, parallel.expert, parallel.expert_tensor, parallel.tensor)
        if (shape.mixture or shape.latent) and parallel.tensor > 1 and not parallel.sequence:
            found.append(
                f"parallel.sequence is False: set it to true, which experts need with parallel.tensor {parallel.tensor}"
            )
    return found


def _layout_problems(parallel: TrainerSizes) -> Iterator[str]:
    if parallel.sequence and parallel.tensor == 1:
        yield "parallel.sequence is True: set it to false, or parallel.tensor to more than 1"
    if parallel.virtual_pipeline is not None and parallel.pipeline == 1:
        chunks = parallel.virtual_pipeline
        yield f"parallel.virtual_pipeline is {chunks}: set it to null, or parallel.pipeline to more than 1"


def _world_problems(parallel: TrainerSizes, world_size: int | None) -> Iterator[str]:
    if world_size is None:
        return
    ranks = parallel.tensor * parallel.context * parallel.pipeline
    if world_size % ranks:
        sizes = {"tensor": parallel.tensor, "context": parallel.context, "pipeline": parallel.pipeline}
        product = " x ".join(f"parallel.{name} {size}" for name, size in sizes.items())
        fix = f"start a multiple of {ranks} processes, or make the product one of {_divisors(world_size)}"
        yield f"{product} = {ranks} does not divide the world size {world_size}: {fix}"
        return
    ranks_per_stage, expert_tensor = world_size // parallel.pipeline, parallel.expert_tensor or parallel.tensor
    if ranks_per_stage % (parallel.expert * expert_tensor):
        product = f"parallel.expert {parallel.expert} x parallel.expert_tensor {expert_tensor}"
        fix = f"make the product one of {_divisors(ranks_per_stage)}"
        yield f"{product} does not divide the {ranks_per_stage} processes of a pipeline stage: {fix}"


def _layer_problems(shape: ModelShape, parallel: TrainerSizes) -> Iterator[str]:
    if parallel.virtual_pipeline is None:
        yield from _indivisible("parallel.pipeline", parallel.pipeline, [("num_hidden_layers", shape.num_layers)])
    elif shape.num_layers % (parallel.pipeline * parallel.virtual_pipeline):
        product = f"parallel.pipeline {parallel.pipeline} x parallel.virtual_pipeline {parallel.virtual_pipeline}"
        fix = f"make the product a divisor of {shape.num_layers}"
        yield f"{product} does not divide the model's num_hidden_layers: {fix}"
    chunks = parallel.pipeline * (parallel.virtual_pipeline or 1)
    num_seeing = len(shape.tower.deepstack) if shape.tower else 0
    if shape.num_layers // chunks < num_seeing:
        field = "parallel.pipeline" if parallel.virtual_pipeline is None else "parallel.virtual_pipeline"
        yield (
            f"{field} leaves {shape.num_layers // chunks} layers to the first stage, but the model's first "
            f"{num_seeing} layers add features of pictures (deepstack_visual_indexes), which are made there: set it "
            "lower"
        )


def tensor_problems(shape: ModelShape, tensor: int) -> list[str]:
    """Why the trainer cannot cut everything but the experts into ``tensor`` parts."""
    sizes = [("num_attention_heads", shape.num_heads), ("num_key_value_heads", shape.num_kv_heads)]
    if shape.has_dense_layers:
        sizes.append(("intermediate_size", shape.ffn_size))
    if shape.mixture:
        sizes.append(("shared expert's width", shape.mixture.shared_ffn_size))
    if shape.latent:
        sizes.append(("kv_lora_rank + qk_rope_head_dim", shape.latent.kv_rank + shape.latent.rope_dim))
        sizes.append(("q_lora_rank", shape.latent.q_rank or 0))
    return list(_indivisible("parallel.tensor", tensor, sizes))


def expert_problems(shape: ModelShape, expert: int, expert_tensor: int | None, tensor: int) -> list[str]:
    """Why the trainer cannot lay out the experts by these sizes; ``expert_tensor`` None: as ``tensor``."""
    if shape.mixture is None:
        found = []
        if expert > 1:
            found.append(f"parallel.expert is {expert}, but the model has no experts: set it to 1")
        if expert_tensor is not None:
            found.append(f"parallel.expert_tensor is {expert_tensor}, but the model has no experts: set it to null")
        return found
    field = "parallel.expert_tensor" if expert_tensor else "parallel.expert_tensor (null: as parallel.tensor)"
    return [
        *_indivisible("parallel.expert", expert, [("number of experts", shape.mixture.num_experts)]),
        *_indivisible(field, expert_tensor or tensor, [("moe_intermediate_size", shape.mixture.ffn_size)]),
    ]


def engine_problems(
    shape: ModelShape | None, tensor: int, world_size: int | None = None, has_whole_experts: bool = False
) -> list[str]:
    """Why the rollout engine cannot be built, or not be given the model's weights.

    Args:
        shape: None if the model is not known, which leaves out what depends on it.
        tensor: ``rollout.tensor_parallel_size``.
        world_size: number of processes that the engines share with the trainer; None if it is not known, or if engines
            have processes of their own.
        has_whole_experts: whether a worker holds some experts whole (vLLM's ``enable_expert_parallel``), not a part of
            each.
    """
    field, found = "rollout.tensor_parallel_size", []
    if world_size is not None and world_size % tensor:
        fix = f"set it to one of {_divisors(world_size)}"
        found.append(f"{field} is {tensor}, which does not divide the world size {world_size}: {fix}")
    if shape is None:
        return found
    if shape.latent:
        found.append(
            f"trainer.stage is 'rl', which does not take a {shape.family} model, whose latent attention the engine "
            "keeps in weights of its own: train it with sft"
        )
    sizes = [("num_attention_heads", shape.num_heads), ("padded vocabulary", engine_vocab_size(shape))]
    if shape.has_dense_layers:
        sizes.append(("intermediate_size", shape.ffn_size))
    if shape.mixture:
        sizes += [] if has_whole_experts else [("moe_intermediate_size", shape.mixture.ffn_size)]
        sizes.append(("shared expert's width", shape.mixture.shared_ffn_size))
    found += _indivisible(field, tensor, sizes)
    heads = shape.num_kv_heads
    if heads % tensor and tensor % heads:  # the engine repeats key/value heads if it has more ranks than heads
        fix = f"set it to a divisor or a multiple of the model's num_key_value_heads, {heads}"
        found.append(f"{field} is {tensor}: {fix}")
    return found


def engine_vocab_size(shape: ModelShape) -> int:
    """Rows of vLLM's padded embedding over all workers."""
    return -(-shape.vocab_size // VOCAB_PADDING) * VOCAB_PADDING


def length_problems(
    shape: ModelShape | None,
    max_prompt_length: int,
    max_response_length: int,
    budget: int | None,
    context: int | None,
) -> list[str]:
    """Why sequences of the greatest length cannot be trained on.

    Args:
        budget: ``trainer.max_tokens_per_microbatch``, None if it is not known.
        context: ``parallel.context``, None if it is not known.
    """
    longest, found = max_prompt_length + max_response_length, []
    limit = shape.max_position_embeddings if shape else longest
    if longest > limit:
        lengths = f"data.max_prompt_length {max_prompt_length} + data.max_response_length {max_response_length}"
        fix = f"make the sum at most the model's max_position_embeddings, {limit}"
        found.append(f"{lengths} is {longest} tokens: {fix}")
    if budget is not None and budget < longest:
        fix = f"set it to at least the longest sequence, {longest}"
        found.append(f"trainer.max_tokens_per_microbatch is {budget}: {fix}")
    if context is not None and context > 1 and longest < 2 * context:  # each rank has two parts of a sequence
        fix = f"set it to at most half of the longest sequence, {longest} tokens"
        found.append(f"parallel.context is {context}: {fix}")
    return found


def recompute_problems(shape: ModelShape, modules: Sequence[str] | None, num_layers: int | None) -> list[str]:
    """Why not all that is named can be computed again: Megatron would pass over the rest in silence.

    Args:
        modules: ``memory.recompute_modules``.
        num_layers: ``memory.recompute_num_layers``.
    """
    present = [name for name, is_present in RECOMPUTABLE.items() if is_present(shape)]
    found = [
        f"memory.recompute_modules has {name!r}, which this model does not have: choose of {', '.join(present)}"
        for name in modules or ()
        if name not in present
    ]
    if num_layers is not None and num_layers > shape.num_layers:
        fix = f"set it to at most {shape.num_layers}, or to null for all"
        found.append(f"memory.recompute_num_layers is {num_layers}, more than the layers of the model: {fix}")
    return found


def layer_problems(shape: ModelShape, layers: str) -> list[str]:
    """Why a model's layers cannot be those of ``platform.layers``."""
    if layers == "local" or shape.latent is None:
        return []
    return [f"platform.layers is {layers!r}, and the model has latent attention, which is not done with it: set local"]


def _indivisible(field: str, value: int, sizes: Iterable[tuple[str, int]]) -> Iterator[str]:
    """A sentence for every size of the model, by its name, that the field's value does not divide."""
    for name, size in sizes:
        if size % value:
            yield f"{field} is {value}, which does not divide the model's {name}: set it to a divisor of {size}"


def _divisors(number: int) -> str:
    listed = [str(d) for d in range(1, number + 1) if number % d == 0]
    return ", ".join(listed if len(listed) <= MAX_DIVISORS else [*listed[:MAX_DIVISORS], "..."])
