"""Builds the shared libraries that vllm-ascend's compiled extension asks for and a host without CANN lacks.

As ``stubs.py`` does for torch_npu: which libraries and functions is read from the wheel. Two functions of torch's C++
interface have other names in torch 2.13 than in 2.10, for which the extension is compiled, and the same arguments:
jumps lead from the old names to the new ones.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import tempfile
from pathlib import Path

from tests.npu.stubs import LIBRARY, SYSTEM, needed_by, source_of, symbols, system_libraries

# Beginning of a name in torch 2.10 -> pattern of the name in the present one.
RENAMED = {
    "_ZNR5torch7Library4_defEON3c1014FunctionSchemaE": r"_ZNR5torch7Library4_defEON3c1014FunctionSchemaE.*only3Tag",
    "_ZN3c104impl3cow23materialize_cow_storage": r"_ZN3c104impl3cow15materialize_cowEPNS_11StorageImplE$",
}
# What is called while an engine starts, and must succeed.
RUNTIME = """
#include <stdint.h>
#include <stddef.h>
int aclrtMemGetAllocationGranularity(void *properties, int option, size_t *granularity) {
    (void)properties, (void)option;
    *granularity = 2 << 20;
    return 0;
}
int aclrtCreateContext(void **context, int32_t device) {
    *context = (void *)(intptr_t)(device + 1);
    return 0;
}
"""


def extension_libraries(package: Path) -> list[Path]:
    return [*package.glob("vllm_ascend_C*.so"), *package.glob("libvllm_ascend_kernels.so")]


def jump(name: str, torch_names: set[str]) -> str | None:
    """Assembler from a name of torch 2.10 to that of the present torch; None for a name of something else."""
    pattern = next((new for old, new in RENAMED.items() if name.startswith(old)), None)
    if pattern is None:
        return None
    (present,) = (own for own in torch_names if re.match(pattern, own))
    return f'__asm__(".globl {name}\\n{name}:\\n jmp {present}@PLT\\n");\n'


def build(package: Path, wheel: Path, base: Path, out: Path) -> None:
    """Compile into ``out``, made where there is none.

    Args:
        package: the directory of ``vllm_ascend``.
        wheel: the directory that holds ``torch_npu``.
        base: where ``stubs.py`` has built its libraries.
    """
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None, "torch is installed"
    torch_libraries = list((Path(torch.origin).parent / "lib").glob("*.so*"))
    wanted = extension_libraries(package)
    there = [*wanted, *torch_libraries, *(wheel / "torch_npu" / "lib").glob("*.so"), base / LIBRARY]
    needed = {name for path in wanted for name in needed_by(path)} - {path.name for path in there}
    missing = sorted(name for name in needed if not name.startswith((*SYSTEM, "ld-linux")))
    torch_names = set().union(*(symbols(path, "-D", "--defined-only") for path in torch_libraries))
    given = torch_names.union(*(symbols(path, "-D", "--defined-only") for path in (*there, *system_libraries())))
    asked = set().union(*(symbols(path, "-D", "--undefined-only") for path in wanted))
    left = {name for name in asked - given if not re.match(r"_?Py|__gmon_start__|_ITM_", name)}
    jumps = {name: code for name in left if (code := jump(name, torch_names)) is not None}
    own = set(re.findall(r"int (\w+)\(", RUNTIME))
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        source, built = Path(scratch) / "rest.c", Path(scratch) / missing[0]
        source.write_text(RUNTIME + source_of(left - jumps.keys() - own) + "".join(jumps.values()))
        linked = [base / LIBRARY, *(path for path in torch_libraries if path.name in ("libtorch_cpu.so", "libc10.so"))]
        name = f"-Wl,-soname,{missing[0]}"
        subprocess.run(["gcc", "-O1", "-shared", "-fPIC", name, source, *linked, "-o", built], check=True)
        (out / f".{missing[0]}").write_bytes(built.read_bytes())
    (out / f".{missing[0]}").rename(out / missing[0])  # in one step: another process may be loading it
    for name in missing[1:]:
        if not (out / name).is_symlink():
            (out / name).symlink_to(missing[0])
