"""Started by torchrun on two ranks: the trainer replays the experts of a real engine, which shares the ranks with it.

Prints ``FIGURES`` and one line of JSON per dtype: the largest and the mean difference of log-probabilities between
trainer and engine (nats) with and without replay, and in how many (token, layer) pairs the sets of experts differ.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from mega_rl import platform
from mega_rl.config.schema.sampling import RolloutConfig
from mega_rl.data.packing import pack, sequence_of
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.microbatch import Microbatch, TokenStats
from mega_rl.parallel.collectives import gather_objects
from mega_rl.platform.accelerator import HostDevice
from mega_rl.rollout.requests import make_requests
from mega_rl.rollout.vllm.engine import VLLMEngine
from mega_rl.types import Trajectory
from tests.models.engine_support import build_engine, groups, run_config
from tests.models.families import ENGINE
from tests.models.layouts import Case
from tests.models.parity_reference import OBJECTIVES
from tests.models.rollout_support import EOS, VOCAB, perturb, prompt, save

CASE, OBJECTIVE = Case(2, tensor=2, sequence=True), OBJECTIVES["rl"]
SIZES = {"num_hidden_layers": 4, "mlp_only_layers": [1], "num_experts": 32, "num_experts_per_tok": 4}
LONG = 300  # tokens of a prompt that fills two blocks of the prefix cache


def write_model(directory: Path) -> None:
    tokens = {"vocab_size": len(VOCAB), "eos_token_id": EOS, "bos_token_id": None, "pad_token_id": EOS}
    torch.manual_seed(0)
    model = ENGINE.new_model("qwen3_moe", **tokens, **SIZES, tie_word_embeddings=False)
    perturb(model, 0, 0.1)
    save(model, directory)


def sample(directory: Path, dtype: str) -> list[Trajectory]:
    """Twice the same prompts, so that the second time all prompts are in the prefix cache."""
    rollout = RolloutConfig(
        kv_cache_bytes=1 << 24, tensor_parallel_size=2, routing_replay="rollout", temperature=OBJECTIVE.temperature
    )
    engine = VLLMEngine(directory, rollout, max_model_len=384, device_type="cpu", dtype=dtype)
    prompts = [prompt(0, 5), prompt(1, LONG), prompt(2, 30)]
    keys = {"n": 2, "step": 0, "max_tokens": 24, "temperature": OBJECTIVE.temperature}
    found = [
        t for seed in (0, 1) for t in engine.generate(make_requests(prompts, seed=seed, with_routing=True, **keys))
    ]
    assert all(t.routed_experts is not None for t in found)
    (plain,) = engine.generate(make_requests(prompts[:1], seed=0, **{**keys, "n": 1}))
    assert plain.routed_experts is None, "routing that was not asked for"
    assert all(other == found for other in gather_objects(found)), "the engine's ranks return other trajectories"
    return found


def num_differing(trainer: TokenStats, microbatch: Microbatch) -> tuple[int, int]:
    """(token, layer) pairs of this rank with other sets of experts than the engine's, and all pairs."""
    assert microbatch.routed_experts is not None and trainer.own_experts is not None
    engine_NMK = microbatch.routed_experts.chunk(2)[dist.get_rank()].sort().values
    own_NMK = torch.stack([trainer.own_experts[layer] for layer in sorted(trainer.own_experts)], dim=1).sort().values
    is_known_N = (engine_NMK >= 0).all(-1).all(-1)
    return int((own_NMK != engine_NMK).any(-1)[is_known_N].sum()), int(is_known_N.sum()) * own_NMK.shape[1]


def compare(trainer: MegatronEngine, microbatch: Microbatch, is_replayed: bool) -> dict[str, float]:
    used = microbatch if is_replayed else microbatch.replace(routed_experts=None)
    (stats,) = trainer.token_stats([used], record_experts=True)
    assert microbatch.rollout_logprobs is not None
    gaps = (stats.logprobs - microbatch.rollout_logprobs).abs()[microbatch.loss_mask > 0]
    counts = gather_objects(num_differing(stats, microbatch))
    return {
        "largest": float(gaps.max()),
        "mean": float(gaps.mean()),
        "differing": sum(count for count, _ in counts),
        "pairs": sum(count for _, count in counts),
    }


def main() -> None:
    directory = Path(sys.argv[1])
    dist.init_process_group(platform.current().backend)
    # A run builds its trainer before vLLM's worker, which replaces streams on a CPU, is imported; here it is already.
    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = HostDevice.Stream()
    if dist.get_rank() == 0:
        write_model(directory)
    dist.barrier()
    with groups(CASE) as layout:
        for dtype in ("float32", "bfloat16"):
            trainer = build_engine(run_config(CASE, OBJECTIVE, dtype), layout, directory, 1)
            trajectories = sample(directory, dtype)
            sequences = [sequence_of(t, 0.0) for t in trajectories]
            microbatch = pack(sequences, list(range(len(sequences)))[::-1], pad_to_multiple=8, pad_token_id=EOS)
            figures = {name: compare(trainer, microbatch, name == "replayed") for name in ("replayed", "free")}
            if dist.get_rank() == 0:
                print(f"FIGURES {json.dumps({'dtype': dtype, **figures})}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
