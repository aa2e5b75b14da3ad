"""Unite the tables of text caches that were built on several machines, of other sources or of parts of the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mmspeed.data.cache.document_blocks import DOCUMENTS_NAME, DOCUMENTS_SCHEMA, Array, TextSource, store_table
from mmspeed.data.cache.files import write_whole
from mmspeed.data.cache.made_from import DIGEST
from mmspeed.data.cache.tables import read_info, write_info
from mmspeed.data.cache.text_cache import DocumentTable, read_document_table
from mmspeed.data.cache.tokenizer_file import FOLDER, TokenizerFacts, tokenizer_problems
from mmspeed.errors import UserError

_OWN = ("mmspeed", "schema", "seal", DIGEST)  # written by write_info, or of one build only


@dataclass(frozen=True)
class OpenedTexts:
    """A text cache to be merged: its `cache.json`, its tokenizer and its table of documents."""

    root: Path
    info: dict[str, Any]
    tokenizer: TokenizerFacts
    table: DocumentTable

    @classmethod
    def of(cls, root: Path) -> OpenedTexts:
        """Open a finished cache. Raises UserError for an unfinished or damaged one, and for one of videos."""
        info = read_info(root)
        if info.get("task") != "language":
            raise UserError(f"{root} holds videos, and the other caches texts")
        for name, problem in tokenizer_problems(root, info):
            raise UserError(f"{root}: {name} {problem}; run `mmspeed preprocess` there again")
        table = read_document_table(root / "index" / DOCUMENTS_NAME)
        return cls(root, info, TokenizerFacts.of_json(info["tokenizer"]), table)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that decide its documents and which are held out; none for one that a program wrote."""
        return dict(self.info.get("made_for") or {})


@dataclass(frozen=True)
class UnitedTexts:
    """The table of several caches: `columns` in parts, the keys of blocks by number, and the content of `cache.json`."""

    first: OpenedTexts
    columns: dict[str, list[Array]]
    blocks: list[str]
    sources: list[TextSource]
    info: dict[str, Any]

    @property
    def documents(self) -> int:
        """The number of documents."""
        return sum(map(len, self.columns["length"]))

    def write(self, root: Path) -> None:
        """Write the tokenizer, the table and `cache.json`. Raises UserError if the disk is full."""
        for name in self.first.tokenizer.files:
            write_whole(root / FOLDER / name, (self.first.root / FOLDER / name).read_bytes())
        store_table(root, self.columns, self.blocks, self.sources, self.first.tokenizer)
        write_info(root, self.info)


def unite_texts(parts: Sequence[OpenedTexts]) -> UnitedTexts:
    """The table of all documents: source by source, in the order of their names' first appearance, and cache by cache within one.

    A block that a source has in two caches counts once. Raises UserError for caches of other tokenizers or settings, and for sources of
    one name that were read in other ways.
    """
    first = parts[0]
    for other in parts[1:]:
        _check_fit(first, other)
    sources: dict[str, TextSource] = {}
    settings: dict[str, dict[str, Any]] = {}
    for one in parts:
        for source in one.table.sources:
            sources.setdefault(source.name, source)
        settings = {row["name"]: row for row in one.settings.get("sources", [])} | settings
    columns: dict[str, list[Array]] = {name: [] for name in DOCUMENTS_SCHEMA.names}
    blocks: list[str] = []
    for number, name in enumerate(sources):
        taken: set[str] = set()
        for one in parts:
            _take(one.table, name, number, taken, columns, blocks)
    info = {name: value for name, value in first.info.items() if name not in _OWN}
    if "made_for" in info:
        info["made_for"] = {**first.settings, "sources": [settings[name] for name in sources if name in settings]}
    rejected: Counter[str] = sum((Counter(one.info.get("rejected", {})) for one in parts), Counter())
    info["rejected"] = dict(sorted(rejected.items()))
    info.pop("longest_turn", None)
    if all("longest_turn" in one.info for one in parts):  # else it is not known
        info["longest_turn"] = max(int(one.info["longest_turn"]) for one in parts)
    return UnitedTexts(first, columns, blocks, list(sources.values()), info)


def _take(
    table: DocumentTable, name: str, number: int, taken: set[str], columns: dict[str, list[Array]], blocks: list[str]
) -> None:
    """Add the documents of a source, but for those of blocks in `taken`."""
    own = next((place for place, source in enumerate(table.sources) if source.name == name), None)
    if own is None:
        return
    rows = np.flatnonzero(table.columns["source"] == own)
    block = table.columns["block"][rows]
    numbers = np.full(len(table.blocks), -1, np.int64)
    for old in dict.fromkeys(block.tolist()):  # in their order
        if table.blocks[old] not in taken:
            numbers[old] = len(blocks)
            blocks.append(table.blocks[old])
    taken |= {table.blocks[old] for old in set(block.tolist())}
    kept = numbers[block] >= 0
    rows, block = rows[kept], numbers[block[kept]]
    for column, values in table.columns.items():
        replaced = {"source": np.full(len(rows), number), "block": block}.get(column, values[rows])
        columns[column].append(replaced.astype(values.dtype))


def _check_fit(first: OpenedTexts, other: OpenedTexts) -> None:
    """Raise UserError for caches that no single config describes."""
    if first.tokenizer.fingerprint != other.tokenizer.fingerprint:
        raise UserError(
            f"{other.root} does not fit {first.root}: their tokenizers differ; a tokenizer of `kind: train` is another one on other texts: "
            "name the folder of one cache's tokenizer (kind: transformers) in both configs"
        )
    ours, theirs = first.settings, other.settings
    names = [name for name in sorted((ours.keys() | theirs.keys()) - {"sources"}) if ours.get(name) != theirs.get(name)]
    if names:
        raise UserError(f"{other.root} does not fit {first.root}: made with other settings ({', '.join(names)})")
    known = {row["name"]: row for row in ours.get("sources", [])}
    for row in theirs.get("sources", []):
        mine = known.get(row["name"], row)
        wrong = [key for key in sorted(mine.keys() | row.keys()) if mine.get(key) != row.get(key)]
        if wrong:
            raise UserError(
                f"{other.root} does not fit {first.root}: both have a source {row['name']}, read in other ways ({', '.join(wrong)})"
            )
