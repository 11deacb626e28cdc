"""Write the defaults of another trainer from a checkout of its source; for maintainers of ``mega_rl/importers``.

    python tools/neighbour_defaults.py --from verl CHECKOUT
    python tools/neighbour_defaults.py --from trl CHECKOUT --transformers DIRECTORY_OF_THE_PACKAGE
    python tools/neighbour_defaults.py --from slime CHECKOUT --megatron CHECKOUT_OF_MEGATRON_LM

Nothing of the checkout is run: YAML is read, and Python is parsed. ``mega_rl/importers/defaults/NAME.yaml`` then holds
every default of a key that its table (``mega_rl/config/reading/NAME.yaml``) knows, for each of its programs, with the
commit that they come from. A value that only a running program knows is left out.
"""

from __future__ import annotations

import argparse
import ast
import operator
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from mega_rl.config.reading.tables import NEIGHBOURS, table
from mega_rl.errors import InputError
from mega_rl.importers.draft.defaults import EVERY

TARGET = Path(__file__).resolve().parent.parent / "mega_rl" / "importers" / "defaults"
UNKNOWN = object()
OPERATORS = {ast.Mult: operator.mul, ast.Pow: operator.pow, ast.Add: operator.add}
# Dataclasses of a program: file and name.
DATACLASSES: dict[str, dict[str, list[tuple[str, str]]]] = {
    "areal": {
        "rl": [("areal/api/cli_args.py", "PPOConfig")],
        "sft": [("areal/api/cli_args.py", "SFTConfig")],
        "dpo": [("areal/api/cli_args.py", "DPOConfig")],
        "rm": [("areal/api/cli_args.py", "RWConfig")],
    },
    "trl": {
        task: [(f"trl/{place}", name), ("trl/trainer/model_config.py", "ModelConfig")]
        for task, place, name in (
            ("grpo", "trainer/grpo_config.py", "GRPOConfig"),
            ("async_grpo", "experimental/async_grpo/async_grpo_config.py", "AsyncGRPOConfig"),
            ("rloo", "trainer/rloo_config.py", "RLOOConfig"),
            ("sft", "trainer/sft_config.py", "SFTConfig"),
            ("dpo", "trainer/dpo_config.py", "DPOConfig"),
            ("kto", "trainer/kto_config.py", "KTOConfig"),
            ("reward", "trainer/reward_config.py", "RewardConfig"),
            ("ppo", "experimental/ppo/ppo_config.py", "PPOConfig"),
            ("orpo", "experimental/orpo/orpo_config.py", "ORPOConfig"),
            ("cpo", "experimental/cpo/cpo_config.py", "CPOConfig"),
        )
    },
    "llamafactory": {
        "v0": [
            (f"src/llamafactory/hparams/{file}.py", name)
            for file, name in (
                ("training_args", "TrainingArguments"),
                ("finetuning_args", "FinetuningArguments"),
                ("data_args", "DataArguments"),
                ("model_args", "ModelArguments"),
                ("generating_args", "GeneratingArguments"),
            )
        ],
        "v1": [
            (f"src/llamafactory/v1/config/{file}.py", name)
            for file, name in (("training_args", "TrainingArguments"), ("data_args", "DataArguments"))
        ],
    },
}
ARGUMENTS = {"rl": "train_ppo_ray", "sft": "train_sft", "dpo": "train_dpo", "rm": "train_rm"}  # of OpenRLHF
PRESENT = ("actor.optimizer.",)  # sections that are absent by default, but in every training
NUMBERS = {"int": int, "float": float}


class Classes:
    """The dataclasses of some files, by name, with the constants of their modules."""

    def __init__(self, paths: list[Path], others: Classes | None = None) -> None:
        self.others = others  # where the bases are that these files do not have
        self.found: dict[str, ast.ClassDef] = {}
        self.constants: dict[str, Any] = {}
        for path in paths:
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.ClassDef):
                    self.found.setdefault(node.name, node)
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    self.constants[node.targets[0].id] = self.value(node.value)

    def value(self, node: ast.expr | None) -> Any:
        """The value of an expression that needs no running; ``UNKNOWN`` of all others."""
        if node is None:
            return UNKNOWN
        try:
            return ast.literal_eval(node)
        except ValueError:
            pass
        if isinstance(node, ast.Name):
            return self.constants.get(node.id, UNKNOWN)
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            sides = self.value(node.left), self.value(node.right)
            return UNKNOWN if UNKNOWN in sides else OPERATORS[type(node.op)](*sides)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("int", "float"):
            inner = self.value(node.args[0])
            return UNKNOWN if isinstance(inner, str) or inner is UNKNOWN else NUMBERS[node.func.id](inner)
        return self.value(node.body) if isinstance(node, ast.Lambda) else UNKNOWN

    def fields(self, name: str, before: str = "") -> Iterator[tuple[str, Any]]:
        """Every dotted key below a dataclass with its default, those of its bases first."""
        node = self.found.get(name)
        for base in reversed(node.bases) if node is not None else ():
            called = ast.unparse(base).rpartition(".")[2].replace("BaseTraining", "Seq2SeqTraining").removeprefix("Hf")
            home = self if called in self.found and called != name else self.others
            yield from home.fields(called, before) if home is not None else ()
        for line in node.body if node is not None else ():
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                self.constants[line.target.id] = self.value(line.value)
                yield from self._field(f"{before}{line.target.id}", ast.unparse(line.annotation), line.value)

    def _field(self, key: str, hint: str, default: ast.expr | None) -> Iterator[tuple[str, Any]]:
        inner = next((name for name in re.findall(r"\w+", hint) if name in self.found), None)
        words: dict[str | None, ast.expr | None] = {"default": default}
        if isinstance(default, ast.Call) and ast.unparse(default.func).rpartition(".")[2] == "field":
            words = {word.arg: word.value for word in default.keywords}
        if inner is not None and "tuple" not in hint and "default" in words and self.value(words["default"]) is None:
            yield f"{key}.", None  # a section that is there only if a file has it
        if inner is not None and "tuple" not in hint:
            yield from self.fields(inner, f"{key}.")
        elif (factory := words.get("default_factory")) is not None:
            yield key, {"list": [], "dict": {}}.get(ast.unparse(factory), self.value(factory))
        else:
            yield key, self.value(words.get("default"))


def of_dataclasses(name: str, checkout: Path, transformers: Path | None) -> dict[str, dict[str, Any]]:
    base = ("training_args", "training_args_seq2seq")
    theirs = Classes([transformers / f"{part}.py" for part in base]) if transformers else None
    programs: dict[str, dict[str, Any]] = {}
    for program, parts in DATACLASSES[name].items():
        programs[program] = {}
        for file, class_name in parts:
            path = checkout / file
            classes = Classes([path, *(checkout / "trl/trainer").glob("*_config.py")], theirs)
            for other in sorted(path.parent.glob("*_args.py")):
                classes.found = Classes([other]).found | classes.found
            programs[program] |= dict(classes.fields(class_name))
    return programs


def of_arguments(checkout: Path) -> dict[str, dict[str, Any]]:
    """OpenRLHF's flags; those of a loop over names are unrolled for the first of them."""
    programs = {}
    for program, file in ARGUMENTS.items():
        path = checkout / "openrlhf" / "cli" / f"{file}.py"
        text = path.read_text(encoding="utf-8")
        found: dict[str, Any] = {}
        for prefix in ("actor", "critic"):
            tree = ast.parse(text.replace("{prefix}", prefix).replace('prefix == "actor"', str(prefix == "actor")))
            classes = Classes([])
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("add_argument"):
                    flag = node.args[0]
                    parts = flag.values if isinstance(flag, ast.JoinedStr) else [flag]
                    key = "".join(str(part.value) for part in parts if isinstance(part, ast.Constant))
                    words = {word.arg: word.value for word in node.keywords}
                    if "dest" not in words:
                        found.setdefault(key.removeprefix("--").replace("-", "_"), _argument(words, classes))
        programs[program] = found
    return programs


def _argument(words: dict[str | None, ast.expr], classes: Classes) -> Any:
    default = words.get("default")
    if isinstance(default, ast.IfExp):
        return classes.value(default.body if ast.literal_eval(default.test) else default.orelse)
    if default is None:
        return False if "action" in words and "Optional" not in ast.unparse(words["action"]) else None
    found = classes.value(default)
    return list(found) if isinstance(found, tuple) else found


def of_verl(checkout: Path) -> dict[str, dict[str, Any]]:
    """Of its RL trainers from the files that it writes out, of its supervised one composed as its ``defaults`` say."""
    config = checkout / "verl" / "trainer" / "config"
    rl: dict[str, Any] = {}
    for name in ("_generated_ppo_trainer", "_generated_ppo_megatron_trainer"):
        rl = _flat(_yaml(config / f"{name}.yaml")) | rl
    sft = _flat(_yaml(config / "sft_trainer_engine.yaml"))
    for section, names in {
        "optim": ("fsdp", "megatron"),
        "engine": ("fsdp", "megatron"),
        "model": ("hf_model",),
    }.items():
        for name in names:
            sft = {
                f"{section}.{key}": value for key, value in _flat(_yaml(config / section / f"{name}.yaml")).items()
            } | sft
    return {"rl": rl, "sft": sft}


def of_assignments(checkout: Path) -> dict[str, dict[str, Any]]:
    """MindSpeed-RL's classes, which assign their defaults to themselves; a section of the file for each."""
    folder = checkout / "mindspeed_rl" / "config_cls"
    found: dict[str, dict[str, Any]] = {}
    for file, section in (("megatron", "actor_config"), ("rl", "rl_config"), ("generate", "generate_config")):
        classes, tree = Classes([]), ast.parse((folder / f"{file}_config.py").read_text(encoding="utf-8"))
        values: dict[str, Any] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).startswith("self."):
                values.setdefault(ast.unparse(node.targets[0]).removeprefix("self."), classes.value(node.value))
        if section == "rl_config":
            # Of the file, else these; the class multiplies the second by the first.
            values |= {"n_samples_per_prompt": 1, "mini_batch_size": 1}
        found[section] = _flat(values, f"{section}.")
    return {"rl": found["actor_config"] | found["rl_config"] | found["generate_config"], "dpo": found["actor_config"]}


def _yaml(path: Path) -> Any:
    """Also ``1e-3``, which YAML takes for a word."""
    return yaml.safe_load(re.sub(r": (\d+)e-(\d+)\b", r": \1.0e-\2", path.read_text(encoding="utf-8")))


def _flat(tree: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            found |= _flat(value, f"{before}{key}.")
        elif isinstance(value, str) and (reference := re.fullmatch(r"\$\{oc\.select:[^${}]*,\s*([^${}]*)\}", value)):
            found[f"{before}{key}"] = yaml.safe_load(reference[1] or "null")
        elif value != "???" and not (isinstance(value, str) and "${" in value):
            found[f"{before}{key}"] = value
    return found


def of_flags(checkout: Path, megatron: Path) -> dict[str, dict[str, Any]]:
    """slime's flags, over those of Megatron's training program; some of these are fields of classes."""
    core, training = megatron / "megatron" / "core", megatron / "megatron" / "training"
    files = [*sorted((training / "config").glob("*.py")), core / "model_parallel_config.py"]
    classes = Classes([*files, core / "transformer" / "transformer_config.py"])
    found: dict[str, Any] = {}
    for name in ("TransformerConfig", "TrainingConfig", "SchedulerConfig", "RNGConfig", "CheckpointConfig"):
        found |= dict(classes.fields(name))
    for path in (training / "arguments.py", checkout / "slime" / "utils" / "arguments.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            called = ast.unparse(node.func).rpartition(".")[2] if isinstance(node, ast.Call) else ""
            if not isinstance(node, ast.Call) or called not in ("add_argument", "reset_arg"):
                continue
            flags = [flag.value for flag in node.args if isinstance(flag, ast.Constant)]
            words = {word.arg: word.value for word in node.keywords}
            for flag in flags:
                if str(flag).startswith("--") and (called == "add_argument" or "default" in words):
                    found[str(flag)[2:].replace("-", "_")] = _argument(words, classes)
    return {"all": found | {"bf16": True}}  # which the program sets unless fp16 is given


def of_swift(checkout: Path, transformers: Path) -> dict[str, dict[str, Any]]:
    """ms-swift's classes, which have those of transformers among their bases."""
    theirs = Classes([transformers / f"{part}.py" for part in ("training_args", "training_args_seq2seq")])
    root = checkout / "swift"
    files = [*(root / "arguments").rglob("*_args.py"), root / "trainers" / "arguments.py"]
    classes = Classes([*sorted(files), root / "rlhf_trainers" / "args_mixin.py"], theirs)
    mixed = Classes([*sorted((root / "megatron" / "arguments").glob("*_args.py"))], classes)
    plain = dict(classes.fields("BaseArguments"))
    return {
        "megatron": plain | dict(mixed.fields("MegatronArguments")),
        "sft": dict(classes.fields("SftArguments")),
        "rlhf": dict(classes.fields("RLHFArguments")),
    }


READERS = {"verl": of_verl, "openrlhf": of_arguments, "mindspeed_rl": of_assignments}  # others: dataclasses


def commit(checkout: Path) -> str:
    """Of a git checkout, or of the folder that it was unpacked in, by a file ``COMMIT``."""
    noted = checkout / "COMMIT"
    if noted.is_file():
        return noted.read_text(encoding="utf-8").strip()
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    if asked.returncode:
        raise InputError(f"{checkout} is no git checkout: give one, or write its commit into {noted}")
    return asked.stdout.strip()


def _is_path(value: Any) -> bool:
    """Of a place on the machine of who wrote it, which nobody is to take over."""
    return isinstance(value, str) and value.startswith(("/", "~", "./"))


def known(name: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Those of the keys that the table computes or refuses, and sections that can be absent, with a dot at the end."""
    entries = {key: table(name).entries.get(key) for key in defaults}
    kept = {
        key: value
        for key, value in defaults.items()
        if value is not UNKNOWN
        and not _is_path(value)
        and (entry := entries[key]) is not None
        and entry.kind in ("set", "rules", "none")
    }
    absent = [key for key in defaults if key.endswith(".") and key not in PRESENT]
    kept |= {key: None for key in absent if any(other.startswith(key) for other in kept)}
    return dict(sorted(kept.items()))


def factored(programs: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What all programs have alike stands once, under ``EVERY``."""
    first, *others = programs.values()
    alike = {key: value for key, value in first.items() if all(key in o and o[key] == value for o in others)}
    rest = {name: {key: v for key, v in keys.items() if key not in alike} for name, keys in programs.items()}
    return {EVERY: alike, **rest}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="name", required=True, choices=NEIGHBOURS)
    parser.add_argument("checkout", type=Path)
    parser.add_argument(
        "--transformers", type=Path, help="trl, llamafactory and swift: the package whose arguments they take over"
    )
    parser.add_argument("--megatron", type=Path, help="slime: a checkout of Megatron-LM, whose flags it takes over")
    options = parser.parse_args()
    if options.name == "slime" and options.megatron is None:
        parser.error("--megatron: slime takes over the flags of Megatron-LM")
    if options.name in ("trl", "llamafactory", "swift") and options.transformers is None:
        parser.error(f"--transformers: {options.name} takes over the arguments of its trainer")
    if options.name == "swift":
        programs = of_swift(options.checkout, options.transformers)
    elif options.name == "slime":
        programs = of_flags(options.checkout, options.megatron)
    elif options.name in READERS:
        programs = READERS[options.name](options.checkout)
    else:
        programs = of_dataclasses(options.name, options.checkout, options.transformers)
    head = {"commit": commit(options.checkout)}
    if options.megatron:
        head["megatron"] = commit(options.megatron)
    if options.transformers:
        version = re.search(r'__version__ = "(.+)"', (options.transformers / "__init__.py").read_text(encoding="utf-8"))
        head["transformers"] = version[1] if version else "unknown"
    tree = head | factored({program: known(options.name, found) for program, found in programs.items()})
    TARGET.mkdir(exist_ok=True)
    text = f"# Defaults of {NEIGHBOURS[options.name]}, written by tools/neighbour_defaults.py from its source.\n"
    text += yaml.safe_dump(tree, sort_keys=False, width=10_000, allow_unicode=True)
    (TARGET / f"{options.name}.yaml").write_text(text, encoding="utf-8")
    print({program: len(found) for program, found in tree.items() if isinstance(found, dict)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
