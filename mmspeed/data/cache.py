"""Reading a cache: entries by key, straight from the shards by offset, each checked against its checksum.

Legend: C channels, T h w latent; L caption tokens, D text width.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import safetensors.torch
from torch import Tensor

from mmspeed.errors import UserError
from mmspeed.protocol import TextEntry

from .keys import digest
from .tables import (
    SECTIONS,
    SPLITS,
    Entry,
    Sample,
    entry_schema,
    index_files,
    read_info,
    read_rejects,
    read_samples,
    read_table,
)

_OPEN_FILES = 128


class DatasetCache:
    """A finished cache, for training. Threads, forked and spawned processes may share one.

    Args:
        root: folder of the cache.
        verify: check each payload against its checksum when it is read.

    Raises UserError when the cache is missing, unfinished, of another schema, or lacks entries that its samples name.
    """

    info: dict[str, Any]  # cache.json
    samples: list[Sample]  # in the order of their keys
    duplicates: int  # entries that lie in a second shard too, because two writers made them at once; harmless

    def __init__(self, root: Path | str, verify: bool = True) -> None:
        self.root = Path(root)
        self.verify = verify
        self.info = read_info(self.root)
        self.samples, self._null_key = read_samples(self.root)
        tables = [read_table(path, entry_schema()) for path in index_files(self.root)]
        self._entries = pa.concat_tables([entry_schema().empty_table(), *tables]).combine_chunks()
        self._rows: dict[str, dict[str, int]] = {section: {} for section in SECTIONS}
        sections, keys = self._entries["section"].to_pylist(), self._entries["key"].to_pylist()
        for row, (section, key) in enumerate(zip(sections, keys, strict=True)):
            self._rows[section].setdefault(key, row)
        self.duplicates = len(keys) - sum(len(rows) for rows in self._rows.values())
        self._check_samples()
        self._file = functools.lru_cache(maxsize=_OPEN_FILES)(self._open)

    def __reduce__(self) -> tuple[type[DatasetCache], tuple[Path, bool]]:
        """A spawned process opens the cache anew: file handles do not travel."""
        return type(self), (self.root, self.verify)

    def split(self, name: str) -> list[Sample]:
        """The samples of split `train` or `val`."""
        if name not in SPLITS:
            raise ValueError(f"split {name!r} is not one of {SPLITS}")
        return [sample for sample in self.samples if sample.split == name]

    def keys(self, section: str) -> set[str]:
        """The keys of all entries of a section, also of those that no sample of today names."""
        return set(self._rows[section])

    def entry(self, key: str, section: str | None = None) -> Entry:
        """The index row of an entry. Raises UserError when the cache does not have it."""
        for name in SECTIONS if section is None else (section,):
            row = self._rows[name].get(key)
            if row is not None:
                fields = self._entries.slice(row, 1).to_pylist()[0]
                return Entry(**{**fields, "frames": tuple(fields["frames"])})
        where = f"cache {self.root}" + (f", {section}" if section else "")
        raise UserError(f"{where}: no entry {key}; run mmspeed preprocess again")

    def latent(self, key: str) -> dict[str, Tensor]:
        """`mean` (C, T, h, w) and, when a posterior is stored, `logvar` of the same shape, as they are stored."""
        return self._tensors("latents", key)

    def text(self, key: str) -> TextEntry:
        """An encoded caption, (L, D) without padding, in the stored number type."""
        return self._text("texts", key)

    @functools.cached_property
    def null_key(self) -> str:
        """The key of the samples' empty caption. Raises UserError when there is none, or it is unknown which."""
        if self._null_key is not None:
            return self._null_key
        if len(self._rows["null"]) == 1:
            return next(iter(self._rows["null"]))
        found = "holds no" if not self._rows["null"] else f"does not say which of {len(self._rows['null'])} is its"
        raise UserError(f"cache {self.root} {found} encoding of the empty caption; run mmspeed preprocess again")

    def null_text(self) -> TextEntry:
        """The encoding of the empty caption, which stands in for a dropped one."""
        return self._text("null", self.null_key)

    def rejects(self) -> list[dict[str, str]]:
        """The sources that were not encoded: path, reason, detail."""
        return read_rejects(self.root)

    def _check_samples(self) -> None:
        latents, texts = self._rows["latents"], self._rows["texts"]
        lacking = [
            s
            for s in self.samples
            if any(k not in latents for k in s.latent_keys) or any(t not in texts for t in s.text_keys)
        ]
        if lacking:
            raise UserError(
                f"cache {self.root}: {len(lacking)} of {len(self.samples)} samples have no stored encoding "
                f"(such as {lacking[0].source}); run mmspeed preprocess again"
            )

    def _text(self, section: str, key: str) -> TextEntry:
        tensors = self._tensors(section, key)
        return TextEntry(embeds_LD=tensors["embeds"], pooled_D=tensors.get("pooled"))

    def _tensors(self, section: str, key: str) -> dict[str, Tensor]:
        """The tensors of an entry; they own their memory."""
        entry = self.entry(key, section)
        payload = self._read(entry)
        if len(payload) != entry.bytes or (self.verify and digest(payload) != entry.checksum):
            raise self._damaged(entry)
        try:
            return safetensors.torch.load(payload)
        except safetensors.SafetensorError as error:
            raise self._damaged(entry) from error

    def _read(self, entry: Entry) -> bytes:
        # pread leaves no position behind in the handle, so threads and forked processes may share it.
        descriptor, parts, offset = self._file(entry.shard).fileno(), [], entry.offset
        while (left := entry.offset + entry.bytes - offset) > 0:
            part = os.pread(descriptor, left, offset)
            if not part:
                break
            parts.append(part)
            offset += len(part)
        return b"".join(parts)

    def _open(self, shard: str) -> BinaryIO:
        try:
            return open(self.root / shard, "rb")  # noqa: SIM115 (closed when the last reader lets go of it)
        except FileNotFoundError:
            raise UserError(f"cache {self.root}: shard {shard} is missing; run mmspeed preprocess again") from None

    def _damaged(self, entry: Entry) -> UserError:
        return UserError(
            f"cache {self.root}: shard {entry.shard} is damaged at entry {entry.key}; "
            "delete that file and run mmspeed preprocess again: it remakes only that shard's entries"
        )
