"""Weights, gradients and optimizer state of every rank, exactly as Megatron-core's buffers hold them.

Parameters that are reduced together lie in one flat buffer, one for the experts and one for everything else of a model
chunk. The distributed optimizer cuts the buffer, bucket by bucket, into equal shares of its data-parallel ranks
(ZeRO, arXiv 1910.02054); who owns how much follows from where the parameters lie in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from mega_rl.bridge.files.torch_dist.torch_dist_layout import padded_keys
from mega_rl.bridge.mapping.adapter import adapter_series
from mega_rl.bridge.mapping.megatron import chunk_series, padded_vocab_size
from mega_rl.bridge.mapping.tower import TRAINER_PREFIX
from mega_rl.bridge.mapping.tuning import TuningPlan
from mega_rl.bridge.series import Series, slices_of
from mega_rl.config.schema.sections import RunConfig
from mega_rl.models.shape import ModelShape
from mega_rl.parallel.layout import ParallelLayout
from mega_rl.platform.transfers import NUM_SLOTS, WINDOW_ELEMENTS
from mega_rl.types import DTYPES

START_MULTIPLE = 64  # elements; a parameter begins at a multiple of it
BUCKET_MULTIPLE = 128  # elements; a bucket ends at a multiple of it and of the ranks that share it
MIN_BUCKET, BUCKET_PER_RANK = 40_000_000, 1_000_000  # elements, when gradients are reduced piece by piece
# The order in which Megatron's modules register their parameters, by what their names in a layer begin with.
ORDER = (
    "input_layernorm",
    "self_attention.linear_proj",
    "self_attention.linear_q",  # linear_qkv, or latent attention's q_proj, q_down_proj and q_up_proj
    "self_attention.linear_kv",
    "self_attention.q_layernorm",
    "self_attention.k",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.experts",
    "mlp.shared_experts.gate_weight",
    "mlp.shared_experts",
    "mlp.linear",
)


@dataclass(frozen=True)
class Parameter:
    name: str
    kind: str  # embedding | output | attention | mlp | experts | norms and router | adapters | vision tower
    num_elements: int
    is_shared_embedding: bool = False  # tied, with the other copy on another pipeline stage
    is_expert: bool = False
    is_trained: bool = True  # a frozen one lies in no buffer


@dataclass(frozen=True)
class Buffer:
    """Parameters in the order of registration, and the ranks that share their optimizer state."""

    parameters: tuple[Parameter, ...]
    num_shares: int  # data-parallel ranks, context-parallel ones included
    bucket_elements: int | None  # a bucket closes when it has so many; None: one bucket

    @cached_property
    def _placed(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Where parameters and buckets begin and end."""
        places: list[tuple[int, int]] = []
        buckets: list[tuple[int, int]] = []
        first = end = 0

        def close() -> int:
            nonlocal first
            buckets.append((first, _round_up(end, math.lcm(self.num_shares, BUCKET_MULTIPLE))))
            first = buckets[-1][1]
            return first

        for parameter in reversed(self.parameters):  # as the backward pass comes to them
            start = _round_up(end, START_MULTIPLE)
            if parameter.is_shared_embedding and start > first:
                end = start
                start = close()
            end = start + parameter.num_elements
            places.append((start, end))
            is_full = self.bucket_elements is not None and end - first >= self.bucket_elements
            if is_full or parameter.is_shared_embedding:
                end = close()
        if end > first:
            close()
        return places, buckets

    @property
    def num_elements(self) -> int:
        """Elements with the padding between parameters and at the ends of buckets."""
        return self._placed[1][-1][1] if self.parameters else 0

    def owned(self, share: int) -> list[int]:
        """Elements of every parameter piece whose optimizer state is in one rank's share."""
        places, buckets = self._placed
        pieces = []
        for start, end in buckets:
            size = (end - start) // self.num_shares
            low, high = start + share * size, start + (share + 1) * size
            pieces += [n for a, b in places if (n := min(b, high) - max(a, low)) > 0]
        return pieces


@dataclass(frozen=True)
class UpdateMemory:
    """Bytes that an optimizer step takes on the device besides the state that is there, for its largest window."""

    windows: int = 0  # of state that is on the host otherwise
    rounding: int = 0  # float32 copies of bfloat16 moments, and the bits that they are rounded with


@dataclass(frozen=True)
class TrainerState:
    """Bytes of one rank that stay from step to step."""

    weights: int  # bytes of the actor's, frozen ones too, with the padding of its buffers
    by_kind: dict[str, int]  # bytes of the weights, without the padding
    gradients: int  # float32
    masters: int  # float32 copies of bfloat16 weights, this rank's share
    moments: int  # Adam's two, this rank's share
    reference: int  # weights of the frozen copy; 0 without one
    update: UpdateMemory = UpdateMemory()
    frozen: int = 0  # of ``weights`` those that are not trained, which no checkpoint holds

    @property
    def optimizer(self) -> int:
        return self.masters + self.moments

    @property
    def total(self) -> int:
        """Of a model that is trained, without its reference."""
        return self.weights + self.gradients + self.optimizer

    @property
    def by_kind_total(self) -> int:
        """Of a model that is not: its weights lie in no buffer."""
        return sum(self.by_kind.values())


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _kind(name: str) -> str:
    if name.startswith("embedding."):
        return "embedding"
    if name.startswith("output_layer."):
        return "output layer"
    if name.startswith(f"{TRAINER_PREFIX}."):
        return "vision tower"
    if ".adapter." in name:
        return "adapters"
    if ".experts." in name:
        return "experts"
    if "norm" in name or "router" in name:
        return "norms and router"
    return "attention" if ".self_attention." in name else "mlp"


def _place(name: str) -> tuple[int, int, int, int]:
    """Sorts the parameters of a chunk by their registration; equal ones keep their order."""
    if name.startswith("embedding."):
        return 0, 0, 0, 0
    if name.startswith(f"{TRAINER_PREFIX}."):
        return 3, 0, 0, 0
    parts = name.split(".")
    if parts[:2] != ["decoder", "layers"]:
        return 2, int(name.startswith("output_layer.")), 0, 0
    inner = ".".join(parts[3:])
    rank = next(i for i, start in enumerate(ORDER) if inner.startswith(start))
    return 1, int(parts[2]), rank, int(parts[6]) if "local_experts" in parts else 0


def chunk_parameters(
    shape: ModelShape, layout: ParallelLayout, stage: int, chunk: int, tuning: TuningPlan | None = None
) -> list[Parameter]:
    """What every rank of a pipeline stage holds of one model chunk; tensor and expert ranks hold equal sizes.

    The routers' score biases, which are no parameters, are not among them.

    Args:
        tuning: what is trained, adapters included; None: everything.
    """
    series = chunk_series(shape, layout, layout.rank(0, 0, 0, stage), chunk)
    trained = None
    if tuning is not None and not tuning.is_full:
        adapters = adapter_series(series, tuning.adapters)
        trained = {piece.local_name for piece in slices_of(series) if piece.hf_name in tuning.trained}
        trained |= {piece.local_name for piece in slices_of(adapters)}
        series += adapters
    sizes = _sizes(series)
    rows = padded_vocab_size(shape.vocab_size, layout.tensor) // layout.tensor
    for name in padded_keys(shape):
        if name in sizes:
            sizes[name] = (rows, shape.hidden_size)
    is_split = shape.tied and layout.pipeline > 1
    return [
        Parameter(
            name,
            _kind(name),
            math.prod(sizes[name]),
            is_shared_embedding=is_split and _kind(name) in ("embedding", "output layer"),
            is_expert=".experts." in name,
            is_trained=trained is None or name in trained,
        )
        for name in sorted(sizes, key=_place)
        if not name.endswith("router.expert_bias")
    ]


def _sizes(series: Iterable[Series]) -> dict[str, tuple[int, ...]]:
    sizes: dict[str, tuple[int, ...]] = {}
    for piece in slices_of(series):
        ends = tuple(end for _, end in piece.local_box)
        known = sizes.get(piece.local_name, ends)
        sizes[piece.local_name] = tuple(max(pair) for pair in zip(known, ends, strict=True))
    return sizes


@dataclass(frozen=True)
class StageParameters:
    """What every rank of a pipeline stage holds."""

    buffers: tuple[Buffer, ...]  # of what is trained; of each chunk the dense one, then the experts' if there are any
    frozen: tuple[Parameter, ...]  # which lie in no buffer


def stage_parameters(
    config: RunConfig, shape: ModelShape, layout: ParallelLayout, stage: int, tuning: TuningPlan
) -> StageParameters:
    """The parameters of a pipeline stage as Megatron keeps them."""
    num_shares = layout.data * layout.context
    buffers: list[Buffer] = []
    frozen: list[Parameter] = []
    for chunk in range(layout.num_chunks):
        parameters = chunk_parameters(shape, layout, stage, chunk, tuning)
        frozen += [p for p in parameters if not p.is_trained]
        is_cut = config.parallel.overlap_grad_reduce and stage == 0 and chunk == 0
        limit = max(MIN_BUCKET, BUCKET_PER_RANK * layout.data) if is_cut else None
        for is_expert, shares in ((False, num_shares), (True, layout.expert_data)):
            chosen = tuple(p for p in parameters if p.is_trained and p.is_expert == is_expert)
            if chosen:
                buffers.append(Buffer(chosen, shares, limit))
    return StageParameters(tuple(buffers), tuple(frozen))


def update_memory(config: RunConfig, num_elements: int) -> UpdateMemory:
    """What a rank takes for the step of an optimizer that has the state of ``num_elements``."""
    memory, window = config.memory, min(WINDOW_ELEMENTS, num_elements)
    moment = DTYPES[memory.optimizer_state_dtype].itemsize
    per_element = 2 * moment + (4 if config.model.dtype == "bfloat16" else 0)
    return UpdateMemory(
        windows=NUM_SLOTS * window * per_element if memory.optimizer_on_host else 0,
        # Two moments, and at most the bits, a sum and its upper half for one of them.
        rounding=window * (2 * 4 + 3 * 4) if memory.optimizer_state_dtype == "bfloat16" else 0,
    )


def trainer_state(
    config: RunConfig, layout: ParallelLayout, rank: int, held: StageParameters, has_reference: bool
) -> TrainerState:
    """The state of one rank, from the parameters of its pipeline stage.

    Args:
        has_reference: whether there is a frozen copy of the starting weights.
    """
    at, experts_at = layout.coordinates(rank), layout.expert_coordinates(rank)
    weight_bytes = DTYPES[config.model.dtype].itemsize
    num_padded = sum(buffer.num_elements for buffer in held.buffers)
    owned = 0
    for buffer in held.buffers:
        is_expert = buffer.parameters[0].is_expert
        share = experts_at.data if is_expert else at.context + layout.context * at.data
        owned += sum(buffer.owned(share))
    by_kind: dict[str, int] = {}
    trained = [p for buffer in held.buffers for p in buffer.parameters]
    for parameter in [*trained, *held.frozen]:
        by_kind[parameter.kind] = by_kind.get(parameter.kind, 0) + weight_bytes * parameter.num_elements
    return TrainerState(
        weights=weight_bytes * (num_padded + sum(p.num_elements for p in held.frozen)),
        by_kind=by_kind,
        gradients=4 * num_padded,
        masters=4 * owned if config.model.dtype == "bfloat16" else 0,
        moments=2 * DTYPES[config.memory.optimizer_state_dtype].itemsize * owned,
        update=update_memory(config, owned),
        frozen=weight_bytes * sum(p.num_elements for p in held.frozen),
        reference=sum(by_kind.values()) - by_kind.get("adapters", 0) if has_reference else 0,
    )
