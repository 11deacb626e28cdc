"""Whether what torch_npu needs is on this machine, found out before it is imported and fails with a traceback."""

from __future__ import annotations

import ctypes
import re

RUNTIME = "libascendcl.so"  # CANN's runtime, which torch_npu is linked to
DRIVER = "libascend_hal.so"  # the driver's, which CANN's runtime is linked to
SET_ENV = (
    "source CANN's set_env.sh, such as /usr/local/Ascend/cann/set_env.sh or /usr/local/Ascend/ascend-toolkit/set_env.sh"
)


def missing_library() -> str | None:
    """What keeps CANN's runtime from loading, with the fix; None if it loads."""
    try:
        ctypes.CDLL(RUNTIME)
    except OSError as error:
        return explain(str(error))
    return None


def explain(message: str) -> str:
    """The dynamic loader's message about torch_npu or CANN as a sentence with the fix."""
    found = re.search(r"(lib[\w.+-]+\.so[\w.]*)", message)
    library = found.group(1) if found else ""
    if library.startswith(DRIVER):
        return (
            f"the Ascend driver is missing ({library} is not found): install it, in a container mount "
            "/usr/local/Ascend/driver and the /dev/davinci devices, and have its lib64 folders on LD_LIBRARY_PATH"
        )
    if "cannot open shared object file" in message:
        package = "NNAL" if library.startswith(("libatb", "libasdops")) else "CANN"
        what = {"NNAL": "source NNAL's set_env.sh too, such as /usr/local/Ascend/nnal/atb/set_env.sh"}
        return f"{package} is missing ({library} is not found): install it, and {what.get(package, SET_ENV)}"
    if "undefined symbol" in message and "torch_npu" in message:
        return (
            f"torch_npu does not fit the installed torch or CANN ({message.splitlines()[0]}): install versions that "
            "belong together, see docs/ascend.md"
        )
    return f"CANN does not load ({message.splitlines()[0] if message else 'no reason given'}): {SET_ENV}"
