"""`sample` reads given files with the pixels that `preprocess` takes of them."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmspeed.errors import UserError
from mmspeed.media.decode import Cut, stream
from mmspeed.media.pixel_rules import NEWEST_RULES, PixelRules
from mmspeed.media.probe import probe
from mmspeed.media.reading import first_frame, last_frames
from mmspeed.media.rejections import Rejected
from mmspeed.media.scaling import crop_box
from mmspeed.shapes import Bucket
from tests.support.decoding import LIMITS, source_of
from tests.support.media import number_of, write_animation, write_image, write_video

_SIZE = Bucket(5, 32, 48)


def trained(path: Path, indices: tuple[int, ...], rules: PixelRules = NEWEST_RULES) -> np.ndarray:
    """The frames of a clip of a file as they are encoded."""
    found = probe(source_of(path), *LIMITS)
    cut = Cut(indices, crop_box(found.width, found.height, _SIZE), _SIZE.width, _SIZE.height, rules)
    ((_, frames),) = stream(source_of(path), found, [cut])
    assert not isinstance(frames, Rejected)
    return frames


def hidden(path: Path) -> Path:
    """A picture whose right half is transparent, over a colour that must not show."""
    pixels = np.full((64, 96, 4), (200, 0, 0, 255), np.uint8)
    pixels[:, 48:] = (10, 60, 10, 0)
    Image.fromarray(pixels, "RGBA").save(path)
    return path


def test_pictures(tmp_path: Path) -> None:
    navy = PixelRules(background="#000080")
    paths = [
        hidden(tmp_path / "alpha.png"),
        write_image(tmp_path / "deep.png", "I;16"),
        write_animation(tmp_path / "a.gif"),
    ]
    paths += [write_image(tmp_path / "phone.jpg", orientation=6), write_image(tmp_path / "print.jpg", "CMYK")]
    for path in paths:
        assert np.array_equal(first_frame(path, _SIZE, navy), trained(path, (0,), navy)[0])
    assert first_frame(paths[0], None, navy)[20, 80].tolist() == [0, 0, 128]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("oblong.mp4", {"width": 48, "sar": Fraction(2, 1)}),
        ("hd.mp4", {"width": 1280, "height": 720}),
        ("turned.mov", {"rotation": 90}),
        ("a.avi", {"options": {"bf": "3", "x264-params": "b-adapt=0"}}),
    ],
)
def test_the_end_of_a_video(name: str, settings: dict[str, object], tmp_path: Path) -> None:
    path = write_video(tmp_path / name, frames=20, fps=8, **settings)  # type: ignore[arg-type]
    for fps, indices in ((None, (15, 16, 17, 18, 19)), (4.0, (11, 13, 15, 17, 19))):
        frames = last_frames(path, 5, fps, _SIZE, NEWEST_RULES)
        assert np.array_equal(frames, trained(path, indices))
        assert [number_of(frame) for frame in frames] == list(indices)


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    path = write_video(tmp_path / "a.mp4", frames=20, fps=8)
    text = tmp_path / "a.txt"
    text.write_text("words")
    with pytest.raises(UserError, match=r"a\.mp4: is shorter than the 21 frames that are given at 8 frames a second"):
        last_frames(path, 21, 8.0, _SIZE, NEWEST_RULES)
    for missing in (text, tmp_path / "none.png"):
        with pytest.raises(UserError, match=rf"{missing.name}: is no picture that can be read: "):
            first_frame(missing, None, NEWEST_RULES)
