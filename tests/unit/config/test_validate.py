"""Validation: a good configuration has no problems, and each bad value is named with its fix."""

from __future__ import annotations

import copy
import functools
import json
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, get_args

import pytest

from mega_rl.bridge.files.torch_dist import manifest
from mega_rl.bridge.outgoing.noise import NORM_ROLES
from mega_rl.config import RunConfig, problems, validate
from mega_rl.config.checks.rules import RULES, rule_of_type, rules
from mega_rl.config.checks.validate import MANIFEST, RECORDED
from mega_rl.config.reading.typed import leaf_names, leaves
from mega_rl.config.schema.sampling import NormRole, RewardConfig
from mega_rl.errors import InputError
from mega_rl.rollout.collect import records

MODEL = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "hidden_size": 16,
    "intermediate_size": 64,
    "max_position_embeddings": 2048,
    "vocab_size": 100,
}
EXPERTS = {  # with 8 of them
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
# Their type says all, or conditions in validate.py check them.
WITHOUT_RULE = {
    "tuning.adapter.rslora", "tuning.adapter.new", "critic.shares_base",
    "model.vision.freeze", "model.vision.freeze_merger",
    "algorithm.dynamic_sampling.enabled",
    "data.train_files", "data.val_files", "data.filter_overlong_prompts", "data.shuffle", "data.system_prompt",
    "rollout.batch_invariant",
    "rollout.ignore_eos", "rollout.vllm", "environment.options",
    "trainer.megatron", "aqn.enabled", "aqn.include_router_norms",
    "rewards[].name", "rewards[].weight", "rewards[].options", "rewards[].only", "parallel.sequence",
    "parallel.overlap_grad_reduce", "parallel.overlap_param_gather",
    "platform.deterministic", "platform.mindspeed.features",
    "memory.optimizer_on_host", "checkpoint.async_save",
    "validation.val_before_train", "checkpoint.export_hf", "logging.progress", "logging.tensorboard", "logging.jsonl",
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    train = tmp_path / "train.jsonl"
    train.write_text("")
    good = RunConfig()
    good.model.path = str(model)
    good.data.train_files = [str(train)]
    good.rewards = [RewardConfig(name="math")]
    good.trainer.total_steps = 10
    good.trainer.output_dir = str(tmp_path / "out")
    return good


def set_value(config: RunConfig, field: str, value: Any) -> None:
    *path, last = field.split(".")
    node: Any = config
    for part in path:
        node = getattr(node, part)
    assert hasattr(node, last), field
    setattr(node, last, value)


def with_model(config: RunConfig, **changes: Any) -> None:
    (Path(config.model.path) / "config.json").write_text(json.dumps(MODEL | changes))


def test_a_good_configuration_has_no_problems_and_is_not_changed(config):
    before = copy.deepcopy(config)
    for world_size in (None, 1, 2, 7):
        assert problems(config, world_size) == []
        validate(config, world_size)
    assert config == before


@pytest.mark.parametrize(
    ("model", "key", "method", "sentence"),
    [
        (MODEL, "aux_loss", "full", "router.aux_loss is 0.1, but the model of model.path has no experts: set it to 0"),
        (MODEL, "z_loss", "full", "router.z_loss is 0.1, but the model of model.path has no experts: set it to 0"),
        (MODEL | EXPERTS, "bias_update_rate", "full", "the routers of a qwen3_moe model have no bias"),
        (MODEL | EXPERTS, "aux_loss", "full", None),
        (MODEL | EXPERTS, "z_loss", "lora", None),
    ],
)
def test_routers_learn_where_there_are_some(config, model, key, method, sentence):
    Path(config.model.path, "config.json").write_text(json.dumps(model))
    setattr(config.router, key, 0.1)
    config.tuning.method = method
    found = [line for line in problems(config) if "router" in line]
    assert len(found) == (sentence is not None) and all(sentence in line for line in found)


@pytest.mark.parametrize(("tensor", "context", "is_good"), [(1, 2, True), (2, 1, True), (2, 2, False), (1, 4, False)])
def test_ulysses_divides_heads(config, tensor, context, is_good):
    """4 heads and 2 key/value heads."""
    parallel = config.parallel
    parallel.tensor, parallel.context, parallel.context_method = tensor, context, "ulysses"
    found = [line for line in problems(config) if "ulysses" in line]
    assert len(found) == (not is_good)
    assert all("4 heads and 2 key/value heads" in line and "set it to gather" in line for line in found)


def test_every_key_of_the_schema_is_checked():
    assert set(leaf_names()) == set(rules()) | WITHOUT_RULE
    assert not set(rules()) & WITHOUT_RULE
    assert set(RULES) <= set(leaf_names()), "rules of keys that there are not"
    choices = {name: rule for name, hint in leaves() if (rule := rule_of_type(hint))}
    assert not [name for name in choices if choices[name].expected != RULES[name].expected], "the type says it"


def test_a_supervised_run_has_the_rules_of_what_it_reads():
    left_out = set(rules()) - set(rules("sft"))
    sections = {"rollout", "environment", "bridge", "algorithm", "critic", "aqn", "reward_workers"}
    sections |= {"preference", "kto", "reward_model"}
    assert {name.partition(".")[0] for name in left_out} == sections | {"trainer", "validation"}
    assert not {name for name in rules("sft") if name.partition(".")[0] in sections}
    others = {name for name in left_out if name.partition(".")[0] not in sections}
    gates = {
        f"trainer.gates.{name}" for name in ("disabled", "reference", "ppo_kl", "ratio", "engine", "engine_factor")
    }
    assert others == gates | {"validation.n", "validation.temperature"}


@pytest.mark.parametrize(("stage", "section"), [("dpo", "preference"), ("kto", "kto"), ("rm", "reward_model")])
def test_a_stage_from_files_has_the_rules_of_its_own_section(stage, section):
    added = set(rules(stage)) - set(rules("sft"))
    assert added and {name.partition(".")[0] for name in added} == {section}


def test_the_settings_of_another_stage_are_not_looked_at_unless_the_stage_is_unknown(config):
    config.kto.beta = -1.0
    assert problems(config) == []
    config.trainer.stage = "kot"
    assert any("kto.beta" in line for line in problems(config))


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("rollout.placement", "colocate", "set it to one of colocated, separate (did you mean colocated?)"),
        ("rollout.placement", "x", "set it to one of colocated, separate"),
        ("rollout.dtype", "float16", "set it to null or one of float32, bfloat16 (did you mean bfloat16?)"),
        (
            "memory.offload",
            ["gradients", "weight"],
            "set it to a list in which each entry is one of weights, gradients, optimizer (did you mean weights?)",
        ),
        (
            "trainer.gates.disabled",
            ["x"],
            "set it to a list in which each entry is one of reference, ppo_kl, ratio, engine",
        ),
    ],
)
def test_a_word_that_is_no_choice_is_answered_with_the_choices(config, field, value, sentence):
    set_value(config, field, value)
    assert problems(config) == [f"{field} is {value!r}: {sentence}"]


BAD_VALUES = [
    ("model.dtype", "bf16"),
    ("data.max_prompt_length", 0),
    ("data.train_batch_size", 0),
    ("data.seed", -1),
    ("data.chat_template", "maybe"),
    ("data.max_val_samples", 0),
    ("data.mask_spans", [["<a>"]]),
    ("data.mask_spans", [["<a>", ""]]),
    ("rollout.placement", "elsewhere"),
    ("rollout.num_engines", 0),
    ("rollout.tensor_parallel_size", 0),
    ("rollout.dtype", "int4"),
    ("rollout.n", 1),
    ("rollout.temperature", 0.0),
    ("rollout.vllm", {"top_p": 0.9}),
    ("rollout.vllm", {"top_k": 40}),
    ("rollout.vllm", {"min_p": 0.05}),
    ("rollout.vllm", {"override_generation_config": {"top_p": 0.9}}),
    ("rollout.vllm", {"logits_processors": ["package:Processor"]}),
    ("rollout.vllm", {"enable_eplb": True}),
    ("rollout.vllm", {"expert_placement_strategy": "round_robin"}),
    ("rollout.vllm", {"additional_config": {"eplb_config": {"dynamic_eplb": True}}}),
    ("rollout.vllm", {"additional_config": {"enable_reduce_sample": True}}),
    ("rollout.vllm", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    ("rollout.vllm", {"spec_method": "mtp"}),
    ("rollout.stop", [""]),
    ("rollout.stop_token_ids", [-1]),
    ("rollout.weight_update", "dead"),
    ("bridge.bucket_bytes", 0),
    ("bridge.verify", "some"),
    ("rollout.kv_cache_bytes", 0),
    ("validation.n", -1),
    ("validation.temperature", -1.0),
    ("algorithm.name", "gpro"),
    ("algorithm.advantage", "gea"),
    ("algorithm.objective", "gpso"),
    ("algorithm.clip_ratio_low", 0.0),
    ("algorithm.clip_ratio_low", 1.0),  # ppo has a lower bound
    ("algorithm.clip_ratio_low", 1.5),
    ("algorithm.clip_ratio_high", 0.0),
    ("algorithm.dual_clip", 1.0),
    ("algorithm.loss_reduction", "mean"),
    ("algorithm.kl_coefficient", -0.1),
    ("algorithm.kl_estimator", "k4"),
    ("algorithm.kl_in", "both"),
    ("algorithm.entropy_coefficient", float("nan")),
    ("algorithm.importance_cap", 0.0),
    ("algorithm.importance_correction", "cut"),
    ("algorithm.importance_level", "batch"),
    ("algorithm.importance_floor", -0.5),
    ("algorithm.importance_floor", 0.5),  # nothing is masked
    ("algorithm.minibatches_per_step", 3),
    ("aqn.sigma_start", 0.0),
    ("aqn.sigma_start", 1e-5),
    ("aqn.sigma_end", -1.0),
    ("aqn.num_stages", 0),
    ("aqn.schedule", "exp"),
    ("aqn.target_modules", [""]),
    ("aqn.rounding", "up"),
    ("aqn.old_logprobs", "recompute"),
    ("optimizer.lr", -1.0),
    ("optimizer.lr", float("inf")),
    ("optimizer.min_lr", 1.0),
    ("optimizer.schedule", "step"),
    ("optimizer.warmup_steps", 11),
    ("optimizer.warmup_steps", 1.5),
    ("optimizer.warmup_steps", -0.1),
    ("optimizer.weight_decay", -1.0),
    ("optimizer.beta1", 1.0),
    ("optimizer.beta2", -0.5),
    ("optimizer.eps", 0.0),
    ("optimizer.clip_grad", -1.0),
    ("optimizer.schedule", "wsd"),
    ("optimizer.decay_steps", 3),
    ("optimizer.decay_steps", 0),
    ("memory.recompute", "some"),
    ("memory.recompute_modules", ["attention"]),
    ("memory.recompute_modules", ["mlp"]),
    ("memory.recompute_num_layers", 2),
    ("memory.recompute_num_layers", 0),
    ("memory.offload", ["everything"]),
    ("memory.optimizer_state_dtype", "int8"),
    ("trainer.collective_timeout_s", 0),
    ("trainer.stall_timeout_s", 0),
    ("trainer.max_skipped_steps", -1),
    ("parallel.tensor", 0),
    ("parallel.pipeline", -2),
    ("parallel.virtual_pipeline", 1),
    ("parallel.virtual_pipeline", 2),  # there is one stage to go round
    ("parallel.context", 0),
    ("parallel.expert", 0),
    ("parallel.expert", 2),  # a model without experts
    ("parallel.expert_tensor", 0),
    ("parallel.expert_tensor", 1),  # a model without experts
    ("parallel.sequence", True),
    ("trainer.stage", "dqo"),
    ("trainer.output_dir", ""),
    ("trainer.total_steps", 0),
    ("trainer.total_steps", None),
    ("trainer.total_epochs", 1),
    ("trainer.seed", 2**32),
    ("trainer.max_tokens_per_microbatch", 1535),
    ("trainer.gates.disabled", ["ratios"]),
    ("trainer.gates.reference", -1.0),
    ("trainer.gates.ppo_kl", -1e-9),
    ("trainer.gates.ratio", float("nan")),
    ("trainer.gates.engine", 0.0),
    ("trainer.gates.engine_factor", 0.5),
    ("validation.test_freq", 0),
    ("validation.test_freq", 5),
    ("checkpoint.save_freq", -2),
    ("checkpoint.keep_checkpoints", -1),
    ("checkpoint.resume", "sometimes"),
    ("trainer.logprob_chunk_tokens", 0),
    ("logging.wandb_project", " "),
    ("logging.swanlab_project", " "),
    ("logging.num_text_samples", -1),
    ("platform.name", ""),
    ("platform.num_threads", 0),
    ("platform.mindspeed.mode", "maybe"),
    ("rewards", []),
    ("data.train_batch_size", 1_000_000),
    ("data.max_response_length", 10**30),
    ("rollout.n", 10**30),
    ("rollout.kv_cache_bytes", 1),
    ("rollout.kv_cache_bytes", 10**30),
    ("rollout.stop_token_ids", [7, 100]),  # the vocabulary ends at 99
    ("rollout.temperature", 1e30),
    ("rollout.replay", "/etc"),
    ("algorithm.entropy_coefficient", -3.0),
    ("algorithm.dynamic_sampling.oversample", 1e30),
    ("aqn.seed", -1),
    ("aqn.seed", 10**30),
    ("aqn.target_modules", ["every_norm"]),
    ("aqn.exclude_patterns", ["["]),
    ("aqn.exclude_patterns", ["*.0.*", "("]),
    ("reward_workers.num_workers", 100_000),
    ("reward_workers.num_workers", 10**30),
    ("reward_workers.timeout_s", 1e30),
    ("optimizer.lr", 1e30),
    ("memory.offload", ["weights", "weights"]),
    ("trainer.output_dir", "/dev/null"),
    ("trainer.output_dir", "/dev/null/x"),
    ("trainer.output_dir", "/proc/x"),
    ("trainer.output_dir", "x" * 5000),
    ("checkpoint.resume", "/etc"),
    ("platform.num_threads", 1_000_000),
    ("data.train_files", []),
    ("data.train_files", ["missing.jsonl"]),
    ("data.val_files", ["."]),
]


@pytest.mark.parametrize(("field", "value"), BAD_VALUES)
def test_one_bad_value_is_one_sentence_naming_it_with_its_fix(config, field, value):
    set_value(config, field, value)
    found = problems(config, 2)
    assert len(found) == 1, found
    assert field in found[0] and ": " in found[0] and "\n" not in found[0]


def test_all_problems_come_at_once_and_numbered(config):
    for field, value in (("rollout.n", 0), ("optimizer.lr", -1.0), ("trainer.total_steps", None), ("model.path", "no")):
        set_value(config, field, value)
    with pytest.raises(InputError) as raised:
        validate(config, 1)
    lines = str(raised.value).splitlines()
    assert "4 problems" in lines[0]
    assert [line.strip()[0] for line in lines[1:]] == list("1234")


@pytest.mark.parametrize(
    ("tensor", "pipeline", "engine", "world_size", "part"),
    [
        (
            2,
            1,
            1,
            3,
            "parallel.tensor 2 x parallel.context 1 x parallel.pipeline 1 = 2 does not divide the world size 3",
        ),
        (2, 3, 1, 4, "start a multiple of 6 processes"),
        (1, 1, 2, 3, "which does not divide the world size 3: set it to one of 1, 3"),
        (4, 1, 1, 4, "which does not divide the model's num_key_value_heads: set it to a divisor of 2"),
        (1, 4, 1, 4, "parallel.pipeline is 4, which does not divide the model's num_hidden_layers"),
        (1, 1, 8, 8, "rollout.tensor_parallel_size is 8, which does not divide the model's num_attention_heads"),
    ],
)
def test_layouts_that_do_not_fit(config, tensor, pipeline, engine, world_size, part):
    config.parallel.tensor, config.parallel.pipeline = tensor, pipeline
    config.rollout.tensor_parallel_size = engine
    found = problems(config, world_size)
    assert len(found) == 1 and part in found[0], found


def test_layouts_that_fit(config):
    config.parallel.tensor, config.parallel.pipeline, config.parallel.sequence = 2, 3, True
    config.rollout.tensor_parallel_size = 4  # more ranks than the two key/value heads: the engine repeats them
    assert problems(config, 12) == []
    config.rollout.tensor_parallel_size = 3
    names = ("num_attention_heads", "padded vocabulary", "intermediate_size", "num_key_value_heads")
    found = problems(config, None)  # no world size, so nothing of it
    assert len(found) == len(names) and all(name in line for name, line in zip(names, found, strict=True)), found


def test_separate_engines_are_bound_neither_to_the_ranks_nor_to_their_memory(config):
    config.rollout.num_engines = 3
    (line,) = problems(config)
    assert "rollout.num_engines is 3" in line and "rollout.placement" in line
    config.rollout.placement, config.rollout.tensor_parallel_size = "separate", 2
    assert problems(config, 3) == []
    config.rollout.weight_update, config.memory.offload = "reload", ["weights"]
    first, second = problems(config, 3)
    assert "rollout.weight_update" in first and "memory.offload" in second


LAYOUT_PROBLEMS = [
    ({"pipeline": 3, "virtual_pipeline": 4}, 3, "parallel.pipeline 3 x parallel.virtual_pipeline 4 does not divide"),
    ({"context": 2}, 3, "parallel.context 2 x parallel.pipeline 1 = 2 does not divide the world size 3"),
    ({"tensor": 2, "sequence": True, "expert": 4}, 4, "parallel.expert_tensor 2 does not divide the 4 processes of"),
    ({"expert": 3}, 3, "parallel.expert is 3, which does not divide the model's number of experts"),
    ({"tensor": 2, "expert": 2}, 4, "parallel.sequence is False: set it to true"),
]


@pytest.mark.parametrize(("sizes", "world_size", "part"), LAYOUT_PROBLEMS)
def test_every_axis_is_checked_against_the_model_and_the_world(config, sizes, world_size, part):
    with_model(config, **EXPERTS)
    for axis, size in sizes.items():
        setattr(config.parallel, axis, size)
    found = problems(config, world_size)
    assert len(found) == 1 and part in found[0], found


def test_a_sequence_has_a_token_for_every_part(config):
    config.parallel.context, config.data.max_prompt_length, config.data.max_response_length = 4, 4, 3
    (line,) = problems(config, 4)
    assert line == "parallel.context is 4: set it to at most half of the longest sequence, 7 tokens"


def test_a_layout_of_all_axes_fits(config):
    with_model(config, **EXPERTS)
    parallel = config.parallel
    parallel.tensor, parallel.pipeline, parallel.virtual_pipeline, parallel.context = 2, 3, 2, 2
    parallel.expert, parallel.expert_tensor, parallel.sequence = 4, 1, True
    parallel.overlap_grad_reduce = parallel.overlap_param_gather = True
    assert problems(config, 12) == []
    parallel.overlap_grad_reduce = None  # left to the plan, which turns it on then
    assert problems(config, 12) == []
    parallel.overlap_grad_reduce = False
    (line,) = problems(config, 12)
    assert "parallel.overlap_param_gather is True" in line


def test_heads_of_the_trainer(config):
    with_model(config, num_key_value_heads=None)  # then it is the number of attention heads
    config.parallel.tensor = 4
    assert problems(config, 4) == []
    with_model(config, num_attention_heads=6, num_key_value_heads=6, hidden_size=24)
    assert any("num_attention_heads" in line for line in problems(config, 4))


def test_lengths_against_the_model(config):
    config.data.max_prompt_length = 1025
    (line,) = problems(config)
    assert "2049 tokens" in line and "2048" in line


class TestModelDirectory:
    @pytest.mark.parametrize(
        ("content", "part"),
        [
            (b"{", "is not valid JSON"),
            (b"\xff", "is not valid JSON"),
            (b"[]", "is not a JSON object"),
            (json.dumps(MODEL | {"architectures": ["GPT2LMHeadModel"]}).encode(), "GPT2LMHeadModel"),
            (json.dumps(MODEL | {"architectures": None}).encode(), "architectures is None"),
            (json.dumps(MODEL | {"num_hidden_layers": "six"}).encode(), "num_hidden_layers is 'six'"),
            (json.dumps(MODEL | {"num_key_value_heads": 0}).encode(), "num_key_value_heads is 0"),
        ],
    )
    def test_config_json(self, config, content, part):
        file = Path(config.model.path) / "config.json"
        file.write_bytes(content)
        (line,) = problems(config)
        assert part in line and str(file) in line and "model.path" in line

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
    def test_a_missing_file(self, config, name):
        (Path(config.model.path) / name).unlink()
        (line,) = problems(config)
        assert name.removeprefix("model") in line and "model.path" in line

    def test_no_directory(self, config):
        config.model.path = config.data.train_files[0]
        assert "is a file" in problems(config)[0]


@pytest.mark.parametrize(
    ("reward", "part"),
    [
        (RewardConfig(name=""), "rewards[1].name is ''"),
        (RewardConfig(name="math"), "stands twice"),
        (RewardConfig(name="math", only=["a"]), "stands twice"),
        (RewardConfig(name="x", only=["a", " "]), "rewards[1].only is ['a', ' ']"),
        (RewardConfig(name="no/such.py:score"), "no/such.py is not a file"),
        (RewardConfig(name="package:"), "package.module:function"),
        (RewardConfig(name="x", weight=float("nan")), "rewards[1].weight is nan"),
    ],
)
def test_rewards(config, reward, part):
    config.rewards.append(reward)
    (line,) = problems(config)
    assert part in line


def test_a_name_twice_for_other_sources_but_one_reward_model(config):
    config.rewards = [RewardConfig("gsm8k", only=["a"]), RewardConfig("gsm8k", 2.0, only=["b"])]
    assert problems(config) == []
    model = {"path": config.model.path}
    config.rewards = [RewardConfig("model", only=[source], options=model) for source in "ab"]
    assert [line for line in problems(config) if "rewards[1].name is 'model', which stands twice" in line]


def test_a_reward_in_a_file_or_a_module(config, tmp_path):
    (tmp_path / "mine.py").write_text("")
    config.rewards = [RewardConfig(name=f"{tmp_path}/mine.py:score"), RewardConfig(name="package.module:score")]
    assert problems(config) == []


def test_files_of_other_packages_have_one_name():
    assert MANIFEST == manifest.MANIFEST
    assert fnmatch(records.PATTERN.format(3), RECORDED)
    assert set(NORM_ROLES) == set(get_args(NormRole))


def test_files_of_which_the_first_rows_are_taken(config, tmp_path):
    first = config.data.train_files[0]
    config.data.train_files = [f"{first}[:5]"]
    assert problems(config) == []
    for entry in (f"{first}[:0]", f"{first}[2:4]", f"{first}[:-1]"):
        config.data.train_files = [entry]
        (line,) = problems(config)
        assert f"data.train_files has {entry!r}, which does not exist" in line and "FILE[:N] for its first N" in line
    config.data.train_files = [f"{tmp_path / 'gone.jsonl'}[:5]"]
    assert "does not exist" in problems(config)[0]


def test_an_output_directory_can_be_made(config, tmp_path):
    for name in ("new/below/new", "new", "."):
        config.trainer.output_dir = str(tmp_path / name)
        assert problems(config) == []
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    config.trainer.output_dir = str(tmp_path / "link")
    (line,) = problems(config)
    assert "trainer.output_dir" in line and "which is a file" in line
    assert not (tmp_path / "new").exists()


def test_a_checkpoint_and_recorded_rollouts_are_known_by_their_files(config, tmp_path):
    (tmp_path / manifest.MANIFEST).write_text("{}")
    (tmp_path / records.PATTERN.format(1)).write_text("")
    config.checkpoint.resume = config.rollout.replay = str(tmp_path)
    assert problems(config) == []


def test_an_unknown_data_format(config, tmp_path):
    (tmp_path / "a.csv").write_text("")
    config.data.val_files = [str(tmp_path / "a.csv")]
    (line,) = problems(config)
    assert "data.val_files" in line and ".parquet" in line


def test_decoupled_noise_needs_the_cap(config):
    config.algorithm.importance_cap = None
    assert problems(config) == []
    config.aqn.enabled = True
    (line,) = problems(config)
    assert "algorithm.importance_cap" in line and "aqn.old_logprobs" in line


def test_the_stable_phase_of_wsd_is_what_warm_up_and_decay_leave(config):
    config.optimizer.schedule, config.optimizer.warmup_steps, config.optimizer.decay_steps = "wsd", 2, 8
    assert problems(config) == []
    config.optimizer.decay_steps = 9
    (line,) = problems(config)
    assert "optimizer.decay_steps is 9" in line and "at most the 8" in line


@pytest.mark.parametrize(("key", "value"), [("optimizer_on_host", True), ("optimizer_state_dtype", "bfloat16")])
@pytest.mark.parametrize("feature", ["optimizer-selection", "swap_optimizer"])
def test_another_optimizer_of_mindspeed_has_no_state_to_move(config, key, value, feature):
    config.platform.mindspeed.features = {feature: True}
    assert problems(config) == []
    setattr(config.memory, key, value)
    (line,) = problems(config)
    assert f"memory.{key}" in line and repr(feature) in line
    config.platform.mindspeed.features = {"use_flash_attn": True}
    assert problems(config) == []


@pytest.mark.parametrize(("key", "value"), [("mask_spans", [["<a>", "</a>"]]), ("rewritten_history", "keep")])
def test_what_only_supervised_training_reads(config, key, value):
    set_value(config, f"data.{key}", value)
    assert problems(config) == [f"data.{key} is set, but only trainer.stage sft reads it: leave it out"]
    config.trainer.stage = "sft"
    assert problems(config) == []


def test_recompute_keys_go_together(config):
    config.memory.recompute, config.memory.recompute_modules = "selective", ["core_attn", "mlp"]
    assert problems(config) == []
    config.memory.recompute_modules = []
    assert len(problems(config)) == 1
    config.memory.recompute, config.memory.recompute_modules = "full", None
    config.memory.recompute_num_layers = 2
    assert problems(config) == []


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (
            {"loss": "orpo", "reference": "cached"},
            "preference.reference is 'cached', but preference.loss 'orpo' compares",
        ),
        (
            {"loss": "ipo", "reference": "none"},
            "preference.reference is 'none', but preference.loss 'ipo' compares with a",
        ),
        ({"loss": "hinge", "label_smoothing": 0.1}, "preference.label_smoothing is 0.1, but preference.loss 'hinge'"),
        ({"label_smoothing": 0.5}, "preference.label_smoothing is 0.5: set it to a number >= 0 and < 0.5"),
        ({"beta": 0.0}, "preference.beta is 0.0"),
    ],
)
def test_preferences(config, keys, words):
    config.trainer.stage = "dpo"
    assert problems(config) == []
    for name, value in keys.items():
        setattr(config.preference, name, value)
    (line,) = problems(config)
    assert words in line


def test_an_answer_must_fit_into_a_microbatch_and_a_pair_need_not(config):
    longest = config.data.max_prompt_length + config.data.max_response_length
    config.trainer.stage, config.trainer.max_tokens_per_microbatch = "dpo", longest
    assert problems(config) == []
    config.trainer.max_tokens_per_microbatch -= 1
    (line,) = problems(config)
    assert f"set it to at least the longest sequence, {longest}" in line


def test_an_optimizer_on_the_host_is_not_offloaded(config):
    config.memory.offload = ["weights", "gradients", "optimizer"]
    assert problems(config) == []
    config.memory.optimizer_on_host = True
    assert len(problems(config)) == 1
    config.memory.optimizer_on_host = False


@pytest.mark.parametrize("stage", ["pt", "sft", "rm", "dpo", "kto"])
def test_without_an_engine_the_optimizer_alone_is_offloaded(config, stage):
    config.trainer.stage = stage
    before = problems(config)
    config.memory.offload = ["optimizer"]
    assert problems(config) == before
    config.memory.offload = ["optimizer", "gradients"]
    (line,) = (line for line in problems(config) if line not in before)
    assert "memory.offload has 'gradients'" in line and "no engine" in line and "optimizer" in line


def test_unrounded_noise_needs_a_float32_engine(config):
    config.aqn.enabled, config.aqn.rounding = True, "fp32"
    config.model.dtype = "float32"
    assert problems(config) == []
    config.rollout.dtype = "bfloat16"
    (line,) = problems(config)
    assert "aqn.rounding" in line and "rollout.dtype" in line


def test_recomputed_noise_needs_a_trainer_that_can_hold_it(config):
    config.aqn.enabled, config.aqn.old_logprobs = True, "recompute_noisy"
    assert problems(config) == []
    config.rollout.dtype = "float32"
    (line,) = problems(config)
    assert "aqn.old_logprobs" in line and "rollout.dtype" in line
    config.rollout.dtype, config.model.dtype = None, "float32"
    (line,) = problems(config)
    assert "aqn.old_logprobs" in line and "model.dtype" in line
    config.model.dtype, config.rollout.simulated_quantization = "bfloat16", "mxfp4"
    (line,) = problems(config)
    assert "aqn.old_logprobs" in line and "rollout.simulated_quantization" in line


def test_replayed_experts_need_their_source(config):
    with_model(config, **EXPERTS)
    config.rollout.routing_replay = "rollout"
    assert problems(config) == []
    config.rollout.vllm = {"enable_prefix_caching": False}
    (line,) = problems(config)
    assert "rollout.routing_replay" in line and "rollout.vllm.enable_prefix_caching" in line
    config.rollout.routing_replay = "recompute"
    assert problems(config) == []
    config.aqn.enabled, config.aqn.old_logprobs = True, "rollout"
    (line,) = problems(config)
    assert "rollout.routing_replay" in line and "aqn.old_logprobs" in line


@pytest.mark.parametrize("mode", ["rollout", "recompute"])
def test_a_dense_model_has_no_experts_to_replay(config, mode):
    config.rollout.routing_replay = mode
    (line,) = problems(config)
    assert line.startswith(f"rollout.routing_replay is '{mode}'") and "has no experts" in line


def test_moments_of_a_tied_embedding_on_two_stages_stay_the_same(config):
    """Each stage would round those of its own copy with other random bits."""
    config.memory.optimizer_state_dtype, config.parallel.pipeline = "bfloat16", 2
    for is_tied, method, is_refused in ((False, "full", False), (True, "lora", False), (True, "full", True)):
        with_model(config, tie_word_embeddings=is_tied)
        config.tuning.method = method
        found = [line for line in problems(config) if "tied embedding" in line]
        assert len(found) == is_refused and all("memory.optimizer_state_dtype" in line for line in found)


@pytest.mark.parametrize("verify", ["sample", "all"])
def test_verifying_needs_live_weights(config, verify):
    config.bridge.verify = verify
    assert problems(config) == []
    config.rollout.weight_update = "reload"
    (line,) = problems(config)
    assert "bridge.verify" in line and "rollout.weight_update" in line


def test_supervised_runs_do_not_look_at_rl_sections(config):
    config.rewards, config.rollout.n, config.algorithm.name, config.aqn.num_stages = [], 0, "?", 0
    config.rollout.tensor_parallel_size = 5
    assert len(problems(config, 2)) >= 5
    config.trainer.stage = "sft"
    assert problems(config, 2) == []
    config.optimizer.beta1 = 2.0
    assert len(problems(config, 2)) == 1


DROPOUT = {"trainer.stage": "sft", "tuning.method": "lora", "tuning.adapter.dropout": 0.1}


@pytest.mark.parametrize(
    "changes",
    [
        DROPOUT,
        DROPOUT | {"memory.recompute": "full"},
        DROPOUT | {"memory.recompute": "selective", "memory.recompute_modules": ["core_attn"]},
        {"tuning.adapter.dropout": 0.1},  # there are no adapters
    ],
)
def test_dropout_of_adapters_where_it_is_sound(config, changes):
    for field, value in changes.items():
        set_value(config, field, value)
    assert problems(config) == []


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"tuning.adapter.path": "."}, "tuning.method is 'full'"),
        ({"tuning.method": "lora", "tuning.adapter.path": "gone"}, "no directory"),
        ({"tuning.method": "lora", "trainer.output_dir": "r", "tuning.adapter.path": "./r/adapter"}, "write its own"),
        ({"tuning.method": "lora", "tuning.adapter.new": True}, "tuning.adapter.path, which is null"),
        ({"tuning.method": "lora", "tuning.adapter.path": ".", "tuning.also_train": ["norm.weight"]}, "reference"),
        ({"rollout.adapter": "merged"}, "set it to auto"),
        ({"tuning.method": "lora", "tuning.adapter.dropout": 0.1}, "not the one that sampled"),
        ({"tuning.method": "lora", "platform.layers": "transformer_engine"}, "platform.layers.* set it to local"),
        (DROPOUT | {"memory.recompute": "selective"}, "begins in the middle of a layer"),
        (
            DROPOUT | {"trainer.stage": "dpo", "trainer.max_tokens_per_microbatch": 1600},
            "would be learnt apart.* raise the former to 3072",
        ),
        ({"tuning.method": "lora", "rollout.adapter": "slots", "rollout.weight_update": "reload"}, "reload"),
    ],
)
def test_adapters(config, changes, part, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "adapter_config.json").touch()
    for field, value in changes.items():
        set_value(config, field, value)
    (problem,) = problems(config)
    assert re.search(part, problem)


def test_a_function_called_as_the_reward_model_is_not_taken_for_it() -> None:
    config = RunConfig()
    config.rewards = [RewardConfig(name="model", options={"path": "x"}), RewardConfig(name="own.module:model")]
    assert any(
        "rewards[1].name" in line and "rename the function" in line for line in problems(config, has_files=False)
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rollout.mode": "synchronous"}, "rollout.max_staleness is 1, but with rollout.mode 'synchronous'"),
        ({"rollout.placement": "colocated"}, "colocated engines take turns with the trainer"),
        ({"rollout.seeds": "engine"}, "rollout.seeds is 'engine'"),
        ({"checkpoint.local": 1}, "checkpoint.local is 1"),
        ({"algorithm.dynamic_sampling.oversample": 1.5}, "no group waits for the next step"),
        ({"algorithm.importance_cap": None}, "importance weights are what corrects for the older weights"),
        ({"aqn.enabled": True, "aqn.old_logprobs": "none"}, "aqn.old_logprobs is 'none'"),
        ({"aqn.enabled": True, "aqn.old_logprobs": "recompute_noisy"}, "no longer has all weights"),
        ({"rollout.max_staleness": -1}, "rollout.max_staleness is -1"),
        ({"rollout.oversample": 1.5}, "no step waits for its longest response"),
        ({"rollout.kv_on_update": "keep"}, "no response is under way when new weights come: remove it, or set rollout"),
        (
            {"rollout.batch_invariant": True, "platform.name": "cpu"},
            "True, but vLLM has no such kernels for a CPU",
        ),
        (
            {"rollout.batch_invariant": True, "platform.name": "npu"},
            "True, but vllm-ascend has no such kernels: set",
        ),
        (
            {"rollout.batch_invariant": True, "rollout.seeds": "engine", "rollout.mode": "in_flight"},
            "'engine' a response depends on those beside it: ",
        ),
    ],
)
def test_engines_that_sample_meanwhile(config, changes, words):
    config.rollout.placement, config.rollout.mode, config.rollout.max_staleness = "separate", "pinned", 1
    config.algorithm.dynamic_sampling.enabled = True
    config.data.val_files = []
    config.validation.test_freq = -1
    config.model.dtype = "bfloat16"
    assert problems(config) == []
    for field, value in changes.items():
        *path, name = field.split(".")
        section = functools.reduce(getattr, path, config)
        setattr(section, name, value)
    found = problems(config)
    assert len(found) == 1 and words in found[0], found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"environment.name": "number_guessing"},
            "an episode cannot be stopped without its environment (environment.name 'number_guessing'): set "
            "rollout.oversample to 1",
        ),
        ({"rollout.stop": ["###"]}, "would not see a string of rollout.stop that begins in one step"),
        ({"algorithm.dynamic_sampling.oversample": 2.0}, "algorithm.dynamic_sampling.oversample 2.0 says it too"),
        ({"algorithm.dynamic_sampling.budget": 1.0}, "algorithm.dynamic_sampling.budget is 1.0, so that"),
        ({"algorithm.importance_cap": None}, "importance weights are what corrects for the older weights"),
        ({"aqn.enabled": True, "aqn.old_logprobs": "none"}, "aqn.old_logprobs is 'none'"),
        ({"aqn.enabled": True, "aqn.old_logprobs": "recompute_noisy"}, "no longer has all weights"),
        ({"rollout.oversample": 0.5}, "rollout.oversample is 0.5"),
    ],
)
@pytest.mark.parametrize("placement", ["colocated", "separate"])
def test_steps_that_end_before_all_responses_have(config, changes, words, placement):
    config.rollout.placement, config.rollout.oversample = placement, 1.5
    config.algorithm.dynamic_sampling.enabled = True
    config.model.dtype = "bfloat16"
    assert problems(config) == []
    for field, value in changes.items():
        *path, name = field.split(".")
        setattr(functools.reduce(getattr, path, config), name, value)
    found = problems(config)
    assert len(found) == 1 and words in found[0], found


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"environment.name": None}, "algorithm.credit is 'turn', but environment.name is null"),
        ({"algorithm.advantage": "gae"}, "a critic tells what every token is worth"),
        (
            {"algorithm.objective": "gspo", "algorithm.loss_reduction": "sequence_mean"},
            "one ratio for a whole",
        ),
        ({"algorithm.turn_discount": 0.0}, "algorithm.turn_discount is 0.0: set it to a number > 0 and <= 1"),
        ({"algorithm.credit": "episode", "algorithm.turn_discount": 0.5}, "which has no turns: set it to 1"),
    ],
)
def test_credit_by_turn(config, changes, words):
    config.environment.name, config.algorithm.credit = "number_guessing", "turn"
    assert problems(config) == []
    for field, value in changes.items():
        *path, name = field.split(".")
        setattr(functools.reduce(getattr, path, config), name, value)
    found = problems(config)
    assert len(found) == 1 and words in found[0], found


def test_experts_of_weights_that_change_within_a_response(config):
    config.rollout.placement, config.rollout.mode, config.data.val_files = "separate", "in_flight", []
    config.rollout.routing_replay, config.validation.test_freq = "rollout", -1
    assert any("the weights change within a response" in line for line in problems(config))
    config.rollout.routing_replay, config.rollout.kv_on_update = "off", "keep"
    assert problems(config) == []
