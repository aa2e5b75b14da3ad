"""Videos as notebooks show them: by IPython's own formatter, played back from the embedded file."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import numpy as np
import pytest

from mmspeed.pipelines.inference import media
from mmspeed.pipelines.inference.media import Video
from tests.support.decoding import video_of


def moving(frames: int, height: int, width: int) -> Video:
    """A bright bar that moves over a dark ground."""
    frames_FHWC = np.full((frames, height, width, 3), 40, np.uint8)
    for number in range(frames):
        frames_FHWC[number, :, number % width : number % width + 8] = (200, 120, 60)
    return Video(frames_FHWC, 8.0)


def embedded(html: str, kind: str, folder: Path) -> Path:
    match = re.search(rf'src="data:{kind};base64,([^"]+)"', html)
    assert match is not None
    path = folder / f"shown.{kind.rpartition('/')[2]}"
    path.write_bytes(base64.b64decode(match[1]))
    return path


def test_a_single_frame_is_a_picture(tmp_path: Path) -> None:
    video = moving(1, 48, 64)
    frames_FHWC, _ = video_of(embedded(video._repr_html_(), "image/png", tmp_path))
    assert np.array_equal(frames_FHWC, video.frames_FHWC)


def test_what_is_embedded_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frames_FHWC, _ = video_of(embedded(moving(2, 320, 1280)._repr_html_(), "video/mp4", tmp_path))
    assert frames_FHWC.shape == (2, 160, 640, 3)
    noise = Video(np.random.default_rng(0).integers(0, 256, (4, 128, 256, 3), np.uint8), 8.0)
    monkeypatch.setattr(media, "MOST_BYTES", 60_000)
    html = noise._repr_html_()
    assert embedded(html, "video/mp4", tmp_path).stat().st_size <= 60_000 and 'width="256"' in html
    monkeypatch.setattr(media, "MOST_BYTES", 100)
    assert "too long to be shown" in noise._repr_html_()
