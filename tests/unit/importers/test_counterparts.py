"""Keys that have a counterpart here are not refused, and what is refused is refused for a true reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mega_rl.importers.convert import convert
from mega_rl.importers.draft.draft import Draft
from mega_rl.importers.draft.reading import Given, read_given

ACTOR, ROLLOUT = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
OVERRIDE = f"{ACTOR}megatron.override_transformer_config."
GRPO: dict[str, Any] = {"algorithm.adv_estimator": "grpo", f"{ROLLOUT}n": 8}


def imported(neighbour: str, given: dict[str, Any]) -> Draft:
    return convert(neighbour, Given(dict(given)), 8)


def refused(draft: Draft) -> set[str]:
    return {key for key, outcome in draft.outcomes.items() if outcome.became in ("none", "unknown")}


@pytest.mark.parametrize(
    ("more", "router"),
    [
        ({"moe_aux_loss_coeff": 0.01}, {}),
        ({"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "none"}, {}),
        (
            {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "aux_loss"},
            {"aux_loss": 0.01, "aux_loss_over": "microbatch"},
        ),
        (
            {"moe_aux_loss_coeff": 0.02, "moe_router_load_balancing_type": "seq_aux_loss", "moe_z_loss_coeff": 1e-3},
            {"aux_loss": 0.02, "aux_loss_over": "sequence", "z_loss": 1e-3},
        ),
        ({"moe_z_loss_coeff": 1e-3}, {"z_loss": 1e-3}),
    ],
)
def test_router_losses_of_verl(more: dict[str, Any], router: dict[str, Any]) -> None:
    """Its bridges set moe_router_load_balancing_type to none before the overrides; the z-loss has no such switch."""
    draft = imported("verl", GRPO | {OVERRIDE + key: value for key, value in more.items()})
    found = {key.removeprefix("router."): value for key, value in draft.result.items() if key.startswith("router.")}
    assert (found, refused(draft)) == (router, set())


@pytest.mark.parametrize(
    ("threshold", "partial", "mode", "staleness"),
    [(0, True, "synchronous", 0), (0.1, True, "in_flight", 1), (0.5, False, "pinned", 1), (1.5, True, "in_flight", 2)],
)
def test_asynchronous_training_of_verl(threshold: float, partial: bool, mode: str, staleness: int) -> None:
    given = GRPO | {
        "data.train_batch_size": 0, "data.gen_batch_size": 1, f"{ACTOR}ppo_mini_batch_size": 32,
        f"{ACTOR}optim.lr_warmup_steps": 10, f"{ACTOR}fsdp_config.param_offload": True,
        "async_training.staleness_threshold": threshold, "async_training.trigger_parameter_sync_step": 4,
        "async_training.require_batches": 2, "async_training.partial_rollout": partial,
        "rollout.total_rollout_steps": 51200, "rollout.nnodes": 2, "rollout.n_gpus_per_node": 4,
        f"{ROLLOUT}tensor_model_parallel_size": 2, "trainer.nnodes": 2, "trainer.n_gpus_per_node": 4,
    }  # fmt: skip
    draft = imported("verl", given)
    assert refused(draft) == set()
    keys = ("rollout.mode", "rollout.max_staleness", "rollout.placement", "rollout.num_engines")
    assert [draft.result[key] for key in keys] == [mode, staleness, "separate", 4]
    # 4 syncs' parts of 2 mini-batches of 32 prompts; the schedule takes a step per part, of 2 optimizer steps
    assert (draft.result["data.train_batch_size"], draft.result["algorithm.minibatches_per_step"]) == (256, 8)
    assert (draft.result["trainer.total_steps"], draft.result["optimizer.warmup_steps"]) == (200, 20)
    assert (draft.result.get("algorithm.importance_cap", 2.0) is not None) == (staleness > 0)
    assert "memory.offload" not in draft.result and draft.num_devices == 8


@pytest.mark.parametrize(
    ("enabled", "partial", "mode"), [(False, False, None), (True, False, "pinned"), (True, True, "in_flight")]
)
def test_asynchronous_training_of_openrlhf(enabled: bool, partial: bool, mode: str | None) -> None:
    given = {"rollout.batch_size": 128, "train.async_enable": enabled, "train.partial_rollout_enable": partial}
    draft = imported("openrlhf", given | {"train.colocate_all": True, "train.async_queue_size": 2})
    assert refused(draft) == set() and draft.result.get("rollout.mode") == mode
    assert draft.result["rollout.placement"] == ("separate" if enabled else "colocated")
    assert draft.result.get("rollout.max_staleness") == (2 if enabled else None)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({f"{ACTOR}veomni.expert_parallel_size": 8, f"{ACTOR}veomni.ulysses_parallel_size": 2},
         {"parallel.expert": 8, "parallel.context": 2}),
        ({f"{ACTOR}engine.tp": 2, f"{ACTOR}engine.ep": 4}, {"parallel.tensor": 2, "parallel.expert": 4}),
        ({f"{OVERRIDE}context_parallel_algo": "ulysses_cp_algo"}, {"parallel.context_method": "ulysses"}),
        ({f"{ROLLOUT}expert_parallel_size": 4, f"{ROLLOUT}tensor_model_parallel_size": 4},
         {"rollout.vllm.enable_expert_parallel": True}),
        ({f"{ROLLOUT}cudagraph_capture_sizes": [8, 16]}, {"rollout.vllm.cudagraph_capture_sizes": [8, 16]}),
        ({f"{ROLLOUT}name": "sglang", f"{ROLLOUT}engine_kwargs.sglang.attention_backend": "ascend"}, {}),
        ({f"{ROLLOUT}engine_kwargs.vllm.max_model_len": 4096, f"{OVERRIDE}moe_permute_fusion": True}, {}),
        ({f"{ROLLOUT}val_kwargs.top_p": 0.7}, {"validation.n": 0}),
        ({"data.truncation": "left", "data.filter_overlong_prompts": True}, {}),
        ({"global_profiler.tool": "npu", f"{ACTOR}profiler.enable": True}, {}),
        ({f"{ACTOR}megatron.use_dist_checkpointing": True, f"{ACTOR}megatron.dist_checkpointing_path": "d"}, {}),
        ({"actor_rollout_ref.model.lora_rank": 8, "actor_rollout_ref.model.exclude_modules": ".*visual.*"},
         {"tuning.adapter.rank": 8}),
    ],
)  # fmt: skip
def test_counterparts_of_verl(given: dict[str, Any], wanted: dict[str, Any]) -> None:
    draft = imported("verl", GRPO | given)
    assert refused(draft) == set()
    assert wanted.items() <= draft.result.items()


@pytest.mark.parametrize(
    "given",
    [
        {f"{ROLLOUT}n": 1},
        {"data.truncation": "left"},
        {f"{ROLLOUT}val_kwargs.top_p": 0.7, f"{ROLLOUT}val_kwargs.do_sample": True,
         f"{ROLLOUT}val_kwargs.temperature": 1.0},
        {f"{ROLLOUT}expert_parallel_size": 8, f"{ROLLOUT}data_parallel_size": 4},
        {f"{ROLLOUT}engine_kwargs.vllm.hf_overrides": "x"},
        {"global_profiler.steps": [2], f"{ACTOR}profiler.tool_config.npu.level": "level0"},
    ],
)  # fmt: skip
def test_what_verl_does_and_we_do_not_is_refused(given: dict[str, Any]) -> None:
    draft = imported("verl", GRPO | given)
    assert refused(draft) and all(draft.outcomes[key].text for key in refused(draft))


def test_supervised_verl_counts_the_devices_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "torchrun --nnodes=2 --nproc_per_node=8 -m verl.trainer.sft_trainer model.path=m data.max_length=64"
    )
    assert convert("verl", read_given([str(script)], {}), None).num_devices == 16


@pytest.mark.parametrize(("epochs", "refuses"), [(1, False), (10, True)])
def test_every_epoch_is_the_end_of_a_run_of_one_epoch(epochs: int, refuses: bool) -> None:
    given = {"total_train_epochs": epochs, "saver.freq_epochs": 1, "evaluator.freq_epochs": 1, "gconfig.n_samples": 4}
    draft = imported("areal", given)
    assert (refused(draft) == {"saver.freq_epochs", "evaluator.freq_epochs"}) == refuses
    assert (draft.result["checkpoint.save_freq"], draft.result["validation.test_freq"]) == (-1, -1)


@pytest.mark.parametrize(
    ("allocation", "devices", "engines"),
    [("sglang:d2p1t2+d2p1t1c2", 4, 2), ("vllm:d4p1t2+d4", 4, 4), ("megatron:(attn:d4t2|ffn:d1e8)", 8, None)],
)
def test_the_earlier_layouts_of_areal(allocation: str, devices: int, engines: int | None) -> None:
    draft = imported("areal", {"allocation_mode": allocation, "gconfig.n_samples": 4})
    assert (draft.num_devices, draft.result.get("rollout.num_engines")) == (devices, engines)
    assert refused(draft) == set()


@pytest.mark.parametrize(("limit", "refuses"), [(2048, False), (2047, True)])
def test_the_length_of_prompt_and_response_of_areal(limit: int, refuses: bool) -> None:
    given = {"gconfig.n_samples": 4, "gconfig.max_new_tokens": 1024, "train_dataset.max_length": 1024}
    draft = imported("areal", given | {"gconfig.max_tokens": limit})
    assert (refused(draft) == {"gconfig.max_tokens"}) == refuses


@pytest.mark.parametrize(("bounds", "refuses"), [([0, 1], False), ([0.2, 0.8], True)])
def test_the_range_of_openrlhf_that_leaves_groups_out(bounds: list[float], refuses: bool) -> None:
    key = "algo.dynamic_filtering_range"
    draft = imported("openrlhf", {"rollout.batch_size": 8, "algo.dynamic_filtering_enable": True, key: bounds})
    assert (refused(draft) == {key}) == refuses and draft.result["algorithm.dynamic_sampling.enabled"] is True


@pytest.mark.parametrize(
    ("given", "refuses"),
    [
        ({"max_new_tokens": 128}, False),
        ({"max_new_tokens": 128, "do_predict": True}, True),
        ({"video_max_pixels": 16384, "dataset": "mllm_demo"}, False),
        ({"video_max_pixels": 16384, "dataset": "mllm_video_demo"}, True),
        ({"val_size": 0.1}, True),
        ({"moe_grouped_gemm": True, "export_hf_on_finish": False}, False),
    ],
)
def test_keys_of_llamafactory_that_a_training_reads(given: dict[str, Any], refuses: bool) -> None:
    draft = imported("llamafactory", {"stage": "sft"} | given)
    assert bool(refused(draft)) == refuses
    assert draft.result.get("checkpoint.export_hf", True) == given.get("export_hf_on_finish", True)


ARRAY = """
ARGS=(
    --actor.model_name_or_path m
    --actor.eps_clip_low_high 0.2 0.27
    --algo.dynamic_filtering_range 0.0 1.0
    --ckpt.output_dir $(date)/exp/m
)
python3 -m openrlhf.cli.train_ppo_ray "${ARGS[@]}"
"""


@pytest.mark.parametrize(
    ("path", "became"),
    [
        ("slime.rollout.sglang_rollout.generate_rollout", "same"),
        ("slime.rollout.sft_rollout.generate_rollout", "same"),
        ("my_project.sampling.generate", "none"),
    ],
)
def test_own_sampling_of_slime_is_no_key(path: str, became: str) -> None:
    given = {"rollout_function_path": path, "rollout_batch_size": 8, "colocate": True}
    assert convert("slime", Given(given), 8).outcomes["rollout_function_path"].became == became


def test_numbers_of_an_array_are_values_and_no_programs(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(ARRAY)
    given = read_given([str(script)], {})
    assert given.values["actor.eps_clip_low_high"] == [0.2, 0.27]
    assert given.values["algo.dynamic_filtering_range"] == [0.0, 1.0]
    draft = convert("openrlhf", given, 8)
    assert (draft.result["algorithm.clip_ratio_low"], draft.result["algorithm.clip_ratio_high"]) == (0.2, 0.27)
    assert draft.result["trainer.output_dir"] == "exp/m" and refused(draft) == set()


BRANCHES = """
BATCH=${BATCH:-}
TP=${TP:-}
case "$(uname)" in
    a) batch=${BATCH:-512}; tp=${TP:-2} ;;
    *) batch=${BATCH:-256}; tp=${TP:-2} ;;
esac
[ "$tp" -gt 1 ] && stages=4 || stages=5
python3 -m verl.trainer.main_ppo data.train_batch_size=$batch actor_rollout_ref.rollout.n=$stages \
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=$tp actor_rollout_ref.actor.ppo_mini_batch_size=64
"""


def test_what_branches_of_a_script_set_is_told_and_what_is_set_to_nothing_has_its_default(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(BRANCHES)
    draft = convert("verl", read_given([str(script)], {}), 8)
    assert (draft.result["data.train_batch_size"], draft.result["parallel.tensor"]) == (256, 2)
    told = [note.partition(":")[0] for note in draft.notes if "--set" in note]
    assert told == ["batch", "stages"]
    chosen = convert("verl", read_given([str(script)], {"batch": "512"}), 8)
    assert chosen.result["data.train_batch_size"] == 512
    assert [note.partition(":")[0] for note in chosen.notes if "--set" in note] == ["stages"]


@pytest.mark.parametrize(("given", "weight"), [({}, 0.05), ({"beta": 0.1}, 0.1), ({"beta": 0.0}, 0.0)])
def test_rloo_of_trl_lowers_rewards_by_a_kl_of_its_own_default(given: dict[str, Any], weight: float) -> None:
    draft = convert("trl", Given(dict(given), ["trl", "rloo"]), 8)
    assert draft.result["algorithm.kl_coefficient"] == weight
    assert draft.result.get("algorithm.kl_in", "loss") == ("reward" if weight else "loss")
    assert refused(draft) == ({"beta"} if given.get("beta") else set())


def test_a_variable_that_a_command_sets_is_asked_for_by_its_name(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("HERE=$(pwd)/work\npython3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$HERE/m")
    draft = convert("verl", read_given([str(script)], {}), 8)
    assert "needs HERE," in draft.outcomes["actor_rollout_ref.model.path"].text
    found = convert("verl", read_given([str(script)], {"HERE": "/a"}), 8)
    assert found.result["model.path"] == "/a/m"


def test_a_variable_of_python_under_an_earlier_name_is_no_value(tmp_path: Path) -> None:
    program = tmp_path / "grpo.py"
    program.write_text(
        "from peft import LoraConfig\nLoraConfig(r=rank, target_modules=modules)\nGRPOConfig(beta=0.1)\n"
    )
    draft = convert("trl", read_given([str(program)], {}), 8)
    assert refused(draft) == {"lora_r", "lora_target_modules"}
    assert draft.result["tuning.adapter.targets"] == ["q_proj", "v_proj"]


def test_asynchronous_training_of_slime_gets_importance_weights(tmp_path: Path) -> None:
    command = "python train_async.py --prompt-data data/a.jsonl --rollout-batch-size 8 --n-samples-per-prompt 4"
    for more, cap in (("", 2.0), (" --use-tis --tis-clip 1.5", 1.5)):
        script = tmp_path / "run.sh"
        script.write_text(command + more)
        draft = convert("slime", read_given([str(script)], {}))
        assert draft.result["rollout.max_staleness"] == 1 and draft.result.get("algorithm.importance_cap", 2.0) == cap


def test_a_frequency_without_held_out_data_validates_nothing() -> None:
    draft = imported("llamafactory", {"stage": "sft", "dataset": "a", "eval_steps": 50, "eval_strategy": "steps"})
    assert draft.result["validation.test_freq"] == -1 and any("for 50" in note for note in draft.notes)
