"""Other attentions in place of a model's own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from mmspeed.models import SoraDiT
from mmspeed.protocols.plan import Structure

Function = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class AttendBy(nn.Module):
    """Attention by a function of queries, keys, values and a mask of keys."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, q_BAND: Tensor, k_BAMD: Tensor, v_BAMD: Tensor, structure: Structure) -> Tensor:
        if q_BAND.dim() == 5:  # columns that attend apart
            q, k, v = (x.flatten(0, 1) for x in (q_BAND, k_BAMD, v_BAMD))
            return self.forward(q, k, v, structure).unflatten(0, q_BAND.shape[:2])
        return self.function(q_BAND, k_BAMD, v_BAMD, structure.key_mask_BN)


def attend_by(model: SoraDiT, function: Function) -> SoraDiT:
    """Let all attentions of a model go by a function, in place."""
    for block in model.blocks:
        block.self_attention.attend = AttendBy(function)  # type: ignore[union-attr]
        block.cross_attention.attend = AttendBy(function)  # type: ignore[union-attr]
    return model
