"""The optimizer, its learning-rate schedule, and what happens to a step whose gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from torch import Tensor

from mega_rl.bridge.slices import Slice
from mega_rl.config.schema.sections import MemoryConfig, OptimizerConfig
from mega_rl.errors import InputError
from mega_rl.megatron.model.spec import TrainerSpec
from mega_rl.megatron.optim import adam, optimizer_state
from mega_rl.megatron.optim.frugal_adam import MASTER, FrugalAdam, frugal_adam
from mega_rl.parallel.collectives import gather_objects
from mega_rl.types import DTYPES

STYLES = {"constant": "constant", "cosine": "cosine", "linear": "linear", "wsd": "WSD"}  # ours -> Megatron's


@dataclass(frozen=True)
class OptimizerStats:
    """One optimizer step."""

    grad_norm: float  # global, before clipping
    lr: float
    skipped: bool  # the gradient was not finite, so nothing was changed
    bad_parameter: str | None = None  # of a skipped step: the first parameter whose gradient is not finite


def optimizer_config(settings: OptimizerConfig, spec: TrainerSpec) -> MegatronOptimizerConfig:
    config = MegatronOptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        min_lr=settings.min_lr,
        weight_decay=settings.weight_decay,
        adam_beta1=settings.beta1,
        adam_beta2=settings.beta2,
        adam_eps=settings.eps,
        clip_grad=settings.clip_grad,
        bf16=spec.dtype == torch.bfloat16,
        params_dtype=spec.dtype,
        use_distributed_optimizer=True,
    )
    # Set afterwards: Megatron would ask for TransformerEngine, whose FusedAdam has masters and gradients in this form.
    config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = is_frugal(spec.memory)
    return config


def is_frugal(memory: MemoryConfig) -> bool:
    """Whether ``FrugalAdam`` is needed; otherwise Megatron's optimizer keeps the masters."""
    return memory.optimizer_on_host or memory.optimizer_state_dtype != "float32"


def build_optimizer(
    settings: OptimizerConfig, spec: TrainerSpec, models: Sequence[DistributedDataParallel]
) -> MegatronOptimizer:
    """AdamW with decoupled decay; biases and norms, which are Megatron's one-dimensional parameters, do not decay."""
    adam.install()
    config, memory = optimizer_config(settings, spec), spec.memory
    kind = frugal_adam(memory.optimizer_on_host, DTYPES[memory.optimizer_state_dtype])
    with adam.used(kind) if is_frugal(memory) else nullcontext():
        optimizer = get_megatron_optimizer(config, list(models), use_gloo_process_groups=False)
    for part in chained(optimizer):
        optimizer_state.install(part)
        if isinstance(part.optimizer, FrugalAdam):
            part._copy_model_params_to_main_params = partial(_masters_from_weights, part.optimizer)
            part.optimizer.allocate()
    return optimizer


def _masters_from_weights(optimizer: FrugalAdam, state_dict: None = None) -> None:
    optimizer.masters_from_weights()


def learning_rate_schedule(
    optimizer: MegatronOptimizer, settings: OptimizerConfig, total_steps: int
) -> OptimizerParamScheduler:
    """Warm-up from 0, then one of the schedules over ``total_steps`` optimizer steps; step k has number k, from 1.

    ``wsd`` (warm-up, stable, decay; MiniCPM, arXiv 2404.06395) keeps ``lr`` until the last ``decay_steps`` steps, over
    which it falls to ``min_lr`` on a straight line.

    Raises:
        InputError: warm-up and decay overlap; if the run is counted in epochs, its length is not known earlier.
    """
    warmup_steps = settings.num_warmup_steps(total_steps)
    if warmup_steps + (settings.decay_steps or 0) > total_steps:
        raise InputError(
            f"optimizer.warmup_steps {settings.warmup_steps:g} and optimizer.decay_steps {settings.decay_steps} are "
            f"together more than the run's {total_steps} optimizer steps: make them fewer, or the run longer"
        )
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=settings.lr,
        min_lr=settings.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=max(total_steps, warmup_steps + 1),
        lr_decay_style=STYLES[settings.schedule],
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        wsd_decay_steps=settings.decay_steps,
        lr_wsd_decay_style="linear",
        # A resumed run goes by its own configuration; only the number of steps is the checkpoint's.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


@contextmanager
def own_hyperparameters(optimizer: MegatronOptimizer) -> Iterator[None]:
    """Wraps the loading of a checkpoint, whose parameter groups would bring their own learning rates and betas."""
    keep = [{k: v for k, v in group.items() if k not in ("params", "step")} for group in optimizer.param_groups]
    yield
    for group, values in zip(optimizer.param_groups, keep, strict=True):
        group.update(values)


def chained(optimizer: MegatronOptimizer) -> list[Any]:
    """The distributed optimizers: one, or one for dense and one for expert parameters."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [o for o in chain if not getattr(o, "is_stub_optimizer", False)]


def ensure_state(optimizer: MegatronOptimizer) -> None:
    """Give parameters that no step has changed yet the state that their first step would begin with: zeros."""
    for part in chained(optimizer):
        if part.init_state_fn is not None:
            part.init_state_fn(part.optimizer, part.config)


def master_of(optimizer: MegatronOptimizer, parameter: torch.nn.Parameter) -> Tensor | None:
    """The float32 master of what ``owned_range`` says of a parameter, where it lies; None if that is nothing."""
    for part in chained(optimizer):
        if parameter in part.model_param_gbuf_map:
            group, place = part.model_param_group_index_map[parameter]
            own = part.optimizer.param_groups[group]["params"][place]
            master: Tensor = part.optimizer.state[own][MASTER] if isinstance(part.optimizer, FrugalAdam) else own
            return master
    return None


def owned_range(optimizer: MegatronOptimizer, parameter: torch.nn.Parameter) -> tuple[int, int]:
    """The flat range of a parameter whose reduced gradient and optimizer state are on this rank; empty if none."""
    for part in chained(optimizer):
        if parameter in part.model_param_gbuf_map:
            span = part._get_model_param_range_map(parameter)["param"]
            return span.start, span.end
    return 0, 0


@dataclass
class SkippedSteps:
    """How often a gradient was not finite."""

    total: int = 0
    in_a_row: int = 0

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.total, self.in_a_row = state["total"], state["in_a_row"]


def _is_shared(parameter: Any) -> bool:
    """Whether Megatron's norm leaves this parameter out, as one that another rank counts."""
    return bool(getattr(parameter, "shared", False))


class OptimizerStep:
    """Clips the global gradient norm and steps; a step whose gradient is not finite changes nothing.

    Args:
        optimizer: Megatron's.
        parameters: local name -> parameter of this rank.
        slices: what this rank's parameters are of the Hugging Face tensors, and of the adapters'.
        hf_names: every one of these tensors in the model's order, which says what "first" is.
        max_skipped: consecutive skipped steps that end the run; 0: never.
    """

    def __init__(
        self,
        optimizer: MegatronOptimizer,
        parameters: Mapping[str, torch.nn.Parameter],
        slices: Iterable[Slice],
        hf_names: Iterable[str],
        max_skipped: int,
    ) -> None:
        self.optimizer, self.parameters, self.max_skipped = optimizer, parameters, max_skipped
        self.slices: dict[str, list[Slice]] = {}
        for piece in slices:
            self.slices.setdefault(piece.local_name, []).append(piece)
        self.order = {name: index for index, name in enumerate(hf_names)}
        self.skipped = SkippedSteps()

    @property
    def trained(self) -> dict[str, torch.nn.Parameter]:
        """The parameters that have a gradient; a pipeline stage may have none."""
        return {name: parameter for name, parameter in self.parameters.items() if parameter.requires_grad}

    @torch.no_grad()
    def __call__(self, lr: float) -> OptimizerStats:
        """Step with the gradients as they are; collective, and every rank decides the same.

        Raises:
            InputError: this was the last of ``max_skipped`` skipped steps in a row.
        """
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())
        if not (math.isfinite(grad_norm) and self._copies_are_finite()):
            name = self.first_bad_parameter()
            self._count(name)
            return OptimizerStats(grad_norm, lr, skipped=True, bad_parameter=name)
        self.skipped.in_a_row = 0
        for part in chained(self.optimizer):
            parameters = part.get_parameters()
            if part.config.clip_grad > 0 and parameters:
                decoupled = part.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
                clip_grad_by_total_norm_fp32(parameters, part.config.clip_grad, grad_norm, decoupled)
        self.optimizer.step_with_ready_grads()
        return OptimizerStats(grad_norm, lr, skipped=False)

    def _copies_are_finite(self) -> bool:
        """Whether the gradients that the norm leaves out are finite on every rank.

        A parameter that the tensor-parallel ranks hold alike counts in the norm on the first of them only; a bad
        gradient on another rank would pass unseen and make the copies differ for ever.
        """
        copies = [p for p in self.trained.values() if not param_is_not_tensor_parallel_duplicate(p) or _is_shared(p)]
        is_bad = torch.zeros(1, device=next(iter(self.parameters.values())).device)
        for gradient in (self._owned_gradient(p) for p in copies):
            is_bad += (~torch.isfinite(gradient)).any()
        dist.all_reduce(is_bad)
        return not bool(is_bad)

    def _owned_gradient(self, parameter: torch.nn.Parameter) -> Tensor:
        start, end = owned_range(self.optimizer, parameter)
        return parameter.main_grad.flatten()[start:end]  # type: ignore[attr-defined]

    def first_bad_parameter(self) -> str:
        """The first Hugging Face tensor, in the model's order, with a gradient that is not finite; on every rank."""
        own: list[tuple[int, str]] = []
        for local_name, parameter in self.trained.items():
            bad = (~torch.isfinite(self._owned_gradient(parameter))).nonzero()
            if not len(bad):
                continue
            flat = int(bad[0]) + owned_range(self.optimizer, parameter)[0]
            place = [int(i) for i in torch.unravel_index(torch.tensor(flat), parameter.shape)]
            names = [
                piece.hf_name
                for piece in self.slices.get(local_name, [])
                if all(start <= i < end for i, (start, end) in zip(place, piece.local_box, strict=True))
            ]
            own += [(self.order.get(name, len(self.order)), name) for name in names or [local_name]]
        found = [item for part in gather_objects(min(own, default=None)) if (item := part) is not None]
        # An infinite norm of finite gradients is an overflow of their sum.
        return min(found)[1] if found else "the sum of the squares of all"

    def _count(self, name: str) -> None:
        self.skipped.total += 1
        self.skipped.in_a_row += 1
        if self.max_skipped and self.skipped.in_a_row >= self.max_skipped:
            raise InputError(
                f"the last {self.skipped.in_a_row} optimizer steps were skipped because a gradient was not finite, "
                f"now first that of {name}: lower optimizer.lr, look into the data and the rewards, or raise "
                f"trainer.max_skipped_steps ({self.max_skipped})"
            )
