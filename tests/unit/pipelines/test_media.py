"""Videos written and read back as real files, contact sheets, and the distance between videos."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from mmspeed.errors import UserError
from mmspeed.pipelines.inference import media
from mmspeed.pipelines.inference.media import Video, contact_sheet, from_model_range, save_image
from tests.support.decoding import video_of
from tests.support.media import psnr

COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (255, 255, 255), (0, 0, 0), (200, 100, 50)]


def gradient(frames: int = 9, height: int = 48, width: int = 64) -> np.ndarray:
    """A smooth moving picture whose colours differ from corner to corner."""
    f, y, x = np.meshgrid(np.arange(frames), np.arange(height), np.arange(width), indexing="ij")
    rgb = [200 * x / width + 3 * f, 220 * y / height + 2 * f, 100 + 100 * (x - y) / (height + width)]
    return np.stack(rgb, axis=-1).astype(np.uint8)


def flat(height: int = 32, width: int = 32) -> np.ndarray:
    """One frame of each colour."""
    return np.stack([np.full((height, width, 3), colour, dtype=np.uint8) for colour in COLOURS])


@contextmanager
def full_disk(room: int) -> Iterator[None]:
    """Files of this process may hold at most `room` bytes during the block."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("fps", [8.0, 24000 / 1001])
def test_mp4_keeps_frames_rate_and_picture(tmp_path: Path, fps: float) -> None:
    video = Video(gradient(), fps)
    video.save(tmp_path / "a.mp4")
    found_FHWC, found_fps = video_of(tmp_path / "a.mp4")
    assert found_FHWC.shape == video.frames_FHWC.shape
    assert found_fps == pytest.approx(fps, rel=1e-6)
    each = [psnr(a, b) for a, b in zip(found_FHWC, video.frames_FHWC, strict=True)]
    assert min(each) > 38
    # A frame is nearer to itself than to its neighbours: none is dropped, doubled or out of order.
    assert all(each[i] > psnr(found_FHWC[i], video.frames_FHWC[i + 1]) for i in range(8))


def test_mp4_keeps_colours_and_says_which_they_are(tmp_path: Path) -> None:
    Video(flat(), 8.0).save(tmp_path / "a.mp4")
    found_FHWC, _ = video_of(tmp_path / "a.mp4")
    assert np.abs(found_FHWC.astype(int) - flat()).max() <= 4
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        frame = next(container.decode(stream))
        assert (stream.codec_context.name, frame.format.name) == ("h264", "yuv420p")
        assert (frame.colorspace, frame.color_primaries, frame.color_trc) == (6, 6, 6)


@pytest.mark.parametrize(("height", "width"), [(33, 31), (1, 1)])
def test_mp4_of_odd_size_repeats_its_edge(tmp_path: Path, height: int, width: int) -> None:
    frames_FHWC = gradient(3, height, width)
    Video(frames_FHWC, 8.0).save(tmp_path / "a.mp4")
    found_FHWC, _ = video_of(tmp_path / "a.mp4")
    assert found_FHWC.shape == (3, height + height % 2, width + width % 2, 3)
    assert psnr(found_FHWC[:, :height, :width], frames_FHWC) > 35
    assert psnr(found_FHWC[:, height - 1, :width], found_FHWC[:, -1, :width]) > 35


@pytest.mark.parametrize("fps", [24.0])
def test_gif_keeps_the_frames_and_the_duration(tmp_path: Path, fps: float) -> None:
    Video(gradient(), fps).save(tmp_path / "a.gif")
    found_FHWC, _ = video_of(tmp_path / "a.gif")
    assert found_FHWC.shape == gradient().shape
    assert psnr(found_FHWC, gradient()) > 30  # 256 colours
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.info["loop"] == 0
        durations = []
        for i in range(9):
            gif.seek(i)
            durations.append(gif.info["duration"])
    assert sum(durations) == pytest.approx(9000 / fps, abs=5)
    assert max(durations) - min(durations) <= 10


def test_png_holds_one_frame_exactly(tmp_path: Path) -> None:
    Video(gradient(1), 8.0).save(tmp_path / "a.PNG")
    assert np.array_equal(video_of(tmp_path / "a.PNG")[0], gradient(1))
    with pytest.raises(UserError, match=r"one frame, the video has 9: use \.mp4 or \.gif"):
        Video(gradient(), 8.0).save(tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()


@pytest.mark.parametrize("name", ["a.avi", "a"])
def test_unknown_endings_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=r"end it in \.mp4, \.gif or \.png"):
        Video(gradient(), 8.0).save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "a.png"])
def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"old")
    frames_FHWC = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3), dtype=np.uint8)
    with full_disk(room=1000), pytest.raises(UserError, match=r"cannot be written"):
        Video(frames_FHWC, 8.0).save(path)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == [name]
    Video(frames_FHWC, 8.0).save(path)
    assert len(video_of(path)[0]) == 1
    assert os.listdir(tmp_path) == [name]


def test_model_range_covers_every_level_and_clips() -> None:
    levels = torch.arange(256, dtype=torch.float32)
    video_3FHW = (levels / 127.5 - 1).reshape(1, 4, 8, 8).expand(3, 4, 8, 8)
    video = from_model_range(video_3FHW, 8.0)
    assert np.array_equal(video.frames_FHWC[..., 1].ravel(), np.arange(256))
    outside = from_model_range(torch.tensor([-7.0, 7.0, 0.0]).reshape(3, 1, 1, 1), 8.0)
    assert outside.frames_FHWC.ravel().tolist() == [0, 255, 128]


def test_numbers_that_are_none_are_refused() -> None:
    video_3FHW = torch.zeros(3, 1, 2, 2)
    video_3FHW[1, 0, 1, 1] = float("nan")
    with pytest.raises(UserError, match="NaN or infinity"):
        from_model_range(video_3FHW, 8.0)


def test_contact_sheet_shows_frames_and_labels(tmp_path: Path) -> None:
    videos = [Video(gradient(17), 8.0), Video(flat(), 8.0)]
    sheet = contact_sheet(videos, ["a rabbit", "flat"], columns=5)
    pixels = np.asarray(sheet)
    step, top = 64 + media.GAP, media.LABEL_HEIGHT
    for column, index in enumerate([0, 4, 8, 12, 16]):
        x = media.GAP + column * step
        assert np.array_equal(pixels[top : top + 48, x : x + 64], videos[0].frames_FHWC[index])
    second = top + 48 + media.GAP
    assert np.array_equal(pixels[second + top : second + top + 32, media.GAP : media.GAP + 32], flat()[0])
    labels = [pixels[:top], pixels[second : second + top]]
    assert all((label < 128).any() for label in labels)
    assert not np.array_equal(labels[0], labels[1])
    assert not np.array_equal(pixels[:top], np.asarray(contact_sheet(videos, ["a rabbi", "flat"], columns=5))[:top])
    save_image(sheet, tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as image:
        assert image.format == "PNG"
        assert np.array_equal(np.asarray(image), pixels)
    assert os.listdir(tmp_path) == ["sheet.png"]
