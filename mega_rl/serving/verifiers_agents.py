"""Environments of verifiers (its ``MultiTurnEnv`` and what comes from it, releases 0.1.x) as agents.

Such an environment drives itself: it asks an OpenAI-compatible address for turns, and its rubric scores the rollout. So
it is an agent's function with an ``AgentAddress``; verifiers' own client does the asking.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

from mega_rl.environments.agent import EpisodeFunction, Generate
from mega_rl.environments.protocol import End
from mega_rl.environments.tools import Parser
from mega_rl.errors import InputError
from mega_rl.serving.agent_address import AgentAddress
from mega_rl.types import Prompt

KEY = "MEGA_RL_NO_KEY"  # a variable that verifiers reads its key from; the address is a secret itself


def verifiers_episode(environment: Any, address: AgentAddress, parse: Parser | None = None) -> EpisodeFunction:
    """
    Args:
        environment: with ``rollout`` and a ``rubric``.
        parse: finds calls of tools in a turn.

    Raises:
        InputError: there is no verifiers, or one without these environments.
    """
    try:
        config = importlib.import_module("verifiers.types").ClientConfig
    except (ImportError, AttributeError) as error:
        raise InputError(
            f"environments of verifiers need its releases 0.1: pip install 'verifiers<0.2' ({error})"
        ) from error
    os.environ.setdefault(KEY, "none")

    async def episode(prompt: Prompt, generate: Generate) -> End:
        given = prompt.extra_info
        row = {"prompt": given["messages"], "answer": prompt.ground_truth, "example_id": prompt.index}
        async with address.of(generate, prompt.text, parse) as url:
            client = config(client_type="openai_chat_completions", api_base_url=url, api_key_var=KEY)
            state = await environment.rollout(row | {"info": given.get("info", {})}, client, "policy", {})
        if state.get("error") is not None:
            raise RuntimeError(f"the environment of verifiers failed: {state['error']}")
        await environment.rubric.score_rollout(state)
        metrics = {str(name): float(value) for name, value in (state.get("metrics") or {}).items()}
        return End(float(state["reward"]), metrics)

    return episode
