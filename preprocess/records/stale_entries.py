"""Compare the entries that a config needs with those of a cache: present, missing, or stale with the reasons. Holds keys only."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from mmspeed.data.cache.keys import canonical_json, entry_key
from mmspeed.data.cache.tables import check_recipe, entry_schema, index_files, read_table
from mmspeed.errors import UserError

EXAMINED = 100_000  # missing entries of a section that are compared with stored ones


@dataclass(frozen=True)
class SectionState:
    """Counts of the entries of one section that the config needs, by state."""

    section: str
    wanted: int
    present: int
    unused: int  # stored, and not needed by this config
    # missing ones with a counterpart, by the names of the parts that differ
    stale: Counter[str] = field(default_factory=Counter)
    examined: int = 0  # missing ones that were compared

    @property
    def missing(self) -> int:
        return self.wanted - self.present

    def lines(self) -> list[str]:
        """The counts as lines."""
        first = f"cache {self.section}: {self.present} present, {self.missing} missing, {self.unused} not used by this config"
        part = f" (of {self.examined} compared)" if self.examined < self.missing else ""
        return [first, *(f"  stale: {n}, made with another {names}{part}" for names, n in self.stale.most_common())]


class StoredEntries:
    """The entries that a cache's index lists, also for an incomplete cache. Damaged tables are listed in `problems`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.keys: dict[str, set[str]] = {"latents": set(), "texts": set(), "null": set()}
        self.problems: list[str] = []
        self._files: list[Path] = []
        if not self._readable():
            return
        for path in index_files(root) if (root / "index").is_dir() else []:
            try:
                table = read_table(path, pa.schema([entry_schema().field(name) for name in ("section", "key")]))
            except UserError as error:
                self.problems.append(str(error))
                continue
            self._files.append(path)
            for section, key in zip(table["section"].to_pylist(), table["key"].to_pylist(), strict=True):
                self.keys.setdefault(section, set()).add(key)

    @property
    def empty(self) -> bool:
        return not self._files

    def metas(self, section: str) -> Iterator[tuple[str, str]]:
        """Yield (key, JSON of its parts) of a section's entries, read table by table."""
        schema = entry_schema()
        columns = pa.schema([schema.field(name) for name in ("section", "key", "meta")])
        for path in self._files:
            try:
                table = read_table(path, columns)
            except UserError as error:  # removed or damaged since it was first read
                self.problems.append(str(error))
                continue
            for batch in table.to_batches(max_chunksize=1024):
                rows = zip(*(column.to_pylist() for column in batch.columns), strict=True)
                yield from ((key, meta) for of, key, meta in rows if of == section)

    def _readable(self) -> bool:
        """True if this version can read the cache and add to it; one without `cache.json` is incomplete, or does not exist yet."""
        try:
            check_recipe(self.root)
        except UserError as error:
            self.problems.append(str(error))
            return False
        return True


class WantedKeys:
    """The keys of a section that a config needs, added one by one. `same` names the part in which counterparts agree."""

    def __init__(self, section: str, same: str, stored: StoredEntries) -> None:
        self.section, self.same = section, same
        self.keys: set[str] = set()
        self._stored = stored
        self._stored_keys = stored.keys[section]
        self._missing: dict[str, str] = {}  # key -> JSON of its parts

    def add(self, parts: Mapping[str, Any]) -> bool:
        """Add the entry of these parts; return True if it is new here and not stored."""
        key = entry_key(parts)
        if key in self.keys:
            return False
        self.keys.add(key)
        missing = key not in self._stored_keys
        if missing and self._stored_keys and len(self._missing) < EXAMINED:
            self._missing[key] = canonical_json(dict(parts))
        return missing

    def state(self) -> SectionState:
        """The state of the section."""
        present = sum(key in self._stored_keys for key in self.keys)
        unused = len(self._stored_keys) - present
        stale: Counter[str] = Counter()
        if self._missing and unused:
            missing = [json.loads(text) for text in self._missing.values()]
            contents = {parts[self.same] for parts in missing}
            unused_parts = (json.loads(meta) for key, meta in self._stored.metas(self.section) if key not in self.keys)
            stale = stale_reasons(
                missing, [parts for parts in unused_parts if parts.get(self.same) in contents], self.same
            )
        return SectionState(self.section, len(self.keys), present, unused, stale, len(self._missing))


def stale_reasons(missing: Sequence[Mapping[str, Any]], unused: Sequence[Mapping[str, Any]], same: str) -> Counter[str]:
    """Counts of missing entries that have a stored counterpart, by the names of the parts that differ.

    Both lists hold the parts of keys; counterparts agree in `same` (`content` or `caption`). Of several the nearest counts.
    """
    stored: dict[str, list[Mapping[str, Any]]] = {}
    for parts in unused:
        stored.setdefault(parts[same], []).append(parts)
    reasons: Counter[str] = Counter()
    for parts in missing:
        differences: list[list[str]] = [
            sorted(name for name in parts.keys() | other.keys() if parts.get(name) != other.get(name))
            for other in stored.get(parts[same], [])
        ]
        if differences:
            nearest: list[str] = min(differences, key=len)
            reasons[", ".join(nearest)] += 1
    return reasons
