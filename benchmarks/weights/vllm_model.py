"""A model built of vLLM's own classes, with live parameters and its own loader, and no engine around it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from mega_rl.models.shape import ModelShape
from mega_rl.rollout.vllm.start.cpu_adjustments import cpu_adjustments
from mega_rl.rollout.vllm.start.environment import preserved_process, set_environment

set_environment("cpu")  # before vLLM is imported

from vllm import ModelRegistry  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader import get_model  # noqa: E402
from vllm.model_executor.models import qwen3  # noqa: E402

# Here, so that processes that are forked have it: vLLM would look at the class in a process of its own for each.
ModelRegistry.register_model("Qwen3ForCausalLM", qwen3.Qwen3ForCausalLM)


def write_config(directory: Path, shape: ModelShape) -> Path:
    """A directory with nothing but the configuration of a Qwen3 model of this shape."""
    assert shape.family == "qwen3", shape.family
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "num_hidden_layers": shape.num_layers,
        "intermediate_size": shape.ffn_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "tie_word_embeddings": shape.tied,
        "rms_norm_eps": shape.norm_eps,
    }
    same = ("hidden_size", "head_dim", "vocab_size", "max_position_embeddings", "rope_theta")
    config |= {name: asdict(shape)[name] for name in same}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


class VLLMModel:
    """This rank's part; construction is collective over the default group, and there is one model at a time."""

    def __init__(self, directory: Path, tensor_parallel: int, rank: int, job: str) -> None:
        """Consecutive ranks form one model; ``job`` is as in ``cpu_adjustments``."""
        logging.getLogger("vllm").setLevel(logging.ERROR)
        with preserved_process("cpu"):
            config = EngineArgs(
                model=str(directory),
                load_format="dummy",
                skip_tokenizer_init=True,
                enforce_eager=True,
                dtype="bfloat16",
                max_model_len=64,
                tensor_parallel_size=tensor_parallel,
                distributed_executor_backend="external_launcher",
            ).create_engine_config()
            with (
                set_current_vllm_config(config),
                cpu_adjustments(live_weights=True, job=job),
                # There is no such cache on a CPU, where torch raises; vLLM's worker does the same.
                mock.patch.object(torch.accelerator, "empty_cache", lambda: None),
            ):
                parallel_state.destroy_model_parallel()  # the earlier model's groups
                parallel_state.init_distributed_environment(dist.get_world_size(), rank, "", rank, "gloo")
                parallel_state.initialize_model_parallel(tensor_parallel)
                self._model = get_model(vllm_config=config)
        self.parameters = {name: parameter.data for name, parameter in self._model.named_parameters()}

    @torch.no_grad()
    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Whole Hugging Face tensors through the model's own loader."""
        loaded = self._model.load_weights(weights)
        assert loaded == set(self.parameters), "the loader left parameters out"
