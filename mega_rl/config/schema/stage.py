"""What follows from a run's stage, for code that only reads the configuration."""

from __future__ import annotations

import os
from dataclasses import replace

from mega_rl.config.schema.learning import TuningConfig
from mega_rl.config.schema.sampling import RewardConfig, RolloutConfig
from mega_rl.config.schema.sections import CRITIC_ADVANTAGE, ParallelConfig, RunConfig
from mega_rl.models.files import CONFIG_FILE

WORKERS_PER_RANK = 2  # where ``reward_workers.num_workers`` says nothing
MODEL_REWARD = "model"  # the name of a reward
# Under the output directory of a run: what it exports, and its adapters as a directory of PEFT's.
EXPORT, ADAPTER = "huggingface", "adapter"

REFERENCE_FREE = {"simpo", "orpo"}  # values of preference.loss

LEARNING_FROM_FILES = {"pt", "sft", "rm", "dpo", "kto"}
STAGES = LEARNING_FROM_FILES | {"rl"}
PAIRED = {"rm", "dpo"}


def samples(config: RunConfig) -> bool:
    """Whether the stage learns from responses that an engine samples, and so reads the sections about them.

    An unknown stage counts as one that does, so that a mistyped name hides no other problem.
    """
    return config.trainer.stage not in LEARNING_FROM_FILES


def has_whole_experts(rollout: RolloutConfig) -> bool:
    """Whether a worker of the engine holds some experts whole, not a part of each."""
    return bool(rollout.vllm.get("enable_expert_parallel"))


def sequences_per_row(config: RunConfig) -> int:
    """Sequences of one row of the data: 2 where a row is a pair of answers, which share a micro-batch if they fit."""
    return 2 if config.trainer.stage in PAIRED else 1


def needs_reference(config: RunConfig) -> bool:
    """Whether the loss of the stage compares with log-probabilities of the starting weights that are kept in a file."""
    if config.trainer.stage == "kto":
        return True
    return config.trainer.stage == "dpo" and config.preference.loss not in REFERENCE_FREE


def reads_weights_first(config: RunConfig) -> bool:
    """Whether every optimizer step begins with a pass without gradient, as the estimate of KTO's divergence is one."""
    return config.trainer.stage == "kto"


def exports_adapter(tuning: TuningConfig) -> bool:
    """Whether a run's adapters make its model of ``model.path``: nothing else is trained or merged into it."""
    return tuning.method == "lora" and not tuning.also_train and not tuning.adapter.new


def trains_values(config: RunConfig) -> bool:
    """Whether the model has a value head: a reward model's, and not a language model's."""
    return config.trainer.stage == "rm"


def reward_model(config: RunConfig) -> RewardConfig | None:
    """The reward that is the value of a model, which the trainer's processes compute; None: there is none."""
    return next((reward for reward in config.rewards if reward.name == MODEL_REWARD), None)


def workers_rewards(config: RunConfig) -> list[RewardConfig]:
    """The rewards that run in the reward workers: all others."""
    return [reward for reward in config.rewards if reward.name != MODEL_REWARD]


def model_directory(reward: RewardConfig) -> str:
    """The directory of a reward model: its ``path``, or the export in it if that is the directory of a run."""
    path = str(reward.options["path"])
    export = os.path.join(path, EXPORT)
    return export if os.path.isdir(export) and not os.path.exists(os.path.join(path, CONFIG_FILE)) else path


def critic_parallel(config: RunConfig) -> ParallelConfig:
    """The layout of the critic: the policy's, but for the sizes that ``critic`` sets and what follows from them."""
    own, policy = config.critic, config.parallel
    sizes = {name: getattr(own, name) or getattr(policy, name) for name in ("tensor", "pipeline", "context")}
    if all(getattr(policy, name) == size for name, size in sizes.items()):
        return policy
    chunks = policy.virtual_pipeline if sizes["pipeline"] == policy.pipeline else None
    shares_tokens = sizes["tensor"] > 1 and (policy.sequence or policy.tensor == 1)
    return replace(policy, **sizes, virtual_pipeline=chunks, sequence=shares_tokens)


def reads_pictures(config: RunConfig) -> bool:
    """Whether rows may bring pictures to a model that sees them."""
    return samples(config) or config.trainer.stage == "sft"


def has_critic(config: RunConfig) -> bool:
    """Whether the run trains a critic beside the policy, and so reads the section ``critic``."""
    return samples(config) and config.algorithm.advantage == CRITIC_ADVANTAGE
