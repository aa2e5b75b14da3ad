"""A decoder: tokens to logits, or to the loss of each token. Its plan is `mmspeed.models.language.decoder_plan`.

Legend: B rows (packs, P where tokens of all lie in one row), N tokens of a row, T = B x N, E width, V vocabulary, Z one more than
documents.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmspeed.compute.heads import TokenHead
from mmspeed.compute.operators.cross_entropy import IGNORED
from mmspeed.compute.operators.document_attention import numbers_of, positions_of
from mmspeed.initialize import init_weights
from mmspeed.models.language.config import DecoderSettings
from mmspeed.models.language.decoder_attention import GroupedAttention, LatentAttention, ScaleNorm
from mmspeed.models.language.decoder_plan import decoder_plan
from mmspeed.models.language.experts import ExpertMlp, GatedMlp, Router
from mmspeed.models.language.rotary import make_rotary
from mmspeed.protocols import ModelPlan, declare_float32, declare_plan
from mmspeed.rng import normal

BEHIND = ("post_attention_layernorm", "post_mlp_layernorm")  # sandwich norms behind attention and MLP


class DecoderOutput(NamedTuple):
    """The results of a forward pass.

    logits_BNV: without targets. loss_BN, lse_BN: with targets, the cross-entropy of each token and the log-sum-exp of its logits, whose
    square is the z-loss; 0 where the target is IGNORED. balance_B: sum over blocks of the experts' auxiliary loss, where there is one.
    mtp: (loss_BN, lse_BN), or logits, of the modules that predict further tokens.
    """

    logits_BNV: Tensor | None = None
    loss_BN: Tensor | None = None
    lse_BN: Tensor | None = None
    balance_B: Tensor | None = None
    mtp: tuple[tuple[Tensor, ...], ...] = ()


class DecoderBlock(nn.Module):
    """Attention and an MLP, or experts, each behind a norm; sandwiched: with a norm behind it too."""

    def __init__(self, settings: DecoderSettings, place: int) -> None:
        super().__init__()
        width, eps, window = settings.hidden_size, settings.norm_eps, settings.window(place)
        self.sandwich = settings.sandwich
        self.input_layernorm = ScaleNorm(width, eps)
        self.self_attn: nn.Module = (
            GroupedAttention(settings, window)
            if settings.latent is None
            else LatentAttention(settings, settings.latent, window)
        )
        self.post_attention_layernorm = ScaleNorm(width, eps)
        if self.sandwich:
            self.pre_mlp_layernorm, self.post_mlp_layernorm = ScaleNorm(width, eps), ScaleNorm(width, eps)
        self.mlp: nn.Module
        if settings.experts is not None and settings.has_experts(place):
            self.mlp = ExpertMlp(settings, settings.experts)
        else:
            self.mlp = GatedMlp(width, settings.intermediate_size, settings.mlp_bias)

    def forward(
        self,
        x_BNE: Tensor,
        turn_2BNH: Tensor,
        bounds_Z: Tensor | None,
        counted_BN: Tensor | None = None,
        packs_BNP: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(tokens, the experts' auxiliary loss of each pack (P,), or of all (1,)); `counted_BN`, `packs_BNP`: as of `ExpertMlp`."""
        attended_BNE = self.self_attn(self.input_layernorm(x_BNE), turn_2BNH, bounds_Z)
        if self.sandwich:
            x_BNE = x_BNE + self.post_attention_layernorm(attended_BNE)
            inner_BNE = self._mlp(self.pre_mlp_layernorm(x_BNE), counted_BN, packs_BNP)
        else:
            x_BNE = x_BNE + attended_BNE
            inner_BNE = self._mlp(self.post_attention_layernorm(x_BNE), counted_BN, packs_BNP)
        inner_BNE, balance_P = inner_BNE if isinstance(inner_BNE, tuple) else (inner_BNE, None)
        if self.sandwich:
            inner_BNE = self.post_mlp_layernorm(inner_BNE)
        return x_BNE + inner_BNE, balance_P

    def _mlp(self, x_BNE: Tensor, counted_BN: Tensor | None, packs_BNP: Tensor | None) -> Any:
        return self.mlp(x_BNE, counted_BN, packs_BNP) if isinstance(self.mlp, ExpertMlp) else self.mlp(x_BNE)


class MtpModule(nn.Module):
    """Predicts one more token (multi-token prediction, DeepSeek-V3): from the tokens of the module before and a later embedding."""

    def __init__(self, settings: DecoderSettings, place: int) -> None:
        super().__init__()
        width, eps = settings.hidden_size, settings.norm_eps
        self.enorm, self.hnorm = ScaleNorm(width, eps), ScaleNorm(width, eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.mtp_block = DecoderBlock(settings, place)
        self.post_norm = ScaleNorm(width, eps)

    def forward(
        self,
        x_BNE: Tensor,
        later_BNE: Tensor,
        turn_2BNH: Tensor,
        bounds_Z: Tensor | None,
        counted_BN: Tensor | None = None,
        packs_BNP: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """(tokens behind the norm, the experts' auxiliary loss as of a block); `later_BNE`: embeddings of later tokens."""
        x_BNE = self.eh_proj(torch.cat((self.enorm(later_BNE), self.hnorm(x_BNE)), dim=-1))
        x_BNE, balance_P = self.mtp_block(x_BNE, turn_2BNH, bounds_Z, counted_BN, packs_BNP)
        return self.post_norm(x_BNE), balance_P


class Decoder(nn.Module):
    """A language model; it starts with the weights of seed 0, except on the meta device (`mmspeed.initialize`)."""

    plan: ModelPlan

    def __init__(self, settings: DecoderSettings) -> None:
        super().__init__()
        self.settings, self.rotary = settings, make_rotary(settings.rotary, settings.rotated)
        self.embed_tokens = nn.Embedding(settings.vocab_size, settings.hidden_size)
        self.layers = nn.ModuleList(DecoderBlock(settings, place) for place in range(settings.num_hidden_layers))
        self.norm = ScaleNorm(settings.hidden_size, settings.norm_eps)
        self.lm_head = TokenHead(settings.vocab_size, settings.hidden_size, settings.tie_word_embeddings)
        behind = range(settings.num_hidden_layers, settings.num_hidden_layers + settings.num_nextn_predict_layers)
        self.mtp = nn.ModuleList(MtpModule(settings, place) for place in behind)
        declare_plan(self, decoder_plan(settings))
        declare_float32(self, ("gate",))  # the router
        if not self.norm.weight.is_meta:
            init_weights(self, 0)

    def forward(
        self,
        ids_BN: Tensor,
        bounds_Z: Tensor | None = None,
        target_BN: Tensor | None = None,
        counted_BN: Tensor | None = None,
    ) -> DecoderOutput:
        """The logits of the token behind each token, or their losses against `target_BN`.

        Args:
            bounds_Z: cumulative lengths of the documents over the tokens of all rows, from 0 to B x N: attention and positions never
                cross a document, nor the end of a row. None: each row is one document.
            target_BN: ids, or IGNORED; `next_tokens` makes them. With targets no logits are ever in memory in full.
            counted_BN: True at tokens that count as loads of experts and in their auxiliary loss, such as all but padding; None: all do.
        """
        if bounds_Z is not None and len(ids_BN) > 1:
            bounds_Z = torch.cat((bounds_Z, _row_bounds(ids_BN).to(bounds_Z.dtype))).sort().values
        pos_BN = _positions(ids_BN, bounds_Z)
        x_BNE, packs_BNP = self.embed_tokens(ids_BN), self._packs(ids_BN, counted_BN)
        turn_2BNH, balances = self.rotary.tables(pos_BN, x_BNE.dtype), []
        for block in self.layers:
            x_BNE, balance_P = block(x_BNE, turn_2BNH, bounds_Z, counted_BN, packs_BNP)
            balances.append(balance_P)
        x_BNE = self.norm(x_BNE)
        output = self._predict(x_BNE, target_BN)
        mtp = []
        for step, module in enumerate(self.mtp, 1):
            later_BN = later_tokens(ids_BN, bounds_Z, step)
            later_BNE = self.embed_tokens(later_BN)
            turn_2BNH = self.rotary.tables(pos_BN + step, x_BNE.dtype)
            x_BNE, balance_P = module(x_BNE, later_BNE, turn_2BNH, bounds_Z, counted_BN, packs_BNP)
            balances.append(balance_P)
            target = None if target_BN is None else later_targets(target_BN, bounds_Z, step)
            mtp.append(self._predict(x_BNE, target))
        summed = [balance_P for balance_P in balances if balance_P is not None]
        balance = torch.stack(summed).sum(0).expand(len(ids_BN)).clone() if summed else None
        if target_BN is None:
            return DecoderOutput(logits_BNV=output[0], balance_B=balance, mtp=tuple(mtp))
        return DecoderOutput(None, output[0], output[1], balance, tuple(mtp))

    def _packs(self, ids_BN: Tensor, counted_BN: Tensor | None) -> Tensor | None:
        """1 at the pack of each token that counts, (B, N, P); all tokens are of one unless the experts' auxiliary loss is of each pack.

        None where all tokens of all rows count together, or there is no such loss.
        """
        experts = self.settings.experts
        if experts is None or experts.balance is None:
            return None
        if experts.balance != "sequence":
            return None if counted_BN is None else counted_BN[..., None].float()
        packs_BNP = torch.eye(len(ids_BN), device=ids_BN.device)[:, None].expand(-1, ids_BN.shape[1], -1)
        return packs_BNP if counted_BN is None else packs_BNP * counted_BN[..., None]

    def _predict(self, x_BNE: Tensor, target_BN: Tensor | None) -> tuple[Tensor, ...]:
        """(logits,), or (losses, log-sum-exps) of targets."""
        tied = self.embed_tokens.weight if self.settings.tie_word_embeddings else None
        first, lse_BN = self.lm_head(x_BNE, target_BN, tied)
        return (first,) if lse_BN is None else (first.clone(), lse_BN.clone())  # FSDP2 warns of outputs that are views

    def initial_weights(self, seed: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield every parameter with the whole float32 value on the CPU that it starts from, by its name (law 1); reset routers."""
        return initial_values(self, self.settings, seed)


def _positions(ids_BN: Tensor, bounds_Z: Tensor | None) -> Tensor:
    """The place of each token in its document."""
    if bounds_Z is None:
        return torch.arange(ids_BN.shape[1], device=ids_BN.device).expand_as(ids_BN)
    return positions_of(bounds_Z, ids_BN.numel()).view_as(ids_BN)


def _row_bounds(x_BN: Tensor) -> Tensor:
    """The bounds of documents that are one row each."""
    return torch.arange(len(x_BN) + 1, device=x_BN.device) * x_BN.shape[1]


def _shifted(x_BN: Tensor, bounds_Z: Tensor | None, step: int) -> tuple[Tensor, Tensor]:
    """(the values `step` tokens later, True where that token is of the same document)."""
    bounds_Z = _row_bounds(x_BN) if bounds_Z is None else bounds_Z
    flat_T = x_BN.flatten()
    place_T = torch.arange(len(flat_T), device=x_BN.device)
    last_T = bounds_Z[numbers_of(bounds_Z, len(flat_T)) + 1].long() - 1
    later_T = torch.minimum(place_T + step, last_T)
    return flat_T[later_T].view_as(x_BN), (place_T + step <= last_T).view_as(x_BN)


def later_tokens(ids_BN: Tensor, bounds_Z: Tensor | None, step: int) -> Tensor:
    """The id `step` tokens behind each token; near the end of a document its last one."""
    return _shifted(ids_BN, bounds_Z, step)[0]


def next_tokens(ids_BN: Tensor, bounds_Z: Tensor | None = None, counts_BN: Tensor | None = None) -> Tensor:
    """Targets: the id behind each token, IGNORED for a document's last token, which never predicts the next document's first.

    counts_BN: True at tokens that are to be predicted, such as an assistant's; None: all are.
    """
    target_BN, inside_BN = _shifted(ids_BN, bounds_Z, 1)
    if counts_BN is not None:
        inside_BN = inside_BN & _shifted(counts_BN, bounds_Z, 1)[0]
    return torch.where(inside_BN, target_BN, IGNORED)


def later_targets(target_BN: Tensor, bounds_Z: Tensor | None, step: int) -> Tensor:
    """Targets of a module `step` tokens further on; IGNORED where these are of another document."""
    later_BN, inside_BN = _shifted(target_BN, bounds_Z, step)
    return torch.where(inside_BN, later_BN, IGNORED)


def initial_values(model: nn.Module, settings: DecoderSettings, seed: int) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield every parameter with its whole value, float32 on the CPU, a pure function of name, shape and seed (law 1); then reset routers.

    Matrices are normal with the standard deviation of the settings, norms 1, biases 0. Norms behind attention and MLP of a sandwich start
    at 1 / sqrt(depth), so that the sum over blocks has the size of one (the depth-scaled sandwich norm of Pangu Ultra, 2025).
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            yield parameter, settings.first_std * normal(tuple(parameter.shape), seed, "init", name)
        elif name.endswith("bias"):
            yield parameter, torch.zeros(parameter.shape)
        else:
            scaled = settings.sandwich and name.split(".")[-2] in BEHIND
            yield parameter, torch.full(parameter.shape, settings.num_hidden_layers**-0.5 if scaled else 1.0)
    for module in model.modules():
        if isinstance(module, Router):
            module.reset()
