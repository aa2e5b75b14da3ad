"""Learning from preferences, as a method: DPO (Rafailov et al., 2023), on videos Diffusion-DPO (Wallace et al., 2024).

Legend: U units of both entries, pair by pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log

from torch.nn.functional import logsigmoid

from mmspeed.pipelines.methods.base import MethodDefaults, own_terms
from mmspeed.protocols import Ask, Batch, Domain, FrozenCopy, Inputs, Tensors, Terms, Update, Values


@dataclass(frozen=True)
class Preferences(MethodDefaults):
    """The model prefers the chosen entry of each pair more than a frozen copy of its start does.

    Args:
        beta: the weight of the gain over the reference.
    """

    beta: float = 0.5
    name = "preferences"
    needs, asks, entries = ("errors",), True, ("chosen", "rejected")

    def roles(self, domain: Domain) -> Mapping[str, FrozenCopy]:
        return {f"reference {part.role}": FrozenCopy(part) for part in domain.parts()}

    def updates(self, domain: Domain) -> Sequence[Update]:
        return [Update.of(part, baseline=log(2)) for part in domain.parts()]

    def calls(self, ask: Ask, batch: Batch, update: Update) -> Sequence[Inputs]:
        return [ask.inputs(batch, update, entry) for entry in self.entries]

    def before(self, ask: Ask, batch: Batch, update: Update) -> Tensors:
        calls = zip(self.entries, self.calls(ask, batch, update), strict=True)
        return {entry: ask(f"reference {update.role}", inputs, batch).errors()[0] for entry, inputs in calls}

    def terms(self, values: Sequence[Values], before: Tensors, ask: Ask, batch: Batch, update: Update) -> Terms:
        chosen_U, rejected_U = (
            before[entry] - each.errors()[0] for entry, each in zip(self.entries, values, strict=True)
        )
        gain_U = self.beta * (chosen_U - rejected_U)
        preferred = values[0].term((gain_U.detach() > 0).float(), trains=False)
        return {"loss": values[0].term(-logsigmoid(gain_U)), "preferred": preferred, **own_terms(values, mtp=False)}
