"""Records what our sources ask of vLLM, as one of its versions has it, out of files that are not imported.

    pip download --no-deps vllm==0.23.0 && unzip -q vllm-0.23.0*.whl -d vllm023
    python -m tests.contract.vllm_signatures.record vllm vllm023
    python -m tests.contract.vllm_signatures.record vllm_ascend vllm_ascend023 vllm023

The folders are unpacked wheels, or the site-packages of an environment; vllm_ascend is read on top of its vLLM.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

from mega_rl.bridge.mapping.vllm_slots import Slots
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.platform.ascend.environment import NZ
from mega_rl.rollout.vllm.start import environment
from mega_rl.rollout.vllm.start.options import (
    ROUTING,
    engine_arguments,
    option_names,
    picture_arguments,
    slot_arguments,
)
from tests.contract.vllm_signatures.uses import ROLLOUT, WORKER, uses
from tests.contract.vllm_signatures.wheel import Package

HERE = Path(__file__).resolve().parent
ASCEND_WORKER = "vllm_ascend.worker.worker.NPUWorker"
ENVIRONMENT = "vllm.envs.environment_variables"
EXPERTS_MODULE = "vllm.model_executor.layers.fused_moe.routed_experts.RoutedExperts"
CPU_EXPERTS = "vllm.model_executor.layers.fused_moe.experts.cpu_moe.CPUUnquantizedExperts.apply"
CPU_EXPERTS_023 = "vllm.model_executor.layers.fused_moe.cpu_fused_moe.CPUFusedMOE.forward_torch"
# What the branches of vllm_versions.py rest upon, besides the names that it writes out.
BRANCHES = (EXPERTS_MODULE, CPU_EXPERTS, CPU_EXPERTS_023)
LORA = ("lora_target_modules",)
LAYERS = "vllm.lora.layers"
SLOTS = (  # what makes the slots of an adapter, whose shapes ``bridge.mapping.vllm_slots`` and ``adapter_slots`` go by
    f"{LAYERS}.base_linear.BaseLinearLayerWithLoRA.create_lora_weights",
    f"{LAYERS}.column_parallel_linear.MergedColumnParallelLinearWithLoRA.create_lora_weights",
)
MODELS = "vllm.model_executor.models"
SEEING = {  # modules of models that see: what ``bridge.mapping`` calls weights by, and what pictures are rendered with
    f"{MODELS}.qwen2_5_vl.Qwen2_5_VLForConditionalGeneration": ("visual", "language_model"),
    f"{MODELS}.qwen2_5_vl.Qwen2_5_VisionTransformer": ("patch_embed", "blocks", "merger"),
    f"{MODELS}.qwen2_5_vl.Qwen2_5_VisionPatchEmbed": ("proj",),
    f"{MODELS}.qwen2_5_vl.Qwen2_5_VisionBlock": ("norm1", "norm2", "attn", "mlp"),
    f"{MODELS}.qwen2_5_vl.Qwen2_5_VisionAttention": ("qkv", "proj"),
    f"{MODELS}.qwen2_5_vl.Qwen2_5_VisionMLP": ("gate_up_proj", "down_proj"),
    f"{MODELS}.qwen2_5_vl.Qwen2_5_VisionPatchMerger": ("ln_q", "mlp"),
    f"{MODELS}.qwen3_vl.Qwen3VLForConditionalGeneration": ("visual", "language_model"),
    f"{MODELS}.qwen3_vl.Qwen3_VisionTransformer": (
        *("patch_embed", "pos_embed", "blocks", "merger", "deepstack_merger_list"),
    ),
    f"{MODELS}.qwen3_vl.Qwen3_VisionPatchEmbed": ("proj",),
    f"{MODELS}.qwen3_vl.Qwen3_VisionBlock": ("norm1", "norm2", "attn", "mlp"),
    f"{MODELS}.qwen3_vl.Qwen3_VisionMLP": ("linear_fc1", "linear_fc2"),
    f"{MODELS}.qwen3_vl.Qwen3_VisionPatchMerger": ("norm", "linear_fc1", "linear_fc2"),
    f"{MODELS}.qwen3_vl_moe.Qwen3VLMoeForConditionalGeneration": ("visual", "language_model"),
    f"{MODELS}.qwen3_vl_moe.Qwen3MoeLLMForCausalLM": ("model", "lm_head"),
    f"{MODELS}.qwen3_moe.Qwen3MoeModel": ("embed_tokens", "norm"),
    f"{MODELS}.qwen3_moe.Qwen3MoeDecoderLayer": ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm"),
    f"{MODELS}.qwen3_moe.Qwen3MoeAttention": ("qkv_proj", "o_proj", "q_norm", "k_norm"),
    f"{MODELS}.qwen3_moe.Qwen3MoeSparseMoeBlock": ("gate", "experts"),
    f"{MODELS}.qwen3_moe.Qwen3MoeMLP": ("gate_up_proj", "down_proj"),
    "vllm.v1.engine.llm_engine.LLMEngine": ("renderer", "reset_encoder_cache"),
    "vllm.renderers.base.BaseRenderer": ("render_cmpl",),
}
EXPERTS = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.UnquantizedFusedMoEMethod.create_weights"
VALUES = {  # the lists of what may be said -> the engine argument that we say
    "vllm.config.model.LogprobsMode": "logprobs_mode",
    "vllm.config.parallel.DistributedExecutorBackend": "distributed_executor_backend",
    "vllm.config.multimodal.MMEncoderTPMode": "mm_encoder_tp_mode",
}


def said() -> dict[str, Any]:
    """Every engine argument that we give on some device, with the value of a colocated engine on Ascend if any."""
    found: dict[str, Any] = {}
    known = ("enforce_eager", "disable_log_stats", "use_tqdm_on_load", "enable_sleep_mode", ROUTING, *LORA)
    for device_type in ("npu", "cpu", "other"):
        for placement in ("colocated", "separate"):
            arguments = engine_arguments(
                RolloutConfig(placement=placement, routing_replay="rollout"),
                model_path="model",
                dtype="float32",
                max_model_len=1,
                device_type=device_type,
                known=known,
                external=True,
            )
            found = arguments | found
    return slot_arguments(Slots(8, {}, frozenset()), known) | picture_arguments(1, {}) | found


def variables() -> list[str]:
    """vLLM's own environment variables among those that we set."""
    names = {**environment._REQUIRED, **environment._DEFAULTS, NZ: "0"}
    for of_device in environment._DEVICE_DEFAULTS.values():
        names |= of_device
    return [name for name in names if name.startswith("VLLM_")]


def extension_methods() -> list[str]:
    """The methods that our extension adds to vLLM's worker."""
    tree = ast.parse((ROLLOUT / "vllm" / "worker_extension.py").read_text(encoding="utf-8"))
    return [n.name for c in tree.body if isinstance(c, ast.ClassDef) for n in c.body if isinstance(n, ast.FunctionDef)]


def paths() -> list[str]:
    """Everything that a record of vLLM has an entry for."""
    found = {use.path for use in uses()} | set(BRANCHES)
    found |= {f"{WORKER}.{name}" for name in extension_methods()}
    found |= {f"{path}.{name}" for path, names in SEEING.items() for name in names}
    found |= {f"{WORKER}.{path.rpartition('.')[2]}" for path in found if path.startswith("vllm.LLM.")}
    found |= {f"{ENVIRONMENT}.{name}" for name in variables() if "ASCEND" not in name}
    values = said()
    return sorted(found | {f"{path}.{values[name]}" for path, name in VALUES.items()})


def ascend_paths() -> list[str]:
    """Everything that a record of vllm-ascend has an entry for: its worker stands in for vLLM's."""
    found = {ASCEND_WORKER + path.removeprefix(WORKER) for path in paths() if path.startswith(WORKER)}
    names = [name for name in variables() if "ASCEND" in name]
    return sorted(found | {f"vllm_ascend.envs.env_variables.{name}" for name in names})


def statements(package: Package, path: str) -> list[str]:
    """The statements of a function, without its documentation."""
    found = package.find(path)
    assert found is not None and isinstance(found.node, ast.FunctionDef), path
    body = found.node.body[ast.get_docstring(found.node) is not None :]
    return [ast.unparse(statement) for statement in body]


def read(name: str, package: Package) -> dict[str, Any]:
    """The record of a package, as it stands in its file."""
    names = ascend_paths() if name == "vllm_ascend" else paths()
    record = {"version": package.version(name), "names": {path: package.describe(path) for path in names}}
    if name == "vllm":
        record["slots"] = {path: statements(package, path) for path in SLOTS}
        record["experts"] = statements(package, EXPERTS)
    if name == "vllm_ascend":
        record["additional_config"] = sorted(option_names(package.roots[0] / name))
    return record


def main(name: str, *roots: str) -> None:
    record = read(name, Package(*map(Path, roots)))
    path = HERE / f"{name}-{record['version']}.json"
    lines = [f"    {json.dumps(key)}: {json.dumps(value)}" for key, value in record.pop("names").items()]
    head = "".join(f"  {json.dumps(key)}: {json.dumps(value)},\n" for key, value in record.items())
    path.write_text("{\n" + head + '  "names": {\n' + ",\n".join(lines) + "\n  }\n}\n", encoding="utf-8")
    print(f"{path}: {len(lines)} names")


if __name__ == "__main__":
    main(*sys.argv[1:])
