"""Shards: plain tar files in the webdataset format, `<key>.safetensors` beside `<key>.json`.

Their headers record neither writer nor time, so that an entry has the same bytes whoever wrote it.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmspeed.errors import UserError

from .files import TempFile

_BLOCK = tarfile.BLOCKSIZE


@dataclass(frozen=True)
class ShardMember:
    """One entry of a shard: its safetensors payload with the offset, and its parsed sidecar."""

    key: str
    offset: int
    payload: bytes
    sidecar: dict[str, Any]


def tar_member(name: str, payload: bytes) -> bytes:
    """Header, payload and padding of one file in a tar; they depend only on name and payload."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(payload), 0o644
    header = info.tobuf(tarfile.USTAR_FORMAT)
    return b"".join((header, payload, bytes(-len(payload) % _BLOCK)))


class ShardWriter:
    """A shard in progress: a locked temporary file in its folder, to which `seal` gives the next free number."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._temp = TempFile(folder)
        self._hash = hashlib.sha256()

    @property
    def size(self) -> int:
        """Bytes written so far."""
        return self._temp.size

    @property
    def path(self) -> Path:
        """The path of the shard while it is in progress."""
        return self._temp.path

    @property
    def sha256(self) -> str:
        """Hexadecimal digest of the bytes written so far."""
        return self._hash.hexdigest()

    def append(self, key: str, payload: bytes, sidecar: bytes) -> int:
        """Append one entry and return the offset of its payload. On an error the shard is unchanged."""
        offset = self._temp.size + _BLOCK
        self._write(tar_member(f"{key}.safetensors", payload) + tar_member(f"{key}.json", sidecar))
        return offset

    def _write(self, data: bytes) -> None:
        self._temp.write(data)
        self._hash.update(data)  # after the write: a full disk leaves both as they were

    def sync(self) -> None:
        """Make everything appended so far durable, and visible to readers on other machines."""
        self._temp.sync()

    def seal(self) -> Path:
        """Make the shard durable under the next free number of its folder. Until `release` it stays locked and keeps its temporary name.

        Writers in several processes never take the same number: a link fails where the name exists.
        """
        self._write(bytes(2 * _BLOCK))
        numbers = [int(path.stem) for path in self.folder.glob("*.tar") if path.stem.isdigit()]
        number = max(numbers, default=-1) + 1
        while not self._temp.link(target := self.folder / f"{number:06d}.tar"):
            number += 1
        return target

    def release(self) -> None:
        """Release the lock of the sealed shard, once its index is written, and remove its temporary name."""
        self._temp.path.unlink(missing_ok=True)
        self._temp.release()

    def discard(self) -> None:
        """Delete the unsealed shard."""
        self._temp.discard()


def shard_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file, read in pieces."""
    result = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            result.update(block)
    return result.hexdigest()


def read_shard(path: Path) -> Iterator[ShardMember]:
    """Yield the entries of a sealed shard, in order. Raises UserError if the file is not a complete shard."""
    damaged = UserError(
        f"shard {path} is damaged; delete it and run mmspeed preprocess again: it encodes only these entries again"
    )
    try:
        # tarfile treats an archive that is cut in the middle of a later header as one that ends there.
        if _tail(path, 2 * _BLOCK) != bytes(2 * _BLOCK):
            raise damaged
        with tarfile.open(path, "r:") as tar:
            while (first := tar.next()) is not None:
                second = tar.next()
                key = Path(first.name).stem
                names = (f"{key}.safetensors", f"{key}.json")
                if second is None or (first.name, second.name) != names:
                    raise damaged
                yield ShardMember(key, first.offset_data, _read(tar, first), json.loads(_read(tar, second)))
    except (tarfile.TarError, ValueError, OSError) as error:
        raise damaged from error


def _read(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(info)
    if file is None:
        raise tarfile.ReadError(f"{info.name} is not a file")
    data = file.read()
    if len(data) != info.size:
        raise tarfile.ReadError(f"{info.name} is cut off")
    return data


def _tail(path: Path, count: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, os.path.getsize(path) - count))
        return file.read()
