"""Tiny vision-language models as directories: weights, tokenizer, chat template and image processor, all of our own."""

from __future__ import annotations

import json
from pathlib import Path

import safetensors.torch
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.models import families

MARK = "<|vision_start|><|image_pad|><|vision_end|>"
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
VIDEO = "<|video_pad|>"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% if message.content is string %}"
    "{{ message.content }}{% else %}{% for part in message.content %}{% if part.type == 'image' %}"
    + MARK
    + "{% else %}"
    "{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATCH, MERGE = 4, 2
TOWERS = {
    "qwen2_5_vl": families.QWEN2_5_TOWER,
    "qwen3_vl": families.QWEN3_TOWER,
    "qwen3_vl_moe": families.QWEN3_TOWER,
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=[*SPECIAL, VIDEO],
    )
    fast.chat_template = TEMPLATE
    return fast


def write(directory: Path, family: str, for_engine: bool = False, tied: bool = False) -> Path:
    """A float32 model with its files; ``for_engine``: with heads that vLLM takes on a CPU, and all that it reads."""
    own = tokenizer()
    ids = {name: own.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    is_third = family.startswith("qwen3_vl")
    sections = [3, 3, 2] if is_third else [2, 3, 3]
    sizes: dict[str, object] = {"head_dim": 16}
    if for_engine:
        sections, sizes = [2 * size for size in sections], {"head_dim": 32, "hidden_size": 128}
    text = {
        **families.TRAINER.common,
        **sizes,
        "tie_word_embeddings": tied,
        **({**families.EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]} if family.endswith("_moe") else {}),
        "vocab_size": len(own),
        "num_hidden_layers": 4 if for_engine else 3,  # pipeline stages divide 4
        "max_position_embeddings": 1024,
        "rope_parameters": families.three_axes(sections, **({"mrope_interleaved": True} if is_third else {})),
        "bos_token_id": None,
        "eos_token_id": own.eos_token_id,
        "pad_token_id": own.pad_token_id,
    }
    torch.manual_seed(0)
    model = families.new_model(
        family,
        {
            "text_config": text,
            "vision_config": {**TOWERS[family], "out_hidden_size": text["hidden_size"]},
            "tie_word_embeddings": tied,
            "image_token_id": own.convert_tokens_to_ids("<|image_pad|>"),
            "video_token_id": own.convert_tokens_to_ids(VIDEO),
            **{f"{name}_token_id": number for name, number in ids.items()},
        },
    )
    model.save_pretrained(directory)
    if family.endswith("_moe"):
        _order_as_the_hub(directory / "model.safetensors")
    own.save_pretrained(directory)
    processor = {
        "image_processor_type": "Qwen2VLImageProcessorPil",
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": 4 * (PATCH * MERGE) ** 2, "longest_edge": 64 * (PATCH * MERGE) ** 2},
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(processor))
    if for_engine:
        kind, video = ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor")
        if is_third:
            kind, video = ("Qwen3VLProcessor", "Qwen3VLVideoProcessor")
        hub = {**processor, "processor_class": kind, "image_processor_type": "Qwen2VLImageProcessor"}
        (directory / "preprocessor_config.json").write_text(json.dumps(hub))
        (directory / "video_preprocessor_config.json").write_text(
            json.dumps({**processor, "processor_class": kind, "video_processor_type": video})
        )
    return directory


def _order_as_the_hub(file: Path) -> None:
    """Experts as [experts, columns, rows], which engines read; transformers 5 writes the other order."""
    tensors = safetensors.torch.load_file(file)
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
