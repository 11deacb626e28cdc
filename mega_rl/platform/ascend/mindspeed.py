"""MindSpeed: the facade that a run takes its operators and features through. Only an Ascend run gets here.

Its adaptor patches Megatron-core, before Megatron is used; its fused operators are taken one by one
(``mindspeed_kernels``). Its features are named and given values as on its own command line; what exists, and which
values it takes, is asked of the installed MindSpeed. mega_rl's model has its own layer specification, so a feature is
one of three kinds here: an operator that mega_rl's layers call, what a key of mega_rl does instead, and what the
adaptor is asked to do.
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
from mega_rl.platform.ascend.mindspeed_kernels import OFFERS, Taken, take
from mega_rl.platform.contract import versions
from mega_rl.platform.operators.npu_kernels import AscendKernels

KEY = "platform.mindspeed.features"
INSTALL = "install MindSpeed's branch core_r0.16.0 by its own instructions"
FALLBACK = "Megatron-core runs unpatched, and its fused operators are torch_npu's, called directly"

# The features that are operators of the layers: true unless they are given as false. A name -> that of its operator.
OPERATORS = {name: name for name in OFFERS} | {"use_fused_moe_token_permute_and_unpermute": "moe_permute_fusion"}
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


def without(config: MindSpeedConfig) -> list[str] | None:
    """What the log says where this run goes without MindSpeed; None: it is used. Nothing is patched yet.

    Raises:
        InputError: it is asked for, and is not there or does not fit.
    """
    wanted, _ = _given(config.features), _switched_off(config.features)
    if config.mode == "off":
        return [f"MindSpeed is off: {FALLBACK}"]
    if importlib.util.find_spec("mindspeed") is None:
        unfit = f"MindSpeed is not installed: {INSTALL}"
        lines = [f"MindSpeed is not installed: {FALLBACK}"]
    else:
        unfit = _unfit()
        lines = [f"warning: {FALLBACK}, because {unfit}"]
    if not unfit:
        return None
    if config.mode == "required":
        raise InputError(f"platform.mindspeed.mode is required, but {unfit}, or set the mode to auto")
    if wanted:
        raise InputError(f"{KEY} has {wanted[0]!r}, but {unfit}, or remove it")
    return lines


def _unfit() -> str:
    """Why the installed MindSpeed cannot be used, and what to do about it; empty if it can."""
    found = versions.installed()
    others = versions.refusals("npu", found | {"mindspeed": None})
    refused = [sentence for sentence in versions.refusals("npu", found) if sentence not in others]
    if refused:
        return refused[0]
    try:
        _manager()
    except Exception as error:  # noqa: BLE001 - a vendor's package under an unknown torch_npu raises what it likes
        return str(_broken(error))
    return ""


def _manager() -> Any:
    return importlib.import_module("mindspeed.features_manager").MindSpeedFeaturesManager


def enable(config: MindSpeedConfig) -> tuple[list[str], AscendKernels]:
    """Check the features, let MindSpeed patch Megatron-core, and take its operators; once, before Megatron is used.

    Call it where a run does not go ``without`` it.

    Returns:
        Lines for the log: every function that MindSpeed really replaced, and whose each fused operator is; and these.

    Raises:
        InputError: an unknown feature or value, one that would do nothing here, a MindSpeed whose adaptor does not
            load, or one that lacks an operator although it is required.
    """
    given = {name.lstrip("-").replace("-", "_"): value for name, value in config.features.items()}
    manager = _manager()
    command_line = check_features(given, manager)
    _import_adaptor(command_line, [name for name in given if name not in OPERATORS])
    patches = importlib.import_module("mindspeed.patch_utils").MindSpeedPatchesManager.patches_info
    _refuse_patches(given, manager)
    for name in PUT_BACK:
        if name in patches:
            _put_back(patches[name])
    _remove_empty("flash_attn")
    taken = take(_switched_off(config.features))
    if taken.missing and config.mode == "required":
        name, reason = next(iter(taken.missing.items()))
        raise InputError(
            f"platform.mindspeed.mode is required, but MindSpeed's operator of {name} cannot be used ({reason}): "
            f"install its commit of docker/.env, set {KEY}.{name} to false, or set the mode to auto"
        )
    lasting = {name: patch for name, patch in patches.items() if patch.is_applied and name not in PUT_BACK}
    return [*report(given, lasting), *operator_report(taken)], taken.kernels


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
    passed = [f"{name}={value}" for name, value in given.items() if name not in OPERATORS]
    modules: dict[str, list[str]] = {}
    for name in sorted(patches):
        module = patches[name].orig_module_name
        while "." in module and module.rpartition(".")[2].lstrip("_")[:1].isupper():  # a method's ends with its class
            module = module.rpartition(".")[0]
        modules.setdefault(module, []).append(name.removeprefix(module + "."))
    version = versions.installed()["mindspeed"] or "of an unknown version"
    title = f"MindSpeed {version} replaced {len(patches)} functions; features: {', '.join(passed) or 'none asked for'}"
    return [title, *(f"  {module}: {', '.join(names)}" for module, names in modules.items())]


def operator_report(taken: Taken) -> list[str]:
    """Lines for the log: whose each fused operator is; in front a warning if MindSpeed lacks some."""
    lines = ["fused operators", *taken.lines]
    if taken.missing:
        names = ", ".join(taken.missing)
        lines.insert(0, f"warning: MindSpeed's {names} cannot be used: torch_npu's are called directly in their place")
    return lines


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")


def _given(features: Mapping[str, Any]) -> list[str]:
    """The features that only MindSpeed has."""
    return [name for name in features if _plain(name) not in OPERATORS]


def _switched_off(features: Mapping[str, Any]) -> set[str]:
    """The operators that are not to be MindSpeed's."""
    found = {name: value for name, value in features.items() if _plain(name) in OPERATORS}
    for name, value in found.items():
        if not isinstance(value, bool):
            raise InputError(f"{KEY}.{name} is {value!r}: set it to true or false")
    return {OPERATORS[_plain(name)] for name, value in found.items() if not value}


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
