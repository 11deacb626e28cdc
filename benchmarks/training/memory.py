"""The memory plan of ``tools/plan.py`` against the bytes that Megatron-core really holds, on two CPU ranks.

    torchrun --nproc-per-node 2 -m benchmarks.training.memory [--quick] [--json PATH]

For every case an engine is built and trained for one step. State is the size of its buffers and optimizer tensors on
each rank, which the plan must meet exactly. Activations are the storages that live between the beginning of the forward
pass and the end of the backward pass and were made in between, counted after every operator: "kept" at the moment when
the loss of the first micro-batch is known (without pipeline stages), "peak" at the fullest moment, "forward" at that of
log-probabilities without gradients. Shown is the rank that the plan misses most. Storage that an operator takes and
gives back inside is not seen.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.report import publish, table
from mega_rl import platform
from mega_rl.bridge.files.huggingface import HFReader
from mega_rl.bridge.mapping.tuning import tuning_plan
from mega_rl.config.schema.sections import RunConfig
from mega_rl.data.packing import pack
from mega_rl.megatron.engine import MegatronEngine, Optimization
from mega_rl.megatron.model.spec import TrainerSpec
from mega_rl.megatron.optim.optimizer import chained
from mega_rl.megatron.policy import MegatronPolicy, destroy_groups, initialize_groups
from mega_rl.microbatch import Figures, Microbatch, Sequence, TokenStats
from mega_rl.models.shape import read_model_shape
from mega_rl.parallel.collectives import gather_objects
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.planning.activations import ActivationModel, PlannedTokens
from mega_rl.planning.state import TrainerState, stage_parameters, trainer_state
from mega_rl.platform.operators.memory import OPERATOR_MEMORY
from mega_rl.types import DTYPES

NUM_RANKS = 2
ACTIVATIONS = ("kept", "peak", "forward")
PEAK_TOLERANCE = 0.002  # relative: counting what lives takes long
SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 768,
    "vocab_size": 2001,  # is padded for two tensor-parallel ranks
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("Qwen2", {"tie_word_embeddings": True}),
    "dense norms": ("Qwen3", {"tie_word_embeddings": False}),
    "experts": ("Qwen3Moe", {"tie_word_embeddings": False, **EXPERTS}),
    "shared expert": ("Qwen2Moe", {"tie_word_embeddings": True, "shared_expert_intermediate_size": 256, **EXPERTS}),
}


@dataclass(frozen=True)
class Case:
    model: str  # one of ``MODELS``
    keys: dict[str, Any] = field(default_factory=dict)  # of the configuration
    lengths: tuple[int, ...] = (512, 512)  # tokens of the sequences of a micro-batch
    num_microbatches: int = 1

    @property
    def name(self) -> str:
        keys = [f"{key.partition('.')[2]}={value}" for key, value in self.keys.items()]
        lengths = f"{len(self.lengths)}x{self.lengths[0]} tokens"
        return ", ".join([self.model, *keys, lengths] + [f"{self.num_microbatches} micro-batches"] * self.in_turn)

    @property
    def in_turn(self) -> bool:
        return self.num_microbatches > 1


TENSOR = {"parallel.tensor": 2, "parallel.sequence": True}
ULYSSES = {"parallel.context": 2, "parallel.context_method": "ulysses"}
STAGES = {"parallel.pipeline": 2}
CHUNKS = {**STAGES, "parallel.virtual_pipeline": 2}
QUICK = [
    Case("dense", TENSOR),
    Case("dense", {**STAGES, "model.dtype": "bfloat16"}, num_microbatches=4),
    Case("dense norms", {"parallel.context": 2}),
    Case("dense norms", ULYSSES),
    Case("dense norms", {**CHUNKS, "memory.recompute": "full"}, num_microbatches=4),
    Case("experts", {"parallel.expert": 2, "model.dtype": "bfloat16"}),
    Case("experts", {**TENSOR, "memory.recompute": "selective"}),
]
CASES = [
    Case("dense", {}),
    Case("dense", {}, (2048,)),
    Case("dense", {"model.dtype": "bfloat16"}, (1024,)),
    Case("dense", {"memory.recompute": "selective"}),
    Case("dense", {"memory.recompute": "selective", "memory.recompute_modules": ["core_attn", "mlp"]}),
    Case("dense", {"memory.recompute": "full"}),
    Case("dense", {"memory.recompute": "full"}, (2048,)),
    Case("dense", {"memory.recompute": "full", "memory.recompute_num_layers": 2}),
    Case("dense", TENSOR),
    Case("dense", {"parallel.tensor": 2}),
    Case("dense", {**TENSOR, "memory.recompute": "full", "model.dtype": "bfloat16"}, (2048,)),
    Case("dense", STAGES, num_microbatches=4),
    Case("dense", {**STAGES, "model.dtype": "bfloat16"}, num_microbatches=4),
    Case("dense norms", {}),
    Case("dense norms", {"model.dtype": "bfloat16", "parallel.overlap_grad_reduce": True}),
    Case("dense norms", CHUNKS, num_microbatches=4),
    Case("dense norms", {**CHUNKS, "memory.recompute": "full"}, num_microbatches=4),
    Case("dense norms", {"parallel.context": 2}),
    Case("dense norms", {"parallel.context": 2, "model.dtype": "bfloat16"}, (1024, 1024)),
    Case("dense norms", ULYSSES),
    Case("dense", {**ULYSSES, "model.dtype": "bfloat16"}, (1024, 1024)),
    Case("experts", {}),
    Case("experts", {"model.dtype": "bfloat16"}, (1024,)),
    Case("experts", {"memory.recompute": "selective"}),
    Case("experts", {"memory.recompute": "full"}),
    Case("experts", {"parallel.expert": 2}),
    Case("experts", {"parallel.expert": 2, "model.dtype": "bfloat16"}),
    Case("experts", TENSOR),
    Case("experts", {**TENSOR, "memory.recompute": "selective"}),
    Case("experts", {**TENSOR, "parallel.expert": 2, "parallel.expert_tensor": 1}),
    Case("experts", {**STAGES}, num_microbatches=2),
    Case("shared expert", {}),
    Case("shared expert", {"parallel.expert": 2, "memory.recompute": "full"}),
]


class LiveBytes(TorchDispatchMode):
    """Bytes of the storages that were made inside of it and still live; a view or an update in place makes none."""

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._bound = 0  # bytes at the last count, and all that were made since
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {tensor.untyped_storage()._cdata for tensor in _tensors((args, kwargs))}
        result = function(*args, **(kwargs or {}))
        found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in _tensors(result)}
        made = {key: storage for key, storage in found.items() if key not in before}
        self._storages |= {key: (StorageWeakRef(storage), storage.nbytes()) for key, storage in made.items()}
        self._bound += sum(storage.nbytes() for storage in made.values())
        if self._bound > self.peak * (1 + PEAK_TOLERANCE):
            self.peak = max(self.peak, self.now())
        return result

    def now(self) -> int:
        self._storages = {key: entry for key, entry in self._storages.items() if not entry[0].expired()}
        self._bound = sum(size for _, size in self._storages.values())
        return self._bound


def _tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


def write_model(name: str, directory: Path) -> None:
    family, more = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**SIZES, **more)
    torch.manual_seed(0)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(directory / name)


def run_config(case: Case, directory: Path) -> RunConfig:
    config = RunConfig()
    config.model.path, config.model.dtype, config.trainer.stage = str(directory / case.model), "float32", "sft"
    for key, value in case.keys.items():
        section, _, name = key.partition(".")
        setattr(getattr(config, section), name, value)
    return config


@contextmanager
def groups(config: RunConfig) -> Iterator[ParallelLayout]:
    """Megatron's process groups for one case; the process may use others afterwards."""
    layout = ParallelLayout.of(config.parallel, NUM_RANKS)
    initialize_groups(layout, seed=0)
    yield layout
    dist.barrier()
    destroy_groups()


def make_microbatches(case: Case, layout: ParallelLayout, vocab_size: int) -> list[Microbatch]:
    generator = torch.Generator().manual_seed(layout.coordinates(dist.get_rank()).data)

    def sequence(length: int) -> Sequence:
        ids = torch.randint(0, vocab_size, (length + 1,), generator=generator)
        return Sequence(token_ids=ids, loss_mask=torch.ones(length))

    sequences = [sequence(length) for length in case.lengths]
    indices = list(range(len(sequences)))
    return [pack(sequences, indices, layout.tensor, 0) for _ in range(case.num_microbatches)]


def measured_state(engine: MegatronEngine) -> dict[str, int]:
    """Bytes of the tensors themselves; after a step, for Adam makes its moments with the first one."""
    buffers = [b for chunk in engine.wrapped for b in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    weights = {b.param_data.untyped_storage().data_ptr() for b in buffers}
    masters = moments = 0
    for part in chained(engine.optimizer):
        for group in part.optimizer.param_groups:
            shares = [p.data for p in group["params"]]
            masters += _size(share for share in shares if share.untyped_storage().data_ptr() not in weights)
            states = [part.optimizer.state[p] for p in group["params"]]
            moments += _size(value for state in states for value in state.values() if torch.is_tensor(value))
    return {
        "weights": _size(b.param_data for b in buffers),
        "reference": _size(engine.policy.parameters.values()),
        "gradients": _size(b.grad_data for b in buffers),
        "masters": masters,
        "moments": moments,
    }


def _size(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def measure(case: Case, directory: Path) -> list[dict[str, dict[str, int]]]:
    """What the plan says and what is there, of every rank."""
    config = run_config(case, directory)
    shape = read_model_shape(config.model.path)
    rank = dist.get_rank()
    with groups(config) as layout:
        spec = TrainerSpec(
            DTYPES[config.model.dtype],
            config.parallel,
            config.memory,
            1.0,
            chunk_tokens=1024,
            entropy_has_gradient=False,
        )
        policy = MegatronPolicy(spec, shape, layout, torch.device("cpu"))
        engine = MegatronEngine(policy, HFReader(config.model.path), Optimization(config.optimizer, 10))
        stage = layout.coordinates(rank).pipeline
        microbatches = make_microbatches(case, layout, shape.vocab_size)
        live, forward, kept = LiveBytes(), LiveBytes(), list[int]()

        def loss(stats: TokenStats, microbatch: Microbatch) -> tuple[Tensor, Figures]:
            kept.append(live.now())
            return -(stats.logprobs * microbatch.loss_mask).sum() / microbatch.num_tokens, Figures()

        with live:
            engine.forward_backward(microbatches, loss)
        with forward:
            engine.token_stats(microbatches)
        engine.optimizer_step()
        if rank == 0:
            print(case.name, file=sys.stderr, flush=True)
        tokens = PlannedTokens(sum(case.lengths), max(case.lengths), case.num_microbatches)
        planned = ActivationModel(config, shape, layout, OPERATOR_MEMORY["cpu"], tokens).of_stage(stage)
        held = stage_parameters(config, shape, layout, stage, tuning_plan(config.tuning, shape))
        state: TrainerState = trainer_state(config, layout, rank, held, has_reference=True)
        own = {
            "planned": {name: getattr(state, name) for name in measured_state(engine)},
            "measured": measured_state(engine),
        }
        own["planned"] |= {"peak": planned.training, "forward": planned.forward_only}
        own["measured"] |= {"peak": live.peak, "forward": forward.peak}
        if kept and layout.pipeline == 1:
            own["planned"] |= {"kept": planned.kept}
            own["measured"] |= {"kept": kept[0]}
        return gather_objects(own)


def error(rank: dict[str, dict[str, int]], name: str) -> float:
    """Relative, positive where the plan says more than there is."""
    return rank["planned"][name] / rank["measured"][name] - 1


def row(case: Case, ranks: list[dict[str, dict[str, int]]]) -> list[Any]:
    cells: list[Any] = [case.name]
    states = [name for name in ranks[0]["measured"] if name not in ACTIVATIONS]
    differing = [name for rank in ranks for name in states if rank["planned"][name] != rank["measured"][name]]
    total = sum(rank["measured"][name] for rank in ranks for name in states if name != "reference")
    cells += [f"{total / 2**20:.1f}", "equal" if not differing else f"{', '.join(differing)} differ"]
    for name in ACTIVATIONS:
        if name not in ranks[0]["measured"]:
            cells += ["", "", ""]
            continue
        worst = max(ranks, key=lambda rank: abs(error(rank, name)))
        sizes = (worst[side][name] / 2**20 for side in ("measured", "planned"))
        cells += [*(f"{size:.1f}" for size in sizes), f"{error(worst, name):+.1%}"]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a few cases that cover every axis")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    platform.select("cpu")
    dist.init_process_group("gloo")
    assert dist.get_world_size() == NUM_RANKS, f"start it with --nproc-per-node {NUM_RANKS}"
    cases = QUICK if options.quick else CASES
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(gather_objects(scratch)[0])
        if dist.get_rank() == 0:
            for name in {case.model for case in cases}:
                write_model(name, directory)
        dist.barrier()
        results = [(case, measure(case, directory)) for case in cases]
        dist.barrier()
    if dist.get_rank() == 0:
        header = ["case", "state MiB", "plan"]
        header += [title for name in ACTIVATIONS for title in (f"{name} MiB", "planned", "error")]
        figures = [{"case": case.name, **asdict(case), "ranks": ranks} for case, ranks in results]
        text = table(header, [row(case, ranks) for case, ranks in results])
        publish("Memory plan", text, "cpu", {"results": json.loads(json.dumps(figures))}, options.json)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
