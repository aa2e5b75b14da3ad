"""Hashes and seals of checkpoints: XXH3-128 (Collet, 2019) of each chunk, of each shard's header, of the index and of meta.json.

    seal.json     {"format", "run", "step", "index": hash, "meta": hash, "hash": that of the entries before it}

They find accidents of disks, networks and hands; they are no signatures, since whoever rewrites a file can rewrite its hash.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

_LONGEST_HEADER = 100_000_000  # bytes; safetensors refuses longer ones


def digest(data: bytes | memoryview) -> str:
    """The XXH3-128 hash of some bytes, in 32 hexadecimal digits."""
    return xxhash.xxh3_128(data).hexdigest()


def chunk_digest(tensor: Tensor) -> str:
    """The hash of a tensor's bytes in row-major order, as a shard file holds them. Shape and number type are not part of it."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return digest(flat.view(torch.uint8).numpy().data)


def header_digest(path: Path) -> str:
    """The hash of a safetensors file's header, its eight bytes of length included. Raises OSError."""
    with open(path, "rb") as file:
        length = file.read(8)
        return digest(length + file.read(min(int.from_bytes(length, "little"), _LONGEST_HEADER)))


def sealed_text(value: dict[str, Any]) -> str:
    """JSON of `value` with an entry `hash` of the others."""
    return json.dumps(value | {"hash": digest(json.dumps(value, sort_keys=True).encode())}, indent=1)


def unsealed(text: str, value: dict[str, Any]) -> dict[str, Any]:
    """The entries without `hash` of `value`, which `text` was read as. Raises ValueError where a byte of the text has changed."""
    rest = {key: entry for key, entry in value.items() if key != "hash"}
    if sealed_text(rest) != text:
        raise ValueError("its hash is that of other entries")
    return rest
