"""``trainer.megatron``: every field of the installed Megatron-core is free to set, or refused with a reason."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from mega_rl.config import RunConfig, problems
from mega_rl.config.reading.typed import leaf_names
from mega_rl.config.schema.megatron_fields import FREE, KEYS, OTHERS, field_problems
from mega_rl.config.schema.sections import MemoryConfig, ParallelConfig
from mega_rl.errors import InputError
from mega_rl.megatron.model import families, recompute, transformer as model
from mega_rl.megatron.model.spec import TrainerSpec
from mega_rl.models.shape import read_model_shape

INSTALLED = {field.name for kind in (TransformerConfig, MLATransformerConfig) for field in dataclasses.fields(kind)}


def test_every_field_of_megatron_stands_in_one_list() -> None:
    lists = [*FREE, *KEYS, *(name for names in OTHERS.values() for name in names.split())]
    assert len(lists) == len(set(lists)), sorted({name for name in lists if lists.count(name) > 1})
    assert set(lists) == INSTALLED
    assert set(KEYS.values()) <= set(leaf_names())
    hints = get_type_hints(TransformerConfig)
    assert all(hints[name] in (kind, kind | None) for name, kind in FREE.items())


def test_nothing_that_the_trainer_sets_is_free() -> None:
    """Of the sources: the settings of transformer_config, families.py and recompute.py."""
    names: set[str] = set()
    for source in (model.transformer_config, families, recompute.recompute_settings):
        tree = ast.parse(inspect.getsource(source))
        names |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg}
        names |= {str(node.value) for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    assert {"num_layers", "moe_router_topk", "recompute_modules"} <= names and not names & set(FREE)


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"distribute_saved_activation": True}, "did you mean distribute_saved_activations?"),
        ({"use_flash_attn": True}, "is no field of Megatron-core's TransformerConfig: those that can be set are"),
        ({"tensor_model_parallel_size": 2}, "is set by parallel.tensor: give that instead"),
        ({"num_layers": 2}, "is read from the config.json of model.path"),
        ({"moe_aux_loss_coeff": 0.1}, "is set by router.aux_loss: give that instead"),
        ({"apply_rope_fusion": True}, "needs kernels of TransformerEngine"),
        ({"batch_p2p_sync": 1}, "trainer.megatron.batch_p2p_sync is 1: set it to true or false"),
        ({"microbatch_group_size_per_vp_stage": True}, "is True: set it to a whole number >= 1"),
        ({"microbatch_group_size_per_vp_stage": 0}, "is 0: set it to a whole number >= 1"),
    ],
)
def test_other_fields_are_refused_with_a_reason(fields: dict[str, Any], sentence: str) -> None:
    (found,) = field_problems(fields)
    assert found.startswith(f"trainer.megatron.{next(iter(fields))} ") and sentence in found
    config = RunConfig()
    config.model.path = "absent"
    config.trainer.megatron = fields
    assert found in problems(config, has_files=False)


def test_free_fields_reach_megatron(tmp_path: Path) -> None:
    assert field_problems({name: kind(1) for name, kind in FREE.items()}) == []
    sizes = {"hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2ForCausalLM"], **sizes, **heads}))
    shape = read_model_shape(tmp_path)

    def built(**fields: Any) -> TransformerConfig:
        spec = TrainerSpec(torch.float32, ParallelConfig(), MemoryConfig(), 1.0, 16, fields=fields)
        return model.transformer_config(spec, shape)

    assert built().batch_p2p_sync and not built(batch_p2p_sync=False).batch_p2p_sync
    with pytest.raises(InputError, match="trainer.megatron has overlap_p2p.*, which Megatron-core refuses"):
        built(overlap_p2p_comm_warmup_flush=True)
