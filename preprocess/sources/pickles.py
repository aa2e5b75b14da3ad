"""Telling pickles by their names and first bytes. A pickle runs code when it is read, so none is ever opened."""

from __future__ import annotations

import os

HEAD_BYTES = 512  # enough of a file to tell
_ENDINGS = frozenset(".pkl .pickle .pt .pth .ckpt .joblib .dill .p".split())


def is_pickle(name: str, head: bytes = b"") -> bool:
    """Whether a file is a pickle, or holds one: by its ending, or by its first bytes where those are given.

    Seen are bare pickles (protocol 2 and later), zips whose first file is one (what torch writes), and NumPy arrays of objects.
    """
    return os.path.splitext(name)[1].lower() in _ENDINGS or holds_pickle(head)


def holds_pickle(head: bytes) -> bool:
    """Whether the first bytes of a file are a pickle's, or of a zip or a NumPy array that holds one."""
    if head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        # A framed pickle states its frame; an older one goes on with an opcode, which is a printable sign.
        return head[2:3] == b"\x95" or 0x20 <= (head[2:3] or b"\0")[0] < 0x7F or head[2:3] in (b"\x8a", b"\x8c")
    if head.startswith(b"PK\x03\x04"):
        length = int.from_bytes(head[26:28], "little")
        return head[30 : 30 + length].endswith(b".pkl")
    return head.startswith(b"\x93NUMPY") and (b"'|O" in head or b"'O" in head)
