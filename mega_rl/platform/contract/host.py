"""Host memory of this process, on every platform."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")  # Linux: writing 5 starts a new peak


def host_peak_bytes() -> int:
    """Largest resident set of this process since ``reset_host_peak``, in bytes.

    Linux says it in its status file; ``getrusage`` there also counts the parent that a process was forked from.
    Elsewhere ``getrusage`` counts bytes (macOS) or KiB.
    """
    if _STATUS.is_file():
        found = re.search(r"^VmHWM:\s+(\d+) kB$", _STATUS.read_text(), re.MULTILINE)
        if found:
            return int(found.group(1)) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_host_peak() -> bool:
    """Start a new peak; False if the system cannot (not Linux, or forbidden) and it stays that of the process."""
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return True
