"""MLPs, and experts in their place, on one device.

A router gives each token scores for all experts, and the token goes to those with the greatest ones. The choice is recorded, so that a
recomputation in backward sends tokens to the same experts.

Legend: B batch, N tokens of a row, T = B x N tokens, E width, G experts, K experts of a token, R = T x K rows, I hidden width, J = 2 x I, P packs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmspeed.compute.autocast import autocast_alike, without_autocast
from mmspeed.compute.operators.grouped import grouped_product
from mmspeed.compute.operators.permutation import combine, order_by_expert, permute
from mmspeed.compute.operators.swiglu import swiglu
from mmspeed.compute.wgrad import Leaves
from mmspeed.graphs import outside_graphs
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

    def forward(self, x_BNE: Tensor, between: Callable[[], None] | None = None) -> Tensor:
        """between: called once between the products of the input and that of the hidden units."""
        (x_BNE,) = autocast_alike(x_BNE)  # once for both
        gate_BNI, up_BNI = self.gate_proj(x_BNE), self.up_proj(x_BNE)
        if between is not None:
            between()
        out_BNE: Tensor = self.down_proj(swiglu(gate_BNI, up_BNI))
        return out_BNE


class Router(RecordedModule):
    """Scores of experts, in float32, and the choice of those that a token goes to.

    `e_score_correction_bias` takes part in the choice alone; it moves after each step (Wang et al. 2024). `load_G` counts the tokens that
    experts got in training since `begin_counts`, without those of recomputations; `finite` is False where a score of such a token was not.
    """

    e_score_correction_bias: Tensor
    load_G: Tensor
    finite: Tensor
    state_buffers: ClassVar[Mapping[str, StateRule]] = {}
    counted = "expert_load"

    def __init__(self, width: int, settings: ExpertSettings) -> None:
        super().__init__()
        self.settings = settings
        self.total: Callable[[Tensor], Tensor] | None = None  # sums over the processes of a step, while it runs
        self.weight = nn.Parameter(torch.empty(settings.num_experts, width))
        self.register_buffer("load_G", torch.zeros(settings.num_experts), persistent=False)
        self.register_buffer("finite", torch.ones((), dtype=torch.bool), persistent=False)
        if settings.router_bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(settings.num_experts))

    def forward(self, x_TE: Tensor, counted_T: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """(weights_TK, expert_TK, scores_TG): weights and scores in float32, or float64 for such tokens.

        counted_T: True at tokens that are part of the loads; None: all are.
        """
        settings, dtype = self.settings, torch.promote_types(x_TE.dtype, torch.float32)
        with without_autocast(x_TE):
            logits_TG = F.linear(x_TE.to(dtype), self.weight.to(dtype))
            scores_TG = logits_TG.softmax(-1) if settings.scoring_func == "softmax" else logits_TG.sigmoid()
            expert_TK, fresh = self.record_or_replay(lambda: self.choose(scores_TG.detach()))
            weights_TK = scores_TG.gather(1, expert_TK)
            if fresh and self.training:
                self._count(expert_TK, weights_TK, counted_T)
            if settings.norm_topk_prob:
                weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + SMALLEST_SUM)
            return weights_TK * settings.routed_scaling_factor, expert_TK, scores_TG

    def choose(self, scores_TG: Tensor) -> Tensor:
        """The experts of each token, int64 (T, K): those with the greatest scores, bias included, of the greatest groups."""
        settings = self.settings
        if settings.router_bias:
            scores_TG = scores_TG + self.e_score_correction_bias.to(scores_TG.dtype)
        if settings.topk_group < settings.n_group:
            by_group = scores_TG.unflatten(1, (settings.n_group, -1))
            group_TG = by_group.topk(GROUP_SCORES, dim=-1).values.sum(-1)
            kept_TG = torch.zeros_like(group_TG, dtype=torch.bool).scatter_(
                1, group_TG.topk(settings.topk_group, dim=-1).indices, True
            )
            scores_TG = by_group.masked_fill(~kept_TG[..., None], -torch.inf).flatten(1)
        return scores_TG.topk(settings.top_k, dim=-1).indices

    @torch.no_grad()
    def reset(self) -> None:
        """Forget loads, and set the bias of a new model."""
        self.load_G.zero_()
        self.finite.fill_(True)
        if self.settings.router_bias:
            self.e_score_correction_bias.zero_()

    @torch.no_grad()
    def _count(self, expert_TK: Tensor, weights_TK: Tensor, counted_T: Tensor | None) -> None:
        self.load_G.add_(loads(expert_TK, self.settings.num_experts, counted_T))
        self.finite.logical_and_(weights_TK.isfinite().all())  # NaN is the greatest score, so it is chosen

    def step_counts(self) -> Tensor:
        """The loads that this process counted since `begin_counts`, whole numbers."""
        return self.load_G

    def is_finite(self) -> bool:
        """False where a score since `begin_counts` was not finite; waits for the device."""
        return bool(self.finite)

    @torch.no_grad()
    def begin_counts(self, total: Callable[[Tensor], Tensor]) -> None:
        """Forget the loads; `total` sums counts over the processes of the step that begins."""
        self.load_G.zero_()
        self.finite.fill_(True)
        self.total = total

    def end_counts(self) -> None:
        """Shares of experts are those of this process from here on."""
        self.total = None

    @outside_graphs
    def shares(self) -> Tensor:
        """The share of each expert in the choices of the step so far, of all its processes, float32 (G,)."""
        load_G = self.load_G if self.total is None else self.total(self.load_G).to(self.load_G.dtype)
        return load_G / load_G.sum().clamp(min=1)

    @torch.no_grad()
    def after_update(self, load_G: Tensor) -> None:
        """Move the bias of experts with more than the mean load down by `balance_rate`, of those with less up; not of a frozen router.

        load_G: loads of all processes, int64.
        """
        if self.settings.router_bias and self.weight.requires_grad:
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


class Part(nn.Module):
    """Runs a part of a forward; a module, so that the plan can give it a region. Tensors that the part computes with are its arguments."""

    def forward(self, run: Callable[..., Tensor], *args: Tensor) -> Tensor:
        return run(*args)


class Experts(Leaves):
    """MLPs of which each token uses some; their weights lie one behind the other."""

    def __init__(self, width: int, settings: ExpertSettings) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(settings.num_experts, 2 * settings.moe_intermediate_size, width))
        self.down_proj = nn.Parameter(torch.empty(settings.num_experts, width, settings.moe_intermediate_size))
        self.dispatch, self.activation = Part(), Part()

    def forward(
        self, x_TE: Tensor, weights_TK: Tensor, expert_TK: Tensor, beside: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """The weighted sum of each token's experts; and of `beside(x_TE)`, an MLP of all tokens, as of `ModelPlan.experts`."""
        order = order_by_expert(expert_TK, len(self.down_proj))
        grouped = grouped_product if self._gradients is None else self._gradients.grouped

        def up(x_TE: Tensor) -> Tensor:
            product: Tensor = grouped(permute(x_TE, order), self.gate_up_proj, order.ends_G)
            return product

        def down(hidden_RJ: Tensor, weights_R: Tensor) -> Tensor:
            hidden_RI = swiglu(*hidden_RJ.chunk(2, dim=-1)) * weights_R[:, None]
            product: Tensor = grouped(hidden_RI.to(x_TE.dtype), self.down_proj, order.ends_G)
            return product

        hidden_RJ = self.dispatch(up, x_TE)
        out_RE = self.activation(down, hidden_RJ, weights_TK.flatten()[order.order_R])
        out_TE: Tensor = combine(out_RE, order)
        return out_TE if beside is None else out_TE + beside(x_TE)


class ExpertMlp(nn.Module):
    """Routed experts, and shared ones that every token goes to (DeepSeekMoE, Dai et al. 2024)."""

    def __init__(self, settings: DecoderSettings, experts: ExpertSettings) -> None:
        super().__init__()
        self.settings = experts
        width, shared = settings.hidden_size, experts.n_shared_experts
        self.gate = (BiasedRouter if experts.router_bias else Router)(width, experts)
        self.experts = Experts(width, experts)
        self.shared_experts = GatedMlp(width, shared * experts.moe_intermediate_size) if shared else None
        self.balance = BalanceSums() if experts.balance is not None else None

    def forward(
        self, x_BNE: Tensor, counted_BN: Tensor | None = None, packs_BNP: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(tokens, the auxiliary loss of each pack (P,), or of all packs together (1,)); None where the settings ask for no such loss.

        counted_BN: True at tokens that are part of the loads; None: all are. packs_BNP: as of `BalanceSums`.
        """
        counted_T = None if counted_BN is None else counted_BN.flatten()
        weights_TK, expert_TK, scores_TG = self.gate(x_BNE.flatten(0, 1), counted_T)
        out_TE = self.experts(x_BNE.flatten(0, 1), weights_TK, expert_TK, self.shared_experts)
        return out_TE.view_as(x_BNE), self._balance_loss(expert_TK, scores_TG, packs_BNP)

    def _balance_loss(self, expert_TK: Tensor, scores_TG: Tensor, packs_BNP: Tensor | None) -> Tensor | None:
        if self.balance is None:
            return None
        sums_P2G = self.balance(expert_TK, scores_TG, None if packs_BNP is None else packs_BNP.flatten(0, 1))
        share_G = None
        if self.settings.balance == "global_batch" and self.training:
            share_G, _ = record_or_replay(self.gate.shares)  # a recomputation takes the shares of the first pass
        return balance_loss(sums_P2G, share_G)


class BalanceSums(nn.Module):
    """Sums over tokens from which the auxiliary loss is computed; a module, so that a plan can sum them over processes."""

    def forward(self, expert_TK: Tensor, scores_TG: Tensor, packs_TP: Tensor | None = None) -> Tensor:
        """(P, 2, G): the choices that fell on each expert, over K, and its shares of scores. Each adds up to the tokens that count.

        packs_TP: 1 at the pack of each token, 0 at tokens that count nowhere; None: all are of one. The gradient goes through the scores
        alone.
        """
        with without_autocast(scores_TG):
            share_TG = scores_TG / scores_TG.sum(-1, keepdim=True)
            chosen_TG = torch.zeros_like(scores_TG).scatter_(1, expert_TK, 1 / expert_TK.shape[1])
            both_T2G = torch.stack((chosen_TG, share_TG), 1)
            if packs_TP is None:
                return both_T2G.sum(0, keepdim=True)
            # 0 x NaN is NaN: tokens that are not finite would spoil the packs that they are not of
            spoiled_TP = torch.where(packs_TP != 0, 0 * share_TG.detach().sum(1, keepdim=True), 0.0)
            sums_PF = packs_TP.to(share_TG.dtype).T @ both_T2G.flatten(1).nan_to_num()
            return (sums_PF + spoiled_TP.sum(0)[:, None]).unflatten(1, (2, -1))


def balance_loss(sums_P2G: Tensor, share_G: Tensor | None = None) -> Tensor:
    """G x the sum over experts of (share of choices) x (mean share of scores), (P,): 1 at even loads (Fedus et al. 2021, DeepSeek-V3).

    sums_P2G: of `BalanceSums`. share_G: shares of choices of more tokens than these, such as of all that a step has met so far; None: those
    of these tokens.
    """
    chosen_PG, scores_PG = sums_P2G.unbind(1)
    tokens_P1 = chosen_PG.sum(-1, keepdim=True).clamp(min=1)
    share_PG = chosen_PG / tokens_P1 if share_G is None else share_G.to(scores_PG.dtype)
    return scores_PG.shape[1] * (share_PG * (scores_PG / tokens_P1)).sum(-1)
