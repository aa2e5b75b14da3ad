"""Write a cache: entries go to locked shards in progress, which are sealed, indexed and never changed again.

Any number of processes may write one cache at the same time. A killed one loses at most its shards in progress; the next writer
cleans up after it when it starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import safetensors.torch
from torch import Tensor

from mmspeed.errors import UserError
from mmspeed.log import get_logger
from mmspeed.protocols import TextEntry
from mmspeed.shapes import Bucket

from .files import ReaderLock, abandoned, disk_errors, remove_abandoned
from .keys import KeySet, canonical_json, digest, is_key
from .payloads import not_finite
from .shards import ShardWriter, read_shard, shard_sha256
from .tables import (
    SECTIONS,
    Entry,
    entry_schema,
    index_files,
    index_path,
    read_info,
    read_table,
    shard_of_index,
    write_index,
)

_LOOKED_AT = ("section", "key", "offset", "bytes")  # columns of the index that a writer needs


@dataclass
class RepairReport:
    """The actions of a repair; paths are relative to the cache."""

    stale: list[str] = field(default_factory=list)  # temporary files of writers that are gone: deleted
    reindexed: list[str] = field(default_factory=list)  # sealed shards that had no index: read and listed
    # index files whose shard is missing: deleted, to encode the entries again
    orphans: list[str] = field(default_factory=list)
    live: int = 0  # files that other writers hold at present: left alone

    @property
    def clean(self) -> bool:
        """True if nothing had to be repaired."""
        return not (self.stale or self.reindexed or self.orphans)


def repair(root: Path | str) -> RepairReport:
    """Clean up after killed writers of a cache. Safe at any time, also beside living writers."""
    root = Path(root)
    stale, live = remove_abandoned(root)
    report = RepairReport(stale, live=live)
    for path in index_files(root):
        if not (root / shard_of_index(path)).exists():
            path.unlink(missing_ok=True)
            report.orphans.append(str(path.relative_to(root)))
    for path in sorted(shard for section in SECTIONS for shard in (root / section).rglob("*.tar")):
        shard = path.relative_to(root).as_posix()
        if index_path(root, shard).exists():
            continue
        with abandoned(path) as free:
            if not free:
                report.live += 1
            elif write_index(
                root, shard, _entries_of(root, shard), path.stat().st_size, shard_sha256(path), replace=False
            ):
                report.reindexed.append(shard)
    return report


def _entries_of(root: Path, shard: str) -> list[Entry]:
    """The rows of a sealed shard's index, from the shard alone. Raises UserError if it is damaged or not written by mmspeed."""
    entries = []
    for member in read_shard(root / shard):
        row = dict(member.sidecar, shard=shard, offset=member.offset, bytes=len(member.payload), source=None)
        try:
            if row["checksum"] != digest(member.payload):
                raise UserError(
                    f"shard {root / shard} is damaged at entry {member.key}; delete it and run the same command again"
                )
            row |= {"frames": tuple(row["frames"]), "meta": canonical_json(row["meta"])}
            entries.append(Entry(**row))
        except (KeyError, TypeError) as error:
            raise UserError(
                f"shard {root / shard} was not written by mmspeed ({error}); take it out of the cache"
            ) from error
    return entries


def _check_length(root: Path, index: Path, table: pa.Table) -> None:
    """Raise UserError if a shard is shorter than its index states: its missing entries would count as present."""
    shard = root / shard_of_index(index)
    end = pc.max(pc.add(table["offset"], table["bytes"])).as_py() or 0
    if shard.exists() and shard.stat().st_size < end:
        raise UserError(
            f"shard {shard} is damaged: cut short; delete it and run the same command again, which encodes its entries again"
        )


def latent_tensors(mean_CThw: Tensor, logvar_CThw: Tensor | None = None) -> dict[str, Tensor]:
    """The mean and the log-variance of an entry of section `latents`, under the reader's names."""
    return {"mean": mean_CThw} | ({} if logvar_CThw is None else {"logvar": logvar_CThw})


def text_tensors(entry: TextEntry) -> dict[str, Tensor]:
    """The tensors of an entry of section `texts` or `null`, under the reader's names."""
    pooled = {} if entry.pooled_D is None else {"pooled": entry.pooled_D}
    return {"embeds": entry.embeds_LD, **pooled, **entry.others}


@dataclass
class _OpenShard:
    """A shard in progress and the rows of its index, whose `shard` is set once it has its number."""

    writer: ShardWriter
    by_key: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)


class CacheWriter(AbstractContextManager["CacheWriter"]):
    """Add entries to a cache; a context manager. The entries are durable once `close` or the `with` block has returned.

    Args:
        root: folder of the cache; created if missing.
        shard_bytes: size at which a shard is sealed.
        mend: repair the cache first; of several processes that start together one should, before the others begin.
        defer: never seal a shard while adding, for writers whose unfinished shards others read: see `seal_full`.

    Raises UserError if the cache has another schema, a shard without index is damaged, or the disk is full.
    """

    def __init__(
        self, root: Path | str, shard_bytes: int = 256_000_000, mend: bool = True, defer: bool = False
    ) -> None:
        self.root = Path(root)
        self.shard_bytes, self.defer = shard_bytes, defer
        self._named_twice: list[_OpenShard] = []
        self._open: dict[Path, _OpenShard] = {}
        if (self.root / "cache.json").exists():
            read_info(self.root)
        with disk_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
        self._lock = ReaderLock(self.root)  # keeps other commands from removing entries
        self.repaired = repair(self.root) if mend else RepairReport()
        if not self.repaired.clean:
            get_logger("data").info(
                "repaired cache %s: %d unfinished files removed, %d sealed shards indexed, %d shards missing",
                self.root,
                len(self.repaired.stale),
                len(self.repaired.reindexed),
                len(self.repaired.orphans),
            )
        keys: dict[str, list[str]] = {section: [] for section in SECTIONS}
        for path in index_files(self.root):
            table = read_table(path, pa.schema([entry_schema().field(name) for name in _LOOKED_AT]))
            _check_length(self.root, path, table)
            for section in SECTIONS:
                keys[section] += table["key"].filter(pc.equal(table["section"], section)).to_pylist()
        self._known = {section: KeySet(section_keys) for section, section_keys in keys.items()}

    def has(self, section: str, key: str) -> bool:
        """True if the entry was in the cache when this writer started, or was added by it since."""
        return key in self._known[section]

    def add(
        self,
        section: str,
        key: str,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, Any],
        *,
        bucket: Bucket | None = None,
        tokens: int = 0,
        content_id: str = "",
        frames: Sequence[int] = (),
        fps: float | None = None,
        source: str | None = None,
    ) -> bool:
        """Add one entry and return True; return False, without effect, if the writer already has its key.

        Args:
            section: `latents` (which need a bucket), `texts` or `null`.
            key: the `entry_key` of everything that the entry depends on.
            tensors: the payload; see `latent_tensors` and `text_tensors`.
            meta: the parts of the key, in JSON's types.
            bucket, tokens, content_id, frames, fps: stored beside the tensors, so the key must determine them too.
            source: name of its source file, for messages; only in the index.

        Raises UserError for numbers that are not finite, and if the disk is full; the shard in progress is then discarded.
        """
        if section not in SECTIONS or not is_key(key) or (section == "latents") != (bucket is not None):
            raise ValueError(f"no entry of section {section!r} with key {key!r} and bucket {bucket}")
        if self.has(section, key):
            return False
        if (bad := not_finite(tensors)) is not None:
            origin = f" ({source})" if source else ""
            raise UserError(f"{section} {key}{origin} is not stored: its `{bad}` holds numbers that are not finite")
        name = None if bucket is None else bucket.name
        sidecar: dict[str, Any] = {
            "key": key,
            "section": section,
            "bucket": name,
            "tokens": tokens,
            "content_id": content_id,
            "frames": list(frames),
            "fps": fps,
        }
        payload = safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()})
        sidecar["checksum"] = digest(payload)
        folder = self.root / section if name is None else self.root / section / name
        with self._giving_up(folder):
            shard = self._open.get(folder) or self._open.setdefault(folder, _OpenShard(ShardWriter(folder)))
            offset = shard.writer.append(key, payload, canonical_json(sidecar | {"meta": meta}).encode())
            location = {"offset": offset, "bytes": len(payload), "source": source}
            shard.by_key[section, key] = sidecar | location | {"frames": tuple(frames), "meta": canonical_json(meta)}
        self._known[section].add(key)
        if shard.writer.size >= self.shard_bytes and not self.defer:
            self._seal(folder)
        return True

    def place(self, section: str, key: str) -> Entry | None:
        """The row of an entry in a shard in progress, under the file's current name; None for other entries.

        A reader may read the payload from there until the shard is sealed and its temporary name dropped.
        """
        for shard in self._open.values():
            row = shard.by_key.get((section, key))
            if row is not None:
                return Entry(shard=shard.writer.path.relative_to(self.root).as_posix(), **row)
        return None

    def sync(self) -> None:
        """Make all entries so far durable, and visible to readers on other machines, without sealing."""
        for folder, shard in list(self._open.items()):
            with self._giving_up(folder):
                shard.writer.sync()

    def seal_full(self) -> list[Entry]:
        """Seal the full shards and return their entries' rows under the new names. The temporary names stay until `drop_names`."""
        sealed: list[Entry] = []
        for folder, shard in list(self._open.items()):
            if shard.writer.size >= self.shard_bytes:
                sealed += self._seal(folder, keep_name=True)
        return sealed

    def drop_names(self) -> None:
        """Remove the temporary names of sealed shards, once no reader uses them."""
        while self._named_twice:
            self._named_twice.pop().writer.release()

    def close(self) -> None:
        """Seal every shard in progress."""
        self.drop_names()
        for folder in list(self._open):
            self._seal(folder)
        self._lock.close()

    def _seal(self, folder: Path, keep_name: bool = False) -> list[Entry]:
        with self._giving_up(folder):
            shard = self._open[folder]
            if not shard.by_key:
                self._discard(folder)
                return []
            # The temporary name stays until the index is written: a reader that misses it then finds the entry there. The lock stays
            # too, so that no repair treats the shard as a killed writer's.
            path = shard.writer.seal().relative_to(self.root).as_posix()
            rows = [Entry(shard=path, **row) for row in shard.by_key.values()]
            write_index(self.root, path, rows, shard.writer.size, shard.writer.sha256)
            if keep_name:
                self._named_twice.append(shard)
            else:
                shard.writer.release()
            del self._open[folder]
            return rows

    @contextmanager
    def _giving_up(self, folder: Path) -> Iterator[None]:
        """Discard the folder's shard in progress on an error in the block; a full disk raises UserError."""
        with disk_errors(folder):
            try:
                yield
            except (OSError, UserError):
                self._discard(folder)
                raise

    def _discard(self, folder: Path) -> None:
        """Forget a shard in progress and its entries."""
        shard = self._open.pop(folder, None)
        if shard is not None:
            shard.writer.discard()
            for section, key in shard.by_key:
                self._known[section].discard(key)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self.drop_names()
        # Complete entries are kept after an interrupt or an error elsewhere, which remains the one reported.
        for folder in list(self._open):
            with suppress(UserError, OSError):
                self._seal(folder)
        self._lock.close()
