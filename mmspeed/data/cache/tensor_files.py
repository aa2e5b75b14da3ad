"""Write safetensors files one tensor after another, without a second copy of their bytes in memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """A tensor in a file's header; `kind`: its number type as safetensors calls it."""

    name: str
    kind: str
    shape: tuple[int, ...]
    nbytes: int


def rows_of(tensors: Mapping[str, Tensor]) -> list[Row]:
    """The rows of tensors by name, in the order in which safetensors itself lays them out."""
    empty = {name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}
    outline = json.loads(save(empty)[8:])
    return [
        Row(name, kept["dtype"], tuple(tensors[name].shape), tensors[name].nbytes) for name, kept in outline.items()
    ]


def write_safetensors(path: Path, metadata: Mapping[str, str], rows: Iterable[Row], values: Iterable[Tensor]) -> None:
    """Write a file to the disk. `values`: the tensors of the rows, in their order, contiguous on the CPU; one is asked for at a time."""
    header: dict[str, object] = {"__metadata__": metadata}
    end = 0
    for row in rows:
        begin, end = end, end + row.nbytes
        header[row.name] = {"dtype": row.kind, "shape": row.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in values:
            file.write(value.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
