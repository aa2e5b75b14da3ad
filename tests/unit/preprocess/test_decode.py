"""Probing, choosing frames and decoding, on real files of every kind; and the process that does it."""

from __future__ import annotations

import json
import weakref
from fractions import Fraction
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pytest

from mmspeed.media.decode import Cut, stream
from mmspeed.media.probe import Probe, probe
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.media.source import Source
from mmspeed.media.windows import choose_frames, choose_windows
from mmspeed.preprocess.decoding.transform import crop_box, crop_boxes, rank_buckets
from mmspeed.preprocess.decoding.worker import DecodeWorker
from mmspeed.shapes import Bucket
from tests.support import media
from tests.support.decoding import COLOURED, FASTSTART, LIMITS, PILLOW, decode, read, rejection, source_of, whole
from tests.support.media import FRAMES, ZOO_BUCKETS, ZOO_FPS, Expect, corners_of, number_of, write_video

# -- the zoo ----------------------------------------------------------------------------------------------------------


def test_good_files_give_the_right_frames_upright(zoo: tuple[Path, dict[str, Expect]], worker: DecodeWorker) -> None:
    folder, expected = zoo
    for name, expect in expected.items():
        if not expect.good:
            continue
        source = source_of(folder / name)
        video = worker.open(source, *LIMITS, 20)
        assert (video.kind, video.width, video.height) == (expect.kind, expect.width, expect.height), name
        bucket = rank_buckets(video, ZOO_BUCKETS, ZOO_FPS, False)[0]
        indices = choose_frames(video.pts_seconds, bucket.frames, ZOO_FPS)
        assert video.decoder == ("pillow" if name.endswith(PILLOW) else "pyav"), name
        cut = Cut(tuple(indices), crop_box(video.width, video.height, bucket), bucket.width, bucket.height)
        frames = read(worker, source, cut, 20)
        assert frames.shape == (bucket.frames, 32, 48, 3) and frames.dtype == np.uint8, name
        assert [number_of(frame) for frame in frames] == indices, name
        if name not in ("grey.png", "deep.png"):
            assert all(corners_of(frame) == COLOURED for frame in frames), name


def test_bad_files_are_rejected_with_their_reason(zoo: tuple[Path, dict[str, Expect]], worker: DecodeWorker) -> None:
    folder, expected = zoo
    of_listing = {Reason.NO_CAPTION, Reason.ORPHAN_CAPTION, Reason.NOT_MEDIA}
    for name, expect in expected.items():
        if expect.good or set(expect.reasons) & of_listing:
            continue
        source = source_of(folder / name)

        def attempt(source: Source = source) -> None:
            video = worker.open(source, *LIMITS, 20)
            bucket = rank_buckets(video, ZOO_BUCKETS, ZOO_FPS, False)[0]
            read(worker, source, whole(video, choose_frames(video.pts_seconds, bucket.frames, ZOO_FPS)), 20)

        rejected = rejection(attempt)
        assert rejected.reason in expect.reasons, f"{name}: {rejected}"
        assert "\n" not in rejected.detail, name


# -- probing ----------------------------------------------------------------------------------------------------------


def test_probe_states_times_rate_and_depth(zoo: tuple[Path, dict[str, Expect]]) -> None:
    folder, _ = zoo
    video = probe(source_of(folder / "h264.mp4"), *LIMITS)
    np.testing.assert_allclose(video.pts_seconds, np.arange(FRAMES) / 24, atol=1e-6)
    assert video.fps == pytest.approx(24) and video.codec == "h264" and video.bits == 8
    assert probe(source_of(folder / "ten_bit.mov"), *LIMITS).bits == 10
    uneven = probe(source_of(folder / "uneven.mp4"), *LIMITS).pts_seconds
    np.testing.assert_allclose(np.diff(uneven), [0.033, 0.12, 0.066] * 9, atol=1e-3)
    np.testing.assert_allclose(probe(source_of(folder / "animated.webp"), *LIMITS).pts_seconds, np.arange(12) / 10)
    assert probe(source_of(folder / "turned.mp4"), *LIMITS).rotation == 90
    assert probe(source_of(folder / "wide_pixels.mp4"), *LIMITS).sar == Fraction(2)


def test_probe_survives_json(zoo: tuple[Path, dict[str, Expect]]) -> None:
    video = probe(source_of(zoo[0] / "wide_pixels.mp4"), *LIMITS)
    assert Probe.from_json(json.loads(json.dumps(video.to_json()))) == video


def test_limits_on_bytes_and_pixels(zoo: tuple[Path, dict[str, Expect]]) -> None:
    folder, _ = zoo
    for name in ("h264.mp4", "photo.jpg"):
        source = source_of(folder / name)
        assert rejection(lambda s=source: probe(s, 500, 10**6)).reason is Reason.TOO_LARGE  # type: ignore[misc]
        assert rejection(lambda s=source: probe(s, 10**9, 96 * 64 - 1)).reason is Reason.TOO_LARGE  # type: ignore[misc]
        probe(source, 10**9, 96 * 64)


@pytest.mark.parametrize("name", ["h264.mp4", "fragmented.mp4", "vp9.webm", "mpeg4.avi", "photo.jpg", "animated.gif"])
@pytest.mark.parametrize("share", [0.3, 0.9])
def test_no_cut_is_silent(zoo: tuple[Path, dict[str, Expect]], tmp_path: Path, name: str, share: float) -> None:
    """However a file is cut, it is rejected, or its frames are those of the whole file."""
    path = tmp_path / name
    path.write_bytes((zoo[0] / name).read_bytes())
    media.cut(path, share)
    try:
        video = probe(source_of(path), *LIMITS)
        frames = decode(source_of(path), video, range(len(video.pts_seconds)))
    except Rejected as rejected:
        assert rejected.reason in (Reason.TRUNCATED, Reason.UNDECODABLE)
    else:
        whole = probe(source_of(zoo[0] / name), *LIMITS).pts_seconds
        assert len(whole) - len(video.pts_seconds) <= 2 and len(frames) == len(video.pts_seconds)
        assert [number_of(frame) for frame in frames] == list(range(len(frames)))


# -- several clips of a file ------------------------------------------------------------------------------------------


def variants(video: Probe) -> list[Cut]:
    """Many clips of a file: windows, crops, two sizes; overlapping and apart."""
    count = len(video.pts_seconds)
    frames = min(5, count)
    windows = choose_windows(video.pts_seconds, frames, None, "all")
    windows += [[0] * 2, [count - 1], sorted({0, count // 2, count - 1})]
    boxes = crop_boxes(video.width, video.height, Bucket(1, 32, 32), 3)
    return [Cut(tuple(w), box, side, 32) for w in windows for side, box in zip((32, 32, 24), boxes * 3, strict=False)]


@pytest.mark.slow
def test_each_clip_alone_is_what_it_is_among_others(zoo: tuple[Path, dict[str, Expect]], tmp_path: Path) -> None:
    """The pixels or the reason are the same, on every file, good or damaged."""
    folder, expected = zoo
    media.damage(write_video(tmp_path / "gap.mp4", frames=39, fps=4, options={"g": "4", "bf": "0"}), 0.3, 0.4)
    write_video(tmp_path / "long.mp4", frames=39, fps=4, options={"g": "5"})
    clips = fails = 0
    for path in [*(folder / name for name in expected), tmp_path / "gap.mp4", tmp_path / "long.mp4"]:
        source = source_of(path)
        try:
            video = probe(source, *LIMITS)
        except Rejected:
            continue
        cuts = variants(video)
        together = dict(stream(source, video, cuts))
        assert sorted(together) == list(range(len(cuts))), path.name
        for position, cut in enumerate(cuts):
            ((_, alone),) = stream(source, video, [cut])
            other = together[position]
            clips += 1
            if isinstance(alone, Rejected):
                assert isinstance(other, Rejected) and other.reason is alone.reason, (path.name, position)
                fails += 1
            else:
                assert isinstance(other, np.ndarray), (path.name, position, other)
                np.testing.assert_array_equal(alone, other, err_msg=f"{path.name} {position}")
    assert clips > 400 and fails > 3


def test_clips_behind_damage_are_given(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", frames=39, fps=4, options={"g": "4", "bf": "0"}, container=FASTSTART)
    whole_file = source_of(path)
    video = probe(whole_file, *LIMITS)
    cuts = [whole(video, range(start, start + 4)) for start in range(0, 36, 4)]
    before = dict(stream(whole_file, video, cuts))
    media.damage(path, 0.5, 0.55)
    after = dict(stream(whole_file, video, cuts))
    lost = [position for position, result in after.items() if isinstance(result, Rejected)]
    assert 1 <= len(lost) <= 4 and 8 not in lost
    for position, result in after.items():
        if position not in lost and position != min(lost) - 1 and position != max(lost) + 1:
            np.testing.assert_array_equal(result, before[position])  # type: ignore[arg-type]


def test_a_file_is_opened_once_for_all_its_clips(tmp_path: Path) -> None:
    opened = []

    class Counted(Source):
        def open(self) -> BinaryIO:
            opened.append(self.path)
            return super().open()

    path = write_video(tmp_path / "v.mp4", frames=39, fps=4, options={"g": "5"})
    source = Counted("v", str(path), None, None, "video", ("words",), "train")
    video = probe(source, *LIMITS)
    opened.clear()
    assert all(isinstance(result, np.ndarray) for _, result in stream(source, video, variants(video)))
    assert len(opened) == 1


def test_clips_come_as_they_are_complete(tmp_path: Path) -> None:
    """A long video is never in memory as a whole."""
    source = source_of(write_video(tmp_path / "v.mp4", frames=39, fps=8))
    video = probe(source, *LIMITS)
    cuts = [whole(video, range(start, start + 3)) for start in range(36, -1, -3)]
    assert [position for position, _ in stream(source, video, cuts)] == list(range(12, -1, -1))
    assert next(iter(stream(source, video, [*cuts, whole(video, range(39))])))[0] == 12
    kept = []
    for _, frames in stream(source, video, cuts):
        assert all(array() is None for array in kept)  # nobody holds what was given away before
        kept.append(weakref.ref(frames.base))
        del frames


@pytest.mark.parametrize("name", ["long.mp4", "long.webm", "long.avi"])
def test_seeking_gives_the_same_frames(tmp_path: Path, name: str) -> None:
    codec = {"webm": "libvpx-vp9", "avi": "mpeg4"}.get(name.split(".")[1], "libx264")
    source = source_of(write_video(tmp_path / name, codec=codec, frames=39, fps=8, options={"g": "7"}))
    video = probe(source, *LIMITS)
    assert len(video.pts_seconds) == 39
    assert len(video.key_seconds) >= 6
    for indices in ([9, 20, 38], [38], [13, 14, 15]):
        assert [number_of(frame) for frame in decode(source, video, indices)] == indices


def test_tar_members_are_decoded_in_place(zoo: tuple[Path, dict[str, Expect]], tmp_path: Path) -> None:
    names = ["h264.mp4", "vp9.webm", "stream.ts", "photo.jpg", "animated.gif"]
    path = tmp_path / "t.bin"
    with open(path, "wb") as file:
        for name in names:
            file.write(b"junk" * 99)
            offset = file.tell()
            file.write((zoo[0] / name).read_bytes())
            file.flush()
            source = source_of(path, offset, file.tell() - offset)
            plain = source_of(zoo[0] / name)
            video = probe(source, *LIMITS)
            assert video == probe(plain, *LIMITS)
            indices = [0, 4] if len(video.pts_seconds) > 1 else [0]
            np.testing.assert_array_equal(decode(source, video, indices), decode(plain, video, indices))
