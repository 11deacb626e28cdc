"""The arguments of vLLM's constructor: ours, the user's (``rollout.vllm``), and defaults that the user may change."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mega_rl.bridge.mapping.vllm_slots import Slots
from mega_rl.config.schema.sampling import COLOCATED_MEMORY_SHARE, RolloutConfig
from mega_rl.errors import InputError, shown
from mega_rl.rollout.temperature_probe import NUM_LOGPROBS

WORKER_EXTENSION = "mega_rl.rollout.vllm.worker_extension.WeightReceiver"
OPTIONS = "additional_config"  # vLLM's name of what it passes to the plug-in of a platform
LOGPROBS_MODE = "processed_logprobs"  # after the temperature: the distribution that is really sampled from
TRANSFER_BACKEND = "mega_rl"  # our name at vLLM's weight-transfer extension point
ROUTING = "enable_return_routed_experts"  # answers bring the experts of their tokens
CHUNKED = "enable_chunked_prefill"  # vLLM may compute a prompt in several steps
STEP_TOKENS = "max_num_batched_tokens"  # what vLLM computes at most in a step

# Engine arguments that follow from the rest of the configuration -> the key to set instead; "" if there is none.
OWNED = {
    "hf_overrides": "model.path",
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "rollout.dtype",
    "seed": "trainer.seed",
    "max_model_len": "data.max_prompt_length and data.max_response_length",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "logprobs_mode": "",
    "skip_tokenizer_init": "",
    "pipeline_parallel_size": "",
    "data_parallel_size": "",
    "distributed_executor_backend": "",
    "worker_cls": "",
    "worker_extension_cls": "",
    "weight_transfer_config": "",
    ROUTING: "rollout.routing_replay",
    "enable_lora": "rollout.adapter",
    "max_loras": "",
    "max_lora_rank": "tuning.adapter.rank",
    "fully_sharded_loras": "",
    "lora_dtype": "rollout.dtype",
    "lora_target_modules": "tuning.adapter.targets",
    "limit_mm_per_prompt": "data.max_images",
    "mm_processor_kwargs": "data.max_pixels",
    "mm_encoder_tp_mode": "",
    "mm_processor_cache_gb": "",
}
_OWNED_ON_CPU = {"kv_cache_memory_bytes": "rollout.kv_cache_bytes", "enable_sleep_mode": ""}


# Values with which vLLM would fail late, or run code that comes with a model.
_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "gpu_memory_utilization": (
        lambda value: isinstance(value, int | float) and 0 < value <= 1, "give a share of the device, > 0 and <= 1",
    ),
    "trust_remote_code": (lambda value: value is False, "remove it, no code of a model is run"),
    "load_format": (
        lambda value: value in ("auto", "safetensors", "dummy"), "give auto, safetensors or dummy, no pickle is read",
    ),
    "max_logprobs": (
        lambda value: isinstance(value, int) and (value == -1 or value >= NUM_LOGPROBS),
        f"remove it, the probe of the engine's log-probabilities asks for {NUM_LOGPROBS}",
    ),
}  # fmt: skip


for _name in ("max_num_seqs", "max_num_batched_tokens", "block_size", "num_gpu_blocks_override"):
    _VALUES[_name] = lambda value: isinstance(value, int) and value >= 1, "give a whole number >= 1"
# The annotations of vLLM's arguments that say all, beside words in quotes; those of its own types are left to it.
_TYPES: dict[str, type | tuple[type, ...]] = {"bool": bool, "int": int, "float": (int, float), "str": str}


def installed_arguments() -> Mapping[str, str] | None:
    """The names of the installed vLLM's engine arguments and their annotations, from its source; None without vLLM.

    A type that is a list of words stands there as these words, such as ``'auto' | 'fp8'``. vLLM is not imported: that
    takes seconds and chooses its platform.
    """
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return None
    package = Path(found.origin).parent
    words = dict(_word_lists(package / "config"))
    source = (package / "engine" / "arg_utils.py").read_text(encoding="utf-8")
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    fields = (field for node in classes for field in node.body if isinstance(field, ast.AnnAssign))
    return {
        field.target.id: " | ".join(words.get(kind, kind) for kind in ast.unparse(field.annotation).split(" | "))
        for field in fields
        if isinstance(field.target, ast.Name)
    }


def _word_lists(folder: Path) -> Iterator[tuple[str, str]]:
    """The names of vLLM's types that are lists of words, and the words as ``installed_arguments`` writes them."""
    for path in folder.glob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            match node:
                case ast.Assign([ast.Name(name)], ast.Subscript(ast.Name("Literal"), ast.Tuple(values))):
                    if all(isinstance(value, ast.Constant) and isinstance(value.value, str) for value in values):
                        yield name, " | ".join(map(ast.unparse, values))


def check_options(options: Mapping[str, Any], known: Collection[str] | None, device_type: str) -> None:
    """Refuse options of ``rollout.vllm`` that the engine does not know, cannot take, or that mega_rl sets itself.

    Args:
        known: the names of vLLM's engine arguments, and their annotations if they are known too; None if there is no
            vLLM that knows any.

    Raises:
        InputError: names the option and what to write instead.
    """
    owned = {**OWNED, **_OWNED_ON_CPU} if device_type == "cpu" else OWNED
    for name in options:
        if name in owned:
            fix = f"set {owned[name]} instead" if owned[name] else "remove it"
            raise InputError(f"rollout.vllm.{name} is set by mega_rl itself: {fix}.")
        if known is not None and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise InputError(
                f"rollout.vllm.{name} is not an argument of the installed vLLM; the nearest one is rollout.vllm.{near}."
            )
        holds, fix = _VALUES.get(name, (lambda value: True, ""))
        if not holds(options[name]):
            raise InputError(f"rollout.vllm.{name} is {shown(options[name])}: {fix}.")
        annotation = known.get(name, "") if isinstance(known, Mapping) else ""
        if not _fits(options[name], annotation):
            raise InputError(f"rollout.vllm.{name} is {shown(options[name])}: give {annotation.replace('|', 'or')}.")


def _fits(value: Any, annotation: str) -> bool:
    """Whether an argument can have this value; yes if its annotation has other types than ``_TYPES`` and words."""
    kinds = annotation.split(" | ")
    words = [kind for kind in kinds if kind.startswith("'")]
    if not all(kind in _TYPES or kind == "None" for kind in kinds if kind not in words):
        return True
    if value is None or isinstance(value, bool):
        return ("None" if value is None else "bool") in kinds
    types = [kind for kind in kinds if kind not in ("None", "bool", *words)]
    return repr(value) in words or any(isinstance(value, _TYPES[kind]) for kind in types)


def engine_arguments(
    rollout: RolloutConfig,
    *,
    model_path: str,
    dtype: str,
    max_model_len: int,
    device_type: str,
    known: Collection[str],
    external: bool,
) -> dict[str, Any]:
    """What ``vllm.LLM`` is given, beside ``slot_arguments`` and what is said of pictures.

    Args:
        dtype: of the model; used if ``rollout.dtype`` is not set.
        max_model_len: prompt and response together, tokens.
        known: the names of the installed vLLM's engine arguments.
        external: whether a launcher started several processes, so that engine ranks live in them.

    Raises:
        InputError: as ``check_options`` and ``check_whole_prompts``.
    """
    check_options(rollout.vllm, known, device_type)
    check_whole_prompts(rollout, max_model_len, device_type)
    on_cpu, is_colocated = device_type == "cpu", rollout.placement == "colocated"
    defaults: dict[str, Any] = {
        "enforce_eager": on_cpu,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "enable_sleep_mode": is_colocated and not on_cpu,
    }
    if is_colocated and not on_cpu:
        defaults["gpu_memory_utilization"] = COLOCATED_MEMORY_SHARE
    arguments = {name: value for name, value in defaults.items() if name in known} | dict(rollout.vllm)
    if device_type == "npu":
        options = additional_config(rollout.vllm.get("additional_config"), ascend_options())
        # vllm-ascend's enable_cpu_binding would bind the trainer's threads too, which CPU_AFFINITY_CONF binds already.
        unbound = {"enable_cpu_binding": False} if is_colocated else {}
        arguments["additional_config"] = unbound | options
    if on_cpu:
        arguments |= _cpu_arguments(rollout)
    if not is_colocated:
        arguments["weight_transfer_config"] = {"backend": TRANSFER_BACKEND}
    if external:
        arguments["distributed_executor_backend"] = "external_launcher"
    if rollout.routing_replay == "rollout" and not on_cpu:  # on a CPU we capture them ourselves
        arguments |= _routing_arguments(known)
    owned = {
        "model": model_path,
        "dtype": rollout.dtype or dtype,
        "max_model_len": max_model_len,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "seed": 0,  # every request brings its own, or the first of a batch seeds the engine's generators
        "logprobs_mode": LOGPROBS_MODE,
        "worker_extension_cls": WORKER_EXTENSION,
    }
    return arguments | owned


def picture_arguments(max_images: int, pixel_limits: Mapping[str, int]) -> dict[str, Any]:
    """What lets an engine take pictures, and nothing else beside text.

    Args:
        max_images: of a prompt.
        pixel_limits: of a picture, by the names of image processors.
    """
    return {
        "limit_mm_per_prompt": {"image": max_images, "video": 0},
        "mm_processor_kwargs": {"size": dict(pixel_limits)},
        "mm_encoder_tp_mode": "data",  # every worker has the tower whole, as the trainer's first stage
        "mm_processor_cache_gb": 0,  # of 4 GiB each: what every request is given whole needs none of vLLM's caches
    }


def blind_arguments() -> dict[str, Any]:
    """What keeps the tower out of an engine that is given text only: vLLM then neither loads nor measures it."""
    return {"limit_mm_per_prompt": {"image": 0, "video": 0}}


def check_whole_prompts(rollout: RolloutConfig, max_model_len: int, device_type: str) -> None:
    """Refuse options that would have a prompt computed in parts, or not at all, where prompts stay whole.

    That is on a CPU, if requests have seeds: after a part vLLM draws a token, drops it, and sets the request's
    generator back by its offset, which generators of a CPU do not have. A prompt waits until a step has room for it.

    Args:
        max_model_len: prompt and response together, tokens.

    Raises:
        InputError: names the option and what to write instead.
    """
    if device_type != "cpu" or rollout.seeds != "request":
        return
    if rollout.vllm.get(CHUNKED):
        raise InputError(
            f"rollout.vllm.{CHUNKED} does not go with seeds of requests on a CPU, whose generators cannot be set back "
            "after a part of a prompt: remove it, or set rollout.seeds to engine."
        )
    room = rollout.vllm.get(STEP_TOKENS)
    if room is not None and room < max_model_len:
        raise InputError(
            f"rollout.vllm.{STEP_TOKENS} is {shown(room)}, but a prompt and its response have up to {max_model_len} "
            "tokens, which a step on a CPU must hold: raise it, or set rollout.seeds to engine."
        )


def _cpu_arguments(rollout: RolloutConfig) -> dict[str, Any]:
    whole = {CHUNKED: False} if rollout.seeds == "request" else {}
    return {"kv_cache_memory_bytes": rollout.kv_cache_bytes} | whole


def _routing_arguments(known: Collection[str]) -> dict[str, Any]:
    if ROUTING not in known:
        raise InputError(
            "rollout.routing_replay is 'rollout', but the installed vLLM does not return the experts of its answers "
            f"(it has no {ROUTING}): set it to recompute or off."
        )
    return {ROUTING: True}


def slot_arguments(slots: Slots | None, known: Collection[str]) -> dict[str, Any]:
    """What gives an engine slots for one adapter; nothing without."""
    if slots is None:
        return {}
    # other layers would multiply zeros
    targets = {"lora_target_modules": slots.modules} if "lora_target_modules" in known else {}
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": slots.max_rank, **targets}


def engine_settings(rollout: RolloutConfig, engine: int) -> RolloutConfig:
    """The settings of one of several engines: if all take their weights live, only the first one reads any.

    The first push gives every engine all weights, so the others need none of their own. What the first one has loaded
    shows for all of them whether they can be written to. ``rollout.vllm.load_format`` overrides this.
    """
    if engine < num_loading_engines(rollout, engine + 1):
        return rollout
    return without_weights(rollout)


def without_weights(rollout: RolloutConfig) -> RolloutConfig:
    """The settings of an engine that reads no weights when it starts."""
    return dataclasses.replace(rollout, vllm={**rollout.vllm, "load_format": "dummy"})


def num_loading_engines(rollout: RolloutConfig, num_engines: int) -> int:
    """How many of the engines load ``model.path``: the first ones."""
    reads_once = rollout.weight_update != "reload" and "load_format" not in rollout.vllm
    return min(1, num_engines) if reads_once else num_engines


def additional_config(given: Any, known: Collection[str]) -> dict[str, Any]:
    """The options of vllm-ascend: ``rollout.vllm.additional_config``, without the NZ layout.

    Args:
        known: the names that the installed vllm-ascend reads; it ignores every other one without a word. Empty: not
            known.

    Raises:
        InputError: names the option and what to write instead.
    """
    field = "rollout.vllm.additional_config"
    options = {} if given is None else given
    if not isinstance(options, Mapping):
        raise InputError(f"{field} is {options!r}: give vllm-ascend's options, such as {{enable_cpu_binding: true}}.")
    for name, value in options.items():
        if known and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise InputError(f"{field}.{name} is read by nothing in the installed vllm-ascend; the nearest is {near}.")
        if name == "weight_nz_mode" and value != 0:
            raise InputError(
                f"{field}.weight_nz_mode is {value!r}, but weights are rewritten in place, which their NZ layout does "
                "not allow: remove it, or set it to 0."
            )
    return {"weight_nz_mode": 0, **options}


def ascend_options() -> Collection[str]:
    """The names that the installed vllm-ascend reads from ``additional_config``; empty without vllm-ascend."""
    found = importlib.util.find_spec("vllm_ascend")
    if found is None or found.origin is None:
        return ()
    return option_names(Path(found.origin).parent)


def option_names(folder: Path) -> Collection[str]:
    """The names asked of ``additional_config`` in the sources of vllm-ascend.

    It is not imported: that would choose vLLM's platform before an engine's environment is set.
    """
    sources = (path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    return {name for source in sources if OPTIONS in source for name in _asked_for(ast.parse(source))}


def _asked_for(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        asked: Sequence[ast.expr] = ()
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr == "get" and _is_options(node.func.value):
                asked = node.args[:1]
            elif _is_options(node.args[0]):  # a function of vllm-ascend that is given the options and a name
                asked = node.args[1:2]
        elif isinstance(node, ast.Compare) and _is_options(node.comparators[0]):  # name in options
            asked = [node.left]
        elif isinstance(node, ast.Subscript) and _is_options(node.value):
            asked = [node.slice]
        yield from (name.value for name in asked if isinstance(name, ast.Constant) and isinstance(name.value, str))


def _is_options(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == OPTIONS) or (
        isinstance(node, ast.Attribute) and node.attr == OPTIONS
    )
