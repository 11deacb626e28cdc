"""What arguments of Megatron's training program mean, for every neighbour that takes them over.

Args of all rules: ``section`` stands before their names, with a dot at the end, or is empty.
"""

from __future__ import annotations

import re

from mega_rl.errors import shown
from mega_rl.importers.draft.draft import Draft
from mega_rl.importers.draft.units import set_tokens, set_warmup

SIZES = {
    "tensor_model_parallel_size": "tensor",
    "pipeline_model_parallel_size": "pipeline",
    "virtual_pipeline_model_parallel_size": "virtual_pipeline",
    "context_parallel_size": "context",
    "expert_model_parallel_size": "expert",
}
_MIXTURE = re.compile(r"\d+b[-_]?a\d+b|moe|mixtral|deepseek|kimi|moonlight|glm-?[45]\.", re.IGNORECASE)


def layout(draft: Draft, section: str = "") -> None:
    for name, ours in SIZES.items():
        size = draft.count(section + name, default=1) or 1
        if size > 1:
            draft.set(f"parallel.{ours}", size, [section + name])
        else:
            draft.note(section + name, "same", "1, as here")
    key, tensor = f"{section}sequence_parallel", draft.result.get("parallel.tensor", 1)
    if tensor > 1:
        draft.set("parallel.sequence", bool(draft.get(key)), [key])
    else:
        draft.note(key, "same", "there is one tensor-parallel rank")
    key = f"{section}expert_tensor_parallel_size"
    each = draft.count(key)
    if each is not None and has_experts(draft, section) and each != tensor:
        draft.set("parallel.expert_tensor", each, [key])
    else:
        draft.note(key, "same", "read with experts only, which have as many as other layers otherwise")


def has_experts(draft: Draft, section: str = "") -> bool:
    """Whether the model has experts, as sizes and names say."""
    named = f"{draft.result.get('model.path', '')} {draft.get(f'{section}model', default='')}"
    return (
        draft.result.get("parallel.expert", 1) > 1 or draft.has(f"{section}num_experts") or bool(_MIXTURE.search(named))
    )


def schedule(draft: Draft, section: str = "") -> None:
    """The warm-up: a share of the run if there is one, else iterations, which are optimizer steps."""
    keys = (f"{section}lr_warmup_fraction", f"{section}lr_warmup_iters")
    share = draft.number(keys[0])
    set_warmup(draft, keys, steps=draft.number(keys[1]) if share is None else None, ratio=share)


def saving(draft: Draft, section: str = "") -> None:
    key = f"{section}save_interval"
    interval = draft.number(key)
    draft.set("checkpoint.save_freq", int(interval) if interval and interval > 0 else None, [key])
    draft.set("checkpoint.keep_checkpoints", 0)  # theirs removes none


def recompute(draft: Draft, section: str = "") -> None:
    kind, method, layers, modules, also = (
        f"{section}recompute_{part}" for part in ("granularity", "method", "num_layers", "modules", "activations")
    )
    given = draft.word(kind, default="selective" if draft.get(also) else None)
    if given is None:
        draft.set("memory.recompute", "none", [kind, also])
        for key in (method, layers, modules):
            draft.note(key, "same", "not read, as nothing is computed again")
        return
    if given not in ("full", "selective"):
        draft.lack([kind], "other_word", shown(given))
        return
    draft.set("memory.recompute", given, [kind, also, method])
    number = draft.count(layers)
    if given == "full" and draft.get(method) == "block" and number:
        draft.set("memory.recompute_num_layers", number, [layers])
    draft.note(layers, "same", "with the method uniform, the layers of a group; every layer is one here")
    chosen, known = draft.get(modules), ("core_attn", "mlp", "moe", "shared_experts")
    if given == "selective" and isinstance(chosen, list | str):
        names = [chosen] if isinstance(chosen, str) else chosen
        if all(name in known for name in names):
            draft.set("memory.recompute_modules", names, [modules])
        else:
            draft.lack([modules], "other_word", f"{shown(names)}; there are {', '.join(known)}")


def router(draft: Draft, section: str = "") -> None:
    """The losses of the router; without experts there is none."""
    weight, kind, z_loss, rate = (
        f"{section}{name}"
        for name in (
            "moe_aux_loss_coeff", "moe_router_load_balancing_type", "moe_z_loss_coeff", "moe_router_bias_update_rate",
        )
    )  # fmt: skip
    if not has_experts(draft, section):
        for key in (weight, kind, z_loss, rate):
            draft.note(key, "same", "not read, as the model has no experts")
        return
    over = {"aux_loss": "microbatch", "seq_aux_loss": "sequence", "none": None}.get(
        draft.word(kind, default="aux_loss"), ""
    )
    if over == "":
        draft.lack([kind, weight], "router", shown(draft.get(kind)))
    elif over is None or not draft.number(weight):
        draft.set("router.aux_loss", 0.0, [weight, kind])
    else:
        draft.set("router.aux_loss", draft.number(weight), [weight])
        draft.set("router.aux_loss_over", over, [kind])
    draft.set("router.z_loss", draft.number(z_loss) or 0.0, [z_loss])
    if draft.number(rate) and not draft.has(f"{section}moe_router_enable_expert_bias") and not draft.has(rate):
        return
    draft.set("router.bias_update_rate", draft.number(rate) or 0.0, [rate])


def optimizer_on_host(draft: Draft, section: str = "") -> None:
    switch, share = f"{section}optimizer_cpu_offload", f"{section}optimizer_offload_fraction"
    part = draft.number(share, default=1.0)
    if not draft.get(switch) or not part:
        for key in (switch, share):
            draft.note(key, "same", "off, as here")
        return
    draft.set("memory.optimizer_on_host", True, [switch])
    if part == 1:
        draft.note(share, "same", "all of it, as here")
    else:
        draft.lack([share], "partial_offload", shown(part))


def precision(draft: Draft, section: str = "") -> None:
    is_bfloat16, is_float16 = draft.get(f"{section}bf16"), draft.get(f"{section}fp16")
    if is_float16:
        draft.lack([f"{section}fp16"], "other_word", "float16; bfloat16 is set instead")
    draft.set("model.dtype", "bfloat16" if is_bfloat16 or is_float16 else "float32", [f"{section}bf16"])
    draft.note(f"{section}fp16", "same", "off, as here")


def tokens(draft: Draft, keys: list[str], per_device: int | None, sequences: int, longest: int) -> None:
    """A budget per device is of the tokens that one context-parallel rank holds.

    Args:
        sequences: of a micro-batch, where no budget is given.
    """
    ranks = draft.result.get("parallel.context", 1)
    set_tokens(draft, per_device * ranks if per_device else sequences * longest, keys, longest)
