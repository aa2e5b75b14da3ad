"""Probing, choosing frames and decoding, on real files of every kind; and the process that does it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mmspeed.preprocess.decode import choose_frames, covers, decode
from mmspeed.preprocess.probe import Probe, probe
from mmspeed.preprocess.reasons import Reason, Rejected
from mmspeed.preprocess.source import Source
from mmspeed.preprocess.transform import assign_bucket
from mmspeed.preprocess.worker import DecodeWorker
from tests import media
from tests.media import FRAMES, ZOO_BUCKETS, ZOO_FPS, Expect, corners_of, make_zoo, number_of, write_video

LIMITS = (10**9, 8192 * 8192)
COLOURED = ["red", "green", "blue", "grey"]


def source_of(path: Path, offset: int | None = None, size: int | None = None) -> Source:
    return Source(path.name, str(path), offset, size, "video", ("words",), "train")


def rejection(call: Callable[[], object]) -> Rejected:
    with pytest.raises(Rejected) as rejected:
        call()
    return rejected.value


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Expect]]:
    folder = tmp_path_factory.mktemp("zoo") / "media"
    return folder, make_zoo(folder)


@pytest.fixture(scope="module")
def worker() -> Iterator[DecodeWorker]:
    with DecodeWorker() as started:
        yield started


# -- the zoo ----------------------------------------------------------------------------------------------------------


def test_the_zoo_is_large(zoo: tuple[Path, dict[str, Expect]]) -> None:
    _, expected = zoo
    assert sum(e.good for e in expected.values()) >= 30 and sum(not e.good for e in expected.values()) >= 15


def test_good_files_give_the_right_frames_upright(zoo: tuple[Path, dict[str, Expect]], worker: DecodeWorker) -> None:
    folder, expected = zoo
    used = {}
    for name, expect in expected.items():
        if not expect.good:
            continue
        source = source_of(folder / name)
        found = worker.open(source, *LIMITS, 20)
        assert (found.kind, found.width, found.height) == (expect.kind, expect.width, expect.height), name
        bucket = assign_bucket(found, ZOO_BUCKETS, ZOO_FPS, False)
        indices = choose_frames(found.pts_seconds, bucket.frames, ZOO_FPS)
        frames, used[name] = worker.read(source, indices, 20)
        assert frames.shape == (bucket.frames, expect.height, expect.width, 3) and frames.dtype == np.uint8, name
        assert [number_of(frame) for frame in frames] == indices, name
        if name not in ("grey.png", "deep.png"):
            assert all(corners_of(frame) == COLOURED for frame in frames), name
    if "decord" in used.values():  # there is no decord on some machines
        assert used["h264.mp4"] == used["turned.mp4"] == used["vp9.webm"] == "decord"
    assert used["av1.mp4"] == used["stream.ts"] == used["ten_bit.mov"] == used["b frames.avi"] == "pyav"
    assert used["animated.webp"] == used["photo.jpg"] == "pillow"


def test_bad_files_are_rejected_with_their_reason(zoo: tuple[Path, dict[str, Expect]], worker: DecodeWorker) -> None:
    folder, expected = zoo
    of_listing = {Reason.NO_CAPTION, Reason.ORPHAN_CAPTION, Reason.NOT_MEDIA}
    for name, expect in expected.items():
        if expect.good or set(expect.reasons) & of_listing:
            continue
        source = source_of(folder / name)

        def attempt(source: Source = source) -> None:
            found = worker.open(source, *LIMITS, 20)
            bucket = assign_bucket(found, ZOO_BUCKETS, ZOO_FPS, False)
            worker.read(source, choose_frames(found.pts_seconds, bucket.frames, ZOO_FPS), 20)

        rejected = rejection(attempt)
        assert rejected.reason in expect.reasons, f"{name}: {rejected}"
        assert "\n" not in rejected.detail, name


# -- probing ----------------------------------------------------------------------------------------------------------


def test_probe_states_times_rate_and_depth(zoo: tuple[Path, dict[str, Expect]]) -> None:
    folder, _ = zoo
    found = probe(source_of(folder / "h264.mp4"), *LIMITS)
    np.testing.assert_allclose(found.pts_seconds, np.arange(FRAMES) / 24, atol=1e-6)
    assert found.fps == pytest.approx(24) and found.codec == "h264" and found.bits == 8
    assert probe(source_of(folder / "ten_bit.mov"), *LIMITS).bits == 10
    uneven = probe(source_of(folder / "uneven.mp4"), *LIMITS).pts_seconds
    np.testing.assert_allclose(np.diff(uneven), [0.033, 0.12, 0.066] * 9, atol=1e-3)
    np.testing.assert_allclose(probe(source_of(folder / "animated.webp"), *LIMITS).pts_seconds, np.arange(12) / 10)
    assert probe(source_of(folder / "turned.mp4"), *LIMITS).rotation == 90
    assert probe(source_of(folder / "wide_pixels.mp4"), *LIMITS).sar == Fraction(2)


def test_probe_survives_json(zoo: tuple[Path, dict[str, Expect]]) -> None:
    found = probe(source_of(zoo[0] / "wide_pixels.mp4"), *LIMITS)
    assert Probe.from_json(json.loads(json.dumps(found.to_json()))) == found


def test_limits_on_bytes_and_pixels(zoo: tuple[Path, dict[str, Expect]]) -> None:
    folder, _ = zoo
    for name in ("h264.mp4", "photo.jpg"):
        source = source_of(folder / name)
        assert rejection(lambda s=source: probe(s, 500, 10**6)).reason is Reason.TOO_LARGE  # type: ignore[misc]
        assert rejection(lambda s=source: probe(s, 10**9, 96 * 64 - 1)).reason is Reason.TOO_LARGE  # type: ignore[misc]
        probe(source, 10**9, 96 * 64)


def test_playlists_do_not_open_other_files(zoo: tuple[Path, dict[str, Expect]]) -> None:
    folder, _ = zoo
    assert f"{folder}/stream.ts" in (folder / "playlist.mp4").read_text()
    assert rejection(lambda: probe(source_of(folder / "playlist.mp4"), *LIMITS)).reason is Reason.UNDECODABLE


@pytest.mark.parametrize("name", ["h264.mp4", "fragmented.mp4", "vp9.webm", "mpeg4.avi", "photo.jpg", "animated.gif"])
@pytest.mark.parametrize("share", [0.05, 0.3, 0.5, 0.9, 0.99])
def test_no_cut_is_silent(zoo: tuple[Path, dict[str, Expect]], tmp_path: Path, name: str, share: float) -> None:
    """However a file is cut, it is rejected, or its frames are those of the whole file."""
    path = tmp_path / name
    path.write_bytes((zoo[0] / name).read_bytes())
    media.cut(path, share)
    try:
        found = probe(source_of(path), *LIMITS)
        frames, _ = decode(source_of(path), found, range(len(found.pts_seconds)))
    except Rejected as rejected:
        assert rejected.reason in (Reason.TRUNCATED, Reason.UNDECODABLE)
    else:
        whole = probe(source_of(zoo[0] / name), *LIMITS).pts_seconds
        assert len(whole) - len(found.pts_seconds) <= 2 and len(frames) == len(found.pts_seconds)
        assert [number_of(frame) for frame in frames] == list(range(len(frames)))


# -- decoding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotation", [0, 90, 180, -90])
@pytest.mark.parametrize("size", [(96, 64), (98, 66), (64, 64)])
def test_decord_and_pyav_agree(tmp_path: Path, rotation: int, size: tuple[int, int]) -> None:
    pytest.importorskip("decord")
    source = source_of(write_video(tmp_path / "v.mp4", width=size[0], height=size[1], rotation=rotation, frames=20))
    found = probe(source, *LIMITS)
    indices = [0, 3, 3, 11, 19]
    by_decord, first = decode(source, found, indices)
    by_pyav, second = decode(source, found, indices, decord=False)
    assert (first, second) == ("decord", "pyav")
    np.testing.assert_array_equal(by_decord, by_pyav)
    assert [number_of(frame) for frame in by_pyav] == indices and corners_of(by_pyav[0]) == COLOURED


def test_decord_is_left_when_it_disagrees(tmp_path: Path) -> None:
    """A probe whose times are not decord's: the answer is PyAV's refusal, not decord's frames."""
    pytest.importorskip("decord")
    source = source_of(write_video(tmp_path / "v.mp4"))
    found = probe(source, *LIMITS)
    assert decode(source, found, [5])[1] == "decord"
    wrong = Probe(
        **{**found.__dict__, "pts_seconds": [time + index * 0.05 for index, time in enumerate(found.pts_seconds)]}
    )
    assert decode(source, wrong, [0])[1] == "decord"
    assert rejection(lambda: decode(source, wrong, [30])).reason in (Reason.TRUNCATED, Reason.UNDECODABLE)


@pytest.mark.parametrize("name", ["long.mp4", "long.webm", "long.ts", "long.avi"])
def test_seeking_gives_the_same_frames(tmp_path: Path, name: str) -> None:
    codec = {"webm": "libvpx-vp9", "avi": "mpeg4"}.get(name.split(".")[1], "libx264")
    source = source_of(write_video(tmp_path / name, codec=codec, frames=39, fps=8, options={"g": "7"}))
    found = probe(source, *LIMITS)
    assert len(found.pts_seconds) == 39
    for indices in ([9, 20, 38], [38], [13, 14, 15]):
        frames, used = decode(source, found, indices, decord=False)
        assert used == "pyav" and [number_of(frame) for frame in frames] == indices


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
            found = probe(source, *LIMITS)
            assert found == probe(plain, *LIMITS)
            indices = [0, 4] if len(found.pts_seconds) > 1 else [0]
            np.testing.assert_array_equal(decode(source, found, indices)[0], decode(plain, found, indices)[0])


def test_transparent_pixels_are_white(zoo: tuple[Path, dict[str, Expect]]) -> None:
    source = source_of(zoo[0] / "alpha.png")
    (frame,), _ = decode(source, probe(source, *LIMITS), [0])
    assert (frame[:, :7] == 255).all() and corners_of(frame) == COLOURED


# -- choosing frames --------------------------------------------------------------------------------------------------


def even(count: int, fps: float) -> list[float]:
    return [index / fps for index in range(count)]


def test_dividing_rates_take_evenly_spaced_frames_of_the_middle() -> None:
    assert choose_frames(even(36, 24), 9, 8) == list(range(5, 30, 3))
    assert choose_frames(even(49, 24), 49, 24) == list(range(49))
    assert choose_frames(even(60, 24), 49, 24) == list(range(5, 54))
    assert choose_frames([round(t, 3) for t in even(60, 24)], 49, 24) == list(range(5, 54))  # webm's milliseconds
    assert choose_frames(even(30, 30), 5, None) == [12, 13, 14, 15, 16]
    assert choose_frames([7.0], 1, 8) == [0]


def test_uneven_clips_are_sampled_by_time() -> None:
    pts = [0.0, 0.01, 0.02, 0.03, 0.5, 1.0, 1.5, 2.0]
    assert choose_frames(pts, 5, 2) == [0, 4, 5, 6, 7]


def test_too_short_says_how_much_is_there() -> None:
    rejected = rejection(lambda: choose_frames(even(48, 24), 49, 24))
    assert rejected.reason is Reason.TOO_SHORT and rejected.detail == "2.00 s, and 49 frames need 2.00 s"
    assert rejection(lambda: choose_frames(even(4, 24), 5, None)).detail == "4 frames, and 5 frames need 5 frames"


@given(
    st.lists(st.floats(0.005, 0.3), min_size=0, max_size=80),
    st.integers(1, 40),
    st.one_of(st.none(), st.floats(1, 60)),
    st.floats(-5, 1000),
)
def test_choice_properties(steps: list[float], frames: int, fps: float | None, start: float) -> None:
    pts = [float(t) for t in start + np.cumsum([0.0, *steps])]
    assume(covers(pts, frames, fps))
    chosen = choose_frames(pts, frames, fps)
    assert len(chosen) == frames and chosen == sorted(chosen) and 0 <= chosen[0] and chosen[-1] < len(pts)
    if fps is not None and frames > 1:
        targets = pts[chosen[0]] + np.arange(frames) / fps
        gaps = np.abs(np.subtract.outer(targets, pts))
        np.testing.assert_allclose(gaps[np.arange(frames), chosen], gaps.min(1), atol=3e-6)
        # the middle: what is left before and behind differs by no more than the step that the start is rounded to
        before, behind = pts[chosen[0]] - pts[0], pts[-1] - targets[-1]
        assert (behind - before <= 2 * max(steps, default=0) + 1e-5 and before <= behind + 1e-5) or before == 0
    elif frames > 1:
        assert np.all(np.diff(chosen) == 1)


# -- the process ------------------------------------------------------------------------------------------------------


def test_the_decoder_process_imports_no_torch() -> None:
    code = "import sys, mmspeed.preprocess.decode_worker; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_overrun_is_rejected_and_the_next_file_is_served(zoo: tuple[Path, dict[str, Expect]]) -> None:
    source = source_of(zoo[0] / "h264.mp4")
    with DecodeWorker() as worker:
        worker.open(source, *LIMITS, 20)
        stuck = worker.pid
        assert stuck is not None
        os.kill(stuck, signal.SIGSTOP)
        started = time.monotonic()
        assert rejection(lambda: worker.read(source, [0], 0.3)).reason is Reason.TIME_LIMIT
        assert time.monotonic() - started < 5
        frames, _ = worker.read(source, [4], 20)
        assert number_of(frames[0]) == 4 and worker.pid not in (None, stuck)


def test_crash_is_rejected_with_its_signal(zoo: tuple[Path, dict[str, Expect]]) -> None:
    source = source_of(zoo[0] / "h264.mp4")
    with DecodeWorker() as worker:
        worker.open(source, *LIMITS, 20)
        first = worker.pid
        assert first is not None
        crash_while_busy(first)
        rejected = rejection(lambda: worker.open(source, *LIMITS, 20))
        assert rejected.reason is Reason.DECODER_CRASHED and rejected.detail.startswith("SIGSEGV")
        assert worker.open(source, *LIMITS, 20).width == 96


def test_crash_while_reading_is_tried_without_decord(zoo: tuple[Path, dict[str, Expect]]) -> None:
    source = source_of(zoo[0] / "h264.mp4")
    with DecodeWorker() as worker:
        worker.open(source, *LIMITS, 20)
        first = worker.pid
        assert first is not None
        crash_while_busy(first)
        frames, used = worker.read(source, [7], 20)
        assert number_of(frames[0]) == 7 and used == "pyav"


def crash_while_busy(pid: int) -> None:
    """Hold the process, and let it die of SIGSEGV once it has been given work."""
    os.kill(pid, signal.SIGSTOP)

    def crash() -> None:
        os.kill(pid, signal.SIGSEGV)
        os.kill(pid, signal.SIGCONT)

    threading.Timer(0.3, crash).start()


def test_the_process_ends_with_its_parent(zoo: tuple[Path, dict[str, Expect]]) -> None:
    code = (
        "import sys, os\n"
        "from mmspeed.preprocess.worker import DecodeWorker\n"
        "from mmspeed.preprocess.source import Source\n"
        "worker = DecodeWorker()\n"
        "worker.open(Source('x', sys.argv[1], None, None, 'video', (), 'train'), 10**9, 10**9, 20)\n"
        "print(worker.pid, flush=True)\n"
        "os._exit(0)\n"
    )
    path = str(zoo[0] / "h264.mp4")
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{done.stdout.strip()}").exists():
        assert time.monotonic() < deadline, "the decoder process outlives its parent"
        time.sleep(0.05)


def test_decoders_do_not_write_to_the_terminal(
    zoo: tuple[Path, dict[str, Expect]], capfd: pytest.CaptureFixture[str]
) -> None:
    with DecodeWorker() as worker:
        for name in ("damaged.mp4", "random.mp4", "cut.jpg"):
            source = source_of(zoo[0] / name)
            with pytest.raises(Rejected):
                worker.open(source, *LIMITS, 20)
                worker.read(source, range(30), 20)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
