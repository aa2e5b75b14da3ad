"""Content ids of large files, whose samples may be equal: their whole-file hashes are taken when they are read, remembered and compared.

Of a remote file that its store names by a checksum, the id is made from that alone.

A large file's id is the digest of its size and 16 blocks (`source.content_id`), which is quick to plan with. Before one file is taken
for another, of this listing or of the cache, the XXH3 hashes (128 bits) of both are compared: files that differ get ids of
their own, made from both. The cache remembers hashes by path, size, time and inode (`mmspeed.data.cache.contents`).
"""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from mmspeed.config.places import is_url
from mmspeed.data.cache.contents import ContentLine, FileState, append_content, read_contents
from mmspeed.data.cache.keys import digest
from mmspeed.media.rejections import Rejected
from mmspeed.media.source import SAMPLED_ABOVE, Source, content_id

_BLOCK = 4 << 20


def whole_hash(source: Source) -> str:
    """32 hexadecimal digits of XXH3 over all bytes of a source. Raises OSError."""
    hasher = xxhash.xxh3_128()
    with source.open() as file:
        while block := file.read(_BLOCK):
            hasher.update(block)
    return hasher.hexdigest()


@dataclass
class ContentIds:
    """The content ids of sources for one cache.

    Args:
        root: folder of the cache.
        full: digest whole files (`preprocess.full_hash`): then nothing is compared.
        listed: all sources of the config, among which equal samples are looked for.
        reads: read whole files where they must be compared; false for commands that only plan.
        records: record hashes in the cache, also of every large file that is about to be encoded.

    Threads may share it.
    """

    root: Path
    full: bool = False
    listed: Sequence[Source] = ()
    reads: bool = False
    records: bool = False
    _hashes: dict[FileState, str] = field(default_factory=dict)
    _ids: dict[str, dict[str, str]] = field(default_factory=dict)  # sampled id -> whole-file hash -> id
    _alike: dict[int, list[Source]] | None = None  # large listed sources by their size
    _sampled: dict[FileState, str] = field(default_factory=dict)  # of listed sources of one size
    _lines: set[FileState] = field(default_factory=set)  # files that have a line in the cache
    _name: str = field(default_factory=lambda: secrets.token_hex(8))  # of this process's lines

    def __post_init__(self) -> None:
        self._lock = threading.RLock()
        if not self.full:
            self._load()

    def _compares(self, source: Source) -> bool:
        """True for a source whose id is not of all its bytes. Raises Rejected like `Source.bytes`."""
        return not self.full and _comparable(source) and source.bytes() > SAMPLED_ABOVE

    def id_of(self, source: Source) -> str:
        """The content id of a source. Raises Rejected like `content_id`, and OSError."""
        if source.remote is not None and source.remote.checksum and source.offset is None:
            return digest(f"{source.remote.size} {source.remote.checksum}".encode())
        sampled = content_id(source, self.full or not _comparable(source))
        if not self._compares(source):
            return sampled
        known = self._ids.get(sampled)
        twins = [] if known else self._twins(source, sampled)
        whole = self._whole(source) if known or twins else None
        if whole is None:  # nothing to compare with, or only planned and never read
            return sampled
        if known:
            content = known.get(whole) or _own_id(sampled, whole)
        else:
            content = _own_id(sampled, whole) if any(self._whole(twin) != whole for twin in twins) else sampled
        self._record(source, sampled, whole, content)
        return content

    def remember(self, source: Source, content: str) -> None:
        """Record the whole-file hash of a source that is about to be encoded as `content`, durably. Raises OSError."""
        if not (self.records and self._compares(source)):
            return
        if (whole := self._whole(source)) is not None:
            self._record(source, content_id(source, False), whole, content)

    def settle(self) -> None:
        """Record the ids of all listed sources whose samples are equal, for processes that do not know the whole listing."""
        for alike in self._by_size().values():
            for source in alike if len(alike) > 1 else ():
                try:
                    self.id_of(source)
                except (Rejected, OSError):  # named when the source is used
                    continue

    def _by_size(self) -> dict[int, list[Source]]:
        """The large listed sources by their size in bytes."""
        with self._lock:
            if self._alike is None:
                alike: dict[int, list[Source]] = {}
                for source in (file for one in self.listed for file in one.files) if not self.full else ():
                    if not _comparable(source):
                        continue
                    try:
                        size = source.bytes()
                    except Rejected:
                        continue
                    if size > SAMPLED_ABOVE:
                        alike.setdefault(size, []).append(source)
                self._alike = alike
            return self._alike

    def _twins(self, source: Source, sampled: str) -> list[Source]:
        """The other listed sources with the same sampled id."""
        twins = []
        for other in self._by_size().get(source.bytes(), ()):
            if (other.path, other.offset) == (source.path, source.offset):
                continue
            try:
                state = _state(other)
                if state not in self._sampled:
                    self._sampled[state] = content_id(other, False)
                if self._sampled[state] == sampled:
                    twins.append(other)
            except (Rejected, OSError):
                continue
        return twins

    def _whole(self, source: Source) -> str | None:
        """The whole-file hash of a source, remembered or taken now; None if it may not be taken. Raises OSError."""
        state = _state(source)
        if state not in self._hashes:
            if not self.reads:
                return None
            self._hashes[state] = whole_hash(source)
        return self._hashes[state]

    def _record(self, source: Source, sampled: str, whole: str, content: str) -> None:
        """Remember that a source with these hashes has the id `content`, durably where hashes are recorded."""
        state = _state(source)
        with self._lock:
            ids = self._ids.setdefault(sampled, {})
            if self.records and (ids.get(whole) != content or state not in self._lines):
                append_content(self.root, self._name, ContentLine(state, sampled, whole, content))
                self._lines.add(state)
                ids[whole] = content

    def _load(self) -> None:
        """Take over what earlier processes recorded."""
        for line in read_contents(self.root):
            self._hashes[line.file] = line.whole
            self._lines.add(line.file)
            self._ids.setdefault(line.sampled, {}).setdefault(line.whole, line.content)


def _own_id(sampled: str, whole: str) -> str:
    """The id of a file whose sampled id is also another file's."""
    return digest(f"{sampled} {whole}".encode())


def _comparable(source: Source) -> bool:
    """True for a source of which parts can be read at any time, to compare them with others.

    A remote file is such if its length stood in a listing, its store answers ranges, and has no checksum for it; of others all bytes
    make the id, when they are fetched; of media in a Parquet file, too.
    """
    file = source.remote
    if source.column:
        return False
    if not is_url(source.path):
        return True
    return file is not None and file.listed and file.ranges and not (file.checksum and source.offset is None)


def _state(source: Source) -> FileState:
    """The state of a source's file, by which its hash is remembered. Raises OSError."""
    if source.remote is not None:
        tag = int(digest((source.remote.checksum or source.remote.tag).encode())[:15], 16)
        return source.path, source.offset or 0, source.bytes(), tag, 0
    on_disk = os.stat(source.path)
    size = on_disk.st_size if source.size is None else source.size
    return os.path.abspath(source.path), source.offset or 0, size, on_disk.st_mtime_ns, on_disk.st_ino
