"""vLLM's classes of the models that the tests' engines load: imported, and registered as classes.

vLLM looks at a class that it knows by name alone in a process of its own, in every rank until one has written down
what it found: half a minute of imports on a machine where no engine has run yet.
"""

from __future__ import annotations

from importlib import import_module

from vllm import ModelRegistry

CLASSES = {
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}

for module, name in CLASSES.items():
    ModelRegistry.register_model(name, getattr(import_module(f"vllm.model_executor.models.{module}"), name))
