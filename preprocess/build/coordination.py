"""Coordinate the processes of one build through files in the cache.

Each process takes its share of the sources and captions by its number, and writes their outcome to a part,
`parts/<build>/rank-00003.parquet`, atomically. Processes of a launcher find each other through a file that process 0 keeps
locked while it lives; it gathers the parts, and all wait for the end. The parts of a job array (`--shard 3/8`) may run at any
time and in any order; the one that finds all parts present gathers them, and none waits.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from mmspeed.data.cache.files import TempFile, abandoned, disk_errors, try_lock, write_whole
from mmspeed.data.cache.keys import digest
from mmspeed.data.cache.tables import parquet_bytes, read_facts, read_table
from mmspeed.errors import UserError, first_names
from mmspeed.log import get_logger
from mmspeed.preprocess.records.sample_table import ClipRow

log = get_logger("preprocess")

Result = TypeVar("Result")

_FACT = "mmspeed.part"
_TELL_EVERY = 60.0  # seconds between lines of a process that waits
_LONGEST_NAP = 1.0
_NAMED = 4  # settings that a message names
_FAREWELL = 60.0  # seconds that process 0 gives the others to see the end


@dataclass(frozen=True)
class WorkShare:
    """The part of the work for this process: number `rank` of `world`. `launched`: all run at the same time."""

    rank: int = 0
    world: int = 1
    launched: bool = False

    @classmethod
    def of(cls, shard: str | None) -> WorkShare:
        """The share that `--shard` names (from 1 on, as in `3/8`), else the launcher's, else all. Raises UserError."""
        launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
        if shard is None:
            return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), True) if launched else cls()
        if launched:
            raise UserError("--shard and a launcher (or --nproc) both divide the work: use one of them")
        match = re.fullmatch(r"(\d+)/(\d+)", shard)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise UserError(f"--shard is {shard!r}: write PART/COUNT, from 1/8 to 8/8")
        return cls(int(match[1]) - 1, int(match[2]))

    def takes(self, key: str) -> bool:
        """True if this process should encode the entry of that key."""
        return int(key[:8], 16) % self.world == self.rank


@dataclass(frozen=True)
class ProcessRecord:
    """The message of one process to the others: its rows, and plain JSON of everything else."""

    rows: list[ClipRow]
    facts: dict[str, Any] = field(default_factory=dict)


def write_part(path: Path, part: ProcessRecord) -> None:
    """Write or replace a sealed part, atomically. Raises UserError if the disk is full."""
    write_whole(path, parquet_bytes(plain_rows(part.rows), row_schema(), {_FACT: json.dumps(part.facts)}))


def read_part(path: Path) -> ProcessRecord:
    """Read a part. Raises UserError if it is damaged."""
    table = read_table(path, row_schema())
    try:
        return ProcessRecord(rows_of_plain(table.to_pylist()), json.loads(read_facts(path)[_FACT]))
    except (KeyError, ValueError) as error:
        raise UserError(f"{path} is not a part of a build ({error!r}); delete it and run that part again") from error


def plain_rows(rows: Sequence[ClipRow]) -> list[dict[str, Any]]:
    """Rows as dicts with the columns of `row_schema`."""
    return [{column.name: getattr(row, column.name) for column in fields(ClipRow)} for row in rows]


def rows_of_plain(plain: Sequence[Mapping[str, Any]]) -> list[ClipRow]:
    """The inverse of `plain_rows`; other columns are ignored."""
    names = [column.name for column in fields(ClipRow)]
    lists = {column.name for column in fields(ClipRow) if column.type == "tuple[str, ...]"}
    typed: list[dict[str, Any]] = [{n: tuple(row[n]) if n in lists else row[n] for n in names} for row in plain]
    return [ClipRow(**row) for row in typed]


def row_schema() -> pa.Schema:
    """The columns of a part's table."""
    kinds = {"bool": pa.bool_(), "int": pa.int32(), "str": pa.string(), "tuple[str, ...]": pa.list_(pa.string())}
    return pa.schema({name.name: kinds[str(name.type)] for name in fields(ClipRow)})


@dataclass(frozen=True)
class Agreement:
    """Digests of everything that all processes of a build must agree on."""

    count: int  # sources
    listing: str  # their names, sizes and captions, and the settings
    encoders: str
    stamp: str  # modification times: they may differ between copies, so they only distinguish builds of an array
    # those in `listing`, by dotted key, to name the ones that differ
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def id(self) -> str:
        """A digest of the fields that are digests."""
        return digest(f"{self.count} {self.listing} {self.encoders} {self.stamp}".encode())

    def to_json(self) -> dict[str, Any]:
        """The agreement in JSON's types, for the other processes."""
        return {name.name: getattr(self, name.name) for name in fields(self)}

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> Agreement:
        """The agreement in the message of another process, which may have more fields."""
        return cls(**{name.name: message[name.name] for name in fields(cls) if name.name in message})

    def require_same(self, other: Mapping[str, Any], own_rank: int) -> None:
        """Raise UserError if process 0 does not agree. Modification times may differ."""
        theirs = Agreement.from_json(other)
        own, its = self.settings, theirs.settings
        differing = [key for key in {**its, **own} if its and its.get(key) != own.get(key)]
        if theirs.listing != self.listing and differing:
            shown = [
                f"{key} is {own.get(key, 'unset')} in process {own_rank} and {its.get(key, 'unset')} in process 0"
                for key in differing[:_NAMED]
            ]
            more = f", and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
            raise UserError(
                f"the processes have different settings: {'; '.join(shown)}{more}; give all of them the same config"
            )
        if theirs.listing != self.listing:
            raise UserError(
                f"the processes see different sources ({self.count} in process {own_rank}, {theirs.count} in process 0): "
                "is every path on a shared file system?"
            )
        if theirs.encoders != self.encoders:
            raise UserError(
                f"the processes see different text encoders (process {own_rank} and process 0): "
                "give all machines the same files"
            )


class BuildCoordinator:
    """Coordination of this process with the others; a context manager around the work.

    Args:
        root: folder of the cache.
        share: the part of the work for this process.
        agreement: digests that the others must share.

    Raises UserError if the others do not agree.
    """

    def __init__(self, root: Path, share: WorkShare, agreement: Agreement) -> None:
        self.share, self.agreement = share, agreement
        self._folder = root / "parts"
        self._launch: TempFile | None = None
        self._launch_file = self._folder / f"launch-{digest(_token().encode())[:16]}.json"
        self.place = self._folder / f"{agreement.id}-of-{share.world}"

    def __enter__(self) -> BuildCoordinator:
        if self.share.world > 1 and self.share.launched:
            nonce = self._announce() if self.share.rank == 0 else self._find()
            self.place = self._folder / nonce
        elif self.share.world > 1:
            self._mine().unlink(missing_ok=True)  # of an earlier run, with other counts
        return self

    def __exit__(self, *exc: object) -> None:
        if self._launch is not None:
            self._launch_file.unlink(missing_ok=True)
            self._launch.discard()
            self._launch = None
        self._remove_empty()

    def leave(self, part: ProcessRecord) -> None:
        """Write this process's part."""
        write_part(self._mine(), part)

    def missing(self) -> list[int]:
        """Numbers of the processes whose parts do not exist yet."""
        return [rank for rank in range(self.share.world) if not self._file(rank).exists()]

    def read(self) -> list[ProcessRecord]:
        """Read all parts, in the order of the processes."""
        return [read_part(self._file(rank)) for rank in range(self.share.world)]

    def await_all(self) -> None:
        """Wait for every part; for process 0 of a launcher."""

        def complete() -> bool | None:
            return not self.missing() or None

        wait_for(complete, lambda: f"waiting for the parts of processes {_some(self.missing())}")

    def conclude(self, result: dict[str, Any]) -> None:
        """Publish the result and delete the parts once the others have read it; for process 0 of a launcher."""
        write_whole(self._end(), json.dumps(result).encode())
        self._mine().unlink(missing_ok=True)
        deadline = time.monotonic() + _FAREWELL
        while len(self.missing()) < self.share.world and time.monotonic() < deadline:
            time.sleep(0.02)
        self.remove()

    def await_end(self) -> dict[str, Any]:
        """Wait for the published result and return it; for the other processes of a launcher."""

        def end() -> dict[str, Any] | None:
            return json.loads(self._end().read_bytes()) if self._end().exists() else None

        result = wait_for(end, lambda: "waiting for process 0 to finish the cache")
        self._mine().unlink(missing_ok=True)  # signals that the result was read
        return result

    def remove(self) -> None:
        """Delete the parts of this build."""
        shutil.rmtree(self.place, ignore_errors=True)

    def _remove_empty(self) -> None:
        with suppress(OSError):
            self._folder.rmdir()  # stays while other builds have parts in it

    def _file(self, rank: int) -> Path:
        return self.place / f"rank-{rank:05d}.parquet"

    def _mine(self) -> Path:
        return self._file(self.share.rank)

    def _end(self) -> Path:
        return self.place / "end.json"

    def _announce(self) -> str:
        """Publish this launch as a file that stays locked while this process lives; return its random name. For process 0."""
        nonce = secrets.token_hex(16)
        self._forget_dead_launches()
        with disk_errors(self._folder):
            launch = wait_for(self._temporary, lambda: "waiting for a file")
            launch.write(json.dumps({"nonce": nonce, **self.agreement.to_json()}).encode())

        def published() -> bool | None:
            self._forget_dead_launches()
            return launch.link(self._launch_file) or None

        try:
            busy = UserError("a build of this cache with the same launch name is running; wait for it, or end it")
            wait_for(published, lambda: "waiting for an earlier launch to end", limit=30.0, late=busy)
        except BaseException:
            launch.discard()
            raise
        self._launch = launch
        return nonce

    def _temporary(self) -> TempFile | None:
        try:
            return TempFile(self._folder)
        except FileNotFoundError:  # another build has just ended and removed the empty folder
            return None

    def _find(self) -> str:
        """The name of the launch that process 0 has published; for the others. Raises UserError if they do not agree."""
        launch = wait_for(
            lambda: _read_locked(self._launch_file),
            lambda: f"waiting for process 0: is {self._folder.parent} on a file system that all processes share?",
        )
        self.agreement.require_same(launch, self.share.rank)
        return str(launch["nonce"])

    def _forget_dead_launches(self) -> None:
        """Delete the files of killed launches."""
        for path in self._folder.glob("launch-*.json"):
            with abandoned(path, shared=True) as free:  # an exclusive lock would look like a living launch
                if free:
                    with suppress(OSError, ValueError, KeyError):
                        shutil.rmtree(self._folder / json.loads(path.read_bytes())["nonce"], ignore_errors=True)
                    path.unlink(missing_ok=True)


def _token() -> str:
    """A string that the processes of one launch share, and preferably no other launch."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
    address = f"{os.environ.get('MASTER_ADDR', '')}:{os.environ.get('MASTER_PORT', '')}"
    return address if run == "none" else run


def _read_locked(path: Path) -> dict[str, Any] | None:
    """The JSON of a file whose writer is alive; None if there is no file, or its writer is gone."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with open(descriptor, "rb") as file:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return dict(json.loads(file.read()))
    return None


def wait_for(
    look: Callable[[], Result | None],
    words: Callable[[], str],
    limit: float | None = None,
    late: UserError | None = None,
) -> Result:
    """Poll `look()` at growing intervals and return its first result that is not None; `words()` is logged every minute.

    Raises `late` after `limit` seconds.
    """
    start_time = last_logged = time.monotonic()
    nap = 0.005
    while (result := look()) is None:
        now = time.monotonic()
        if limit is not None and late is not None and now - start_time > limit:
            raise late
        if now - last_logged > _TELL_EVERY:
            last_logged = now
            log.warning(words())
        time.sleep(nap)
        nap = min(nap * 1.5, _LONGEST_NAP)
    return result


@contextmanager
def locked(path: Path, words: str) -> Iterator[None]:
    """Hold a lock between processes during the block; `words` is logged by a process that has to wait."""

    def take() -> int | None:
        descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
        try:
            if try_lock(descriptor) and os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return descriptor
        except FileNotFoundError:  # the previous holder has just removed it
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = wait_for(take, lambda: words)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is locked, so that no other process's file is removed
        os.close(descriptor)


def _some(ranks: Sequence[int]) -> str:
    return first_names([str(rank) for rank in ranks])
