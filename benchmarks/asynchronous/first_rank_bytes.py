"""How many bytes of a fleet's responses go through the trainer's rank 0, counted in what its own code packs.

    python -m benchmarks.asynchronous.first_rank_bytes [--prompt P] [--response R] [--responses N] [--json F]

With a trainer of one node every response comes to rank 0 from its engine, whole, and rank 0 hands what its rewards
need to a worker, and its tokens to one data-parallel rank. With several nodes its engine hands it to a rank of one of
them, and rank 0 is told of it. In mode in_flight its pieces come to rank 0 before. The mixture has 48 layers of
experts, of which 8 are chosen, and its routing is replayed. Nothing is sent: what would be is counted.
"""

from __future__ import annotations

import argparse
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.report import publish, table
from mega_rl.rewards.pool.node import Asked, submission
from mega_rl.rewards.pool.pool import pack
from mega_rl.rollout.collect.handed_trajectories import handed
from mega_rl.rollout.partial import piece_of
from mega_rl.types import Prompt, Trajectory

LAYERS, CHOSEN = 48, 8
TEXT = 4  # characters of a token


def response(num_prompt: int, num_tokens: int, is_mixture: bool) -> Trajectory:
    ids, chance = np.arange(num_tokens) % 100_000 + 256, np.random.default_rng(0)
    prompt = Prompt(0, tuple(range(256, 256 + num_prompt)), "t" * TEXT * num_prompt, "72", "gsm8k")
    logprobs = chance.standard_normal(num_tokens).astype(np.float32)
    values = prompt, 0, ids.tolist(), logprobs.tolist(), "t" * TEXT * num_tokens, "stop", 3
    found = Trajectory.single_turn(*values)
    if not is_mixture:
        return found
    routed = chance.integers(0, 128, (num_prompt + num_tokens - 1, LAYERS, CHOSEN), np.uint8)
    return replace(found, routed_experts=routed)


def bytes_of(trajectory: Trajectory) -> dict[str, int]:
    """By what they are sent for, where the trainer has one node and where it has several."""
    summary, prompt = trajectory.summary(), trajectory.prompt
    ids, logprobs = trajectory.sampled_ids.tolist(), trajectory.sampled_logprobs.tolist()
    piece = piece_of(0, ids, logprobs, trajectory.spans)
    sample = prompt.data_source, trajectory.text, prompt.ground_truth, {"prompt": prompt.text}, len(ids)
    whole, told = (len(pickle.dumps(one, protocol=5)) for one in (trajectory, handed(trajectory, 1, 10**6)))
    return {
        "one node: whole, from its engine": whole,
        "one node: to a worker that scores it": len(pack(sample)),
        "one node: to the rank that learns from it": summary.num_token_bytes + summary.num_routing_bytes,
        "several: what rank 0 is told of it": told,
        "several: to the node that scores it": len(submission(10**6, (), Asked(10**6))),
        "several: past rank 0, from its engine": whole,
        "both, in_flight: its pieces before": len(piece.token_ids) + len(piece.logprobs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", type=int, default=512, help="tokens (default: 512)")
    parser.add_argument("--response", type=int, default=8192, help="tokens (default: 8192)")
    parser.add_argument("--responses", type=int, default=8192, help="of a step (default: 8192)")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if min(options.prompt, options.response, options.responses) < 1:
        parser.error("give at least one token and one response")
    found = {
        name: bytes_of(response(options.prompt, options.response, is_mixture))
        for name, is_mixture in (("dense", False), ("mixture", True))
    }
    rows = [
        (
            what,
            *(f"{of[what]:,}" for of in found.values()),
            *(options.responses * of[what] / 1e9 for of in found.values()),
        )
        for what in found["dense"]
    ]
    header = [f"a response of {options.response:,} tokens", "dense, bytes", "mixture, bytes"]
    header += [f"{options.responses:,} of them, dense, GB", "mixture, GB"]
    publish("Bytes through rank 0", table(header, rows), "no device", {"rows": found}, options.json)


if __name__ == "__main__":
    main()
