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
    """The losses in a decoder's output; a unit is a document, padding behind the documents of a pack is none.

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
        """(first token of each document, 1 for a document and 0 for padding, float32), both (U,)."""
        first_U = self.tensors["bounds"][:-1].long()
        return first_U, self.tensors["counted"].flatten()[first_U].float()

    def errors(self) -> tuple[Tensor, Tensor]:
        loss_T, bounds_Z = self._losses.flatten(), self.tensors["bounds"]
        first_U, _ = self._units
        unit_T = numbers_of(bounds_Z, len(loss_T)).long()
        return loss_T.new_zeros(len(first_U)).index_add(0, unit_T, loss_T), first_U // self._losses.shape[1]

    def term(self, value_U: Tensor, trains: bool = True) -> Term:
        """The sum over each pack's documents; the divisor counts the documents of the step."""
        first_U, real_U = self._units
        pack_U, zeros_B = first_U // self._losses.shape[1], value_U.new_zeros(len(self.weights_B))
        value_B = zeros_B.index_add(0, pack_U, value_U.where(real_U > 0, 0.0))
        count_B = zeros_B.detach().index_add(0, pack_U, real_U.to(value_U))
        return Term(value_B, self.weights_B, "units", trains, units_I=count_B)
