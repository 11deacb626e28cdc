"""The mixture-of-experts part of a model, as its config.json describes it."""

from __future__ import annotations

from dataclasses import dataclass

from mega_rl.errors import shown
from mega_rl.models.config_values import ConfigValues

MAX_EXPERTS = 1 << 14  # of one layer
MAX_ALL_EXPERTS = 1 << 18  # of all layers; each has names of its own
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
    score_bias: bool = False  # a bias added to the scores for the choice only; no gradient reaches it
    num_groups: int = 1  # experts are chosen from the best groups_per_token of the groups
    groups_per_token: int = 1
    weight_scale: float = 1.0  # the chosen experts' weights are multiplied by it
    float32_router: bool = False  # the router's logits are float32 even if the model is not

    @property
    def expert_bytes(self) -> int:
        """Of the number of one expert in a trajectory."""
        return 1 if self.num_experts <= 256 else 2


def read_qwen3_vl_mixture(config: ConfigValues) -> Mixture:
    """Qwen3-VL-MoE, where the weights of a token's experts always add up to 1."""
    config.require("norm_topk_prob", True)
    return read_qwen_mixture(False, config, is_normalized=True)


def read_qwen_mixture(shared: bool, config: ConfigValues, is_normalized: bool = False) -> Mixture:
    """Qwen2-MoE (``shared``) and Qwen3-MoE; what is malformed or unsupported is in ``config.problems`` afterwards.

    Args:
        is_normalized: the chosen experts' weights add up to 1 whatever ``norm_topk_prob`` says.
    """
    num_layers = _num_layers(config)
    names = ("num_experts", "num_local_experts")
    key = next((name for name in names if name in config.values), names[0])
    step = config.integer("decoder_sparse_step", 1)
    dense = config.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in dense):
        config.add(f"mlp_only_layers is {shown(dense)}; it must be a list of layer numbers", "mlp_only_layers")
        dense = []
    without = frozenset(dense)
    mixture = Mixture(
        layers=frozenset(i for i in range(num_layers) if i not in without and (i + 1) % step == 0),
        num_experts=config.integer(key, most=MAX_EXPERTS),
        experts_per_token=config.integer("num_experts_per_tok"),
        ffn_size=config.integer("moe_intermediate_size"),
        normalize_weights=is_normalized or config.flag("norm_topk_prob"),
        shared_ffn_size=config.integer("shared_expert_intermediate_size") if shared else 0,
        shared_gate=shared,
    )
    layers = ("num_hidden_layers", "decoder_sparse_step", "mlp_only_layers")
    _check(mixture, config, layers, key)
    return mixture


def read_deepseek_mixture(config: ConfigValues) -> Mixture:
    """DeepSeek-V3; what is malformed or unsupported is in ``config.problems`` afterwards."""
    config.require("scoring_func", "sigmoid")
    config.require("topk_method", "noaux_tc")
    config.require("moe_layer_freq", 1)
    config.require("norm_topk_prob", True)
    num_layers = _num_layers(config)
    ffn_size = config.integer("moe_intermediate_size")
    first = config.get("first_k_dense_replace", 3)
    if not isinstance(first, int) or isinstance(first, bool) or first < 0:
        config.add(f"first_k_dense_replace is {shown(first)}; it must be a number of layers", "first_k_dense_replace")
        first = 0
    mixture = Mixture(
        layers=frozenset(range(first, num_layers)),
        num_experts=config.integer("n_routed_experts", most=MAX_EXPERTS),
        experts_per_token=config.integer("num_experts_per_tok"),
        ffn_size=ffn_size,
        normalize_weights=True,
        shared_ffn_size=ffn_size * config.integer("n_shared_experts", 1),
        shared_name="shared_experts",
        scores="sigmoid",
        score_bias=True,
        num_groups=config.integer("n_group", 8),
        groups_per_token=config.integer("topk_group", 4),
        weight_scale=config.number("routed_scaling_factor", 2.5),
        float32_router=config.get("moe_router_dtype") == "float32",
    )
    _check(mixture, config, ("num_hidden_layers", "first_k_dense_replace"), "n_routed_experts")
    return mixture


def _num_layers(config: ConfigValues) -> int:
    """0 if the number of layers is bad, which its reader has complained about."""
    return config.get("num_hidden_layers") if config.good("num_hidden_layers") else 0


def _check(mixture: Mixture, config: ConfigValues, layer_keys: tuple[str, ...], experts_key: str) -> None:
    """Complains about values that do not go together."""
    if config.good(*layer_keys) and not mixture.layers:
        config.add("no layer has experts; give the architecture of a dense model")
    if not config.good(experts_key, "num_experts_per_tok", "n_group", "topk_group"):
        return
    experts, chosen = mixture.num_experts, mixture.experts_per_token
    if len(mixture.layers) * experts > MAX_ALL_EXPERTS:
        config.add(f"{len(mixture.layers)} layers of {experts} experts are more than {MAX_ALL_EXPERTS} experts in all")
    groups, best = mixture.num_groups, mixture.groups_per_token
    if chosen > experts:
        config.add(f"num_experts_per_tok {chosen} is above the number of experts {experts}")
    if chosen == 1 and mixture.normalize_weights:
        config.add("one expert per token with norm_topk_prob leaves the router no gradient; set it false")
    if experts % groups or best > groups:
        config.add(f"topk_group {best} of n_group {groups} does not fit {experts} experts")
    elif best < groups and experts // groups < DEEPSEEK_GROUP_TOP:
        config.add(
            f"n_group {groups} leaves fewer than the {DEEPSEEK_GROUP_TOP} of {experts} experts to a group whose scores "
            "make up its own"
        )
    elif best < groups and chosen != DEEPSEEK_GROUP_TOP * best:
        config.add(
            f"num_experts_per_tok {chosen} is not {DEEPSEEK_GROUP_TOP} x topk_group {best}, which Megatron's choice of "
            "groups needs"
        )
