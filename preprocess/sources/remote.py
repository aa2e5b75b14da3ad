"""Facts of remote media: size, checksum, a tag that changes with the content, and whether the store answers ranges."""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

from mmspeed.data.cache.stores import attempt, open_store, protocol_of
from mmspeed.media.source import RemoteFile

_CHECKSUMS = ("sha256", "md5", "md5Hash", "content_md5", "Content-MD5", "checksum", "blob_id", "ETag", "etag")
_TAGS = ("ETag", "etag", "Content-MD5", "Digest", "mtime", "LastModified", "last_modified", "Last-Modified", "created")
_HEX = re.compile(r"[0-9a-f]{32,128}(-\d{1,5})?")  # a digest; of S3's files in parts, with their number
_HTTP = ("http", "https")


@dataclass(frozen=True, slots=True)
class StoreFile(RemoteFile):
    """A file behind a URL of a store that fsspec knows. `hosts`: that may be asked beside public ones (`open_store`)."""

    hosts: tuple[str, ...] = ()

    def open(self, block_bytes: int = 0) -> BinaryIO:
        filesystem, path = open_store(self.url, self.hosts)
        if not self.ranges:
            return cast(BinaryIO, filesystem.open(path, "rb", block_size=0))
        known = {"size": self.size} if protocol_of(self.url) in _HTTP else {}
        cache = "readahead" if block_bytes else "none"
        return cast(BinaryIO, filesystem.open(path, "rb", block_size=block_bytes or 1, cache_type=cache, **known))


class RemoteFiles:
    """Ask stores about files. Threads may share it."""

    def __init__(self) -> None:
        self._ranges: dict[str, bool] = {}  # by host: whether it answers ranges
        self._lock = threading.Lock()

    def ask(self, url: str, hosts: tuple[str, ...] = ()) -> RemoteFile:
        """The facts of a file; `hosts` may be asked beside public ones. Raises UserError (no such protocol or package), and what the store raises."""
        filesystem, path = open_store(url, hosts)
        info = attempt(lambda: filesystem.info(path))
        if info.get("type") == "directory":
            raise IsADirectoryError(f"{url} is a folder")
        return self.facts(url, info, hosts=hosts)

    def facts(self, url: str, info: dict[str, Any], listed: bool = False, hosts: tuple[str, ...] = ()) -> RemoteFile:
        """The facts in fsspec's `info` of a file."""
        size = info.get("size")
        size = size if isinstance(size, int) else None
        tag = next((str(info[name]) for name in _TAGS if info.get(name)), "")
        return StoreFile(url, size, _checksum(info), tag, self._answers_ranges(url, size, hosts), listed, hosts)

    def _answers_ranges(self, url: str, size: int | None, hosts: tuple[str, ...]) -> bool:
        """True if the store gives parts of a file; HTTP servers are asked, once each, by a part that begins behind the first byte."""
        if protocol_of(url) not in _HTTP:
            return size is not None
        if size is None or size < 3:
            return False
        host = urlsplit(url).netloc
        with self._lock:
            if host not in self._ranges:
                filesystem, path = open_store(url, hosts)

                def part() -> bool:
                    try:
                        with filesystem.open(path, "rb", block_size=1, cache_type="none", size=size) as file:
                            file.seek(1)
                            return len(file.read(1)) == 1
                    except ValueError:  # fsspec's word for an answer that is the whole file
                        return False

                self._ranges[host] = attempt(part)
            return self._ranges[host]


def _checksum(info: dict[str, Any]) -> str:
    """The checksum in a store's facts; a tag that is no digest, as web servers make of time and size, is none."""
    large: Any = info.get("lfs")  # of the hub
    candidates = [getattr(large, "sha256", None) or (large.get("sha256") if isinstance(large, dict) else None)]
    candidates += [info.get(name) for name in _CHECKSUMS]
    for value in candidates:
        text = str(value).strip('"').lower() if isinstance(value, str) and not value.startswith("W/") else ""
        if _HEX.fullmatch(text):
            return text
    return ""
