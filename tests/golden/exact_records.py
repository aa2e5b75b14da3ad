"""What a run computed, as its folder holds it, and the first difference between two runs (exact.py)."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor


@dataclass(frozen=True)
class Record:
    """Numbers by row and name ("step 3 loss"), in the order of the steps, and the last checkpoint's tensors by name."""

    numbers: dict[str, float | None]
    tensors: dict[str, Tensor]


def _hex(value: float | None) -> str:
    return "null" if value is None else float(value).hex()


def raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, [bytes]."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def digest(tensor: Tensor) -> str:
    """SHA-256 of number type, shape and bytes."""
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.sha256(head + raw(tensor).numpy().tobytes()).hexdigest()


def renamed(name: str, table: Mapping[str, str]) -> str:
    """A tensor's name with the table's words (whole ones between dots) in place of the old ones."""
    for old, new in table.items():
        name = re.sub(rf"(?<![^.]){re.escape(old)}(?![^.])", new, name)
    return name


def difference(old: Record, new: Record, names: Mapping[str, str]) -> str | None:
    """The first difference, with its name and both values; None where all is equal to the bit."""
    for name in {**old.numbers, **new.numbers}:
        if name not in old.numbers or name not in new.numbers:
            return f"{name}: only the {'old' if name in old.numbers else 'new'} run has it"
        before, after = _hex(old.numbers[name]), _hex(new.numbers[name])
        if before != after:
            return f"{name}: {before} ({old.numbers[name]}) against {after} ({new.numbers[name]})"
    expected = {renamed(name, names): tensor for name, tensor in old.tensors.items()}
    different = [
        name for name in sorted({*expected, *new.tensors}) if not _same(expected.get(name), new.tensors.get(name))
    ]
    if not different:
        return None
    name = different[0]
    more = f"; {len(different)} of {len(expected)} tensors differ" if len(different) > 1 else ""
    return f"{name}: {_tensor_difference(expected.get(name), new.tensors.get(name))}{more}"


def _same(old: Tensor | None, new: Tensor | None) -> bool:
    if old is None or new is None or old.dtype != new.dtype or old.shape != new.shape:
        return False
    return torch.equal(raw(old), raw(new))


def _tensor_difference(old: Tensor | None, new: Tensor | None) -> str:
    if old is None or new is None:
        return f"only the {'new' if old is None else 'old'} run has it"
    kinds = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (old, new)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} against {kinds[1]}"
    size = old.element_size()
    places = (raw(old) != raw(new)).view(-1, size).any(dim=1).nonzero()[:, 0]
    first = int(places[0])
    values = [_hex(tensor.reshape(-1)[first].item()) for tensor in (old, new)]
    return f"{len(places)} of {old.numel()} numbers, at {first}: {values[0]} against {values[1]}"


def read_record(run: Path) -> Record:
    """What a run folder holds of a run. Raises OSError, KeyError or ValueError for a folder that is not whole."""
    numbers: dict[str, float | None] = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] == "train":
            numbers |= {f"step {row['step']} {name}": row[name] for name in ("loss", "grad_norm", "samples")}
        elif row["kind"] == "validation":
            numbers[f"step {row['step']} held-out loss"] = row["loss"]
    newest = json.loads((run / "checkpoints" / "latest.json").read_text(encoding="utf-8"))["latest"]
    return Record(numbers, read_tensors(run / "checkpoints" / newest))


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, put together from the parts that the ranks wrote. Raises ValueError where a part lacks."""
    index = json.loads((checkpoint / "index.json").read_text(encoding="utf-8"))["tensors"]
    results = {}
    for name, entry in index.items():
        whole = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
        filled = torch.zeros(entry["shape"], dtype=torch.bool)
        for chunk in entry["chunks"]:
            with safe_open(checkpoint / chunk["file"], framework="pt") as file:
                part = file.get_tensor(name)
            place = tuple(slice(at, at + size) for at, size in zip(chunk["offsets"], chunk["shape"], strict=True))
            whole[place] = part.view(chunk["shape"])
            filled[place] = True
        if not filled.all():
            raise ValueError(f"{checkpoint}: {name} is not whole")
        results[name] = whole
    return results


# Not compared: descriptions with the whole config, locks, and tables compiled from the others under a name of their own.
_OTHERS = {"cache.json", ".readers.lock", "entries.arrow", "samples.arrow"}


def read_entries(cache: Path) -> dict[str, str]:
    """SHA-256 of every member of a cache's shards, of every tensor of its codec, and of its other files, by path and name."""
    results = {}
    for path in sorted(path for path in cache.rglob("*") if path.is_file() and path.name not in _OTHERS):
        name = path.relative_to(cache).as_posix()
        if path.suffix == ".tar":
            with tarfile.open(path) as tar:
                for member in tar:
                    file = tar.extractfile(member)
                    assert file is not None  # shards hold files only
                    results[f"{name}:{member.name}"] = hashlib.sha256(file.read()).hexdigest()
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as tensors:  # its header is in any order
                results |= {f"{name}:{key}": digest(tensors.get_tensor(key)) for key in tensors.keys()}
        else:
            results[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return results


def entries_difference(old: Mapping[str, str], new: Mapping[str, str]) -> str | None:
    """The first entry of a cache that differs, or None."""
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            return f"{name}: {old.get(name, 'not there')} against {new.get(name, 'not there')}"
    return None if old else "no entries"
