"""Synthetic pairs: each sample is the chosen entry, and turned around it is the rejected one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from mmspeed.data.loading.loader import Collate
from mmspeed.pipelines.domains.base import SampledData
from mmspeed.protocols import Ask, Batch, BatchShape, Data, Domain, RunPlace
from tests.support.preferences import Preferences

TURNED: Mapping[str, Callable[[Tensor], Tensor]] = {  # by the name of a domain's tensor
    "latents": lambda latents_BCThw: latents_BCThw.flip(2, 3),
    "ids": lambda ids_BN: ids_BN.flip(1),
}


@dataclass(frozen=True)
class PairedCollate:
    """A maker of batches with the entries of pairs, both `chosen` and `rejected`, or one of them."""

    collate: Collate
    entries: Collection[str]

    def __call__(self, draws: Any) -> Batch:
        batch = self.collate(draws)
        tensors = dict(batch.with_entries(self.entries).tensors)
        for name, turn in TURNED.items():
            if f"rejected.{name}" in tensors:
                tensors[f"rejected.{name}"] = turn(batch[name])
        return replace(batch, tensors=tensors)

    def shape(self, draws: Any) -> BatchShape:
        shape = self.collate.shape(draws)
        further = {f"{entry}.{name}": size for entry in self.entries for name, size in shape.tensors.items()}
        return replace(shape, tensors={**shape.tensors, **further})


class PairedPreferences(Preferences):
    """Preferences on synthetic pairs of a domain's own samples."""

    members: Collection[str] = Preferences.entries

    def data(self, domain: Domain, place: RunPlace, ask: Ask) -> Data:
        data = super().data(domain, place, ask)
        assert isinstance(data, SampledData)
        data.loader.collate = PairedCollate(data.loader.collate, self.members)
        return data
