"""What must hold between the keys of environments and others, told before anything is imported."""

from __future__ import annotations

from mega_rl.config.schema.sections import CRITIC_ADVANTAGE, RunConfig
from mega_rl.errors import shown
from mega_rl.own_code import is_own, name_problem, nearest

TOOLS = "tools"  # the environment that is made of functions
# Names of environments -> where their classes are.
BUILT_IN = {
    TOOLS: "mega_rl.environments.tools:ToolEnvironment",
    "python_sandbox": "mega_rl.environments.built_in.python:PythonSandbox",
    "number_guessing": "mega_rl.environments.built_in.guessing:NumberGuessing",
}
ENVIRONMENT = "environment"  # the part of a score that an environment gave
TURNS = "environment_turns"  # the part that it gave for single turns, where rewards scored the end


def environment_problems(config: RunConfig) -> list[str]:
    """Every problem as a sentence; an environment may reward episodes, and without one there must be rewards."""
    settings, found = config.environment, _credit_problems(config)
    if settings.name is None:
        if not config.rewards:
            found.append("rewards is []: an rl run needs at least one, such as rewards=[{name: NAME}]")
        if settings.options:
            found.append("environment.options is set, but environment.name is null: name one")
        return found
    name = f"environment.name is {shown(settings.name)}"
    if is_own(settings.name):
        if (problem := name_problem(settings.name, "Class")) is not None:
            found.append(f"{name}{problem}")
    elif settings.name not in BUILT_IN:
        guess = nearest(settings.name, BUILT_IN)
        found.append(f"{name}: choose {', '.join(BUILT_IN)}, or write package.module:Class{guess}")
    functions = settings.options.get("functions")
    if settings.name == TOOLS and (not isinstance(functions, list) or not functions):
        found.append("environment.options.functions is not a list: name a function, such as calculate")
    if config.data.chat_template == "never":
        found.append(f"{name}, and turns are parted by the chat template: set data.chat_template to auto or always")
    if config.rollout.ignore_eos:
        found.append(f"{name}, and turns end with the end-of-sequence token: set rollout.ignore_eos to false")
    sampling = config.algorithm.dynamic_sampling
    if sampling.enabled and sampling.metric is not None:
        found.append(
            f"{name}, whose episodes have either the reward of the environment or those of rewards, but "
            f"algorithm.dynamic_sampling.metric is {sampling.metric!r}: set it to null"
        )
    return found


def _credit_problems(config: RunConfig) -> list[str]:
    """Sentences on ``algorithm.credit``."""
    algorithm, found = config.algorithm, list[str]()
    if algorithm.credit != "turn":
        if algorithm.turn_discount != 1.0:
            found.append(
                f"algorithm.turn_discount is {algorithm.turn_discount}, but algorithm.credit is 'episode', which has "
                "no turns: set it to 1, or algorithm.credit to turn"
            )
        return found
    if config.environment.name is None:
        found.append(
            "algorithm.credit is 'turn', but environment.name is null, so that responses have one turn: set it to "
            "episode, or name an environment"
        )
    if algorithm.advantage == CRITIC_ADVANTAGE:
        found.append(
            f"algorithm.credit is 'turn', but with algorithm.advantage {CRITIC_ADVANTAGE!r} a critic tells what every "
            "token is worth: set algorithm.credit to episode, or algorithm.advantage to grpo"
        )
    if algorithm.objective == "gspo":
        found.append(
            "algorithm.credit is 'turn', but algorithm.objective 'gspo' has one ratio for a whole response, which "
            "learns by the mean of its turns only: set algorithm.credit to episode, or algorithm.objective to ppo"
        )
    return found


def score_parts(config: RunConfig) -> list[str]:
    """Names of what the score of a sample is made of."""
    parts = [reward.name.rpartition(":")[2] for reward in config.rewards]
    return parts if config.environment.name is None else [*parts, ENVIRONMENT]
