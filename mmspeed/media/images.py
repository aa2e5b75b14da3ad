"""Read still and animated pictures with Pillow: times, display orientation, and RGB.

Legend: F frames, H W height and width in pixels. Pictures with an alpha channel are composed on a background: white by
default, which most of them were drawn for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import BinaryIO

import numpy as np
from PIL import Image, ImageOps, TiffImagePlugin, UnidentifiedImageError, features

from mmspeed.media.colours import ToSrgb, gamma_transform, light_of, profile_transform
from mmspeed.media.geometry import stated_light
from mmspeed.media.pixel_rules import WHITE
from mmspeed.media.rejections import Reason, Rejected, in_words

_FORMATS = ("PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF")
_ANIMATED = ("GIF", "WEBP", "PNG", "AVIF")
_ORIENTATION = 0x0112
_COLOURS = {
    "P": "RGB",
    "PA": "RGB",
    "RGBA": "RGB",
    "RGBX": "RGB",
    "LA": "L",
    "1": "L",
    "I;16": "L",
    "I": "L",
    "I;16B": "L",
    "YCbCr": "RGB",
}
# of a TIFF: tags of its values' bits, what 0 is (0: white), and whether they are signed (2)
_BITS, _MEANING, _SIGNS = 258, 262, 339
_SHORTEST, _DEFAULT = 10, 100  # milliseconds: browsers show frames that state 10 ms or less for 100 ms


def open_picture(file: BinaryIO) -> Image.Image:
    """Open a picture without reading its pixels. Raises Rejected (undecodable, too_large)."""
    formats = (*_FORMATS, "AVIF") if features.check("avif") else _FORMATS
    try:
        return Image.open(file, formats=formats)
    except Exception as error:  # Pillow's plug-ins raise almost anything on hostile headers
        raise _rejected(error) from None


def separate_first(image: Image.Image) -> int:
    """1 for an animated PNG whose first picture is no part of the animation, 0 for others."""
    return int(getattr(image, "default_image", False) and getattr(image, "n_frames", 1) > 1)


def refused_depth(image: Image.Image) -> str:
    """Why numbers of this depth are not read, in words; empty if they are. Raises Rejected for colours that no version reads."""
    if image.mode in ("LAB", "HSV"):
        raise Rejected(Reason.UNKNOWN_COLOURS, f"its colours are of {image.mode}, which is not converted")
    if image.mode == "F":
        return "its values are floating-point numbers, of which it does not say which is white"
    if image.mode == "I" and image.format == "TIFF":
        return "its values are signed or have 32 bits, and it does not say which is white"
    return _odd_numbers(image) if isinstance(image, TiffImagePlugin.TiffImageFile) else ""


def _odd_numbers(image: TiffImagePlugin.TiffImageFile) -> str:
    """Why Pillow takes a TIFF's values for others than they are, in words; empty if it does not."""
    if 2 in image.tag_v2.get(_SIGNS, ()):
        return "its values are signed, and it does not say which is white"
    if not image.mode.startswith("I;16"):
        return ""
    bits = image.tag_v2.get(_BITS, (16,))[0]
    if bits != 16:
        return f"its values have {bits} bits, which are not scaled"
    return (
        "its values of 16 bits count down from white, which is not inverted" if image.tag_v2.get(_MEANING) == 0 else ""
    )


def profile_of(image: Image.Image) -> ToSrgb | None:
    """The transform by a picture's ICC profile or PNG's gamma; None if it has none, or one that changes no colours. Raises Rejected."""
    profile = image.info.get("icc_profile", b"")
    if profile is None:  # Pillow's word for one that it could not put together
        raise Rejected(Reason.UNKNOWN_COLOURS, "its ICC profile is damaged, or a part of it is missing")
    if profile:
        return profile_transform(profile, _COLOURS.get(image.mode, image.mode))
    return gamma_transform(float(image.info.get("gamma", 0))) if "srgb" not in image.info else None


def picture_light(file: BinaryIO, image: Image.Image) -> str:
    """The light that an AVIF's `colr` box or a PNG's cICP chunk states (`colours.light_of`); empty where an ICC profile stands for it."""
    if image.info.get("icc_profile"):
        return ""
    stated = stated_light(file, image.format or "")
    return light_of(*stated) if stated else ""


def picture_times(image: Image.Image, skipped: int = 0) -> list[float]:
    """The presentation time of each frame in seconds, without the first `skipped`; `[0.0]` for a still.

    Raises Rejected (truncated, undecodable).
    """
    try:
        count = getattr(image, "n_frames", 1) if image.format in _ANIMATED else 1
        times = [0.0]
        for index in range(skipped, count - 1):
            image.seek(index)
            if image.format in ("WEBP", "AVIF"):
                image.load()  # these state a frame's duration with its pixels
            duration = float(image.info.get("duration", 0) or 0)
            times.append(times[-1] + (duration if duration > _SHORTEST else _DEFAULT) / 1000)
        image.seek(0)
        return times
    except Exception as error:
        raise _rejected(error) from None


def shown_size(image: Image.Image) -> tuple[int, int]:
    """(width, height) after the EXIF orientation. Raises Rejected (truncated, undecodable)."""
    try:
        turned = image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8)
    except Exception as error:
        raise _rejected(error) from None
    return image.size[::-1] if turned else image.size


def picture_frames(
    file: BinaryIO, indices: Sequence[int], background: str = WHITE, profile: bool = False, skipped: int = 0
) -> Iterator[tuple[int, np.ndarray | Rejected]]:
    """Yield the frames `indices` (ascending) of a picture, upright, (H, W, 3) uint8; or their rejections.

    Transparent pixels show `background` (`#rrggbb`). With `profile` its ICC profile is applied; the first `skipped` pictures are no
    frames. Rejections are truncated or undecodable. Raises Rejected if the file is not a picture.
    """
    shape: tuple[int, ...] | None = None
    with open_picture(file) as image:
        for index in indices:
            frame_HWC: np.ndarray | Rejected
            try:
                shape = shape or (*shown_size(image)[::-1], 3)
                image.seek(index + skipped)
                transform = profile_of(image) if profile else None
                frame_HWC = np.asarray(_rgb(ImageOps.exif_transpose(image), background, transform))
                if frame_HWC.shape != shape:
                    frame_HWC = Rejected(Reason.UNDECODABLE, "the picture's size changes between frames")
            except Exception as error:
                frame_HWC = error if isinstance(error, Rejected) else _rejected(error)
            yield index, frame_HWC


def on_background(image: Image.Image, background: str) -> Image.Image:
    """Compose an RGBA picture on a plain `background` (`#rrggbb`): 8-bit RGB."""
    return Image.alpha_composite(Image.new("RGBA", image.size, background), image).convert("RGB")


def _rgb(image: Image.Image, background: str, transform: ToSrgb | None = None) -> Image.Image:
    """Convert a picture of any mode to 8-bit RGB, by the transform of its profile if one is given."""
    if image.mode.startswith("I;16") or image.mode == "I":
        wide = np.asarray(image).astype(np.int64)
        image = Image.fromarray((np.clip(wide, 0, 65535) // 257).astype(np.uint8))
    if image.has_transparency_data:
        clear = image.convert("RGBA")
        if transform is not None:
            colours = transform.applied(image.convert("L") if transform.mode == "L" else clear.convert("RGB"))
            colours.putalpha(clear.getchannel("A"))
            clear = colours
        return on_background(clear, background)
    return image.convert("RGB") if transform is None else transform.applied(image)


def _rejected(error: Exception) -> Rejected:
    text = str(error)
    if isinstance(error, Image.DecompressionBombError):
        return Rejected(Reason.TOO_LARGE, text or "more pixels than are allowed")
    if isinstance(error, UnidentifiedImageError):
        return Rejected(Reason.UNDECODABLE, "not a picture that Pillow knows")
    if isinstance(error, EOFError) or "truncated" in text.lower() or "unexpected end" in text.lower():
        return Rejected(
            Reason.TRUNCATED, f"the picture ends too early ({text})" if text else "the picture ends too early"
        )
    return Rejected(Reason.UNDECODABLE, in_words(error))
