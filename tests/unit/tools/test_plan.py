"""tools/plan.py on the shipped recipes, with nothing but each model's config.json."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mega_rl.errors import InputError
from tests.unit.config.test_shipped import MODELS, model_config
from tools.recipes import CONFIGS, recipe as shipped

REPO = CONFIGS.parent
GIB = 1 << 30
PHASES = ["sync", "rollout", "log-probabilities", "training"]


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_tool", REPO / "tools" / "plan.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TOOL = load_tool()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    configs = {name: model_config(name) for name in MODELS}
    configs["Qwen3-235B-A22B"] = model_config("Qwen3-30B-A3B") | {
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
    }
    configs["Qwen3-8B-long"] = model_config("Qwen3-8B") | {"max_position_embeddings": 131072}
    for name, config in configs.items():
        (directory / name).mkdir()
        (directory / name / "config.json").write_text(json.dumps(config))
    return directory


def files(recipe: str) -> list[str]:
    return shipped(recipe).options()


def plan(
    capsys: pytest.CaptureFixture[str], models: Path, recipe: str, model: str, devices: int, *more: str
) -> tuple[int, dict[str, Any], str]:
    """Exit status, the figures, and what stands on stderr; nothing is left to the plan itself."""
    options = [*files(recipe), "--devices", str(devices), "--json", f"model.path={models / model}"]
    is_left = shipped(recipe).load().memory.recompute == "auto" and not any("memory.recompute=" in key for key in more)
    given = ["memory.recompute=full"] if is_left else []
    status = TOOL.main([*options, *given, *more])
    output = capsys.readouterr()
    return status, json.loads(output.out), output.err


def items(phase: dict[str, Any]) -> dict[str, int]:
    return {item["name"]: item["num_bytes"] for item in phase["items"]}


def check(figures: dict[str, Any], num_parameters: float, weight_shards: int) -> None:
    """What holds of every plan; ``num_parameters`` in 10^9."""
    assert [phase["name"] for phase in figures["ranks"][0]["phases"]] == PHASES
    for rank in figures["ranks"]:
        assert all(phase["num_bytes"] == sum(items(phase).values()) for phase in rank["phases"])
    worst = max(phase["num_bytes"] for rank in figures["ranks"] for phase in rank["phases"])
    machine = figures["machine"]
    assert figures["excess_bytes"] == worst + machine["reserve_bytes"] - machine["device_bytes"]
    trained = sum(rank["state"]["masters"] for rank in figures["ranks"]) / 4e9
    # Every element has one master, but for what tensor-parallel ranks hold alike (norms, routers).
    assert num_parameters <= trained < 1.02 * num_parameters
    held = max(rank["state"]["weights"] for rank in figures["ranks"]) / 2e9
    assert 0.9 < held * weight_shards / num_parameters < 1.4
    sync = figures["sync"]
    assert sync["sent"] == sync["minimum"] and sync["local"] > 0


def test_7b_on_8_devices(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = "grpo_gsm8k/qwen2.5_7b"
    status, figures, _ = plan(capsys, models, recipe, "Qwen2.5-7B-Instruct", 8)
    assert status == 0 and figures["fits"] and figures["advice"] == []
    check(figures, 7.615, 4)
    assert figures["engine"]["num_sequences"] > 500 and figures["engine"]["bytes_per_token"] == 28 * 2 * 2 * 128 * 2
    sync, rollout, logprobs, training = figures["ranks"][0]["phases"]
    assert items(rollout) == {"engine": 32 * GIB}  # all of the trainer is away
    assert items(sync).keys() == {"weights", "engine", "sync buffers"}
    assert "reference" in items(logprobs) and "reference" not in items(training)


def test_32b_on_16_devices_and_what_to_change(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("parallel.context=1", "memory.offload=[]", "trainer.max_tokens_per_microbatch=49152")
    recipe = "dapo_math/qwen2.5_32b"
    status, figures, error = plan(capsys, models, recipe, "Qwen2.5-32B", 16, *more)
    check(figures, 32.76, 16)
    assert status == 1 and not figures["fits"] and error.startswith("error: does not fit: rank ")
    advice = figures["advice"]
    assert advice[-1]["fits"] and all(change["saved_bytes"] > 0 for change in advice)
    # The savings are what lies between the plan and the changed one, and the changes are what a user can type.
    saved = sum(change["saved_bytes"] for change in advice)
    assert figures["excess_bytes"] - saved == advice[-1]["excess_bytes"] <= 0
    keys = [key for change in advice for key in change["keys"] if not key.startswith("--")]
    assert all(key in error for key in keys)
    status, after, _ = plan(capsys, models, recipe, "Qwen2.5-32B", 16, *more, *keys)
    assert status == 0 and after["excess_bytes"] == advice[-1]["excess_bytes"]


@pytest.mark.slow
def test_30b_with_experts_on_16_devices(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, figures, _ = plan(capsys, models, "gspo_math/qwen3_30b_a3b", "Qwen3-30B-A3B", 16)
    assert status == 0
    check(figures, 30.53, 16)
    stages = {rank["stage"]: rank["activations"]["in_flight"] for rank in figures["ranks"]}
    assert stages == {0: 2, 1: 1}


@pytest.mark.slow
def test_235b_on_256_devices(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("parallel.context=1", "parallel.expert=32", "rollout.tensor_parallel_size=16")
    more += ("trainer.max_tokens_per_microbatch=24576",)
    recipe = "gspo_math/qwen3_30b_a3b"
    status, figures, _ = plan(capsys, models, recipe, "Qwen3-235B-A22B", 256, *more)
    check(figures, 235.09, 64)
    assert status == 0 and figures["worst_phase"] == "training"


def test_an_engine_that_stays_awake_is_there_in_training(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, model = "grpo_gsm8k/qwen2.5_7b", "Qwen2.5-7B-Instruct"
    _, awake, _ = plan(capsys, models, recipe, model, 8, "rollout.vllm.enable_sleep_mode=false")
    for phase in awake["ranks"][0]["phases"]:
        assert items(phase)["engine"] == 32 * GIB, phase["name"]
    _, on_host, _ = plan(capsys, models, recipe, model, 8, "--platform", "cpu")
    sync, rollout, *_ = on_host["ranks"][0]["phases"]  # nothing leaves a device that is the host
    assert items(rollout).keys() >= {"engine", "weights", "gradients", "optimizer"}


@pytest.mark.slow
def test_replayed_experts_are_held_by_the_host(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, model = "gspo_math/qwen3_30b_a3b", "Qwen3-30B-A3B"
    sizes = ("data.train_batch_size=4", "rollout.n=2", "data.max_prompt_length=100", "data.max_response_length=901")
    engine = "rollout.tensor_parallel_size=4"
    found = []
    for mode in ("rollout", "off"):
        _, figures, _ = plan(capsys, models, recipe, model, 16, *sizes, engine, f"rollout.routing_replay={mode}")
        found.append([{item["name"]: item["num_bytes"] for item in rank["host"]} for rank in figures["ranks"][:2]])
    share, sampled = 8 * 1000 // figures["layout"]["data"], 8 * 1000 // 4
    bytes_of = [rank.pop("experts of the tokens") for rank in found[0]]
    assert bytes_of == [(share * 3 + 2 * sampled) * 48 * 8, share * 3 * 48 * 8], "only the first rank of an engine"
    assert found[0] == found[1]


@pytest.mark.slow
def test_experts_on_ascend_are_reloaded(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, model = "gspo_math/qwen3_30b_a3b", "Qwen3-30B-A3B"
    received = {}
    for name in ("npu", "cuda"):
        _, figures, _ = plan(capsys, models, recipe, model, 16, "--platform", name)
        received[name] = figures["sync"]["largest_received"]
        buffers = items(figures["ranks"][0]["phases"][0])["sync buffers"]
        assert (buffers > 1 << 30) == (name == "npu")  # the loader keeps a layer's experts until all are there
    assert received["npu"] > 2 * received["cuda"]


def test_supervised_training_has_one_phase(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("trainer.stage=sft", "memory.offload=[]")
    status, figures, _ = plan(capsys, models, "grpo_gsm8k/qwen2.5_7b", "Qwen2.5-7B-Instruct", 8, *keys)
    assert status == 0 and figures["engine"] is None and figures["sync"] is None
    assert [phase["name"] for phase in figures["ranks"][0]["phases"]] == ["training"]


def test_128k_tokens_on_8_devices(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One sequence over all devices: what is left of the memory depends on what attention keeps of other ranks."""
    lengths = ("data.max_prompt_length=1024", "data.max_response_length=130048")
    parallel = ("parallel.tensor=1", "parallel.sequence=false", "parallel.context=8")
    more = ("--device-memory", "141GB", "--platform", "cuda", *lengths, *parallel, "memory.recompute=selective")
    excess = {}
    for method in ("gather", "ulysses"):
        keys = (*more, "trainer.max_tokens_per_microbatch=131072", f"parallel.context_method={method}")
        status, figures, _ = plan(capsys, models, "sft/qwen2.5_7b", "Qwen3-8B-long", 8, *keys)
        assert status == 0 and figures["layout"]["context"] == len(figures["ranks"]) == 8
        excess[method] = figures["excess_bytes"]
    of_keys = 2 * 1024 * 2 * 131072 // 8  # bytes of a rank's own keys and values in one of 36 layers
    assert excess["gather"] - excess["ulysses"] == 36 * of_keys * 15 // 2


def test_pairs_have_a_pass_over_the_reference_and_twice_the_sequences(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for stage in ("sft", "dpo"):
        keys = (f"trainer.stage={stage}", "memory.offload=[]", "data.train_batch_size=8")
        keys += ("trainer.max_tokens_per_microbatch=65536",)
        _, found[stage], _ = plan(capsys, models, "grpo_gsm8k/qwen2.5_7b", "Qwen2.5-7B-Instruct", 8, *keys)
    assert [phase["name"] for phase in found["dpo"]["ranks"][0]["phases"]] == ["log-probabilities", "training"]
    of_sft, of_dpo = (items(found[stage]["ranks"][0]["phases"][-1]) for stage in ("sft", "dpo"))
    assert of_dpo["activations"] == pytest.approx(2 * of_sft["activations"], rel=0.01)
    assert of_dpo["weights"] == of_sft["weights"], "no second model"


def test_engine_without_room_for_a_sequence(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("rollout.vllm.gpu_memory_utilization=0.12",)
    status, figures, error = plan(capsys, models, "grpo_gsm8k/qwen2.5_7b", "Qwen2.5-7B-Instruct", 8, *keys)
    assert status == 1 and figures["excess_bytes"] < 0 and "no key-value memory" in error
    (change,) = figures["advice"]
    assert change["fits"] and change["keys"][0].startswith("rollout.vllm.gpu_memory_utilization=")


def test_tables(models: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = tmp_path / "train.jsonl"
    rows.write_text("{}\n" * 600)
    recipe, model = "grpo_gsm8k/qwen2.5_7b", models / "Qwen2.5-7B-Instruct"
    keys = [f"model.path={model}", f"data.train_files=[{rows}]", "parallel.tensor=2", "--device-memory", "32GB"]
    assert TOOL.main([*files(recipe), *keys]) == 1
    output = capsys.readouterr()
    assert all(phase in output.out for phase in PHASES) and "TOO MUCH" in output.out and "Advice" in output.out
    assert "memory.recompute auto: full; by the plan " in output.out and "nothing smaller was left" in output.out
    assert "on 2 devices of 29.80 GiB" in output.out  # the fewest that the layout and the engine can start on
    assert "run:    30 steps of 600 rows" in output.out  # 15 epochs of 2 full batches
    assert output.err.count("\n") == 1


def test_a_list_of_parts_to_offload_is_shown_with_its_brackets(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = [f"model.path={models / 'Qwen2.5-7B-Instruct'}", "memory.offload=[]", "--devices", "4"]
    TOOL.main([*files("grpo_gsm8k/qwen2.5_7b"), *keys, "--device-memory", "32GB"])
    assert "memory.offload=[gradients" in capsys.readouterr().out


def test_memory_that_is_left_over_is_spent(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each change as it is proposed still fits, with a tenth of the device to spare, and is taken as it is shown."""
    recipe, model, large = "grpo_gsm8k/qwen2.5_7b", "Qwen2.5-7B-Instruct", ("--device-memory", "141GB")
    _, figures, _ = plan(capsys, models, recipe, model, 8, *large)
    keys = [key for change in figures["spending"] for key in change["keys"]]
    assert "memory.recompute=none" in keys and "memory.offload=[]" in keys
    assert any(key.startswith("trainer.max_tokens_per_microbatch=") for key in keys)
    status, after, _ = plan(capsys, models, recipe, model, 8, *large, *keys)
    assert status == 0 and after["excess_bytes"] == figures["spending"][-1]["excess_bytes"]
    assert -after["excess_bytes"] >= 0.1 * after["machine"]["device_bytes"]
    options = [*files(recipe), f"model.path={models / model}", "memory.recompute=full", *large]
    assert TOOL.main([*options, "--devices", "8"]) == 0
    assert "left over could buy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--device-memory", "64"], "--device-memory is '64'"),
        (["--devices", "0"], "--devices is 0"),
        (["--devices", "6"], "does not divide the world size 6"),
        (["--reserve", "64GiB"], "leaves nothing"),
        (["parallel.tensor=3"], "parallel.tensor is 3"),
        (["rollout.tensor_parallel_size=3"], "rollout.tensor_parallel_size"),
        (["model.path=nowhere"], "model.path is 'nowhere'"),
        (["platform.name=gpu"], "platform.name is 'gpu'"),
        (["trainer.max_tokens_per_microbatch=100"], "trainer.max_tokens_per_microbatch is 100"),
    ],
)
def test_bad_input_is_a_sentence(models: Path, arguments: list[str], expected: str) -> None:
    options = [*files("grpo_gsm8k/qwen2.5_7b"), f"model.path={models / 'Qwen2.5-7B-Instruct'}"]
    with pytest.raises(InputError) as caught:
        TOOL.main([*options, *arguments])
    assert expected in str(caught.value)


def sharding_table(page: str) -> list[tuple[list[str], list[str]]]:
    """The keys and the figures of every row of the table that says what stands for ZeRO and FSDP."""
    lines = (REPO / "docs" / page).read_text().split("## ZeRO", 1)[1].split("\n## ", 1)[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return [(row[1].strip("`").split(), row[2:]) for row in rows[2:]]


def test_the_table_of_zero_and_fsdp_is_what_the_plan_says(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = sharding_table("plan.md")
    assert sharding_table("plan_zh.md") == table and len(table) == 9
    fixed = ("memory.recompute=selective", "trainer.max_tokens_per_microbatch=8192")
    for page in ("plan.md", "plan_zh.md"):
        assert f"{' '.join(fixed)} KEYS" in (REPO / "docs" / page).read_text()
    for keys, figures in table:
        _, found, _ = plan(capsys, models, "sft/qwen2.5_7b", "Qwen2.5-7B-Instruct", 8, *fixed, *keys)
        ranks = [(sum(items(one).values()), rank, one) for rank in found["ranks"] for one in rank["phases"]]
        most, rank, _ = max(ranks, key=lambda found: found[0])
        state, training = rank["state"], items(rank["phases"][0])
        sizes = [state["weights"], state["gradients"], training.get("optimizer", 0), most]
        sizes.append(sum(item["num_bytes"] for item in rank["host"]))
        assert figures == [f"{size / GIB:.1f}" if size else "-" for size in sizes], keys


def test_the_optimizer_between_updates(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is away while there are activations; on the host it passes the device in windows that are counted."""
    phases = {}
    for keys in ((), ("memory.offload=[optimizer]",), ("memory.optimizer_on_host=true",)):
        _, figures, _ = plan(capsys, models, "sft/qwen2.5_7b", "Qwen2.5-7B-Instruct", 8, *keys)
        phases[keys] = {one["name"]: items(one) for one in figures["ranks"][0]["phases"]}
    here, away, on_host = phases.values()
    assert list(here) == ["training"] and list(away) == list(on_host) == ["training", "update"]
    assert "optimizer" not in away["training"] and away["update"]["optimizer"] == here["training"]["optimizer"] > 0
    assert "optimizer" not in on_host["training"] | on_host["update"]
    assert on_host["update"]["optimizer windows"] == 2 * 2**23 * 12
    assert not any("activations" in one for one in (away["update"], on_host["update"]))
