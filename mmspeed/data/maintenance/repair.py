"""`mmspeed cache verify --repair`: drop damaged entries, keep intact ones, and list further actions for the owner."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from mmspeed.data.cache.document_blocks import DOCUMENTS_NAME
from mmspeed.data.cache.files import remove_abandoned
from mmspeed.data.cache.shards import shard_sha256
from mmspeed.data.cache.tables import SECTIONS, Entry, index_files, shard_of_index, write_index
from mmspeed.log import progress

from .prune_pack import blocks_of, care_lock, drop_shard, forget_compiled, publish
from .stored_entries import BROKEN, DamagedError, read_block, read_sound, salvage, trusted_rows
from .verify import NULL, PARTS, SAMPLES, Findings, verify

_REMAKE = "run `mmspeed preprocess` with the cache's config: it encodes missing entries and nothing else"
_CODEC = (
    "put a copy of the codec's file back (any copy of this cache has it) before the next `mmspeed preprocess`: "
    "without it a new codec is fitted, and every latent is encoded again"
)


@dataclass
class MendReport:
    """The result of a repair."""

    found: Findings
    lost: list[str] = field(default_factory=list)  # removed entries: section, key and, if known, source
    done: list[str] = field(default_factory=list)
    todo: list[str] = field(default_factory=list)  # actions for the owner

    def ask(self, what: str) -> None:
        """Add to `todo`, once."""
        if what not in self.todo:
            self.todo.append(what)


def mend(root: Path | str) -> MendReport:
    """Verify a cache and drop damaged entries. Raises UserError while a writer or another maintenance command uses it."""
    root = Path(root)
    findings = verify(root)  # before the lock: it reports a missing cache
    with care_lock(root):
        report = MendReport(findings)
        report.done += [f"removed {name}, left by a killed writer" for name in remove_abandoned(root)[0]]
        bad = sorted({shard for damage in findings.damage if (shard := _shard_of(root, damage.path)) is not None})
        stored = _keys_of_others(root, set(bad))
        for shard in progress(bad, "repair", unit="shard") if bad else ():
            _mend_shard(root, shard, stored, report)
        for path in sorted({damage.path for damage in findings.damage}):
            _mend_file(root, path, report)
        if bad:
            forget_compiled(root)
            report.ask(_REMAKE)
        return report


def _shard_of(root: Path, path: str) -> str | None:
    """The shard of a damaged file, which is the shard or its index; None for other files."""
    if path.endswith(".tar") and path.split("/")[0] in SECTIONS:
        return path
    return shard_of_index(root / path) if root / path in index_files(root) else None


def _keys_of_others(root: Path, bad: set[str]) -> set[tuple[str, str]]:
    """Section and key of the entries in intact shards."""
    intact = [shard for path in index_files(root) if (shard := shard_of_index(path)) not in bad]
    return {(entry.section, entry.key) for shard in intact for entry in trusted_rows(root, shard)} if bad else set()


def _mend_shard(root: Path, shard: str, stored: set[tuple[str, str]], report: MendReport) -> None:
    """Keep the intact entries of a shard, in a new shard if bytes are damaged, and drop the rest."""
    intact, lost, by_index = _sort_out(root, shard)
    report.lost += [f"{e.section} {e.key}{f' ({e.source})' if e.source else ''}" for e in lost]
    fresh = [entry for entry in intact if (entry.section, entry.key) not in stored]
    if not by_index and len(fresh) == len(intact) and _tiles(root, shard, intact):
        path = root / shard
        write_index(root, shard, intact, path.stat().st_size, shard_sha256(path))
        report.done.append(f"indexed the {len(intact)} entries of {shard} again")
    else:
        new = publish(root, str(Path(shard).parent), blocks_of(root, fresh))
        drop_shard(root, shard)
        report.done.append(f"dropped {shard}" + (f"; its {len(fresh)} intact entries are in {new} now" if new else ""))
    stored |= {(entry.section, entry.key) for entry in intact}


def _sort_out(root: Path, shard: str) -> tuple[list[Entry], list[Entry], bool]:
    """The intact and the damaged entries of a shard; the last value is True if its index lists them, False if its sidecars do."""
    try:
        rows = trusted_rows(root, shard)
    except BROKEN:
        try:
            return [entry for entry, _ in salvage(root, shard)], [], False
        except OSError:
            return [], [], False
    intact: list[Entry] = []
    lost: list[Entry] = []
    try:
        with open(root / shard, "rb") as file:
            for entry in rows:
                try:
                    read_sound(file, entry)
                    intact.append(entry)
                except (DamagedError, OSError):
                    lost.append(entry)
    except OSError:
        return [], rows, True
    return intact, lost, True


def _tiles(root: Path, shard: str, entries: list[Entry]) -> bool:
    """True if these entries cover a shard from its first byte to the end mark."""
    at, end = 0, bytes(1024)
    with open(root / shard, "rb") as file:
        for entry in entries:
            if entry.offset - 512 != at:
                return False
            at = read_block(file, entry).end
        size = os.fstat(file.fileno()).st_size
        return bool(entries) and at == size - len(end) and os.pread(file.fileno(), len(end), at) == end


def _mend_file(root: Path, path: str, report: MendReport) -> None:
    """Remove a damaged file that is neither a shard nor a shard's index."""
    if path in (SAMPLES, NULL):
        report.ask(_REMAKE)
    elif path.startswith("codec/"):
        if (root / path).exists():
            os.replace(root / path, root / f"{path}.damaged")
            report.done.append(f"set {path} aside as {path}.damaged")
        report.ask(_CODEC)
    elif path.startswith("tokenizer/"):
        report.ask(_REMAKE)
    elif path == f"index/{DOCUMENTS_NAME}":
        (root / path).unlink(missing_ok=True)
        report.done.append(f"removed {path}")
        report.ask(_REMAKE)
    elif path.endswith(".arrow"):
        forget_compiled(root)
        report.done.append("removed the compiled index; it is compiled again when the cache is opened")
    elif (
        path == "cache.json"
        or path.startswith(("rejects/", "sources/", f"{PARTS}/"))
        or path == "index/samples.parquet"
    ):
        if (root / path).exists():
            (root / path).unlink()
            report.done.append(f"removed {path}")
        report.ask(_REMAKE)
