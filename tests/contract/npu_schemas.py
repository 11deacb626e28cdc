"""Operator schemas of torch_npu, read from its wheel without importing it.

    python -m tests.contract.npu_schemas 2.10.0.post4 2.14.0      # print what differs from what is recorded
    python -m tests.contract.npu_schemas --record WHEEL_OR_FOLDER  # write npu_schemas/VERSION.json

The library ``libtorch_npu.so`` holds every schema as text, as it registers them with torch's dispatcher; the module
``utils/custom_ops.py`` says which are functions of ``torch_npu``. A folder is one that the wheel was installed into; a
version is fetched by pip from the package index that it is set up for.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.npu.stand_ins import COMPOSED, STAND_INS

RECORDED = Path(__file__).resolve().parent / "npu_schemas"
LIBRARY, FUNCTIONS = "torch_npu/lib/libtorch_npu.so", "torch_npu/utils/custom_ops.py"


@dataclass(frozen=True)
class OperatorSchema:
    """One operator: what the dispatcher takes, and whether ``torch_npu`` has a function of its name."""

    schema: str
    is_function: bool


def read_files(source: Path) -> tuple[str, bytes, str]:
    """Version, library and list of functions of a wheel or of a folder it was installed into."""
    if source.is_dir():
        (metadata,) = source.glob("torch_npu-*.dist-info")
        version = metadata.name.split("-")[1].removesuffix(".dist")
        return version, (source / LIBRARY).read_bytes(), (source / FUNCTIONS).read_text(encoding="utf-8")
    with zipfile.ZipFile(source) as wheel:
        return source.name.split("-")[1], wheel.read(LIBRARY), wheel.read(FUNCTIONS).decode()


def read_schemas(library: bytes, functions: str) -> dict[str, OperatorSchema]:
    """Of the operators that our stand-ins stand for; ValueError where one is missing or has two schemas."""
    found = {}
    for name in sorted(name.removeprefix("npu::") for name in STAND_INS | COMPOSED):
        texts = {text.decode() for text in re.findall(rb"\0(%s\([^\0]*\) -> [^\0]*)\0" % name.encode(), library)}
        if len(texts) != 1:
            raise ValueError(f"{name} has {len(texts)} schemas in {LIBRARY}: {sorted(texts)}")
        is_function = f"\ntorch_npu.{name} = torch.ops.npu.{name}\n" in functions
        found[name] = OperatorSchema(texts.pop(), is_function)
    return found


def recorded_schemas(version: str) -> dict[str, OperatorSchema]:
    entries = json.loads((RECORDED / f"{version}.json").read_text(encoding="utf-8"))
    return {name: OperatorSchema(**entry) for name, entry in entries.items()}


def differences(own: dict[str, OperatorSchema], other: dict[str, OperatorSchema]) -> list[str]:
    names = sorted(own.keys() | other.keys())
    return [f"{n}: {own.get(n)} here, {other.get(n)} there" for n in names if own.get(n) != other.get(n)]


def fetch(version: str, folder: Path) -> Path:
    """The wheel of a version, for any machine: it is read and not installed."""
    options = ["--no-deps", "--only-binary=:all:", "--python-version=3.11", "--platform=manylinux_2_28_x86_64"]
    command = [sys.executable, "-m", "pip", "download", "-q", *options, "-d", str(folder), f"torch_npu=={version}"]
    subprocess.run(command, check=True)
    (wheel,) = folder.glob(f"torch_npu-{version}-*.whl")
    return wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="+", help="versions, wheels, or folders with an installed one")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    faults = []
    for source in arguments.sources:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(source) if Path(source).exists() else fetch(source, Path(folder))
            version, library, functions = read_files(path)
        schemas = read_schemas(library, functions)
        if arguments.record:
            text = json.dumps({name: asdict(schema) for name, schema in schemas.items()}, indent=1)
            (RECORDED / f"{version}.json").write_text(text + "\n", encoding="utf-8")
        faults += [f"{version}: {fault}" for fault in differences(recorded_schemas(version), schemas)]
    sys.exit("\n".join(faults) or None)


if __name__ == "__main__":
    main()
