"""All problems of a configuration at once, before anything heavy starts; nothing is changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mega_rl.config.checks.adapters import adapter_problems
from mega_rl.config.checks.algorithm import algorithm_problems
from mega_rl.config.checks.data_files import data_file_problems
from mega_rl.config.checks.environment import environment_problems, score_parts
from mega_rl.config.checks.model import model_problems
from mega_rl.config.checks.rules import rules
from mega_rl.config.checks.sampling import sampling_problems
from mega_rl.config.schema.limits import Rule, any_number, text
from mega_rl.config.schema.megatron_fields import field_problems
from mega_rl.config.schema.sections import RunConfig
from mega_rl.config.schema.sources import repeated
from mega_rl.config.schema.stage import MODEL_REWARD, REFERENCE_FREE, STAGES, has_critic, reward_model, samples
from mega_rl.errors import input_error, shortened, shown
from mega_rl.models.files import tokenizer_problem, weights_problem
from mega_rl.own_code import is_own, name_problem

MANIFEST = "manifest.json"  # what every whole checkpoint of the trainer has
RECORDED = "step_*.jsonl"  # the files of recorded rollouts
MAX_NAME_BYTES = 255  # of one part of a path
OTHER_ADAMS = ("optimizer_selection", "swap_optimizer")  # features of MindSpeed


def validate(config: RunConfig, world_size: int | None = None, has_files: bool = True) -> None:
    """Raises one InputError that lists every problem; see ``problems``."""
    found = problems(config, world_size, has_files)
    if found:
        raise input_error("invalid configuration", found)


def problems(config: RunConfig, world_size: int | None = None, has_files: bool = True) -> list[str]:
    """Every problem as a sentence that names the field, its value and the fix; empty when the run can start.

    Args:
        config: read only; what the run's stage does not read (of many, rollout, algorithm, aqn and rewards) is not
            checked. An unknown stage reads everything.
        world_size: number of processes; None if it is not known (a dry run), which leaves out what depends on it.
        has_files: false if a run is only planned: nothing but the model's config.json is asked for.
    """
    assert world_size is None or world_size >= 1
    found = _Problems(config)
    is_sampled, stage = samples(config), config.trainer.stage
    for field, rule in rules(stage if stage in STAGES else None).items():
        found.check(field, rule)
    found.lines += model_problems(config, world_size, found.good)[1]
    _data(found)
    if has_files:
        _model_files(found)
        found.lines += data_file_problems(config)
    found.lines += adapter_problems(config, has_files)
    _trainer(found)
    _optimizer(found)
    _memory(found)
    _overlap(found)
    _mindspeed(found)
    found.lines += field_problems(config.trainer.megatron)
    _preference(found)
    if is_sampled:
        _rewards(found)
        _rollout_and_algorithm(found)
        _aqn(found)
        _placement(found)
    return found.lines


class _Problems:
    """Collects sentences, and remembers which fields are bad so that conditions between fields do not stumble."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.lines: list[str] = []
        self.bad: set[str] = set()

    def get(self, field: str) -> Any:
        value: Any = self.config
        for part in field.split("."):
            value = getattr(value, part)
        return value

    def check(self, field: str, rule: Rule) -> None:
        value = self.get(field)
        if (problem := rule.problem(field, value)) is not None:
            self.bad.add(field)
            self.lines.append(problem)
        elif rule.names and isinstance(value, list) and len(set(value)) < len(value):
            twice = next(item for item in value if value.count(item) > 1)
            self.lines.append(f"{field} has {twice!r} twice: name it once")

    def add(self, line: str) -> None:
        self.lines.append(line)

    def good(self, *fields: str) -> bool:
        return self.bad.isdisjoint(fields)


def _shown(value: Any) -> str:
    return "null" if value is None else shown(value)


def _model_files(found: _Problems) -> None:
    path = found.config.model.path
    if found.good("model.path") and os.path.isdir(path):
        found.lines += [line for line in (tokenizer_problem(path), weights_problem(path)) if line is not None]


def _data(found: _Problems) -> None:
    data = found.config.data
    for key, is_set in {"mask_spans": data.mask_spans, "rewritten_history": data.rewritten_history != "refuse"}.items():
        if is_set and found.good(f"data.{key}") and found.config.trainer.stage != "sft":
            found.add(f"data.{key} is set, but only trainer.stage sft reads it: leave it out")


def _trainer(found: _Problems) -> None:
    trainer, checkpoint = found.config.trainer, found.config.checkpoint
    if (trainer.total_steps is None) == (trainer.total_epochs is None):
        values = f"trainer.total_steps is {_shown(trainer.total_steps)} and trainer.total_epochs is "
        found.add(f"{values}{_shown(trainer.total_epochs)}: set exactly one of them and leave the other null")
    export = os.path.join(trainer.output_dir, "huggingface")
    model = found.config.model.path
    if checkpoint.export_hf and found.good("model.path") and os.path.realpath(export) == os.path.realpath(model):
        found.add(
            f"model.path is {shown(model)}, where this run would write its own weights: set "
            "trainer.output_dir to another directory, or checkpoint.export_hf to false"
        )
    if found.good("trainer.output_dir") and (reason := _obstacle(trainer.output_dir)) is not None:
        found.add(f"trainer.output_dir is {shown(trainer.output_dir)}, {reason}: give a directory, new or existing")
    known = checkpoint.resume in ("auto", "never")
    is_whole = os.path.isfile(os.path.join(checkpoint.resume, MANIFEST))
    if found.good("checkpoint.resume") and not known and not is_whole:
        found.add(
            f"checkpoint.resume is {shown(checkpoint.resume)}: set it to auto, never or an existing checkpoint "
            "directory"
        )


def _obstacle(path: str) -> str | None:
    """Why no directory can be made at ``path``, or written to; None if one can."""
    real = os.path.realpath(path)
    if path.startswith("~"):
        return "whose ~ only a shell replaces"
    if real == "/":
        return "which is the root of the file system"
    if real.startswith(("/proc/", "/sys/")):
        return "which is no place for files"
    if os.path.lexists(path) and not os.path.isdir(path):
        return "which is a file"
    above = real
    while not os.path.exists(above):
        if len(os.fsencode(os.path.basename(above))) > MAX_NAME_BYTES:
            return "whose name is too long"
        above = os.path.dirname(above)
    if not os.path.isdir(above):
        return "which is below a file"
    if not os.access(above, os.W_OK | os.X_OK):
        is_read_only = os.statvfs(above).f_flag & os.ST_RDONLY
        why = "is on a file system that is read-only" if is_read_only else "cannot be written to"
        return f"but {shortened(above)} {why}"
    return None


def _optimizer(found: _Problems) -> None:
    optimizer, trainer = found.config.optimizer, found.config.trainer
    if found.good("optimizer.lr", "optimizer.min_lr") and optimizer.min_lr > optimizer.lr:
        found.add(f"optimizer.min_lr is {optimizer.min_lr}: set it to at most optimizer.lr, {optimizer.lr}")
    updates = found.config.algorithm.minibatches_per_step if samples(found.config) else 1
    alone = found.config.critic.warmup_steps if has_critic(found.config) else 0  # steps without the policy
    total = None if trainer.total_steps is None else max(1, trainer.total_steps - alone) * updates
    if (
        total is not None
        and found.good("optimizer.warmup_steps", "trainer.total_steps")
        and optimizer.warmup_steps > total
    ):
        found.add(
            f"optimizer.warmup_steps is {optimizer.warmup_steps:g}: set it to at most the {total} optimizer steps of "
            f"trainer.total_steps{' after critic.warmup_steps' if alone else ''}"
        )
    if not found.good("optimizer.schedule", "optimizer.warmup_steps", "optimizer.decay_steps", "trainer.total_steps"):
        return
    decay = optimizer.decay_steps
    if (optimizer.schedule == "wsd") != (decay is not None):
        fix = "give a number of steps" if optimizer.schedule == "wsd" else "leave it null, or use wsd"
        found.add(f"optimizer.decay_steps is {_shown(decay)} with optimizer.schedule {optimizer.schedule!r}: {fix}")
    elif decay is not None and total is not None:
        room = total - optimizer.num_warmup_steps(total)
        if room < decay:
            found.add(f"optimizer.decay_steps is {decay}: set it to at most the {room} steps after the warm-up")


def _memory(found: _Problems) -> None:
    memory = found.config.memory
    if not found.good("memory.recompute", "memory.recompute_modules", "memory.recompute_num_layers"):
        return
    for field, value, mode in (
        ("memory.recompute_modules", memory.recompute_modules, "selective"),
        ("memory.recompute_num_layers", memory.recompute_num_layers, "full"),
    ):
        if value is not None and memory.recompute != mode:
            fix = f"leave it null, or set memory.recompute to {mode}"
            found.add(f"{field} is {value!r} with memory.recompute {memory.recompute!r}: {fix}")
    if memory.recompute_modules == []:
        found.add("memory.recompute_modules is []: name at least one module, or leave it null")
    if memory.optimizer_on_host and "optimizer" in memory.offload:
        found.add(
            "memory.offload has 'optimizer', which memory.optimizer_on_host keeps on the host: remove one of them"
        )
    idle = [part for part in memory.offload if part != "optimizer"]
    if idle and not samples(found.config):
        found.add(
            f"memory.offload has {idle[0]!r}, but stage {found.config.trainer.stage} has no engine that works while "
            "the trainer waits: leave at most optimizer"
        )


def _overlap(found: _Problems) -> None:
    parallel = found.config.parallel
    if parallel.overlap_param_gather and parallel.overlap_grad_reduce is False:
        found.add("parallel.overlap_param_gather is True: set it to false, or parallel.overlap_grad_reduce to true too")


def _mindspeed(found: _Problems) -> None:
    mindspeed, memory = found.config.platform.mindspeed, found.config.memory
    if mindspeed.mode == "off" and mindspeed.features:
        name = next(iter(mindspeed.features))
        found.add(
            f"platform.mindspeed.features has {name!r}, but platform.mindspeed.mode is 'off': set it to auto, or "
            "remove the feature"
        )
    other = [name for name in mindspeed.features if name.replace("-", "_") in OTHER_ADAMS]
    if other and (memory.optimizer_on_host or memory.optimizer_state_dtype != "float32"):
        key = "optimizer_on_host" if memory.optimizer_on_host else "optimizer_state_dtype"
        found.add(
            f"platform.mindspeed.features has {other[0]!r}, which replaces the optimizer that memory.{key} is done by: "
            "remove one of them"
        )


def _preference(found: _Problems) -> None:
    preference, field = found.config.preference, "preference.reference"
    if found.config.trainer.stage != "dpo" or not found.good("preference.loss", field):
        return
    loss, is_free, smoothing = preference.loss, preference.loss in REFERENCE_FREE, preference.label_smoothing
    if is_free and preference.reference == "cached":
        found.add(f"{field} is 'cached', but preference.loss {loss!r} compares with no reference: set it to auto")
    if not is_free and preference.reference == "none":
        found.add(f"{field} is 'none', but preference.loss {loss!r} compares with a reference: set it to auto")
    if smoothing and loss not in ("sigmoid", "robust", "simpo"):
        found.add(
            f"preference.label_smoothing is {smoothing}, but preference.loss {loss!r} has none: set it to 0, or the "
            "loss to sigmoid, robust or simpo"
        )


def _placement(found: _Problems) -> None:
    rollout, memory = found.config.rollout, found.config.memory
    if not found.good("rollout.placement", "rollout.num_engines"):
        return
    if rollout.placement == "colocated":
        if rollout.num_engines != 1:
            found.add(
                f"rollout.num_engines is {rollout.num_engines}, but colocated engines are as many as the ranks allow: "
                "leave it at 1, or set rollout.placement to separate"
            )
        return
    if rollout.weight_update == "reload":
        found.add(
            f"rollout.weight_update is {rollout.weight_update!r}, but engines elsewhere take weights shard to shard: "
            "set it to auto, or rollout.placement to colocated"
        )
    if memory.offload:
        found.add(
            f"memory.offload is {memory.offload}, but engines with devices of their own need no room on the trainer's: "
            "set it to []"
        )


def _rewards(found: _Problems) -> None:
    rewards = found.config.rewards
    found.lines += environment_problems(found.config)
    for index, reward in enumerate(rewards):
        field = f"rewards[{index}]"
        if not any_number().holds(reward.weight):
            found.add(f"{field}.weight is {reward.weight}: set it to {any_number().expected}")
        if not text().holds(reward.name):
            found.add(f"{field}.name is {shown(reward.name)}: set it to a reward's name or to package.module:function")
            continue
        name = f"{field}.name is {shown(reward.name)}"
        earlier = [other.name for other in rewards[:index]]
        is_second_model = reward.name == MODEL_REWARD and MODEL_REWARD in earlier
        if is_second_model or repeated([*earlier, reward.name], rewards[: index + 1]) == reward.name:
            found.add(
                f"{name}, which stands twice, and metrics go by name: remove one, add weights, or let each name its "
                "data sources in only"
            )
        if not all(map(text().holds, reward.only)):
            found.add(
                f"{field}.only is {shown(reward.only)}: set it to a list of names of data sources, or leave it out"
            )
        if reward.name.endswith(f":{MODEL_REWARD}") and reward_model(found.config) is not None:
            found.add(f"{name}, and another reward is the built-in {MODEL_REWARD}: rename the function")
        if reward.name == MODEL_REWARD and (
            set(reward.options) != {"path"} or not text().holds(reward.options["path"])
        ):
            found.add(
                f"{field}.options is {shown(reward.options)}: give path, a reward model's directory, and nothing else"
            )
        if is_own(reward.name) and (problem := name_problem(reward.name)) is not None:
            found.add(f"{name}{problem}")


def _rollout_and_algorithm(found: _Problems) -> None:
    rollout, algorithm, data = found.config.rollout, found.config.algorithm, found.config.data
    found.lines.extend([*algorithm_problems(found.config, found.good), *sampling_problems(found.config)])
    _dynamic_sampling(found)
    replay = rollout.replay
    if replay is not None and not (os.path.isdir(replay) and any(Path(replay).glob(RECORDED))):
        found.add(
            f"rollout.replay is {shown(rollout.replay)}, which holds no recorded rollouts: give the rollouts directory "
            "of a run that had logging.dump_rollouts set, or null"
        )
    if rollout.routing_replay == "rollout" and rollout.vllm.get("enable_prefix_caching") is False:
        found.add(
            "rollout.routing_replay is 'rollout', but vLLM keeps the experts of its answers beside the prefix cache, "
            "which rollout.vllm.enable_prefix_caching turns off: remove that, or set rollout.routing_replay to "
            "recompute or off"
        )
    verify = found.config.bridge.verify
    if verify != "off" and rollout.weight_update == "reload":
        found.add(
            f"bridge.verify is {verify!r}, but with rollout.weight_update 'reload' there are no live weights to compare"
            ": set bridge.verify to off, or rollout.weight_update to auto"
        )
    if found.good("data.train_batch_size", "rollout.n", "algorithm.minibatches_per_step"):
        samples, parts = data.train_batch_size * rollout.n, algorithm.minibatches_per_step
        if samples % parts:
            product = f"data.train_batch_size {data.train_batch_size} x rollout.n {rollout.n} = {samples}"
            found.add(f"algorithm.minibatches_per_step is {parts}: set it to a divisor of {product}")


def _dynamic_sampling(found: _Problems) -> None:
    settings, field = found.config.algorithm.dynamic_sampling, "algorithm.dynamic_sampling"
    if not settings.enabled:
        return
    if found.good("rollout.n") and found.config.rollout.n < 2:
        found.add(f"{field}.enabled drops groups of equal reward, and rollout.n is 1: set rollout.n to at least 2")
    if found.good(f"{field}.budget", f"{field}.oversample") and settings.budget < settings.oversample:
        found.add(f"{field}.budget is {settings.budget}: set it to at least {field}.oversample, {settings.oversample}")
    parts = score_parts(found.config)
    if reward_model(found.config) is not None and settings.metric in (None, MODEL_REWARD):
        found.add(
            f"{field}.enabled drops groups while others are sampled, but the reward {MODEL_REWARD!r} is known when all "
            f"are: set {field}.metric to another reward, or {field}.enabled to false"
        )
    if settings.metric is not None and settings.metric not in parts:
        found.add(f"{field}.metric is {settings.metric!r}: set it to null or one of the rewards, {', '.join(parts)}")


def _aqn(found: _Problems) -> None:
    aqn = found.config.aqn
    decays = aqn.schedule != "constant"
    if decays and found.good("aqn.sigma_start", "aqn.sigma_end") and aqn.sigma_start < aqn.sigma_end:
        fix = f"set it to at least aqn.sigma_end, {aqn.sigma_end}, for aqn.schedule {aqn.schedule!r}"
        found.add(f"aqn.sigma_start is {aqn.sigma_start}: {fix}")
    if aqn.enabled and aqn.old_logprobs == "decoupled" and found.config.algorithm.importance_cap is None:
        found.add(
            "algorithm.importance_cap is null, but aqn.old_logprobs 'decoupled' corrects with capped weights: "
            "set the cap to a number such as 2.0, or aqn.old_logprobs to rollout or none"
        )
    engine_dtype = found.config.rollout.dtype or found.config.model.dtype
    if aqn.enabled and aqn.old_logprobs == "recompute_noisy":
        _recompute_noisy(found, engine_dtype)
    if aqn.enabled and aqn.old_logprobs == "rollout" and found.config.rollout.routing_replay == "recompute":
        found.add(
            "rollout.routing_replay is 'recompute', but with aqn.old_logprobs 'rollout' the trainer has no pass before "
            "the update whose experts could be replayed: set it to rollout or off"
        )
    if aqn.enabled and aqn.rounding == "fp32" and engine_dtype != "float32":
        found.add(
            f"aqn.rounding is 'fp32', but the engine holds its norms in {engine_dtype}: set aqn.rounding to nearest or "
            "stochastic, or rollout.dtype to float32"
        )


def _recompute_noisy(found: _Problems, engine_dtype: str) -> None:
    """The trainer must be able to hold what the engine held."""
    dtype, four_bits = found.config.model.dtype, found.config.rollout.simulated_quantization
    fix = "or aqn.old_logprobs to decoupled or rollout"
    if dtype == "float32":
        why = "float32 weights are the optimizer's master weights, which must not get noise"
        found.add(f"aqn.old_logprobs is 'recompute_noisy', but {why}: set model.dtype to bfloat16, {fix}")
    elif engine_dtype != dtype:
        why = f"the trainer's {dtype} cannot hold the engine's {engine_dtype} norms"
        found.add(f"aqn.old_logprobs is 'recompute_noisy', but {why}: set rollout.dtype to null, {fix}")
    if four_bits is not None:
        why = f"the trainer does not recompute what rollout.simulated_quantization {four_bits!r} does"
        found.add(f"aqn.old_logprobs is 'recompute_noisy', but {why}: set it to null, {fix}")
