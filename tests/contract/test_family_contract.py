"""What every model family must hold; see ``families.py`` for a new one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from mega_rl.bridge.files.huggingface import HFReader, HFWriter
from mega_rl.bridge.mapping.live_check import difference
from mega_rl.bridge.mapping.megatron import ModelChunk, Shard, megatron_slices
from mega_rl.bridge.mapping.tensors import ROLES, full_series, hf_tensors, roles
from mega_rl.bridge.mapping.vllm import vllm_slices
from mega_rl.bridge.reshard.plan import compile_plan
from mega_rl.bridge.series import slices_of
from mega_rl.bridge.slices import Slice, indices, whole_box
from mega_rl.errors import InputError
from mega_rl.models.fit import engine_problems, expert_problems, tensor_problems
from mega_rl.models.shape import FAMILIES, ModelShape, read_model_shape
from tests.launching import launch
from tests.models import families

SCRIPT = Path(__file__).with_name("run_family_contract.py")
RELATIVE = 2e-5  # float32, two implementations of four layers
# (tensor, pipeline, expert, expert tensor) parallel sizes
LAYOUTS = [(1, 1, 1, 1), (2, 1, 1, 2), (4, 2, 2, 2), (2, 4, 4, 1), (1, 2, 8, 1)]
# Of the families whose engines the engine writer knows.
BEYOND_ENGINES = ("deepseek_v3",)
LIVE = [name for name in families.CONTRACT.own if not name.startswith("deepseek") and name not in BEYOND_ENGINES]
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with every family's tiny model as transformers saves it."""
    directory = tmp_path_factory.mktemp("families")
    for family in families.CONTRACT.own:
        families.make(family).save_pretrained(directory / family)
    return directory


def load(directory: Path) -> tuple[ModelShape, Tensors]:
    shape, reader = read_model_shape(directory), HFReader(directory)
    names = list(hf_tensors(shape)) if shape.fused_experts else reader.names()
    return shape, {name: reader.read(name, whole_box(reader.shape(name))) for name in names}


def trainer_slices(shape: ModelShape, tp: int, pp: int, ep: int, etp: int) -> list[list[Slice]]:
    """Of every stage and every pair of a tensor-parallel and an expert coordinate, so that all are met."""
    per_stage = shape.num_layers // pp
    return [
        megatron_slices(
            shape,
            ModelChunk(
                range(stage * per_stage, (stage + 1) * per_stage),
                Shard(rank % tp, tp),
                stage == 0,
                stage == pp - 1,
                Shard(rank // etp % ep, ep),
                Shard(rank % etp, etp),
            ),
        )
        for stage in range(pp)
        for rank in range(tp * ep * etp)
    ]


def to_local(slices: list[Slice], model: Tensors) -> Tensors:
    """One rank's parameters; NaN where no slice lies."""
    sizes: dict[str, list[int]] = {}
    for piece in slices:
        size = sizes.setdefault(piece.local_name, [0] * len(piece.local_box))
        sizes[piece.local_name] = [max(n, end) for n, (_, end) in zip(size, piece.local_box, strict=True)]
    local = {name: torch.full(size, torch.nan) for name, size in sizes.items()}
    for piece in slices:
        view = local[piece.local_name][indices(piece.local_box)]
        assert bool(view.isnan().all()), f"{piece.local_name} is written twice"
        view.copy_(model[piece.hf_name][indices(piece.hf_box)])
    return local


def to_hf(shape: ModelShape, parts: list[list[Slice]], locals_: list[Tensors]) -> Tensors:
    model = {name: torch.full(size, torch.nan) for name, size in hf_tensors(shape).items()}
    for slices, local in zip(parts, locals_, strict=True):
        for piece in slices:
            view = model[piece.hf_name][indices(piece.hf_box)]
            view.copy_(local[piece.local_name][indices(piece.local_box)].view_as(view))
    return model


def test_every_architecture_is_here() -> None:
    assert {families.ARCHITECTURES[families.CONTRACT.family(name)] for name in families.CONTRACT.own} == set(FAMILIES)


@pytest.mark.parametrize("family", families.CONTRACT.own)
def test_names_shapes_and_roles_are_those_of_the_saved_checkpoint(family: str, models: Path, tmp_path: Path) -> None:
    shape, model = load(models / family)
    assert {name: tuple(tensor.shape) for name, tensor in model.items()} == hf_tensors(shape)
    role = roles(shape)
    assert set(role) == set(model) and set(role.values()) <= set(ROLES)
    for name, tensor in model.items():
        if role[name] == "vision":
            assert "visual." in name
            continue
        assert ("norm" in role[name]) == ("norm" in name), name
        assert tensor.dim() == 1 or role[name] in ("embedding", "lm_head", "linear", "router"), name
    HFReader(models / family).check(shape)
    with HFWriter(tmp_path / "out", shape, torch.float32, 1 << 16, source_dir=models / family) as writer:
        for name, tensor in model.items():
            writer.write(name, tensor)
    again = load(tmp_path / "out")[1]
    assert all(torch.equal(again[name], tensor) for name, tensor in model.items()) and len(again) == len(model)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", families.CONTRACT.own)
def test_trainer_slices_are_exact_both_ways(family: str, layout: tuple[int, int, int, int], models: Path) -> None:
    shape, model = load(models / family)
    if shape.mixture is None and layout[2] > 1:
        layout = (*layout[:2], 1, 1)
    parts = trainer_slices(shape, *layout)
    locals_ = [to_local(slices, model) for slices in parts]
    for local in locals_:
        padded = ("embedding.word_embeddings.weight", "output_layer.weight")
        assert not any(tensor.isnan().any() for name, tensor in local.items() if name not in padded)
    back = to_hf(shape, parts, locals_)
    for name, tensor in model.items():
        assert torch.equal(back[name], tensor), name
    compile_plan([*parts, []], [[] for _ in parts] + [slices_of(full_series(shape))])  # every element has an owner


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("family", LIVE)
def test_engine_slices_are_exact_both_ways(family: str, tp: int, models: Path) -> None:
    shape, model = load(models / family)
    parts = [vllm_slices(shape, tp, rank) for rank in range(tp)]
    locals_ = [to_local(slices, model) for slices in parts]
    back = to_hf(shape, parts, locals_)
    assert all(torch.equal(back[name], tensor) for name, tensor in model.items())
    if shape.mixture is None:
        return
    layer, ffn = max(shape.mixture.layers), shape.mixture.ffn_size // tp
    experts = [f"{shape.decoder}.layers.{layer}.mlp.experts.{e}" for e in range(shape.mixture.num_experts)]
    decoder = "language_model.model" if shape.tower else "model"
    stacked = f"{decoder}.layers.{layer}.mlp.experts.routed_experts"
    for rank, local in enumerate(locals_):
        rows = slice(rank * ffn, (rank + 1) * ffn)
        gate_up = [torch.cat([model[f"{e}.{p}_proj.weight"][rows] for p in ("gate", "up")]) for e in experts]
        assert torch.equal(local[f"{stacked}.w13_weight"], torch.stack(gate_up))
        down = [model[f"{e}.down_proj.weight"][:, rows] for e in experts]
        assert torch.equal(local[f"{stacked}.w2_weight"], torch.stack(down))


@pytest.mark.parametrize("family", BEYOND_ENGINES)
def test_a_family_that_the_engine_writer_does_not_know(family: str, models: Path) -> None:
    shape = read_model_shape(models / family)
    (line,) = engine_problems(shape, 1)
    assert re.search(f"trainer.stage.*{family}.*sft", line)
    with pytest.raises(AssertionError, match=f"trainer.stage.*{family}.*sft"):
        vllm_slices(shape, 1, 0)


def test_an_engine_that_holds_its_weights_otherwise(models: Path) -> None:
    slices = vllm_slices(read_model_shape(models / "qwen3_moe"), 1, 0)
    sizes: dict[str, list[int]] = {}
    for piece in slices:
        held = sizes.setdefault(piece.local_name, [0] * len(piece.local_box))
        sizes[piece.local_name] = [max(n, end) for n, (_, end) in zip(held, piece.local_box, strict=True)]
    parameters = {name: torch.empty(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    assert difference(parameters, slices, torch.bfloat16) is None
    stacked = "model.layers.3.mlp.experts.routed_experts.w13_weight"
    packed = torch.empty(8, 32, 24, dtype=torch.bfloat16)
    missing = {name: parameter for name, parameter in parameters.items() if name != stacked}
    transposed = parameters[stacked].transpose(1, 2).contiguous()  # as many elements
    head = "lm_head.weight"
    narrow = torch.empty(len(parameters[head]), 8, dtype=torch.bfloat16)
    few = parameters[head][:-1]
    half = [piece for piece in slices if not piece.hf_name.endswith("experts.3.up_proj.weight")]
    assert "w13_weight, of which the mapping" in str(difference(parameters, half, torch.bfloat16))
    padded = torch.empty(len(parameters[head]) + 64, parameters[head].shape[1], dtype=torch.bfloat16)
    assert difference({**parameters, head: padded}, slices, torch.bfloat16) is None
    for words, odd, dtype in (
        (f"{stacked}: the engine holds it as", {**parameters, stacked: packed}, torch.bfloat16),
        (f"{stacked}: the engine holds it as", {**parameters, stacked: transposed}, torch.bfloat16),
        (f"{stacked}: the engine holds it as", {**parameters, stacked: transposed.flatten()}, torch.bfloat16),
        (f"{head}: the engine holds it as", {**parameters, head: narrow}, torch.bfloat16),
        (f"{head}: the engine holds it as", {**parameters, head: few}, torch.bfloat16),
        ("the engine does not have", missing, torch.bfloat16),
        ("mapping of this model family does not have", {**parameters, "extra": packed}, torch.bfloat16),
        ("holds as torch.bfloat16", parameters, torch.float32),
    ):
        assert words in str(difference(odd, slices, dtype))


@pytest.mark.parametrize(
    ("family", "sizes", "words"),
    [
        ("qwen3", (1, 2, 1), "parallel.expert is 2, but the model has no experts"),
        ("qwen3_moe", (1, 3, 1), "parallel.expert is 3, which does not divide the model's number of experts: .* 8"),
        (
            "qwen3_moe",
            (1, 1, 5),
            "parallel.expert_tensor is 5, which does not divide the model's moe_intermediate_size: .* 24",
        ),
        ("deepseek_v3", (3, 1, 1), "parallel.tensor is 3, which does not divide"),
    ],
)
def test_layouts_that_do_not_divide(family: str, sizes: tuple[int, int, int], words: str, models: Path) -> None:
    tp, ep, etp = sizes
    shape = read_model_shape(models / family)
    found = [*tensor_problems(shape, tp), *expert_problems(shape, ep, etp if shape.mixture else None, tp)]
    assert re.search(words, "\n".join(found))  # what a user is told, before the layout is asked for
    with pytest.raises(AssertionError, match=words):
        megatron_slices(shape, ModelChunk(range(1), Shard(0, tp), True, False, Shard(0, ep), Shard(0, etp)))


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("mistral", {"sliding_window": 64}, "sliding attention window"),
        ("mistral", {"sliding_window": ...}, None),  # transformers' default is longer than this model's positions
        ("mistral", {"sliding_window": ..., "max_position_embeddings": 8192}, "sliding attention window"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 9}, "sliding"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok 9 is above"),
        ("qwen3_moe", {"num_experts_per_tok": 1}, "no gradient"),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, "no layer has experts"),
        ("qwen3_moe", {"attention_bias": True}, "attention_bias"),
        ("qwen2_moe", {"qkv_bias": False}, "qkv_bias"),
        ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size"),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob"),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "rms_norm_eps"),
        ("deepseek_v3", {"num_experts_per_tok": 3}, "num_experts_per_tok 3 is not 2 x topk_group 2"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "num_key_value_heads"),
        ("deepseek_v3", {"first_k_dense_replace": -1}, "first_k_dense_replace is -1"),
        ("deepseek_v3", {"n_group": 8}, "n_group 8 leaves fewer than the 2 of 8 experts"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers is 1"),
        ("qwen2_5_vl", {"vision_config": {}}, "vision_config is missing"),
        ("qwen2_5_vl", {"vision_config": {"out_hidden_size": 64}}, "out_hidden_size is 64.* hidden_size is 32"),
        ("qwen2_5_vl", {"vision_config": {"hidden_act": "gelu"}}, "vision_config: hidden_act is 'gelu'"),
        (
            "qwen3_vl",
            {"vision_config": {"deepstack_visual_indexes": [9, 1]}},
            "deepstack_visual_indexes is .*ascending",
        ),
        ("qwen3_vl_moe", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("qwen3", {"rope_parameters": {"mrope_section": [3, 3, 2]}}, "mrope_section is set, but .* no pictures"),
    ],
)
def test_what_a_family_refuses(
    family: str, changes: dict[str, object], words: str | None, models: Path, tmp_path: Path
) -> None:
    config = json.loads((models / family / "config.json").read_text())
    config = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    if family == "qwen3_vl_moe":
        config = {**config, "text_config": {**config["text_config"], **changes}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if words is None:
        read_model_shape(tmp_path)
    else:
        with pytest.raises(InputError, match=words):
            read_model_shape(tmp_path)


def run(models: Path, nproc: int, *arguments: object) -> dict[str, dict[str, float]]:
    done = launch.ranks(SCRIPT, models, *arguments, nproc=nproc).check()
    line = next(line for line in done.stdout.splitlines() if line.startswith("CONTRACT "))
    figures: dict[str, dict[str, float]] = json.loads(line.removeprefix("CONTRACT "))
    common = {"logprobs", "entropy", "gradients"}  # there are no value models of those that see pictures
    assert all(set(e) == common | ({"values"} if "_vl" not in name else set()) for name, e in figures.items())
    return figures


@pytest.mark.slow
def test_one_process_computes_what_transformers_does(models: Path) -> None:
    figures = run(models, 1)
    assert set(figures) == set(families.CONTRACT.own)
    assert max(error for errors in figures.values() for error in errors.values()) < RELATIVE, figures


@pytest.mark.slow
def test_two_processes_compute_the_same(models: Path) -> None:
    """Tensor, sequence and expert parallelism together, for the families that dense ones say nothing of."""
    names = [name for name in families.CONTRACT.own if name.endswith("_moe") or name.startswith("deepseek")]
    figures = run(models, 2, "--tensor", 2, "--expert", 2, "--family", *names)
    assert set(figures) == set(names)
    assert max(error for errors in figures.values() for error in errors.values()) < RELATIVE, figures
