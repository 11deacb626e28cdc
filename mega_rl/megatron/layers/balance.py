"""Routers of experts in training: the losses that keep experts in use, and the bias that moves their choice.

The load-balancing loss is the Switch Transformer's (arXiv 2101.03961, equation 4) in the form of Megatron-core: of one
layer ``E / K * sum_i f_i P_i``, where ``f_i`` is how many of the K experts of a token are expert i, on average over the
tokens, and ``P_i`` the mean of its scores; the choice is that of the scores alone, without bias, groups and replay. It
is 1 if all experts are used alike. The average is taken over the tokens of one sequence (DeepSeek-V3, arXiv
2412.19437, equation 17), which does not depend on how a batch is packed and distributed, or over those of one
micro-batch. The z-loss is the mean of ``logsumexp(logits)^2`` over tokens (ST-MoE, arXiv 2202.08906, equation 5). Both
are summed over the layers, and are a part of the gradient only: no stage's loss shows them.

Letters: N tokens of this rank as its routers see them, E experts, K experts of a token, S groups of tokens and one
more for padding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, compute_routing_scores_for_aux_loss
from torch import Tensor

from mega_rl.config.schema.learning import RouterConfig
from mega_rl.microbatch import Microbatch
from mega_rl.models.mixture import Mixture
from mega_rl.parallel.collectives import summed
from mega_rl.parallel.zigzag import PADDING


@dataclass(frozen=True)
class BalanceTotals:
    """Of all micro-batches of an optimizer step on all data-parallel ranks."""

    num_sequences: int
    num_tokens: int

    @classmethod
    def of(cls, microbatches: Sequence[Microbatch], is_counted: bool) -> BalanceTotals:
        """Collective; ``is_counted``: whether a sum over ranks includes this one."""
        lengths = [length for microbatch in microbatches for length in microbatch.lengths] if is_counted else []
        return cls(*summed([len(lengths), sum(lengths)]))


@dataclass(frozen=True)
class Balance:
    """What the routers of this rank take down and add to the gradient, for one micro-batch."""

    settings: RouterConfig
    is_token_N: Tensor  # bool, False for padding
    loads_LE: Tensor  # int64, of every layer of the model: how many tokens each expert took in this step so far
    losses: Tensor  # float32 [2]: load-balancing loss and z-loss of this step so far, without their weights
    groups_N: Tensor | None = None  # int64, 0 .. S; None: there are no losses
    weights_S: Tensor | None = None  # float32, of a group: its share of the batch / tokens^2; 0 of padding
    num_tokens: int = 0  # of the whole step

    def with_losses(self, logits_NE: Tensor, num_chosen: int, score_function: str) -> Tensor:
        """The logits of one layer's router, whose gradient is that of the losses too."""
        if self.groups_N is None:
            return logits_NE
        assert self.weights_S is not None
        found = torch.zeros(2, device=logits_NE.device)
        total = found.new_zeros(())
        if self.settings.aux_loss:
            chosen_NE, scores_NE = compute_routing_scores_for_aux_loss(logits_NE, num_chosen, score_function)
            counts_SE = found.new_zeros(len(self.weights_S), logits_NE.shape[1])
            counts_SE.index_add_(0, self.groups_N, chosen_NE.float())  # whole numbers: any order gives the same
            if (group := parallel_state.get_tensor_and_context_parallel_group()).size() > 1:
                dist.all_reduce(counts_SE, group=group)  # the ranks that share the sequences of this one
            counts_SE *= self.weights_S[:, None] * (logits_NE.shape[1] / num_chosen)
            loss = (scores_NE * counts_SE[self.groups_N]).sum()
            found[0], total = loss.detach(), total + self.settings.aux_loss * loss
        if self.settings.z_loss:
            loss = (logits_NE.logsumexp(-1).square() * self.is_token_N).sum() / self.num_tokens
            found[1], total = loss.detach(), total + self.settings.z_loss * loss
        self.losses.add_(found)
        return MoEAuxLossAutoScaler.apply(logits_NE, total)

    def note(self, layer: int, is_routed_NE: Tensor) -> None:
        self.loads_LE[layer] += (is_routed_NE & self.is_token_N[:, None]).sum(0)


class Balancing:
    """The routers in one pass with gradients, from its first micro-batch to the figures of all of them.

    Args:
        settings: of the run.
        mixture: of the model, which has ``num_layers`` layers in all.
        totals: None if no loss needs them.
        shard: (number of ranks, rank) that share the tokens of this rank's part once more (sequence parallelism).
    """

    def __init__(
        self,
        settings: RouterConfig,
        mixture: Mixture,
        num_layers: int,
        totals: BalanceTotals | None,
        shard: tuple[int, int],
        device: torch.device,
    ) -> None:
        self._settings, self._mixture, self._totals, self._shard = settings, mixture, totals, shard
        self.loads_LE = torch.zeros(num_layers, mixture.num_experts, dtype=torch.int64, device=device)
        self.losses = torch.zeros(2, device=device)

    def of(self, microbatch: Microbatch, sources: Tensor | None) -> Balance:
        """What one micro-batch needs.

        Args:
            microbatch: on the host.
            sources: int64, where each token of this rank stands in the pack, or ``PADDING``; None: all in their order.
        """
        lengths, device = torch.tensor(microbatch.lengths, dtype=torch.int64), self.losses.device
        num_groups = len(lengths)
        groups_T = torch.full((microbatch.num_tokens,), num_groups)
        groups_T[: int(lengths.sum())] = torch.arange(num_groups).repeat_interleave(lengths)
        if sources is not None:
            groups_T = torch.where(sources == PADDING, num_groups, groups_T[sources.clamp_min(0)])
        count, rank = self._shard
        groups_N = groups_T.chunk(count)[rank]
        common = (self._settings, (groups_N < num_groups).to(device), self.loads_LE, self.losses)
        if self._totals is None:
            return Balance(*common)
        shares = torch.full((num_groups,), 1 / self._totals.num_sequences)
        if self._settings.aux_loss_over == "microbatch":
            groups_N = (groups_N == num_groups).long()
            lengths = lengths.sum(0, keepdim=True)
            shares = lengths / self._totals.num_tokens
        weights_S = torch.cat([shares / lengths.square(), torch.zeros(1)])
        return Balance(*common, groups_N.to(device), weights_S.to(device), self._totals.num_tokens)

    @torch.no_grad()
    def finish(self, biases: Mapping[int, Tensor], is_changed: bool) -> dict[str, float]:
        """Metrics of the step; and the routers' biases [E] by layer, moved if the weights were. Collective.

        An expert that took more than its share becomes less likely to be chosen by ``bias_update_rate``, another more
        (arXiv 2408.15664, algorithm 1).
        """
        dist.all_reduce(self.loads_LE)
        if self._totals is not None:
            dist.all_reduce(self.losses)
        rate = self._settings.bias_update_rate
        for layer, bias in biases.items() if rate and is_changed else ():
            load = self.loads_LE[layer].float()
            bias += rate * torch.sign(load.mean() - load)
        layers = sorted(self._mixture.layers)
        loads = self.loads_LE.cpu()[layers].double()
        aux, z = (self.losses / len(layers)).tolist()
        metrics = {
            "router/load_max": float((loads.amax(1) / loads.mean(1)).mean()),
            "router/idle_fraction": float((loads == 0).double().mean()),
        }
        metrics |= {"router/aux_loss": aux} if self._settings.aux_loss else {}
        return metrics | ({"router/z_loss": z} if self._settings.z_loss else {})
