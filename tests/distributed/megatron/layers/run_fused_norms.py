"""Started by test_fused_norms.py: a trainer whose norms lie in its linear layers is the trainer with norms apart."""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.dict_utils import nested_values

from mega_rl import platform
from mega_rl.bridge.mapping.tensors import roles
from mega_rl.config.schema.device import Layers
from mega_rl.config.schema.learning import TuningConfig
from mega_rl.errors import InputError
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.parallel.layout import ParallelLayout
from tests.models import tiny_models
from tests.models.engine_support import build_engine, groups, loss_of, pack_for_rank, run_config, total_loss
from tests.models.layouts import Case
from tests.models.parity_reference import OBJECTIVES, make_sequences
from tests.pretended.transformer_engine import pretended_engine

OBJECTIVE = OBJECTIVES["rl"]
NORM_ROLES = ("input_layernorm", "post_attention_layernorm", "router_norm", "q_norm", "k_norm", "final_layernorm")


def build(case: Case, layout: ParallelLayout, directory: Path, layers: Layers, tuning: TuningConfig) -> MegatronEngine:
    config = run_config(case, OBJECTIVE)
    config.platform.layers, config.tuning = layers, tuning
    with nullcontext() if layers == "local" else pretended_engine():
        return build_engine(config, layout, directory, 2)


def keys_of_checkpoint(engine: MegatronEngine) -> set[str]:
    """Tensors and states of linear layers, by their global names."""
    state: Any = engine.policy.chunks[0].sharded_state_dict(metadata={"dp_cp_group": dist.group.WORLD})
    return {value.key for value in nested_values(state)}


def compare(case: Case, layout: ParallelLayout, directory: Path, family: str) -> None:
    apart, fused = (build(case, layout, directory, kind, TuningConfig()) for kind in ("local", "transformer_engine"))
    names = [name for chunk in fused.policy.chunks for name, _ in chunk.named_parameters()]
    is_dense = apart.policy.shape.mixture is None
    ends = {".linear_qkv.layer_norm_weight": True, ".mlp.linear_fc1.layer_norm_weight": is_dense}
    ends |= {".input_layernorm.weight": False, ".pre_mlp_layernorm.weight": not is_dense}
    assert {end: any(name.endswith(end) for name in names) for end in ends} == ends, names
    assert {name: p.shape for name, p in fused.policy.parameters.items()} == {
        name: p.shape for name, p in apart.policy.parameters.items()
    }
    assert keys_of_checkpoint(fused) == keys_of_checkpoint(apart)
    sequences = make_sequences(OBJECTIVE, tiny_models.vocab_size(family))
    microbatches, loss = pack_for_rank(case, layout, sequences), loss_of(OBJECTIVE, sequences)
    found = []
    for engine in (apart, fused):
        stats = engine.token_stats(microbatches)
        losses = total_loss(layout, engine.forward_backward(microbatches, loss))
        found.append((stats[0].logprobs, torch.tensor(losses), torch.tensor(engine.optimizer_step().grad_norm)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-6, atol=1e-6)
    assert float(found[0][2]) > 0
    for piece in apart.slices_of(dist.get_rank()):
        pair = (engine.policy.local(piece.local_name, piece.local_box) for engine in (fused, apart))
        torch.testing.assert_close(*pair, rtol=1e-5, atol=1e-6)
    norms = {name for name, role in roles(apart.policy.shape).items() if role in NORM_ROLES}
    masters = fused.master_weights(norms)
    assert masters.keys() == norms
    torch.testing.assert_close(masters, apart.master_weights(norms), rtol=1e-5, atol=1e-6)


def compare_frozen(case: Case, layout: ParallelLayout, directory: Path) -> None:
    """Norms that are trained beside the last layer: found by pattern, whichever their place."""
    tuning = TuningConfig(
        method="freeze", train_layers=1, also_train=["input_layernorm", "*.0.post_attention_layernorm.*"]
    )
    engines = [build(case, layout, directory, kind, tuning) for kind in ("local", "transformer_engine")]
    apart, fused = ({n for n, p in e.policy.parameters.items() if p.requires_grad} for e in engines)
    assert apart == fused and {f"decoder.layers.0.{n}_layernorm.weight" for n in ("input", "pre_mlp")} <= fused
    assert len(fused) < len(engines[0].policy.parameters)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True, help="a directory with one Hugging Face model per family")
    parser.add_argument("--case", type=json.loads, required=True, help="JSON of the arguments of Case")
    arguments = parser.parse_args()
    case = Case(**arguments.case)
    dist.init_process_group(platform.current().backend)
    with groups(case) as layout:
        for family in case.families:
            compare(case, layout, arguments.dir / family, family)
            if dist.get_rank() == 0:
                print(f"PASSED {family}")
        compare_frozen(case, layout, arguments.dir / case.families[0])
        try:
            config = run_config(case, OBJECTIVE)
            config.platform.layers = "transformer_engine"
            build_engine(config, layout, arguments.dir / case.families[0], 2)
        except InputError as error:
            if dist.get_rank() == 0:
                print(f"REFUSED {error}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
