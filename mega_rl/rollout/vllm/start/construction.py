"""A ``vllm.LLM`` in this process, which leaves the trainer's process and its groups as they were."""

from __future__ import annotations

import dataclasses
import os
import uuid
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed as dist

from mega_rl.bridge.mapping.vllm_slots import Slots
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.errors import InputError
from mega_rl.parallel.collectives import broadcast_object
from mega_rl.rollout.vllm.start.cpu_adjustments import check_head_size, cpu_adjustments
from mega_rl.rollout.vllm.start.environment import is_external, preserved_process
from mega_rl.rollout.vllm.start.options import engine_arguments, slot_arguments
from mega_rl.rollout.vllm.start.seeing import Sight, sight_arguments
from mega_rl.rollout.vllm.start.sockets import remove_socket_names
from mega_rl.rollout.vllm.start.versions import check_batch_invariance, picture_constants_kept


def construct(
    model_path: str,
    rollout: RolloutConfig,
    max_model_len: int,
    device_type: str,
    dtype: str,
    slots: Slots | None,
    sight: Sight | None,
) -> Any:
    """A ``vllm.LLM`` that leaves the process as it found it."""
    external = is_external()
    with preserved_process(device_type):
        from vllm import LLM, envs
        from vllm.distributed.parallel_state import get_tp_group
        from vllm.engine.arg_utils import EngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine import core

        if rollout.batch_invariant:
            check_batch_invariance(envs, current_platform)

        # An engine that is dropped, or whose construction fails, would destroy the trainer's process groups with it.
        core.cleanup_dist_env_and_memory = _leave_groups_alone
        known = [field.name for field in dataclasses.fields(EngineArgs)]
        arguments = engine_arguments(
            rollout,
            model_path=model_path,
            dtype=dtype,
            max_model_len=max_model_len,
            device_type=device_type,
            known=known,
            external=external,
        )
        arguments |= slot_arguments(slots, known) | (sight_arguments(model_path, sight) or {})
        if external:  # vLLM reads these variables; a launcher other than torchrun may not have set them
            os.environ.setdefault("RANK", str(dist.get_rank()))
            os.environ.setdefault("LOCAL_RANK", os.environ["RANK"])
        adjustments: AbstractContextManager[None] = nullcontext()
        if device_type == "cpu":
            check_head_size(model_path)
            job = broadcast_object(uuid.uuid4().hex[:12])
            adjustments = cpu_adjustments(live_weights=rollout.weight_update != "reload", job=job)
        try:
            with adjustments, picture_constants_kept():
                llm = LLM(**arguments)
        except ValueError as error:
            raise InputError(
                f"vLLM does not accept the rollout settings for model.path={model_path}: {_first_words(error)}"
            ) from error
        remove_socket_names()
        # Unused under an external launcher; its shared memory would be reported as leaked when the process ends.
        get_tp_group().mq_broadcaster = None
        return llm


def _leave_groups_alone() -> None:
    """Replaces vLLM's clean-up of torch.distributed: the groups belong to the trainer."""


def _first_words(error: ValueError) -> str:
    """What went wrong, on one line and without the end of a validation report that repeats every input."""
    return " ".join(str(error).split("[type=")[0].split())[:400]
