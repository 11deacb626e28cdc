"""Adaptive quantisation noise (AQN; QeRL, arXiv 2510.11696): keyed Gaussian noise on norms of the rollout policy.

The noise is added to the outgoing weights only, from the trainer's float32 weights anew at every sync, so it never
accumulates and nothing has to be undone. It depends on (seed, weight version, Hugging Face name) and on no layout.

Targets are chosen by role. The bridge gives every Hugging Face tensor one role; those of norms are
  - ``input_layernorm``: the norm before q/k/v,
  - ``post_attention_layernorm``: the norm before gate/up of a dense MLP, whatever its Hugging Face name,
  - ``router_norm``: the norm that feeds a mixture-of-experts router,
  - ``q_norm``, ``k_norm``: the norms of queries and keys,
  - ``latent_norm``: the norm of a compressed query or key/value (multi-head latent attention),
  - ``output_norm``: a norm of what attention or MLP gives back to the residual stream (Gemma),
  - ``final_layernorm``: the norm before the language-model head;
any other role (``embedding``, ``linear``, ...) never gets noise.

Letters in names: K stages of the schedule, Z the noise.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import compress
from typing import get_args

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from mega_rl.bridge.outgoing.transform import Changed
from mega_rl.bridge.reshard.execute import Read
from mega_rl.bridge.reshard.held_pieces import LARGEST, HeldPieces, lowest
from mega_rl.bridge.slices import Box, Slice, extents, indices
from mega_rl.config.schema.sampling import AqnConfig, NormRole
from mega_rl.errors import InputError
from mega_rl.parallel.collectives import column_sums, is_any, reduced
from mega_rl.platform.rounding import NUM_BITS, round_stochastically

ROUTER_NORM = "router_norm"
DEFAULT_ROLES = ("input_layernorm", "post_attention_layernorm")
NORM_ROLES = get_args(NormRole)
ROUNDINGS = ("nearest", "stochastic", "fp32")
HASH_BITS = 48  # a hash that a float64 metric holds exactly


def excludes(pattern: str, name: str) -> bool:
    """Whether a pattern of ``aqn.exclude_patterns`` matches a name: as a whole, or without ``*?[`` as a part of it."""
    return fnmatchcase(name, pattern) if set(pattern) & set("*?[") else pattern in name


def stage_of(step: int, total_steps: int, num_stages: int) -> int:
    """``min(step * K // total_steps, K - 1)``: the stage of a step, which counts from 0; stages are equally long."""
    assert step >= 0 and total_steps >= 1 and num_stages >= 1, (step, total_steps, num_stages)
    return min(step * num_stages // total_steps, num_stages - 1)


def sigma_at(
    schedule: str, step: int, total_steps: int, num_stages: int, sigma_start: float, sigma_end: float
) -> float:
    """The noise's standard deviation at a step; both bounds > 0. One stage is constant at ``sigma_start``.

    Schedules, with s the stage and i = s - 1:
      - ``exponential`` (QeRL's code): 0 in stage 0, then ``start * (end/start)^(i/(K-2))``; ends exactly at ``end``;
      - ``exponential_eq8`` (the paper's equation 8): ``start * (end/start)^(s/(K-1))``, no stage without noise;
      - ``exponential_alg1`` (its algorithm 1): 0 in stage 0, then ``start * (end/start)^(i/(K-1))``;
      - ``linear``, ``cosine``: from ``start`` in stage 0 to ``end`` in the last one; ``constant``: ``start``.
    """
    assert sigma_start > 0 and sigma_end > 0, (sigma_start, sigma_end)
    stage, last = stage_of(step, total_steps, num_stages), num_stages - 1
    return sigma_start if last == 0 else SCHEDULES[schedule](stage, last, sigma_start, sigma_end)


def _exponential(stage: int, last: int, start: float, end: float) -> float:
    return _geometric(start, end, stage - 1, last - 1) if stage else 0.0


def _exponential_eq8(stage: int, last: int, start: float, end: float) -> float:
    return _geometric(start, end, stage, last)


def _exponential_alg1(stage: int, last: int, start: float, end: float) -> float:
    return _geometric(start, end, stage - 1, last) if stage else 0.0


def _linear(stage: int, last: int, start: float, end: float) -> float:
    return _between(start, end, stage / last)


def _cosine(stage: int, last: int, start: float, end: float) -> float:
    return _between(start, end, (1.0 - math.cos(math.pi * stage / last)) / 2.0)


def _constant(stage: int, last: int, start: float, end: float) -> float:
    return start


# (stage, the last stage >= 1, sigma in the first, sigma in the last) -> sigma.
SCHEDULES: dict[str, Callable[[int, int, float, float], float]] = {
    "exponential": _exponential,
    "exponential_eq8": _exponential_eq8,
    "exponential_alg1": _exponential_alg1,
    "linear": _linear,
    "cosine": _cosine,
    "constant": _constant,
}


def draw(seed: int, weight_version: int, hf_name: str, full_shape: tuple[int, ...]) -> numpy.ndarray:
    """Standard normal noise of ``full_shape``, float32, from a key of its own: no global generator is read or moved."""
    generator = _generator(f"aqn-v1|{seed}|{weight_version}|{hf_name}")
    return generator.standard_normal(full_shape, dtype=numpy.float32)


@dataclass(frozen=True)
class NoiseRecord:
    """What one tensor, or a box of it, received in one sync."""

    noise_hash: int  # of the whole tensor's noise, below 2^48; 0 where it got none
    num_elements: int
    num_changed: int  # elements whose cast value differs from that of the clean weight
    square_sum: float  # of (noisy - clean) after the cast


Records = Mapping[tuple[str, Box], NoiseRecord]  # (HF name, box) -> record


class AqnNoise:
    """The noise of one run: who gets it, how much at which step, and the noisy weights themselves.

    Args:
        config: the validated ``aqn`` section.
        total_steps: the trainer's real number of steps.
    """

    def __init__(self, config: AqnConfig, total_steps: int) -> None:
        assert config.rounding in ROUNDINGS, config.rounding
        self.config = config
        self.total_steps = total_steps

    def stage(self, step: int) -> int:
        return stage_of(step, self.total_steps, self.config.num_stages)

    def sigma(self, step: int) -> float:
        """The standard deviation at a step, which counts from 0; 0.0 where AQN is off."""
        config = self.config
        if not config.enabled:
            return 0.0
        return sigma_at(
            config.schedule, step, self.total_steps, config.num_stages, config.sigma_start, config.sigma_end
        )

    def targets(self, roles: Mapping[str, str]) -> tuple[str, ...]:
        """The HF names that get noise, in the order of ``roles`` (HF name -> role, of the whole model).

        Raises:
            InputError: ``aqn.target_modules`` names something that is not a norm's role, a pattern excludes nothing, or
                nothing is left to target.
        """
        config = self.config
        for role in config.target_modules or ():
            if role not in NORM_ROLES:
                raise InputError(f"aqn.target_modules names {role!r}; choose among {', '.join(NORM_ROLES)}.")
        if config.target_modules is None:
            wanted = set(DEFAULT_ROLES)
        else:
            wanted = set(config.target_modules) or set(NORM_ROLES) - {ROUTER_NORM}
        if config.include_router_norms:
            wanted.add(ROUTER_NORM)
        norms = [name for name, role in roles.items() if role in wanted]
        every = [name for name, role in roles.items() if role in NORM_ROLES]
        without = {pattern: {name for name in every if excludes(pattern, name)} for pattern in config.exclude_patterns}
        for pattern, found in without.items():
            if not found:
                raise InputError(
                    f"aqn.exclude_patterns has {pattern!r}, which matches no norm of the model, such as "
                    f"{every[0] if every else 'none'}: correct it or take it off the list"
                )
        names = tuple(name for name in norms if not any(name in found for found in without.values()))
        if not names:
            present = sorted({role for role in roles.values() if role in NORM_ROLES})
            raise InputError(
                f"aqn.target_modules and aqn.exclude_patterns leave no tensor to add noise to; the model has norms of "
                f"the roles {', '.join(present) or 'none'}: target one of them or set aqn.enabled to false."
            )
        return names

    def for_sync(self, weight_version: int, sigma: float) -> SyncNoise:
        """The noise of one sync, which keeps the figures for the metrics."""
        return SyncNoise(self.config, weight_version, sigma)


@dataclass(frozen=True)
class _TensorNoise:
    """What one tensor's noise is, whole: drawn once per sync, however many boxes are read of it."""

    noise: Tensor  # [full shape] float32, sigma times a standard normal
    rounding_bits: Tensor | None  # [full shape] int32 in [0, 2^16), for stochastic rounding
    hash: int


class SyncNoise:
    """Adds one weight version's noise on one rank, and records what each tensor received.

    Args:
        config: the validated ``aqn`` section.
        weight_version: number of the sync: part of every key.
        sigma: >= 0; 0 gives the plain cast, bitwise, whatever the rounding.
    """

    def __init__(self, config: AqnConfig, weight_version: int, sigma: float) -> None:
        self.config, self.weight_version, self.sigma = config, weight_version, sigma
        self.records: dict[tuple[str, Box], NoiseRecord] = {}
        self._drawn: dict[str, _TensorNoise] = {}

    def apply(
        self, hf_name: str, weight: Tensor, full_shape: tuple[int, ...], box: Box, out_dtype: torch.dtype
    ) -> Tensor:
        """``weight + sigma * Z``, added in float32 and cast once, as ``aqn.rounding`` says.

        Args:
            hf_name: the tensor's Hugging Face name: part of the noise's key.
            weight: [extents of box] float32, on any device; not changed.
            full_shape: of the whole HF tensor, which the noise is drawn for.
            box: the part of it that ``weight`` is.
            out_dtype: what the engine holds; with rounding fp32 the result stays float32.

        Returns:
            A new tensor [extents of box] on the weight's device.
        """
        assert weight.dtype == torch.float32 and tuple(weight.shape) == extents(box), (hf_name, weight.dtype, box)
        clean = self._clean(weight, out_dtype)
        own = self._tensor_noise(hf_name, full_shape) if self.sigma else None
        noisy = clean if own is None else self._noisy(own, weight.detach(), box, out_dtype)
        change = noisy.float() - clean.float()
        self.records[hf_name, box] = NoiseRecord(
            noise_hash=0 if own is None else own.hash,
            num_elements=change.numel(),
            num_changed=int((change != 0).sum()),
            square_sum=float(change.square().sum()),
        )
        return noisy

    def _clean(self, weight: Tensor, out_dtype: torch.dtype) -> Tensor:
        """The values that the engine holds without noise, a new tensor in the dtype that ``apply`` returns."""
        cast = weight.detach().to(out_dtype, copy=True)
        return cast.float() if self.config.rounding == "fp32" else cast

    def _noisy(self, own: _TensorNoise, weight: Tensor, box: Box, out_dtype: torch.dtype) -> Tensor:
        noisy = weight + own.noise[indices(box)].to(weight.device)
        if self.config.rounding == "stochastic" and out_dtype != torch.float32:
            assert own.rounding_bits is not None
            assert out_dtype == torch.bfloat16, f"stochastic rounding to {out_dtype}"
            return round_stochastically(noisy, own.rounding_bits[indices(box)].to(weight.device))
        return noisy if self.config.rounding == "fp32" else noisy.to(out_dtype)

    def _tensor_noise(self, hf_name: str, full_shape: tuple[int, ...]) -> _TensorNoise:
        if hf_name not in self._drawn:
            seed, version = self.config.seed, self.weight_version
            noise = draw(seed, version, hf_name, full_shape) * numpy.float32(self.sigma)
            digest = hashlib.blake2b(hf_name.encode() + b"|" + noise.tobytes(), digest_size=HASH_BITS // 8).digest()
            bits = None
            if self.config.rounding == "stochastic":
                generator = _generator(f"aqn-v1|{seed}|{version}|{hf_name}|rounding")
                bits = torch.from_numpy(generator.integers(0, 1 << NUM_BITS, size=full_shape, dtype=numpy.int32))
            self._drawn[hf_name] = _TensorNoise(torch.from_numpy(noise), bits, int.from_bytes(digest, "little"))
        return self._drawn[hf_name]


Masters = Callable[[Iterable[str]], Mapping[str, Tensor]]  # HF names -> whole float32 weights held here; collective


class AqnTransform:
    """The ``Transform`` that sends noisy norms: their masters with the version's noise, cast once.

    It reads the masters of its targets itself, since noise is added before the cast; what earlier transforms do to a
    target is not seen. Everything else passes through.

    Args:
        noise: of the run; ``noise.config.enabled``.
        shapes: HF name -> full shape, of the whole model.
        roles: HF name -> role, of the whole model.
        masters: asked for the targets at every sync that has noise.
        dtype: what the engine holds.

    Raises:
        InputError: as ``AqnNoise.targets``.
    """

    def __init__(
        self,
        noise: AqnNoise,
        shapes: Mapping[str, tuple[int, ...]],
        roles: Mapping[str, str],
        masters: Masters,
        dtype: torch.dtype,
    ) -> None:
        self.noise, self.shapes, self.masters, self.dtype = noise, shapes, masters, dtype
        self.targets = frozenset(noise.targets(roles))
        self._figures = NoiseFigures(sorted(self.targets))

    def for_sync(self, read: Read, version: int) -> Changed:
        """``read`` with the noise of this version; ``read`` itself if the schedule's sigma is 0. Collective."""
        sigma = self.noise.sigma(version)
        if not sigma:
            return Changed(read)
        masters, noise = self.masters(self.targets), self.noise.for_sync(version, sigma)

        def noisy(local_name: str, hf_name: str, hf_box: Box, local_box: Box) -> Tensor:
            if hf_name not in masters:
                return read(local_name, hf_name, hf_box, local_box)
            return noise.apply(hf_name, masters[hf_name][indices(hf_box)], self.shapes[hf_name], hf_box, self.dtype)

        return Changed(noisy, sigma, lambda: self._figures.of_sync(noise.records))


class NoiseFigures:
    """The ``aqn/*`` figures of every sync over all ranks, each tensor counted once however many ranks hold it.

    Args:
        targets: the names of the tensors that are to get noise, in the same order on every rank.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets, self._index = targets, {name: i for i, name in enumerate(targets)}
        # The boxes that this rank read last, and which of them are its own to count.
        self._counted: tuple[list[tuple[str, Box]], NDArray[numpy.bool_]] | None = None

    def of_sync(self, records: Records) -> dict[str, float]:
        """The figures of one sync, on every rank. Collective.

        ``aqn/effective_sigma``: root mean square of what the cast left of the noise; ``aqn/changed_fraction``: of
        elements; ``aqn/num_tensors``; ``aqn/noise_hash``: one integer below 2^48 for all names and values of the noise,
        exact as a float and the same at every layout.

        Args:
            records: of this rank.

        Raises:
            RuntimeError: two ranks drew different noise for the same tensor, or a target got none.
        """
        hashes = self._hashes(records)
        own = [records[box] for box in self._own(sorted(records))]
        # Each square sum is a float32, so that float64 adds them up exactly, in whatever order.
        row = [float(sum(getattr(one, name) for one in own)) for name in ("num_elements", "num_changed", "square_sum")]
        num_elements, num_changed, square_sum = reduced(row, column_sums, len(row))
        return {
            "aqn/effective_sigma": math.sqrt(square_sum / max(1.0, num_elements)),
            "aqn/changed_fraction": num_changed / max(1.0, num_elements),
            "aqn/num_tensors": float(len(hashes)),
            "aqn/noise_hash": float(sum(hashes) % (1 << HASH_BITS)),
        }

    def _hashes(self, records: Records) -> list[int]:
        """Of the noise of every target. Collective."""
        places = numpy.array([self._index[name] for name, _ in records], dtype=numpy.int64)
        own = numpy.array([record.noise_hash for record in records.values()], dtype=numpy.int64)
        # The largest is the complement of the smallest complement: one exchange finds both.
        size = len(self._targets)
        both = numpy.concatenate([places, places + size]), numpy.concatenate([own, ~own])
        smallest, others = numpy.split(lowest(*both, 2 * size), 2)
        if num_lacking := int((smallest == LARGEST).sum()):
            raise RuntimeError(f"AQN noise went to {size - num_lacking} tensors of {size} targets")
        if len(unequal := numpy.flatnonzero(smallest != ~others)):
            name = self._targets[unequal[0]]
            raise RuntimeError(f"ranks drew different AQN noise for {name}: seeds or weight versions differ")
        return [int(value) for value in smallest]

    def _own(self, boxes: list[tuple[str, Box]]) -> list[tuple[str, Box]]:
        """Those that no rank before this one has. Collective; agreed on anew only when a rank has read other boxes."""
        if is_any(self._counted is None or self._counted[0] != boxes):
            pieces = HeldPieces(self._index, [Slice(name, box, name, box) for name, box in boxes])
            self._counted = boxes, pieces.is_own
        assert self._counted is not None
        return list(compress(boxes, self._counted[1]))


def _geometric(start: float, end: float, i: int, last: int) -> float:
    """``start * (end/start)^(i/last)``, exact at both ends; ``last`` 0 gives ``start``."""
    if i == 0:
        return start
    return end if i == last else start * (end / start) ** (i / last)


def _between(start: float, end: float, way: float) -> float:
    """``start`` at way 0, ``end`` at way 1."""
    return start * (1.0 - way) + end * way


def _generator(key: str) -> numpy.random.Generator:
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return numpy.random.Generator(numpy.random.Philox(key=int.from_bytes(digest, "little")))
