"""Started by torchrun on the CPU, or on device npu: the same training, written down.

Rank 0 writes what is found of every family into ``--out``: token statistics, loss and gradient norm of every step, the
weights of every rank after the last one, and how often each operator ran on device npu, and each function of MindSpeed.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from mega_rl import platform
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.layout import ParallelLayout
from tests.host_reads import HostReads
from tests.models import tiny_models
from tests.models.engine_support import build_engine, groups, loss_of, pack_for_rank, run_config, total_loss
from tests.models.layouts import Case
from tests.models.parity_reference import OBJECTIVES, make_sequences
from tests.npu.figures import NUM_STEPS, Figures


def operator_counts() -> dict[str, int]:
    """Since the process began; {} on the CPU."""
    if platform.current().name == "cpu":
        return {}
    from tests.npu import kernels

    return dict(kernels.counts)


def train(case: Case, layout: ParallelLayout, family: str, objective_name: str, dtype: str, directory: Path) -> Figures:
    objective = OBJECTIVES[objective_name]
    engine = build_engine(run_config(case, objective, dtype), layout, directory, NUM_STEPS)
    sequences = make_sequences(objective, tiny_models.vocab_size(family))
    microbatches, loss_function = pack_for_rank(case, layout, sequences), loss_of(objective, sequences)
    stats = engine.token_stats(microbatches)
    figures = Figures(gather_objects([s.logprobs.cpu() for s in stats]), num_microbatches=len(microbatches))
    figures.has_mindspeed = "mindspeed.megatron_adaptor" in sys.modules
    before = operator_counts()
    for _ in range(NUM_STEPS):
        figures.losses.append(total_loss(layout, engine.forward_backward(microbatches, loss_function)))
        step = engine.optimizer_step()
        assert not step.skipped, step
        figures.norms.append(step.grad_norm)
    figures.operators = {name: count - before.get(name, 0) for name, count in operator_counts().items()}
    on_host = [microbatch.to(torch.device("cpu")) for microbatch in microbatches]
    with HostReads() as reads:
        engine.forward_backward(on_host, loss_function)
    figures.host_reads = dict(reads.counts)
    own = {name: p.detach().to("cpu", copy=True) for name, p in engine.policy.parameters.items()}
    figures.weights = gather_objects(own)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", type=Path, required=True, help="a directory with one Hugging Face model per family")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--case", type=json.loads, required=True, help="JSON of the arguments of Case")
    arguments = parser.parse_args()
    dist.init_process_group(platform.current().backend)
    case = Case(**arguments.case)
    with groups(case) as layout:
        found = {
            (family, dtype): asdict(train(case, layout, family, objective, dtype, arguments.models / family))
            for family in case.families
            for objective, dtype in (("rl", "float32"), ("sft", "bfloat16"))
        }
    if dist.get_rank() == 0:
        torch.save(found, arguments.out)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
