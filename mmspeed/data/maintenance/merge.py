"""Merge caches that were built on several machines: entries that the target lacks are copied, byte for byte."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mmspeed.data.cache.codec_file import codec_facts, own_codec
from mmspeed.data.cache.contents import append_content, append_scenes, read_contents, read_scenes
from mmspeed.data.cache.files import write_whole
from mmspeed.data.cache.keys import number_duplicates
from mmspeed.data.cache.made_from import DIGEST
from mmspeed.data.cache.shards import shard_sha256
from mmspeed.data.cache.splits import copies_of_held_out, hold_out_copies
from mmspeed.data.cache.tables import (
    Sample,
    index_files,
    index_path,
    read_facts,
    read_info,
    read_rejects,
    read_samples,
    shard_of_index,
    write_index,
    write_info,
    write_rejects,
    write_samples,
)
from mmspeed.data.cache.writer import repair
from mmspeed.errors import UserError
from mmspeed.log import progress

from .merge_texts import OpenedTexts, unite_texts
from .prune_pack import blocks_of, care_lock, forget_compiled, publish, rows_of
from .verify import is_text_cache

L = TypeVar("L")

_MUST_AGREE = ("encoders", "latent_dtype", "text_dtype", "encoding_version", "fps")
_OWN = ("mmspeed", "schema", "seal", "build", DIGEST)  # written by write_info, or of one build only
_NUMBER = re.compile(r"^([0-9a-f]{32})-[0-9]+$")


@dataclass
class MergeReport:
    """The counts of a merge."""

    linked: int = 0  # whole shards added as hard links
    copied: int = 0  # entries copied into new shards
    present: int = 0  # entries that were already present
    samples: int = 0  # of the merged cache, or documents: `noun`
    noun: str = "samples"
    held_out_copies: int = 0  # samples held out because another one of their content is
    split_conflicts: int = 0  # samples that the caches put into different splits: the first cache's split counts


@dataclass(frozen=True)
class _Contents:
    root: Path
    info: dict[str, Any]
    samples: list[Sample]
    null_key: str | None


def merge(into: Path, sources: Sequence[Path], shard_bytes: int = 256_000_000) -> MergeReport:
    """Add all entries, samples and rejects of `sources` to the cache `into`, which is created if it does not exist.

    Data sets of the same name are united. If killed, the same command continues. Raises UserError in one line if the caches are not
    compatible.
    """
    for root in sources:
        if root.resolve() == into.resolve():
            raise UserError(f"{root} cannot be merged into itself")
    texts = [is_text_cache(root, read_info(root)) for root in sources]
    if any(texts):
        if not all(texts):
            raise UserError(f"{sources[texts.index(False)]} holds videos, and {sources[texts.index(True)]} texts")
        return _merge_texts(into, sources, shard_bytes)
    caches = [_open(root) for root in sources]
    target_cache = _open(into) if (into / "cache.json").exists() else None
    parts = ([target_cache] if target_cache else []) + caches
    settings = _check_fit(parts)
    _check_contents(parts)
    into.mkdir(parents=True, exist_ok=True)
    report = MergeReport()
    with care_lock(into):
        repair(into)
        _bring_codec(into, parts)
        _bring_lines(into, caches, read_contents, append_content)
        _bring_lines(into, caches, read_scenes, append_scenes)
        _bring_all(into, [one.root for one in caches], shard_bytes, report)
        rejects = {(r["path"], r["reason"], r["detail"]) for one in parts for r in read_rejects(one.root)}
        samples = unite_samples([one.samples for one in parts], report)
        write_rejects(into, rejects)
        null_key = next((one.null_key for one in parts if one.null_key), None)
        write_samples(into, samples, null_key)
        info = {name: value for name, value in parts[0].info.items() if name not in _OWN}
        write_info(into, info | ({"made_for": settings} if settings is not None else {}))
        forget_compiled(into)
    return report


def _open(root: Path) -> _Contents:
    info = read_info(root)
    if is_text_cache(root, info):
        raise UserError(f"{root} holds texts, and the other caches videos")
    samples, null_key = read_samples(root)
    return _Contents(root, info, samples, null_key)


def _merge_texts(into: Path, sources: Sequence[Path], shard_bytes: int) -> MergeReport:
    """`merge` of caches of texts: the blocks that `into` lacks, and one table of all documents."""
    parts = [OpenedTexts.of(root) for root in ([into] if (into / "cache.json").exists() else []) + list(sources)]
    united = unite_texts(parts)
    stored = {key for one in parts for _, key in _entries_of(one.root)}
    if lacking := sum(key not in stored for key in united.blocks):
        raise UserError(
            f"{lacking} of {len(united.blocks)} blocks of documents are in none of the caches; run `mmspeed preprocess` where the texts are"
        )
    into.mkdir(parents=True, exist_ok=True)
    report = MergeReport(samples=united.documents, noun="documents")
    with care_lock(into):
        repair(into)
        _bring_all(into, sources, shard_bytes, report)
        write_rejects(into, {(r["path"], r["reason"], r["detail"]) for one in parts for r in read_rejects(one.root)})
        united.write(into)
        forget_compiled(into)
    return report


def _check_fit(parts: Sequence[_Contents]) -> Any:
    """The `made_for` of the merged cache. Raises UserError if the caches were built with different settings."""
    first = parts[0]
    settings = first.info.get("made_for")
    for other in parts[1:]:
        names = [name for name in _MUST_AGREE if first.info.get(name) != other.info.get(name)]
        if names:
            details = "; ".join(_difference(name, first.info.get(name), other.info.get(name)) for name in names)
            raise UserError(f"{other.root} does not fit {first.root}: {details}")
        if first.null_key and other.null_key and first.null_key != other.null_key:
            raise UserError(f"{other.root} does not fit {first.root}: their empty captions are encoded differently")
        theirs = other.info.get("made_for")
        if settings is not None and theirs is not None:
            names = sorted(n for n in settings.keys() | theirs.keys() if settings.get(n) != theirs.get(n))
            if set(names) - {"sources"}:
                raise UserError(
                    f"{other.root} does not fit {first.root}: made with other data settings ({', '.join(names)})"
                )
            _check_names(first.root, settings.get("sources", []), other.root, theirs.get("sources", []))
            more = [source for source in theirs.get("sources", []) if source not in settings.get("sources", [])]
            settings = {**settings, "sources": [*settings.get("sources", []), *more]} if more else settings
    return settings


def _check_names(
    our_root: Path, ours: Sequence[dict[str, Any]], their_root: Path, theirs: Sequence[dict[str, Any]]
) -> None:
    """Raise UserError if data sets of the same name were read in different ways: no config can describe both."""
    known = {source["name"]: source for source in ours}
    for source in theirs:
        mine = known.get(source["name"], source)
        names = sorted(n for n in mine.keys() | source.keys() if mine.get(n) != source.get(n))
        if names:
            raise UserError(
                f"{their_root} does not fit {our_root}: both have a source named {source['name']}, "
                f"of other sources ({', '.join(names)}); "
                "give them different names (data.sources: name) and run `mmspeed preprocess` again: nothing is encoded again"
            )


def _difference(name: str, ours: Any, theirs: Any) -> str:
    """The differences between two values, such as `encoders.vae.fingerprint 3f2a... and 77b0...`."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        inner = [n for n in sorted(ours.keys() | theirs.keys()) if ours.get(n) != theirs.get(n)]
        return "; ".join(_difference(f"{name}.{n}", ours.get(n), theirs.get(n)) for n in inner)
    return f"{name} {str(ours)[:16]} and {str(theirs)[:16]}"


def _bring_codec(into: Path, parts: Sequence[_Contents]) -> None:
    """Copy the codec that encoded the latents, if `into` has none."""
    name = own_codec(parts[0].info)
    if name is None or (into / name).exists():
        return
    for one in parts:
        with suppress(OSError, ValueError):
            if codec_facts(one.root / name).get("fingerprint") == one.info["encoders"]["vae"].get("fingerprint"):
                write_whole(into / name, (one.root / name).read_bytes(), replace=False)
                return
    raise UserError(f"none of the caches has an intact codec {name}: put a copy there first")


def _check_contents(parts: Sequence[_Contents]) -> None:
    """Raise UserError if two caches have the same content id of files that differ."""
    hashes: dict[str, tuple[str, Path]] = {}
    for one in parts:
        for line in read_contents(one.root):
            whole, root = hashes.setdefault(line.content, (line.whole, one.root))
            if whole != line.whole:
                raise UserError(
                    f"{one.root} does not fit {root}: {line.file[0]} and another file have the same samples, and differ; "
                    "build one cache of both"
                )


def _bring_lines(
    into: Path, caches: Sequence[_Contents], read: Callable[[Path], Iterator[L]], append: Callable[[Path, str, L], None]
) -> None:
    """Add the lines, of whole-file hashes or of scene cuts, that the caches remember and `into` lacks."""
    known = set(read(into))
    for line in (line for one in caches for line in read(one.root)):
        if line not in known:
            known.add(line)
            append(into, "merged", line)


def _entries_of(root: Path) -> set[tuple[str, str]]:
    """The (section, key) of each entry of a cache."""
    return {(entry.section, entry.key) for path in index_files(root) for entry in rows_of(root, shard_of_index(path))}


def _bring_all(into: Path, roots: Sequence[Path], shard_bytes: int, report: MergeReport) -> None:
    """Copy the entries of caches that `into` lacks; a cache that can be written is locked meanwhile."""
    known = _entries_of(into)
    for root in roots:
        with care_lock(root) if os.access(root, os.W_OK) else nullcontext():
            _bring_entries(into, root, known, shard_bytes, report)


def _bring_entries(into: Path, root: Path, known: set[tuple[str, str]], shard_bytes: int, report: MergeReport) -> None:
    """Copy entries that are not in `known`; a shard without known entries is linked as a whole if the file system allows it."""
    for path in progress(index_files(root), f"merge {root.name}", unit="shard"):
        shard = shard_of_index(path)
        rows = rows_of(root, shard)
        new = [entry for entry in rows if (entry.section, entry.key) not in known]
        report.present += len(rows) - len(new)
        known |= {(entry.section, entry.key) for entry in new}
        if not new:
            continue
        if len(new) == len(rows) and _link_whole(into, root, shard):
            report.linked += 1
            continue
        publish(into, str(Path(shard).parent), blocks_of(root, new))
        report.copied += len(new)


def _link_whole(into: Path, root: Path, shard: str) -> bool:
    """Link a whole shard into `into`; False if the file system cannot, or the shard is not as it was written."""
    facts, source = read_facts(index_path(root, shard)), root / shard
    try:
        if shard_sha256(source) != facts.get("mmspeed.shard_sha256"):
            return False
    except OSError:
        return False
    folder = into / Path(shard).parent
    folder.mkdir(parents=True, exist_ok=True)
    number = max((int(p.stem) for p in folder.glob("*.tar") if p.stem.isdigit()), default=-1) + 1
    while True:
        target = folder / f"{number:06d}.tar"
        try:
            os.link(source, target)
            break
        except FileExistsError:
            number += 1
        except OSError:
            return False
    name = target.relative_to(into).as_posix()
    rows = [dataclasses.replace(entry, shard=name) for entry in rows_of(root, shard)]
    write_index(into, name, rows, source.stat().st_size, facts["mmspeed.shard_sha256"])
    return True


def unite_samples(tables: Iterable[Sequence[Sample]], report: MergeReport) -> list[Sample]:
    """The samples of several caches: the same content of the same source appears once; keys are numbered as in one build.

    Data sets of the same name are one data set. Content that two caches have in data sets of different names gives two samples.
    """
    united: dict[tuple[str, str, str], Sample] = {}
    for samples in tables:
        for sample in samples:
            base = match[1] if (match := _NUMBER.match(sample.key)) else sample.key
            which = base, sample.source, sample.dataset
            before = united.get(which)
            if before is None:
                united[which] = dataclasses.replace(sample, key=base)
                continue
            report.split_conflicts += before.split != sample.split
            united[which] = dataclasses.replace(before, lost=before.lost and sample.lost)
    ordered = sorted(united.values(), key=lambda sample: (sample.source, sample.key, sample.dataset))
    keys = number_duplicates(sample.key for sample in ordered)
    report.samples = len(ordered)
    numbered = [dataclasses.replace(sample, key=key) for sample, key in zip(ordered, keys, strict=True)]
    report.held_out_copies = len(copies_of_held_out(numbered))
    return hold_out_copies(numbered)
