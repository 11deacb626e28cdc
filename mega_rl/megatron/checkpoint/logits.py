"""Logits of a Megatron checkpoint against those of transformers, in one process: the last proof of a conversion."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from megatron.core import parallel_state
from torch import Tensor

from mega_rl import platform
from mega_rl.config.schema.sections import MemoryConfig, ParallelConfig
from mega_rl.megatron.checkpoint.reading import load_sharded
from mega_rl.megatron.model.context import local_input
from mega_rl.megatron.model.spec import TrainerSpec
from mega_rl.megatron.policy import MegatronPolicy, initialize_groups
from mega_rl.microbatch import Microbatch
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.layout import ParallelLayout

NUM_TOKENS = 24


@dataclass(frozen=True)
class LogitsDifference:
    """The difference on one random prompt, both models in float32; of a value model, that of its values."""

    num_tokens: int
    max_abs_difference: float
    max_abs_logit: float

    @property
    def relative(self) -> float:
        return self.max_abs_difference / max(self.max_abs_logit, 1e-30)


def compare_logits(shape: ModelShape, huggingface_dir: Path, weights_dir: Path) -> LogitsDifference:
    """Build both models, one after the other, and run the same prompt through them; needs a process of its own.

    Args:
        huggingface_dir: what transformers loads.
        weights_dir: what Megatron loads, in the torch_dist format.
    """
    generator = torch.Generator().manual_seed(0)
    token_ids_T = torch.randint(0, shape.vocab_size, (NUM_TOKENS,), generator=generator)
    with torch.no_grad():
        expected_TV = _transformers_logits(shape, huggingface_dir, token_ids_T)
        own_TV = _megatron_logits(shape, weights_dir, token_ids_T)
    difference = float((own_TV - expected_TV).abs().max())
    return LogitsDifference(NUM_TOKENS, difference, float(expected_TV.abs().max()))


def _transformers_logits(shape: ModelShape, directory: Path, token_ids_T: Tensor) -> Tensor:
    transformers.utils.logging.disable_progress_bar()
    options: dict[str, Any] = {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": False}
    if shape.head == "value":
        scorer = transformers.AutoModelForSequenceClassification.from_pretrained(directory, **options).eval()
        return scorer.score(scorer.model(token_ids_T[None]).last_hidden_state)[0].float()
    kind = transformers.AutoModelForImageTextToText if shape.tower else transformers.AutoModelForCausalLM
    model = kind.from_pretrained(directory, **options)
    return model.eval()(token_ids_T[None]).logits[0].float()


def _megatron_logits(shape: ModelShape, weights_dir: Path, token_ids_T: Tensor) -> Tensor:
    here = platform.current()
    device = here.set_device(0)
    store = dist.HashStore()  # one process: nobody to find
    dist.init_process_group(here.backend, store=store, rank=0, world_size=1)
    try:
        layout = ParallelLayout.create(1)
        initialize_groups(layout, seed=0)
        spec = TrainerSpec(torch.float32, ParallelConfig(), MemoryConfig(), temperature=1.0, chunk_tokens=NUM_TOKENS)
        policy = MegatronPolicy(spec, shape, layout, device)
        (model,) = policy.chunks
        model.load_state_dict(load_sharded({"model": model.sharded_state_dict()}, weights_dir)["model"])
        length = len(token_ids_T)
        microbatch = Microbatch(
            token_ids=token_ids_T,
            target_ids=torch.zeros_like(token_ids_T),
            position_ids=torch.arange(length),
            loss_mask=torch.ones(length),
            cu_seqlens=torch.tensor([0, length], dtype=torch.int32),
            max_seqlen=length,
            sequence_indices=(0,),
        ).to(device)
        local = local_input(microbatch, microbatch.cu_seqlens.tolist(), parallel_state.get_context_parallel_group(), 1)
        labels = local.target_ids if shape.head == "value" else None
        logits = model(local.token_ids, local.position_ids, None, packed_seq_params=local.packing, labels=labels)
        if shape.head == "value":
            return logits.t().float().cpu()
        return logits[0, :, : shape.vocab_size].float().cpu()
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
