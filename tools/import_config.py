"""Makes a configuration from one of another trainer: verl, TRL, LLaMA-Factory, AReaL, OpenRLHF, MindSpeed-RL, slime
or ms-swift.

    python tools/import_config.py --from verl run_grpo.sh -o run.yaml
    python tools/import_config.py --from trl "trl grpo --model_name_or_path MODEL --beta 0.01" --devices 8 -o run.yaml
    python tools/import_config.py --from llamafactory qwen3_full_sft.yaml --devices 8 -o run.yaml

FILE_OR_COMMAND_LINE is a YAML or JSON file, a shell script, a Python script of TRL, or the command line itself, quoted.
Nothing of it is run. Without it, every key that is known is listed, and the names of metrics. Every key of it is
listed with what became of it: set here, nothing to set, or no counterpart and why. Exit status 0: every key has a
counterpart or needs none; 3: run.yaml is written, but some keys have no counterpart and stand in its head; 2: input
that cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from omegaconf import OmegaConf

from mega_rl.config import load_config, problems
from mega_rl.config.reading.tables import NEIGHBOURS, key_lines, metric_lines
from mega_rl.errors import InputError, shown
from mega_rl.importers.convert import as_tree, convert
from mega_rl.importers.draft.draft import Draft
from mega_rl.importers.draft.reading import read_given

TITLES = {
    "mapped": "set here",
    "same": "nothing to set",
    "none": "no counterpart",
    "unknown": "not in the table",
}
INCOMPLETE = 3  # exit status


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="neighbour", required=True, choices=NEIGHBOURS)
    parser.add_argument("given", nargs="*", metavar="FILE_OR_COMMAND_LINE", help="without it: list every known key")
    parser.add_argument("-o", "--out", type=Path, default=Path("run.yaml"), help="default run.yaml")
    parser.add_argument("--devices", type=int, help="of the run, where batch sizes count per device")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a shell variable of a script")
    return parser.parse_args(arguments)


def make(options: argparse.Namespace) -> tuple[Draft, str]:
    """The draft and the text of its file.

    Raises:
        InputError: of what is given.
    """
    if options.devices is not None and options.devices < 1:
        raise InputError(f"--devices is {options.devices}: give the number of devices of the run, >= 1")
    for pair in options.set:
        if "=" not in pair:
            raise InputError(f"--set {shown(pair)} is malformed: write it as NAME=VALUE")
    known = dict(pair.split("=", 1) for pair in options.set)
    given = read_given(options.given, known)
    draft = convert(options.neighbour, given, options.devices)
    lines = [f"# Made by tools/import_config.py --from {options.neighbour}."]
    lines += [f"# No counterpart: {line}" for line in listed(draft, "none") + listed(draft, "unknown")]
    lines += [f"# To be checked: {note}" for note in draft.notes]
    body = OmegaConf.to_yaml(OmegaConf.create(as_tree(draft.result)))
    return draft, "\n".join(line.replace("\n", " ") for line in lines) + "\n" + body


def listed(draft: Draft, became: str) -> list[str]:
    found = {key: outcome.text for key, outcome in draft.outcomes.items() if outcome.became == became}
    return [f"{key} = {shown(draft.given.values[key])}: {text}" for key, text in sorted(found.items())]


def report(draft: Draft, out: Path) -> str:
    """What became of every key, for the console."""
    assert draft.outcomes.keys() >= draft.given.values.keys(), draft.given.values.keys() - draft.outcomes.keys()
    parts = []
    for became, title in TITLES.items():
        if lines := listed(draft, became):
            parts.append("\n".join([f"{title}: {len(lines)}", *(f"  {line}" for line in lines)]))
    if draft.notes:
        parts.append("\n".join(["to be checked", *(f"  {note}" for note in draft.notes)]))
    parts.append(f"wrote {out}" + "".join(f"\n  still wrong there: {problem}" for problem in wrong(out)))
    return "\n".join(parts)


def wrong(out: Path) -> list[str]:
    """What a run would say against the file."""
    try:
        return problems(load_config(out))
    except InputError as error:
        return [str(error)]


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if not options.given:
        print("\n".join([*key_lines(options.neighbour, "en"), "", *metric_lines(options.neighbour)]))
        return 0
    try:
        draft, text = make(options)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --out {options.out} cannot be written ({error}): choose another file", file=sys.stderr)
        return 2
    print(report(draft, options.out))
    return INCOMPLETE if any(o.became in ("none", "unknown") for o in draft.outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
