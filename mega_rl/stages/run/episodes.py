"""Episodes of a run: from the section ``environment`` to a sampler."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from mega_rl import platform
from mega_rl.config import RunConfig
from mega_rl.config.checks.environment import TOOLS
from mega_rl.config.schema.learning import EnvironmentConfig
from mega_rl.data.tokens.replies import ReplyTokens
from mega_rl.data.tokens.template import check_written, uses_chat_template
from mega_rl.data.tokens.tokenizer import generation_ends, load_tokenizer
from mega_rl.environments.choice import Maker, placed
from mega_rl.environments.episode import EpisodeLimits
from mega_rl.environments.tools import Parsed, Parser
from mega_rl.errors import InputError
from mega_rl.parallel.collectives import together
from mega_rl.parallel.layout import EngineLayout
from mega_rl.rollout.collect.replicas import engine_ranks
from mega_rl.rollout.engine import ProbedSampler
from mega_rl.rollout.episodes.episode_tokens import EpisodePlan
from mega_rl.rollout.episodes.episodes import EpisodeSampler
from mega_rl.rollout.vllm.start.environment import preserved_process, set_environment
from mega_rl.rollout.vllm.tool_parsers import check_parser, tool_parser
from mega_rl.types import Outcome, UnknownReward

UNFINISHED = {"turns", "tokens"}  # why episodes stop that a limit has ended


def plan_of(config: RunConfig, tokenizer: PreTrainedTokenizerBase, is_engine: bool = False) -> EpisodePlan | None:
    """How the episodes of a run go on; None: single turns.

    Args:
        is_engine: this is the process of an engine, in which episodes run if ``rollout.mode`` is not synchronous.

    Raises:
        InputError: no such environment, options that it does not take, something that it needs and that does not work,
            or a chat template that cannot write episodes.
    """
    settings = config.environment
    if settings.name is None:
        return None
    if not uses_chat_template(tokenizer, config.data.chat_template):
        raise InputError(
            f"environment.name is {settings.name}, and turns are parted by the chat template, which the tokenizer of "
            f"{config.model.path} does not have: give it one"
        )
    maker = Maker(settings, late_parser(settings.tool_parser, tokenizer))
    runs_here = is_engine or config.rollout.mode == "synchronous"
    if runs_here and config.rollout.replay is None:
        maker.check()
    if settings.name == TOOLS:
        check_parser(settings.tool_parser)
    check_written(tokenizer, [], maker.tools)
    replies = ReplyTokens(
        tokenizer,
        maker.tools,
        maker.roles,
        [*generation_ends(config.model.path), *config.rollout.stop_token_ids],
        settings.history,
    )
    limits = EpisodeLimits(settings.max_turns, settings.max_reply_tokens, None, settings.step_timeout_s)
    return EpisodePlan(
        maker, replies, tokenizer, limits, settings.max_turn_tokens, settings.scored, settings.workers, maker.tools
    )


@dataclass(frozen=True)
class PlanThere:
    """Makes ``plan_of`` in the process of an engine, wherever that was begun: all that it reads, and nothing else.

    Equal for all trainers of a run, so that engines which one has started are of use to the next.
    """

    model_path: str  # absolute
    chat_template: str
    stop_token_ids: tuple[int, ...]
    environment: EnvironmentConfig  # its files with absolute paths; those in options are the user's
    code: tuple[str, ...]  # digests of these files

    def __call__(self) -> EpisodePlan:
        config = RunConfig(environment=self.environment)
        config.model.path = self.model_path
        config.data.chat_template = self.chat_template  # type: ignore[assignment]
        config.rollout.stop_token_ids = list(self.stop_token_ids)
        tokenizer = load_tokenizer(self.model_path)
        plan = plan_of(config, tokenizer, is_engine=True)
        assert plan is not None, "engines of single turns make no plan"
        if self.environment.name == TOOLS:
            _parser(self.environment.tool_parser, tokenizer)
        return plan


def plan_there(config: RunConfig, model_path: str) -> PlanThere:
    """What of a configuration makes the plan of its episodes in the process of an engine."""
    anywhere, files = placed(config.environment)
    code = tuple(hashlib.sha256(file.read_bytes()).hexdigest() for file in files)
    return PlanThere(model_path, config.data.chat_template, tuple(config.rollout.stop_token_ids), anywhere, code)


def late_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> Parser:
    """A parser of vLLM's that is made when it is first used: vLLM takes seconds to import, and wants its variables."""

    def parse(text: str) -> Parsed:
        return _parser(name, tokenizer)(text)

    return parse


@cache
def _parser(name: str, tokenizer: PreTrainedTokenizerBase) -> Parser:
    device_type = platform.current().name
    set_environment(device_type)
    with preserved_process(device_type):
        return tool_parser(name, tokenizer)


def with_episodes(
    config: RunConfig, layout: EngineLayout, engine: ProbedSampler, plan: EpisodePlan | None
) -> ProbedSampler:
    """The engine, whose responses are episodes if there is an environment and nothing is replayed. Collective."""
    if plan is None or config.rollout.replay is not None:
        return engine
    is_leader = layout.tensor_rank(dist.get_rank()) == 0
    with together("making the parser of tool calls"):
        if is_leader and config.environment.name == TOOLS:
            _parser(config.environment.tool_parser, plan.tokenizer)
    return EpisodeSampler(engine, plan, is_leader, engine_ranks(layout, config.trainer.collective_timeout_s))


def without_reward(episode: Outcome) -> Outcome:
    """The same, with an unknown reward if a limit has ended it."""
    if episode.stop not in UNFINISHED or episode.failure is not None:
        return episode
    return episode._replace(failure=UnknownReward("unfinished", f"was left out: a limit of {episode.stop} ended it"))
