"""Lets the package index's torchvision, which is built against CUDA, be imported beside a torch for CPUs.

Its operators cannot be loaded there, and nothing here needs them: image processors use what it has in Python. But while
it is imported it registers shape functions of two operators, whose schemas must exist by then.

``tools/bootstrap.sh`` copies this file into the environment, whose every Python imports it at its start.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class SchemaFinder(MetaPathFinder):
    """Finds no module: it defines the two schemas when torchvision is about to need them."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname != "torchvision._meta_registrations":
            return
        import torch

        for name in ("nms", "qnms"):
            if not hasattr(torch.ops.torchvision, name):
                torch.library.define(f"torchvision::{name}", SCHEMA)


sys.meta_path.insert(0, SchemaFinder())
