"""Checks that depend on the model or the number of processes: the same answer in a dry run and in a run."""

from __future__ import annotations

from collections.abc import Callable, Collection

from mega_rl.config.schema import RunConfig
from mega_rl.config.stage import has_critic, model_directory, reward_model, samples, sequences_per_row, trains_values
from mega_rl.errors import input_error
from mega_rl.models.fit import engine_problems, length_problems, trainer_problems
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

REWARD_KEY = "rewards.model.options.path"  # what sentences call the directory of a reward model
SIZES = ("tensor", "context", "pipeline", "virtual_pipeline", "expert", "expert_tensor")  # of the parallel section


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
        found += length_problems(shape, *lengths, budget, context, sequences_per_row(config))
    if is_good(*(f"parallel.{name}" for name in SIZES)):
        found += trainer_problems(shape, parallel, world_size)
    if shape is not None and shape.tied and is_good("parallel.pipeline", "memory.optimizer_state_dtype"):
        tuning, moments = config.tuning, config.memory.optimizer_state_dtype
        is_trained = tuning.method == "full" or bool(tuning.also_train)
        if parallel.pipeline > 1 and is_trained and moments != "float32":
            found.append(  # each of the two copies would round its own moments with other bits
                f"memory.optimizer_state_dtype is {moments!r}, but the model's tied embedding lies on the first and on "
                f"the last of {parallel.pipeline} pipeline stages, where it would not stay the same: set it to "
                "float32, or parallel.pipeline to 1"
            )
    vision = config.model.vision
    trains_tower = config.tuning.method == "full" and not (vision.freeze and vision.freeze_merger)
    if shape is not None and shape.tower and trains_tower and parallel.overlap_grad_reduce:
        found.append(  # a micro-batch without a picture would leave a bucket of gradients waiting
            "parallel.overlap_grad_reduce is True, but model.vision trains the tower, which has no gradient where "
            "there is no picture: set it to false, or freeze and freeze_merger of model.vision to true"
        )
    if has_critic(config) and config.critic.path is not None and is_good("critic.path"):
        found += _value_model_problems(config, world_size, config.critic.path, "critic.path", is_good, SUFFIXES)
    if samples(config) and (reward := reward_model(config)) is not None and isinstance(reward.options.get("path"), str):
        found += _value_model_problems(config, world_size, model_directory(reward), REWARD_KEY, is_good, VALUE)
    if samples(config) and is_good("rollout.tensor_parallel_size"):
        shared_world = world_size if rollout.placement == "colocated" else None
        has_whole_experts = bool(rollout.vllm.get("enable_expert_parallel"))
        found += engine_problems(shape, rollout.tensor_parallel_size, shared_world, has_whole_experts)
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
    data, parallel = config.data, config.parallel
    if shape is not None and is_good("data.max_prompt_length", "data.max_response_length"):
        found += length_problems(shape, data.max_prompt_length, data.max_response_length, None, None)
    if shape is not None and is_good(*(f"parallel.{name}" for name in SIZES)):
        found += trainer_problems(shape, parallel, world_size)
    return [line if key in line else f"{key}: {line}" for line in found]
