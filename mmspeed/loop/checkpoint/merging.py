"""The moving average of one checkpoint, or the mean of those of several, as a safetensors file with the model's own names.

The mean of averages from several steps is a longer average, made after training (Kaddour, 2022; Karras et al., 2024).
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmspeed.data.cache.files import fsync_folder, private_file
from mmspeed.errors import UserError

from .load import of_role, open_checkpoint
from .storage import EMA_UPDATES, FROZEN, ROLES, DamageError, read_chunk


@dataclass(frozen=True)
class MergedAverages:
    """A file of merged averages: its number of tensors, and True for `partial` where weights that did not train are not in it."""

    path: Path
    tensors: int
    partial: bool


def merge_averages(checkpoints: Sequence[Path], target: Path, role: str | None = None) -> MergedAverages:
    """Write the mean of the averages of `checkpoints` to `target`, whole or not at all; of a single one the average itself.

    Buffers that are not averaged are those of the last checkpoint. `role`: that of a further model; None: the first. Raises UserError for
    a checkpoint that has no average, is damaged, or is of another model than the others.
    """
    indexes, partial = [], False
    for folder in checkpoints:
        meta, index = open_checkpoint(folder)
        facts = meta if role is None else meta.get(ROLES, {}).get(role, {})
        if facts.get(EMA_UPDATES) is None:
            owner = "" if role is None else f" of the role {role}"
            raise UserError(
                f"checkpoint {folder} has no moving average{owner}: the run trains with train.ema_decay: null"
            )
        indexes.append(index["tensors"])
        partial = FROZEN in facts
    of_ema, of_model = f"{of_role('ema', role)}.", f"{of_role('model', role)}."
    shapes = [
        {name.removeprefix(of_ema): entry["shape"] for name, entry in index.items() if name.startswith(of_ema)}
        for index in indexes
    ]
    for folder, other in zip(checkpoints, shapes, strict=True):
        if other != shapes[-1]:
            raise UserError(
                f"checkpoint {folder} is of another model than {checkpoints[-1]}: their averages have no mean"
            )
    merged = {
        name: _mean([whole_tensor(c, i, of_ema + name) for c, i in zip(checkpoints, indexes, strict=True)])
        for name in shapes[-1]
    }
    buffers = (name for name in indexes[-1] if name.startswith(of_model) and name.removeprefix(of_model) not in merged)
    merged |= {name.removeprefix(of_model): whole_tensor(checkpoints[-1], indexes[-1], name) for name in buffers}
    _save(merged, target, [folder.name for folder in checkpoints])
    return MergedAverages(target, len(merged), partial)


def _mean(tensors: list[Tensor]) -> Tensor:
    if len(tensors) == 1:
        return tensors[0]
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor in tensors:
        total += tensor
    return (total / len(tensors)).to(tensors[0].dtype)


def whole_tensor(folder: Path, index: dict[str, Any], name: str) -> Tensor:
    """A tensor of a checkpoint, whole, from the chunks of all ranks. `index`: its tensors. Raises UserError for a damaged one."""
    entry = index[name]
    tensor = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
    try:
        for chunk in entry["chunks"]:
            with safe_open(folder / chunk["file"], framework="pt") as file:
                part = read_chunk(file, name, tuple(chunk["shape"]), chunk["hash"])
            spans = zip(chunk["offsets"], chunk["shape"], strict=True)
            tensor[tuple(slice(begin, begin + length) for begin, length in spans)] = part
    except DamageError as error:
        raise UserError(f"checkpoint {folder} {error}") from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"checkpoint {folder} is damaged: {chunk['file']} cannot be read ({error})") from None
    return tensor


def _save(tensors: dict[str, Tensor], target: Path, sources: list[str]) -> None:
    try:
        with private_file(target) as temporary:
            save_file(tensors, temporary, metadata={"format": "pt", "averages_of": json.dumps(sources)})
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
        fsync_folder(target.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{target} cannot be written: {error}") from None
