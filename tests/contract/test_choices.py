"""Every word that the schema lets a key have is an entry of the table that the key is looked up in, and the reverse."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import get_args

import pytest
import torch

from mega_rl.algorithms.advantage import ADVANTAGES
from mega_rl.algorithms.correction import CORRECTIONS, LOG_WEIGHTS
from mega_rl.algorithms.kl import KL_ESTIMATORS
from mega_rl.algorithms.objective import OBJECTIVES, POOLED, PolicyObjective
from mega_rl.algorithms.preference import PAIR_LOSSES
from mega_rl.algorithms.reduce import REDUCTIONS, Denominators
from mega_rl.bridge.outgoing.noise import NORM_ROLES, ROUNDINGS, SCHEDULES
from mega_rl.bridge.outgoing.quantize import FORMATS
from mega_rl.config import RunConfig
from mega_rl.config.checks.algorithm import PRESETS
from mega_rl.config.checks.rules import rules
from mega_rl.config.schema.sections import GatesConfig, GroupBaseline
from mega_rl.megatron import offload
from mega_rl.megatron.optim import optimizer
from mega_rl.microbatch import Microbatch, TokenStats
from mega_rl.models import fit
from mega_rl.observe.metrics.declared import MAXIMA, MEANS, match
from mega_rl.planning import advice
from mega_rl.stages.learn import gates
from mega_rl.types import DTYPES
from tools import train

# Key -> the tables that are looked up by its word.
TABLES: dict[str, list[Iterable[str]]] = {
    "algorithm.name": [PRESETS],
    "algorithm.advantage": [ADVANTAGES],
    "algorithm.objective": [OBJECTIVES],
    "algorithm.loss_reduction": [REDUCTIONS],
    "algorithm.kl_estimator": [KL_ESTIMATORS],
    "algorithm.importance_correction": [CORRECTIONS],
    "algorithm.importance_level": [LOG_WEIGHTS],
    "preference.loss": [PAIR_LOSSES],
    "aqn.schedule": [SCHEDULES],
    "aqn.rounding": [ROUNDINGS],
    "aqn.target_modules": [NORM_ROLES],
    "rollout.simulated_quantization": [FORMATS],
    "rollout.dtype": [DTYPES, gates.ENGINE_TOLERANCE],
    "model.dtype": [DTYPES, gates.ENGINE_TOLERANCE],
    "memory.optimizer_state_dtype": [DTYPES],
    "memory.recompute_modules": [fit.RECOMPUTABLE],
    "memory.offload": [offload.PARTS, advice.OFFLOAD],
    "optimizer.schedule": [optimizer.STYLES],
    "trainer.stage": [train.STAGES],
    "trainer.gates.disabled": [
        gates.GATES,
        gates.tolerances(RunConfig()),
        [field.name for field in fields(GatesConfig) if field.name not in ("disabled", "engine_factor")],
    ],
}
# Words that the code asks for one by one; mypy refuses a comparison with another one.
WITHOUT_TABLE = {
    "algorithm.credit",
    "algorithm.kl_in",
    "aqn.old_logprobs",
    "bridge.verify",
    "data.chat_template",
    "data.rewritten_history",
    "environment.history",
    "environment.scored",
    "environment.unfinished",
    "memory.recompute",
    "parallel.context_method",
    "platform.kernels",
    "platform.layers",
    "platform.mindspeed.mode",
    "preference.reference",
    "rollout.adapter",
    "rollout.kv_on_update",
    "rollout.mode",
    "rollout.placement",
    "rollout.routing_replay",
    "rollout.seeds",
    "rollout.weight_update",
    "router.aux_loss_over",
    "tuning.method",
    "tuning.train_modules",
}


def words(key: str) -> tuple[str, ...]:
    return rules()[key].names


@pytest.mark.parametrize("key", TABLES)
def test_a_table_has_the_words_of_its_key(key: str) -> None:
    for table in TABLES[key]:
        assert sorted(table) == sorted(words(key))


def test_every_key_with_choices_is_here() -> None:
    with_choices = {key for key, rule in rules().items() if rule.names}
    assert with_choices == TABLES.keys() | WITHOUT_TABLE and not TABLES.keys() & WITHOUT_TABLE


def test_the_advantages_that_need_a_group_are_those_that_compare_within_one() -> None:
    comparing = {name for name, advantage in ADVANTAGES.items() if advantage.is_group_baseline}
    assert comparing == set(get_args(GroupBaseline))
    rewards, one_each = torch.tensor([1.0, 3.0]), torch.tensor([0, 1])
    for name, advantage in ADVANTAGES.items():  # alone in its group a sample teaches nothing, and only then
        assert (advantage.function(rewards, one_each) == 0).all() == (name in comparing)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_figure_of_an_objective_is_logged(name: str) -> None:
    values = torch.tensor([-0.5, -1.0])
    microbatch = Microbatch(
        token_ids=torch.zeros(2, dtype=torch.int64),
        target_ids=torch.zeros(2, dtype=torch.int64),
        position_ids=torch.arange(2),
        loss_mask=torch.ones(2),
        cu_seqlens=torch.tensor([0, 2], dtype=torch.int32),
        max_seqlen=2,
        sequence_indices=(0,),
        advantages=torch.ones(2),
        old_logprobs=values,
        rollout_logprobs=values,
        reference_logprobs=values,
    )
    objective = PolicyObjective(
        objective=name,
        clip_low=0.2,
        clip_high=0.2,
        dual_clip=None,
        kl_coefficient=0.1,
        kl_estimator="k3",
        entropy_coefficient=0.0,
        importance_cap=2.0,
        reduction="sequence_mean",
    )
    _, figures = objective(TokenStats(values, torch.ones(2)), microbatch, Denominators(2, 1, 2))
    means = {name for name in figures.sums if not name.startswith(POOLED)}
    assert means | {"loss"} == MEANS.keys()
    assert figures.maxima.keys() == MAXIMA.keys()


def test_figures_are_reduced_as_their_metrics_say() -> None:
    assert {match(name)[0].reduction for name in MEANS.values()} == {"mean"}
    assert {match(name)[0].reduction for name in MAXIMA.values()} == {"max"}
