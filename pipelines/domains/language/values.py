"""The values of a decoder's output.

Legend: B packs of a micro-batch, N tokens of a pack, U documents of all packs, Z one more than U.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from mmspeed.compute.operators.cross_entropy import IGNORED
from mmspeed.compute.operators.document_attention import numbers_of
from mmspeed.config.language import LanguageObjectiveConfig
from mmspeed.models.language.config import Balance
from mmspeed.models.language.decoder import DecoderOutput
from mmspeed.protocols import Term, Terms, Values


@dataclass(frozen=True)
class PackValues(Values):
    """The losses in a decoder's output; a unit is a document of a pack that counts, and padding is none.

    Args:
        tensors: those of the batch that it was called with: ids, targets, counted (B, N), bounds (Z,).
        balance: over what the load of experts is balanced; None: nothing.
    """

    output: DecoderOutput
    tensors: Mapping[str, Tensor]
    weights_B: Tensor
    objective: LanguageObjectiveConfig
    balance: Balance | None

    @cached_property
    def _losses(self) -> Tensor:
        assert self.output.loss_BN is not None
        return self.output.loss_BN.float()

    @cached_property
    def _targets(self) -> Tensor:
        return (self.tensors["targets"] != IGNORED).sum(1)

    def _of_tokens(self, loss_B: Tensor) -> Term:
        return Term(loss_B, self.weights_B, "tokens", units_I=self._targets)

    @property
    def loss(self) -> Term:
        """The sum over each pack's target tokens."""
        return self._of_tokens(self._losses.sum(1))

    def own(self, mtp: bool = True) -> Terms:
        """The z-loss, the experts' auxiliary loss, and the loss of further tokens."""
        output, objective, terms = self.output, self.objective, dict[str, Term]()
        if objective.z_loss:
            assert output.lse_BN is not None
            terms["z_loss"] = self._of_tokens(objective.z_loss * output.lse_BN.float().square().sum(1))
        if output.balance_B is not None:
            balance_B = objective.balance * output.balance_B.float()
            terms["balance"] = Term(balance_B, self.weights_B, "samples")
            if self.balance == "global_batch":  # a mean of all tokens, however they lie in packs
                terms["balance"] = Term(balance_B * self.tensors["counted"].sum(1), self.weights_B, "real_tokens")
        if output.mtp and mtp:
            factor = objective.mtp / len(output.mtp)
            summed_B = torch.stack([loss_BN.float().sum(1) for loss_BN, _ in output.mtp]).sum(0)
            # not named mtp: terms are added in the order of their names, and the loss would round otherwise
            terms["further"] = self._of_tokens(factor * summed_B)
        return terms

    @cached_property
    def _units(self) -> tuple[Tensor, Tensor]:
        """(numbers of the documents among all between bounds, their packs), both (U,)."""
        first_Z = self.tensors["bounds"][:-1].long()
        real_U = self.tensors["counted"].flatten()[first_Z].nonzero().flatten()
        return real_U, first_Z[real_U] // self._losses.shape[1]

    def errors(self) -> tuple[Tensor, Tensor]:
        loss_T, bounds_Z = self._losses.flatten(), self.tensors["bounds"]
        number_T = numbers_of(bounds_Z, len(loss_T)).long()
        real_U, pack_U = self._units
        return loss_T.new_zeros(len(bounds_Z) - 1).index_add(0, number_T, loss_T)[real_U], pack_U

    def term(self, value_U: Tensor, trains: bool = True) -> Term:
        """The sum over each pack's documents; the divisor counts the documents of the step."""
        pack_U, zeros_B = self._units[1], value_U.new_zeros(len(self.weights_B))
        count_B = zeros_B.index_add(0, pack_U, torch.ones_like(value_U))
        return Term(zeros_B.index_add(0, pack_U, value_U), self.weights_B, "units", trains, units_I=count_B)
