"""Stored numbers that are no sRGB or BT.709 are brought there, or rejected by name; version 1 takes them as they are."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms, features

from mmspeed.media.colours import deinterlaces, light_of, maps_light
from mmspeed.media.pixel_rules import NEWEST_RULES, PixelRules
from mmspeed.media.probe import probe
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.media.scaling import pixel_parts
from tests.support.decoding import LIMITS, source_of
from tests.support.media import write_image, write_video
from tests.support.odd_media import ADOBE, P3, icc_profile, shown, write_fields, write_plain_colour

_TO_BT709 = {
    "bt2020": ((1.6605, -0.5876, -0.0728), (-0.1246, 1.1329, -0.0083), (-0.0182, -0.1006, 1.1187)),
    "smpte432": ((1.2249, -0.2247, 0.0), (-0.0420, 1.0419, 0.0), (-0.0197, -0.0786, 1.0979)),
}
_COLOURS = [
    (1.0, 1.0, 1.0),
    (0.25, 0.25, 0.25),
    (0.02, 0.02, 0.02),
    (0.5, 0.4, 0.3),
    (0.3, 0.4, 0.3),
]  # light; white is 1


def planes(rgb: Sequence[float]) -> tuple[int, ...]:
    """The 10-bit planes of BT.2020's matrix for signals from 0 to 1."""
    red, green, blue = rgb
    luma = 0.2627 * red + 0.6780 * green + 0.0593 * blue
    chroma = (blue - luma) / 1.8814, (red - luma) / 1.4746
    return round(64 + 876 * luma), *(round(512 + 896 * value) for value in chroma)


def pq(light: float) -> float:
    """The signal of PQ for light of which 1 is 203 cd/m2."""
    y = (light * 203 / 10000) ** 0.1593017578125
    return float(((0.8359375 + 18.8515625 * y) / (1 + 18.6875 * y)) ** 78.84375)


def seen(light: Sequence[float], primaries: str) -> np.ndarray:
    """What a player shows of such light: BT.709's primaries, the display's gamma of 2.4, white at most."""
    linear = np.clip(np.array(_TO_BT709[primaries]) @ np.array(light), 0, 1)
    return np.asarray(255 * linear ** (1 / 2.4))


@pytest.mark.skipif(not maps_light(), reason="this FFmpeg does not map light")
@pytest.mark.parametrize("light", _COLOURS, ids=str)
@pytest.mark.parametrize("form", ["PQ", "BT.2020", "P3"])
def test_light_and_primaries_are_mapped_to_those_of_bt709(form: str, light: tuple[float, ...], tmp_path: Path) -> None:
    primaries = "smpte432" if form == "P3" else "bt2020"
    signal = [pq(value) if form == "PQ" else value ** (1 / 2.4) for value in light]
    curve = "smpte2084" if form == "PQ" else "bt709"
    params = f"colorprim={primaries}:transfer={curve}:colormatrix=bt2020nc"
    path = write_plain_colour(tmp_path / "a.mp4", planes(signal), params)
    found, frames = shown(path)
    assert np.abs(frames[0, 32, 48] - seen(light, primaries)).max() <= 4
    parts = pixel_parts(NEWEST_RULES, found, (0, 0, 96, 64))
    assert parts["hdr"] == f"relative_colorimetric/1 {curve}/{primaries}"


@pytest.mark.skipif(not maps_light(), reason="this FFmpeg does not map light")
def test_light_that_the_container_alone_states(tmp_path: Path) -> None:
    """ProRes states in each frame that it does not know."""
    signal = planes([pq(value) for value in _COLOURS[3]])
    for ending in ("mov", "mkv"):
        path = write_plain_colour(tmp_path / f"a.{ending}", signal, "", "yuv422p10le", codec="prores_ks", light=(16, 9))
        assert np.abs(shown(path)[1][0, 32, 48] - seen(_COLOURS[3], "bt2020")).max() <= 4


@pytest.mark.skipif(not maps_light(), reason="this FFmpeg does not map light")
def test_hlg_with_subsampled_chroma_and_a_crop(tmp_path: Path) -> None:
    """Its reference white, 75 % of the signal, is white; what is brighter too."""
    for share, least, most in ((0.75, 250, 255), (1.0, 250, 255), (0.5, 120, 160)):
        values = (round(64 + 876 * share), 512, 512)
        path = write_plain_colour(
            tmp_path / "a.mp4", values, "transfer=arib-std-b67:colormatrix=bt2020nc", "yuv420p10le"
        )
        frames = shown(path)[1]
        assert least <= frames.min() <= frames.max() <= most


def test_what_is_not_converted_is_rejected_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, form in (("YCgCo", "yuv444p"), ("ICtCp", "yuv444p10le")):
        codec, params = ("libx264", "colormatrix=YCgCo") if name == "YCgCo" else ("libx265", "colormatrix=ictcp")
        path = write_plain_colour(tmp_path / "a.mp4", (64, 64, 255), params, form, codec=codec)
        with pytest.raises(Rejected, match=f"its colour matrix is {name}") as rejected:
            probe(source_of(path), *LIMITS)
        assert rejected.value.reason is Reason.UNKNOWN_COLOURS
    path = write_plain_colour(tmp_path / "a.mp4", (500, 512, 512), "transfer=log100")
    with pytest.raises(Rejected, match="its light is logarithmic"):
        probe(source_of(path), *LIMITS)
    path = write_plain_colour(tmp_path / "a.mp4", (500, 500, 500), "transfer=smpte2084:colormatrix=gbr", "gbrp10le")
    with pytest.raises(
        Rejected, match=r"its light is smpte2084/bt2020 \(transfer, primaries\), and gbrp10le is not mapped"
    ):
        shown(path)
    monkeypatch.setattr("mmspeed.media.probe.maps_light", lambda: False)
    path = write_plain_colour(tmp_path / "b.mp4", (500, 512, 512), "transfer=smpte2084:colormatrix=bt2020nc")
    with pytest.raises(Rejected, match="and this FFmpeg does not map it"):
        shown(path)


def test_the_light_of_bt709_is_taken_as_it_is() -> None:
    assert {light_of(transfer, primaries) for transfer in (1, 2, 6, 13, 14) for primaries in (1, 2, 5, 6)} == {""}
    assert [light_of(16, 2), light_of(16, 1), light_of(1, 12)] == [
        "smpte2084/bt2020",
        "smpte2084/bt709",
        "bt709/smpte432",
    ]


@pytest.mark.skipif(not deinterlaces(), reason="this FFmpeg has no bwdif")
def test_interlaced_video_is_made_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_fields(tmp_path / "a.mp4")
    found, frames = shown(path)
    assert (found.applied, len(frames)) == (("fields",), 12)
    for number, frame in enumerate(frames[..., 0].astype(int)):
        combed = np.abs(frame[1:-1] - (frame[:-2] + frame[2:]) / 2).max()
        assert combed <= 20 and abs(np.flatnonzero(frame[32] > 125).mean() - (15 + 6 * number)) <= 2
    assert np.array_equal(shown(path, (9, 11))[1], frames[[9, 11]]), (
        "without a seek, so that each has the same neighbours"
    )
    monkeypatch.setattr("mmspeed.media.probe.deinterlaces", lambda: False)
    with pytest.raises(Rejected, match="no filter bwdif") as rejected:
        shown(path)
    assert rejected.value.reason is Reason.INTERLACED
    assert shown(write_video(tmp_path / "plain.mp4"))[0].applied == ()


def picture(path: Path, mode: str, profile: bytes) -> Path:
    pixels = np.zeros((64, 96, 3), np.uint8)
    pixels[:, :32], pixels[:, 32:64], pixels[:, 64:] = (190, 70, 60), (70, 180, 80), (120, 120, 120)
    image = Image.fromarray(pixels).convert(mode)
    if mode == "RGBA":
        image.putalpha(Image.fromarray(np.repeat(np.array([[255, 0]], np.uint8), 48, 1).repeat(64, 0)))
    more = {"quality": 98, "subsampling": 0} if path.suffix == ".jpg" else {}
    image.save(path, icc_profile=profile, **more)
    return path


@pytest.mark.parametrize(
    ("name", "mode", "profile"),
    [
        ("adobe.jpg", "RGB", icc_profile(2.2, ADOBE)),
        ("p3.png", "RGB", icc_profile(2.2, P3)),
        ("linear.png", "RGB", icc_profile(1.0, P3)),
        ("palette.png", "P", icc_profile(1.0, P3)),
        ("grey.png", "L", icc_profile(1.0)),
        ("grey.jpg", "L", icc_profile(1.0, P3)),
        ("scan.tiff", "RGB", icc_profile(2.2, ADOBE)),
        ("still.webp", "RGB", icc_profile(1.0, P3)),
    ],
)
def test_pictures_look_as_their_profile_says(name: str, mode: str, profile: bytes, tmp_path: Path) -> None:
    path = picture(tmp_path / name, mode, profile)
    stored = Image.open(path)
    stored = stored.convert("L" if b"GRAY" in profile[:20] else "RGB")
    target = ImageCms.createProfile("sRGB")
    want = ImageCms.profileToProfile(stored, ImageCms.ImageCmsProfile(io.BytesIO(profile)), target, outputMode="RGB")
    found, frames = shown(path)
    assert np.array_equal(frames[0], np.asarray(want)) and found.applied == ("profile",)
    plain = np.asarray(Image.open(path).convert("RGB"))
    assert np.abs(plain.astype(int) - frames[0]).max() > 10


def test_transparent_pictures_are_composed_in_srgb(tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", "RGBA", icc_profile(1.0, P3))
    frame = shown(path)[1][0]
    assert (frame[:, 48:] == 255).all() and frame[32, 16].tolist() == shown(
        picture(tmp_path / "b.png", "RGB", icc_profile(1.0, P3))
    )[1][0, 32, 16].tolist()


def test_profiles_that_change_nothing_are_no_part_of_a_key(tmp_path: Path) -> None:
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    path = picture(tmp_path / "a.png", "RGB", srgb)
    found, frames = shown(path)
    assert pixel_parts(PixelRules(), found, (0, 0, 96, 64)) == {} and np.array_equal(
        frames[0], np.asarray(Image.open(path))
    )


@pytest.mark.parametrize(
    ("profile", "words"),
    [(b"no profile", "cannot be applied"), (icc_profile(2.2), "is for GRAY colours, and it is of mode RGB")],
)
def test_profiles_that_cannot_be_applied_are_named(profile: bytes, words: str, tmp_path: Path) -> None:
    path = picture(tmp_path / "a.png", "RGB", profile)
    with pytest.raises(Rejected, match=words):
        shown(path)


def with_chunk(path: Path, kind: bytes, data: bytes) -> Path:
    """A PNG with one more chunk behind its header."""
    png = path.read_bytes()
    body = kind + data
    path.write_bytes(png[:33] + struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body)) + png[33:])
    return path


def test_a_profile_that_pillow_gives_up_is_named(tmp_path: Path) -> None:
    path = with_chunk(write_image(tmp_path / "a.png"), b"iCCP", b"name\0\0damaged")
    with pytest.raises(Rejected, match="its ICC profile is damaged, or a part of it is missing"):
        shown(path)


def test_what_a_png_states_of_its_light(tmp_path: Path) -> None:
    path = with_chunk(write_image(tmp_path / "linear.png"), b"gAMA", struct.pack(">I", 100000))
    found, frames = shown(path)
    light = np.asarray(Image.open(path).convert("RGB")) / 255
    assert found.applied == ("profile",)
    assert (
        np.abs(frames[0] - 255 * np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)).max()
        <= 1
    )
    assert shown(with_chunk(write_image(tmp_path / "usual.png"), b"gAMA", struct.pack(">I", 45455)))[0].applied == ()
    assert shown(with_chunk(write_image(tmp_path / "srgb.png"), b"cICP", bytes((1, 13, 0, 1))))[0].applied == ()
    path = with_chunk(write_image(tmp_path / "pq.png"), b"cICP", bytes((9, 16, 0, 1)))
    with pytest.raises(Rejected, match="its light is smpte2084/bt2020"):
        shown(path)


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow reads no AVIF")
def test_what_an_avif_states_of_its_light(tmp_path: Path) -> None:
    path = write_image(tmp_path / "a.avif")
    data = path.read_bytes()
    assert shown(path)[0].applied == ()
    at = data.index(b"colrnclx") + 8
    path.write_bytes(data[:at] + struct.pack(">2H", 9, 18) + data[at + 4 :])
    with pytest.raises(Rejected, match="its light is arib-std-b67/bt2020"):
        shown(path)


def test_lab_is_rejected_by_name(tmp_path: Path) -> None:
    write_image(path := tmp_path / "a.tiff", "LAB")
    with pytest.raises(Rejected, match="its colours are of LAB"):
        shown(path)


@pytest.mark.parametrize(
    ("dtype", "tags", "words"),
    [
        (np.float32, {}, "floating-point"),
        (np.int32, {}, "signed or have 32 bits"),
        (np.uint8, {339: 2}, "values are signed"),
        (np.uint16, {262: 0}, "count down from white"),
        (np.uint16, {258: 12}, "have 12 bits"),
    ],
)
def test_numbers_without_a_white_are_rejected(dtype: type, tags: dict[int, int], words: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tiff"
    pixels = np.linspace(0, 1, 96 * 64, dtype=np.float32).reshape(64, 96).astype(dtype)
    Image.fromarray(pixels).save(path, tiffinfo=tags)
    if 258 in tags:  # Pillow writes 16
        path.write_bytes(
            path.read_bytes().replace(struct.pack("<HHIH", 258, 3, 1, 16), struct.pack("<HHIH", 258, 3, 1, 12))
        )
    with pytest.raises(Rejected, match=words) as rejected:
        shown(path)
    assert rejected.value.reason is Reason.UNKNOWN_COLOURS
    assert shown(write_image(tmp_path / "deep.png", "I;16"))[0].applied == ()


def test_a_separate_first_picture_is_no_frame(tmp_path: Path) -> None:
    images = [Image.new("RGB", (96, 64), (10 * number, 0, 0)) for number in range(5)]
    for count in (4, 1):
        path = tmp_path / f"{count}.png"
        images[0].save(path, save_all=True, append_images=images[1 : 1 + count], default_image=True, duration=100)
        found, frames = shown(path)
        assert found.kind == ("video" if count > 1 else "image") and found.applied == ("cover",)
        assert found.pts_seconds == pytest.approx([0.1 * number for number in range(count)])
        assert frames[:, 0, 0, 0].tolist() == [10, 20, 30, 40][:count]
    path = tmp_path / "plain.png"
    images[0].save(path, save_all=True, append_images=images[1:], duration=100)
    assert shown(path)[0].applied == ()
