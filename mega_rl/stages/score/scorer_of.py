"""What scores the samples of a run, as the configuration wants it."""

from __future__ import annotations

from mega_rl import platform
from mega_rl.config import workers_rewards
from mega_rl.config.checks.model import REWARD_KEY
from mega_rl.config.schema.sampling import RewardConfig
from mega_rl.config.schema.stage import model_directory, reward_model
from mega_rl.megatron.policy import MegatronPolicy
from mega_rl.megatron.reference import Frozen
from mega_rl.models.shape import VALUE
from mega_rl.parallel.collectives import together
from mega_rl.rewards.scorer import Scorer, WeightedReward
from mega_rl.stages.models.trainer import companion_spec
from mega_rl.stages.models.values import check_same_tokenizer, open_value_model
from mega_rl.stages.run.sampling_job import SamplingJob
from mega_rl.stages.score.reward_model import RewardModel
from mega_rl.stages.score.scoring import scorer_of_node


def scorer_of(job: SamplingJob) -> Scorer:
    config = job.config
    reward = reward_model(config)
    collective = None if reward is None else collective_reward_of(job, reward)
    if not config.rewards:  # the environment gives them
        return Scorer([], None)
    pictures = None if job.picture_set is None else job.picture_set.pictures
    return scorer_of_node(workers_rewards(config), config.reward_workers, collective, pictures)


def collective_reward_of(job: SamplingJob, reward: RewardConfig) -> RewardModel:
    """The reward model, frozen, at the trainer's layout."""
    config, directory = job.config, model_directory(reward)
    with together("opening the reward model"):
        shape, weights = open_value_model(directory, REWARD_KEY, seed=None, allowed=VALUE)
        check_same_tokenizer(job.tokenizer, directory, REWARD_KEY)
    policy = MegatronPolicy(companion_spec(config), shape, job.layout, job.device)
    policy.load_huggingface(weights)
    frozen = Frozen(policy, config.memory, platform.current().has_own_memory)
    return RewardModel(WeightedReward(reward.name, reward.weight, tuple(reward.only)), frozen, job.share)
