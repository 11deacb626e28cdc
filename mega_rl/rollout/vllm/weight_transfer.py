"""Our receiver at vLLM's weight-transfer extension point.

Imported only by vLLM's worker, by the name under which ``register`` announces it.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo

from mega_rl.rollout.receiver import Link
from mega_rl.rollout.vllm.start.versions import TransferMethods


@dataclass
class InitInfo(WeightTransferInitInfo):
    link: Link


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Empty: the plan says everything."""


class ShardReceiver(TransferMethods, WeightTransferEngine):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
