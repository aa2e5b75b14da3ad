"""Details of rejections say in words what is wrong: no class of an exception and no number alone, for any error."""

from __future__ import annotations

import builtins
import errno
import os
import re
import signal

import av
from hypothesis import given
from hypothesis import strategies as st

from mmspeed.media.probe import refused
from mmspeed.media.rejections import Reason, death_in_words, in_words

_CODE = re.compile(r"\b\w+(Error|Exception)\b|Errno|Traceback|0x[0-9a-f]{6}")
_ERRORS = [
    kind
    for kind in vars(builtins).values()
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, Warning | UnicodeError)
]


def is_plain(text: str) -> bool:
    """True for at least three words without the names of code."""
    return len(re.findall(r"[^\W\d_]{2,}", text)) >= 3 and not _CODE.search(text)


def test_exceptions_without_a_text_are_reported_in_words() -> None:
    for kind in _ERRORS:
        assert "Group" in kind.__name__ or is_plain(in_words(kind())), kind


@given(st.sampled_from(sorted(errno.errorcode)), st.booleans())
def test_an_error_of_the_system_is_reported_in_words(number: int, decoder: bool) -> None:
    error = OSError(number, os.strerror(number), "/a/b.mp4")
    assert is_plain(refused(error).detail if decoder else in_words(error))
    assert "/a/b.mp4" not in in_words(error)  # the source's name stands beside it


def test_the_end_of_a_process_is_reported_in_words() -> None:
    for number in signal.valid_signals():
        assert is_plain(f"the process {death_in_words(-number)}"), number
    assert is_plain(f"the process {death_in_words(3)}") and "3" in death_in_words(3)


def test_an_error_of_ffmpeg_is_reported_in_words() -> None:
    for code, kind in av.error.classes.items():
        rejected = refused(kind(code, "Its own words"))
        assert rejected.reason is Reason.UNDECODABLE and is_plain(rejected.detail), (code, rejected.detail)
