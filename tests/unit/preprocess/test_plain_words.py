"""Details of rejections say in words what is wrong: no class of an exception and no number alone, for any file and any error."""

from __future__ import annotations

import builtins
import errno
import os
import re
import signal
import subprocess
from pathlib import Path

import av
from hypothesis import given
from hypothesis import strategies as st

from mmspeed.preprocess.decoding.pool import DecodePool, Failed
from mmspeed.preprocess.decoding.probe import refused
from mmspeed.preprocess.sources.discover import list_sources
from mmspeed.preprocess.sources.rejections import Reason, Rejection, death_in_words, in_words
from tests.support.media import make_zoo
from tests.support.runs import small_config

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


def rejections_of(folder: Path, media: Path) -> list[Rejection]:
    """The rejections of a listing and a plan of a folder's files."""
    config = small_config(folder)
    source = config.data.sources[0].model_copy(update={"path": str(media)})
    data = config.data.model_copy(update={"sources": [source], "missing_caption": "reject"})
    listing = list_sources(data)
    with DecodePool(config.model_copy(update={"data": data}), listing.sources) as pool:
        events = list(pool.run(lambda clip: True))
    failed = [event.rejected.of(event.source.name) for event in events if isinstance(event, Failed)]
    return [*listing.rejections, *failed]


def test_files_of_all_kinds_are_rejected_in_words(tmp_path: Path) -> None:
    media = tmp_path / "media"
    make_zoo(media)
    for path in [*media.iterdir()]:
        path.with_suffix(".txt").write_text("a caption")
    (media / "empty.mp4").write_bytes(b"")
    (media / "empty.txt").write_text("a")
    (media / "lonely.txt").write_text("a")
    (media / "uncaptioned.mp4").write_bytes((media / "h264.mp4").read_bytes())  # without a caption
    (media / "model.pkl").write_bytes(b"\x80\x04K\x01.")
    (media / "notes.pdf").write_bytes(b"%PDF")
    (media / "README").write_bytes(b"x")
    (media / "pickle.png").write_bytes(b"\x80\x04K\x01.")
    (media / "pickle.txt").write_text("a")
    (media / "gone.mp4").symlink_to(media / "nowhere")
    os.mkfifo(media / "pipe.mp4")
    subprocess.run(["tar", "-cf", str(media / "cut.tar"), "-C", str(media), "h264.mp4", "h264.txt"], check=True)
    os.truncate(media / "cut.tar", 3000)
    rejections = rejections_of(tmp_path, media)
    reasons = {rejection.reason for rejection in rejections}
    assert {Reason.EMPTY_FILE, Reason.ORPHAN_CAPTION, Reason.NO_CAPTION, Reason.PICKLE, Reason.NOT_MEDIA} <= reasons
    assert {Reason.MISSING_FILE, Reason.UNDECODABLE, Reason.TRUNCATED, Reason.NO_VIDEO_STREAM} <= reasons
    bad = {rejection.source: rejection.detail for rejection in rejections if not is_plain(rejection.detail)}
    assert bad == {}
