"""Fetch remote media into a bounded local store, where decoders read them: whole files, and members of tars one by one."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from braceexpand import braceexpand

from mmspeed.config.addresses import host_of, numeric
from mmspeed.config.places import is_url, store_folder
from mmspeed.config.schema import DataConfig
from mmspeed.data.cache.bounded import BoundedFolder, Pin
from mmspeed.data.cache.files import TempFile
from mmspeed.data.cache.keys import digest
from mmspeed.data.cache.stores import RefusedAddressError, attempt, is_absent, protocol_of, reason_of, root_cause
from mmspeed.errors import UserError
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.media.source import RemoteFile, Source
from mmspeed.preprocess.sources.parquet_cells import NOTHING, group_rows
from mmspeed.preprocess.sources.remote import RemoteFiles, StoreFile
from mmspeed.preprocess.sources.tar_pass import TarPasses

_WEB = ("http", "https")
_PROTOCOLS = ("s3", "s3a", "gs", "gcs", "hf", *_WEB)  # that rows of manifests may name
_PART = 16 << 20  # bytes asked for at a time, so that a broken connection costs no more


class IncompleteError(OSError):
    """A store gave fewer bytes than it stated."""


@dataclass(frozen=True)
class AddressRules:
    """The addresses that rows of manifests may name.

    Args:
        allowed: hosts, networks and protocols (`data.allow_addresses`).
        homes: the hosts of each data set's own paths, as `open_store` takes them; its rows may name them, too.
        protocols: of all paths.
    """

    allowed: tuple[str, ...] = ()
    homes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    protocols: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: DataConfig) -> AddressRules:
        """The rules of a config's data."""
        sets = [[part for part in source.path.split("::") if is_url(part)] for source in data.sources]
        webs = [[url for url in urls if protocol_of(url) in _WEB] for urls in sets]
        heads = [[head for url in urls for head in braceexpand("/".join(url.split("/", 3)[:3]))] for urls in webs]
        names = [dict.fromkeys(filter(None, map(host_of, urls))) for urls in heads]
        homes = [tuple(name if numeric(name) else f"//{name}" for name in one) for one in names]
        protocols = tuple({protocol_of(url) for urls in sets for url in urls})
        return cls(data.allow_addresses, dict(zip(data.dataset_names, homes, strict=True)), protocols)

    def hosts(self, dataset: str) -> tuple[str, ...]:
        """The hosts and networks that the rows of a data set, or of an unknown one, may ask beside public ones."""
        homes = self.homes.get(dataset) if dataset in self.homes else chain(*self.homes.values())
        return (*(homes or ()), *(one for one in self.allowed if "://" not in one))

    def check(self, url: str) -> None:
        """Raise Rejected (bad_address) for an address whose protocol is not asked, and for one behind http without a host."""
        protocol = protocol_of(url)
        if protocol not in (*_PROTOCOLS, *self.protocols) and f"{protocol}://" not in self.allowed:
            detail = f"manifests name {', '.join(_PROTOCOLS)} and what data.allow_addresses has, not {protocol[:40]}"
            raise Rejected(Reason.BAD_ADDRESS, detail)
        if protocol in _WEB and not host_of(url):
            raise Rejected(Reason.BAD_ADDRESS, "it names no host")


class MediaStore:
    """The local store of a config's remote media, `data.local_mb` in all; processes and machines' users share its folder.

    Args:
        limit: bytes of files to keep; the oldest that nobody uses are deleted first.
        folder: of the store; None: see `mmspeed.config.places.store_folder`.
        max_file_bytes: larger files are not fetched.
        addresses: that rows of manifests may name.

    Threads may share it. Use `local` for one file at a time and `close` at the end.
    """

    def __init__(
        self,
        limit: int,
        folder: Path | None = None,
        max_file_bytes: int | None = None,
        addresses: AddressRules = AddressRules(),  # noqa: B008 (immutable)
    ) -> None:
        self.addresses = addresses
        self.files = RemoteFiles()
        self.kept = BoundedFolder(folder or store_folder(), limit)
        self._most = max_file_bytes
        self._passes = TarPasses(self.keep_member)
        self._rows: dict[tuple[str, str], set[int]] = {}  # expected ones of Parquet files, by path and column
        self._rows_lock = threading.Lock()
        self._session = secrets.token_hex(8)  # in names of files that have no tag, and so may have changed since

    @classmethod
    def of(cls, data: DataConfig) -> MediaStore:
        """The store of a config's data."""
        most = int(data.max_file_mb * 1e6)
        return cls(int(data.local_mb * 1e6), max_file_bytes=most, addresses=AddressRules.of(data))

    def expect(self, sources: Sequence[Source]) -> None:
        """Say which sources will be asked for, in about this order: those of a streamed tar or a row group are kept as they pass."""
        cells = [source for source in sources if source.column]
        self._rows = {(source.path, source.column): set[int]() for source in cells}
        for source in cells:
            self._rows[source.path, source.column].add(source.offset or 0)
        tars = [source for source in sources if is_url(source.path) and source.offset is not None]
        self._passes.expect([source for source in tars if not source.column])

    @contextmanager
    def local(self, source: Source) -> Iterator[Source]:
        """The source with a local copy during the block; one that is local already stays as it is.

        Raises Rejected (missing_file, unreadable, bad_address, too_large, truncated) and UserError (a full disk).
        """
        if not is_url(source.path) and not source.column:
            yield source
            return
        with ExitStack() as stack:
            try:
                file = source.remote or self._facts(source)
                pin = stack.enter_context(self._cell(source, file) if source.column else self._fetched(source, file))
            except (Rejected, UserError):
                raise
            except Exception as error:  # every store raises its own types
                raise refusal(error) from None
            yield replace(source, remote=file, copy=str(pin.path))

    def fetch_whole(self, file: RemoteFile) -> Pin:
        """A whole file, kept until its pin is closed. Raises what the store raises."""
        name = self._name(file, "whole")
        return self.kept.pin(name) or self.kept.add(name, file.size, lambda temp: self._copy(file, temp, 0, file.size))

    def keep(self, file: RemoteFile, what: str, write: Callable[[TempFile], None]) -> Pin:
        """Keep what `write` makes of a file, under the name `what`; it is made again only if it is gone, or the file has changed."""
        name = self._name(file, what)
        return self.kept.pin(name) or self.kept.add(name, None, write)

    def keep_member(self, source: Source, file: RemoteFile, stream: BinaryIO) -> Pin:
        """Keep a tar's member, read from a stream that stands at its first byte."""
        size = source.size or 0
        name = self._name(file, f"{source.offset} {size}")
        return self.kept.add(name, size, lambda temp: _copy_stream(stream, temp, size, size))

    def close(self) -> None:
        """End the streams of tars."""
        self._passes.close()

    def _facts(self, source: Source) -> RemoteFile:
        """The facts of a file that a row names. Raises Rejected (bad_address), and what the store raises."""
        if is_url(source.path):
            self.addresses.check(source.path)
            try:
                return self.files.ask(source.path, self.addresses.hosts(source.dataset))
            except UserError as error:  # its package is missing
                raise Rejected(Reason.BAD_ADDRESS, str(error)) from None
        on_disk = os.stat(source.path)
        return StoreFile(os.path.abspath(source.path), on_disk.st_size, tag=f"{on_disk.st_mtime_ns} {on_disk.st_ino}")

    def _cell(self, source: Source, file: RemoteFile) -> Pin:
        """The bytes of a row, kept until its pin is closed; expected rows of its group are kept with it. Raises what the store raises."""

        def name(row: int) -> str:
            return self._name(file, f"{source.column} row {row}")

        asked = source.offset or 0
        with self._rows_lock, ExitStack() as stack:
            if (pin := self.kept.pin(name(asked))) is not None:
                return pin
            wanted = {asked, *self._rows.get((source.path, source.column), ())}
            path = str(stack.enter_context(self.fetch_whole(file)).path) if is_url(source.path) else source.path
            found: Pin | Rejected = Rejected(Reason.UNREADABLE, "its Parquet file ends before its row")
            for row, length, stream in stack.enter_context(group_rows(path, source.column, asked)):
                if row not in wanted:
                    continue
                kept: Pin | Rejected
                if length == NOTHING:
                    kept = Rejected(Reason.BAD_ROW, f"{source.column} of row {row + 1} holds no bytes")
                elif self._most is not None and length > self._most:
                    kept = Rejected(Reason.TOO_LARGE, self._too_large(length))
                else:
                    kept = self.kept.pin(name(row)) or self.kept.add(
                        name(row), length, partial(_copy_stream, stream, size=length, most=length)
                    )
                if row == asked:
                    found = kept
                elif isinstance(kept, Pin):
                    kept.close()
            if isinstance(found, Rejected):
                raise found
            return found

    def _too_large(self, length: int) -> str:
        return f"{length / 1e6:.1f} MB, more than the {(self._most or 0) / 1e6:.1f} MB allowed"

    def _fetched(self, source: Source, file: RemoteFile) -> Pin:
        offset, size = source.offset, source.size
        length = file.size if offset is None else size
        if self._most is not None and length is not None and length > self._most:
            raise Rejected(Reason.TOO_LARGE, self._too_large(length))
        if offset is None or size is None:
            return self.fetch_whole(file)
        name = self._name(file, f"{offset} {size}")
        if (pin := self.kept.pin(name)) is not None:
            return pin
        if not file.ranges:
            return self._passes.fetch(source, file)
        return self.kept.add(name, size, lambda temp: self._copy(file, temp, offset, size))

    def _copy(self, file: RemoteFile, temp: TempFile, begin: int, size: int | None) -> None:
        """Copy `size` bytes from `begin` on, by parts; a store without ranges gives the whole file, again for each try."""
        if size == 0:
            return
        if not file.ranges or size is None:

            def whole() -> None:
                temp.truncate()
                with file.open() as stream:
                    _copy_stream(stream, temp, size, self._most)

            attempt(whole)
            return
        while temp.size < size:
            start, length = begin + temp.size, min(_PART, size - temp.size)

            def part(start: int = start, length: int = length) -> bytes:
                with file.open() as stream:
                    stream.seek(start)
                    data = stream.read(length)
                if len(data) != length:
                    raise IncompleteError(f"{len(data)} of {length} bytes from {start} on")
                return data

            temp.write(attempt(part))

    def _name(self, file: RemoteFile, what: str) -> str:
        mark = file.checksum or file.tag or self._session
        return digest(f"{file.url}\0{mark}\0{file.size}\0{what}".encode("utf-8", "surrogatepass"))


def _copy_stream(stream: BinaryIO, temp: TempFile, size: int | None, most: int | None) -> None:
    """Copy `size` bytes, or all (at most `most`), from a stream. Raises IncompleteError, Rejected (too_large)."""
    while size is None or temp.size < size:
        data = stream.read(1 << 20 if size is None else min(1 << 20, size - temp.size))
        if not data:
            break
        temp.write(data)
        if most is not None and temp.size > most:
            raise Rejected(Reason.TOO_LARGE, f"more than the {most / 1e6:.1f} MB allowed")
    if size is not None and temp.size < size:
        raise IncompleteError(f"{temp.size} of {size} bytes")


def refusal(error: Exception) -> Rejected:
    """The rejection for what a store raised."""
    if isinstance(error, IsADirectoryError):
        return Rejected(Reason.NOT_MEDIA, "a folder")
    if isinstance(root_cause(error), RefusedAddressError):
        return Rejected(Reason.BAD_ADDRESS, reason_of(error))
    reason = Reason.MISSING_FILE if is_absent(error) else Reason.UNREADABLE
    return Rejected(reason, f"cannot be fetched: {reason_of(error)}")
