"""Real media files, made on the spot: good, odd and bad ones.

Every frame shows its number (the grey of its lower right quarter) and its orientation (red, green and blue in the other
quarters), so that a test can tell which frame it was given, and which way up.
"""

from __future__ import annotations

import io
import shutil
import struct
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from mmspeed.media.rejections import Reason
from mmspeed.shapes import Bucket

ZOO_FPS = 8.0
ZOO_BUCKETS = (Bucket(9, 32, 48), Bucket(1, 32, 48))
WIDTH, HEIGHT, FRAMES, FPS = 96, 64, 36, 24
_COLOURS = {"red": (220, 40, 40), "green": (40, 180, 40), "blue": (40, 40, 220)}
_GREY, _GREY_STEP = 16, 6
# frames encoded once (crf 20, preset 12): as root the encoder's threads are real-time ones, and those of two test processes
# can wait for each other on two cores for ever
_AV1 = Path(__file__).with_name("av1.mp4")
_QUALITY: dict[str, dict[str, str]] = {
    "libx264": {"crf": "12"},
    "libx265": {"crf": "12", "x265-params": "log-level=none:pools=none:frame-threads=1"},
    "libvpx": {"crf": "8", "b": "1M", "deadline": "realtime", "cpu-used": "8"},
    "libvpx-vp9": {"crf": "16", "b": "0", "deadline": "realtime", "cpu-used": "8"},
    "mpeg4": {"b": "4M"},
}


@dataclass(frozen=True)
class Expect:
    """What is to become of a file: its kind and displayed size, or the reasons that it may be rejected for."""

    kind: str = ""
    width: int = 0
    height: int = 0
    reasons: tuple[Reason, ...] = ()

    @property
    def good(self) -> bool:
        return not self.reasons


def picture(number: int, width: int = WIDTH, height: int = HEIGHT) -> np.ndarray:
    """Frame `number` as (H, W, 3) uint8."""
    frame = np.empty((height, width, 3), np.uint8)
    frame[: height // 2, : width // 2] = _COLOURS["red"]
    frame[: height // 2, width // 2 :] = _COLOURS["green"]
    frame[height // 2 :, : width // 2] = _COLOURS["blue"]
    frame[height // 2 :, width // 2 :] = _GREY + _GREY_STEP * number
    return frame


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    """Peak signal-to-noise ratio of two uint8 arrays of one shape, in dB; infinite when they are equal."""
    assert a.shape == b.shape and a.dtype == b.dtype == np.uint8
    error = float(np.mean((a.astype(np.float64) - b.astype(np.float64)) ** 2))
    return float("inf") if error == 0 else 10 * float(np.log10(255.0**2 / error))


def number_of(frame: np.ndarray) -> int:
    """The number that an upright frame shows."""
    height, width = frame.shape[:2]
    inner = frame[height * 5 // 8 : height * 7 // 8, width * 5 // 8 : width * 7 // 8]
    return round((float(inner.mean()) - _GREY) / _GREY_STEP)


def corners_of(frame: np.ndarray) -> list[str]:
    """The colours of the corners of a frame: upper left, upper right, lower left, lower right."""
    height, width = frame.shape[:2]
    names = []
    for y in (height // 4, height * 3 // 4):
        for x in (width // 4, width * 3 // 4):
            pixel = frame[y - 2 : y + 3, x - 2 : x + 3].reshape(-1, 3).mean(0)
            near = {name: float(np.abs(pixel - colour).max()) for name, colour in _COLOURS.items()}
            best = min(near, key=lambda name: near[name])
            names.append(best if near[best] < 40 else "grey")
    return names


def write_video(
    path: Path,
    codec: str = "libx264",
    frames: int = FRAMES,
    width: int = WIDTH,
    height: int = HEIGHT,
    fps: int = FPS,
    pix_fmt: str = "yuv420p",
    rotation: int = 0,
    sar: Fraction | None = None,
    times_ms: Sequence[int] = (),
    sound: bool = False,
    options: dict[str, str] | None = None,
    container: dict[str, str] | None = None,
) -> Path:
    """A video of numbered frames of the shown width and height, stored turned when there is a `rotation`.

    `times_ms` gives each frame's time where the rate is not even.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if codec == "libsvtav1":
        assert (frames, width, height, fps, rotation, options) == (FRAMES, WIDTH, HEIGHT, FPS, 0, None)
        return Path(shutil.copyfile(_AV1, path))
    with av.open(str(path), "w", options=container or {}) as output:
        stream: Any = output.add_stream(codec, rate=1000 if times_ms else fps)
        coded = (height, width) if rotation % 180 else (width, height)
        stream.width, stream.height, stream.pix_fmt = *coded, pix_fmt
        stream.options = _QUALITY.get(codec, {}) | ({"bf": "0"} if times_ms else {}) | (options or {})
        if sar is not None:
            stream.codec_context.sample_aspect_ratio = sar
        if rotation:
            stream.set_display_rotation(rotation)
        tone: Any = output.add_stream("aac", rate=16000, layout="mono") if sound else None
        for number in range(len(times_ms) or frames):
            pixels = np.rot90(picture(number, width, height), -rotation // 90)
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(pixels), format="rgb24")
            frame.pts = times_ms[number] if times_ms else number
            frame.time_base = Fraction(1, 1000 if times_ms else fps)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
        if tone is not None:
            _write_tone(output, tone)
    return path


def write_sound(path: Path) -> Path:
    """A file with sound only."""
    with av.open(str(path), "w") as output:
        _write_tone(output, output.add_stream("aac", rate=16000, layout="mono"))
    return path


def _write_tone(output: Any, stream: Any) -> None:
    wave = (8000 * np.sin(np.arange(1024) / 10)).astype(np.int16)[None]
    for block in range(20):
        frame = av.AudioFrame.from_ndarray(wave, format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = 16000, 1024 * block, Fraction(1, 16000)
        output.mux(stream.encode(frame))
    output.mux(stream.encode())


def write_animation(path: Path, frames: int = 12, duration_ms: int = 100) -> Path:
    """An animated GIF, WebP or PNG, by the ending."""
    images = [Image.fromarray(picture(number)) for number in range(frames)]
    more: dict[str, Any] = {"lossless": True} if path.suffix == ".webp" else {}
    images[0].save(path, save_all=True, append_images=images[1:], duration=duration_ms, loop=0, **more)
    return path


def write_image(path: Path, mode: str = "RGB", orientation: int = 0, number: int = 0) -> Path:
    """A still of `mode`. `orientation` is the EXIF tag; the stored pixels are turned so that it shows upright."""
    image = Image.fromarray(picture(number))
    turn = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90, 8: Image.Transpose.ROTATE_270}
    image = image.transpose(turn[orientation]) if orientation else image
    if mode == "I;16":
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    elif mode == "RGBA":
        image.putalpha(
            Image.fromarray(np.where(np.arange(image.width) < 8, 0, 255).astype(np.uint8)[None]).resize(image.size, 0)
        )
    else:
        image = image.convert(mode)
    exif = Image.Exif()
    if orientation:
        exif[0x0112] = orientation
    more: dict[str, Any] = {"quality": 95} if path.suffix == ".jpg" else {}
    image.save(path, exif=exif, **more)
    return path


def write_bomb(path: Path, side: int = 60_000) -> Path:
    """A PNG of a few bytes whose header promises `side` x `side` pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)
    return path


def cut(path: Path, share: float) -> Path:
    """Cut the file to a share of its bytes."""
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    return path


def damage(path: Path, start: float, end: float) -> Path:
    """Overwrite a stretch of the file with noise that is the same each time."""
    data = bytearray(path.read_bytes())
    first, last = int(len(data) * start), int(len(data) * end)
    data[first:last] = np.random.default_rng(0).bytes(last - first)
    path.write_bytes(bytes(data))
    return path


def write_tar(path: Path, members: Sequence[tuple[str, bytes]]) -> Path:
    """A tar of plain files, in order."""
    with tarfile.open(path, "w") as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def write_hostile_tar(path: Path, media: bytes) -> dict[str, tuple[Reason, ...]]:
    """A webdataset tar with hostile members among good ones. Returns each media member's reasons; none where it is good."""
    with tarfile.open(path, "w") as tar:
        for name in ("good.mp4", "../evil.mp4", "/etc/evil2.mp4", "a/../../evil3.mp4", "late.mp4"):
            info = tarfile.TarInfo(name)
            info.size = len(media)
            tar.addfile(info, io.BytesIO(media))
            text = tarfile.TarInfo(f"{name.rpartition('.')[0]}.txt")
            text.size = 5
            tar.addfile(text, io.BytesIO(b"words"))
        for name, kind in (
            ("link.mp4", tarfile.SYMTYPE),
            ("hard.mp4", tarfile.LNKTYPE),
            ("device.mp4", tarfile.CHRTYPE),
        ):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    bad = ("../evil.mp4", "/etc/evil2.mp4", "a/../../evil3.mp4", "link.mp4", "hard.mp4", "device.mp4")
    return {"good.mp4": (), "late.mp4": ()} | dict.fromkeys(bad, (Reason.UNSAFE_NAME,))


def zoo_tree(folder: Path) -> dict[str, Any]:
    """The config of a run in a folder whose `zoo` is the source (`make_zoo`)."""
    return {
        "output": str(folder / "runs"),
        "data": {
            "sources": [{"path": str(folder / "zoo")}],
            "cache": str(folder / "cache"),
            "fps": ZOO_FPS,
            "buckets": [{"frames": b.frames, "height": b.height, "width": b.width} for b in ZOO_BUCKETS],
        },
        "vae": {"kind": "linear", "channels": 4},
        "preprocess": {"time_limit": 20},
    }


def make_zoo(folder: Path) -> dict[str, Expect]:
    """Fill `folder` with captioned media of every kind; returns what is to become of each file by its name.

    Meant for `ZOO_BUCKETS` at `ZOO_FPS` without upscaling. Captions are not among the names, but an orphan one is; the
    folder also holds one hidden file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    zoo = _good_videos(folder) | _pictures(folder) | _bad_videos(folder)
    for name in zoo:
        (folder / name).with_suffix(".txt").write_text(f"quarters in four colours, {name}", encoding="utf-8")
    zoo |= _without_captions(folder)
    (folder / ".hidden").write_bytes(b"x")
    return zoo


def _good_videos(folder: Path) -> dict[str, Expect]:
    upright = Expect("video", WIDTH, HEIGHT)
    expected = {}
    plain: dict[str, dict[str, Any]] = {
        "h264.mp4": {"sound": True},
        "hevc.mp4": {"codec": "libx265"},
        "matroska.mkv": {},
        "vp8.webm": {"codec": "libvpx"},
        "vp9.webm": {"codec": "libvpx-vp9"},
        "av1.mp4": {"codec": "libsvtav1"},
        "mpeg4.avi": {"codec": "mpeg4"},
        "b frames.avi": {"codec": "mpeg4", "options": {"bf": "2"}},
        "stream.ts": {},
        "ten_bit.mov": {"codec": "libx265", "pix_fmt": "yuv420p10le"},
        "fragmented.mp4": {"container": {"movflags": "frag_keyframe+empty_moov"}},
        "uneven.mp4": {"times_ms": [int(t) for t in np.cumsum([0] + [33, 120, 66] * 9)]},
        "SHOUTED.MP4": {},
        "видео 视频.mp4": {},
        "odd: name.mp4": {},
    }
    for name, settings in plain.items():
        write_video(folder / name, **settings)
        expected[name] = upright
    write_video(folder / "turned.mp4", rotation=90)
    expected["turned.mp4"] = upright
    write_video(folder / "wide_pixels.mp4", width=48, height=48, sar=Fraction(2, 1))
    expected["wide_pixels.mp4"] = Expect("video", 96, 48)
    for name in ("animated.gif", "animated.webp", "moving.png"):
        write_animation(folder / name)
        expected[name] = upright
    return expected


def _pictures(folder: Path) -> dict[str, Expect]:
    modes = {"photo.jpg": "RGB", "alpha.png": "RGBA", "palette.png": "P", "grey.png": "L", "deep.png": "I;16"}
    modes |= {"print.jpg": "CMYK", "still.webp": "RGB", "plain.bmp": "RGB", "scan.tiff": "RGB", "one.gif": "P"}
    for name, mode in modes.items():
        write_image(folder / name, mode)
    for name, orientation in {"phone6.jpg": 6, "phone3.jpg": 3, "phone8.png": 8}.items():
        write_image(folder / name, orientation=orientation)
        modes[name] = "RGB"
    write_video(folder / "one_frame.mp4", frames=1)
    expected = dict.fromkeys([*modes, "one_frame.mp4"], Expect("image", WIDTH, HEIGHT))
    cut(write_image(folder / "cut.jpg"), 0.6)
    cut(write_image(folder / "cut.png"), 0.6)
    write_bomb(folder / "bomb.png")
    expected |= dict.fromkeys(("cut.jpg", "cut.png"), Expect(reasons=(Reason.TRUNCATED,)))
    return expected | {"bomb.png": Expect(reasons=(Reason.TOO_LARGE,))}


def _bad_videos(folder: Path) -> dict[str, Expect]:
    faststart = {"movflags": "faststart"}
    cut(write_video(folder / "cut.mp4"), 0.7)
    cut(write_video(folder / "cut_behind_its_index.mp4", container=faststart), 0.8)
    cut(write_video(folder / "cut.webm", codec="libvpx-vp9"), 0.7)
    cut(write_video(folder / "cut.avi", codec="mpeg4"), 0.7)
    damage(write_video(folder / "damaged.mp4", options={"g": "6"}, container=faststart), 0.55, 0.75)
    write_sound(folder / "sound_only.mp4")
    (folder / "empty.mp4").write_bytes(b"")
    (folder / "random.mp4").write_bytes(np.random.default_rng(0).bytes(50_000))
    (folder / "text.mp4").write_text("this is not a video\n" * 100)
    (folder / "playlist.mp4").write_text(
        f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{folder}/stream.ts\n#EXT-X-ENDLIST\n"
    )
    write_video(folder / "tiny.mp4", width=16, height=16)
    write_video(folder / "short.mp4", frames=12)
    reasons = {
        "damaged.mp4": (Reason.UNDECODABLE, Reason.TRUNCATED),
        "sound_only.mp4": (Reason.NO_VIDEO_STREAM,),
        "empty.mp4": (Reason.EMPTY_FILE,),
        "random.mp4": (Reason.UNDECODABLE, Reason.NO_VIDEO_STREAM),
        "text.mp4": (Reason.UNDECODABLE,),
        "playlist.mp4": (Reason.UNDECODABLE,),
        "tiny.mp4": (Reason.TOO_SMALL,),
        "short.mp4": (Reason.TOO_SHORT,),
    }
    cuts = ("cut.mp4", "cut_behind_its_index.mp4", "cut.webm", "cut.avi")
    reasons |= dict.fromkeys(cuts, (Reason.TRUNCATED,))
    return {name: Expect(reasons=why) for name, why in reasons.items()}


def _without_captions(folder: Path) -> dict[str, Expect]:
    write_image(folder / "silent.jpg")
    write_image(folder / "blank.jpg")
    (folder / "blank.txt").write_text(" \n\t ")
    (folder / "orphan.txt").write_text("a caption without media")
    (folder / "notes.pdf").write_bytes(b"%PDF-1.4")
    (folder / "nowhere.mp4").symlink_to("no-such-file.mp4")
    reasons = {
        "silent.jpg": Reason.NO_CAPTION,
        "blank.jpg": Reason.NO_CAPTION,
        "orphan.txt": Reason.ORPHAN_CAPTION,
        "notes.pdf": Reason.NOT_MEDIA,
        "nowhere.mp4": Reason.MISSING_FILE,
    }
    return {name: Expect(reasons=(why,)) for name, why in reasons.items()}
