"""Seconds of a decoding step and of training a token, from what a device's data sheet says. A roofline: upper bounds,
lowered by two shares that are usual for large models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mega_rl.bridge.mapping.tensors import hf_tensors
from mega_rl.config.schema.sections import RunConfig
from mega_rl.models.flops import pass_flops
from mega_rl.models.shape import ModelShape
from mega_rl.planning.engine import engine_weight_bytes
from mega_rl.types import DTYPES

TRAINING_SHARE = 0.35  # of the peak, in the trainer
BANDWIDTH_SHARE = 0.6  # of the peak, in a decoding step
DECODING_SHARE = 0.5  # of the peak of matrix products, in a decoding step


@dataclass(frozen=True)
class DevicePeaks:
    """Peaks of one device as this software counts them."""

    flops_per_s: float  # bfloat16, dense
    bytes_per_s: float  # of its memory


DEVICES: Mapping[str, DevicePeaks] = {
    "910b": DevicePeaks(376e12, 1.6e12),
    "910c": DevicePeaks(376e12, 1.6e12),  # one of its two dies, which are devices of their own
    "a100": DevicePeaks(312e12, 2.0e12),
    "h20": DevicePeaks(148e12, 4.0e12),
    "h100": DevicePeaks(989e12, 3.35e12),
    "h200": DevicePeaks(989e12, 4.8e12),
}


@dataclass(frozen=True)
class Speeds:
    """What the simulation of a run needs of its model and devices."""

    fixed_s: float  # of a decoding step, whatever the number of responses
    per_response_s: float  # of a decoding step, for each response
    train_token_device_s: float  # of training a token on one device


def speeds(config: RunConfig, shape: ModelShape, device: DevicePeaks, mean_tokens: float) -> Speeds:
    """``mean_tokens``: of a response; half of them have their keys and values read at a step, on average."""
    tensor, item = config.rollout.tensor_parallel_size, DTYPES[config.rollout.dtype or config.model.dtype].itemsize
    bytes_per_s = device.bytes_per_s * BANDWIDTH_SHARE
    latent = shape.latent
    width = latent.kv_rank + latent.rope_dim if latent else 2 * shape.kv_size / min(tensor, shape.num_kv_heads)
    context = config.data.max_prompt_length / 2 + mean_tokens / 2
    read_s = shape.num_layers * width * item * context / bytes_per_s
    one = pass_flops(shape, hf_tensors(shape))
    multiply_s = one.forward_products / tensor / (device.flops_per_s * DECODING_SHARE)
    # Forward and backward pass; one more forward pass for the reference model, and for pi_old with several minibatches.
    passes = 3 + (config.algorithm.kl_coefficient > 0) + (config.algorithm.minibatches_per_step > 1)
    flops = passes * one.forward_products * (1 + one.attention_slope * mean_tokens)
    return Speeds(
        engine_weight_bytes(config, shape) / bytes_per_s,
        read_s + multiply_s,
        flops / (device.flops_per_s * TRAINING_SHARE),
    )
