"""The configuration of an evaluation: what a run was configured with, less what only training reads."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mega_rl.config import RunConfig, load_config, validate
from mega_rl.config.schema.data_file import DataFile
from mega_rl.config.schema.learning import EnvironmentConfig
from mega_rl.config.schema.sampling import RewardConfig, RolloutConfig
from mega_rl.config.schema.sections import TOKENS_PER_MICROBATCH, DataConfig, TrainerConfig
from mega_rl.errors import InputError
from mega_rl.evaluation.weights import EvaluatedWeights

DATA = "--data"  # what lists the files of data, for messages


def evaluation_config(
    files: Path | Sequence[Path] | None, overrides: Sequence[str], weights: EvaluatedWeights
) -> RunConfig:
    """A configuration with nothing in it but what an evaluation reads.

    Its ``model.path`` is a Hugging Face directory with configuration and tokenizer: that of the weights, or, if these
    are a checkpoint, the one that it was trained from.

    Args:
        files: of a run, or written for one; later ones change earlier ones. None: defaults.
        overrides: ``key=value``; their ``model.path`` is the Hugging Face directory of a checkpoint.

    Raises:
        InputError: as ``load_config``.
    """
    packed = weights.directory / "huggingface"  # in a checkpoint that was converted from a Hugging Face directory
    here = packed if weights.is_checkpoint and packed.is_dir() else weights.directory
    is_named = any(override.startswith("model.path=") for override in overrides)
    if not is_named and (files is None or not weights.is_checkpoint or here == packed):
        overrides = [*overrides, f"model.path='{str(here).replace(chr(39), 2 * chr(39))}'"]
    given = load_config(files, overrides)
    length = given.data.max_prompt_length + given.data.max_response_length
    trainer = TrainerConfig(
        seed=given.trainer.seed,
        total_steps=1,
        max_tokens_per_microbatch=max(length, TOKENS_PER_MICROBATCH),
        collective_timeout_s=given.trainer.collective_timeout_s,
    )
    rollout = replace(
        given.rollout,
        n=RolloutConfig.n,
        adapter="auto",
        simulated_quantization=None,
        routing_replay="off",
        replay=None,
        oversample=RolloutConfig.oversample,
        mode="synchronous",
        max_staleness=0,
        kv_on_update="recompute",
    )
    return RunConfig(
        model=given.model,
        data=given.data,
        rollout=rollout,
        environment=given.environment,
        rewards=given.rewards,
        reward_workers=given.reward_workers,
        trainer=trainer,
        validation=given.validation,
        platform=given.platform,
    )


def check(config: RunConfig, world_size: int, ks: Sequence[int], is_greedy: bool) -> None:
    """
    Args:
        world_size: number of processes.
        ks: of pass@k and maj@k.

    Raises:
        InputError: values that are impossible, by themselves or together.
    """
    n, rollout = config.validation.n, config.rollout
    if not config.data.val_files:
        raise InputError(f"no data: name at least one .jsonl, .json or .parquet file with {DATA} FILE")
    if n == 0 and not is_greedy:
        raise InputError("--no-greedy with --samples 0 leaves no answers: leave one of them out")
    for k in ks:
        if k < 1 or k > n:
            raise InputError(f"--k {k} cannot be estimated from --samples {n}: give 1 <= k <= n, or raise --samples")
    if not config.rewards and config.environment.name is None:
        raise InputError("no rewards: name one with --reward NAME (such as gsm8k), or give the directory of a run")
    validate(config, world_size, has_files=False)
    if rollout.placement == "separate" and world_size > 1:
        raise InputError(
            f"--placement separate takes one process, and there are {world_size}: the engines are started by it"
        )


def check_layout(num_engines: int | None, config: RunConfig, world_size: int) -> None:
    """
    Args:
        num_engines: as asked for; None: as many as the processes give.

    Raises:
        InputError: colocated engines need another number of processes.
    """
    size = config.rollout.tensor_parallel_size
    if config.rollout.placement == "colocated" and num_engines is not None and num_engines * size != world_size:
        raise InputError(
            f"--engines {num_engines} with --tensor-parallel {size} needs {num_engines * size} processes, and there "
            f"are {world_size}: start with mega-rl eval, or torchrun --nproc-per-node {num_engines * size}"
        )


def settings_of(config: RunConfig, weights: EvaluatedWeights, is_greedy: bool) -> dict[str, Any]:
    """Everything that an answer or its score depends on; not the layout of the engines, nor where the weights lie.

    Raises:
        InputError: a file of data cannot be read.
    """
    data, rollout, unset = config.data, config.rollout, DataConfig()
    return {
        "weights": dict(weights.identity()),
        "data": [_data_file(DataFile.of(entry)) for entry in data.val_files],
        "prompts": {
            name: getattr(data, name)
            for name in ("max_prompt_length", "filter_overlong_prompts", "chat_template", "system_prompt")
        }
        | ({} if data.max_val_samples == unset.max_val_samples else {"num_rows": data.max_val_samples})
        | ({} if data.max_pixels == unset.max_pixels else {"max_pixels": data.max_pixels}),
        "answers": {
            "greedy": is_greedy,
            "n": config.validation.n,
            "temperature": config.validation.temperature,
            "seed": config.trainer.seed,
            "max_response_length": data.max_response_length,
            "dtype": rollout.dtype or config.model.dtype,
            "stop": list(rollout.stop),
            "stop_token_ids": list(rollout.stop_token_ids),
            "ignore_eos": rollout.ignore_eos,
            "seeds": rollout.seeds,
            "vllm": dict(rollout.vllm),
        },
        "rewards": [_reward(reward) | _source(reward.name) for reward in config.rewards],
    } | _environment(config.environment)


def _environment(environment: EnvironmentConfig) -> dict[str, Any]:
    """Without an environment: nothing, as evaluations that are there have it."""
    if environment.name is None:
        return {}
    of_answers = {name: value for name, value in asdict(environment).items() if name != "workers"}
    return {"environment": of_answers | _source(environment.name, "environment.name")}


def _data_file(file: DataFile) -> dict[str, Any]:
    found = {"name": Path(file.path).name, "sha256": _digest(Path(file.path), DATA)}
    return found if file.max_rows is None else found | {"num_rows": file.max_rows}


def _reward(reward: RewardConfig) -> dict[str, Any]:
    """Without ``only`` where a reward is for every row, as evaluations that are there have it."""
    return {name: value for name, value in asdict(reward).items() if value or name != "only"}


def _source(reward: str, key: str = "rewards") -> dict[str, str]:
    file = Path(reward.rpartition(":")[0])
    return {"sha256": _digest(file, key)} if file.suffix == ".py" and file.is_file() else {}


def _digest(file: Path, key: str) -> str:
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{key}: {file} cannot be read ({error.strerror}): give an existing file") from error
