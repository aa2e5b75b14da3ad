"""The weights of one model in a run's checkpoint, by the names that they have without adapters."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mmspeed.config.adapters import AdapterConfig
from mmspeed.errors import UserError
from mmspeed.loop.checkpoint.load import of_role, open_checkpoint
from mmspeed.loop.checkpoint.merging import whole_tensor
from mmspeed.loop.checkpoint.storage import EMA_UPDATES, FROZEN, ROLES, STATE
from mmspeed.models.adapters import NAME, is_adapter
from mmspeed.models.stored import LISTED, check_tensors, shapes_of
from mmspeed.pipelines.run.run_folder import RunFolder
from mmspeed.protocols import WeightSource

WEIGHT = ".weight"
FACTS = "export.json"


class StoredWeights:
    """The moving averages or the weights of a role of a checkpoint; role None: the first.

    Raises UserError for averages of a checkpoint that has none.
    """

    def __init__(self, place: Path, role: str | None, weights: str) -> None:
        meta, index = open_checkpoint(place)
        facts = meta if role is None else meta[ROLES][role]
        if weights == "ema" and facts.get(EMA_UPDATES) is None:
            raise UserError(f"checkpoint {place} has no moving average: use --weights model")
        self.place, self.weights, self._index = place, weights, index["tensors"]
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

    def value(self, name: str, shape: tuple[int, ...], base: WeightSource | None, scale: float | None) -> Tensor:
        """A tensor, of the checkpoint or else of the base; with a `scale` in float32, and merged with the adapter beside it."""
        if name in self:
            tensor = self.tensor(name)
        else:
            assert base is not None
            ((_, tensor),) = base.read({name: tuple(slice(0, size) for size in shape)})
        layer = name.removesuffix(WEIGHT)
        if scale is None or adapter_name(layer, "A") not in self:
            return tensor
        down, up = (self.tensor(adapter_name(layer, side)).to(torch.float32) for side in "AB")
        return tensor.to(torch.float32) + scale * (up @ down)

    def adapted_layers(self, model: nn.Module) -> list[str]:
        """The layers of a model that have adapters. Raises UserError where those of the checkpoint are others, or of another shape."""
        wanted = {name: shape for name, shape in shapes_of(model).items() if is_adapter(name)}
        stored = {name: self.shape(name) for name in self._keys if is_adapter(name)}
        check_tensors(wanted, stored, f"checkpoint {self.place}")
        end = adapter_name("", "A")
        return [name.removesuffix(end) for name in wanted if name.endswith(end)]

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


def write_facts(
    work: Path,
    folder: RunFolder,
    stored: StoredWeights,
    kind: str,
    adapter: AdapterConfig,
    parts: Mapping[str, Any],
    reader: str | None = None,
) -> None:
    """Write `export.json` into an exported folder: its run, checkpoint and format, and the adapter's settings.

    kind: the format. parts: of each adapted model the names of its layers and the fingerprint of its base. reader: the library that read
    what was written; None: none did.
    """
    facts = {
        "run": folder.root.resolve().name,
        "checkpoint": stored.place.name,
        "weights": stored.weights,
        "format": kind,
        "rank": adapter.rank,
        "alpha": adapter.alpha_or_rank,
        "rslora": adapter.rslora,
        "reader": "unproven" if reader is None else f"{reader} {version(reader)}",
        "parts": parts,
    }
    (work / FACTS).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
