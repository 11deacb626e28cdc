"""Reward models and critics in a configuration: where one may stand, and what is said where it may not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mega_rl.config import RunConfig, problems
from mega_rl.config.checks.model import trained_shape
from mega_rl.config.schema.sampling import RewardConfig
from mega_rl.config.schema.stage import critic_parallel, model_directory
from mega_rl.models.shape import SUFFIXES, ModelShape, parse_config
from mega_rl.planning.memory_plan import Machine, RankMemory, make_plan

LANGUAGE = {
    "architectures": ["Qwen2ForCausalLM"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 64,
    "max_position_embeddings": 2048,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
VALUE = {**LANGUAGE, "architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}


def write(directory: Path, config: dict[str, object]) -> str:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    good = RunConfig()
    good.model.path = write(tmp_path / "model", LANGUAGE)
    good.data.train_files = ["rows.jsonl"]
    good.rewards = [RewardConfig("model", options={"path": write(tmp_path / "run" / "huggingface", VALUE)})]
    good.trainer.total_steps, good.trainer.output_dir = 10, str(tmp_path / "out")
    return good


def of_files_nothing(config: RunConfig) -> list[str]:
    return problems(config, 1, has_files=False)


def test_a_reward_model_is_a_directory_or_a_run(config: RunConfig, tmp_path: Path) -> None:
    assert of_files_nothing(config) == []
    (reward,) = config.rewards
    reward.options["path"] = str(tmp_path / "run")
    assert of_files_nothing(config) == [] and model_directory(reward) == str(tmp_path / "run" / "huggingface")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"id2label": {"0": "a", "1": "b"}}, "num_labels is 2"),
        ({"id2label": None}, "num_labels is 2"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "choose a model of DeepseekV3ForSequenceClassification, .*Qwen2For"),
        ({"architectures": ["BertForSequenceClassification"]}, "BertForSequenceClassification"),
        ({"max_position_embeddings": 256}, "max_position_embeddings, 256"),
    ],
)
def test_what_is_no_reward_model_for_this_run(config: RunConfig, changes: dict, words: str, tmp_path: Path) -> None:
    config.rewards[0].options["path"] = write(tmp_path / "other", {**VALUE, **changes})
    (line,) = of_files_nothing(config)
    assert "rewards.model.options.path" in line
    assert all(part in line for part in words.split(", .*"))


def test_options_of_a_reward_model(config: RunConfig) -> None:
    for options in ({}, {"path": ""}, {"path": "a", "temperature": 1}):
        config.rewards[0].options = options
        assert any("rewards[0].options" in line and "path" in line for line in of_files_nothing(config))


def test_groups_are_dropped_by_another_reward(config: RunConfig) -> None:
    config.rewards.append(RewardConfig("exact_match"))
    config.algorithm.dynamic_sampling.enabled = True
    (line,) = of_files_nothing(config)
    assert "dynamic_sampling.metric" in line and "'model'" in line
    config.algorithm.dynamic_sampling.metric = "exact_match"
    assert of_files_nothing(config) == []


def test_a_critic_belongs_to_gae(config: RunConfig, tmp_path: Path) -> None:
    config.critic.path = str(tmp_path / "model")  # a language model, which gets a new head
    (line,) = of_files_nothing(config)
    assert "critic.path" in line and "algorithm.name to ppo" in line
    config.algorithm.advantage, config.rollout.n = "gae", 1
    assert of_files_nothing(config) == []
    config.critic.warmup_steps = 10
    (line,) = of_files_nothing(config)
    assert "critic.warmup_steps is 10" in line
    config.critic.warmup_steps, config.critic.path = 9, str(tmp_path / "absent")
    (line,) = of_files_nothing(config)
    assert "critic.path" in line and "absent" in line


def test_a_critic_shares_weights_that_stay_as_they_are(config: RunConfig, tmp_path: Path) -> None:
    def words(*parts: str) -> None:
        (line,) = of_files_nothing(config)
        assert all(part in line for part in ("critic.shares_base", *parts)), line

    config.critic.shares_base = True
    words("algorithm.name to ppo")
    config.algorithm.advantage, config.rollout.n = "gae", 1
    words("tuning.method 'full'", "tuning.method to lora")
    config.tuning.method = "lora"
    assert of_files_nothing(config) == []
    config.tuning.also_train = ["norm.weight"]
    words("tuning.also_train", "[]")
    config.tuning.also_train, config.critic.path = [], str(tmp_path / "model")
    words("critic.path", "remove it")


def test_a_plan_has_the_shared_weights_once(config: RunConfig) -> None:
    config.rewards, config.algorithm.advantage, config.rollout.n = [RewardConfig("exact_match")], "gae", 1
    config.tuning.method, config.critic.shares_base = "lora", True
    phases = make_plan(config, trained_shape(config), Machine(1, 1 << 34, 0, "cuda")).ranks[0].phases
    (working,) = [phase for phase in phases if phase.name == "critic"]
    items = {item.name: item.num_bytes for item in working.items}
    # rank 16 in two layers: query, output, gate, up and down of 64 to 64, key and value of 64 to 32
    adapters = 16 * 2 * (5 * (64 + 64) + 2 * (64 + 32))
    assert items["critic"] == pytest.approx(18 * (adapters + 64), rel=0.002)  # and the head; 2 + 4 + 12 bytes a weight
    assert items["weights"] > 2 * 64 * 1000, "the policy's, which it works on"


def test_only_a_stage_of_values_trains_a_reward_model(config: RunConfig, tmp_path: Path) -> None:
    config.model.path = str(tmp_path / "run" / "huggingface")
    (line,) = of_files_nothing(config)
    assert "Qwen2ForSequenceClassification" in line and "Qwen2ForCausalLM" in line
    config.trainer.stage = "rm"
    for path in (config.model.path, str(tmp_path / "model")):
        config.model.path = path
        assert of_files_nothing(config) == []
        shape = trained_shape(config)
        assert (shape.head, shape.tied, shape.architecture) == ("value", False, "Qwen2ForSequenceClassification")


def test_both_heads_of_every_family_have_a_name() -> None:
    def read(name: str) -> ModelShape:
        return parse_config({**VALUE, "architectures": [name]}, "c")

    with pytest.raises(Exception, match="Qwen2ForSequenceClassification"):
        read("Qwen2ForSequenceClassification")  # where nothing says that a value model may stand
    assert read("Qwen2ForCausalLM").architecture == "Qwen2ForCausalLM" and set(SUFFIXES) == {"vocabulary", "value"}


def test_a_plan_has_the_further_models(config: RunConfig) -> None:
    machine = Machine(1, 1 << 34, 0, "cuda")
    config.rewards, plain = [RewardConfig("exact_match")], config.rewards
    alone = make_plan(config, trained_shape(config), machine).ranks[0]
    config.rewards, config.algorithm.advantage = plain, "gae"
    both = make_plan(config, trained_shape(config), machine).ranks[0]
    added = {phase.name for phase in both.phases} - {phase.name for phase in alone.phases}
    assert added == {"critic", "reward model", "save"}
    in_training = named(both, "training")
    decoder = in_training["reward model"]  # bfloat16, as many weights as the policy: its output layer is its embedding
    assert decoder == pytest.approx(2 * (64 * 1000 + 2 * (64 * 64 * 2 + 64 * 64 + 3 * 64 * 64)), rel=0.02)
    assert in_training["critic"] == pytest.approx(9 * decoder, rel=0.02)  # 2 + 4 + 12 bytes a weight
    config.memory.offload = ["weights", "gradients", "optimizer"]
    away = make_plan(config, trained_shape(config), machine).ranks[0]
    assert not {"critic", "reward model"} & set(named(away, "training"))
    host = {item.name for item in away.host}
    assert {"critic away", "reward model away"} <= host


def named(rank: RankMemory, phase: str) -> dict[str, int]:
    (found,) = (one for one in rank.phases if one.name == phase)
    return {item.name: item.num_bytes for item in found.items}


def test_a_save_has_policy_and_critic_on_the_device(config: RunConfig) -> None:
    machine = Machine(1, 1 << 34, 0, "cuda")
    config.algorithm.advantage, config.rewards = "gae", [RewardConfig("exact_match")]
    config.memory.offload = ["weights", "gradients", "optimizer"]
    (rank,) = make_plan(config, trained_shape(config), machine).ranks
    saved, working = named(rank, "save"), named(rank, "critic")
    assert saved["critic"] == working["critic"] > 0 and {"weights", "gradients", "optimizer"} <= set(saved)
    assert "optimizer" not in working


def test_a_critic_has_its_optimizer_where_the_policy_has(config: RunConfig) -> None:
    machine = Machine(1, 1 << 34, 0, "cuda")
    config.algorithm.advantage, config.rewards = "gae", [RewardConfig("exact_match")]
    (here,) = make_plan(config, trained_shape(config), machine).ranks
    config.memory.optimizer_on_host = True
    (there,) = make_plan(config, trained_shape(config), machine).ranks
    host = {item.name: item.num_bytes for item in there.host}
    for phase in ("training", "critic", "save"):
        assert named(here, phase)["critic"] - named(there, phase)["critic"] == host["critic away"] > 0
        assert "optimizer" not in named(there, phase)
    assert host["optimizer on host"] == there.state.optimizer
    config.memory.offload = ["weights", "gradients"]
    (away,) = make_plan(config, trained_shape(config), machine).ranks
    assert {item.name: item.num_bytes for item in away.host}["critic away"] == named(here, "critic")["critic"]


def test_a_critic_with_a_layout_of_its_own(config: RunConfig) -> None:
    config.rewards, config.algorithm.advantage, config.rollout.n = [RewardConfig("exact_match")], "gae", 1
    config.parallel.tensor, config.parallel.sequence = 2, True
    assert critic_parallel(config) is config.parallel
    config.critic.tensor, config.critic.pipeline = 1, 2
    own = critic_parallel(config)
    assert (own.tensor, own.pipeline, own.context, own.sequence) == (1, 2, 1, False)
    assert problems(config, 4, has_files=False) == []
    config.critic.tensor = 3
    lines = problems(config, 6, has_files=False)
    words = "with critic.tensor 3, critic.pipeline 2 and critic.context 1 the critic cannot be trained: parallel.tensor"
    assert lines and all(line.startswith(words) for line in lines)
    config.critic.tensor, config.tuning.method, config.critic.shares_base = 1, "lora", True
    (line,) = problems(config, 4, has_files=False)
    assert "critic.shares_base" in line and "critic.pipeline" in line


def test_a_plan_has_the_critic_at_its_own_layout(config: RunConfig) -> None:
    config.rewards, config.algorithm.advantage = [RewardConfig("exact_match")], "gae"
    config.parallel.tensor, config.parallel.sequence = 2, True
    machine = Machine(2, 1 << 34, 0, "cuda")

    def of_critic() -> tuple[int, int]:
        found = make_plan(config, trained_shape(config), machine).ranks
        return named(found[0], "training")["critic"], named(found[1], "training")["critic"]

    cut = of_critic()
    config.critic.tensor = 1
    whole = of_critic()  # weights and gradients twice, the optimizer's state over two data-parallel ranks
    assert cut[0] == cut[1] and whole[0] == whole[1]
    assert 1.2 * cut[0] < whole[0] < 1.5 * cut[0]
