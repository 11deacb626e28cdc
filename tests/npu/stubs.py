"""Builds shared libraries in the place of CANN's, so that the torch_npu wheel loads on a host without CANN.

    python tests/npu/stubs.py --wheel DIRECTORY --out DIRECTORY

Which libraries are missing and which functions they must have is read from the wheel itself (readelf, nm). The runtime
that pretends devices is ``pretended_cann.c``; every other function says that it is not there when it is called. All
missing names are links to that one library.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

RUNTIME = Path(__file__).with_name("pretended_cann.c")
LIBRARY = "libascendcl.so"
SYSTEM = ("libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1")


def output_of(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


def needed_by(library: Path) -> list[str]:
    return re.findall(r"\(NEEDED\).*\[(.+?)\]", output_of("readelf", "-d", library))


def symbols(file: Path, *options: str) -> set[str]:
    """Names by nm, without versions; names that may stay undefined (weak) are left out."""
    lines = [line.split() for line in output_of("nm", *options, file).splitlines()]
    return {fields[-1].split("@")[0] for fields in lines if len(fields) >= 2 and fields[-2] not in "wv"}


def system_libraries() -> list[Path]:
    """Where this process has mapped the C and C++ libraries, the dynamic loader included."""
    for name in SYSTEM:
        with suppress(OSError):  # parts of libc.so.6 in newer systems
            ctypes.CDLL(name)
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if ".so" in line}
    found = [Path(path) for path in mapped if Path(path).name.startswith((*SYSTEM, "ld-linux"))]
    assert len(found) >= 4, f"the C and C++ libraries of this host are not among {sorted(mapped)}"
    return found


def wheel_libraries(wheel: Path) -> list[Path]:
    package = wheel / "torch_npu"
    extension = next(package.glob("_C.*.so"))
    return [extension, *sorted((package / "lib").glob("*.so"))]


def source_of(names: Iterable[str]) -> str:
    """C that defines what the runtime does not: functions, or zeroed objects for C++ type information."""
    lines = ["int pretended_cann_missing(const char *);"]
    for number, name in enumerate(sorted(names)):
        if name.startswith(("_ZTV", "_ZTI", "_ZTS", "_ZGV")):
            lines.append(f'char object_{number}[256] __asm__("{name}");')
        else:
            lines.append(f'int function_{number}(void) __asm__("{name}");')
            lines.append(f'int function_{number}(void) {{ return pretended_cann_missing("{name}"); }}')
    return "\n".join(lines) + "\n"


def build(wheel: Path, out: Path) -> list[str]:
    """Compile into ``out`` and return the names of the libraries made.

    Args:
        wheel: the directory that holds ``torch_npu``.
        out: a directory, made where there is none.
    """
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None, "torch is installed"
    torch_libraries = list((Path(torch.origin).parent / "lib").glob("*.so*"))
    libraries = wheel_libraries(wheel)
    present = {path.name for path in (*libraries, *torch_libraries)}
    needed = {name for path in libraries for name in needed_by(path)} - present
    missing = sorted(name for name in needed if not name.startswith((*SYSTEM, "ld-linux")))  # also where CANN is there
    assert LIBRARY in missing, missing

    asked = set().union(*(symbols(path, "-D", "--undefined-only") for path in libraries))
    there = [*libraries, *torch_libraries, *system_libraries()]
    given = set().union(*(symbols(path, "-D", "--defined-only") for path in there))
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        runtime, rest = Path(scratch) / "runtime.o", Path(scratch) / "rest.c"
        subprocess.run(["gcc", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-c", RUNTIME, "-o", runtime], check=True)
        left = asked - given - symbols(runtime, "--defined-only")
        rest.write_text(source_of(name for name in left if not re.match(r"_?Py|__gmon_start__|_ITM_", name)))
        built = Path(scratch) / LIBRARY
        command = ["gcc", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{LIBRARY}", runtime, rest, "-o", built]
        subprocess.run(command, check=True)
        (out / f".{LIBRARY}").write_bytes(built.read_bytes())
    (out / f".{LIBRARY}").rename(out / LIBRARY)  # in one step: another process may be loading it
    for name in missing:
        if name != LIBRARY and not (out / name).is_symlink():
            (out / name).symlink_to(LIBRARY)
    return missing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, required=True, help="the directory that holds torch_npu")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    names = build(arguments.wheel, arguments.out)
    print(f"built {len(names)} libraries in {arguments.out}: {', '.join(names)}")


if __name__ == "__main__":
    main()
