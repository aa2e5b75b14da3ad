"""Frames are told apart by the order in which they are decoded, where the container's times contradict it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mmspeed.media.decode import Cut, stream
from mmspeed.media.other_decoders import OtherDecoder, examine
from mmspeed.media.pixel_rules import NEWEST_RULES
from mmspeed.media.probe import probe
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.media.windows import choose_windows
from tests.support.decoding import LIMITS, source_of
from tests.support.media import number_of, write_video
from tests.support.odd_media import shown

_FIXED = {"bf": "3", "x264-params": "b-adapt=0"}


@pytest.mark.parametrize(
    "settings",
    [
        {"options": _FIXED},
        {"options": _FIXED | {"g": "12"}},
        {"options": {"bf": "0"}},
        {"codec": "mpeg4", "options": {"bf": "2"}},
        {"codec": "mpeg2video", "options": {"bf": "0", "b": "4M"}},
    ],
    ids=["fixed", "groups", "no B-frames", "MPEG-4", "MPEG-2"],
)
def test_frames_of_an_avi_are_those_at_their_times(settings: dict[str, object], tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.avi", **settings)  # type: ignore[arg-type]
    found, frames = shown(path)
    seen = [number_of(frame) for frame in frames]
    assert seen == list(range(len(seen))) and len(seen) == 36
    assert found.applied == (("order",) if "x264-params" in settings["options"] else ())  # type: ignore[operator]
    for fps, count in ((6, 5), (8, 10), (None, 20)):
        (indices,) = choose_windows(found.pts_seconds, count, fps, 1)
        assert [number_of(frame) for frame in shown(path, tuple(indices))[1]] == indices


@pytest.mark.parametrize("ending", ["asf", "mxf", "ts", "flv"])
def test_other_containers(ending: str, tmp_path: Path) -> None:
    found, frames = shown(write_video(tmp_path / f"a.{ending}", options=_FIXED))
    assert [number_of(frame) for frame in frames] == list(range(36))
    assert found.applied == (("order",) if ending in ("asf", "mxf") else ())


def test_fewer_times_than_frames_are_named(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mpg", options=_FIXED)
    with pytest.raises(Rejected, match=r"its packets state \d+ times, and 36 frames are decoded"):
        shown(path)


def test_other_decoders_leave_a_file_whose_frames_are_counted(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.avi", options=_FIXED)
    found = probe(source_of(path), *LIMITS)
    assert found.order == "count"
    refused = examine(source_of(path), found, OtherDecoder("torchcodec", "cpu", NEWEST_RULES))
    assert (refused.refusal_detail, refused.reader) == ("order", "")


def test_times_that_go_back_are_named(tmp_path: Path) -> None:
    """A probe that takes the stamps for right, as of a file whose packets do not show it."""
    source = source_of(write_video(tmp_path / "a.avi", options=_FIXED))
    found = replace(probe(source, *LIMITS), order="stamps")
    ((_, result),) = stream(source, found, [Cut((0, 12), (0, 0, 96, 64), 96, 64)])
    assert isinstance(result, Rejected) and result.reason is Reason.NO_TIMES and "comes after" in result.detail


@pytest.mark.parametrize(("ending", "settings"), [("ts", {"options": _FIXED}), ("mpg", {"codec": "mpeg2video"})])
def test_joined_files_whose_times_begin_anew_are_named(
    ending: str, settings: dict[str, object], tmp_path: Path
) -> None:
    path = write_video(tmp_path / f"a.{ending}", **settings)  # type: ignore[arg-type]
    path.write_bytes(2 * path.read_bytes())
    with pytest.raises(Rejected, match=r"its times go back from \d\.\d+ s to \d\.\d+ s, as of joined files"):
        shown(path)


@pytest.mark.parametrize(("name", "codec"), [("a.h264", "libx264"), ("a.hevc", "libx265")])
def test_raw_streams_are_rejected_for_their_lack_of_times(name: str, codec: str, tmp_path: Path) -> None:
    path = write_video(tmp_path / name, codec=codec)
    with pytest.raises(Rejected, match=r"have no times, as in a raw (h264|hevc) stream; put it into a container"):
        probe(source_of(path), *LIMITS)
