"""Checks that depend on the model or the number of processes: the same answer in a dry run and in a run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from mega_rl.config.schema.sections import ParallelConfig, RunConfig
from mega_rl.config.schema.stage import (
    critic_parallel,
    has_critic,
    has_whole_experts,
    model_directory,
    reward_model,
    samples,
    trains_values,
)
from mega_rl.errors import input_error
from mega_rl.models.fit import engine_problems, layer_problems, length_problems, recompute_problems, trainer_problems
from mega_rl.models.shape import (
    LANGUAGE,
    SUFFIXES,
    VALUE,
    Head,
    ModelShape,
    inspect_model,
    read_model_shape,
    value_shape,
)
from mega_rl.models.vision import TOWER

SEEING_STAGES = ("pt", "sft", "dpo", "kto", "rl")  # that train models with a vision tower; sft and rl read pictures
REWARD_KEY = "rewards.model.options.path"  # what sentences call the directory of a reward model
SEEING_DTYPE = "mm_encoder_attn_dtype"  # vLLM's argument for the attention in towers
TOWER_LEFT_OUT = f"re:{TOWER}[.]"  # of vLLM's quantisation: all layers whose names begin so
SIZES = ("tensor", "context", "pipeline", "virtual_pipeline", "expert", "expert_tensor")  # of the parallel section
CRITIC_SIZES = ("critic.tensor", "critic.context", "critic.pipeline")


def check_model(config: RunConfig, world_size: int) -> ModelShape:
    """The model of a valid configuration; InputError with every sentence of ``model_problems``."""
    shape, found = model_problems(config, world_size)
    if shape is None or found:
        raise input_error("invalid configuration", found)
    return shape


def trained_shape(config: RunConfig) -> ModelShape:
    """The shape of the model that a run trains; InputError where ``model.path`` holds none."""
    is_of_values = trains_values(config)
    shape = read_model_shape(config.model.path, allowed=tuple(SUFFIXES) if is_of_values else LANGUAGE)
    return value_shape(shape) if is_of_values else shape


def model_problems(
    config: RunConfig, world_size: int | None, is_good: Callable[..., bool] = lambda *fields: True
) -> tuple[ModelShape | None, list[str]]:
    """The model's shape, or None if its config.json is not usable; and every misfit of model, layout and lengths.

    Args:
        world_size: number of processes; None if it is not known, which leaves out what depends on it.
        is_good: tells whether the named fields all have values that are valid by themselves; checks that depend on a
            field without one are left out.
    """
    allowed = list(SUFFIXES) if trains_values(config) else LANGUAGE
    shape, found = inspect_model(config.model.path, allowed=allowed) if is_good("model.path") else (None, [])
    data, parallel, rollout = config.data, config.parallel, config.rollout
    if is_good("data.max_prompt_length", "data.max_response_length"):
        budget = config.trainer.max_tokens_per_microbatch if is_good("trainer.max_tokens_per_microbatch") else None
        context = parallel.context if is_good("parallel.context") else None
        lengths = (data.max_prompt_length, data.max_response_length)
        found += length_problems(shape, *lengths, budget, context)
    if is_good(*(f"parallel.{name}" for name in SIZES)):
        found += trainer_problems(shape, parallel, world_size)
    if shape is not None and is_good("parallel.pipeline", "memory.optimizer_state_dtype"):
        found += _tied_problems(config, shape)
    if shape is not None and is_good("memory.recompute_modules", "memory.recompute_num_layers"):
        found += recompute_problems(shape, config.memory.recompute_modules, config.memory.recompute_num_layers)
    if is_good("trainer.profile.steps", "trainer.profile.ranks", "trainer.total_steps"):
        found += _profile_problems(config, world_size)
    if shape is not None:
        found += _tower_problems(config, shape)
    if has_critic(config) and config.critic.path is not None and is_good("critic.path"):
        found += _value_model_problems(config, world_size, config.critic.path, "critic.path", is_good, SUFFIXES)
    if has_critic(config) and is_good(*CRITIC_SIZES):
        found += _own_layout_problems(config, shape, world_size, is_good)
    if samples(config) and (reward := reward_model(config)) is not None and isinstance(reward.options.get("path"), str):
        found += _value_model_problems(config, world_size, model_directory(reward), REWARD_KEY, is_good, VALUE)
    if samples(config) and is_good("rollout.tensor_parallel_size"):
        shared_world = world_size if rollout.placement == "colocated" else None
        found += engine_problems(shape, rollout.tensor_parallel_size, shared_world, has_whole_experts(rollout))
    if shape is not None:
        found += _router_problems(config, shape)
        found += layer_problems(shape, config.platform.layers)
        if is_good("parallel.context", "parallel.tensor", "parallel.context_method"):
            found += _context_problems(parallel, shape)
    if samples(config) and shape is not None and shape.mixture is None and rollout.routing_replay != "off":
        found.append(
            f"rollout.routing_replay is {rollout.routing_replay!r}, but the model of model.path has no experts: set it "
            "to off"
        )
    if samples(config) and shape is not None and is_good("rollout.stop_token_ids"):
        beyond = [token for token in rollout.stop_token_ids if token >= shape.vocab_size]
        if beyond:
            last = shape.vocab_size - 1
            found.append(f"rollout.stop_token_ids has {beyond[0]}: give ids up to the vocabulary's last, {last}")
    return shape, found


def _tied_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """Each of the two copies of a tied embedding would round its own moments with other bits."""
    tuning, moments, stages = config.tuning, config.memory.optimizer_state_dtype, config.parallel.pipeline
    is_trained = tuning.method == "full" or bool(tuning.also_train)
    if shape.tied and stages > 1 and is_trained and moments != "float32":
        yield (
            f"memory.optimizer_state_dtype is {moments!r}, but the model's tied embedding lies on the first and on "
            f"the last of {stages} pipeline stages, where it would not stay the same: set it to float32, or "
            "parallel.pipeline to 1"
        )


def _tower_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    vision = config.model.vision
    is_trained = config.tuning.method == "full" and not (vision.freeze and vision.freeze_merger)
    is_trained |= any(TOWER in entry for entry in config.tuning.also_train)
    if shape.tower and samples(config):
        yield from _seeing_problems(config, shape)
    if shape.tower and config.trainer.stage not in SEEING_STAGES:
        yield (
            f"trainer.stage is {config.trainer.stage!r}, which does not take a {shape.family} model: train it with one "
            f"of {', '.join(SEEING_STAGES)}"
        )
    for key in ("overlap_grad_reduce", "overlap_param_gather"):  # the second turns the first on
        if shape.tower and is_trained and getattr(config.parallel, key):
            yield (  # a micro-batch without a picture would leave a bucket of gradients waiting
                f"parallel.{key} is True, but model.vision trains the tower, which has no gradient where "
                "there is no picture: set it to false, or freeze and freeze_merger of model.vision to true"
            )


def _seeing_problems(config: RunConfig, shape: ModelShape) -> Iterator[str]:
    """What samplers of models with a vision tower cannot do yet."""
    rollout, model = config.rollout, f"the {shape.family} model of model.path sees pictures"
    scoring_model = reward_model(config)
    wanted: tuple[tuple[str, Any, tuple[Any, ...], str], ...] = (
        ("rollout.adapter", rollout.adapter, ("auto", "merged"), "its engines have no slots"),
        ("environment.name", config.environment.name, (None,), "conversations with an environment are of text"),
        ("rewards", scoring_model and scoring_model.name, (None,), "reward models do not"),
        (f"rollout.vllm.{SEEING_DTYPE}", rollout.vllm.get(SEEING_DTYPE), (None,), "its tower stays as it is"),
    )
    for key, value, allowed, why in wanted:
        if value not in allowed:
            fix = "leave it out" if allowed == (None,) else f"set it to {allowed[-1]}"
            yield f"{key} is {value!r}, but {model}, and {why}: {fix}"
    quantization, settings = rollout.vllm.get("quantization"), rollout.vllm.get("quantization_config")
    left_out = settings.get("ignore") if isinstance(settings, Mapping) else None
    if quantization is not None and not (isinstance(left_out, list) and TOWER_LEFT_OUT in left_out):
        yield (
            f"rollout.vllm.quantization is {quantization!r}, but {model}, and the tower must stay as it is: set "
            f"rollout.vllm.quantization_config to {{ignore: ['{TOWER_LEFT_OUT}']}}"
        )
    if has_critic(config):
        yield f"algorithm.advantage is {config.algorithm.advantage!r}, but {model}, and critics do not: set it to grpo"


def _own_layout_problems(
    config: RunConfig, shape: ModelShape | None, world_size: int | None, is_good: Callable[..., bool]
) -> list[str]:
    """Misfits of the critic's model with a layout of its own."""
    own = critic_parallel(config)
    if own is config.parallel or not is_good(*(f"parallel.{name}" for name in SIZES)):
        return []
    if config.critic.path is not None:
        shape = inspect_model(config.critic.path, "critic.path", tuple(SUFFIXES))[0]
    sizes = f"critic.tensor {own.tensor}, critic.pipeline {own.pipeline} and critic.context {own.context}"
    lines = [*trainer_problems(shape, own, world_size), *(_context_problems(own, shape) if shape is not None else ())]
    return [f"with {sizes} the critic cannot be trained: {line}" for line in lines]


def _context_problems(parallel: ParallelConfig, shape: ModelShape) -> list[str]:
    """Heads that tensor-parallel ranks leave, which Ulysses divides among the context-parallel ones."""
    kv_heads = shape.num_heads if shape.latent else shape.num_kv_heads
    ranks = parallel.tensor * parallel.context
    if parallel.context_method != "ulysses" or not (shape.num_heads % ranks or kv_heads % ranks):
        return []
    return [
        f"parallel.context_method is 'ulysses', which divides the model's {shape.num_heads} heads and {kv_heads} "
        f"key/value heads by parallel.tensor {parallel.tensor} x parallel.context {parallel.context}: lower one of "
        "them, or set it to gather"
    ]


def _router_problems(config: RunConfig, shape: ModelShape) -> list[str]:
    router, found = config.router, []
    given = [name for name in ("aux_loss", "z_loss", "bias_update_rate") if getattr(router, name)]
    if given and shape.mixture is None:
        value = getattr(router, given[0])
        found.append(f"router.{given[0]} is {value}, but the model of model.path has no experts: set it to 0")
    elif router.bias_update_rate and not (shape.mixture and shape.mixture.score_bias):
        found.append(
            f"router.bias_update_rate is {router.bias_update_rate}, but the routers of a {shape.family} model have no "
            "bias: set it to 0, and router.aux_loss to more"
        )
    elif router.bias_update_rate and config.tuning.method != "full":
        found.append(
            f"router.bias_update_rate is {router.bias_update_rate}, but with tuning.method {config.tuning.method} the "
            "bias is a part of the base, which does not change: set it to 0"
        )
    return found


def _profile_problems(config: RunConfig, world_size: int | None) -> Iterator[str]:
    """Steps and ranks of ``trainer.profile`` that this run does not have: nothing would be recorded of them."""
    profile, total = config.trainer.profile, config.trainer.total_steps
    if profile.steps and not profile.ranks:
        yield "trainer.profile.ranks is [], so that no rank records trainer.profile.steps: name one, such as 0"
    if world_size is not None and max(profile.ranks, default=0) >= world_size:
        yield (
            f"trainer.profile.ranks has {max(profile.ranks)}, but this run has {world_size} ranks: name some of 0 to "
            f"{world_size - 1}"
        )
    if total is not None and max(profile.steps, default=0) > total:
        yield f"trainer.profile.steps has {max(profile.steps)}, but trainer.total_steps is {total}: name earlier ones"


def _value_model_problems(
    config: RunConfig,
    world_size: int | None,
    path: str,
    key: str,
    is_good: Callable[..., bool],
    allowed: Collection[Head],
) -> list[str]:
    """Misfits of a second model, which ``key`` names, with the lengths and the layout; the layout is the policy's."""
    shape, found = inspect_model(path, key, allowed)
    if shape is not None and shape.tower:
        found.append(f"{key} is a {shape.family} model: value models see no pictures, give one of text")
    data, parallel = config.data, config.parallel
    if shape is not None and is_good("data.max_prompt_length", "data.max_response_length"):
        found += length_problems(shape, data.max_prompt_length, data.max_response_length, None, None)
    if shape is not None and is_good(*(f"parallel.{name}" for name in SIZES)):
        found += trainer_problems(shape, parallel, world_size)
    return [line if key in line else f"{key}: {line}" for line in found]
