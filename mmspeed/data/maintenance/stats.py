"""Statistics of a cache from its tables alone: entries, samples, buckets, sizes, shards, and irregularities."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mmspeed.data.cache.document_blocks import DOCUMENTS_NAME
from mmspeed.data.cache.files import TEMP_SUFFIX
from mmspeed.data.cache.tables import (
    entry_schema,
    index_files,
    read_info,
    read_rejects,
    read_samples,
    read_table,
    shard_of_index,
)
from mmspeed.data.cache.text_cache import read_document_table

from .verify import held, is_text_cache

_BARS = 8  # of a histogram
SMALL = 0.5  # of the largest shard of a folder: many smaller ones are worth packing


def census(root: Path | str) -> dict[str, Any]:
    """The facts of `mmspeed cache stat`, in JSON's types. Raises UserError if a table is damaged or there is no cache."""
    root = Path(root)
    info = read_info(root)
    documents = _documents(root) if is_text_cache(root, info) else None
    samples = [] if documents is not None else read_samples(root)[0]
    files = [path for path in root.rglob("*") if path.is_file()]
    disk = shutil.disk_usage(root)
    keys: dict[str, set[str]] = {"latents": set(), "texts": set(), "null": set()}
    parts: dict[str, Counter[str]] = {}
    tokens, sizes, listed, orphans = [], [], 0, []
    for path in index_files(root):
        shard = shard_of_index(path)
        if not (root / shard).exists():
            orphans.append(shard)
            continue
        table = read_table(path, entry_schema())
        listed += table.num_rows
        keys[shard.split("/")[0]].update(table["key"].to_pylist())
        lengths = table["bytes"].to_numpy()
        count = parts.setdefault(str(Path(shard).parent), Counter())
        count.update(entries=table.num_rows, bytes=int(lengths.sum()), shards=1)
        count["disk"] += (size := (root / shard).stat().st_size)
        count["largest_shard"] = max(count["largest_shard"], size)
        if shard.startswith("latents/"):
            tokens.append(table["tokens"].to_numpy())
            sizes.append(lengths)
    used = {
        "latents": {key for sample in samples for key in sample.keys("latents")},
        "texts": {key for sample in samples for key in sample.text_keys}
        if documents is None
        else documents.pop("blocks"),
    }
    temporary = [path for path in files if path.name.startswith(".") and path.name.endswith(TEMP_SUFFIX)]
    return {
        "root": str(root),
        "mmspeed": info.get("mmspeed"),
        "schema": info["schema"],
        "samples": dict(sorted(Counter(sample.split for sample in samples).items())),
        "buckets": {
            str(bucket): dict(Counter(s.split for s in samples if s.bucket == bucket))
            for bucket in sorted({sample.bucket for sample in samples})
        },
        "documents": documents,
        "lost_samples": sum(sample.lost for sample in samples),
        "folders": {name: dict(count) for name, count in sorted(parts.items())},
        "tokens": histogram(tokens),
        "latent_bytes": histogram(sizes),
        "rejected": dict(Counter(row["reason"] for row in read_rejects(root)).most_common()),
        "encoders": info.get("encoders", {}),
        "settings": {n: v for n, v in info.items() if isinstance(v, str | int | float) and n not in _APART},
        "disk": {"files": len(files), "bytes": sum(path.stat().st_size for path in files), "free": disk.free},
        "lacking": {name: len(used[name] - keys[name]) for name in used},
        "unused": {name: len(keys[name] - used[name]) for name in used},
        "duplicates": listed - sum(len(of_section) for of_section in keys.values()),
        "shards_gone": orphans,
        "writers_at_work": sum(held(path) for path in temporary),
        "left_by_killed_writers": sum(not held(path) for path in temporary),
    }


def _documents(root: Path) -> dict[str, Any]:
    """The documents and tokens of each source of a text cache, those held out, and the keys of its blocks."""
    table = read_document_table(root / "index" / DOCUMENTS_NAME)
    source, length = table.columns["source"], table.columns["length"].astype(np.int64)
    held_out = table.columns["held_out"] != 0
    return {
        "blocks": set(table.blocks),
        "held_out": int(held_out.sum()),
        "sources": {
            one.name: {"documents": int((source == number).sum()), "tokens": int(length[source == number].sum())}
            for number, one in enumerate(table.sources)
        },
    }


_APART = ("mmspeed", "schema", "created_with", "config", "seal", "build")


def histogram(arrays: Iterable[np.ndarray]) -> list[dict[str, int]]:
    """Counts of numbers in ranges of equal width, `from` and `to` included; one range for each number if there are few."""
    values = np.concatenate([np.zeros(0, np.int64), *arrays])
    different, counts = np.unique(values, return_counts=True)
    if len(different) <= _BARS:
        return [{"from": int(v), "to": int(v), "count": int(n)} for v, n in zip(different, counts, strict=True)]
    numbers, edges = np.histogram(values, _BARS)
    return [
        {"from": int(np.ceil(low)), "to": int(high), "count": int(n)}
        for low, high, n in zip(edges, edges[1:], numbers, strict=False)
    ]


def should_pack(count: dict[str, int]) -> bool:
    """True if a folder has many shards that are small compared with its largest one, or below 16 MB on average."""
    return count["shards"] >= 4 and count["disk"] / count["shards"] < max(SMALL * count["largest_shard"], 16e6)
