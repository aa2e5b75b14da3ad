"""List sources in remote stores: tars by their headers, folders by the store's own listing, manifests from a local copy."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, BinaryIO, cast

from mmspeed.config.places import base_name
from mmspeed.config.schema import SourceConfig
from mmspeed.data.cache.bounded import Pin
from mmspeed.data.cache.files import TempFile
from mmspeed.data.cache.stores import attempt, is_absent, open_store, protocol_of, reason_of
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.media.source import REMOTE_BYTES, RemoteFile
from mmspeed.preprocess.sources.captions import MAX_CAPTION_BYTES
from mmspeed.preprocess.sources.fetched import MediaStore
from mmspeed.preprocess.sources.folders import collect_group
from mmspeed.preprocess.sources.listing import CAPTION_ENDINGS, SourceCollector, ending, is_media
from mmspeed.preprocess.sources.tar_samples import collect_tar, head_bytes
from mmspeed.preprocess.sources.tars import UNKNOWN, Headers, TarMember, scan

_AT_ONCE = 8  # tars whose headers are read, and captions fetched, at the same time
_BATCH = 256  # captions that are asked for together


class RemoteListing:
    """Sources behind URLs, collected with a config's local store. Raises UserError, in one line, for what cannot be listed at all."""

    def __init__(self, collector: SourceCollector, media: MediaStore) -> None:
        self.collector, self.media = collector, media
        self._files: dict[str, RemoteFile] = {}

    def prepare_tars(self, urls: Sequence[str]) -> None:
        """Read the headers of several tars at the same time, before they are collected one by one."""
        if len(urls) < 2:
            return
        with ThreadPoolExecutor(_AT_ONCE) as pool, ProgressLine("tar headers", len(urls), "tar") as line:
            for pin in pool.map(lambda url: self._headers(url).close(), urls):
                line.advance()
                del pin

    def read_tar(self, config: SourceConfig, url: str) -> None:
        """Collect the samples of a tar: its headers and captions are read, and no media."""
        with self._headers(url) as pin:
            headers, at = Headers(), dict[int, int]()
            with open(pin.path, "rb") as file:
                while line := file.readline():
                    row = json.loads(line)
                    if isinstance(row, dict):
                        headers.bytes = row["bytes"]
                        headers.problem = (
                            None if row["problem"] is None else (Reason(row["problem"][0]), row["problem"][1])
                        )
                        continue
                    member = TarMember(*row[:4])
                    headers.members.append(member)
                    at[member.offset] = file.tell() - len(line)

                def head_of(member: TarMember) -> bytes:
                    file.seek(at[member.offset])
                    return base64.b64decode(json.loads(file.readline())[4])

                collect_tar(self.collector, config, url, headers, head_of, self.file(url))

    @contextmanager
    def manifest(self, url: str) -> Iterator[str]:
        """A local copy of a manifest during the block."""
        file = self.file(url)
        with reachable(url), self.media.fetch_whole(file) as pin:
            yield str(pin.path)

    def find(self, url: str) -> dict[str, dict[str, Any]]:
        """All files below a folder: their facts by their paths relative to it. Raises UserError if there are none."""
        if protocol_of(url) in ("http", "https"):
            raise UserError(
                f"data.sources: {url} names no file in .jsonl, .csv, .parquet or .tar, and folders cannot be listed over http; "
                "name tars or a manifest, or set format"
            )
        filesystem, root = open_store(url)
        with reachable(url):
            filesystem.invalidate_cache()
            listed = attempt(lambda: filesystem.find(root, detail=True))
        root = root.rstrip("/")
        files = {name[len(root) :].lstrip("/"): info for name, info in listed.items() if name.startswith(root)}
        files.pop("", None)
        if not files:
            raise UserError(f"data.sources: {url} does not exist or is empty; correct the address")
        return files

    def read_folder(self, config: SourceConfig, url: str, files: dict[str, dict[str, Any]]) -> None:
        """Collect media beside captions of the same stem, in all folders that are not hidden."""
        groups: dict[str, list[str]] = {}
        hidden: set[str] = set()
        for name in sorted(files):
            parts = name.split("/")
            depth = next((depth for depth, part in enumerate(parts, 1) if part.startswith(".")), 0)
            if depth:  # counted once, as in a local folder
                hidden.add("/".join(parts[:depth]))
            else:
                groups.setdefault(name[: len(name) - len(ending(name))], []).append(name)
        self.collector.files += len(hidden) + sum(map(len, groups.values()))
        self.collector.ignored += len(hidden)
        wanted = [
            n for names in groups.values() if any(map(is_media, names)) for n in names if ending(n) in CAPTION_ENDINGS
        ]
        stored = StoredFiles(url, files, _Texts(url, files, wanted), self.media)
        for names in groups.values():
            collect_group(self.collector, stored, names, config.caption_column, base_name(url))

    def file(self, url: str) -> RemoteFile:
        """The facts of a tar or manifest, asked once."""
        if url not in self._files:
            with reachable(url):
                file = self.media.files.ask(url, self.media.addresses.hosts(self.collector.dataset))
            self._files[url] = replace(file, listed=True)
        return self._files[url]

    def _headers(self, url: str) -> Pin:
        """A file of the local store with a tar's headers and each member's first bytes."""
        file = self.file(url)
        with reachable(url):
            return self.media.keep(file, "headers", lambda temp: attempt(lambda: _write_headers(file, temp)))


def _write_headers(file: RemoteFile, temp: TempFile) -> None:
    """Write a line of JSON for each member of a tar (name, offset, size, kind, first bytes), and a last one for the tar."""
    temp.truncate()
    headers = Headers()
    size = UNKNOWN if file.size is None else file.size
    with file.open(REMOTE_BYTES) as opened:
        stream = opened if file.ranges else cast(BinaryIO, ForwardFile(opened))
        for member in scan(stream, size, headers):
            count = head_bytes(member)
            if count:
                stream.seek(member.offset)
            head = stream.read(count) if count else b""
            row = [member.name, member.offset, member.size, member.kind, base64.b64encode(head).decode()]
            temp.write(f"{json.dumps(row)}\n".encode())
        length = size if size != UNKNOWN else stream.tell()
    problem = None if headers.problem is None else [headers.problem[0].value, headers.problem[1]]
    temp.write(f"{json.dumps({'bytes': length, 'problem': problem})}\n".encode())


class ForwardFile(io.RawIOBase):
    """A stream that can only be read on: `seek` reads what it passes over."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._at = stream, 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, to: int, whence: int = 0) -> int:
        if whence or to < self._at:
            raise OSError("a stream cannot be read backwards")
        while self._at < to and self.read(min(1 << 20, to - self._at)):
            pass
        return self._at

    def read(self, size: int = -1) -> bytes:
        """`size` bytes, fewer only at the end."""
        parts, left = [], size
        while left and (data := self._stream.read(left)):
            parts.append(data)
            left -= len(data)
            self._at += len(data)
        return b"".join(parts)


class _Texts:
    """The first bytes of caption files, fetched many at a time in the order in which they are read."""

    def __init__(self, url: str, files: dict[str, dict[str, Any]], names: Sequence[str]) -> None:
        self._filesystem, _ = open_store(url)
        self._paths = {name: files[name]["name"] for name in names}
        self._order = list(names)
        self._next = 0
        self._ready: dict[str, bytes | Exception] = {}

    def read(self, name: str) -> bytes | Exception:
        """The first bytes of a file, or why it cannot be read."""
        while name not in self._ready:
            batch = self._order[self._next : self._next + _BATCH]
            self._next += len(batch)
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                self._ready.update(zip(batch, pool.map(self._fetch, batch), strict=True))
        return self._ready.pop(name)

    def _fetch(self, name: str) -> bytes | Exception:
        try:
            return attempt(
                lambda: bytes(self._filesystem.cat_file(self._paths[name], start=0, end=MAX_CAPTION_BYTES + 1))
            )
        except Exception as error:  # every store raises its own types
            return error


class StoredFiles:
    """The files of a folder in a store. `files`: the store's facts of each."""

    def __init__(self, url: str, files: Mapping[str, dict[str, Any]], texts: _Texts, media: MediaStore) -> None:
        self.url, self.files, self.texts, self.media = url.rstrip("/"), files, texts, media

    def check(self, name: str) -> None:
        """Pass: the store lists files alone."""

    def caption(self, name: str) -> bytes:
        data = self.texts.read(name)
        if isinstance(data, Exception):
            raise Rejected(Reason.UNREADABLE, reason_of(data))
        return data

    def medium(self, name: str) -> tuple[str, RemoteFile]:
        place = f"{self.url}/{name}"
        return place, self.media.files.facts(place, self.files[name], listed=True)


@contextmanager
def reachable(url: str) -> Iterator[None]:
    """Turn what a store raises inside the block into a UserError that names the URL and the reason."""
    try:
        yield
    except UserError:
        raise
    except Rejected as error:
        raise UserError(f"data.sources: {url}: {error.detail}") from None
    except Exception as error:  # every store raises its own types
        hint = "correct the address" if is_absent(error) else "is the address right, and can this machine reach it?"
        why = "does not exist" if is_absent(error) else f"cannot be read ({reason_of(error)})"
        raise UserError(f"data.sources: {url} {why}; {hint}") from None


def row_place(manifest: str, media: str) -> str:
    """The URL that a row of a remote manifest names, relative to the manifest's folder. Raises ValueError for files of this machine."""
    if "://" in media:
        if protocol_of(media) in ("file", "local") and protocol_of(manifest) != protocol_of(media):
            raise ValueError("a remote manifest may not name files of this machine")
        return media
    if media.startswith("/"):
        raise ValueError("a remote manifest may not name files of this machine")
    folder = manifest.partition("?")[0] if protocol_of(manifest) in ("http", "https") else manifest
    return f"{folder.rpartition('/')[0]}/{media.removeprefix('./')}"
