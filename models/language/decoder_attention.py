"""Attention of a decoder's block: grouped heads, and latent vectors of low rank.

Legend: B batch, N tokens, E width, A heads, K heads of the keys, D head width, W width of the values, H half of the channels that rotate,
Z one more than documents.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmspeed.compute.autocast import autocast_alike
from mmspeed.compute.operators.norms import rms_norm
from mmspeed.compute.structured import Attend
from mmspeed.models.language.config import DecoderSettings, LatentSettings
from mmspeed.models.language.rotary import make_rotary, score_factor
from mmspeed.protocols.plan import Structure

LATENT_EPS = 1e-6  # of norms of latent vectors, in every published model


class ScaleNorm(nn.Module):
    """Root-mean-square norm over the last dim, with a scale for each channel."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = rms_norm(x, self.weight, self.eps)
        return out

    def extra_repr(self) -> str:
        return f"{len(self.weight)}, eps={self.eps}"


class GroupedAttention(nn.Module):
    """Causal attention whose heads of keys and values serve several heads of queries each (Ainslie et al. 2023)."""

    def __init__(self, settings: DecoderSettings, window: int | None) -> None:
        super().__init__()
        width, head, bias = settings.hidden_size, settings.head_dim, settings.qkv_bias
        self.head_width, self.window = head, window
        self.rotary = make_rotary(settings.rotary, settings.rotated)
        self.q_proj = nn.Linear(width, settings.num_attention_heads * head, bias=bias)
        self.k_proj = nn.Linear(width, settings.num_key_value_heads * head, bias=bias)
        self.v_proj = nn.Linear(width, settings.num_key_value_heads * head, bias=bias)
        self.o_proj = nn.Linear(settings.num_attention_heads * head, width, bias=settings.out_bias)
        self.q_norm = ScaleNorm(head, settings.norm_eps) if settings.query_norm else None
        self.k_norm = ScaleNorm(head, settings.norm_eps) if settings.query_norm else None
        self.attend = Attend()

    def forward(self, x_BNE: Tensor, turn_2BNH: Tensor, bounds_Z: Tensor | None) -> Tensor:
        """The attended tokens; turn_2BNH: of `Rotary.tables`; bounds_Z: cumulative lengths of documents, None: each row is one."""
        (x_BNE,) = autocast_alike(x_BNE)  # once for all three
        q_BNAD, k_BNKD, v_BNKD = (
            project(x_BNE).unflatten(-1, (-1, self.head_width)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            q_BNAD, k_BNKD = self.q_norm(q_BNAD), self.k_norm(k_BNKD)
        q_BNAD, k_BNKD = self.rotary.rotate(q_BNAD, turn_2BNH), self.rotary.rotate(k_BNKD, turn_2BNH)
        structure = Structure(causal=True, window=self.window, bounds_Z=bounds_Z)
        out_BAND = self.attend(q_BNAD.transpose(1, 2), k_BNKD.transpose(1, 2), v_BNKD.transpose(1, 2), structure)
        out_BNE: Tensor = self.o_proj(out_BAND.transpose(1, 2).flatten(2))
        return out_BNE


class LatentAttention(nn.Module):
    """Multi-head latent attention: keys and values of all heads from one vector of low rank, positions in channels of their own."""

    def __init__(self, settings: DecoderSettings, latent: LatentSettings, window: int | None) -> None:
        super().__init__()
        width, heads = settings.hidden_size, settings.num_attention_heads
        self.latent, self.window = latent, window
        self.rotary = make_rotary(settings.rotary, latent.rotary)
        self.score_factor = score_factor(settings.rotary)
        query = heads * (latent.plain + latent.rotary)
        if latent.query_rank is None:
            self.q_proj = nn.Linear(width, query, bias=False)
        else:
            self.q_a_proj = nn.Linear(width, latent.query_rank, bias=settings.qkv_bias)
            self.q_a_layernorm = ScaleNorm(latent.query_rank, LATENT_EPS)
            self.q_b_proj = nn.Linear(latent.query_rank, query, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, latent.key_rank + latent.rotary, bias=settings.qkv_bias)
        self.kv_a_layernorm = ScaleNorm(latent.key_rank, LATENT_EPS)
        self.kv_b_proj = nn.Linear(latent.key_rank, heads * (latent.plain + latent.value), bias=False)
        self.o_proj = nn.Linear(heads * latent.value, width, bias=settings.out_bias)
        self.attend = Attend()

    def queries(self, x_BNE: Tensor) -> Tensor:
        """Queries of all heads, one after the other."""
        if self.latent.query_rank is None:
            plain: Tensor = self.q_proj(x_BNE)
            return plain
        low: Tensor = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BNE)))
        return low

    def forward(self, x_BNE: Tensor, turn_2BNH: Tensor, bounds_Z: Tensor | None) -> Tensor:
        """The attended tokens; turn_2BNH: of `Rotary.tables`; bounds_Z: cumulative lengths of documents, None: each row is one."""
        latent, (x_BNE,) = self.latent, autocast_alike(x_BNE)
        q_BNAD = self.queries(x_BNE).unflatten(-1, (-1, latent.plain + latent.rotary))
        q_plain, q_rotated = q_BNAD.split((latent.plain, latent.rotary), dim=-1)
        low, k_rotated = self.kv_a_proj_with_mqa(x_BNE).split((latent.key_rank, latent.rotary), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(low)).unflatten(-1, (-1, latent.plain + latent.value))
        k_plain, v_BNAW = kv.split((latent.plain, latent.value), dim=-1)
        q_rotated = self.rotary.rotate(q_rotated, turn_2BNH)
        k_rotated = self.rotary.rotate(k_rotated[:, :, None], turn_2BNH).expand(-1, -1, k_plain.shape[2], -1)
        q_BNAD, k_BNAD = torch.cat((q_plain, q_rotated), -1), torch.cat((k_plain, k_rotated), -1)
        if self.score_factor != 1.0:
            q_BNAD = q_BNAD * self.score_factor
        structure = Structure(causal=True, window=self.window, bounds_Z=bounds_Z)
        out_BANW = self.attend(q_BNAD.transpose(1, 2), k_BNAD.transpose(1, 2), v_BNAW.transpose(1, 2), structure)
        out_BNE: Tensor = self.o_proj(out_BANW.transpose(1, 2).flatten(2))
        return out_BNE
