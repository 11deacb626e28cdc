"""The mixture-of-experts part of a model, as its config.json describes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mega_rl.errors import InputError
from mega_rl.models.config_values import positive_integer, positive_number, refuse_unless

DEEPSEEK_GROUP_TOP = 2  # experts whose scores make up the score of a group


@dataclass(frozen=True)
class Mixture:
    """Which layers have experts, how large they are and how a token is routed to them."""

    layers: frozenset[int]  # global indices; every other layer has a dense MLP
    num_experts: int
    experts_per_token: int
    ffn_size: int  # of one expert
    normalize_weights: bool  # the chosen experts' weights add up to 1
    shared_ffn_size: int = 0  # of the expert that sees every token; 0: none
    shared_name: str = "shared_expert"  # its module in the checkpoint
    shared_gate: bool = False  # its output is scaled by a sigmoid of the token
    scores: str = "softmax"  # softmax | sigmoid, of the router's logits
    score_bias: bool = False  # a bias added to the scores for the choice alone; never trained
    num_groups: int = 1  # experts are chosen from the best groups_per_token of the groups
    groups_per_token: int = 1
    weight_scale: float = 1.0  # the chosen experts' weights are multiplied by it


def read_qwen_mixture(shared: bool, config: Mapping[str, Any], where: str) -> Mixture:
    """Qwen2-MoE (``shared``) and Qwen3-MoE; InputError for what is malformed or unsupported."""
    num_layers = positive_integer(config, "num_hidden_layers", where)
    key = "num_experts" if "num_experts" in config else "num_local_experts"
    step = positive_integer({"decoder_sparse_step": 1, **config}, "decoder_sparse_step", where)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) for i in dense):
        raise InputError(f"{where}: mlp_only_layers is {dense!r}; it must be a list of layer numbers")
    mixture = Mixture(
        layers=frozenset(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0),
        num_experts=positive_integer(config, key, where),
        experts_per_token=positive_integer(config, "num_experts_per_tok", where),
        ffn_size=positive_integer(config, "moe_intermediate_size", where),
        normalize_weights=bool(config.get("norm_topk_prob", False)),
        shared_ffn_size=positive_integer(config, "shared_expert_intermediate_size", where) if shared else 0,
        shared_gate=shared,
    )
    return _checked(mixture, where)


def read_deepseek_mixture(config: Mapping[str, Any], where: str) -> Mixture:
    """DeepSeek-V3; InputError for what is malformed or unsupported."""
    for key, supported in (
        ("scoring_func", "sigmoid"),
        ("topk_method", "noaux_tc"),
        ("moe_layer_freq", 1),
        ("norm_topk_prob", True),
    ):
        refuse_unless(config, key, supported, where)
    num_layers = positive_integer(config, "num_hidden_layers", where)
    ffn_size = positive_integer(config, "moe_intermediate_size", where)
    groups = positive_integer({"n_group": 8, **config}, "n_group", where)
    first = config.get("first_k_dense_replace", 3)
    if not isinstance(first, int) or first < 0:
        raise InputError(f"{where}: first_k_dense_replace is {first!r}; it must be a number of layers")
    mixture = Mixture(
        layers=frozenset(range(first, num_layers)),
        num_experts=positive_integer(config, "n_routed_experts", where),
        experts_per_token=positive_integer(config, "num_experts_per_tok", where),
        ffn_size=ffn_size,
        normalize_weights=True,
        shared_ffn_size=ffn_size * positive_integer({"n_shared_experts": 1, **config}, "n_shared_experts", where),
        shared_name="shared_experts",
        scores="sigmoid",
        score_bias=True,
        num_groups=groups,
        groups_per_token=positive_integer({"topk_group": 4, **config}, "topk_group", where),
        weight_scale=positive_number(config, "routed_scaling_factor", 2.5, where),
    )
    return _checked(mixture, where)


def _checked(mixture: Mixture, where: str) -> Mixture:
    experts, chosen = mixture.num_experts, mixture.experts_per_token
    groups, best = mixture.num_groups, mixture.groups_per_token
    if not mixture.layers:
        raise InputError(f"{where}: no layer has experts; give the architecture of a dense model")
    if chosen > experts:
        raise InputError(f"{where}: num_experts_per_tok {chosen} is above the number of experts {experts}")
    if chosen == 1 and mixture.normalize_weights:
        raise InputError(
            f"{where}: one expert per token with norm_topk_prob leaves the router no gradient; set it false"
        )
    if experts % groups or best > groups:
        raise InputError(f"{where}: topk_group {best} of n_group {groups} does not fit {experts} experts")
    if best < groups and experts // groups < DEEPSEEK_GROUP_TOP:
        raise InputError(
            f"{where}: n_group {groups} leaves fewer than the {DEEPSEEK_GROUP_TOP} of {experts} experts to a group "
            "whose scores make up its own"
        )
    if best < groups and chosen != DEEPSEEK_GROUP_TOP * best:
        raise InputError(
            f"{where}: num_experts_per_tok {chosen} is not {DEEPSEEK_GROUP_TOP} x topk_group {best}, which Megatron's "
            "choice of groups needs"
        )
    return mixture
