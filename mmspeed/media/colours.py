"""Stored colours that are not sRGB's or BT.709's: how they are brought there, and which are not read.

Of video, swscale maps the transfer and the primaries of BT.2100 and others to BT.709's, relative to the white that BT.2408 gives to graphics
(203 cd/m2): that white and what is brighter become white. Of pictures, LittleCMS applies their ICC profile.
"""

from __future__ import annotations

import io
from functools import lru_cache
from itertools import product
from typing import Protocol

import av
import av.error
import av.filter
import numpy as np
from PIL import Image, ImageCms, features

from mmspeed.media.rejections import Reason, Rejected

MAP = "relative_colorimetric/1"  # raise its number when it gives other pixels
UNREAD_MATRICES = {  # by FFmpeg's number: what swscale has no conversion for
    8: "YCgCo",
    10: "BT.2020 with constant luminance",
    11: "SMPTE 2085",
    12: "derived from its primaries",
    13: "derived from its primaries, with constant luminance",
    14: "ICtCp",
    15: "IPT-C2",
    16: "YCgCo-R",
    17: "YCgCo-R",
}
UNREAD_TRANSFERS = {9: "logarithmic", 10: "logarithmic"}
_TRANSFERS = {8: "linear", 16: "smpte2084", 17: "smpte428", 18: "arib-std-b67"}
_PRIMARIES = {9: "bt2020", 11: "smpte431", 12: "smpte432"}
_PLAIN, _WIDE = "bt709", "bt2020"
BT2100 = ("smpte2084", "arib-std-b67")
_WHITE = 0.5807  # of PQ: 203 cd/m2
_SAME = 2  # of 255: a profile that changes colours by no more is sRGB's, rounded otherwise
_NEAR_SRGB = 10  # of 255: nearly so far is the curve of gamma 2.2, which most PNGs state, from sRGB's
_STEPS = 9  # of each channel in a lattice of colours


def light_of(transfer: int, primaries: int) -> str:
    """FFmpeg's words for a transfer and primaries, `transfer/primaries`; empty for those that are taken as BT.709's."""
    curve = _TRANSFERS.get(transfer, _PLAIN)
    gamut = _PRIMARIES.get(primaries, _WIDE if curve in BT2100 and primaries != 1 else _PLAIN)
    return "" if (curve, gamut) == (_PLAIN, _PLAIN) else f"{curve}/{gamut}"


def mapped(light: str) -> str:
    """The options of libavfilter's `scale` that map such light to BT.709; empty for none."""
    if not light:
        return ""
    transfer, primaries = light.split("/")
    into = f"out_transfer={_PLAIN}:out_primaries={_PLAIN}:intent=relative_colorimetric"
    return f":in_transfer={transfer}:in_primaries={primaries}:{into}"


@lru_cache(maxsize=1)
def maps_light() -> bool:
    """True if this FFmpeg's `scale` maps the reference white of PQ to white."""
    frame = av.VideoFrame(16, 16, "yuv444p16le")
    for plane, level in zip(frame.planes, ((16 + 219 * _WHITE) * 256, 32768, 32768), strict=True):
        plane.update(np.full(plane.buffer_size // 2, round(level), "<u2").tobytes())
    options = f"in_color_matrix=bt2020:in_range=limited:out_range=full{mapped('/'.join(('smpte2084', _WIDE)))}"
    graph = av.filter.Graph()
    try:
        source = graph.add("buffer", video_size="16x16", pix_fmt=frame.format.name, time_base="1/1", pixel_aspect="1/1")
        nodes = [source, graph.add("scale", options), graph.add("format", "gbrp"), graph.add("buffersink")]
        graph.link_nodes(*nodes).configure()
        graph.vpush(frame)
        return bool(graph.vpull().to_ndarray(format="rgb24").min() >= 240)
    except (av.error.FFmpegError, ValueError):
        return False


def deinterlaces() -> bool:
    """True if this FFmpeg has the filter that makes whole frames of fields."""
    return "bwdif" in av.filter.filters_available


class ToSrgb(Protocol):
    """Brings pictures to sRGB. `mode`: of the pictures that it takes."""

    mode: str

    def applied(self, image: Image.Image) -> Image.Image:
        """A picture in sRGB."""
        ...


class _GammaTransform:
    """Pictures of a gamma brought to sRGB's curve; a PNG states its inverse."""

    mode = "RGB"

    def __init__(self, inverse: float) -> None:
        light = (np.arange(256) / 255) ** (1 / inverse)
        shown = np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)
        self.table = (255 * shown).round().astype(int).tolist()

    def applied(self, image: Image.Image) -> Image.Image:
        return image.convert("RGB").point(self.table * 3)


def gamma_transform(inverse: float) -> ToSrgb | None:
    """The transform of a PNG that states the inverse of its gamma; None for none, and for one near to sRGB's curve, as 1 / 2.2 is."""
    if inverse <= 0:
        return None
    transform = _GammaTransform(inverse)
    return transform if max(abs(value - level) for level, value in enumerate(transform.table)) > _NEAR_SRGB else None


class _ProfileTransform:
    """Pictures of one mode brought to sRGB by an ICC profile. Raises Rejected for a profile that cannot be applied to the mode."""

    def __init__(self, profile: bytes, mode: str) -> None:
        if not features.check("littlecms2"):
            raise Rejected(Reason.UNKNOWN_COLOURS, "it has an ICC profile, and this Pillow is built without LittleCMS")
        try:
            stored = ImageCms.ImageCmsProfile(io.BytesIO(profile))
            space = stored.profile.xcolor_space.strip()
            self.mode = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}.get(space, "")
            if not self.mode or (self.mode != mode and (self.mode, mode) != ("RGB", "L")):
                raise Rejected(
                    Reason.UNKNOWN_COLOURS, f"its ICC profile is for {space} colours, and it is of mode {mode}"
                )
            self._transform = ImageCms.buildTransform(stored, ImageCms.createProfile("sRGB"), self.mode, "RGB")
        except (ImageCms.PyCMSError, OSError, ValueError, TypeError) as error:
            raise Rejected(Reason.UNKNOWN_COLOURS, f"its ICC profile cannot be applied ({error})") from None

    def applied(self, image: Image.Image) -> Image.Image:
        shown = ImageCms.applyTransform(image.convert(self.mode), self._transform)
        assert shown is not None
        return shown

    def changes(self) -> bool:
        """True if colours become others than a plain conversion gives."""
        levels = np.linspace(0, 255, _STEPS).round().astype(np.uint8)
        channels = len(Image.new(self.mode, (1, 1)).getbands())
        lattice = np.array(list(product(levels, repeat=channels)), np.uint8).reshape(1, -1, channels)
        image = Image.fromarray(lattice[..., 0] if channels == 1 else lattice, self.mode)
        plain = np.asarray(image.convert("RGB"), np.int16)
        return int(np.abs(np.asarray(self.applied(image), np.int16) - plain).max()) > _SAME


@lru_cache(maxsize=64)
def profile_transform(profile: bytes, mode: str) -> ToSrgb | None:
    """The transform by a profile; None where it changes no colours. Raises Rejected like it."""
    transform = _ProfileTransform(profile, mode)
    return transform if transform.changes() else None
