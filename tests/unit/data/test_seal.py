"""Files that carry their own digest, also when users write what looks like one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmspeed.data.cache.seals import BLANK, is_sealed, seal, seal_file, sealed_file

FALSE = (BLANK[:-64] + "0123456789abcdef" * 4).encode()


@given(st.lists(st.sampled_from([b"text", BLANK.encode(), FALSE, b"\0"]), max_size=6), st.binary(max_size=20))
def test_only_the_last_mark_is_the_seal(before: list[bytes], after: bytes) -> None:
    data = b"|".join([*before, BLANK.encode()]) + after
    sealed = seal(data)
    assert is_sealed(sealed) and len(sealed) == len(data)
    assert not is_sealed(data) and not is_sealed(sealed + b"x") and not is_sealed(sealed[:-1])
    for place in range(0, len(sealed), 7):
        changed = bytearray(sealed)
        changed[place] ^= 1
        assert not is_sealed(bytes(changed))


def test_a_file_with_two_places(tmp_path: Path) -> None:
    """Arrow writes its metadata at both ends; what stands between is the user's."""
    path = tmp_path / "file"
    path.write_bytes(b"a" + BLANK.encode() + b"b" + FALSE + BLANK.encode() + b"c" + BLANK.encode() + b"d")
    seal_file(path)
    assert sealed_file(path) and path.read_bytes().count(BLANK.encode()) == 1
    path.write_bytes(path.read_bytes().replace(b"b", b"x", 1))
    assert not sealed_file(path)
    with pytest.raises(ValueError, match="no place"):
        seal(b"nothing")
