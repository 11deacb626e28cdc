"""The layouts that the engine is tested at; no heavy imports, so a test can name them."""

from __future__ import annotations

from dataclasses import dataclass

DENSE = ("qwen2", "qwen3", "llama")
MIXTURE = ("qwen3_moe",)
LATENT = ("deepseek_v3",)
VISION = ("qwen2_5_vl", "qwen3_vl")
VISION_MIXTURE = ("qwen3_vl_moe",)


@dataclass(frozen=True)
class Case:
    """One layout: data parallelism is what ``num_ranks`` leaves."""

    num_ranks: int
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int | None = None
    context: int = 1
    context_method: str = "gather"
    expert: int = 1
    expert_tensor: int | None = None
    sequence: bool = False
    overlap: bool = False  # of gradient reduction and parameter gathering
    max_tokens: int = 64  # of a micro-batch: a few of them per step
    families: tuple[str, ...] = DENSE
    recompute: str = "none"

    @property
    def name(self) -> str:
        parts = [f"tp{self.tensor}{'_sp' if self.sequence else ''}", f"pp{self.pipeline}"]
        parts += [f"vpp{self.virtual_pipeline}"] if self.virtual_pipeline else []
        parts += [f"cp{self.context}"] if self.context > 1 else []
        parts += [self.context_method] if self.context_method != "gather" else []
        parts += [f"ep{self.expert}"] if self.expert > 1 else []
        parts += [f"etp{self.expert_tensor}"] if self.expert_tensor else []
        parts += [f"dp{self.num_ranks // (self.tensor * self.context * self.pipeline)}"]
        parts += ["overlap"] if self.overlap else []
        parts += [f"{self.max_tokens}tokens"] if self.max_tokens != 64 else []
        parts += [f"{self.recompute}_recompute"] if self.recompute != "none" else []
        return "_".join(parts)


def recomputations(case: Case) -> tuple[str, ...]:
    """Of activations, that replayed experts are tested with: where micro-batches overtake each other, or are cut."""
    return ("none", "full", "selective") if case.pipeline > 1 or case.sequence else ("none",)


EVEN_TOKENS = 28  # of every micro-batch where crossed messages must fit each other's place
# What is silently wrong without each guard, on 2 ranks: the guards are taken away in run_engine_guards.py.
GUARDS = {
    "token_count": Case(2, context=2, families=("qwen3",)),
    "positions": Case(2, context=2, families=("qwen3",)),
    "gathered_weights": Case(2, overlap=True, families=("qwen3",)),
    "experts": Case(2, expert_tensor=2, families=("qwen3_moe",)),
    "single_messages": Case(2, pipeline=2, virtual_pipeline=2, max_tokens=EVEN_TOKENS, families=("qwen3",)),
}
# What the engines are sent must be the same at all of these: every axis of the layout is in one of them.
AQN_CASES = (
    Case(4, tensor=2, sequence=True, families=("qwen3",)),
    Case(4, tensor=2, sequence=True, pipeline=2, families=("qwen3",)),
    Case(4, pipeline=2, virtual_pipeline=2, families=("qwen3",)),
    Case(4, context=2, families=("qwen3",)),
    Case(4, tensor=2, sequence=True, expert=2, expert_tensor=1, families=("qwen3_moe",)),
    Case(4, pipeline=2, expert=2, families=("qwen3_moe",)),
)
# family, the layout of a checkpoint, other layouts that it is resumed at
RESHARDED = (
    ("qwen3", Case(2, pipeline=2, virtual_pipeline=2), (Case(2, context=2), Case(2, tensor=2, sequence=True))),
    ("qwen2", Case(2, pipeline=2), (Case(2, context=2), Case(2, pipeline=2, virtual_pipeline=2))),  # several buckets
    ("deepseek_v3", Case(2, expert=2), (Case(2, tensor=2, sequence=True, expert=2, expert_tensor=1), Case(2))),
    ("qwen3_moe", Case(2, expert_tensor=2), (Case(2, pipeline=2), Case(2, expert=2))),
)
