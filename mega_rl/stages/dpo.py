"""Learning from pairs of answers, DPO and its family: data, update, validation; the loop: ``parts/from_files.py``."""

from __future__ import annotations

from functools import partial

from mega_rl.algorithms.preference import PreferenceObjective
from mega_rl.config import RunConfig
from mega_rl.config.schema import PreferenceConfig
from mega_rl.data.pairs import Pair, PairDataset
from mega_rl.megatron.engine import LossFunction, MegatronEngine
from mega_rl.stages.parts import building
from mega_rl.stages.parts.batches import pack_for_rank
from mega_rl.stages.parts.from_files import learn, loop, measured, read, stream_of
from mega_rl.stages.parts.reference_logprobs import ReferenceLogprobs, reference_logprobs
from mega_rl.stages.parts.session import Session, open_session
from mega_rl.types import Microbatch

FIGURES = ("chosen_reward", "rejected_reward", "accuracy", "margin", "chosen_logprob", "rejected_logprob")


def run(config: RunConfig) -> None:
    """Train as ``config`` says; every rank of the job calls it."""
    with open_session(config) as session:
        train(session)


def train(session: Session) -> None:
    dataset, held_out = pairs(session)
    stream = stream_of(session, dataset)
    total_steps = building.total_steps(session.config, stream.steps_per_epoch)
    model = building.actor(session, total_steps)
    loss = objective(session.config.preference)
    # The reference is the model as training begins: it is resumed after it.
    reference = reference_logprobs(session, model, dataset, "train") if loss.needs_reference else None
    validation = None
    if held_out is not None:
        held_out_reference = reference_logprobs(session, model, held_out, "val") if loss.needs_reference else None
        validation = partial(validate, session, model, loss, held_out_reference, held_out.items)
    loop(
        session,
        model,
        stream,
        total_steps,
        update=partial(update, session, model, loss, reference),
        validate=validation,
        num_tokens=lambda pair: sum(sequence.loss_mask.numel() for sequence in pair.sequences),
    )


def pairs(session: Session) -> tuple[PairDataset, PairDataset | None]:
    """The training and the held-out pairs. Collective."""
    dataset, held_out = read(session, PairDataset)
    if dataset.num_dropped:
        session.say(f"data: {dataset.num_dropped} pairs with an answer longer than the length limits left out")
    return dataset, held_out


def objective(settings: PreferenceConfig) -> PreferenceObjective:
    return PreferenceObjective(
        loss=settings.loss,
        beta=settings.beta,
        label_smoothing=settings.label_smoothing,
        simpo_gamma=settings.simpo_gamma,
        sft_coefficient=settings.sft_coefficient,
    )


def update(
    session: Session,
    model: MegatronEngine,
    loss: PreferenceObjective,
    reference: ReferenceLogprobs | None,
    batch: list[Pair],
    is_read: bool,
) -> dict[str, float]:
    """One optimizer step; returns its metrics. Collective."""
    microbatches, loss_function = prepared(session, loss, reference, batch)
    totals, metrics = learn(session, model, microbatches, loss_function, is_read)
    metrics |= {name: totals.sums[name] / len(batch) for name in FIGURES}
    return {f"dpo/{name}": value for name, value in metrics.items()}


def validate(
    session: Session,
    model: MegatronEngine,
    loss: PreferenceObjective,
    reference: ReferenceLogprobs | None,
    held_out: list[Pair],
) -> dict[str, float]:
    """Loss and figures of held-out pairs. Collective."""
    sums = measured(session, model, *prepared(session, loss, reference, held_out)).sums
    means = {name: sums[name] / len(held_out) for name in ("accuracy", "margin")}
    return {"dpo/val_loss": sums["loss"]} | {f"dpo/val_{name}": value for name, value in means.items()}


def prepared(
    session: Session, loss: PreferenceObjective, reference: ReferenceLogprobs | None, batch: list[Pair]
) -> tuple[list[Microbatch], LossFunction]:
    """This rank's micro-batches of a global batch, both answers of a pair in one, and their loss."""
    microbatches = pack_for_rank(session.share, [one for pair in batch for one in pair.sequences], unit=2)
    return microbatches, partial(
        loss,
        reference_B=None if reference is None else reference.of(batch),
        num_pairs=len(batch),
        num_chosen_tokens=int(sum(float(pair.chosen.loss_mask.sum()) for pair in batch)),
    )
