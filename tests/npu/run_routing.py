"""Started as ``run_routing.py FOLDER RESULT``: trainer and engine on device npu choose experts for the same tokens.

Writes into RESULT, as JSON, ``figures.Routing`` of each dtype.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl import platform
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.data.packing import pack, sequence_of
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.layers.routing import Router
from mega_rl.microbatch import Microbatch
from mega_rl.rollout.requests import make_requests
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.types import Trajectory
from tests.distributed.megatron.layers.run_routing_engine import write_model
from tests.models.engine_support import build_engine, groups, own_device, run_config
from tests.models.layouts import Case
from tests.models.parity_reference import OBJECTIVES
from tests.models.rollout_support import EOS, prompt
from tests.npu.figures import Routing

VLLM = {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "max_num_seqs": 16, "enable_sleep_mode": False}
TEMPERATURE = 0.7  # of ``run_config``


def sample(directory: Path, dtype: str) -> list[Trajectory]:
    rollout = RolloutConfig(kv_cache_bytes=1 << 24, routing_replay="rollout", temperature=TEMPERATURE, vllm=VLLM)
    engine = VLLMEngine(directory, rollout, max_model_len=384, device_type="npu", dtype=dtype)
    prompts = [prompt(0, 5), prompt(1, 300), prompt(2, 30)]
    keys = {"n": 1, "step": 0, "seed": 0, "max_tokens": 16, "temperature": TEMPERATURE}
    return engine.generate(make_requests(prompts, with_routing=True, **keys))


def logits_of_routers(trainer: MegatronEngine, microbatch: Microbatch) -> tuple[Tensor, Tensor]:
    """Of one pass: log-probabilities [T], and what each router's scores are made of, [tokens, layers, experts]."""
    logits: list[Tensor] = []
    gating = Router.gating

    def record(self: Router, hidden: Tensor) -> Tensor:
        found = gating(self, hidden)
        logits.append(found.detach().float().cpu().flatten(0, -2))
        return found

    Router.gating = record  # type: ignore[method-assign]
    try:
        (stats,) = trainer.token_stats([microbatch])
    finally:
        Router.gating = gating  # type: ignore[method-assign]
    return stats.logprobs.cpu(), torch.stack(logits, dim=1)


def compare(trainer: MegatronEngine, microbatch: Microbatch) -> Routing:
    assert microbatch.routed_experts is not None and microbatch.rollout_logprobs is not None
    engine_NMK = microbatch.routed_experts.long().cpu()
    known_N, learnt_T = (engine_NMK >= 0).all(-1).all(-1), microbatch.loss_mask.cpu() > 0
    gaps, differing = {}, {}
    for name, used in (("replayed", microbatch), ("free", microbatch.replace(routed_experts=None))):
        logprobs_T, logits_NME = logits_of_routers(trainer, used)
        gaps[name] = (logprobs_T - microbatch.rollout_logprobs.cpu()).abs()[learnt_T]
        best = logits_NME.topk(engine_NMK.shape[-1] + 1, -1)
        own_NMK = best.indices[..., :-1]
        differing[name] = (own_NMK.sort().values != engine_NMK.sort().values).any(-1) & known_N[:, None]
        if name == "replayed":  # the routers see what the engine's saw, but for rounding
            least_NM = logits_NME.gather(-1, engine_NMK.clamp(min=0)).amin(-1)
            missed = (best.values[..., -2] - least_NM)[differing[name]]
            margins = (best.values[..., -2] - best.values[..., -1])[known_N]
    return Routing(
        pairs=int(known_N.sum()) * engine_NMK.shape[1],
        differing={name: int(where.sum()) for name, where in differing.items()},
        missed=float(missed.max()) if len(missed) else 0.0,
        margin=float(margins.median()),
        largest={name: float(gap.max()) for name, gap in gaps.items()},
        mean={name: float(gap.mean()) for name, gap in gaps.items()},
    )


def main() -> None:
    directory, result = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group(platform.current().backend)
    write_model(directory)
    found, objective, case = {}, OBJECTIVES["rl"], Case(1)
    with groups(case) as layout:
        for dtype in ("float32", "bfloat16"):
            trainer = build_engine(run_config(case, objective, dtype), layout, directory, 1)
            sequences = [sequence_of(t, advantage=0.0) for t in sample(directory, dtype)]
            microbatch = pack(sequences, list(range(len(sequences))), pad_to_multiple=8, pad_token_id=EOS)
            found[dtype] = asdict(compare(trainer, microbatch.to(own_device())))
    result.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
