"""Synthetic pairs: each sample is the chosen entry, and turned around it is the rejected one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import Tensor

from mmspeed.protocols import Batch

TURNED: dict[str, Callable[[Tensor], Tensor]] = {  # by the name of a domain's tensor
    "latents": lambda latents_BCThw: latents_BCThw.flip(2),
    "ids": lambda ids_BN: ids_BN.roll(1, 0) if len(ids_BN) > 1 else ids_BN.flip(1),
}


def paired(batch: Batch) -> Batch:
    """The batch with its own tensors as both entries."""
    tensors = dict(batch.with_entries(("chosen", "rejected")).tensors)
    for name, turn in TURNED.items():
        if name in batch:
            tensors[f"rejected.{name}"] = turn(batch[name])
    return replace(batch, tensors=tensors)
