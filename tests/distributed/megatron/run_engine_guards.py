"""Started by torchrun: what becomes of a training step where one guard against a silent wrong result is taken away.

Prints one line of JSON after ``GUARD`` per guard and state on rank 0: the errors against transformers after one step.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from mega_rl import platform
from mega_rl.bridge.slices import indices
from mega_rl.config.schema.learning import RouterConfig
from mega_rl.megatron import policy
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.megatron.model import transformer
from mega_rl.microbatch import Microbatch, Sequence
from tests.distributed.megatron.run_engine_parity import (
    Errors,
    compare_gradients,
    reference_of,
    router_losses,
    save_references,
    sequences_of,
)
from tests.models import tiny_models
from tests.models.engine_support import build_engine, groups, loss_of, pack_for_rank, run_config, total_loss
from tests.models.layouts import EVEN_TOKENS, GUARDS, Case
from tests.models.parity_reference import OBJECTIVES, Reference, train


@contextmanager
def counted_tokens() -> Iterator[None]:
    """Megatron is told the number of learnt tokens, and divides by what it makes of them."""

    def count(microbatch: Microbatch) -> Tensor:
        return microbatch.loss_mask.sum().int()

    with mock.patch.object(policy, "token_count", count):
        yield


@contextmanager
def running_positions() -> Iterator[None]:
    """Positions are those within this rank's tokens: Megatron's rotary table by itself never looks at position_ids."""
    original = policy.local_input

    def local_input(*arguments: Any) -> Any:
        local = original(*arguments)
        num_tokens = local.token_ids.numel()
        local.packing.max_seqlen_q = local.packing.max_seqlen_kv = num_tokens
        return dataclasses.replace(local, position_ids=torch.arange(num_tokens)[None])

    with mock.patch.object(policy, "local_input", local_input):
        yield


@contextmanager
def unmarked_experts() -> Iterator[None]:
    with mock.patch.object(transformer, "mark_experts", lambda chunk: None):
        yield


def ungathered_weights(engine: MegatronEngine) -> None:
    engine.gathers_late = False


def batched(engine: MegatronEngine) -> None:
    config = engine.policy.chunks[0].config
    config.batch_p2p_comm, config.overlap_p2p_comm = True, False


AROUND: dict[str, Callable[[], Any]] = {
    "token_count": counted_tokens,
    "positions": running_positions,
    "experts": unmarked_experts,
}
AFTER: dict[str, Callable[[MegatronEngine], None]] = {
    "gathered_weights": ungathered_weights,
    "single_messages": batched,
}


def even_reference(family: str) -> tuple[list[Sequence], Reference]:
    """Micro-batches of the same size, four of them: a message that takes another one's place then fits there."""
    generator = torch.Generator().manual_seed(4)
    length = EVEN_TOKENS // 2 - 1  # two sequences and a tail of two tokens
    ids = torch.randint(0, tiny_models.vocab_size(family), (8, length + 1), generator=generator)
    sequences = [Sequence(row, torch.ones(length), torch.ones(length)) for row in ids]
    return sequences, train(tiny_models.make(family), sequences, OBJECTIVES["sft"])


def errors_of_a_step(case: Case, guard: str | None, directory: Path) -> dict[str, tuple[float, str]]:
    objective, (family,) = OBJECTIVES["sft"], case.families
    if case.max_tokens == EVEN_TOKENS:
        sequences, reference = even_reference(family)
    else:
        sequences, reference = sequences_of(family, "sft"), reference_of(family, "sft", directory)
    errors = Errors()
    config = run_config(case, objective)
    if case.max_tokens != EVEN_TOKENS:
        config.router = RouterConfig(**dataclasses.asdict(router_losses(family, "sft")))  # as the reference has it
    with groups(case) as layout:
        engine = build_engine(config, layout, directory / family, 1)
        if guard in AFTER:
            AFTER[guard](engine)
        step = reference.steps[0]
        reports = engine.forward_backward(pack_for_rank(case, layout, sequences), loss_of(objective, sequences))
        errors.note("loss", abs(total_loss(layout, reports) - step.loss) / abs(step.loss))
        compare_gradients(engine, step.gradients, errors)
        errors.note("norm", abs(engine.optimizer_step().grad_norm - step.norm) / step.norm)
        for piece in engine.slices_of(dist.get_rank()):
            value = engine.policy.local(piece.local_name, piece.local_box)
            expected = reference.first_weights[piece.hf_name][indices(piece.hf_box)]
            errors.note("weights", float((value - expected).abs().max()), piece.local_name)
        return errors.of_all_ranks()


def keeps_outputs(directory: Path) -> bool:
    """The one guard whose absence cannot be shown here: giving up pipeline outputs while they may still be sent.

    With outputs overwritten as soon as they were given up, and one rank 50 ms late in every exchange, this layout's
    figures stayed exact: by then gloo had these small messages. So only the setting is looked at.
    """
    case = GUARDS["single_messages"]
    with groups(case) as layout:
        engine = build_engine(run_config(case, OBJECTIVES["sft"]), layout, directory / case.families[0], 1)
        return not engine.policy.chunks[0].config.deallocate_pipeline_outputs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    arguments = parser.parse_args()
    dist.init_process_group(platform.current().backend)
    save_references(sorted({family for case in GUARDS.values() for family in case.families}), arguments.dir)
    for name, case in GUARDS.items():
        for guard in (None, name):
            with AROUND[name]() if guard in AROUND else mock.patch.dict({}):
                figures = errors_of_a_step(case, guard, arguments.dir)
            if dist.get_rank() == 0:
                line = {"guard": name, "is_there": guard is None, "errors": figures}
                print(f"GUARD {json.dumps(line)}", flush=True)
    is_kept = keeps_outputs(arguments.dir)
    if dist.get_rank() == 0:
        print(f"KEEPS {json.dumps(is_kept)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
