"""MindSpeed: the one place that imports it. It patches Megatron-core for Ascend, before Megatron is used.

Its features are named and given values as on its own command line; what exists, and which values it takes, is asked of
the installed MindSpeed. mega_rl's model has its own layer specification, so a feature is one of three kinds here: what
mega_rl's fused operators do anyway, what a key of mega_rl does instead, and what MindSpeed is asked to do.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import logging
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from mega_rl.config.schema.device import MindSpeedConfig
from mega_rl.errors import InputError
from mega_rl.platform.contract import versions

KEY = "platform.mindspeed.features"
INSTALL = "install MindSpeed's branch core_r0.16.0 by its own instructions"

# What mega_rl's own operators do on every layer, MindSpeed or not; its patches would find no caller.
OPERATORS = {
    "use_flash_attn": "attention runs on npu_fusion_attention",
    "use_fused_rmsnorm": "norms run on npu_rms_norm",
    "use_fused_swiglu": "the activation runs on npu_swiglu",
    "use_fused_rotary_pos_emb": "rotary embeddings run on npu_rotary_mul",
    "moe_permute_fusion": "tokens are sorted by npu_moe_token_permute_with_routing_map",
    "use_fused_moe_token_permute_and_unpermute": "tokens are sorted by npu_moe_token_permute_with_routing_map",
    "moe_grouped_gemm": "experts run on npu_grouped_matmul",
}
# What a key of mega_rl decides. The name, or what it begins with, -> that key.
OWN_KEYS = {
    "context_parallel": "parallel.context",
    "cp_": "parallel.context",
    "megatron_cp": "parallel.context",
    "adaptive_cp": "parallel.context",
    "ulysses": "parallel.context",
    "use_ulysses": "parallel.context",
    "use_cp_send_recv_overlap": "parallel.context",
    "tp_": "parallel.tensor",
    "pipeline_": "parallel.pipeline",
    "schedules_method": "parallel.pipeline",
    "recompute": "memory.recompute",
    "enable_recompute": "memory.recompute",
    "npu_deterministic": "platform.deterministic",
    "position_embedding_type": "model.path: the model says it",
    "multi_latent_attention": "model.path: the model says it",
    "n_shared_experts": "model.path: the model says it",
    "tokenizer": "model.path",
    "optimization_level": "platform.mindspeed.mode",
    "ai_framework": "platform.mindspeed.mode",
    "seed": "trainer.seed",
}
# Of Megatron, what this trainer has its own of: a feature that patches nothing else would do nothing.
NOT_CALLED = (
    "transformer_engine",
    "megatron.training",
    "megatron.legacy",
    "megatron.core.datasets",
    "megatron.core.extensions.transformer_engine",
    "megatron.core.inference",
    "megatron.core.transformer.custom_layers",
    "megatron.core.transformer.dot_product_attention",
    "megatron.core.models.common.embeddings.rope_utils",
    "megatron.core.fusions",
    "torch.cuda.nvtx",
)
# Of Megatron, what this trainer relies on: a layer's sum and norm are one operator, in places that the layer calls.
RELIED_ON = ("megatron.core.transformer.transformer_layer",)
# What features ask of the rest of Megatron-LM's command line, as far as every run of mega_rl answers it alike.
FACTS = ("--use-distributed-optimizer",)
# What MindSpeed replaces and gets back once Megatron is imported.
PUT_BACK = (
    # The engine in this process needs the compiler, which MindSpeed switches off.
    "torch.compile",
    "torch.jit.script",
    # MindSpeed's reduces a copy of a float64 tensor, and drops the sum.
    "torch.distributed.all_reduce",
    # MindSpeed's leave an optimizer that has made no step yet without one, and refuse to load it: no run could resume.
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.state_dict",
    "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.load_state_dict",
    "megatron.core.optimizer.optimizer.ChainedOptimizer._synchronize_steps",
)


def is_used(config: MindSpeedConfig) -> bool:
    """Whether MindSpeed is to be imported.

    Raises:
        InputError: it is wanted and not installed.
    """
    is_installed = importlib.util.find_spec("mindspeed") is not None
    wanted = _given(config.features)
    if config.mode == "off":
        return False
    if not is_installed and config.mode == "required":
        raise InputError(
            f"platform.mindspeed.mode is required, but MindSpeed is not installed: {INSTALL}, or set the mode to auto"
        )
    if not is_installed and wanted:
        raise InputError(f"{KEY} has {wanted[0]!r}, but MindSpeed is not installed: {INSTALL}, or remove it")
    return is_installed


def without(config: MindSpeedConfig) -> list[str]:
    """What the log says if MindSpeed is not used."""
    reason = "is off" if config.mode == "off" else "is not installed"
    return [f"MindSpeed {reason}: Megatron-core runs unpatched, on mega_rl's own fused operators"]


def enable(config: MindSpeedConfig) -> list[str]:
    """Check the features and let MindSpeed patch Megatron-core; call it once, before Megatron is used.

    Returns:
        Lines for the log: what mega_rl does itself, and every function that MindSpeed really replaced.

    Raises:
        InputError: an unknown feature or value, one that would do nothing here, or a MindSpeed that does not load or is
            made for another Megatron-core.
    """
    refused = versions.refusals("npu", versions.installed())
    if refused:
        raise InputError("; ".join(refused))
    given = {name.lstrip("-").replace("-", "_"): value for name, value in config.features.items()}
    try:
        manager = importlib.import_module("mindspeed.features_manager").MindSpeedFeaturesManager
    except Exception as error:  # noqa: BLE001 - a vendor's package under an unknown torch_npu raises what it likes
        raise _broken(error) from error
    command_line = check_features(given, manager)
    _import_adaptor(command_line, [name for name in given if name not in OPERATORS])
    patches = importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager.patches_info
    _refuse_patches(given, manager)
    for name in PUT_BACK:
        if name in patches:
            _put_back(patches[name])
    _remove_empty("flash_attn")
    lasting = {name: patch for name, patch in patches.items() if patch.is_applied and name not in PUT_BACK}
    return report(given, lasting)


def _put_back(patch: Any) -> None:
    """Undo what MindSpeed did, who has replaced the function under its name in every module that had it."""
    name, replaced = patch.orig_func_name, getattr(patch.orig_module, patch.orig_func_name)
    setattr(patch.orig_module, name, patch.orig_func)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is replaced:  # asks no module that imports others to answer
            setattr(module, name, patch.orig_func)


def _remove_empty(package: str) -> None:
    """Take back the empty modules that MindSpeed has put in the place of a package which is not installed.

    vLLM takes an empty flash_attn for the real one, and imports its rotary kernel.
    """
    names = [name for name in sys.modules if name == package or name.startswith(package + ".")]
    if all(getattr(sys.modules[name].__spec__, "loader", None) is None for name in names):
        for name in names:
            del sys.modules[name]


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def check_features(given: Mapping[str, Any], manager: Any) -> list[str]:
    """MindSpeed's command line for the features that it is asked for.

    Args:
        given: name with underscores -> value.
        manager: the installed MindSpeed's feature manager, whose features and their arguments say what there is.

    Raises:
        InputError: names the feature and the fix.
    """
    parser = _Parser(allow_abbrev=False, add_help=False)
    manager.register_features_args(parser)
    actions = {
        option.lstrip("-").replace("-", "_"): action for action in parser._actions for option in action.option_strings
    }
    features = {feature.feature_name for feature in manager.FEATURES_LIST}
    known = sorted(actions.keys() | features)
    words: list[str] = []
    for name, value in given.items():
        if name in OPERATORS:
            if value is not True:
                raise InputError(
                    f"{KEY}.{name} is {value!r}, but {OPERATORS[name]} always: remove it, or set it to true"
                )
            continue
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *OPERATORS], n=1, cutoff=0.0)
            raise InputError(
                f"{KEY} has {name!r}, which the installed MindSpeed does not know; the nearest one is {near[0]!r}"
            )
        own = next((key for start, key in OWN_KEYS.items() if name.startswith(start)), None)
        if own is not None:
            raise InputError(f"{KEY} has {name!r}, which mega_rl decides itself: remove it, and set {own}")
        words += _words(name, value, actions.get(name))
    try:
        parser.parse_known_args(words)
    except (ValueError, argparse.ArgumentError) as error:
        raise InputError(f"{KEY}: MindSpeed refuses {' '.join(words)}: {error}") from error
    return words


def _words(name: str, value: Any, action: argparse.Action | None) -> list[str]:
    """One feature as on the command line."""
    option = next((o for o in action.option_strings if o.startswith("--")), "") if action else ""
    option = option or "--" + name.replace("_", "-")
    is_switch = action is not None and action.nargs == 0
    if is_switch and not isinstance(value, bool):
        raise InputError(f"{KEY}.{name} is {value!r}: set it to true or false")
    if isinstance(value, bool):
        if action is not None and not is_switch:
            raise InputError(
                f"{KEY}.{name} is {value!r}, but it takes a value: {action.help or 'see its documentation'}"
            )
        return [option] if value else []
    if isinstance(value, list):
        return [option, *map(str, value)]
    return [option, str(value)]


def _import_adaptor(words: Sequence[str], features: Sequence[str]) -> None:
    """Import the module that patches as it is imported; it reads its arguments from the command line."""
    root, command_line = logging.getLogger(), sys.argv
    handlers, level = list(root.handlers), root.level
    sys.argv = [command_line[0] if command_line else "mega_rl", *FACTS, *words]
    try:
        with _without_lazy_aliases(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module("mindspeed.megatron_adaptor")
    except Exception as error:  # noqa: BLE001 - see above
        raise _broken(error, features) from error
    finally:
        sys.argv = command_line
        root.handlers[:] = handlers  # MindSpeed takes over the root logger
        root.setLevel(level)


@contextmanager
def _without_lazy_aliases() -> Iterator[None]:
    """Hide transformers' alias modules: MindSpeed asks every module for every name, and these import others to answer.

    They stand for several hundred image processors, some of which need packages that are not installed.
    """
    # Megatron-core imports the first, with the aliases, and MindSpeed the second, which would bring them back.
    for name in ("transformers", "transformers.trainer"):
        importlib.import_module(name)
    aliases = {
        name: module
        for name, module in sys.modules.items()
        if name.startswith("transformers.") and "__getattr__" in vars(module) and vars(module).get("__spec__") is None
    }
    for name in aliases:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(aliases)


def _refuse_patches(given: Mapping[str, Any], manager: Any) -> None:
    """InputError for a feature whose patches all replace what this trainer does not call, or one what it relies on."""
    args = importlib.import_module("mindspeed.args_utils").get_mindspeed_args()
    for feature in manager.FEATURES_LIST:
        name = feature.feature_name
        if name not in given or not given[name] or name in OPERATORS:
            continue
        recorder = _Recorder()
        feature.pre_register_patches(recorder, args)
        feature.register_patches(recorder, args)
        if recorder.names and all(patched.startswith(NOT_CALLED) for patched in recorder.names):
            raise InputError(
                f"{KEY} has {name!r}, which would do nothing: it replaces only {', '.join(recorder.names[:3])}, which "
                "mega_rl does not call; remove it"
            )
        if broken := [patched for patched in recorder.names if patched.startswith(RELIED_ON)]:
            raise InputError(
                f"{KEY} has {name!r}, which replaces {broken[0]}: mega_rl adds and normalises by one operator within "
                "that layer and needs Megatron's own; remove it"
            )


class _Recorder:
    """Stands in for MindSpeed's patch manager to hear what a feature would replace."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def register_patch(self, name: str, *args: Any, **kwargs: Any) -> None:
        self.names.append(name)

    def remove_wrappers(self, *args: Any, **kwargs: Any) -> None:
        pass


def report(given: Mapping[str, Any], patches: Mapping[str, Any]) -> list[str]:
    """Lines for the log: the installed version, and what was replaced, by module.

    Args:
        patches: name of the replaced function -> MindSpeed's record of it, the applied ones.
    """
    own = [f"  {name}: {OPERATORS[name]}, by mega_rl's own operators" for name in given if name in OPERATORS]
    passed = [f"{name}={value}" for name, value in given.items() if name not in OPERATORS]
    modules: dict[str, list[str]] = {}
    for name in sorted(patches):
        module = patches[name].orig_module_name
        while "." in module and module.rpartition(".")[2].lstrip("_")[:1].isupper():  # a method's ends with its class
            module = module.rpartition(".")[0]
        modules.setdefault(module, []).append(name.removeprefix(module + "."))
    version = versions.installed()["mindspeed"] or "of an unknown version"
    title = f"MindSpeed {version} replaced {len(patches)} functions; features: {', '.join(passed) or 'none asked for'}"
    return [title, *own, *(f"  {module}: {', '.join(names)}" for module, names in modules.items())]


def _given(features: Mapping[str, Any]) -> list[str]:
    """The features that only MindSpeed has."""
    return [name for name in features if name.lstrip("-").replace("-", "_") not in OPERATORS]


def _broken(error: Exception, features: Sequence[str] = ()) -> InputError:
    text = (str(error).splitlines() or [type(error).__name__])[0]
    missing = re.search(r"No module named '(\w+)", text)
    if missing:
        root = missing.group(1)
        needs = {"megatron": "Megatron-LM, of which only Megatron-core is installed", "triton": "triton-ascend"}
        text = f"it needs {needs.get(root, root)} ({text})"
    fix = f"remove {' or '.join(features)} from {KEY}, " if features else ""
    return InputError(
        f"MindSpeed does not load: {text}; {fix}fix its installation, or set platform.mindspeed.mode to off"
    )
