"""A source: the location of its bytes, a file object that reads them, and an id of its content."""

from __future__ import annotations

import hashlib
import io
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, cast

from mmspeed.media.rejections import Reason, Rejected, in_words

Kind = Literal["video", "image"]
Split = Literal["train", "val"]
SAMPLED_ABOVE = 16 << 20  # bytes; of larger files a content id reads some blocks
_BLOCKS, _BLOCK_BYTES = 16, 64 << 10
REMOTE_BYTES = 32 << 10  # read at a time of a remote file where a few bytes are wanted


@dataclass(frozen=True, slots=True)
class RemoteFile(ABC):
    """A file behind a URL.

    `size` in bytes; None: the store does not say. `checksum`: of the content, by the store; empty: it has none. `tag` changes with
    the content; empty: unknown. `ranges`: parts of it can be read. `listed`: these facts stood in a listing, before it was fetched.
    """

    url: str
    size: int | None = None
    checksum: str = ""
    tag: str = ""
    ranges: bool = False
    listed: bool = False

    @abstractmethod
    def open(self, block_bytes: int = 0) -> BinaryIO:
        """Open it: by ranges of `block_bytes` or as much as is read; where there are none, as a stream from its first byte on.

        Raises what the store raises.
        """


@dataclass(frozen=True, slots=True)  # slots: there may be ten million
class Source:
    """One video or image with its captions.

    `name` is unique and readable: the path relative to the source's root, or `set.tar!member`. `offset` and `size` give
    the position of a tar member's bytes in `path`; both are None for a plain file. `kind` is a guess by the name's ending.
    `dataset` is the name of the configured source it belongs to (`DataConfig.dataset_names`), one object for all of them.
    With a `column` the bytes are those of a Parquet file's row number `offset`, which a local copy has.
    If `path` is a URL, `remote` has the facts that the listing knows, and `copy` is the local file while there is one.
    `roles` are the files of further roles (`mmspeed.config.roles`), each with its own name.
    """

    name: str
    path: str
    offset: int | None
    size: int | None
    kind: Kind
    captions: tuple[str, ...]
    split: Split
    dataset: str = ""
    remote: RemoteFile | None = None
    copy: str = ""
    column: str = ""
    roles: tuple[tuple[str, Source], ...] = ()

    @property
    def files(self) -> tuple[Source, ...]:
        """The source itself and those of its further roles."""
        return (self, *(other for _, other in self.roles))

    def open(self) -> BinaryIO:
        """Open the media's bytes as a seekable file; a remote one without a copy by ranges. Raises OSError."""
        if self.copy:
            return open(self.copy, "rb")
        if self.remote is not None:
            size = self.remote.size if self.size is None else self.size
            if not self.remote.ranges or size is None:
                raise OSError("its store answers no ranges")
            try:
                file = self.remote.open(REMOTE_BYTES)
            except Exception as error:  # every store raises its own types
                raise OSError(in_words(error)) from error
            return cast(BinaryIO, io.BufferedReader(FileSlice(file, self.offset or 0, size), 1 << 16))
        if self.offset is None or self.size is None:
            return open(self.path, "rb")
        plain = open(self.path, "rb", buffering=0)  # noqa: SIM115 (closed with its slice)
        return cast(BinaryIO, io.BufferedReader(FileSlice(plain, self.offset, self.size), 1 << 16))

    def bytes(self) -> int:
        """The length of the media in bytes. Raises Rejected (missing_file, not_media, truncated, unreadable)."""
        if self.column and not self.copy:
            raise Rejected(Reason.UNREADABLE, "its bytes are in a row that was not read yet")
        if self.remote is not None and not self.copy:
            known = self.remote.size if self.size is None else self.size
            if known is None:
                raise Rejected(Reason.UNREADABLE, "its store does not say how long it is")
            return known
        try:
            on_disk = os.stat(self.copy or self.path)
        except PermissionError as error:
            raise Rejected(Reason.UNREADABLE, in_words(error)) from None
        except (OSError, ValueError) as error:
            raise Rejected(Reason.MISSING_FILE, in_words(error)) from None
        if not os.path.isfile(self.copy or self.path):
            raise Rejected(Reason.NOT_MEDIA, "not a regular file")
        if self.copy or self.offset is None or self.size is None:
            return on_disk.st_size
        if self.offset + self.size > on_disk.st_size:
            raise Rejected(Reason.TRUNCATED, "the tar ends inside this member")
        return self.size


def content_id(source: Source, full: bool) -> str:
    """32 hex digits of SHA-256 over the media's size and content.

    Files above 16 MiB are read completely only if `full`; otherwise 16 blocks of 64 KiB are, evenly spaced from first to last.
    Raises Rejected (missing_file, not_media, truncated, unreadable).
    """
    size = source.bytes()
    digest = hashlib.sha256(f"{size}\n".encode())
    with source.open() as file:
        if size <= SAMPLED_ABOVE or full:
            while block := file.read(1 << 20):
                digest.update(block)
        else:
            for index in range(_BLOCKS):
                file.seek((size - _BLOCK_BYTES) * index // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()[:32]


class FileSlice(io.RawIOBase):
    """`size` bytes of a file from `offset` on, seekable and read-only; closing it closes the file."""

    def __init__(self, file: Any, offset: int, size: int) -> None:
        self._file = file
        self._offset, self._size, self._at = offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, to: int, whence: int = 0) -> int:
        self._at = max(0, to + (0, self._at, self._size)[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._size - self._at))
        try:
            self._file.seek(self._offset + self._at)
            count = self._file.readinto(memoryview(buffer)[:count])
        except OSError:
            raise
        except Exception as error:  # every store raises its own types
            raise OSError(in_words(error)) from error
        self._at += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
