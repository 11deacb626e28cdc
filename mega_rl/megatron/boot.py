"""Making a process ready for Megatron-core."""

from __future__ import annotations

from mega_rl import platform
from mega_rl.megatron.layers import compat


def boot() -> None:
    """Prepare the platform (its patches, MindSpeed), then import Megatron-core and apply the fixes of ``compat``.

    Must run once, before anything imports ``megatron``, which looks for its device while it is imported.
    """
    platform.prepare()
    compat.apply()
