"""Writing a cache: entries go to locked shards in progress, which are sealed, indexed and never touched again.

Any number of processes may write one cache at once. A killed one loses at most its shards in progress; what it left is
mended, without a question, when the next writer starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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

from .files import TEMP_SUFFIX, ReaderLock, abandoned, disk_errors
from .keys import KeySet, canonical_json, digest, is_key
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
    """What a repair found and mended; paths are relative to the cache."""

    stale: list[str] = field(default_factory=list)  # temporary files of writers that are gone: deleted
    reindexed: list[str] = field(default_factory=list)  # sealed shards that had no index: read and listed
    orphans: list[str] = field(
        default_factory=list
    )  # index files whose shard is gone: deleted, the entries will be remade
    live: int = 0  # files that other writers hold at this moment: left alone

    @property
    def clean(self) -> bool:
        """Whether nothing had to be mended."""
        return not (self.stale or self.reindexed or self.orphans)


def repair(root: Path | str) -> RepairReport:
    """Mend what killed writers left in a cache. Safe to run at any time, also beside writers that live."""
    root = Path(root)
    report = RepairReport()
    for path in sorted(root.rglob(f".*{TEMP_SUFFIX}")):
        with abandoned(path) as free:
            if free:
                path.unlink(missing_ok=True)
                report.stale.append(str(path.relative_to(root)))
            else:
                report.live += path.exists()
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
    """The rows of a sealed shard's index, from the shard alone. Raises UserError when it is none of ours."""
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
    """Raises UserError when a shard is shorter than its index says: its entries would be taken for present."""
    shard = root / shard_of_index(index)
    end = pc.max(pc.add(table["offset"], table["bytes"])).as_py() or 0
    if shard.exists() and shard.stat().st_size < end:
        raise UserError(
            f"shard {shard} is damaged: cut short; delete it and run the same command again, which makes its entries anew"
        )


def latent_tensors(
    mean_CThw: Tensor, logvar_CThw: Tensor | None = None, first_C1hw: Tensor | None = None
) -> dict[str, Tensor]:
    """The tensors of an entry of section `latents`, under the names that the reader knows.

    `first_C1hw` is the mean of the clip's first frame encoded alone, where that is stored (see `first_frame`).
    """
    tensors = {"mean": mean_CThw, "logvar": logvar_CThw, "first": first_C1hw}
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def text_tensors(entry: TextEntry) -> dict[str, Tensor]:
    """The tensors of an entry of section `texts` or `null`, under the names that the reader knows."""
    return {"embeds": entry.embeds_LD} | ({} if entry.pooled_D is None else {"pooled": entry.pooled_D})


@dataclass
class _OpenShard:
    """A shard in progress and the rows of its index, whose `shard` is filled in when it has its number."""

    writer: ShardWriter
    by_key: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)


class CacheWriter:
    """Adds entries to a cache; a context manager. What it was given is durable once `close` or the `with` has returned.

    Args:
        root: folder of the cache; made when missing.
        shard_bytes: size at which a shard is sealed.
        mend: repair the cache first; of several processes that start together one should, before the others begin.
        defer: never seal a shard while adding. For writers whose unfinished shards others read: see `seal_full`.

    Raises UserError when the cache has another schema, a shard without index is damaged, or the disk is full.
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
        self._lock = ReaderLock(self.root)  # nothing is taken away meanwhile
        self.repaired = repair(self.root) if mend else RepairReport()
        if not self.repaired.clean:
            get_logger("data").info(
                "mended cache %s: %d unfinished files removed, %d sealed shards indexed, %d shards found missing",
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
        self._known = {section: KeySet(found) for section, found in keys.items()}

    def has(self, section: str, key: str) -> bool:
        """Whether the entry was in the cache when this writer started, or was added by it since."""
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
        """Add one entry; False, and nothing happens, when the writer has its key already.

        Args:
            section: `latents` (which need a bucket), `texts` or `null`.
            key: what `entry_key` makes of all that the entry depends on.
            tensors: what is stored; see `latent_tensors` and `text_tensors`.
            meta: what the key was made from, as JSON knows it.
            bucket, tokens, content_id, frames, fps: stored beside the tensors, so they too must follow from the key.
            source: name of the file it came from, for messages; only in the index.

        Raises UserError when the disk is full; the shard in progress is given up then.
        """
        if section not in SECTIONS or not is_key(key) or (section == "latents") != (bucket is not None):
            raise ValueError(f"no entry of section {section!r} with key {key!r} and bucket {bucket}")
        if self.has(section, key):
            return False
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
            place = {"offset": offset, "bytes": len(payload), "source": source}
            shard.by_key[section, key] = sidecar | place | {"frames": tuple(frames), "meta": canonical_json(meta)}
        self._known[section].add(key)
        if shard.writer.size >= self.shard_bytes and not self.defer:
            self._seal(folder)
        return True

    def place(self, section: str, key: str) -> Entry | None:
        """The row of an entry in a shard in progress, under the name that the file has now; None for others.

        A reader may take the payload from there, until the shard is sealed and its first name dropped.
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
        """Seal the shards that are full; their entries' rows under the new name. The old names stay until `drop_names`."""
        moved: list[Entry] = []
        for folder, shard in list(self._open.items()):
            if shard.writer.size >= self.shard_bytes:
                moved += self._seal(folder, keep_name=True)
        return moved

    def drop_names(self) -> None:
        """Take away the names that sealed shards had while they were in progress: no reader uses them any more."""
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
            # The first name stays until the index stands: a reader that misses it finds the entry there. So does the lock, and no
            # repair takes the shard for a killed writer's.
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
        """Inside the block, a full disk gives up the folder's shard in progress, and is told as a UserError."""
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

    def __enter__(self) -> CacheWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self.drop_names()
        # Whole entries are kept after an interrupt or an error elsewhere, which stays the one that is reported.
        for folder in list(self._open):
            with suppress(UserError, OSError):
                self._seal(folder)
        self._lock.close()
