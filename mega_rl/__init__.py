"""mega_rl: reinforcement-learning post-training of large language models on Ascend NPUs, NVIDIA GPUs and CPUs."""

__version__ = "0.1.0"

import os
import sys
from importlib.abc import MetaPathFinder
from typing import Any

# Else `import torch` imports torch_npu where that is installed: before its variables are set, and with a traceback
# where CANN is missing. mega_rl.platform imports it where it is wanted.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


class _TorchvisionSchemas(MetaPathFinder):
    """Lets the package index's torchvision, which is built against CUDA, be imported beside a torch for CPUs.

    Its operators cannot be loaded there, and nothing here needs them: image processors use what it has in Python. But
    it registers shape functions of two operators while it is imported, and their schemas must exist by then.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname != "torchvision._meta_registrations":
            return
        import torch

        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(
                    f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )


sys.meta_path.insert(0, _TorchvisionSchemas())
