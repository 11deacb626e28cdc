"""Import the training engine, and with it Megatron-core, what is patched into it, and MindSpeed's operators."""

from __future__ import annotations

import importlib.metadata
import sys

from mega_rl import platform
from mega_rl.doctor.probes import report
from mega_rl.megatron import engine

report(
    engine=engine.__name__,
    version=importlib.metadata.version("megatron-core"),
    mindspeed="mindspeed" in sys.modules,
    prepared=list(platform.prepare()),
)
