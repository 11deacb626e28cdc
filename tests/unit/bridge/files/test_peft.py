"""Adapter directories of PEFT: both formats of experts read, written as they were read, or refused in a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mega_rl.bridge.files.peft.peft import PeftReader, target_modules, write_adapter
from mega_rl.bridge.files.peft.peft_config import PeftConfig
from mega_rl.bridge.lora import Factors, merged, update
from mega_rl.bridge.mapping.tensors import hf_tensors, roles
from mega_rl.bridge.slices import whole_box
from mega_rl.errors import InputError
from mega_rl.models.shape import read_model_shape
from tests.models import adapters, families


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    for name in ("qwen2", "qwen3_moe", "deepseek_v3"):
        families.make(name).save_pretrained(root / name)
    return root


def reader(directory: Path, model: Path, key: str = "tuning.adapter.path") -> PeftReader:
    return PeftReader(directory, read_model_shape(model), model, key)


def everything(found: PeftReader) -> dict[str, Tensor]:
    return {name: found.read(name, whole_box(size)) for name, size in found.sizes().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("model", ["qwen2", "qwen3_moe", "deepseek_v3"])
def test_what_was_read_is_written_bit_for_bit(models: Path, tmp_path: Path, model: str) -> None:
    shape = read_model_shape(models / model)
    tensors = adapters.state(adapters.pairs(shape))
    source = reader(adapters.save(tmp_path / "in", tensors, models / model), models / model)
    found = everything(source)
    assert equal(found, tensors)
    linear = [name for name, role in roles(shape).items() if role == "linear"]
    config = PeftConfig(adapters.RANK, adapters.ALPHA, base=str(models / model))
    for _ in range(2):  # an earlier export is replaced
        write_adapter(tmp_path / "out", config, target_modules(source.weights, linear), found, {"base": "x"})
    assert equal(load_file(tmp_path / "out" / "adapter_model.safetensors"), tensors)
    assert equal(everything(reader(tmp_path / "out", models / model)), tensors)
    assert len(list(tmp_path.iterdir())) == 2


def test_the_fused_format_of_experts_is_the_one_per_expert(models: Path, tmp_path: Path) -> None:
    """Expert slowest in A, fastest in B, gate and up block-diagonal: back to what it was made from, and its scale."""
    model = models / "qwen3_moe"
    shape = read_model_shape(model)
    factors = adapters.pairs(shape)
    fused = adapters.save(
        tmp_path / "fused",
        adapters.fused_state(factors, shape),
        rank_pattern={r".*\.gate_up_proj": 2 * adapters.RANK},
        alpha_pattern={r".*\.gate_up_proj": 2 * adapters.ALPHA},
    )
    found = reader(fused, model)
    assert equal(everything(found), adapters.state(factors))
    assert {found.scale_of(weight) for weight in found.weights} == {adapters.ALPHA / adapters.RANK}
    name = f"base_model.model.{shape.decoder}.layers.0.mlp.experts.3.up_proj.lora_B.weight"
    (rows, rank) = found.sizes()[name]
    assert torch.equal(found.read(name, ((2, rows), (1, rank))), adapters.state(factors)[name][2:, 1:])


def test_a_fused_pair_that_was_trained_fused_shares_its_a(models: Path, tmp_path: Path) -> None:
    """With B not block-diagonal, gate and up have the whole rank: B A of the stacked parameter, row for row."""
    model = models / "qwen3_moe"
    shape = read_model_shape(model)
    assert shape.mixture is not None
    num_experts, hidden, ffn, rank = shape.mixture.num_experts, shape.hidden_size, shape.mixture.ffn_size, adapters.RANK
    module = f"base_model.model.{shape.decoder}.layers.0.mlp.experts"
    a, b = torch.randn(num_experts * rank, hidden), torch.randn(2 * ffn, rank * num_experts)
    found = reader(adapters.save(tmp_path, {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}), model)
    assert len(found.weights) == 2 * num_experts
    by_expert = torch.einsum(  # PEFT's own reading of the two
        "eri,ore->eoi", a.reshape(num_experts, rank, hidden), b.reshape(2 * ffn, rank, num_experts)
    )
    for expert in range(num_experts):
        gate, up = (
            found.factors(f"{shape.decoder}.layers.0.mlp.experts.{expert}.{part}_proj.weight")
            for part in ("gate", "up")
        )
        assert torch.equal(gate.a, up.a)
        assert torch.allclose(torch.cat([gate.b @ gate.a, up.b @ up.a]), by_expert[expert], atol=1e-5)


def test_scales_follow_the_patterns(models: Path, tmp_path: Path) -> None:
    model = models / "qwen2"
    shape = read_model_shape(model)
    factors = adapters.pairs(shape)
    wide = f"{shape.decoder}.layers.1.self_attn.q_proj.weight"
    factors[wide] = (torch.randn(16, shape.hidden_size), torch.randn(hf_tensors(shape)[wide][0], 16))
    changes: dict[str, Any] = {"rank_pattern": {r"layers\.1\.self_attn\.q_proj": 16}, "alpha_pattern": {"o_proj": 2}}
    plain = reader(adapters.save(tmp_path / "a", adapters.state(factors), **changes), model)
    rooted = reader(adapters.save(tmp_path / "b", adapters.state(factors), use_rslora=True, **changes), model)
    layer = f"{shape.decoder}.layers.1"
    assert plain.weights[wide] == 16 and plain.scale_of(wide) == 0.5 and rooted.scale_of(wide) == 2.0
    assert plain.scale_of(f"{layer}.self_attn.o_proj.weight") == 0.5
    assert rooted.scale_of(f"{layer}.mlp.up_proj.weight") == 4.0


BAD: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora"),
    ({"bias": "lora_only"}, "bias"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
    ({"init_lora_weights": "olora"}, "init_lora_weights"),
    ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ({"layer_replication": [[0, 2]]}, "layer_replication"),
    ({"something_new": {"x": 1}}, "something_new"),
    ({"peft_type": "IA3"}, "peft_type"),
    ({"r": 0}, "r is 0"),
    ({"r": 2.5}, "r is 2.5"),
    ({"lora_alpha": "8"}, "lora_alpha"),
    ({"rank_pattern": ["x"]}, "rank_pattern"),
    ({"rank_pattern": {"(": 1}}, "rank_pattern"),
    ({"r": 8}, "is of shape [4, "),
    ({"base_model_name_or_path": "Qwen/Qwen2.5-72B"}, "Qwen/Qwen2.5-72B"),
]


@pytest.mark.parametrize(("changes", "word"), BAD)
def test_what_is_not_supported_is_refused_by_name(
    models: Path, tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    tensors = adapters.state(adapters.pairs(read_model_shape(models / "qwen2")))
    adapters.save(tmp_path / "bad", tensors, **changes)
    with pytest.raises(InputError) as refused:
        reader(tmp_path / "bad", models / "qwen2")
    assert word in str(refused.value) and "\n" not in str(refused.value) and "tuning.adapter.path" in str(refused.value)


def test_the_adapter_of_another_model_is_refused_by_its_shapes(models: Path, tmp_path: Path) -> None:
    adapters.save(tmp_path / "a", adapters.state(adapters.pairs(read_model_shape(models / "qwen3_moe"))))
    with pytest.raises(InputError, match="give the adapter of this model"):
        reader(tmp_path / "a", models / "qwen2")


@pytest.mark.parametrize("fault", ["config", "weights", "json", "truncated", "nan", "half", "embedding"])
def test_damaged_directories_are_refused(models: Path, tmp_path: Path, fault: str) -> None:
    shape = read_model_shape(models / "qwen2")
    tensors = adapters.state(adapters.pairs(shape))
    first = next(iter(tensors))
    if fault == "nan":
        tensors[first][0, 0] = torch.nan
    if fault == "half":
        del tensors[first]
    if fault == "embedding":
        tensors[f"base_model.model.{shape.decoder}.embed_tokens.lora_embedding_A"] = torch.ones(2, 2)
    adapters.save(tmp_path, tensors)
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    if fault in ("config", "weights"):
        (config if fault == "config" else weights).unlink()
    if fault == "json":
        config.write_text("{")
    if fault == "truncated":
        weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(InputError):
        everything(reader(tmp_path, models / "qwen2"))


def test_names_of_a_base_that_moved(models: Path, tmp_path: Path) -> None:
    """A hub's name, its caches and a directory of that name are one base; nothing named says nothing."""
    tensors = adapters.state(adapters.pairs(read_model_shape(models / "qwen2")))
    for number, base in enumerate(("Org/QWEN2", "/gone/qwen2", "/c/models--org--qwen2/snapshots/1f", "", None)):
        directory = adapters.save(tmp_path / str(number), tensors, base)
        assert reader(directory, models / "qwen2").weights


def test_target_modules_name_no_more_than_is_adapted() -> None:
    linear = [f"m.layers.{i}.{part}.weight" for i in range(2) for part in ("self_attn.q_proj", "mlp.up_proj")]
    assert target_modules(linear, linear) == ["q_proj", "up_proj"]
    assert target_modules(linear[:2], linear) == ["m.layers.0.mlp.up_proj", "m.layers.0.self_attn.q_proj"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merge_does_not_depend_on_boxes_or_threads(dtype: torch.dtype) -> None:
    """Every cut of the weight gives the bits of the whole, and the whole is the formula."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(700, 333, generator=generator).to(dtype)
    factors = Factors(torch.randn(16, 333, generator=generator), torch.randn(700, 16, generator=generator), 0.37)
    whole = merged(weight, factors, whole_box(weight.shape))
    exact = weight.double() + 0.37 * (factors.b.double() @ factors.a.double())
    assert (whole.double() - exact).abs().max() <= (2e-6 if dtype == torch.float32 else 2**-8) * exact.abs().max()
    threads = torch.get_num_threads()
    try:
        for number, box in enumerate([((0, 1), (0, 333)), ((255, 257), (3, 4)), ((13, 700), (100, 333))]):
            torch.set_num_threads(1 + number % 2)
            part = tuple(slice(*edges) for edges in box)
            assert torch.equal(merged(weight[part], factors, box), whole[part])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("rank", [1, 8, 64])
def test_factors_of_16_bits_have_the_bits_of_a_product_in_the_order_of_the_rank(rank: int) -> None:
    """However they are cut; and where nothing is added a weight keeps its bits, -0 too."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(size, generator=generator).bfloat16() for size in ((rank, 333), (700, rank)))
    b[40:60] = 0
    factors, whole = Factors(a, b, 0.37), whole_box((700, 333))
    products = b.double()[:, :, None] * a.double()[None]
    total = torch.zeros(700, 333)
    for term in range(rank):
        total = (total.double() + products[:, term]).float()  # of two float32 numbers float64 is wide enough
    found = update(factors, whole)
    assert torch.equal(found, total * 0.37)
    tiled = torch.cat([b[i : i + 256].float() @ a.float() for i in range(0, 700, 256)])
    assert torch.equal(found, tiled * 0.37), "a matrix product on a CPU adds in this order"
    box = ((13, 500), (100, 333))
    part = Factors(a[:, 100:333], b[13:500], 0.37)
    assert torch.equal(update(part, whole_box((487, 233))).view(torch.int32), update(factors, box).view(torch.int32))
    weight = torch.full((700, 333), -0.0)
    assert merged(weight, factors, whole)[40:60].signbit().all()


def test_shapes_of_the_written_configuration(tmp_path: Path) -> None:
    config = PeftConfig(4, 8.0, True, "base", {"x": 2})
    write_adapter(tmp_path / "a", config, ["q_proj"], {"base_model.model.q.lora_A.weight": torch.zeros(4, 2)}, {})
    written = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["use_rslora"], written["rank_pattern"]) == (
        4,
        8,
        True,
        {"x": 2},
    )
    assert isinstance(written["lora_alpha"], int) and written["target_modules"] == ["q_proj"]
