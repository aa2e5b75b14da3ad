"""The record of the sources that a cache was made from, by the listing alone, and how a later listing differs from it.

`cache.json` holds the record's digest under `sources`; the table tells which sources differ. Caches without it are not compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import pyarrow as pa

from .files import write_whole
from .keys import KEY_LENGTH, digest
from .tables import parquet_bytes, read_table

FOLDER = "sources"
DIGEST = "sources"  # in cache.json
SOURCES_TABLE = f"{FOLDER}/sources.parquet"


class ListedSource(NamedTuple):
    """A source as a listing knows it: bytes (-1: unknown), time of change or a number of its state, and a digest of its words."""

    name: str
    bytes: int
    changed: int
    words: str = ""  # of its captions, split and data set


@dataclass(frozen=True)
class SourceChanges:
    """Counts of the sources in which a listing differs from the one before.

    `times`: sources that differ in their time alone; where all do, the set was copied (`copied`), and that is no change.
    """

    new: int = 0
    gone: int = 0
    files: int = 0
    words: int = 0
    times: int = 0
    copied: bool = False

    def __bool__(self) -> bool:
        return bool(self.new or self.gone or self.files or self.words or (self.times and not self.copied))

    def __str__(self) -> str:
        counts = {
            "new": self.new,
            "gone": self.gone,
            "of another size": self.files,
            "with other captions or another split": self.words,
            "changed since at the same size": self.times,
        }
        return ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)


@dataclass(frozen=True)
class MadeFrom:
    """The sources of a listing, by name."""

    sources: Mapping[str, ListedSource]

    @classmethod
    def of(cls, sources: Iterable[ListedSource]) -> MadeFrom:
        """The record of sources, in any order."""
        return cls({source.name: source for source in sorted(sources)})

    @property
    def digest(self) -> str:
        """A digest of all of them."""
        result = hashlib.sha256()
        for source in self.sources.values():
            result.update("\0".join(map(str, source)).encode("utf-8", "surrogatepass") + b"\n")
        return result.hexdigest()[:KEY_LENGTH]

    def write(self, root: Path) -> dict[str, str]:
        """Write the table of a cache; returns what belongs into its `cache.json`."""
        write_whole(
            root / SOURCES_TABLE,
            parquet_bytes([source._asdict() for source in self.sources.values()], sources_schema()),
        )
        return {DIGEST: self.digest}

    def changes_since(self, before: MadeFrom) -> SourceChanges:
        """The differences from an earlier record."""
        pairs = [(before.sources[name], now) for name, now in self.sources.items() if name in before.sources]
        new, gone = len(self.sources) - len(pairs), len(before.sources) - len(pairs)
        files = sum(old.bytes != now.bytes for old, now in pairs)
        words = sum(old.words != now.words for old, now in pairs)
        times = sum(old[:2] == now[:2] and old.changed != now.changed for old, now in pairs)
        copied = times == len(pairs) > 1 and not (new or gone or files or words)
        return SourceChanges(new, gone, files, words, times, copied)


@runtime_checkable
class ListsSources(Protocol):
    """A preparation (`mmspeed.protocols.Preparation`) that lists the sources of its config."""

    def sources_now(self) -> MadeFrom:
        """The record of the sources as they are now. Raises UserError where they cannot be listed."""
        ...


def read_made_from(root: Path) -> MadeFrom:
    """The record of the cache whose tables are in a folder. Raises UserError if it is missing or damaged."""
    return MadeFrom.of(ListedSource(**row) for row in read_table(root / SOURCES_TABLE, sources_schema()).to_pylist())


def digest_of_words(*words: Any) -> str:
    """A short digest of a source's words."""
    return digest(repr(words).encode("utf-8", "surrogatepass"))[:16]


def sources_schema() -> pa.Schema:
    """The columns of the table."""
    return pa.schema({"name": pa.string(), "bytes": pa.int64(), "changed": pa.int64(), "words": pa.string()})
