"""Maintain a cache that no writer uses: drop damaged or unused entries, and pack small shards into large ones.

Entries are copied byte for byte, never decoded. New shards are complete, with their indexes, before old ones are removed; so a kill at
any moment leaves at worst an entry twice, which the next run of the same command removes.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from mmspeed.data.cache.document_blocks import DOCUMENTS_NAME
from mmspeed.data.cache.files import READERS_LOCK, TEMP_SUFFIX, abandoned, disk_errors, try_lock
from mmspeed.data.cache.shards import ShardWriter
from mmspeed.data.cache.tables import (
    Entry,
    index_files,
    index_path,
    read_info,
    read_samples,
    sample_schema,
    shard_of_index,
    write_index,
)
from mmspeed.data.cache.text_cache import read_document_table
from mmspeed.data.cache.writer import repair
from mmspeed.errors import UserError
from mmspeed.log import progress

from .stored_entries import BROKEN, DamagedError, StoredPayload, read_block, sealed_table, trusted_rows
from .verify import PARTS, held, is_text_cache, unfinished_parts

LOCK = ".care.lock"
Where = tuple[str, str]  # section and key


@contextmanager
def care_lock(root: Path) -> Iterator[None]:
    """Hold the lock that keeps other maintenance commands and readers from the cache.

    Raises UserError while another command, a writer or a reader uses it.
    """
    if not root.is_dir():
        raise UserError(f"no dataset cache at {root}")
    with disk_errors(root / LOCK):
        fd = os.open(root / LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        readers = os.open(root / READERS_LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        if not try_lock(fd):
            raise UserError(f"another `mmspeed cache` command is running on {root}; run this one when it has ended")
        if not try_lock(readers):
            raise UserError(f"{root} is open for training or another command; run this one when that has ended")
        living = next((p for p in root.rglob(f".*{TEMP_SUFFIX}") if held(p)), None)
        if living is not None:
            raise UserError(
                f"preprocess or train is writing to {root} ({living.name}); run this command when it has ended"
            )
        yield
    finally:
        for lock in (readers, fd):
            fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)


def forget_compiled(root: Path) -> None:
    """Delete the index that is derived from the Parquet files; the next reader compiles it again.

    The table of documents names blocks by their keys, and stays.
    """
    for path in (root / "index").glob("[!.]*.arrow"):
        if path.name != DOCUMENTS_NAME:
            path.unlink(missing_ok=True)


# -- copying entries ------------------------------------------------------------------------------------------------


def publish(root: Path, folder: str, blocks: Iterable[tuple[Entry, StoredPayload]]) -> str | None:
    """Write these entries byte for byte to a new shard of `folder`, with its index; return its name, None without entries.

    Raises UserError if the disk is full, and any error of the iterator; nothing is left behind then.
    """
    writer = ShardWriter(root / folder)
    with disk_errors(root / folder):
        try:
            rows = []
            for entry, block in blocks:
                rows.append(replace(entry, offset=writer.append(entry.key, block.payload, block.sidecar)))
            if not rows:
                writer.discard()
                return None
            shard = writer.seal().relative_to(root).as_posix()
        except BaseException:
            writer.discard()
            raise
    try:
        write_index(root, shard, [replace(row, shard=shard) for row in rows], writer.size, writer.sha256)
    finally:
        writer.release()
    return shard


def blocks_of(root: Path, entries: Iterable[Entry]) -> Iterator[tuple[Entry, StoredPayload]]:
    """Yield entries with their bytes, each compared with its row. Raises UserError for a damaged one."""
    files: dict[str, BinaryIO] = {}
    try:
        for entry in entries:
            try:
                if entry.shard not in files:
                    if len(files) >= 64:
                        files.pop(next(iter(files))).close()
                    files[entry.shard] = open(root / entry.shard, "rb")  # noqa: SIM115 (closed below)
                block = read_block(files[entry.shard], entry)
            except (OSError, DamagedError) as error:
                raise UserError(
                    f"{root / entry.shard}: {entry.section} {entry.key}: {error}; run `mmspeed cache verify --repair {root}` first"
                ) from None
            yield entry, block
    finally:
        for file in files.values():
            file.close()


def drop_shard(root: Path, shard: str) -> None:
    """Remove a shard and its index. It is locked meanwhile, so that a starting writer does not index it again.

    Raises UserError if a writer holds it.
    """
    path = root / shard
    with abandoned(path) as free:
        if not free and path.exists():
            raise UserError(f"{path} is held by a writer; run this command when it has ended")
        forget_compiled(root)  # each time: a process that opened the cache meanwhile has compiled it again
        index_path(root, shard).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    with suppress(OSError):
        path.parent.rmdir()


def rows_of(root: Path, shard: str) -> list[Entry]:
    """The rows of a shard's index. Raises UserError if it is not as it was written."""
    try:
        return trusted_rows(root, shard)
    except BROKEN as error:
        raise UserError(
            f"{index_path(root, shard)}: {error}; run `mmspeed cache verify --repair {root}` first"
        ) from None


@dataclass
class ShardUsage:
    """The rows of one shard, divided into those to keep and those to remove."""

    shard: str
    keep: list[Entry] = field(default_factory=list)
    unused: list[Entry] = field(default_factory=list)
    twice: list[Entry] = field(default_factory=list)  # also in an earlier shard

    @property
    def changes(self) -> bool:
        return bool(self.unused or self.twice)


def shelves(root: Path, is_used: Callable[[Entry], bool]) -> list[ShardUsage]:
    """The rows of every existing shard; of an entry that is stored twice the first is kept, as for readers."""
    seen: set[Where] = set()
    result = []
    for path in index_files(root):
        shelf = ShardUsage(shard_of_index(path))
        if not (root / shelf.shard).exists():
            continue
        for entry in rows_of(root, shelf.shard):
            where = entry.section, entry.key
            kind = shelf.unused if not is_used(entry) else shelf.twice if where in seen else shelf.keep
            kind.append(entry)
            seen.add(where)
        result.append(shelf)
    return result


def check_first_copies(root: Path, shelved: Sequence[ShardUsage]) -> None:
    """Raise UserError if the copy to keep of an entry that is stored twice is damaged."""
    twice = {(e.section, e.key) for shelf in shelved for e in shelf.twice}
    for _ in blocks_of(root, [e for shelf in shelved for e in shelf.keep if (e.section, e.key) in twice]):
        pass


# -- prune ----------------------------------------------------------------------------------------------------------


@dataclass
class PrunePlan:
    """The shards, entries and files that `prune` would remove."""

    everything: list[ShardUsage]
    orphans: list[Path]  # index files whose shard is gone
    reasons: Counter[str]  # of unused entries: their difference from the entries in use
    left: list[str]  # temporary files of writers that are gone

    @property
    def shelved(self) -> list[ShardUsage]:
        """The shards that change."""
        return [shelf for shelf in self.everything if shelf.changes]

    @property
    def entries(self) -> int:
        """The number of entries to remove."""
        return sum(len(shelf.unused) for shelf in self.shelved)

    @property
    def empty(self) -> bool:
        """True if there is nothing to do."""
        return not (self.shelved or self.orphans or self.left)

    def lines(self) -> list[str]:
        """Lines that describe the removals."""
        count, size = Counter[str](), Counter[str]()
        for shelf in self.shelved:
            for what, entries in (("unused", shelf.unused), ("stored twice", shelf.twice)):
                for entry in entries:
                    count[f"{entry.section} {what}"] += 1
                    size[f"{entry.section} {what}"] += entry.bytes
        lines = [f"  {name}: {count[name]} entries, {size[name] / 1e6:.1f} MB" for name in sorted(count)]
        lines += [f"    {number} of them: {reason}" for reason, number in self.reasons.most_common()]
        lines += [f"  {len(self.orphans)} index files whose shard is gone"] if self.orphans else []
        return lines + ([f"  {len(self.left)} files that killed writers left"] if self.left else [])


def plan_prune(root: Path, keep_codecs: Sequence[str] = ()) -> PrunePlan:
    """Plan the removal of entries that no current sample refers to, except latents of codecs whose fingerprints begin with `keep_codecs`.

    Raises UserError if the tables are damaged or a build is unfinished: nothing is removed then.
    """
    if unfinished_parts(root):
        raise UserError(f"a build of {root} is unfinished: run `mmspeed preprocess`, or delete {root / PARTS}")
    used, null_key = _text_blocks(root) if is_text_cache(root, read_info(root)) else _sample_entries(root)

    def is_used(entry: Entry) -> bool:
        if entry.key in used[entry.section] or (entry.section == "null" and null_key is None):
            return True
        codec = str(json.loads(entry.meta).get("codec", "")) if keep_codecs and entry.section == "latents" else ""
        return any(codec.startswith(start) for start in keep_codecs) if codec else False

    everything = shelves(root, is_used)
    orphans = [path for path in index_files(root) if not (root / shard_of_index(path)).exists()]
    leftovers = [p.relative_to(root).as_posix() for p in root.rglob(f".*{TEMP_SUFFIX}") if not held(p)]
    return PrunePlan(everything, orphans, why_unused(everything, used), leftovers)


def _text_blocks(root: Path) -> tuple[dict[str, set[str]], str | None]:
    """The keys by section of the blocks that the table of documents names."""
    blocks = set(read_document_table(root / "index" / DOCUMENTS_NAME).blocks)
    return {"latents": set(), "texts": blocks, "null": set()}, None


def _sample_entries(root: Path) -> tuple[dict[str, set[str]], str | None]:
    """The keys by section that the samples refer to, and the key of their empty caption."""
    try:
        sealed_table(root / "index" / "samples.parquet", sample_schema())
    except FileNotFoundError:
        pass  # read_samples reports it
    except BROKEN as error:
        raise UserError(
            f"the table of samples of {root}: {error}; run `mmspeed cache verify --repair {root}` first"
        ) from None
    samples, null_key = read_samples(root)
    used: dict[str, set[str]] = {
        "latents": {key for sample in samples for key in sample.keys("latents")},
        "texts": {key for sample in samples for key in sample.keys("texts")},
        "null": {null_key} if null_key else set(),
    }
    return used, null_key


def why_unused(shelved: Sequence[ShardUsage], used: dict[str, set[str]]) -> Counter[str]:
    """Counts of unused entries by reason: their difference from the nearest used entry of the same content or caption."""
    current: dict[tuple[str, Any], list[dict[str, Any]]] = {}
    unused: list[tuple[Entry, dict[str, Any]]] = []
    for shelf in shelved if any(shelf.unused for shelf in shelved) else ():
        for entry in [*shelf.keep, *shelf.unused]:
            meta = json.loads(entry.meta)
            if entry.key in used[entry.section]:
                current.setdefault((entry.section, _same(meta)), []).append(meta)
        unused += [(entry, json.loads(entry.meta)) for entry in shelf.unused]
    reasons: Counter[str] = Counter()
    for entry, meta in unused:
        candidates = current.get((entry.section, _same(meta)), [])
        if not candidates:
            reasons[
                f"{entry.section}: no sample has this {'content' if entry.section == 'latents' else 'caption'}"
            ] += 1
            continue
        names = min(
            ([n for n in sorted(meta.keys() | o.keys()) if meta.get(n) != o.get(n)] for o in candidates), key=len
        )
        differences = [f"{n} {str(meta[n])[:12]}" if n in ("codec", "encoder") and n in meta else n for n in names]
        reasons[f"{entry.section}: made with another {', '.join(differences)}"] += 1
    return reasons


def _same(meta: dict[str, Any]) -> Any:
    return meta.get("content", meta.get("caption"))


def prune(root: Path, keep_codecs: Sequence[str] = ()) -> PrunePlan:
    """Carry out `plan_prune` and return the plan. Raises UserError if an entry that must be copied is damaged."""
    with care_lock(root):
        repair(root)
        plan = plan_prune(root, keep_codecs)
        check_first_copies(root, plan.everything)
        for shelf in progress(plan.shelved, "prune", unit="shard"):
            publish(root, str(Path(shelf.shard).parent), blocks_of(root, shelf.keep))
            drop_shard(root, shelf.shard)
        forget_compiled(root)
        return plan


# -- pack -----------------------------------------------------------------------------------------------------------


@dataclass
class PackReport:
    """Shards before and after, and the removed copies of entries."""

    before: int = 0
    after: int = 0
    entries: int = 0  # copied into larger shards
    duplicates: int = 0


def pack(root: Path, shard_bytes: int) -> PackReport:
    """Merge shards smaller than half of `shard_bytes` into shards of up to that size, entries sorted by key.

    Entries that are stored twice are kept once. Raises UserError if an entry is damaged.
    """
    with care_lock(root):
        repair(root)
        everything = shelves(root, lambda entry: True)
        check_first_copies(root, everything)
        report = PackReport(before=len(everything))
        groups = [g for g in pack_groups(root, everything, shard_bytes) if len(g) > 1 or g[0].changes]
        for group in progress(groups, "pack", unit="shard"):
            entries = sorted((entry for shelf in group for entry in shelf.keep), key=lambda entry: entry.key)
            if entries:
                publish(root, str(Path(group[0].shard).parent), blocks_of(root, entries))
            for shelf in group:
                drop_shard(root, shelf.shard)
                report.duplicates += len(shelf.twice)
            report.entries += len(entries)
        report.after = sum((root / shard_of_index(path)).exists() for path in index_files(root))
        forget_compiled(root)
        return report


def pack_groups(root: Path, shelved: Sequence[ShardUsage], shard_bytes: int) -> list[list[ShardUsage]]:
    """Groups of shards to merge: neighbours in a folder that are small or hold copies, up to `shard_bytes` in total."""
    groups: list[list[ShardUsage]] = []
    folder, total = "", 0
    for shelf in shelved:
        size = (root / shelf.shard).stat().st_size
        if size >= shard_bytes / 2 and not shelf.changes:
            continue
        if (parent := str(Path(shelf.shard).parent)) != folder or total + size > shard_bytes:
            groups.append([])
            folder, total = parent, 0
        groups[-1].append(shelf)
        total += size
    return groups
