"""The training engine on Megatron-core: the only package that imports ``megatron.*``.

Importing it makes the process ready first (platform patches, MindSpeed), because Megatron-core looks for its device as
it is imported.
"""

from mega_rl import platform

platform.prepare()

from mega_rl.megatron import compat  # noqa: E402, F401  isort: skip  (before any module that imports Megatron)
from mega_rl.megatron import fused  # noqa: E402

fused.install()
