"""A causal language model with a layer of each role: a column and a row layer, experts, a vocabulary.

Legend: B batch, N tokens, A heads, D head width, E width, K experts, O I channels out and in, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmspeed import rng
from mmspeed.compute.structured import Attend
from mmspeed.protocols.plan import Block, Gather, Linear, ModelPlan, Site, Split, Structure, declare_plan

WIDTH, HEADS, EXPERTS, VOCABULARY = 16, 4, 4, 10


class StackedExperts(nn.Module):
    """Linear layers of all experts; each token gets their sum by its gates."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width, width))  # K O I

    def forward(self, x_BNE: Tensor, gates_BNK: Tensor) -> Tensor:
        return torch.einsum("bni,koi,bnk->bno", x_BNE, self.weight, gates_BNK)


class TokenBlock(nn.Module):
    """Causal self-attention, then experts that a router weighs."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attend = Attend()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = StackedExperts(EXPERTS, WIDTH)

    def forward(self, x_BNE: Tensor, structure: Structure) -> Tensor:
        qkv = self.qkv(self.norm(x_BNE)).unflatten(-1, (-1, 3, WIDTH // HEADS))
        out_BAND = self.attend(*qkv.permute(3, 0, 2, 1, 4), structure)
        x_BNE = x_BNE + self.out(out_BAND.transpose(1, 2).flatten(2))
        return x_BNE + self.experts(x_BNE, self.router(x_BNE).softmax(-1))


class TokenModel(nn.Module):
    """Embedding, blocks, logits."""

    def __init__(self, depth: int = 2, structure: Structure | None = None) -> None:
        super().__init__()
        self.structure = structure or Structure(causal=True)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(TokenBlock() for _ in range(depth))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(rng.normal(p.shape, 3, "roles", name) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.3))
        declare_plan(self, token_plan(depth))

    def forward(self, tokens_BN: Tensor) -> Tensor:
        x_BNE = self.embed(tokens_BN)
        for block in self.blocks:
            x_BNE = block(x_BNE, self.structure)
        return self.head(x_BNE)


def token_plan(depth: int) -> ModelPlan:
    """The plan of `TokenModel`."""
    return ModelPlan(
        blocks=tuple(Block(f"blocks.{number}") for number in range(depth)),
        inputs={"embed": {"input": Split("text", dim=1)}},
        outputs={"head": {0: Gather("text", dim=1)}},
        attention={"blocks.*.attend": Site(("text",), calls=True)},
        linears={
            "blocks.*.qkv": Linear("column", "text", dim=1),
            "blocks.*.out": Linear("row", "text", dim=1),
            "blocks.*.experts": Linear("expert", "text", dim=1),
            "head": Linear("vocabulary", "text", dim=1),
        },
        heads=HEADS,
        draws=False,
        causal=True,
        after=("head",),
    )


def tokens_of(batch: int, length: int) -> Tensor:
    """Tokens by their places."""
    return (rng.normal((batch, length), 5, "tokens", length).abs() * 100).long() % VOCABULARY


def loss_of(model: nn.Module, tokens_BN: Tensor) -> Tensor:
    """Of the next token."""
    logits_BNV = model(tokens_BN)
    return F.cross_entropy(logits_BNV[:, :-1].flatten(0, 1), tokens_BN[:, 1:].flatten())
