"""Compute the head of a language model as a module, so that a plan can name it and split its rows.

Legend: B rows (packs), N tokens, E width, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .operators.cross_entropy import linear_cross_entropy


class TokenHead(nn.Module):
    """The logits of tokens over a vocabulary, or their losses. `tied`: it has no weight, and is called with that of the embedding."""

    weight: nn.Parameter | None

    def __init__(self, vocabulary: int, width: int, tied: bool = False) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.register_parameter("weight", None if tied else nn.Parameter(torch.empty(vocabulary, width)))

    def forward(
        self, x_BNE: Tensor, target_BN: Tensor | None = None, tied_VE: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """(logits_BNV, None), or (loss_BN, lse_BN) of targets: as `linear_cross_entropy` gives them, without logits in full."""
        weight_VE = self.rows(tied_VE)
        if target_BN is None:
            return F.linear(x_BNE, weight_VE), None
        loss_T, lse_T = linear_cross_entropy(x_BNE.flatten(0, 1), weight_VE, target_BN.flatten())
        return loss_T.view_as(target_BN), lse_T.view_as(target_BN)

    def rows(self, tied_VE: Tensor | None) -> Tensor:
        """The weight: its own, or that of the embedding. Raises ValueError for neither."""
        weight_VE = self.weight if self.weight is not None else tied_VE
        if weight_VE is None:
            raise ValueError("a tied head is called with the weight of the embedding")
        return weight_VE
