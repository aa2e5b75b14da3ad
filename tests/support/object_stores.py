"""Servers of S3 and of the Hugging Face hub on this machine, which hold the files of a folder, for their own clients to speak to.

Both answer ranges. Listings come in pages of a few names, as those of large stores do.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 3  # names of a listing's page
COMMIT = "0123456789abcdef0123456789abcdef01234567"
DATED = "2026-01-01T00:00:00.000Z"


@dataclass
class ObjectStore:
    """A running server: its address, files that it refuses with a status, files whose next answers break off, and what it sent."""

    url: str
    refused: dict[str, int] = field(default_factory=dict)
    broken: dict[str, int] = field(
        default_factory=dict
    )  # by name, how many more times the connection dies in the middle
    requests: list[str] = field(default_factory=list)  # method and path
    sent: dict[str, int] = field(default_factory=dict)  # bytes of contents by name


class _Handler(BaseHTTPRequestHandler):
    """What both have in common: answers, and contents with ranges."""

    protocol_version = "HTTP/1.1"
    folder: Path
    store: ObjectStore
    lock: threading.Lock

    def log_message(self, format: str, *args: object) -> None:
        return

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        raise NotImplementedError

    def note(self) -> tuple[str, dict[str, str]]:
        """The path and the query of a request, which is noted."""
        parts = urlsplit(self.path)
        with self.lock:
            self.store.requests.append(f"{self.command} {unquote(parts.path)}")
        query = parse_qs(parts.query, keep_blank_values=True)
        return unquote(parts.path).lstrip("/"), {name: values[0] for name, values in query.items()}

    def answer(self, status: int, body: bytes = b"", kind: str = "application/xml", **headers: str) -> None:
        """Answer, without the body where the head alone is asked for."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def content(self, name: str, **headers: str) -> None:
        """Answer with a file's bytes, or the range of them that is asked for; a broken one ends in its middle."""
        data = (self.folder / name).read_bytes()
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        begin, end = (int(asked[1]), min(int(asked[2] or len(data)) + 1, len(data))) if asked else (0, len(data))
        with self.lock:
            dies = self.command == "GET" and self.store.broken.get(name, 0) > 0
            self.store.broken[name] = self.store.broken.get(name, 0) - dies
        self.send_response(206 if asked else 200)
        if asked:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        for header, value in {"Content-Length": str(end - begin), "Accept-Ranges": "bytes", **headers}.items():
            self.send_header(header.replace("_", "-"), value)
        self.end_headers()
        if self.command == "GET":
            part = data[begin : (begin + end) // 2 if dies else end]
            self.wfile.write(part)
            with self.lock:
                self.store.sent[name] = self.store.sent.get(name, 0) + len(part)
        self.close_connection |= dies


class _S3(_Handler):
    """The bucket named `bucket`; path-style addresses; signatures are not examined."""

    def do_GET(self) -> None:
        name, query = self.note()
        bucket, _, key = name.partition("/")
        if bucket != "bucket":
            return self._error(404, "NoSuchBucket")
        if status := self.store.refused.get(key):
            return self._error(status, "AccessDenied" if status == 403 else "SlowDown")
        if not key and self.command == "GET":
            return self.answer(200, self._listing(query).encode())
        if not key:
            return self.answer(200)
        if not (self.folder / key).is_file():
            return self._error(404, "NoSuchKey")
        return self.content(key, ETag=_tag(self.folder / key), Last_Modified="Thu, 01 Jan 2026 00:00:00 GMT")

    def _error(self, status: int, code: str) -> None:
        self.answer(status, f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode())

    def _listing(self, query: dict[str, str]) -> str:
        """A page of ListObjectsV2."""
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        names = sorted(str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())
        entries: dict[str, str] = {}
        for key in (name for name in names if name.startswith(prefix)):
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                common = prefix + rest.partition(delimiter)[0] + delimiter
                entries[common] = f"<CommonPrefixes><Prefix>{escape(common)}</Prefix></CommonPrefixes>"
            else:
                path = self.folder / key
                entries[key] = (
                    f"<Contents><Key>{escape(key)}</Key><LastModified>{DATED}</LastModified><ETag>{escape(_tag(path))}</ETag>"
                    f"<Size>{path.stat().st_size}</Size><StorageClass>STANDARD</StorageClass></Contents>"
                )
        begin = int(query.get("continuation-token") or 0)
        shown = list(entries.values())[begin : begin + PAGE]
        more = begin + PAGE < len(entries)
        token = f"<NextContinuationToken>{begin + PAGE}</NextContinuationToken>" if more else ""
        return (
            f"<ListBucketResult><Name>bucket</Name><Prefix>{escape(prefix)}</Prefix><KeyCount>{len(shown)}</KeyCount>"
            f"<MaxKeys>{PAGE}</MaxKeys><IsTruncated>{str(more).lower()}</IsTruncated>{token}{''.join(shown)}</ListBucketResult>"
        )


class _Hub(_Handler):
    """The dataset owner/name, of which the folder is the main branch; large files have the hub's own checksum."""

    def do_GET(self) -> None:
        name, query = self.note()
        if match := re.fullmatch(r"datasets/owner/name/resolve/[^/]+/(.+)", name):
            path = self.folder / match[1]
            if status := self.store.refused.get(match[1]):
                return self.answer(status, b"{}", "application/json")
            if not path.is_file():
                return self.answer(404, b"{}", "application/json", X_Error_Code="EntryNotFound")
            return self.content(match[1], ETag=_tag(path), X_Repo_Commit=COMMIT)
        if match := re.fullmatch(r"api/datasets/owner/name/tree/[^/]+/?(.*)", name):
            return self._tree(match[1], query)
        if re.fullmatch(r"api/datasets/owner/name(/revision/[^/]+)?", name):
            info = {"id": "owner/name", "sha": COMMIT, "tags": [], "private": False, "downloads": 0, "likes": 0}
            return self._json(info)
        return self.answer(404, b"{}", "application/json", X_Error_Code="RepoNotFound")

    def do_POST(self) -> None:
        name, _ = self.note()
        asked = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode()).get("paths", [])
        if not name.startswith("api/datasets/owner/name/paths-info/"):
            return self.answer(404, b"{}", "application/json", X_Error_Code="RepoNotFound")
        return self._json([self._entry(path) for path in asked if (self.folder / path).exists()])

    def _json(self, value: object, **headers: str) -> None:
        self.answer(200, json.dumps(value).encode(), "application/json", **headers)

    def _entry(self, name: str) -> dict[str, object]:
        path = self.folder / name
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": COMMIT, "size": 0}
        data = path.read_bytes()
        entry: dict[str, object] = {
            "type": "file",
            "path": name,
            "size": len(data),
            "oid": hashlib.sha1(data).hexdigest(),
        }
        if len(data) > 10_000:
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
        return entry

    def _tree(self, under: str, query: dict[str, str]) -> None:
        """A page of a folder's entries, with those of its folders if asked."""
        top = self.folder / under
        if not top.is_dir():
            return self.answer(404, b"{}", "application/json", X_Error_Code="EntryNotFound")
        paths = top.rglob("*") if query.get("recursive", "").lower() in ("true", "1") else top.iterdir()
        names = sorted(str(path.relative_to(self.folder)) for path in paths)
        begin = int(query.get("cursor") or 0)
        headers = {}
        if begin + PAGE < len(names):
            path = urlsplit(self.path).path
            following = f"{self.store.url}{path}?recursive={query.get('recursive', '')}&cursor={begin + PAGE}"
            headers["Link"] = f'<{following}>; rel="next"'
        return self._json([self._entry(name) for name in names[begin : begin + PAGE]], **headers)


def _tag(path: Path) -> str:
    """The tag of a file: the MD5 of its content, in quotes, as S3 makes it of files that were sent in one part."""
    return f'"{hashlib.md5(path.read_bytes()).hexdigest()}"'


@contextmanager
def s3_store(folder: Path) -> Iterator[ObjectStore]:
    """Serve a folder as the bucket `bucket` of S3 during the block."""
    with _served(_S3, folder) as store:
        yield store


@contextmanager
def hub_store(folder: Path) -> Iterator[ObjectStore]:
    """Serve a folder as the hub's dataset owner/name during the block."""
    with _served(_Hub, folder) as store:
        yield store


@contextmanager
def _served(kind: type[_Handler], folder: Path) -> Iterator[ObjectStore]:
    store = ObjectStore("")
    handler = type("Handler", (kind,), {"folder": folder, "store": store, "lock": threading.Lock()})
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    http.daemon_threads = True
    store.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield store
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
