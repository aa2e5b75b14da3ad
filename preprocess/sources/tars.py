"""Read the headers of webdataset tars, for the position of each member's bytes. Nothing is unpacked, and no name, size or link is trusted.

The standard library parses each block of a header; the loop over blocks is here, because tarfile's own follows links
of sparse maps and chained headers, reads extended headers of any length, and keeps all members in memory.
"""

from __future__ import annotations

import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from mmspeed.media.rejections import Reason, in_words

UNKNOWN = 1 << 62  # bytes of a tar of unknown length
_BLOCK = 512
_MAX_EXTENSION = 1 << 20  # bytes of an extended header; a larger one is skipped
_MAX_NAME = 4096  # characters, as in the paths of most systems
_LONG_NAME, _PAX = tarfile.GNUTYPE_LONGNAME, (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
_EXTENSIONS = (_LONG_NAME, tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE, *_PAX)
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")


@dataclass(frozen=True, slots=True)
class TarMember:
    """A member of a tar. `kind` is `file`, or a description of another kind."""

    name: str
    offset: int
    size: int
    kind: str


@dataclass
class Headers:
    """Members in the tar's order, the tar's length, and the problem that stopped reading."""

    members: list[TarMember] = field(default_factory=list)
    bytes: int = 0
    problem: tuple[Reason, str] | None = None


class _BrokenError(Exception):
    """The rest of the tar cannot be read."""


def read_headers(path: str) -> Headers:
    """The members of an uncompressed tar, without its folders; for a broken one, those before the break."""
    headers = Headers()
    try:
        headers.bytes = os.path.getsize(path)
        if not os.path.isfile(path):  # reading a pipe would wait
            headers.problem = (Reason.NOT_MEDIA, "not a regular file")
            return headers
        with open(path, "rb") as file:
            headers.members.extend(scan(file, headers.bytes, headers))
    except OSError as error:
        headers.problem = (Reason.UNREADABLE, in_words(error))
    return headers


def scan(file: BinaryIO, size: int, headers: Headers) -> Iterator[TarMember]:
    """Yield the members of a tar of at most `size` bytes in order, without its folders; a problem that stops reading is set in `headers`.

    The file is only read forward, also if each member's first bytes are read while it is yielded. Raises OSError.
    """
    start = file.read(_BLOCK)
    if not start:
        headers.problem = (Reason.EMPTY_FILE, "an empty tar")
    elif start.startswith(_COMPRESSED):
        headers.problem = (Reason.UNDECODABLE, "a compressed tar, which cannot be read in place; decompress it")
    else:
        yield from _members(file, start, size, headers)


def _members(file: BinaryIO, first: bytes, size: int, headers: Headers) -> Iterator[TarMember]:
    """Yield the members in order, `first` being the first block."""
    at, count = 0, 0
    common: dict[str, str] = {}
    extended: dict[str, str] = {}
    try:
        while at < size:  # each iteration advances by at least one block
            if at:
                file.seek(at)
            block = file.read(_BLOCK) if at else first
            if len(block) == _BLOCK and not block.strip(b"\0"):
                return
            if not block and size == UNKNOWN:  # the end of a stream
                return
            info = _header(block, at)
            begin = at + _BLOCK
            if info.type in _EXTENSIONS:
                _extend(common if info.type == tarfile.XGLTYPE else extended, info, file)
                at = begin + _padded(info.size)
                continue
            if info.type == tarfile.GNUTYPE_SPARSE:
                begin = _behind_map(file, block, begin)
            fields = common | extended
            extended = {}
            length = int(fields.get("size", info.size))
            has_data = info.isreg() or info.type not in tarfile.SUPPORTED_TYPES
            at = begin + (_padded(length) if has_data else 0)
            if not info.isdir():
                count += 1
                yield TarMember(fields.get("path", info.name), begin, length, fields.get("kind") or _kind(info))
        if at > size:
            raise _BrokenError(f"its last member should end at byte {at}")
    except _BrokenError as error:
        reason = Reason.TRUNCATED if count else Reason.UNDECODABLE
        headers.problem = (reason, f"not readable as a tar beyond its first {count} members: {error}")


def _header(block: bytes, at: int) -> tarfile.TarInfo:
    try:
        info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError, OverflowError):
        raise _BrokenError(f"the header at byte {at} is damaged or cut off") from None
    if info.size < 0:
        raise _BrokenError(f"the header at byte {at} states a negative size")
    return info


def _padded(size: int) -> int:
    return -(-size // _BLOCK) * _BLOCK


def _kind(info: tarfile.TarInfo) -> str:
    if info.issym() or info.islnk():
        return "a link"
    if info.type == tarfile.GNUTYPE_SPARSE:
        return "a sparse file"
    return "file" if info.isreg() else "a device"


def _extend(fields: dict[str, str], info: tarfile.TarInfo, file: BinaryIO) -> None:
    """Set the fields that an extended header gives for later members: `path`, `size`, and the `kind` of other than plain files."""
    if info.size > _MAX_EXTENSION:
        fields["kind"] = f"after an extended header of {info.size} bytes"
        return
    data = file.read(info.size)
    if len(data) < info.size:
        raise _BrokenError("an extended header is cut off")
    if info.type == _LONG_NAME:
        fields["path"] = data.partition(b"\0")[0].decode("utf-8", "surrogateescape")
    elif info.type != tarfile.GNUTYPE_LONGLINK:
        _extend_by_pax(fields, data)


def _extend_by_pax(fields: dict[str, str], data: bytes) -> None:
    """Set fields from pax records, `length key=value\\n`. Records that are not needed are only checked."""
    at = 0
    while at < len(data) and data[at]:
        digits, space, _ = data[at : at + 20].partition(b" ")
        length = int(digits) if digits.isdigit() else 0
        record = data[at + len(digits) + 1 : at + length]
        key, equals, value = record[:-1].partition(b"=")
        if not (space and equals and record.endswith(b"\n") and at + length <= len(data)):
            raise _BrokenError("an extended header is damaged")
        if key == b"path" or key == b"GNU.sparse.name":
            fields["path"] = value.decode("utf-8", "surrogateescape")
        if key == b"size":
            if not value.isdigit() or len(value) > 20:
                raise _BrokenError("an extended header states a size that is not a number")
            fields["size"] = value.decode("ascii")
        if key.startswith(b"GNU.sparse"):
            fields["kind"] = "a sparse file"
        at += length


def _behind_map(file: BinaryIO, block: bytes, begin: int) -> int:
    """The offset of the data of an old GNU sparse file: after the further blocks of its map."""
    more = block[482]
    for _ in range(_MAX_EXTENSION // _BLOCK):
        if not more:
            return begin
        block = file.read(_BLOCK)
        if len(block) < _BLOCK:
            break
        begin, more = begin + _BLOCK, block[504]
    raise _BrokenError("the map of a sparse file does not end")


def is_unsafe(member: TarMember) -> str:
    """The reason that a member must not be read; empty if it is a plain file inside its folder."""
    if member.kind != "file":
        return member.kind
    if len(member.name) > _MAX_NAME:
        return f"a name of {len(member.name)} characters"
    parts = member.name.replace("\\", "/").split("/")
    if parts[0] == "" or parts[0].endswith(":") or re.match("[A-Za-z]:", parts[0]):
        return "an absolute name" if parts[0] or len(parts) > 1 else "no name"
    if ".." in parts or "\0" in member.name:
        return "the name leads out of its folder"
    return "" if parts[-1] else "no name"
