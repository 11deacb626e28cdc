"""What a pass of a model costs, against torch's own count of the operations of transformers' models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.bridge.mapping.tuning import tuning_plan
from mega_rl.config.schema.learning import AdapterConfig, TuningConfig
from mega_rl.models.flops import PassFlops, pass_flops, tower_flops
from mega_rl.models.shape import ModelShape, parse_config, value_shape
from tests.models import families

LENGTHS = (24, 48)
Forward = Callable[[Tensor], Tensor]
FREEZE = TuningConfig(method="freeze", train_layers=2, train_modules="mlp")
NORMS = TuningConfig(method="freeze", train_layers=1, train_modules="self_attn", also_train=["input_layernorm.weight"])


def new_model(name: str) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    model = families.CONTRACT.new_model(name)
    model.set_attn_implementation("eager")  # plain products, which torch counts
    model.config._experts_implementation = "eager"  # a loop of plain products
    return model.requires_grad_(False)


def counted(forward: Forward, num_tokens: int, with_gradient: bool) -> float:
    """torch's count of one sequence, without the angles of rotary positions, which are a product there."""
    with FlopCounterMode(display=False, depth=4) as counter:
        output = forward(torch.arange(num_tokens)[None])
        if with_gradient:
            output.sum().backward()
    rotary = sum(
        sum(found.values()) for name, found in counter.get_flop_counts().items() if name.endswith(".rotary_emb")
    )
    return counter.get_total_flops() - rotary


def by_torch(forward: Forward, with_gradient: bool) -> tuple[float, float]:
    """Operations per token, and per pair of a query and a key, of which torch counts the masked ones too."""
    short, long = LENGTHS
    at_short, at_long = (counted(forward, n, with_gradient) for n in LENGTHS)
    per_pair = (at_long / long - at_short / short) / (long - short)
    return at_short / short - per_pair * short, per_pair


def check(flops: PassFlops, forward: Forward) -> None:
    expected = *by_torch(forward, False), *by_torch(forward, True)
    backward = flops.backward_per_token + flops.backward_per_prediction
    both = flops.forward_products + backward, flops.forward_per_pair + flops.backward_per_pair
    assert (flops.forward_products, flops.forward_per_pair, *both) == pytest.approx(expected, rel=1e-9)


def shape_of(name: str) -> ModelShape:
    return parse_config(families.CONTRACT.config(name), name)


@pytest.mark.parametrize("name", families.CONTRACT.own)
def test_a_pass_of_every_family(name: str) -> None:
    shape, model = shape_of(name), new_model(name).requires_grad_(True)
    check(pass_flops(shape, hf_tensors(shape)), lambda ids: model(ids).logits)


TUNED = {
    "freeze": ("qwen3", FREEZE),
    "freeze_biases": ("qwen2", TuningConfig(method="freeze", train_layers=2, train_modules="self_attn")),
    "freeze_from_below": ("deepseek_v3", TuningConfig(method="freeze", train_layers=-2, train_modules="all")),
    "freeze_experts": ("qwen2_moe", FREEZE),
    "one_norm": ("deepseek_v3", NORMS),
    "lora": ("qwen3", TuningConfig(method="lora", adapter=AdapterConfig(rank=4, targets=["q_proj", "down_proj"]))),
    "lora_latent": (
        "deepseek_v3",
        TuningConfig(method="lora", adapter=AdapterConfig(rank=4, targets=["all-linear"], exclude=["*.mlp.experts.*"])),
    ),
    "lora_and_router": (
        "qwen2_moe",
        TuningConfig(method="lora", adapter=AdapterConfig(rank=3, targets=["v_proj"]), also_train=["mlp.gate.weight"]),
    ),
}


@pytest.mark.parametrize("case", TUNED)
def test_a_pass_of_which_some_weights_are_trained(case: str) -> None:
    name, tuning = TUNED[case]
    shape, model = shape_of(name), new_model(name)
    plan = tuning_plan(tuning, shape)
    for weight, parameter in model.named_parameters():
        first = weight.replace(".experts.", ".experts.0.") + ".weight"  # transformers has all of a layer in one
        parts = [first.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")]
        parameter.requires_grad_(weight in plan.trained or all(part in plan.trained for part in parts))
    for weight, rank in plan.adapters.ranks.items():
        module = model.get_submodule(weight.removesuffix(".weight"))
        a = torch.nn.Linear(module.in_features, rank, bias=False)
        b = torch.nn.Linear(rank, module.out_features, bias=False)
        module.register_forward_hook(lambda _, x, out, a=a, b=b: out + b(a(x[0])))
    flops = pass_flops(shape, hf_tensors(shape), plan.trained, plan.adapters.ranks)
    check(flops, lambda ids: model(ids).logits)


def test_a_pass_of_a_model_with_a_value_head() -> None:
    shape = value_shape(shape_of("qwen3"))
    model = new_model("qwen3").requires_grad_(True)
    score = torch.nn.Linear(shape.hidden_size, 1, bias=False)
    check(pass_flops(shape, hf_tensors(shape)), lambda ids: score(model.model(ids).last_hidden_state))


@pytest.mark.parametrize("trained", ["", "merger", "blocks.1.", "patch_embed"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_pass_of_a_tower(name: str, trained: str) -> None:
    """Trained from some tensor on, or nowhere; pictures that windows do not divide."""
    tower, grids = shape_of(name).tower, [(6, 10), (4, 4)]
    assert tower is not None
    visual = new_model(name).model.visual
    names = [n for n, p in visual.named_parameters() if trained and trained in n]
    for parameter_name in names:
        visual.get_parameter(parameter_name).requires_grad_(True)
    patches = torch.randn(sum(rows * columns for rows, columns in grids), tower.patch_numbers)
    with FlopCounterMode(display=False) as counter:
        output = visual(patches, grid_thw=torch.tensor([(1, *grid) for grid in grids]))
        forward = counter.get_total_flops()
        features = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        needing = [one.sum() for one in features if one.requires_grad]
        if needing:
            sum(needing).backward()
    found = tower_flops(tower, names)
    assert found.of(grids, with_gradient=False) == pytest.approx(forward, rel=1e-9)
    assert found.of(grids, with_gradient=True) == pytest.approx(counter.get_total_flops(), rel=1e-9)


def test_adapters_of_experts_cost_their_share_of_the_tokens() -> None:
    """transformers has no layer to attach them to: here by the sizes."""
    shape = shape_of("qwen3_moe")
    tuning = TuningConfig(method="lora", adapter=AdapterConfig(rank=2, targets=["*.mlp.experts.*"]))
    plain = pass_flops(shape, hf_tensors(shape), frozenset())
    adapted = pass_flops(shape, hf_tensors(shape), frozenset(), tuning_plan(tuning, shape).adapters.ranks)
    assert shape.mixture is not None
    of_one = 2 * 3 * (shape.hidden_size + shape.mixture.ffn_size)  # rank x gate, up and down
    per_layer = shape.mixture.experts_per_token * of_one
    assert adapted.forward_per_token - plain.forward_per_token == 2 * per_layer * len(shape.mixture.layers)


def test_causal_attention_counts_what_it_sees_and_products_what_they_multiply() -> None:
    forward = {"forward_per_token": 8.0, "forward_per_pair": 3.0, "forward_per_prediction": 2.0}
    flops = PassFlops(**forward, **{name.replace("for", "back"): 2 * value for name, value in forward.items()})
    assert flops.of([1, 4], with_gradient=False) == 10.0 * 5 + 3.0 * (1 + 10)
    assert flops.of([1, 4], with_gradient=False, num_predictions=2) == 8.0 * 5 + 2.0 * 2 + 3.0 * (1 + 10)
    for asked in (None, 2):
        assert flops.of([1, 4], True, asked) == 3 * flops.of([1, 4], False, asked)
    length = 1 / flops.attention_slope
    assert flops.forward_per_pair * length**2 / 2 == flops.forward_products * length
