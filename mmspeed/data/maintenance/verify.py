"""Verify every byte of a cache, and its tables against its files: reads everything, changes nothing.

Nothing in a file is trusted before its seal or digest is verified, so damaged bytes reach no parser that might crash on them.
"""

from __future__ import annotations

import json
import os
import tarfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from mmspeed.data.cache.codec_file import codec_problems
from mmspeed.data.cache.contents import CONTENTS, SCENES
from mmspeed.data.cache.document_blocks import DOCUMENTS_NAME
from mmspeed.data.cache.files import TEMP_SUFFIX, held
from mmspeed.data.cache.index import ENTRIES_NAME, ENTRIES_SCHEMA, SAMPLES_NAME, SAMPLES_SCHEMA, fits
from mmspeed.data.cache.made_from import SOURCES_TABLE, sources_schema
from mmspeed.data.cache.payloads import pread
from mmspeed.data.cache.seals import is_sealed, sealed_file
from mmspeed.data.cache.shards import shard_sha256
from mmspeed.data.cache.tables import (
    SCHEMA_VERSION,
    SECTIONS,
    Entry,
    RejectionRow,
    entry_schema,
    index_files,
    index_path,
    read_facts,
    read_info,
    read_samples,
    sample_schema,
    shard_of_index,
)
from mmspeed.data.cache.text_cache import read_document_table
from mmspeed.data.cache.tokenizer_file import FOLDER, NAMES, tokenizer_problems
from mmspeed.errors import UserError
from mmspeed.log import progress

from .stored_entries import BROKEN, DamagedError, padded, read_sound, sealed_table, trusted_rows

_BLOCK = tarfile.BLOCKSIZE
_END = bytes(2 * _BLOCK)
_KNOWN = {"cache.json", "report.html"}
PARTS = "parts"  # folder of files that the processes of a build leave for each other
SAMPLES, NULL = "samples", "null"  # in place of a path, for damage outside of files: missing entries


@dataclass(frozen=True)
class Damage:
    """One damage: of a file (relative to the cache) or of one entry in it."""

    path: str
    what: str
    section: str = ""
    key: str = ""
    source: str = ""

    def __str__(self) -> str:
        entry = f"{self.section} {self.key}{f' ({self.source})' if self.source else ''}: " if self.key else ""
        return f"{self.path}: {entry}{self.what}"


@dataclass
class Findings:
    """The findings of `verify`. Only `damage` means that something is wrong."""

    damage: list[Damage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # such as: not finished, no compiled index yet
    foreign: list[str] = field(default_factory=list)  # files that are not part of a cache
    live: list[str] = field(default_factory=list)  # files that writers hold at present
    left: list[str] = field(default_factory=list)  # temporary files of writers that are gone
    entries: int = 0
    lacking: int = 0  # samples with missing entries

    @property
    def whole(self) -> int:
        """The number of intact entries."""
        return self.entries - len({(d.path, d.key) for d in self.damage if d.key})


def verify(root: Path | str) -> Findings:
    """Read every byte of a cache, compare it with its seals and digests, and look for numbers that are not finite.

    Raises UserError without a cache, or for an older one.
    """
    root = Path(root)
    findings = Findings()
    info = _check_info(root, findings)
    indexed = {shard_of_index(path) for path in index_files(root)}
    lying = {path.relative_to(root).as_posix() for section in SECTIONS for path in (root / section).rglob("[!.]*.tar")}
    shards = sorted(indexed | lying)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:  # hashing and reading release the interpreter lock
        for part in progress(
            threads.map(lambda shard: _check_shard(root, shard), shards), "verify", len(shards), "shard"
        ):
            findings.damage += part.damage
            findings.live += part.live
            findings.entries += part.entries
    _check_tables(root, info, findings)
    findings.damage += [Damage(path, what) for path, what in codec_problems(root, info)]
    _check_compiled(root, findings)
    _check_parts(root, findings)
    _check_others(root, shards, findings)
    return findings


# -- shards ---------------------------------------------------------------------------------------------------------


def _check_shard(root: Path, shard: str) -> Findings:
    part, path, index = Findings(), root / shard, index_path(root, shard).relative_to(root).as_posix()
    try:
        if not (root / index).exists():
            if path.exists() and held(path):
                part.live.append(shard)
            elif path.exists():
                part.damage.append(Damage(shard, "no index lists its entries"))
            return part
        rows = trusted_rows(root, shard)
        facts = read_facts(root / index)
    except BROKEN as error:
        part.damage.append(Damage(index, _first_line(error)))
        return part
    part.entries = len(rows)
    try:
        part.damage += _compare(path, shard, rows, facts)
    except FileNotFoundError:
        part.damage += [Damage(shard, "the shard is missing")]
        part.damage += [Damage(shard, "gone with its shard", e.section, e.key, e.source or "") for e in rows]
    except BROKEN as error:
        part.damage.append(Damage(shard, _first_line(error)))
    return part


def _compare(path: Path, shard: str, rows: list[Entry], facts: dict[str, str]) -> list[Damage]:
    """The differences between a shard, the rows of its index and its recorded digest; entries that are not finite."""
    damage: list[Damage] = []
    size, at, gaps = path.stat().st_size, 0, 0
    with open(path, "rb") as file:
        for entry in rows:
            gaps += entry.offset - _BLOCK != at
            at = entry.offset + padded(entry.bytes) + 2 * _BLOCK
            try:
                at = read_sound(file, entry).end
            except (DamagedError, OSError) as error:
                at = max(at, entry.offset)
                damage.append(Damage(shard, _first_line(error), entry.section, entry.key, entry.source or ""))
        tail = pread(file, len(_END), size - len(_END)) if size >= len(_END) else b""
    if str(size) != facts.get("mmspeed.shard_bytes"):
        damage.append(Damage(shard, f"has {size} bytes, not {facts.get('mmspeed.shard_bytes', 'as its index states')}"))
    elif not damage and (gaps or tail != _END or at != size - len(_END)):
        damage.append(Damage(shard, "holds something that its index does not list"))
    elif not damage and shard_sha256(path) != facts.get("mmspeed.shard_sha256"):
        damage.append(Damage(shard, "bytes between its entries have changed"))
    return damage


# -- tables and the rest --------------------------------------------------------------------------------------------


def _check_info(root: Path, findings: Findings) -> dict[str, Any]:
    """The content of cache.json; empty if it is missing or damaged."""
    path = root / "cache.json"
    if not path.exists():
        if not (root / "index").is_dir() and not any((root / section).is_dir() for section in SECTIONS):
            raise UserError(f"no dataset cache at {root}; run mmspeed preprocess first")
        return {}
    try:
        data = path.read_bytes()
        if _is_description(data):
            return read_info(root)
        findings.damage.append(Damage("cache.json", "is not as it was written"))
    except OSError as error:
        findings.damage.append(Damage("cache.json", _first_line(error)))
    return {}


def _is_description(data: bytes) -> bool:
    """True if the data are an intact cache.json: sealed, or of an older schema, which `read_info` names."""
    try:
        info = json.loads(data)
        return is_sealed(data) if "seal" in info else int(info["schema"]) < SCHEMA_VERSION
    except (ValueError, KeyError, TypeError):
        return False


def _check_tables(root: Path, info: dict[str, Any], findings: Findings) -> None:
    """Check samples and rejects: present if cache.json is, as they were written, and samples refer to existing entries."""
    if is_text_cache(root, info):
        _check_documents(root, info, findings)
        return
    described, samples = (root / "cache.json").exists(), Path("index/samples.parquet")
    if not described and not (root / samples).exists():
        findings.notes.append("cache.json and the table of samples do not exist yet: preprocess has not finished")
        return
    if not described:
        findings.damage.append(Damage("cache.json", "is missing"))
    _check_lists(root, findings)
    try:
        sealed_table(root / samples, sample_schema())
        _check_samples(root, findings)
    except BROKEN as error:
        findings.damage.append(Damage(samples.as_posix(), _first_line(error)))


def _check_lists(root: Path, findings: Findings) -> None:
    tables = {"rejects/rejects.parquet", *(f"rejects/{p.name}" for p in (root / "rejects").glob("[!.]*.parquet"))}
    schemas = dict.fromkeys(sorted(tables), pa.schema({column: pa.string() for column in RejectionRow._fields}))
    if (root / SOURCES_TABLE).exists():
        schemas[SOURCES_TABLE] = sources_schema()
    for name, schema in schemas.items():
        try:
            sealed_table(root / name, schema)
        except BROKEN as error:
            findings.damage.append(Damage(name, _first_line(error)))


def is_text_cache(root: Path, info: Mapping[str, Any]) -> bool:
    """True if a cache holds documents of token ids; `info` is its cache.json, empty if that is lost."""
    return info.get("task") == "language" or (not info and (root / "index" / DOCUMENTS_NAME).exists())


def _check_documents(root: Path, info: Mapping[str, Any], findings: Findings) -> None:
    """Check the tokenizer, the table of documents and the rejects of a text cache, and that the table's blocks are stored."""
    if not (root / "cache.json").exists():
        findings.damage.append(Damage("cache.json", "is missing"))
    findings.damage += [Damage(path, what) for path, what in tokenizer_problems(root, info)]
    table = root / "index" / DOCUMENTS_NAME
    if not table.exists() and "rejected" not in info:
        findings.notes.append("the table of documents does not exist yet: preprocess has not finished")
        return
    _check_lists(root, findings)
    try:
        shard_sha256(table)  # an unreadable disk block raises here; in a mapping it would kill the process
        blocks = read_document_table(table).blocks
    except BROKEN as error:
        findings.damage.append(Damage(f"index/{DOCUMENTS_NAME}", _first_line(error)))
        return
    lacking = set(blocks) - stored_keys(root)["texts"]
    if lacking:
        findings.lacking = len(lacking)
        what = f"{len(lacking)} of {len(blocks)} blocks of documents are not stored"
        findings.notes.append(f"incomplete: {what}; `mmspeed preprocess` makes them")


def _check_samples(root: Path, findings: Findings) -> None:
    rows, null_key = read_samples(root)
    stored = stored_keys(root)
    sections = ("latents", "texts")
    lacking = [s for s in rows if not s.lost and not all(stored[name].issuperset(s.keys(name)) for name in sections)]
    findings.lacking = len(lacking)
    if lacking:
        what = f"incomplete: {len(lacking)} of {len(rows)} samples have no stored encoding, such as {lacking[0].source}"
        findings.notes.append(f"{what}; `mmspeed preprocess` encodes them, or the first epoch of `mmspeed train`")
    if null_key not in stored["null"] if null_key else len(stored["null"]) != 1:
        findings.damage.append(Damage(NULL, "the encoding of the samples' empty caption is missing"))


def stored_keys(root: Path) -> dict[str, set[str]]:
    """The keys of all entries by section, from the readable indexes whose shard exists."""
    keys: dict[str, set[str]] = {section: set() for section in SECTIONS}
    for path in index_files(root):
        shard = shard_of_index(path)
        try:
            table = sealed_table(path, entry_schema())
        except BROKEN:
            continue
        if (root / shard).exists():
            keys.setdefault(shard.split("/")[0], set()).update(table["key"].to_pylist())
    return keys


def _check_compiled(root: Path, findings: Findings) -> None:
    """Check the compiled index: both files or none, as they were written. An older one is not damage: readers detect it."""
    paths = {root / "index" / ENTRIES_NAME: ENTRIES_SCHEMA, root / "index" / SAMPLES_NAME: SAMPLES_SCHEMA}
    if not any(path.exists() for path in paths):
        return
    for path, schema in paths.items():
        try:
            shard_sha256(path)  # an unreadable disk block raises here; in a mapping it would kill the process
            with pa.memory_map(str(path)) as file:
                intact = sealed_file(path) and fits(pa.ipc.open_file(file).schema, schema) is not False
            what = "" if intact else "is not as it was written"
        except BROKEN as error:
            what = _first_line(error)
        if what:
            what += "; it is derived from the Parquet files, and --repair removes it to be compiled again"
            findings.damage.append(Damage(path.relative_to(root).as_posix(), what))


def _check_parts(root: Path, findings: Findings) -> None:
    """Check the files that an unfinished build has left for later processes."""
    paths = unfinished_parts(root)
    for path in paths:
        try:
            what = "" if is_sealed(path.read_bytes()) else "is not as it was written"
        except OSError as error:
            what = _first_line(error)
        if what:
            findings.damage.append(Damage(path.relative_to(root).as_posix(), what))
    if paths:
        findings.notes.append(f"a build is unfinished: {len(paths)} of its processes' parts are in {PARTS}/")


def unfinished_parts(root: Path) -> list[Path]:
    """The tables of an unfinished build."""
    return sorted((root / PARTS).rglob("[!.]*.parquet"))


def _check_others(root: Path, shards: list[str], findings: Findings) -> None:
    """Find files that are not part of the cache, and temporary ones."""
    for path in sorted(p for p in root.rglob("*") if not p.is_dir()):
        name, parts = path.relative_to(root).as_posix(), path.relative_to(root).parts
        if path.name.startswith(".") and path.name.endswith(TEMP_SUFFIX):
            (findings.live if held(path) else findings.left).append(name)
        elif not (
            name in shards
            or name in (*_KNOWN, SOURCES_TABLE)
            or path.suffix == ".lock"
            or (parts[0] in ("index", "rejects") and len(parts) == 2 and path.suffix in (".parquet", ".arrow"))
            or (parts[0] == "codec" and path.suffix == ".safetensors")
            or (parts[0] == FOLDER and len(parts) == 2 and path.name in NAMES)
            or (parts[0] in (CONTENTS, SCENES) and path.suffix == ".jsonl")
            or (parts[0] == PARTS and path.suffix in (".parquet", ".json"))
        ):
            findings.foreign.append(name)


def _first_line(error: BaseException) -> str:
    if isinstance(error, FileNotFoundError):
        return "is missing"
    if isinstance(error, OSError):
        return f"cannot be read: {error.strerror or error}"
    return str(error).splitlines()[0] if str(error) else type(error).__name__
