"""Run a Python script on the pretended devices: ``run_emulated.py SCRIPT ARGUMENTS...``, also under torchrun."""

from __future__ import annotations

import runpy
import sys

from tests.npu import emulation

if __name__ == "__main__":
    emulation.start()
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")
