"""Read entries of a cache by key, as views of mapped shards or from a remote store, verified at each read.

The first read in a process compares an entry's SHA-256 with the index, and later ones its XXH3 (Collet, 2019) with that of the first
read, at several times the speed. So bytes that change under a run are noticed when they are next read, within an epoch.

Legend: C channels, T h w latent; L caption tokens, D text width.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch import Tensor

from mmspeed.config.places import is_url
from mmspeed.errors import UserError
from mmspeed.protocols import TextEntry

from .files import ReaderLock
from .index_reader import SampleTable, damaged_index, open_tables
from .payloads import LocalStore, PayloadLocation, ShortError, Store, hash_of, tensors_of
from .remote import RemoteStore
from .seals import LaterSeal
from .tables import SECTIONS, SPLITS, Entry, entry_schema, index_path, read_info, read_rejects, read_table

_SHARD_TABLES = 32


class DatasetCache:
    """A finished cache, for training. Threads, forked and spawned processes may share one.

    Tensors are views of a private mapping: nothing is copied. Writing into one changes a copy of its pages in this process; later
    reads of that entry find that out and read the file instead, which is slower. Clone a tensor before changing it in place.

    Args:
        root: folder of the cache, or a URL that fsspec opens.
        verify: check each payload at each read: against its checksum the first time in this process, then against what was read.
        partial: the samples may refer to entries that do not exist yet; see `has`, `overlay`, `refresh` and `complete`.
        local_cache: for a remote cache, the folder for fetched files; None: $MMSPEED_CACHE, else `~/.cache/mmspeed`.
        local_bytes: for a remote cache, bytes of payloads to keep there.

    Raises UserError if the cache is missing, unfinished, damaged, of another schema, or lacks entries that its samples refer to.
    """

    info: dict[str, Any]  # cache.json
    root: Path  # the folder that holds its tables
    location: str  # the folder or URL, for messages

    def __init__(
        self,
        root: Path | str,
        verify: bool = True,
        partial: bool = False,
        local_cache: str | Path | None = None,
        local_bytes: int = 64_000_000_000,
    ) -> None:
        self._arguments = (root, verify, partial, local_cache, local_bytes)
        self.verify, self.partial, self.location = verify, partial, str(root)
        self.remote = RemoteStore(str(root), local_cache, local_bytes) if is_url(root) else None
        self.root = self.remote.folder if self.remote is not None else Path(root)
        self._store: Store = self.remote or LocalStore(self.root)
        self._overlay: dict[tuple[str, str], Entry] = {}
        self._seals: Sequence[LaterSeal] = ()  # that no read has waited for yet
        # Not a bound method: a reference cycle would hold the readers' lock until garbage collection.
        read_rows = functools.partial(_read_rows, self.root, self.remote)
        self._rows_of = functools.lru_cache(maxsize=_SHARD_TABLES)(read_rows)
        if self.remote is None:
            self.info = read_info(self.root)
            self._lock = ReaderLock(self.root)  # keeps prune, pack and repair from running
        self.refresh()

    def __reduce__(self) -> tuple[type[DatasetCache], tuple[Any, ...]]:
        """Open the cache again in a spawned process: mappings cannot be pickled."""
        return type(self), self._arguments

    # -- contents ---------------------------------------------------------------------------------------------------

    @property
    def samples(self) -> SampleTable:
        """The samples in the order of their keys; a `Sample` is built on access."""
        return self._opened.samples

    @property
    def duplicates(self) -> int:
        """The number of entries that are also in a second shard, because two writers added them at the same time; harmless."""
        return self._opened.entries.duplicates

    def split(self, name: str) -> SampleTable:
        """The samples of split `train` or `val`."""
        if name not in SPLITS:
            raise ValueError(f"split {name!r} is not one of {SPLITS}")
        return self.samples.split(name)

    def keys(self, section: str) -> set[str]:
        """The keys of all entries of a section, including those that no current sample refers to."""
        return {*self._opened.entries.keys(section), *(key for name, key in self._overlay if name == section)}

    def has(self, section: str, key: str) -> bool:
        """True if an entry can be read."""
        return (section, key) in self._overlay or self._opened.entries.row(section, key) is not None

    def entry(self, key: str, section: str | None = None) -> Entry:
        """The full row of an entry, from its shard's table. Raises UserError if the cache does not have it."""
        for name in SECTIONS if section is None else (section,):
            if (name, key) in self._overlay:
                return self._overlay[name, key]
            row = self._opened.entries.row(name, key)
            if row is not None:
                table, rows = self._rows_of(self._opened.entries.place(row).shard)
                if (name, key) not in rows:
                    raise damaged_index(self.root / "index" / "entries.arrow")
                return Entry.of_row(table.slice(rows[name, key], 1).to_pylist()[0])
        raise self._no_entry(key, section)

    @property
    def null_key(self) -> str:
        """The key of the samples' empty caption. Raises UserError if there is none, or several and no record of the right one."""
        if self.samples.null_key is not None:
            return self.samples.null_key
        keys = self.keys("null")
        if len(keys) == 1:
            return keys.pop()
        problem = "holds no" if not keys else f"does not record which of {len(keys)} is its"
        raise UserError(f"cache {self.location} {problem} encoding of the empty caption; run mmspeed preprocess again")

    def rejects(self) -> list[dict[str, str]]:
        """The sources that were not encoded: path, reason, detail."""
        return read_rejects(self.root)

    # -- reading ----------------------------------------------------------------------------------------------------

    def latent(self, key: str) -> dict[str, Tensor]:
        """The stored `mean` (C, T, h, w) and, if a posterior is stored, `logvar` of the same shape."""
        return self._tensors("latents", key)

    def text(self, key: str) -> TextEntry:
        """An encoded caption, (L, D) without padding, in the stored number type."""
        return self._text("texts", key)

    def null_text(self) -> TextEntry:
        """The encoding of the empty caption, which replaces a dropped one."""
        return self._text("null", self.null_key)

    def _text(self, section: str, key: str) -> TextEntry:
        tensors = self._tensors(section, key)
        if "embeds" not in tensors:
            raise UserError(f"cache {self.location}: entry {key} holds no caption; run mmspeed preprocess again")
        return TextEntry(tensors.pop("embeds"), tensors.pop("pooled", None), tensors)

    def _tensors(self, section: str, key: str) -> dict[str, Tensor]:
        """The tensors of an entry, as views of its payload."""
        place, payload = self._payload(section, key)
        try:
            return tensors_of(payload)
        except (ValueError, RuntimeError, OverflowError) as error:
            raise self._damaged(key, place) from error

    def _payload(self, section: str, key: str) -> tuple[PayloadLocation, memoryview]:
        """The location of an entry's payload, and its verified bytes."""
        for seal in self._seals:
            if not seal.intact():
                raise damaged_index(seal.path)
        self._seals = ()
        overlaid = self._overlay.get((section, key))
        if overlaid is not None:
            place = PayloadLocation(overlaid.shard, overlaid.offset, overlaid.bytes, bytes.fromhex(overlaid.checksum))
            try:
                return place, self._view(section, key, place)
            except FileNotFoundError:  # the shard has been sealed meanwhile, and renamed
                self.refresh()
        entries = self._opened.entries
        row = entries.row(section, key)
        if row is None and self.partial:  # another command may have added it meanwhile
            self.refresh()
            entries = self._opened.entries
            row = entries.row(section, key)
        if row is None:
            raise self._no_entry(key, section)
        place, known = entries.place(row), int(entries.hashes[row])
        try:
            payload = self._view(section, key, place, known)
        except FileNotFoundError:
            raise UserError(
                f"cache {self.location}: shard {place.shard} is missing; run mmspeed preprocess again"
            ) from None
        if self.verify and not known:
            entries.hashes[row] = hash_of(payload)
        return place, payload

    def _view(self, section: str, key: str, place: PayloadLocation, known: int = 0) -> memoryview:
        """An entry's bytes. `known`: their hash at an earlier read; 0: they are compared with the checksum of the index."""
        try:
            payload = self._store.view(section, key, place)
            if not self.verify or (hash_of(payload) == known if known else place.fits(payload)):
                return payload
            fresh = self._store.again(section, key, place)
            if place.fits(fresh):
                return fresh
        except ShortError:
            pass
        except FileNotFoundError:
            raise
        except (OSError, OverflowError) as error:
            raise UserError(f"cache {self.location}: shard {place.shard} cannot be read ({error})") from error
        raise self._damaged(key, place, changed=known != 0)

    # -- entries added while the cache is open ------------------------------------------------------------------------

    def overlay(self, entries: Iterable[Entry]) -> None:
        """Add entries that no index lists yet; their `shard` is the path of a file in progress, relative to `root`."""
        self._overlay.update({(entry.section, entry.key): entry for entry in entries})

    def refresh(self) -> None:
        """Read the index and the samples again. Views returned earlier stay valid."""
        # Before reading the tables: a shard sealed meanwhile is listed there, or its entries stay in the overlay.
        gone = {shard for shard in {e.shard for e in self._overlay.values()} if not (self.root / shard).exists()}
        tables = open_tables(self.root) if self.remote is None else self.remote.open_tables()
        if self.remote is not None:
            self.info = read_info(self.root)
        lacking = tables.samples.lacking
        if lacking and not self.partial:
            raise UserError(
                f"cache {self.location}: {lacking} of {len(tables.samples)} samples have no stored encoding "
                f"(such as {tables.samples.lacking_source}); run mmspeed preprocess again"
            )
        self._overlay = {where: entry for where, entry in self._overlay.items() if entry.shard not in gone}
        self._rows_of.cache_clear()
        self._seals = tables.seals
        self._opened = tables

    def complete(self) -> None:
        """Declare a partial cache complete and refresh it. Raises UserError if an entry is still missing."""
        self.partial, self._overlay = False, {}
        self._arguments = (*self._arguments[:2], False, *self._arguments[3:])
        self.info = read_info(self.root)
        self.refresh()

    def _no_entry(self, key: str, section: str | None) -> UserError:
        where = f"cache {self.location}" + (f", {section}" if section else "")
        return UserError(f"{where}: no entry {key}; run mmspeed preprocess again")

    def _damaged(self, key: str, place: PayloadLocation, changed: bool = False) -> UserError:
        when = ": its bytes have changed since this process first read them" if changed else ""
        return UserError(
            f"cache {self.location}: shard {place.shard} is damaged at entry {key}{when}; "
            "delete that file and run mmspeed preprocess again: it encodes only that shard's entries again"
        )


def _read_rows(root: Path, remote: RemoteStore | None, shard: str) -> tuple[pa.Table, dict[tuple[str, str], int]]:
    """The table of a shard's entries, and the row number of each."""
    path = index_path(root, shard)
    if remote is not None:
        path = remote.table(path.relative_to(root).as_posix())
    table = read_table(path, entry_schema())
    names = zip(table["section"].to_pylist(), table["key"].to_pylist(), strict=True)
    return table, {name: row for row, name in enumerate(names)}
