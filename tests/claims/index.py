"""The bench of the cache's index: millions of synthetic rows in true files, compiled, opened in fresh processes, looked up.

Every figure is taken in a process of its own, so that none lives on what another has read; pages are the system's, so "cold" means
that the files were dropped from its page cache before.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from mmspeed.data.cache.checksum import BLANK, seal_file
from mmspeed.data.cache.index import compile_index
from mmspeed.data.cache.index_reader import open_tables
from mmspeed.data.cache.tables import entry_schema, index_path, sample_schema
from mmspeed.log import format_bytes, progress, setup

SHARDS = 1000
LOOKUPS = 100_000
MAX_SECONDS, MAX_BYTES = 2.0, 100_000_000
_BUCKETS = ("017x0256x0256", "049x0480x0832", "081x0720x1280")


@dataclass(frozen=True)
class IndexResult:
    """What the bench found. Memory in bytes; private memory is what a process does not share with others (USS)."""

    rows: int
    samples: int
    parquet_bytes: int
    compiled_bytes: int
    compile_seconds: float
    compile_peak: int  # resident, of the compiling process
    open_seconds: float  # median of 3 fresh processes
    open_cold_seconds: float
    open_private: int  # what opening adds
    open_resident: int
    lookups_per_s: float  # random keys, entry to place
    lookups_cold_per_s: float
    lookups_private: int  # what opening and all lookups add, without the file's own pages
    samples_per_s: float  # random rows, made into samples
    samples_cold_per_s: float

    def passed(self) -> bool:
        """Whether an index of this size opens in time and in little memory."""
        return max(self.open_seconds, self.open_cold_seconds) <= MAX_SECONDS and self.open_private <= MAX_BYTES

    def lines(self) -> list[str]:
        return [
            f"index: {self.rows:,} entries in {min(SHARDS, self.rows)} Parquet files, {self.samples:,} samples,"
            f" {format_bytes(self.parquet_bytes)}",
            f"compile: {self.compile_seconds:.1f} s, peak {format_bytes(self.compile_peak)} resident;"
            f" compiled {format_bytes(self.compiled_bytes)}",
            f"open: {self.open_seconds * 1e3:.0f} ms warm, {self.open_cold_seconds * 1e3:.0f} ms cold; adds"
            f" {format_bytes(self.open_private)} private, {format_bytes(self.open_resident)} resident",
            f"random keys: {self.lookups_per_s:,.0f} /s warm, {self.lookups_cold_per_s:,.0f} /s cold;"
            f" {format_bytes(self.lookups_private)} private after {LOOKUPS:,}",
            f"random samples: {self.samples_per_s:,.0f} /s warm, {self.samples_cold_per_s:,.0f} /s cold",
            f"{MAX_SECONDS:.0f} s and {format_bytes(MAX_BYTES)}: {'PASSED' if self.passed() else 'FAILED'}",
        ]


def bench_index(rows: int, output: Path) -> IndexResult:
    """Make an index of so many rows under `output` (unless it is there), and measure it."""
    root = output / f"index-{rows}"
    if not (root / "index" / "samples.parquet").exists():
        make_index(root, rows)
    folder = root / "index"
    for path in folder.glob("*.arrow"):
        path.unlink()
    compiled = fresh(_measure_compile, root)
    opened = [fresh(_measure_open, root, 0) for _ in range(3)]
    warm = fresh(_measure_open, root, LOOKUPS)
    drop_pages(folder)
    cold = fresh(_measure_open, root, LOOKUPS // 20)
    return IndexResult(
        rows=rows,
        samples=warm["samples"],
        parquet_bytes=sum(path.stat().st_size for path in folder.glob("*.parquet")),
        compiled_bytes=sum(path.stat().st_size for path in folder.glob("*.arrow")),
        compile_seconds=compiled["seconds"],
        compile_peak=compiled["peak"],
        open_seconds=statistics.median(one["seconds"] for one in opened),
        open_cold_seconds=cold["seconds"],
        open_private=max(one["private"] for one in opened),
        open_resident=max(one["resident"] for one in opened),
        lookups_per_s=warm["lookups_per_s"],
        lookups_cold_per_s=cold["lookups_per_s"],
        lookups_private=warm["anonymous"],
        samples_per_s=warm["samples_per_s"],
        samples_cold_per_s=cold["samples_per_s"],
    )


def report(result: IndexResult, as_json: bool) -> str:
    """The figures as a table for people, or as JSON."""
    return json.dumps(asdict(result) | {"passed": result.passed()}, indent=2) if as_json else "\n".join(result.lines())


def fresh(measure: Callable[..., dict[str, Any]], *arguments: Any) -> dict[str, Any]:
    """What `measure` returns in a new process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(measure, *arguments).result()


def drop_pages(folder: Path) -> None:
    """Have the system forget what it keeps of a folder's files."""
    for path in folder.iterdir():
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# -- measured in processes of their own --------------------------------------------------------------------------------


def _measure_compile(root: Path) -> dict[str, Any]:
    began = time.perf_counter()
    compile_index(root)
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak = next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
    return {"seconds": time.perf_counter() - began, "peak": peak}


def _measure_open(root: Path, count: int) -> dict[str, Any]:
    before, private = _memory()
    began = time.perf_counter()
    tables = open_tables(root)
    results: dict[str, Any] = {"seconds": time.perf_counter() - began, "samples": len(tables.samples)}
    _, opened = _memory()
    results |= {"private": opened.uss - private.uss, "resident": opened.rss - private.rss}
    if count:
        generator = np.random.default_rng(1)
        total = sum(1 for _ in tables.entries.keys("latents"))
        keys = [_key(number).hex() for number in generator.integers(0, total, count).tolist()]
        began = time.perf_counter()
        rows = [tables.entries.row("latents", key) for key in keys]
        places = [tables.entries.place(row) for row in rows if row is not None]
        results["lookups_per_s"] = count / (time.perf_counter() - began)
        if len(places) != count:
            raise AssertionError("a key that was written was not found")
        rows = generator.integers(0, len(tables.samples), count).tolist()
        began = time.perf_counter()
        for row in rows:
            tables.samples[row]
        results["samples_per_s"] = count / (time.perf_counter() - began)
        del keys, rows, places
        results["anonymous"] = _memory()[0] - before
    return results


def _memory() -> tuple[int, Any]:
    """Memory of this process that no file backs, and what psutil says of it."""
    rows = Path("/proc/self/smaps_rollup").read_text(encoding="utf-8").splitlines()
    anonymous = next(int(row.split()[1]) * 1024 for row in rows if row.startswith("Anonymous:"))
    return anonymous, psutil.Process().memory_full_info()


# -- synthetic index ---------------------------------------------------------------------------------------------------


def make_index(root: Path, rows: int) -> None:
    """The Parquet files of a cache of `rows` entries, nine in ten of them latents, each of which is a sample; without shards."""
    (root / "index").mkdir(parents=True, exist_ok=True)
    latents = max(1, rows * 9 // 10)
    texts = max(1, rows - latents)
    shards = min(SHARDS, rows)
    parts = [("latents", part) for part in np.array_split(np.arange(latents), max(1, shards * 9 // 10))]
    parts += [("texts", part) for part in np.array_split(np.arange(texts), max(1, shards // 10))]
    for number, (section, ids) in enumerate(progress(parts, "index", unit="shards")):
        bucket = _BUCKETS[number % len(_BUCKETS)] if section == "latents" else None
        folder = f"{section}/{bucket}" if bucket else section
        shard = f"{folder}/{number:06d}.tar"
        _write(index_path(root, shard), _entries(section, shard, bucket, ids), entry_schema())
    _write(root / "index" / "samples.parquet", _samples(latents, texts), sample_schema())


def _key(number: int, salt: int = 0) -> bytes:
    """Sixteen bytes that look drawn by chance: a fixed mixing of the number."""
    return _keys(np.array([number]), salt)[0].tobytes()


def _keys(numbers: np.ndarray, salt: int = 0) -> np.ndarray:
    """Keys (n, 16) of numbers: splitmix64, which maps distinct numbers to distinct ones."""
    with np.errstate(over="ignore"):
        mixed = (numbers.astype(np.uint64) + np.uint64(salt << 40)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
        other = mixed * np.uint64(0xD6E8FEB86659FD93)
    return np.stack([mixed, other], axis=1).view(np.uint8).reshape(len(numbers), 16)


def _hex(keys: np.ndarray) -> pa.Array:
    """Keys as a column of hexadecimal digits."""
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)
    text = np.ascontiguousarray(np.stack([digits[keys >> 4], digits[keys & 15]], axis=2))
    ends = np.arange(len(keys) + 1, dtype=np.int64) * 2 * keys.shape[1]
    return pa.LargeStringArray.from_buffers(len(keys), pa.py_buffer(ends), pa.py_buffer(text))


def _constant(value: Any, count: int, kind: pa.DataType) -> pa.Array:
    return pa.nulls(count, kind) if value is None else pa.repeat(pa.scalar(value, kind), count)


def _numbered(name: str, numbers: np.ndarray) -> pa.Array:
    return pa.array(np.char.mod(name, numbers).tolist()) if len(numbers) < 1 << 16 else _in_pieces(name, numbers)


def _in_pieces(name: str, numbers: np.ndarray) -> pa.Array:
    pieces = [pa.array(np.char.mod(name, part)) for part in np.array_split(numbers, len(numbers) >> 16)]
    return pa.chunked_array(pieces).cast(pa.large_string()).combine_chunks()


def _entries(section: str, shard: str, bucket: str | None, ids: np.ndarray) -> dict[str, Any]:
    salt, count = (0 if section == "latents" else 1), len(ids)
    place = np.arange(count, dtype=np.int64)
    frames = pa.ListArray.from_arrays(
        pa.array(np.arange(count + 1, dtype=np.int32) * 17), pa.array(np.tile(np.arange(17, dtype=np.int32), count))
    )
    return {
        "key": _hex(_keys(ids, salt)),
        "section": _constant(section, count, pa.string()),
        "shard": _constant(shard, count, pa.string()),
        "offset": pa.array(512 + place * 263_168),
        "bytes": pa.array(np.full(count, 262_144)),
        "checksum": _hex(_keys(ids, 2 + salt)),
        "bucket": _constant(bucket, count, pa.string()),
        "tokens": pa.array(np.full(count, 1280)),
        "content_id": _hex(_keys(ids, 4)),
        "frames": frames,
        "fps": _constant(24.0, count, pa.float64()),
        "source": _numbered("videos/clip-%09d.mp4", ids),
        "meta": _constant('{"kind":"latent","version":1}', count, pa.string()),
    }


def _samples(latents: int, texts: int) -> dict[str, Any]:
    ids = np.arange(latents)
    keys = _keys(ids, 5)
    order = np.lexsort(tuple(keys.view(">u8").T[::-1]))
    ids, keys = ids[order], keys[order]
    ends = pa.array(np.arange(latents + 1, dtype=np.int64))
    bucket = pa.DictionaryArray.from_arrays(pa.array((ids % len(_BUCKETS)).astype(np.int32)), pa.array(_BUCKETS))
    return {
        "key": _hex(keys),
        "latent_keys": pa.LargeListArray.from_arrays(ends, _hex(_keys(ids))),
        "text_keys": pa.LargeListArray.from_arrays(ends, _hex(_keys(ids % texts, 1))),
        "split": _constant("train", latents, pa.string()),
        "bucket": bucket,
        "source": _numbered("videos/clip-%09d.mp4", ids),
        "tokens": pa.array(np.full(latents, 1280)),
        "content_id": _hex(_keys(ids, 4)),
        "lost": _constant(False, latents, pa.bool_()),
        "dataset": _constant("clips", latents, pa.string()),
        "captions": _constant(1, latents, pa.int32()),
    }


def _write(path: Path, columns: dict[str, Any], schema: pa.Schema) -> None:
    """A sealed Parquet file of the schema, a million rows at a time."""
    table = pa.table({name: columns[name] for name in schema.names})
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for start in range(0, max(1, len(table)), 1 << 20):
            writer.write_table(table.slice(start, 1 << 20).cast(schema))
        writer.add_key_value_metadata({"mmspeed.seal": BLANK})
    seal_file(path)


def main() -> int:
    """Open the index of a large cache and look up entries; 1 when it takes over 2 s or 100 MB."""
    parser = argparse.ArgumentParser(prog="python -m tests.claims.index", description=main.__doc__)
    parser.add_argument("--rows", type=int, default=10_000_000, help="entries of the synthetic index")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/bench-index"), help="where the index is made; it stays"
    )
    parser.add_argument("--json", action="store_true")
    chosen = parser.parse_args()
    setup()
    result = bench_index(chosen.rows, chosen.output)
    print(report(result, chosen.json))
    return 0 if result.passed() else 1


if __name__ == "__main__":
    raise SystemExit(main())
