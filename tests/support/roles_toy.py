"""A causal language model with a layer of each role: a column and a row layer, a vocabulary; and with experts.

Legend: B batch, N tokens, T = B x N, A heads, D head width, E width, G experts, K experts of a token, O I channels out and in, V vocabulary.
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
    """A linear layer of each expert; each token gets the weighted sum of its own."""

    def __init__(self, experts: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, width, width))  # G O I
        self.bias = nn.Parameter(torch.empty(experts, width))

    def forward(self, x_TE: Tensor, weights_TK: Tensor, expert_TK: Tensor) -> Tensor:
        gates_TG = x_TE.new_zeros(len(x_TE), len(self.weight)).scatter_add(1, expert_TK, weights_TK)
        return torch.einsum("ti,goi,tg->to", x_TE, self.weight, gates_TG) + gates_TG @ self.bias


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
        x_TE = x_BNE.flatten(0, 1)
        weights_TK, expert_TK = self.router(x_TE).softmax(-1).topk(2)
        return x_BNE + self.experts(x_TE, weights_TK, expert_TK).view_as(x_BNE)


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
            "head": Linear("vocabulary", "text", dim=1),
        },
        heads=HEADS,
        experts={"blocks.*.experts": {}},
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
