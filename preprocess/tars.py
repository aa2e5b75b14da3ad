"""Headers of webdataset tars: where each member's bytes lie. Nothing is unpacked, and no name is trusted."""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass, field

from mmspeed.preprocess.reasons import Reason


@dataclass(frozen=True)
class Member:
    """A member of a tar. `kind` is `file`, or what else it is."""

    name: str
    offset: int
    size: int
    kind: str


@dataclass
class Headers:
    """Members in the tar's order, the tar's length, and what kept the rest from being read."""

    members: list[Member] = field(default_factory=list)
    bytes: int = 0
    problem: tuple[Reason, str] | None = None


def read_headers(path: str) -> Headers:
    """The members of an uncompressed tar, without its folders; of a broken one, those before the break."""
    headers = Headers()
    try:
        headers.bytes = os.path.getsize(path)
        with open(path, "rb") as file:
            start = file.read(6)
    except OSError as error:
        headers.problem = (Reason.UNREADABLE, error.strerror or str(error))
        return headers
    if not start:
        headers.problem = (Reason.EMPTY_FILE, "an empty tar")
        return headers
    if start.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ\x00", b"\x28\xb5\x2f\xfd")):
        headers.problem = (Reason.UNDECODABLE, "a compressed tar, which cannot be read in place; decompress it")
        return headers
    try:
        with tarfile.open(path, "r:", errorlevel=1) as tar:
            _collect(tar, headers)
            headers.problem = _rest(path, tar.offset, headers.bytes)
    except (tarfile.TarError, OSError, ValueError, OverflowError) as error:
        reason = Reason.TRUNCATED if headers.members else Reason.UNDECODABLE
        headers.problem = (reason, f"not readable as a tar beyond its first {len(headers.members)} members: {error}")
    return headers


def _collect(tar: tarfile.TarFile, headers: Headers) -> None:
    last = -1
    for info in tar:
        # A hostile header may give a negative size, which sends tarfile back over the same members for ever.
        if info.offset <= last or info.size < 0:
            raise tarfile.ReadError(f"member {info.name!r} has a negative size")
        last = info.offset
        if not info.isdir():
            headers.members.append(Member(info.name, info.offset_data, info.size, _kind(info)))


def _kind(info: tarfile.TarInfo) -> str:
    if info.issym() or info.islnk():
        return "a link"
    if info.issparse():
        return "a sparse file"
    return "file" if info.isreg() else "a device"


def _rest(path: str, offset: int, size: int) -> tuple[Reason, str] | None:
    """tarfile stops without a word at a header it cannot read; a whole tar ends in zeros, or at its last byte."""
    if offset >= size:
        return None
    with open(path, "rb") as file:
        file.seek(offset)
        block = file.read(512)
    if len(block) == 512 and not block.strip(b"\0"):
        return None
    return Reason.TRUNCATED, f"the header at byte {offset} is damaged or cut off"


def is_unsafe(member: Member) -> str:
    """Why a member is not to be touched; empty when it is a plain file inside its folder."""
    if member.kind != "file":
        return member.kind
    parts = member.name.replace("\\", "/").split("/")
    if parts[0] == "" or parts[0].endswith(":"):
        return "an absolute name"
    if ".." in parts:
        return "the name leads out of its folder"
    return "" if parts[-1] else "no name"
