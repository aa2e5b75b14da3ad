"""Windows of time, and the clips that are taken of a source."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mmspeed.config.schema import DataConfig
from mmspeed.media.probe import Probe, probe
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.media.source import Source
from mmspeed.media.windows import choose_frames, choose_windows, covers, windows_that_fit
from mmspeed.preprocess.decoding.clips import select_clips
from tests.support.decoding import source_of
from tests.support.media import write_video


def even(count: int, fps: float) -> list[float]:
    return [index / fps for index in range(count)]


def test_dividing_rates_take_evenly_spaced_frames_of_the_middle() -> None:
    assert choose_frames(even(36, 24), 9, 8) == list(range(5, 30, 3))
    assert choose_frames(even(49, 24), 49, 24) == list(range(49))
    assert choose_frames(even(60, 24), 49, 24) == list(range(5, 54))
    assert choose_frames([round(t, 3) for t in even(60, 24)], 49, 24) == list(range(5, 54))  # webm's milliseconds
    assert choose_frames(even(30, 30), 5, None) == [12, 13, 14, 15, 16]
    assert choose_frames([7.0], 1, 8) == [0]


def test_too_short_says_how_much_is_there() -> None:
    with pytest.raises(Rejected) as rejected:
        choose_frames(even(48, 24), 49, 24)
    assert (
        rejected.value.reason is Reason.TOO_SHORT
        and rejected.value.detail == "it has 2.00 s, and 49 frames need 2.00 s"
    )
    with pytest.raises(Rejected, match="4 frames, and 5 frames need 5 frames"):
        choose_windows(even(4, 24), 5, None, "all")


def test_windows_are_evenly_spread() -> None:
    pts = even(240, 24)
    assert choose_windows(pts, 24, 24, 2) == [list(range(48, 72)), list(range(168, 192))]
    assert choose_windows(pts, 24, 24, "all") == [list(range(k, k + 24)) for k in range(0, 240, 24)]
    assert choose_windows(pts, 24, 24, 99) == choose_windows(pts, 24, 24, "all")
    assert choose_windows(pts, 8, 8, 2) == [list(range(48, 72, 3)), list(range(169, 193, 3))]
    assert choose_windows(pts, 24, None, 2) == [list(range(48, 72)), list(range(168, 192))]
    assert choose_windows(pts[:49], 24, None, "all") == [list(range(24)), list(range(24, 48))]
    assert choose_windows(pts[:30], 24, 24, 5) == [choose_frames(pts[:30], 24, 24)]
    assert choose_windows([0.0], 1, 8, "all") == [[0]]


@given(
    st.lists(st.floats(0.005, 0.3), min_size=0, max_size=120),
    st.integers(1, 20),
    st.one_of(st.none(), st.floats(1, 60)),
    st.floats(-5, 1000),
    st.one_of(st.integers(1, 8), st.just("all")),
)
def test_window_properties(steps: list[float], frames: int, fps: float | None, start: float, windows: Any) -> None:
    pts = [float(t) for t in start + np.cumsum([0.0, *steps])]
    assume(covers(pts, frames, fps))
    chosen = choose_windows(pts, frames, fps, windows)
    assert 1 <= len(chosen) and (windows == "all" or len(chosen) <= windows)
    for indices in chosen:
        assert len(indices) == frames and indices == sorted(indices) and 0 <= indices[0] and indices[-1] < len(pts)
        if fps is not None and frames > 1:
            targets = pts[indices[0]] + np.arange(frames) / fps
            gaps = np.abs(np.subtract.outer(targets, pts))
            np.testing.assert_allclose(gaps[np.arange(frames), indices], gaps.min(1), atol=3e-6)
        elif frames > 1:
            assert np.all(np.diff(indices) == 1)
    for before, behind in pairwise(chosen):
        assert before[-1] < behind[0]
    if fps is not None and frames > 1 and len(chosen) == 1 and windows == 1:
        # the middle: what is left before and behind differs by no more than the step that the start is rounded to
        before, behind = pts[chosen[0][0]] - pts[0], pts[-1] - (pts[chosen[0][0]] + (frames - 1) / fps)
        assert (behind - before <= 2 * max(steps, default=0) + 1e-5 and before <= behind + 1e-5) or before == 0


@given(st.integers(2, 400), st.integers(2, 20), st.sampled_from([1, 2, 3, 4]), st.integers(1, 12))
def test_as_many_windows_as_fit_of_an_even_clip(count: int, frames: int, every: int, windows: int) -> None:
    pts, fps = even(count, 24), 24 / every
    assume(covers(pts, frames, fps))
    fit = windows_that_fit(pts, frames, fps)
    assert covers(pts, fit * frames, fps) and (fit + 1) * frames * every > count
    chosen = choose_windows(pts, frames, fps, windows)
    assert len(chosen) == min(windows, fit)
    assert all(np.all(np.diff(indices) == every) for indices in chosen)
    centres = [(indices[0] + indices[-1]) / 2 for indices in chosen]
    ideal = [(count - 1) * (number + 0.5) / len(chosen) for number in range(len(chosen))]
    assert np.abs(np.subtract(centres, ideal)).max() <= every + 1


def settings(**options: Any) -> DataConfig:
    buckets = [{"frames": 9, "height": 32, "width": 32}, {"frames": 3, "height": 32, "width": 48}]
    buckets.append({"frames": 1, "height": 32, "width": 32})
    return DataConfig.model_validate({"sources": [{"path": "x"}], "buckets": buckets, "fps": 8} | options)


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> tuple[Source, Probe]:
    path = write_video(tmp_path_factory.mktemp("v") / "v.mp4", frames=36, fps=8)
    return source_of(path), probe(source_of(path), 10**9, 10**9)


def test_one_variant_is_the_middle_of_the_best_bucket(video: tuple[Source, Probe]) -> None:
    (clip,) = select_clips(*video, settings(), False, 0)
    assert clip.bucket.name == "009x0032x0032" and clip.crop == (16, 0, 80, 64)
    assert list(clip.indices) == choose_frames(video[1].pts_seconds, 9, 8)
    assert (clip.window, clip.crop_number, clip.fps, clip.seconds) == (0, 0, 8.0, 9 / 8)


def test_variants_are_buckets_windows_and_crops_in_order(video: tuple[Source, Probe]) -> None:
    clips = select_clips(*video, settings(windows=2, crops=3, buckets_per_clip=5), False, 0)
    assert [(clip.bucket.frames, clip.window, clip.crop_number) for clip in clips] == [
        *((9, window, crop) for window in (0, 1) for crop in (0, 1, 2)),
        (3, 0, 0),  # of the picture's own shape: nothing is cut
        (3, 1, 0),
    ]
    assert len({(clip.bucket, clip.indices, clip.crop) for clip in clips}) == len(clips)
    assert len({clip.content_id for clip in clips}) == 1
    assert select_clips(*video, settings(windows=1, crops=3), False, 0)[1] == clips[0].__class__(
        **{**select_clips(*video, settings(), False, 0)[0].__dict__, "crop_number": 1}
    )
    assert len(select_clips(*video, settings(windows="all"), False, 0)) == 4
