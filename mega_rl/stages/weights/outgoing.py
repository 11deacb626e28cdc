"""What the weights of a run go through on their way to the engines: transforms, and the proofs that they arrived."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from mega_rl.bridge.mapping.adapter import adapter_tensors
from mega_rl.bridge.mapping.tensors import hf_tensors, roles
from mega_rl.bridge.mapping.tuning import AdapterPlan
from mega_rl.bridge.outgoing.noise import AqnNoise, AqnTransform
from mega_rl.bridge.outgoing.quantize import SimulatedQuantization
from mega_rl.bridge.outgoing.transform import Transform
from mega_rl.bridge.reshard.proof import LoadProof, Proof, Sizes
from mega_rl.bridge.series import Series, slices_of
from mega_rl.bridge.slices import Box
from mega_rl.config import RunConfig
from mega_rl.megatron.engine import MegatronEngine
from mega_rl.parallel.collectives import together
from mega_rl.rollout.sinks import SentWeights, WeightSink
from mega_rl.rollout.vllm.start.options import num_loading_engines
from mega_rl.stages.run.sampling_job import SamplingJob
from mega_rl.stages.weights import adapters
from mega_rl.stages.weights.weight_sync import WeightSync
from mega_rl.types import DTYPES


def load_proof(
    job: SamplingJob, actor: MegatronEngine, weights: SentWeights, wanted: Sequence[Sequence[Series]]
) -> LoadProof:
    """What compares the engines' own load with ``model.path``, before the actor leaves the device or is resumed.

    The actor still holds the tensors of ``model.path``, unless its dtype is narrower than the engines', or an adapter
    was merged into them: then its part of them is read again. Collective.

    Args:
        wanted: what every engine worker holds.
    """
    config = job.config

    def held(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
        return actor.policy.local(local_name, local_box).to(weights.dtype)

    def read(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> torch.Tensor:
        return job.weights.read(hf_name, hf_box).to(weights.device, weights.dtype)

    is_other = DTYPES[config.model.dtype].itemsize < weights.dtype.itemsize or config.tuning.adapter.new
    sizes, own = hf_tensors(job.shape), slices_of(actor.series_of(dist.get_rank()))
    size = config.rollout.tensor_parallel_size
    num_loading = num_loading_engines(config.rollout, len(wanted) // size)
    return LoadProof(sizes, own, wanted[:size], num_loading, read if is_other else held)


def weight_sync(
    job: SamplingJob,
    actor: MegatronEngine,
    sink: WeightSink,
    noise: AqnNoise,
    slots: AdapterPlan | None = None,
    gives_factors: bool = False,
) -> WeightSync:
    """The actor's way into the sink, with the outgoing transforms and the proof that the configuration asks for.

    Args:
        slots: the adapters that the engines keep in slots; None: adapters are merged.
        gives_factors: of merged adapters the sink may read the factors too.

    Raises:
        InputError: on every rank, simulated quantisation whose blocks the trainer's layout cuts.
    """
    config, shape, policy = job.config, job.shape, actor.policy
    dtype = DTYPES[config.rollout.dtype or config.model.dtype]
    sources = [actor.series_of(rank) for rank in range(dist.get_world_size())]
    transforms: list[Transform] = []
    if config.aqn.enabled:
        transforms.append(AqnTransform(noise, hf_tensors(shape), roles(shape), actor.master_weights, dtype))
    if (four_bits := config.rollout.simulated_quantization) is not None:
        with together("cutting weights into blocks"):
            own = slices_of(sources[dist.get_rank()])
            transforms.append(SimulatedQuantization(four_bits, hf_tensors(shape), roles(shape), own, job.device))
    model: list[Transform] = []
    if slots is not None:
        model.append(adapters.scaled_adapters(policy, dtype))
        sources = [held + policy.adapter_series_of(rank) for rank, held in enumerate(sources)]
    elif policy.plan.adapters.ranks:
        model.append(adapters.lora_merge(policy, dtype, config.bridge.bucket_bytes))
        if gives_factors:
            sources = [held + policy.adapter_series_of(rank) for rank, held in enumerate(sources)]
    of_slots = {} if slots is None else adapter_tensors(shape, slots)
    checks = proof(config, {**hf_tensors(shape), **of_slots}, sources, sink)
    return WeightSync(actor, sources, sink, transforms, dtype, checks, model)


def proof(config: RunConfig, sizes: Sizes, sources: Sequence[Sequence[Series]], sink: WeightSink) -> Proof | None:
    """What ``bridge.verify`` asks for; None if it is off, or the engines hold nothing to compare. Collective."""
    if config.bridge.verify == "off" or sink.inspect is None:
        return None
    held, layout = slices_of(sources[dist.get_rank()]), sink.layout()
    size, is_sample = config.rollout.tensor_parallel_size, config.bridge.verify == "sample"
    return Proof(sizes, held, layout[:size], len(layout), is_sample, config.trainer.seed)
