"""What a run or a cache holds, by name, and the first difference between two of them (exact.py)."""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

# A run: numbers by row and name ("step 3 loss"), in the order of the steps, and the last checkpoint's tensors.
# A cache: SHA-256 of each member of its shards and of each other file, and its codec's tensors.
Record = dict[str, float | str | Tensor | None]
# Not compared: a description with the whole config, a record with the times of files, a lock, and tables that are compiled from the others under a name of their own.
_OTHERS = {"cache.json", "sources.parquet", ".readers.lock", "entries.arrow", "samples.arrow"}


def renamed(name: str, table: Mapping[str, str]) -> str:
    """A tensor's name with the table's words (whole ones between dots) in place of the old ones."""
    for old, new in table.items():
        name = re.sub(rf"(?<![^.]){re.escape(old)}(?![^.])", new, name)
    return name


def difference(old: Record, new: Record, names: Mapping[str, str]) -> str | None:
    """The first difference, with its name and both values; None where all is equal to the bit."""
    expected = {renamed(name, names): value for name, value in old.items()}
    different = [(name, found) for name in {**expected, **new} if (found := _difference(name, expected, new))]
    if not different:
        return None if expected else "nothing was compared"
    name, found = different[0]
    return f"{name}: {found}" + (f"; {len(different)} of {len(expected)} differ" if len(different) > 1 else "")


def _difference(name: str, old: Record, new: Record) -> str | None:
    if name not in old or name not in new:
        return f"only the {'old' if name in old else 'new'} code has it"
    before, after = old[name], new[name]
    if isinstance(before, Tensor) and isinstance(after, Tensor):
        return _tensor_difference(before, after)
    shown = [_shown(value) for value in (before, after)]
    return None if shown[0] == shown[1] else f"{shown[0]} against {shown[1]}"


def _shown(value: float | str | Tensor | None) -> str:
    return f"{float(value).hex()} ({value})" if isinstance(value, int | float) else str(value)


def _raw(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, [bytes]."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _tensor_difference(old: Tensor, new: Tensor) -> str | None:
    kinds = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (old, new)]
    if kinds[0] != kinds[1]:
        return f"{kinds[0]} against {kinds[1]}"
    places = (_raw(old) != _raw(new)).view(-1, old.element_size()).any(dim=1).nonzero()[:, 0].tolist()
    if not places:
        return None
    values = [_shown(tensor.reshape(-1)[places[0]].item()) for tensor in (old, new)]
    return f"{len(places)} of {old.numel()} numbers, at {places[0]}: {values[0]} against {values[1]}"


def read_run(run: Path) -> Record:
    """What a run folder holds of a run. Raises OSError, KeyError or ValueError for a folder that is not whole."""
    record: Record = {}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] == "train":
            record |= {f"step {row['step']} {name}": row[name] for name in ("loss", "grad_norm", "samples")}
        elif row["kind"] == "validation":
            record[f"step {row['step']} held-out loss"] = row["loss"]
    newest = json.loads((run / "checkpoints" / "latest.json").read_text(encoding="utf-8"))["latest"]
    return {**record, **read_tensors(run / "checkpoints" / newest)}


def read_tensors(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint, put together from the parts that the ranks wrote. Raises ValueError where a part lacks."""
    index = json.loads((checkpoint / "index.json").read_text(encoding="utf-8"))["tensors"]
    results = {}
    for name, entry in sorted(index.items()):
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


def read_cache(cache: Path) -> Record:
    """What a cache's folder holds: entries under their keys, tables of the index, a tokenizer, tensors of a codec."""
    record: Record = {}
    for path in sorted(path for path in cache.rglob("*") if path.is_file() and path.name not in _OTHERS):
        name = path.relative_to(cache).as_posix()
        if path.suffix == ".tar":
            with tarfile.open(path) as tar:
                for member in tar:
                    file = tar.extractfile(member)
                    assert file is not None  # shards hold files only
                    record[f"{name}:{member.name}"] = hashlib.sha256(file.read()).hexdigest()
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as tensors:  # its header is in any order
                record |= {f"{name}:{key}": tensors.get_tensor(key) for key in tensors.keys()}
        else:
            record[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return record
