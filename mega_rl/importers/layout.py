"""Sizes for a model whose weights a neighbour divides over all ranks (ZeRO-3, FSDP): those that the plan says fit."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

from mega_rl.config.checks.model import trained_shape
from mega_rl.config.schema.sections import RunConfig
from mega_rl.errors import InputError
from mega_rl.planning.automatic import HEADROOM, automatic
from mega_rl.planning.memory_plan import Machine, MemoryPlan, make_plan

SIZES = (1, 2, 4, 8)  # of tensor and of pipeline parallelism that are tried


def proposed(config: RunConfig, machine: Machine) -> tuple[RunConfig, MemoryPlan] | None:
    """The first layout, from the one that costs least, that leaves ``HEADROOM`` of every device free; None: none does.

    Raises:
        InputError: the model of ``model.path`` is not here, or the configuration is none in any layout.
    """
    errors: list[InputError] = []
    num_plans = 0
    shape = trained_shape(config)
    for tensor, pipeline, expert in _layouts(machine.num_devices, shape.mixture is not None):
        found = copy.deepcopy(config)
        found.parallel.tensor, found.parallel.pipeline, found.parallel.expert = tensor, pipeline, expert
        found.parallel.sequence = tensor > 1
        found.parallel.expert_tensor = 1 if expert > 1 and tensor > 1 else None
        try:
            plan = make_plan(automatic(found, shape, machine)[0], shape, machine, with_sync=False)
        except InputError as error:  # heads, layers, experts or the batch cannot be divided so
            errors.append(error)
            continue
        num_plans += 1
        if plan.fits and -plan.excess_bytes >= HEADROOM * machine.device_bytes:
            return found, plan
    if errors and not num_plans:
        raise errors[0]
    return None


def _layouts(num_devices: int, has_experts: bool) -> Iterator[tuple[int, int, int]]:
    """Fewest parts of a model first, and of as many parts those without a pipeline, whose stages idle."""
    experts = [size for size in (1, 2, 4, 8, 16, 32) if size == 1 or has_experts]
    every = [(tensor, pipeline, expert) for tensor in SIZES for pipeline in SIZES for expert in experts]
    fitting = (one for one in every if num_devices % math.prod(one[:2]) == 0 and num_devices // one[1] % one[2] == 0)
    return iter(sorted(fitting, key=lambda one: (math.prod(one), one[1], one[0])))
