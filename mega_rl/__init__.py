"""mega_rl: reinforcement-learning post-training of large language models on Ascend NPUs, NVIDIA GPUs and CPUs."""

__version__ = "0.1.0"

import os

# Else `import torch` imports torch_npu where that is installed: before its variables are set, and with a traceback
# where CANN is missing. mega_rl.platform imports it where it is wanted.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
