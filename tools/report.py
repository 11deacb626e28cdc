"""Show runs: ``python tools/report.py RUN [RUN ...] [-o FILE.html] [--names NAME ...] [--samples N]``.

Writes one HTML file that needs neither a network nor a server: curves by section, samples in the colours of their
tokens' probabilities, time per phase, memory, weight syncs, configuration, warnings. Several runs lie over each other.
Exit status 0: the file is written, 2: bad input.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from mega_rl.data.pictures.thumbnails import RecordedPictures
from mega_rl.errors import InputError, shown
from mega_rl.report.page import page
from mega_rl.report.read import CONFIG_FILE, RunRecord, read_run
from mega_rl.report.samples import Decode, Thumbnails, spread

MAX_RUNS, MAX_SAMPLES = 16, 200


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="run", help="output directory of a run")
    parser.add_argument("-o", "--out", type=Path, metavar="FILE", help="default: report.html in the first run")
    parser.add_argument("--names", nargs="+", help="of the runs, in their order; default: of their directories")
    parser.add_argument("--samples", type=int, default=12, metavar="N", help="shown of each run (default: 12)")
    return parser.parse_args(arguments)


def names_of(paths: Sequence[Path], given: Sequence[str] | None) -> list[str]:
    """A name for each run, no two alike."""
    if given is not None and len(given) != len(paths):
        raise InputError(f"--names has {len(given)} names for {len(paths)} runs: give one for each")
    names = list(given) if given is not None else [path.resolve().name for path in paths]
    if len(set(names)) == len(names):
        return names
    if given is not None:
        raise InputError("--names has a name twice: give each run its own")
    return [f"{name} {number}" for number, name in enumerate(names, start=1)]


def decoder(run: RunRecord) -> Decode | None:
    """What makes text of the run's tokens: the tokenizer of its exported weights, else that of ``model.path``."""
    if not run.rollouts:
        return None
    model = json.loads(run.settings.get("model.path", '""'))
    for directory in (run.path / "huggingface", Path(str(model))):
        file = directory / "tokenizer.json"
        if file.is_file():
            try:
                tokenizer = Tokenizer.from_file(str(file))
            except Exception as error:  # noqa: BLE001 - the library raises bare Exception
                run.problems.append(f"{file} cannot be read ({error}), so the samples have no colours")
                return None
            largest = tokenizer.get_vocab_size(with_added_tokens=True)
            return lambda ids: tokenizer.decode([i for i in ids if 0 <= i < largest], skip_special_tokens=False)
    run.problems.append("no tokenizer.json lies in huggingface/ or model.path, so the samples have no colours")
    return None


def thumbnails(run: RunRecord, num_samples: int) -> Thumbnails | None:
    """What finds the pictures of the prompts that are shown, in the files of ``data.train_files``."""
    wanted = {row["index"] for row in spread(run.rollouts, num_samples) if row["pictures"]}
    if not wanted:
        return None
    problem, key = "the pictures of the samples are not shown: ", "data.train_files"
    try:
        files = json.loads(run.settings.get(key, "[]"))
        if not isinstance(files, list) or not all(isinstance(file, str) for file in files):
            raise InputError(f"{key} in {CONFIG_FILE} is {shown(files)}, not a list of paths; correct it")
        recorded = RecordedPictures(files, key, wanted)
    except InputError as error:
        run.problems.append(f"{problem}{error}")
        return None

    def found(index: int, digests: Sequence[str]) -> Sequence[bytes | str]:
        try:
            return recorded.of(index, digests)
        except InputError as error:
            if not any(line.startswith(problem) for line in run.problems):
                run.problems.append(f"{problem}{error}")
            return []

    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    if len(options.runs) > MAX_RUNS:
        raise InputError(f"{len(options.runs)} runs are too many for one page: give at most {MAX_RUNS}")
    if not 0 <= options.samples <= MAX_SAMPLES:
        raise InputError(f"--samples {options.samples} is not in 0..{MAX_SAMPLES}")
    names = names_of(options.runs, options.names)
    runs = [read_run(path, name) for path, name in zip(options.runs, names, strict=True)]
    found = {run.name: decode for run in runs if (decode := decoder(run)) is not None}
    out: Path = options.out or options.runs[0] / "report.html"
    pictures = {run.name: made for run in runs if (made := thumbnails(run, options.samples)) is not None}
    text = page(runs, found, options.samples, pictures).encode(errors="replace")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_bytes(text)
    except OSError as error:
        raise InputError(f"-o {out} cannot be written ({error.strerror}): name another file") from error
    for run in runs:
        for problem in run.problems:
            print(f"{run.name}: {problem}")
    print(f"report: {out} ({len(text) / 1e6:.1f} MB)")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
