"""What is wrong with this machine, before a run finds out: ``python tools/check_env.py [--quick] [--json]``.

Every check is a row: its state (ok, warn, fail, skip), what was found, and how to fix it. Nothing on the machine is
changed and no device is reset; the trials at the end start processes of their own, which ``--quick`` leaves out.

Exit status 0: no check failed (with ``--strict``: nor warned), 1: something is wrong, 2: a wrong call.
"""

from __future__ import annotations

import os
import sys

ENVIRON = dict(os.environ)  # what is examined
# Else `import torch` imports torch_npu where that is installed, and fails with it where CANN is missing.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

try:
    from mega_rl.doctor.command import main
except (ImportError, OSError) as error:  # OSError: a shared library that torch links is not there
    print(
        f"error: mega_rl cannot be imported ({error}): install its dependencies again, see README.md", file=sys.stderr
    )
    sys.exit(1)

if __name__ == "__main__":
    sys.exit(main(__doc__, ENVIRON))
