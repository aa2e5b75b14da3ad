"""A small model whose attention has any structure that a site may have: a mask of keys, causal order, a window, documents, grouped keys,
values of another width than keys.

Legend: B batch, N tokens, A heads, K heads of the keys, D head width, W width of the values' heads, E model width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.compute.structured import Attend
from mmspeed.protocols.plan import Block, Gather, Linear, ModelPlan, Site, Split, Structure, declare_plan

E, A, D = 12, 4, 6
SEEN = Split("text", dim=1, level="seen")  # masks and documents, where attention meets them


@dataclass(frozen=True)
class Shape:
    """Heads of the keys, and the width of the values' heads."""

    key_heads: int = A
    values: int = D


class StructuredBlock(nn.Module):
    """Attention, added."""

    def __init__(self, shape: Shape, attend: nn.Module) -> None:
        super().__init__()
        self.norm, self.widths = nn.LayerNorm(E), (D, D, shape.values)
        self.q = nn.Linear(E, A * D)
        self.k = nn.Linear(E, shape.key_heads * D, bias=False)  # of a bias the gradient is 0, and all of it rounding
        self.v, self.out = nn.Linear(E, shape.key_heads * shape.values), nn.Linear(A * shape.values, E)
        self.attend = attend

    def forward(
        self, x_BNE: Tensor, structure: Structure, mask_BN: Tensor | None, documents_BN: Tensor | None
    ) -> Tensor:
        n_BNE = self.norm(x_BNE)
        qkv = [
            layer(n_BNE).unflatten(-1, (-1, width)).transpose(1, 2)
            for layer, width in zip((self.q, self.k, self.v), self.widths, strict=True)
        ]
        out_BANW = self.attend(*qkv, replace(structure, key_mask_BN=mask_BN, documents_BN=documents_BN))
        return x_BNE + self.out(out_BANW.transpose(1, 2).flatten(2))


class StructuredModel(nn.Module):
    """Two such blocks. `attend`: what attends; `structure`: what no process needs a part of."""

    def __init__(self, shape: Shape, structure: Structure, attend: Callable[[], nn.Module] = Attend) -> None:
        super().__init__()
        self.structure = structure
        self.embed = nn.Linear(E, E)
        self.blocks = nn.ModuleList(StructuredBlock(shape, attend()) for _ in range(2))
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(rng.normal(p.shape, 7, "structured", name) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.3))
        declare_plan(self, structured_plan(shape, structure.causal))

    def forward(self, x_BNE: Tensor, mask_BN: Tensor | None = None, documents_BN: Tensor | None = None) -> Tensor:
        x_BNE = self.embed(x_BNE)
        for block in self.blocks:
            x_BNE = block(x_BNE, self.structure, mask_BN, documents_BN)
        return x_BNE


def structured_plan(shape: Shape, causal: bool) -> ModelPlan:
    """The plan of a `StructuredModel`."""
    linears = {f"blocks.*.{name}": Linear("column", "text", dim=1) for name in ("q", "k", "v")}
    return ModelPlan(
        blocks=(Block("blocks.0"), Block("blocks.1")),
        inputs={"embed": {"input": Split("text", dim=1)}, "blocks.*": {"mask_BN": SEEN, "documents_BN": SEEN}},
        outputs={"blocks.1": {0: Gather("text", dim=1)}},
        attention={"blocks.*.attend": Site(("text",), calls=True)},
        linears={**linears, "blocks.*.out": Linear("row", "text", dim=1)},
        heads=A,
        key_heads=shape.key_heads,
        draws=False,
        causal=causal,
    )


class WrittenOut(nn.Module):
    """Attention by the formula, every score of it."""

    def forward(self, q_BAND: Tensor, k_BKND: Tensor, v_BKNW: Tensor, structure: Structure) -> Tensor:
        times, tokens = q_BAND.shape[1] // k_BKND.shape[1], q_BAND.shape[2]
        place = torch.arange(tokens)
        seen = torch.ones(len(q_BAND), 1, tokens, tokens, dtype=torch.bool)
        if structure.causal:
            seen = seen & (place[None] <= place[:, None])
        if structure.window is not None:
            seen = seen & ((place[None] - place[:, None]).abs() <= structure.window)
        if (documents := structure.documents_BN) is not None:
            seen = seen & (documents[:, None, :, None] == documents[:, None, None])
        if structure.key_mask_BN is not None:
            seen = seen & structure.key_mask_BN[:, None, None]
        scores = q_BAND @ k_BKND.repeat_interleave(times, 1).mT / D**0.5
        return (scores.masked_fill(~seen, -1e300).softmax(-1) * seen) @ v_BKNW.repeat_interleave(times, 1)
