"""The weights of one model in a run's checkpoint, by the names that they have without adapters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import torch
from torch import Tensor

from mmspeed.errors import UserError
from mmspeed.loop.checkpoint.load import of_role, open_checkpoint
from mmspeed.loop.checkpoint.merging import whole_tensor
from mmspeed.loop.checkpoint.storage import EMA_UPDATES, FROZEN, ROLES, STATE
from mmspeed.models.adapters import NAME, is_adapter
from mmspeed.models.stored import LISTED

WEIGHT = ".weight"


class StoredWeights:
    """The moving averages or the weights of a role of a checkpoint; role None: the first.

    Raises UserError for averages of a checkpoint that has none.
    """

    def __init__(self, place: Path, role: str | None, weights: str) -> None:
        meta, index = open_checkpoint(place)
        facts = meta if role is None else meta[ROLES][role]
        if weights == "ema" and facts.get(EMA_UPDATES) is None:
            raise UserError(f"checkpoint {place} has no moving average: use --weights model")
        self.place, self._index = place, index["tensors"]
        self.frozen = FROZEN in facts  # True where what did not train is in the base alone
        self._state: Collection[str] = facts.get(STATE, {}).keys()
        self._keys: dict[str, str] = {}  # in the checkpoint, by name in the model
        for part in ("model", "ema") if weights == "ema" else ("model",):
            prefix = f"{of_role(part, role)}."
            self._keys |= {key.removeprefix(prefix): key for key in self._index if key.startswith(prefix)}

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._index[self._keys[name]]["shape"])

    def tensor(self, name: str) -> Tensor:
        """A tensor, whole. Raises UserError for a damaged one."""
        return whole_tensor(self.place, self._index, self._keys[name])

    @property
    def adapters(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor of adapters, by its name in the model."""
        return {name: self.shape(name) for name in self._keys if is_adapter(name)}

    def adapts(self, name: str) -> bool:
        """True for a weight with an adapter beside it."""
        return adapter_name(name.removesuffix(WEIGHT), "A") in self

    def product(self, name: str, scale: float) -> Tensor:
        """What the adapter beside a weight adds to it, in float32."""
        down, up = (self.tensor(adapter_name(name.removesuffix(WEIGHT), side)) for side in "AB")
        return scale * (up.to(torch.float32) @ down.to(torch.float32))

    def check_taken(self, names: Collection[str], adapters: bool) -> None:
        """Raises UserError where the checkpoint holds a tensor that a model of these names lacks; `adapters`: beside its weights."""
        taken = {*names, *self._state}
        if adapters:
            taken |= {adapter_name(name.removesuffix(WEIGHT), side) for name in names for side in "AB"}
        left = sorted(self._keys.keys() - taken)
        if left:
            more = f" and {len(left) - LISTED} more" if len(left) > LISTED else ""
            raise UserError(
                f"checkpoint {self.place} holds {', '.join(f'`{name}`' for name in left[:LISTED])}{more}, which no tensor of the model "
                "takes: what is written would not be what was trained"
            )


def adapter_name(layer: str, side: str) -> str:
    """The name of the matrix `A` or `B` of a layer's adapter."""
    return f"{layer}.lora_{side}.{NAME}{WEIGHT}"
