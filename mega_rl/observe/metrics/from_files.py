"""Metrics of the stages that learn from files. One of the same name means the same in each of them."""

from __future__ import annotations

from collections.abc import Mapping

from mega_rl.observe.metrics.metric import MetricSpec

NEXT_TOKENS, PREFERENCES, JUDGED = ("sft/", "pt/"), ("dpo/", "kto/"), ("dpo/", "kto/", "rm/")
FROM_FILES = (*NEXT_TOKENS, *JUDGED)
LOSSES = tuple(f"{stage}loss" for stage in FROM_FILES)
HELD_OUT = (*(f"{stage}val_accuracy" for stage in JUDGED), *(f"{stage}val_loss" for stage in FROM_FILES))  # best first
_ANSWERS = ("chosen", "rejected")

LEARNING = (
    *(
        MetricSpec(f"{stage}loss", "nats", "negative log-likelihood per learnt token", console="loss {value:.3f}")
        for stage in NEXT_TOKENS
    ),
    *(
        MetricSpec(f"{stage}val_loss", "nats", "the same on the validation files", console="val loss {value:.3f}")
        for stage in NEXT_TOKENS
    ),
    *(MetricSpec(f"{stage}val_perplexity", "1", "exp(val_loss)") for stage in NEXT_TOKENS),
    *(
        MetricSpec(f"{stage}token_accuracy", "fraction", "learnt tokens that no other token is more probable than")
        for stage in NEXT_TOKENS
    ),
    *(
        MetricSpec(f"{stage}val_token_accuracy", "fraction", "the same on the validation files")
        for stage in NEXT_TOKENS
    ),
    *(
        MetricSpec(
            f"{stage}loss", "1", "objective that is minimised, over the global batch", console="loss {value:.4f}"
        )
        for stage in JUDGED
    ),
    *(
        MetricSpec(f"{stage}accuracy", "fraction", "answers that are ranked as judged", console="accuracy {value:.3f}")
        for stage in JUDGED
    ),
    MetricSpec("dpo/margin", "1", "chosen less rejected reward, per pair", console="margin {value:+.3f}"),
    MetricSpec("rm/margin", "reward", "chosen less rejected score, per pair", console="margin {value:+.3f}"),
    *(
        MetricSpec(f"{stage}val_loss", "1", "the loss on the validation files", console="val loss {value:.4f}")
        for stage in JUDGED
    ),
    *(
        MetricSpec(
            f"{stage}val_accuracy", "fraction", "the same on the validation files", console="val accuracy {value:.3f}"
        )
        for stage in JUDGED
    ),
    MetricSpec("dpo/val_margin", "1", "the margin on the validation files"),
    MetricSpec("rm/val_margin", "reward", "the margin on the validation files"),
    *(
        MetricSpec(f"{stage}{answer}_reward", "1", f"beta x log-ratio to the reference, per {answer} answer")
        for stage in PREFERENCES
        for answer in _ANSWERS
    ),
    *(MetricSpec(f"rm/{answer}_score", "reward", f"of the reward model, per {answer} answer") for answer in _ANSWERS),
    *(MetricSpec(f"{stage}lr", "1", "learning rate of the step", "last") for stage in FROM_FILES),
    *(MetricSpec(f"{stage}tokens", "tokens", "learnt tokens of the step", "sum") for stage in NEXT_TOKENS),
)
HEALTH = (
    *(
        MetricSpec(f"{stage}grad_norm", "1", "global, before clipping", console="grad {value:.2f}")
        for stage in FROM_FILES
    ),
    *(
        MetricSpec(f"{stage}{answer}_logprob", "nats", f"under the policy, per {answer} answer")
        for stage in PREFERENCES
        for answer in _ANSWERS
    ),
    MetricSpec("kto/kl", "nats", "from the reference, estimated on answers to other prompts, at least 0"),
    MetricSpec("kto/val_kl", "nats", "the same on the validation files"),
    *(
        MetricSpec(
            f"{stage}skipped_steps_total", "steps", "optimizer steps skipped for a gradient that is not finite", "last"
        )
        for stage in FROM_FILES
    ),
)


def _chart(stages: tuple[str, ...], *names: str) -> tuple[str, ...]:
    return tuple(f"{stage}{name}" for stage in stages for name in names)


# Titles of charts, as ``declared.CHARTS``.
CHARTS: Mapping[str, tuple[str, ...]] = {
    "loss on files": _chart(FROM_FILES, "loss", "val_loss"),
    "right tokens": _chart(NEXT_TOKENS, "token_accuracy", "val_token_accuracy"),
    "ranked as judged": _chart(JUDGED, "accuracy", "val_accuracy"),
    "margin": ("dpo/margin", "dpo/val_margin", "rm/margin", "rm/val_margin"),
    "rewards of answers": _chart(PREFERENCES, "chosen_reward", "rejected_reward"),
    "scores of answers": ("rm/chosen_score", "rm/rejected_score"),
    "log-probabilities of answers": _chart(PREFERENCES, "chosen_logprob", "rejected_logprob"),
    "KL of KTO": ("kto/kl", "kto/val_kl"),
}
