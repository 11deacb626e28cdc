"""A dry run and a run accept the same models and refuse the others with the same sentences.

Each case is a config.json made by hand and, if it takes one, a layout. Validation lists what is wrong; the job, as
every rank opens it, must refuse with exactly that list. The processes and the device of the job are stand-ins.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mega_rl.bridge.mapping.megatron import rank_series
from mega_rl.bridge.mapping.vllm import vllm_series
from mega_rl.config import RunConfig, problems, to_yaml, validate
from mega_rl.config.schema.sampling import RewardConfig
from mega_rl.errors import InputError
from mega_rl.models.shape import read_model_shape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.stages.run import opening
from tests.launching.launch import REPO, run
from tests.models import families

DEFAULT_WINDOW = 4096  # tokens, Mistral's if the file has none
LLAMA3 = families.llama3_rope(64)


@dataclass(frozen=True)
class Case:
    """A model and a layout, and words of each sentence in order; no words: it is accepted."""

    family: str
    changes: Mapping[str, Any] = field(default_factory=dict)  # of config.json; ... takes a key out
    words: tuple[str, ...] = ()
    keys: Mapping[str, Any] = field(default_factory=dict)  # of the configuration
    world_size: int = 1
    content: bytes | None = None  # of the file, instead of the family's


def without(rope: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in rope.items() if name != key}


SFT = {"trainer.stage": "sft"}
TP2 = {"parallel.tensor": 2, "parallel.sequence": True}
ENGINE = "rollout.tensor_parallel_size"
LONG_RESPONSE = {"data.max_response_length": 120, "trainer.max_tokens_per_microbatch": 136}

# Families that no engine takes.
WITHOUT_ENGINE = [name for name in families.CONTRACT.own if name.startswith("deepseek")]
CASES: dict[str, Case] = {
    # --- every family as transformers writes it
    **{name: Case(name, keys=SFT if name in WITHOUT_ENGINE else {}) for name in families.CONTRACT.own},
    # --- the file
    "missing file": Case("qwen2", words=("has no config.json",), content=b""),
    "bad JSON": Case("qwen2", words=("is not valid JSON",), content=b'{"architectures": '),
    "bad UTF-8": Case("qwen2", words=("is not valid JSON",), content=b"\xff\xfe{}"),
    "a list": Case("qwen2", words=("is not a JSON object",), content=b"[]"),
    "a number": Case("qwen2", words=("is not a JSON object",), content=b"7"),
    "an empty object": Case("qwen2", words=("architectures is None",), content=b"{}"),
    # --- the architecture
    "unknown architecture": Case("qwen2", {"architectures": ["GPT2LMHeadModel"]}, ("['GPT2LMHeadModel']",)),
    "second architecture known": Case(
        "qwen2", {"architectures": ["BertModel", "Qwen2ForCausalLM"]}, ("['BertModel', 'Qwen2ForCausalLM'], of which",)
    ),
    "first architecture known": Case("qwen2", {"architectures": ["Qwen2ForCausalLM", "BertModel"]}),
    "no architectures": Case("qwen2", {"architectures": ...}, ("architectures is None",)),
    "empty architectures": Case("qwen2", {"architectures": []}, ("architectures is []",)),
    "architectures is a string": Case("qwen2", {"architectures": "Qwen2ForCausalLM"}, ("'Qwen2ForCausalLM'",)),
    "architectures of objects": Case("qwen2", {"architectures": [{}]}, ("architectures is [{}]",)),
    # --- sliding windows, as each family switches them on
    "window by layer": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}, ("sliding attention",)
    ),
    "window after the last layer": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 4}
    ),
    "window not used": Case("qwen3", {"use_sliding_window": False, "sliding_window": 32}),
    "window by layer types": Case("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, ("sliding",)),
    "full layer types": Case("qwen3", {"layer_types": ["full_attention"] * 4}),
    "layer types malformed": Case("qwen3", {"layer_types": 4}, ("layer_types is 4",)),
    "window of all layers": Case(
        "qwen3_moe", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 9}, ("sliding attention",)
    ),
    "window always": Case("mistral", {"sliding_window": 64}, ("sliding attention",)),
    "window always, longer than the model": Case("mistral", {"sliding_window": 128}),
    "window by default": Case(
        "mistral", {"sliding_window": ..., "max_position_embeddings": 2 * DEFAULT_WINDOW}, ("sliding attention",)
    ),
    "window malformed": Case("mistral", {"sliding_window": "wide"}, ("sliding_window is 'wide'",)),
    "first window layer malformed": Case(
        "qwen2", {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": "2"}, ("max_window_layers",)
    ),
    # --- rotary embedding
    "yarn of transformers 4": Case("llama", {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_parameters": ...},
        ("rope type 'yarn'",)),
    "yarn of transformers 5": Case("deepseek_v3", {"rope_parameters": {"rope_type": "yarn"}}, ("'yarn'",), SFT),
    "linear scaling": Case("qwen2", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ("'linear'",)),
    "llama3 without a key": Case("llama", {"rope_parameters": without(LLAMA3, "high_freq_factor")},
        ("lacks high_freq_factor",)),
    "llama3 with a bad key": Case("llama", {"rope_parameters": LLAMA3 | {"factor": 0}}, ("factor is 0",)),
    "partial rotary": Case("llama", {"partial_rotary_factor": 0.5}, ("partial_rotary_factor",)),
    "partial rotary in the section": Case("qwen3", {"rope_parameters": {"partial_rotary_factor": 0.25}},
        ("partial_rotary_factor",)),
    "rope is a string": Case("qwen2", {"rope_scaling": "yarn"}, ("rope_scaling is 'yarn'",)),
    "bad theta": Case("qwen2", {"rope_theta": -1.0}, ("rope_theta is -1.0",)),
    # --- what no family does
    "attention bias": Case("qwen3", {"attention_bias": True}, ("attention_bias is True",)),
    "MLP bias": Case("llama", {"mlp_bias": True}, ("mlp_bias is True",)),
    "quantised": Case("qwen2", {"quantization_config": {"quant_method": "awq"}}, ("quantization_config", )),
    "router logits": Case("qwen3_moe", {"output_router_logits": True}, ("output_router_logits",)),
    "other activation": Case("qwen2", {"hidden_act": "gelu"}, ("hidden_act is 'gelu'",)),
    "no bias of queries": Case("qwen2_moe", {"qkv_bias": False}, ("qkv_bias is False",)),
    # --- sizes
    "no vocab_size": Case("qwen2", {"vocab_size": ...}, ("vocab_size is None",)),
    "no hidden_size": Case("qwen2", {"hidden_size": ...}, ("hidden_size is None",)),
    "no intermediate_size": Case("llama", {"intermediate_size": ...}, ("intermediate_size is None",)),
    "no positions": Case("qwen2", {"max_position_embeddings": ...}, ("max_position_embeddings is None",)),
    "no layers": Case("qwen2", {"num_hidden_layers": 0}, ("num_hidden_layers is 0",)),
    "half a layer": Case("qwen2", {"num_hidden_layers": 4.5}, ("num_hidden_layers is 4.5",)),
    "layers as a float": Case("qwen2", {"num_hidden_layers": 4.0}, ("num_hidden_layers is 4.0",)),
    "a boolean": Case("qwen2", {"num_attention_heads": True}, ("num_attention_heads is True",)),
    "a text": Case("qwen2", {"vocab_size": "131"}, ("vocab_size is '131'",)),
    "negative": Case("qwen2", {"num_key_value_heads": -4}, ("num_key_value_heads is -4",)),
    "tying is a text": Case("qwen2", {"tie_word_embeddings": "no"}, ("tie_word_embeddings is 'no'",)),
    "bad epsilon": Case("qwen2", {"rms_norm_eps": 0}, ("rms_norm_eps is 0",)),
    "no key/value heads": Case("qwen2", {"num_key_value_heads": None}),
    "heads in groups": Case("qwen2", {"num_key_value_heads": 3}, ("num_attention_heads 8 is not a multiple",)),
    "head_dim of qwen2": Case("qwen2", {"head_dim": 16}, ("head_dim 16 x num_attention_heads 8 is not hidden_size",)),
    "head_dim of llama": Case("llama", {"head_dim": 20}),
    "hidden_size by heads": Case("qwen2", {"hidden_size": 36}, ("hidden_size 36 is not a multiple",)),
    "several at once": Case(
        "qwen2",
        {"attention_bias": True, "num_hidden_layers": 0, "vocab_size": ...},
        ("attention_bias", "num_hidden_layers is 0", "vocab_size is None"),
    ),
    # --- experts
    "more chosen than there are": Case("qwen3_moe", {"num_experts_per_tok": 9}, ("num_experts_per_tok 9 is above",)),
    "one chosen": Case("qwen3_moe", {"num_experts_per_tok": 1}, ("no gradient",)),
    "no number of experts": Case("qwen3_moe", {"num_experts": ...}, ("num_experts is None",)),
    "the other name of the number": Case("qwen3_moe", {"num_experts": ..., "num_local_experts": 8}),
    "no width of experts": Case("qwen3_moe", {"moe_intermediate_size": ...}, ("moe_intermediate_size is None",)),
    "no shared width": Case("qwen2_moe", {"shared_expert_intermediate_size": 0}, ("shared_expert_intermediate_size",)),
    "dense layers malformed": Case("qwen3_moe", {"mlp_only_layers": 1}, ("mlp_only_layers is 1",)),
    "dense layers of texts": Case("qwen3_moe", {"mlp_only_layers": ["1"]}, ("mlp_only_layers is ['1']",)),
    "only dense layers": Case("qwen3_moe", {"mlp_only_layers": [0, 1, 2, 3]}, ("no layer has experts",)),
    "bad step of experts": Case("qwen3_moe", {"decoder_sparse_step": 0}, ("decoder_sparse_step is 0",)),
    "first dense layers": Case("deepseek_v3", {"first_k_dense_replace": -1}, ("first_k_dense_replace is -1",), SFT),
    "other scores": Case("deepseek_v3", {"scoring_func": "softmax"}, ("scoring_func is 'softmax'",), SFT),
    "groups": Case("deepseek_v3", {"topk_group": 5}, ("topk_group 5 of n_group 4 does not fit",), SFT),
    "chosen by groups": Case("deepseek_v3", {"num_experts_per_tok": 3}, ("not 2 x topk_group 2",), SFT),
    "no latent rank": Case("deepseek_v3", {"kv_lora_rank": ...}, ("kv_lora_rank is None",), SFT),
    "fewer key/value heads": Case("deepseek_v3", {"num_key_value_heads": 4}, ("num_key_value_heads is 4",), SFT),
    "rotary halves": Case("deepseek_v3", {"rope_interleave": False}, ("rope_interleave is False",), SFT),
    # --- the trainer's layout
    "latent attention and sampling": Case("deepseek_v3", {}, ("trainer.stage is 'rl', which does not take",)),
    "world": Case("qwen2", {}, ("does not divide the world size 3",), TP2, 3),
    "heads": Case("qwen2", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 30}, (
        "parallel.tensor is 4, which does not divide the model's num_attention_heads",
        "num_key_value_heads",
    ), TP2 | {"parallel.tensor": 4}, 4),
    "key/value heads": Case("qwen2", {"num_key_value_heads": 1}, ("num_key_value_heads: set it to a divisor of 1",),
        TP2, 2),
    "MLP": Case("llama", {"intermediate_size": 49}, ("the model's intermediate_size: set it to a divisor of 49",),
        TP2, 2),
    "no dense MLP": Case("qwen2_moe", {"intermediate_size": 49}, (), TP2, 2),
    "dense MLP beside experts": Case("qwen3_moe", {"intermediate_size": 49}, ("intermediate_size",), TP2, 2),
    "shared expert": Case("qwen2_moe", {"shared_expert_intermediate_size": 41}, ("shared expert's width",), TP2, 2),
    "latent keys": Case("deepseek_v3", {"kv_lora_rank": 15}, ("kv_lora_rank + qk_rope_head_dim",), SFT | TP2, 2),
    "latent queries": Case("deepseek_v3", {"q_lora_rank": 21}, ("q_lora_rank",), SFT | TP2, 2),
    "whole queries": Case("deepseek_v3_whole_queries", {}, (), SFT | TP2, 2),
    "experts without sequence": Case("qwen3_moe", {}, ("parallel.sequence is False",), {"parallel.tensor": 2}, 2),
    "dense without sequence": Case("qwen3", {}, (), {"parallel.tensor": 2}, 2),
    "number of experts": Case("qwen3_moe", {}, ("which does not divide the model's number of experts",),
        {"parallel.expert": 3}, 3),
    "width of experts": Case("qwen3_moe", {"moe_intermediate_size": 25}, ("(null: as parallel.tensor) is 2",), TP2, 2),
    "whole experts": Case("qwen3_moe", {"moe_intermediate_size": 25}, (), TP2 | {"parallel.expert_tensor": 1}, 2),
    "experts of a dense model": Case("qwen2", {}, ("parallel.expert is 2, but the model has no experts",),
        {"parallel.expert": 2}, 2),
    "shards of no experts": Case("qwen2", {}, ("parallel.expert_tensor is 1, but the model has no experts",),
        {"parallel.expert_tensor": 1}, 2),
    "ranks of a stage": Case("qwen3_moe", {}, ("does not divide the 2 processes of a pipeline stage",),
        {"parallel.expert": 4}, 2),
    "layers": Case("qwen2", {}, ("parallel.pipeline is 3, which does not divide",), {"parallel.pipeline": 3}, 3),
    "layers of chunks": Case("qwen2", {}, ("parallel.pipeline 2 x parallel.virtual_pipeline 4 does not divide",),
        {"parallel.pipeline": 2, "parallel.virtual_pipeline": 4}, 2),
    "chunks of one stage": Case("qwen2", {}, ("parallel.virtual_pipeline is 2",), {"parallel.virtual_pipeline": 2}),
    # --- the engine
    "world of engines": Case("qwen2", {}, (f"{ENGINE} is 2, which does not divide the world size 3",), {ENGINE: 2}, 3),
    "separate engines": Case("qwen2", {}, (), {ENGINE: 2, "rollout.placement": "separate"}, 3),
    "engine's heads": Case("qwen2", {}, (f"{ENGINE} is 16, which does not divide the model's num_attention_heads",),
        {ENGINE: 16}, 16),
    "engine's key/value heads": Case(
        "qwen2", {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 30},
        ("set it to a divisor or a multiple of the model's num_key_value_heads, 3",), {ENGINE: 2}, 2),
    "engine's MLP": Case("llama", {"intermediate_size": 49}, (f"{ENGINE} is 2", ), {ENGINE: 2}, 2),
    "engine's experts": Case("qwen3_moe", {"moe_intermediate_size": 25}, ("the model's moe_intermediate_size",),
        {ENGINE: 2}, 2),
    "engine's whole experts": Case("qwen3_moe", {"moe_intermediate_size": 25}, (), {
        ENGINE: 2, "rollout.vllm": {"enable_expert_parallel": True}
    }, 2),
    "engine's shared expert": Case("qwen2_moe", {"shared_expert_intermediate_size": 41}, ("shared expert's width",),
        {ENGINE: 2}, 2),
    "no engine": Case("qwen2", {"intermediate_size": 49}, (), SFT | {ENGINE: 2}, 3),
    # --- lengths
    "positions": Case("qwen2", {}, ("136 tokens: make the sum at most the model's max_position_embeddings, 128",),
        LONG_RESPONSE),
    "micro-batch": Case("qwen2", {}, ("trainer.max_tokens_per_microbatch is 31",),
        {"trainer.max_tokens_per_microbatch": 31}),
    "context": Case("qwen2", {}, ("parallel.context is 32: set it to at most half",), {"parallel.context": 32}, 32),
    "model, layout, engine and lengths at once": Case(
        "qwen3_moe", {"intermediate_size": 49},
        ("136 tokens", "parallel.tensor is 2", "parallel.sequence is False", f"{ENGINE} is 2"),
        LONG_RESPONSE | {"parallel.tensor": 2, ENGINE: 2}, 2),
}  # fmt: skip


class OpenedError(Exception):
    """The job has accepted the model and goes on to its weights."""


def configuration(case: Case, directory: Path) -> RunConfig:
    """A valid one but for the case, and its model's config.json."""
    values = {**families.CONTRACT.config(case.family), **case.changes}
    values = {key: value for key, value in values.items() if value is not ...}
    content = json.dumps(values).encode() if case.content is None else case.content
    model = directory / "model"
    model.mkdir()
    if content:
        (model / "config.json").write_bytes(content)
    config = RunConfig()
    config.model.path = str(model)
    config.data.max_prompt_length = config.data.max_response_length = 16
    config.rewards = [RewardConfig(name="exact_match")]
    config.trainer.total_steps, config.trainer.output_dir = 1, str(directory / "run")
    for name, value in case.keys.items():
        section, _, key = name.rpartition(".")
        assert hasattr(getattr(config, section), key), name
        setattr(getattr(config, section), key, value)
    return config


@contextmanager
def stand_ins(monkeypatch: pytest.MonkeyPatch, world_size: int) -> Iterator[None]:
    """A job without processes, on no device, which ends where it has accepted the model."""

    def accept(*_: object) -> None:
        raise OpenedError

    with monkeypatch.context() as patch:
        patch.setattr(opening, "platform", SimpleNamespace(current=lambda: None))
        patch.setattr(opening, "join", lambda config: torch.device("cpu"))
        patch.setattr(opening, "dist", SimpleNamespace(get_world_size=lambda: world_size))
        patch.setattr(opening, "together", lambda what: nullcontext())
        patch.setattr(opening, "shared_store", lambda timeout_s: None)
        patch.setattr(opening, "watched", lambda *_: nullcontext())
        patch.setattr(opening, "HFReader", accept)
        yield


def refusal_of_a_run(config: RunConfig, world_size: int, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What the job says to the model; None if it goes on."""
    with stand_ins(monkeypatch, world_size):
        try:
            with opening.open_job(config):
                raise AssertionError("there are no weights to open")
        except InputError as error:
            return str(error)
        except OpenedError:
            return None


def refusal_of_a_dry_run(config: RunConfig, world_size: int) -> str | None:
    try:
        validate(config, world_size, has_files=False)
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", CASES)
def test_the_same_models_with_the_same_sentences(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    config = configuration(case, tmp_path)
    listed = problems(config, case.world_size, has_files=False)
    assert len(listed) == len(case.words), listed
    for words, sentence in zip(case.words, listed, strict=True):
        assert words in sentence and "\n" not in sentence, sentence
    refused = refusal_of_a_run(config, case.world_size, monkeypatch)
    assert refused == refusal_of_a_dry_run(config, case.world_size)
    assert (refused is None) == (not listed)
    assert all(sentence in str(refused) for sentence in listed)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.words])
def test_what_is_accepted_can_be_laid_out(name: str, tmp_path: Path) -> None:
    """The layouts of trainer and engine assert that sizes divide."""
    case = CASES[name]
    config = configuration(case, tmp_path)
    shape, layout = read_model_shape(config.model.path), ParallelLayout.of(config.parallel, case.world_size)
    assert all(rank_series(shape, layout, rank) for rank in range(case.world_size))
    if config.trainer.stage == "rl":
        size, has_whole_experts = config.rollout.tensor_parallel_size, "enable_expert_parallel" in config.rollout.vllm
        assert all(vllm_series(shape, size, rank, has_whole_experts) for rank in range(size))


def test_there_are_many_cases() -> None:
    assert sum(bool(case.words) for case in CASES.values()) >= 40


def test_the_commands_say_the_same(tmp_path: Path) -> None:
    config = configuration(CASES["several at once"], tmp_path)
    (tmp_path / "train.jsonl").write_text("")
    config.data.train_files = [str(tmp_path / "train.jsonl")]
    for name in ("tokenizer.json", "model.safetensors"):
        (tmp_path / "model" / name).write_text("")
    config.platform.name = "cpu"
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    command = [sys.executable, str(REPO / "tools" / "train.py"), "--config", str(tmp_path / "run.yaml")]
    dry, real = (run([*command, *more], timeout=280) for more in (("--dry-run",), ()))
    assert dry.returncode == real.returncode == 2
    assert dry.stdout == real.stdout and "3 problems" in dry.stdout, (dry.stdout, real.stdout)
    assert not (tmp_path / "run").exists()
