"""MLPs, and experts in their place, on one device.

A router gives each token scores for all experts, and the token goes to those with the greatest ones. The choice is recorded, so that a
recomputation in backward sends tokens to the same experts.

Legend: B batch, N tokens of a row, T = B x N tokens, E width, G experts, K experts of a token, R = T x K rows, I hidden width.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmspeed.compute.autocast import without_autocast
from mmspeed.compute.operators.grouped import grouped_product
from mmspeed.compute.operators.permutation import combine, order_by_expert, permute
from mmspeed.compute.operators.swiglu import swiglu
from mmspeed.models.language.config import DecoderSettings, ExpertSettings
from mmspeed.protocols.model import StateRule
from mmspeed.replay import RecordedModule, record_or_replay

SMALLEST_SUM = 1e-20  # of scores, in a division
GROUP_SCORES = 2  # of a group's experts, whose sum is the group's score


class GatedMlp(nn.Module):
    """down(silu(gate(x)) * up(x)) (SwiGLU, Shazeer 2020)."""

    def __init__(self, width: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=bias)
        self.up_proj = nn.Linear(width, hidden, bias=bias)
        self.down_proj = nn.Linear(hidden, width, bias=bias)

    def forward(self, x_BNE: Tensor) -> Tensor:
        out_BNE: Tensor = self.down_proj(swiglu(self.gate_proj(x_BNE), self.up_proj(x_BNE)))
        return out_BNE


class Router(RecordedModule):
    """Scores of experts, in float32, and the choice of those that a token goes to.

    `e_score_correction_bias` takes part in the choice alone; it moves after each step (Wang et al. 2024). `load_G` counts the tokens that
    experts got in training since `forget_counts`, without those of recomputations.
    """

    e_score_correction_bias: Tensor
    load_G: Tensor
    state_buffers: ClassVar[Mapping[str, StateRule]] = {}
    counted = "expert_load"

    def __init__(self, width: int, settings: ExpertSettings) -> None:
        super().__init__()
        self.settings = settings
        self.weight = nn.Parameter(torch.empty(settings.count, width))
        self.register_buffer("load_G", torch.zeros(settings.count), persistent=False)
        if settings.bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(settings.count))

    def forward(self, x_TE: Tensor, counted_T: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(weights_TK, expert_TK, scores_TG): weights and scores in float32, or float64 for such tokens.

        counted_T: True at tokens that are part of the loads; None: all are.
        """
        settings, dtype = self.settings, torch.promote_types(x_TE.dtype, torch.float32)
        with without_autocast(x_TE):
            logits_TG = F.linear(x_TE.to(dtype), self.weight.to(dtype))
            scores_TG = logits_TG.softmax(-1) if settings.scores == "softmax" else logits_TG.sigmoid()
            expert_TK, fresh = self.record_or_replay(lambda: self.choose(scores_TG.detach()))
            if fresh and self.training:
                self._count(expert_TK, counted_T)
            weights_TK = scores_TG.gather(1, expert_TK)
            if settings.normalised:
                weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + SMALLEST_SUM)
            return weights_TK * settings.scaling, expert_TK, scores_TG

    def choose(self, scores_TG: Tensor) -> Tensor:
        """The experts of each token, int64 (T, K): those with the greatest scores, bias included, of the greatest groups."""
        settings = self.settings
        if settings.bias:
            scores_TG = scores_TG + self.e_score_correction_bias.to(scores_TG.dtype)
        if settings.chosen_groups < settings.groups:
            by_group = scores_TG.unflatten(1, (settings.groups, -1))
            group_TG = by_group.topk(GROUP_SCORES, dim=-1).values.sum(-1)
            kept_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter_(
                1, group_TG.topk(settings.chosen_groups, dim=-1).indices, True
            )
            scores_TG = by_group.masked_fill(~kept_TG[..., None], -torch.inf).flatten(1)
        return scores_TG.topk(settings.chosen, dim=-1).indices

    @torch.no_grad()
    def reset(self) -> None:
        """Forget loads, and set the bias of a new model."""
        self.load_G.zero_()
        if self.settings.bias:
            self.e_score_correction_bias.zero_()

    @torch.no_grad()
    def _count(self, expert_TK: Tensor, counted_T: Tensor | None) -> None:
        self.load_G.add_(loads(expert_TK, self.settings.count, counted_T))

    def step_counts(self) -> Tensor:
        """The loads that this process counted since `forget_counts`, whole numbers."""
        return self.load_G

    @torch.no_grad()
    def forget_counts(self) -> None:
        """Forget the loads."""
        self.load_G.zero_()

    @torch.no_grad()
    def after_update(self, load_G: Tensor) -> None:
        """Move the bias of experts with more than the mean load down by `balance_rate`, of those with less up.

        load_G: loads of all processes, int64.
        """
        if self.settings.bias:
            above_G = (
                load_G * len(load_G) - load_G.sum()
            )  # whole numbers: a load equal to the mean moves nothing, in any layout
            self.e_score_correction_bias.sub_(self.settings.balance_rate * torch.sign(above_G))


class BiasedRouter(Router):
    """A router whose bias, a part of the state of a run, balances the experts."""

    state_buffers: ClassVar[Mapping[str, StateRule]] = {"e_score_correction_bias": "kept"}


def loads(expert_TK: Tensor, experts: int, counted_T: Tensor | None = None) -> Tensor:
    """The number of choices that fell on each expert, float32 (G,), of the tokens that are counted; nothing is read on the host."""
    ones_TK = torch.ones_like(expert_TK, dtype=torch.float32)
    if counted_T is not None:
        ones_TK = ones_TK * counted_T[:, None]
    return torch.zeros(experts, device=expert_TK.device).scatter_add_(0, expert_TK.flatten(), ones_TK.flatten())


class Experts(nn.Module):
    """MLPs of which each token uses some; their weights lie one behind the other."""

    def __init__(self, width: int, settings: ExpertSettings) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(settings.count, 2 * settings.width, width))
        self.down_proj = nn.Parameter(torch.empty(settings.count, width, settings.width))

    def forward(self, x_TE: Tensor, weights_TK: Tensor, expert_TK: Tensor) -> Tensor:
        """The weighted sum of each token's experts."""
        order = order_by_expert(expert_TK, len(self.down_proj))
        hidden_RI = grouped_product(permute(x_TE, order), self.gate_up_proj, order.ends_G)
        hidden_RI = swiglu(*hidden_RI.chunk(2, dim=-1))
        weights_R = weights_TK.flatten()[order.order_R]
        out_RE = grouped_product((hidden_RI * weights_R[:, None]).to(x_TE.dtype), self.down_proj, order.ends_G)
        out_TE: Tensor = combine(out_RE, order)
        return out_TE


class ExpertMlp(nn.Module):
    """Routed experts, and shared ones that every token goes to (DeepSeekMoE, Dai et al. 2024)."""

    def __init__(self, settings: DecoderSettings, experts: ExpertSettings) -> None:
        super().__init__()
        self.settings = experts
        self.gate = (BiasedRouter if experts.bias else Router)(settings.width, experts)
        self.experts = Experts(settings.width, experts)
        self.shared_experts = GatedMlp(settings.width, experts.shared * experts.width) if experts.shared else None

    def forward(self, x_BNE: Tensor, counted_BN: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """(tokens, the auxiliary loss of each row (B,)); None where the settings ask for no such loss.

        counted_BN: True at tokens that are part of the loads; None: all are.
        """
        counted_T = None if counted_BN is None else counted_BN.flatten()
        weights_TK, expert_TK, scores_TG = self.gate(x_BNE.flatten(0, 1), counted_T)
        out_BNE = self.experts(x_BNE.flatten(0, 1), weights_TK, expert_TK).view_as(x_BNE)
        if self.shared_experts is not None:
            out_BNE = out_BNE + self.shared_experts(x_BNE)
        return out_BNE, self._balance_loss(expert_TK, scores_TG, len(x_BNE))

    def _balance_loss(self, expert_TK: Tensor, scores_TG: Tensor, rows: int) -> Tensor | None:
        kind = self.settings.balance
        if kind is None:
            return None
        if kind == "sequence":
            parts = zip(expert_TK.chunk(rows), scores_TG.chunk(rows), strict=True)
            return torch.stack([balance_loss(expert, scores) for expert, scores in parts])
        share_G = None
        if kind == "global_batch" and self.training:  # a recomputation takes the shares of the first pass
            share_G, _ = record_or_replay(lambda: self.gate.load_G / self.gate.load_G.sum().clamp(min=1))
        return balance_loss(expert_TK, scores_TG, share_G).expand(rows)


def balance_loss(expert_TK: Tensor, scores_TG: Tensor, share_G: Tensor | None = None) -> Tensor:
    """G x the sum over experts of (share of choices) x (mean share of scores): 1 at even loads (Fedus et al. 2021, DeepSeek-V3).

    share_G: shares of choices of more tokens than these, such as of the step's micro-batches so far; None: those of these tokens. The
    gradient goes through the scores alone.
    """
    experts = scores_TG.shape[1]
    if share_G is None:
        share_G = loads(expert_TK, experts) / expert_TK.numel()
    mean_G = (scores_TG / scores_TG.sum(-1, keepdim=True)).mean(0)
    return experts * (share_G.to(mean_G.dtype) * mean_G).sum()
