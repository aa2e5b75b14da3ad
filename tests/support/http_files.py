"""A real HTTP server of the files of a folder, with and without ranges, that can fail as servers do."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass
class FileServer:
    """A server of files: its faults, and counts of what it sent.

    `ranges`: it answers them. `checksum`: it sends this ETag. `broken`: by file name, how many more times the connection dies in the
    middle. `refused`: by file name, the status. `circular`: names that are redirected to themselves; `moved`: by file name, the address that it is
    redirected to. `sized`: it states lengths. `delay`: seconds
    before it answers.
    """

    url: str
    ranges: bool = True
    checksum: str = ""
    sized: bool = True
    delay: float = 0.0
    broken: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    circular: tuple[str, ...] = ()
    moved: dict[str, str] = field(default_factory=dict)
    requests: list[tuple[str, str]] = field(default_factory=list)  # method and file name
    sent: dict[str, int] = field(default_factory=dict)  # bytes of bodies by file name

    def gets(self, name: str) -> int:
        """The number of GET requests for a file."""
        return self.requests.count(("GET", name))


@contextmanager
def served(folder: Path, **how: object) -> Iterator[FileServer]:
    """Serve a folder during the block."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._answer(False)

        def do_GET(self) -> None:
            self._answer(True)

        def log_message(self, format: str, *args: object) -> None:
            return

        def _answer(self, body: bool) -> None:
            time.sleep(server.delay)
            name = unquote(urlsplit(self.path).path).lstrip("/")
            with lock:
                server.requests.append((self.command, name))
                dies = body and server.broken.get(name, 0) > 0
                if dies:
                    server.broken[name] -= 1
            status = 302 if name in (*server.circular, *server.moved) else server.refused.get(name, 0)
            status = status or (200 if (folder / name).is_file() else 404)
            if status != 200:
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", server.moved.get(name, self.path))
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data = (folder / name).read_bytes()
            asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")) if server.ranges else None
            begin, end = (
                (int(asked[1]), min(int(asked[2] or len(data) - 1) + 1, len(data))) if asked else (0, len(data))
            )
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
            if server.checksum:
                self.send_header("ETag", f'"{server.checksum}"')
            if server.sized:
                self.send_header("Content-Length", str(end - begin))
            else:
                self.send_header("Connection", "close")
            self.end_headers()
            if body:
                part = data[begin : (begin + end) // 2 if dies else end]
                try:
                    self.wfile.write(part)
                except OSError:  # the client wanted no more
                    self.close_connection = True
                with lock:
                    server.sent[name] = server.sent.get(name, 0) + len(part)
            if dies or not server.sized:
                self.close_connection = True

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    server = FileServer(f"http://127.0.0.1:{http.server_address[1]}", **how)  # type: ignore[arg-type]
    thread = threading.Thread(target=http.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()
