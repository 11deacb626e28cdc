"""How often the host waits for the device: operators that hand it a number, or a tensor whose size it must know."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "bincount"}
COPIES = {"_to_copy", "copy_"}


class HostReads(TorchDispatchMode):
    """Counts them by name in the thread that it is entered in; tensors of the host are not waited for.

    The forward pass runs in that thread, and recomputation too; on some devices the rest of the backward pass does not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        result = func(*args, **(kwargs or {}))
        given = [x.device.type for x in args if isinstance(x, torch.Tensor)]
        if (
            name in WAITS
            and any(device != "cpu" for device in given)
            or name in COPIES
            and given[-1] != "cpu"
            and result.device.type == "cpu"
        ):
            self.counts[name] += 1
        return result
