"""Read a cache behind a URL (s3://, http://, anything that fsspec opens).

Its tables are copied to a local folder that many processes may share; payloads are fetched on demand, by range, and kept there.

    <folder>/cache.json, index/, rejects/, codec/, sources/    copies; `remote.json` records the remote files
    <folder>/payloads/<two digits>/<section>-<key>-<checksum>
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, TypeVar

from mmspeed.config.places import mirror_folder
from mmspeed.errors import UserError
from mmspeed.log import get_logger

from .files import disk_errors, exclusive, private_file, write_whole
from .index import ENTRIES_NAME, SAMPLES_NAME, IndexFiles, compile_index, digest_of_files
from .index_reader import Tables, damaged_index, try_open
from .made_from import FOLDER as SOURCES
from .payloads import PayloadLocation, ShortError, map_copy
from .stores import attempt, open_store, reason_of

Result = TypeVar("Result")
_TAGS = ("ETag", "etag", "md5", "mtime", "LastModified", "last_modified", "created")
_MANIFEST = "remote.json"


class RemoteStore:
    """Tables and payloads of a remote cache, from the local folder or over the network.

    Args:
        url: the cache's URL.
        folder: local folder in which the cache's folder is created; None: see `mirror_folder`.
        limit: bytes of payloads to keep; beyond it the least recently used are deleted.

    Attributes:
        requests, fetched_bytes: payloads requested over the network, and their bytes; `hits`: payloads read locally.
    """

    def __init__(self, url: str, folder: str | Path | None = None, limit: int = 64_000_000_000) -> None:
        self.url, self.limit = url.rstrip("/"), limit
        self.folder = mirror_folder(url, folder)
        self.requests = self.fetched_bytes = self.hits = 0
        self._used: int | None = None  # bytes of payloads kept, as far as this process knows
        self._fresh = 0  # bytes kept since the folder was last scanned
        self._warned = False  # a warning that nothing can be kept was logged
        self._opened: tuple[int, Any, str] | None = None

    # -- tables -----------------------------------------------------------------------------------------------------

    def open_tables(self) -> Tables:
        """Open the current index of the remote cache. Raises UserError if there is none, or it cannot be reached."""
        self.copy_tables(("rejects", "codec", SOURCES))
        remote = self._list("index")
        parquet = {name: row for name, row in remote.items() if name.endswith(".parquet")}
        files = digest_of_files([[name.split("/")[-1], row[0]] for name, row in parquet.items()])
        listing, digest = IndexFiles(files, ""), [digest_of_files([[name, *row] for name, row in parquet.items()])]
        with self._lock(), disk_errors(self.folder):
            known = self._manifest()
            tables = try_open(self.folder / "index", listing) if known.get("index") == digest else None
            tables = tables or self._copy_index(remote, parquet, listing, known)
            known["index"] = digest
            self._remember(known)
        return tables

    def copy_tables(self, folders: Sequence[str]) -> Path:
        """Copy `cache.json` and the files in these folders of the cache, as far as they have changed; returns the local folder.

        Files that are gone there are deleted here. Raises UserError if there is no cache, or it cannot be reached.
        """
        remote = self._list("cache.json")
        if not remote:
            raise UserError(f"no dataset cache at {self.url}; build one in a folder and copy it there")
        for folder in folders:
            remote |= self._list(folder)
        with self._lock(), disk_errors(self.folder):
            known = self._manifest()
            for name, row in remote.items():
                self._copy(name, row, known)
            for folder in folders:
                for path in (self.folder / folder).glob("[!.]*"):
                    if f"{folder}/{path.name}" not in remote:
                        path.unlink(missing_ok=True)
            self._remember(known)
        return self.folder

    def table(self, name: str) -> Path:
        """The local copy of a table of the index, such as `index/texts-000000.parquet`."""
        row = self._list("index").get(name)
        if row is None:
            raise UserError(f"cache {self.url} has no {name} any more; open it again")
        with self._lock(), disk_errors(self.folder):
            known = self._manifest()
            self._copy(name, row, known)
            self._remember(known)
        return self.folder / name

    def _copy_index(
        self,
        remote: dict[str, list[Any]],
        parquet: dict[str, list[Any]],
        listing: IndexFiles,
        known: dict[str, list[Any]],
    ) -> Tables:
        """Open the remote cache's compiled index if it is up to date, else one compiled here from its Parquet files."""
        compiled = [f"index/{name}" for name in (ENTRIES_NAME, SAMPLES_NAME)]
        if all(name in remote for name in compiled):
            for name in compiled:
                self._copy(name, remote[name], known)
            if (tables := try_open(self.folder / "index", listing)) is not None:
                return tables
        for name, row in parquet.items():
            self._copy(name, row, known)
        for path in (self.folder / "index").glob("[!.]*.parquet"):
            if f"index/{path.name}" not in parquet:
                path.unlink(missing_ok=True)
        for name in compiled:
            known.pop(name, None)
        compile_index(self.folder)
        if (tables := try_open(self.folder / "index", listing)) is None:
            raise damaged_index(self.folder / "index" / ENTRIES_NAME)
        return tables

    def _list(self, name: str) -> dict[str, list[Any]]:
        """The files in a folder of the remote cache (or the single file), each with its size and a tag that changes with the content."""

        def ask() -> list[dict[str, Any]]:
            filesystem, root = self._filesystem()
            filesystem.invalidate_cache()
            try:
                path = f"{root}/{name}"
                infos = [filesystem.info(path)] if "." in name else filesystem.ls(path, detail=True)
            except FileNotFoundError:
                return []
            return [row for row in infos if row.get("type") != "directory"]

        folder = "" if "." in name else f"{name}/"
        rows = self._try(ask, f"cannot list {name} of the cache {self.url}")
        listed = {f"{folder}{row['name'].rstrip('/').split('/')[-1]}": row for row in rows}
        return {
            name: [row.get("size"), next((str(row[tag]) for tag in _TAGS if row.get(tag)), "")]
            for name, row in listed.items()
            if not name.split("/")[-1].startswith(".")
        }

    def _copy(self, name: str, row: list[Any], known: dict[str, list[Any]]) -> None:
        """Copy one file to the local folder unless it is up to date."""
        path = self.folder / name
        if known.get(name) == row and path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        with private_file(path) as temp:

            def copy() -> None:
                filesystem, root = self._filesystem()
                filesystem.get_file(f"{root}/{name}", str(temp))

            self._try(copy, f"cannot fetch {name} of the cache {self.url}")
        known[name] = row

    def _manifest(self) -> dict[str, list[Any]]:
        try:
            known = json.loads((self.folder / _MANIFEST).read_text(encoding="utf-8"))
            return known if isinstance(known, dict) else {}
        except (OSError, ValueError):
            return {}

    def _remember(self, known: dict[str, list[Any]]) -> None:
        if known != self._manifest():
            write_whole(self.folder / _MANIFEST, json.dumps(known, indent=1, sort_keys=True).encode())

    def _lock(self) -> AbstractContextManager[None]:
        """Hold the lock under which one process changes the local folder's tables or deletes payloads."""
        return exclusive(self.folder / ".mirror.lock")

    # -- payloads ---------------------------------------------------------------------------------------------------

    def view(self, section: str, key: str, place: PayloadLocation) -> memoryview:
        """A payload, mapped from the local folder; it is fetched first if it is absent."""
        path = self._path(section, key, place)
        try:
            payload = map_copy(path)
            if len(payload) != place.size:
                raise ShortError
            os.utime(path)
            self.hits += 1
            return memoryview(payload)
        except (OSError, ShortError):
            return self.again(section, key, place)

    def again(self, section: str, key: str, place: PayloadLocation) -> memoryview:
        """Fetch a payload; it is kept if its checksum is right, and otherwise returned for the caller to refuse."""
        payload = self._try(lambda: self._range(place), f"cannot fetch {section} {key} of the cache {self.url}")
        if place.fits(payload):
            self._keep(self._path(section, key, place), payload)
        return memoryview(bytearray(payload))

    def _range(self, place: PayloadLocation) -> bytes:
        filesystem, root = self._filesystem()
        self.requests += 1
        payload: bytes = filesystem.cat_file(f"{root}/{place.shard}", place.offset, place.offset + place.size)
        if len(payload) != place.size:
            raise OSError(f"{len(payload)} of {place.size} bytes of {place.shard}")
        self.fetched_bytes += len(payload)
        return payload

    def _path(self, section: str, key: str, place: PayloadLocation) -> Path:
        return self.folder / "payloads" / key[:2] / f"{section}-{key}-{place.checksum.hex()}"

    def _keep(self, path: Path, payload: bytes) -> None:
        """Write a payload atomically. It need not be durable: one that a crash damages is detected and fetched again."""
        if len(payload) > self.limit:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with private_file(path) as temp:
                temp.write_bytes(payload)
        except OSError as error:
            if not self._warned:
                get_logger("data").warning("payloads are not kept in %s: %s", self.folder, error)
            self._warned = True
            return
        self._fresh += len(payload)
        if self._used is not None:
            self._used += len(payload)
        # Others write here too, so the folder is scanned again after some bytes.
        if self._used is None or self._used > self.limit or self._fresh > self.limit // 16:
            self._clear_out()

    def _clear_out(self) -> None:
        """Delete the least recently used payloads, down to 15 / 16 of the limit, if the limit is exceeded."""
        with self._lock():
            files = []
            for path in (self.folder / "payloads").glob("*/*"):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    files.append((status.st_mtime_ns, status.st_size, path))
            self._used, self._fresh = sum(size for _, size, _ in files), 0
            if self._used <= self.limit:
                return
            for _, size, path in sorted(files):
                if self._used <= self.limit - self.limit // 16:
                    return
                path.unlink(missing_ok=True)
                self._used -= size

    # -- network ----------------------------------------------------------------------------------------------------

    def _filesystem(self) -> tuple[Any, str]:
        """This process's fsspec file system and the cache's path on it: connections do not survive a fork."""
        if self._opened is None or self._opened[0] != os.getpid():
            filesystem, root = open_store(self.url)
            self._opened = os.getpid(), filesystem, root.rstrip("/")
        return self._opened[1], self._opened[2]

    def _try(self, action: Callable[[], Result], what: str) -> Result:
        """The result of `action`, after a few tries. Raises UserError."""
        try:
            return attempt(action)
        except UserError:
            raise
        except Exception as error:  # every store raises its own types
            raise UserError(
                f"{what} ({reason_of(error)}); is the address right, and can this machine reach it?"
            ) from error
