"""Hostile media: what would open other files or addresses, what promises more than it holds, and what is no file at all."""

from __future__ import annotations

import os
import socket
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmspeed.preprocess.decoding.worker import DecodeWorker
from mmspeed.preprocess.sources.rejections import Reason, Rejected
from mmspeed.preprocess.sources.source import content_id
from tests.support.decoding import source_of
from tests.support.media import write_bomb, write_video

MAX_BYTES, MAX_PIXELS, SECONDS = 1 << 30, 8192 * 8192, 120.0


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A listening socket that nobody may come to."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield listener
        with pytest.raises(BlockingIOError):
            listener.accept()


def refused(worker: DecodeWorker, path: Path, max_pixels: int = MAX_PIXELS) -> Rejected:
    with pytest.raises(Rejected) as rejected:
        worker.open(source_of(path), MAX_BYTES, max_pixels, SECONDS)
    return rejected.value


def playlists(target: str, port: int) -> dict[str, str]:
    """Playlists of many kinds that name `target`."""
    mpd = (
        '<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011" type="static" mediaPresentationDuration="PT2S" '
        'profiles="urn:mpeg:dash:profile:isoff-main:2011"><Period><AdaptationSet mimeType="video/mp4">'
        f'<Representation id="1" bandwidth="1"><BaseURL>{target}</BaseURL></Representation></AdaptationSet></Period></MPD>'
    )
    return {
        "hls": f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\n{target}\n#EXT-X-ENDLIST\n",
        "concat": f"ffconcat version 1.0\nfile '{target}'\n",
        "dash": mpd,
        "sdp": f"v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video {port} RTP/AVP 96\na=rtpmap:96 H264/90000\n",
    }


@pytest.mark.parametrize("kind", ["hls", "concat", "dash", "sdp"])
def test_playlists_open_nothing(tmp_path: Path, worker: DecodeWorker, server: socket.socket, kind: str) -> None:
    other = write_video(tmp_path / "other.ts")
    port = server.getsockname()[1]
    for target in (str(other), f"file://{other}", "other.ts", f"http://127.0.0.1:{port}/x.ts"):
        for ending in ("mp4", "ts"):
            path = tmp_path / f"list.{ending}"
            path.write_text(playlists(target, port)[kind])
            assert refused(worker, path).reason is Reason.UNDECODABLE


def box(kind: bytes, *parts: bytes) -> bytes:
    data = b"".join(parts)
    return struct.pack(">I", len(data) + 8) + kind + data


def with_reference(data: bytes, entry: bytes) -> bytes:
    """A MOV whose data reference is `entry`; the boxes around it grow with it."""
    at = data.find(b"dref") - 4
    old = struct.unpack(">I", data[at : at + 4])[0]
    new = box(b"dref", struct.pack(">II", 0, 1), entry)
    changed = bytearray(data[:at] + new + data[at + old :])
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"dinf"):
        start = changed.find(kind) - 4
        length = struct.unpack(">I", changed[start : start + 4])[0] + len(new) - old
        changed[start : start + 4] = struct.pack(">I", length)
    return bytes(changed)


def alias(path: str) -> bytes:
    """A Macintosh alias record, with which a movie names another file."""
    name = os.path.basename(path).encode()
    tail = path.encode() + bytes(len(path.encode()) % 2)
    return box(
        b"alis", struct.pack(">I", 0), bytes(10), b"\x03vol".ljust(28, b"\0"), bytes(12), bytes([len(name)]),
        name.ljust(63, b"\0"), bytes(16), struct.pack(">hh", 1, 1), bytes(16), struct.pack(">HH", 2, len(path.encode())),
        tail, struct.pack(">HH", 0xFFFF, 0),
    )  # fmt: skip


def test_movies_that_refer_to_other_files_open_nothing(
    tmp_path: Path, worker: DecodeWorker, server: socket.socket
) -> None:
    """An alias is refused. An address, which no decoder follows, leaves the movie what it is by its own bytes."""
    other = write_video(tmp_path / "other.ts")
    movie = write_video(tmp_path / "movie.mov").read_bytes()
    path = tmp_path / "refers.mov"
    path.write_bytes(with_reference(movie, alias(str(other))))
    assert refused(worker, path).reason in (Reason.TRUNCATED, Reason.UNDECODABLE)
    url = f"http://127.0.0.1:{server.getsockname()[1]}/x.mov".encode()
    path.write_bytes(with_reference(movie, box(b"url ", struct.pack(">I", 0), url, b"\0")))
    assert len(worker.open(source_of(path), MAX_BYTES, MAX_PIXELS, SECONDS).pts_seconds) == 36


def test_pictures_of_absurd_sizes(tmp_path: Path, worker: DecodeWorker) -> None:
    gif = b"GIF89a" + struct.pack("<HH", 65535, 65535) + b"\x80\0\0" + bytes(6) + b"," + bytes(4)
    gif += struct.pack("<HH", 65535, 65535) + b"\0\x02\x02\x4c\x01\0;"
    bmp = b"BM" + struct.pack("<IIIIiiHHIIIIII", 54, 0, 54, 40, 60000, 60000, 1, 24, 0, 0, 0, 0, 0, 0)
    tags = [(256, 4, 1, 60000), (257, 4, 1, 60000), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1), (273, 4, 1, 8)]
    tiff = b"II*\0" + struct.pack("<IH", 8, len(tags)) + b"".join(struct.pack("<HHII", *tag) for tag in tags) + bytes(4)
    webp = b"RIFF" + struct.pack("<I", 22) + b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + b"\xff\x3f\0\xff\x3f\0"
    write_bomb(tmp_path / "a.png", 30_000)
    for name, data in {"a.gif": gif, "a.bmp": bmp, "a.tiff": tiff, "a.webp": webp}.items():
        (tmp_path / name).write_bytes(data)
    for path in sorted(tmp_path.iterdir()):
        assert refused(worker, path).reason in (Reason.TOO_LARGE, Reason.UNDECODABLE, Reason.TRUNCATED), path
    for name in ("a.png", "a.gif", "a.bmp", "a.tiff"):
        assert refused(worker, tmp_path / name).reason is Reason.TOO_LARGE, name


def test_animations_of_very_many_frames_end(tmp_path: Path, worker: DecodeWorker) -> None:
    frame = b"\x21\xf9\x04\0\x0a\0\0\0," + struct.pack("<HHHH", 0, 0, 1, 1) + b"\0\x02\x02\x4c\x01\0"
    path = tmp_path / "many.gif"
    path.write_bytes(b"GIF89a" + struct.pack("<HH", 96, 64) + b"\x80\0\0" + bytes(6) + frame * 8_000 + b";")
    assert len(worker.open(source_of(path), MAX_BYTES, MAX_PIXELS, SECONDS).pts_seconds) == 8_000
    with pytest.raises(Rejected) as rejected:
        worker.open(source_of(path), MAX_BYTES, MAX_PIXELS, 0.01)
    assert rejected.value.reason is Reason.TIME_LIMIT

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    claims = chunk(b"IHDR", struct.pack(">IIBBBBB", 8, 8, 8, 0, 0, 0, 0)) + chunk(
        b"acTL", struct.pack(">II", 2**31 - 1, 0)
    )
    claims += chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, 8, 8, 0, 0, 1, 10, 0, 0)) + chunk(
        b"IDAT", zlib.compress(bytes(72))
    )
    (tmp_path / "claims.png").write_bytes(b"\x89PNG\r\n\x1a\n" + claims + chunk(b"IEND", b""))
    assert refused(worker, tmp_path / "claims.png").reason in (Reason.TRUNCATED, Reason.UNDECODABLE)


def test_videos_of_absurd_sizes(tmp_path: Path, worker: DecodeWorker) -> None:
    data = write_video(tmp_path / "small.mp4", codec="mpeg4").read_bytes()
    size = struct.pack(">HH", 96, 64)
    at = data.find(b"mp4v", data.find(b"stsd")) + 28
    assert data[at : at + 4] == size
    (tmp_path / "huge.mp4").write_bytes(data[:at] + struct.pack(">HH", 65535, 65535) + data[at + 4 :])
    why = refused(worker, tmp_path / "huge.mp4", 95 * 64)
    assert why.reason is Reason.TOO_LARGE
    assert refused(worker, tmp_path / "small.mp4", 95 * 64).reason is Reason.TOO_LARGE


def test_boxes_and_elements_of_absurd_lengths(tmp_path: Path, worker: DecodeWorker) -> None:
    bomb = zlib.compress(bytes(50_000_000), 9)
    files = {
        "cmov.mov": box(b"moov", box(b"cmov", box(b"dcom", b"zlib"), box(b"cmvd", struct.pack(">I", 0xFFFFFFF0), bomb))),
        "long.mp4": box(b"ftyp", b"isom" + bytes(4)) + struct.pack(">I", 1) + b"moov" + struct.pack(">Q", 2**63 - 1) + bytes(64),
        "zero.mp4": box(b"ftyp", b"isom" + bytes(4)) + struct.pack(">I", 0) + b"moov" + b"\xff" * 4096,
        "stsz.mp4": box(b"ftyp", b"isom" + bytes(4))
        + box(b"moov", box(b"trak", box(b"mdia", box(b"minf", box(b"stbl", box(b"stsz", struct.pack(">III", 0, 1, 2**32 - 1))))))),
        "nested.mp4": box(b"ftyp", b"isom" + bytes(4)) + (struct.pack(">I", 0) + b"moov") * 100_000,
        "giant.mkv": b"\x1a\x45\xdf\xa3\x01\xff\xff\xff\xff\xff\xff\xfe" + bytes(64),
        "deep.mkv": b"\x1a\x45\xdf\xa3\x80" + b"\x18\x53\x80\x67\x01\xff\xff\xff\xff\xff\xff\xff" + b"\x1f\x43\xb6\x75\xff" * 50_000,
        "frame.mkv": b"\x1a\x45\xdf\xa3\x80\x18\x53\x80\x67\x01\xff\xff\xff\xff\xff\xff\xff\x16\x54\xae\x6b\x0f\xff\xff\xff\xff",
        "chunk.avi": b"RIFF\xff\xff\xff\xffAVI LIST\xff\xff\xff\xffhdrlavih\xff\xff\xff\xff" + bytes(64),
    }  # fmt: skip
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        why = refused(worker, tmp_path / name)
        assert why.reason in (Reason.UNDECODABLE, Reason.TRUNCATED, Reason.NO_VIDEO_STREAM), (name, why)
    child = worker.pid
    assert child is not None  # none of them has killed the decoder


def test_what_is_no_plain_file_is_never_opened(tmp_path: Path, worker: DecodeWorker) -> None:
    os.mkfifo(tmp_path / "pipe.mp4")
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "device.mp4").symlink_to("/dev/zero")
    (tmp_path / "loop.mp4").symlink_to("loop.mp4")
    with socket.socket(socket.AF_UNIX) as listener:
        here = os.open(tmp_path, os.O_RDONLY)
        listener.bind(f"/proc/self/fd/{here}/socket.mp4")
        os.close(here)
        for name in ("pipe", "folder", "device", "socket"):
            assert refused(worker, tmp_path / f"{name}.mp4").reason is Reason.NOT_MEDIA, name
    assert refused(worker, tmp_path / "loop.mp4").reason is Reason.MISSING_FILE


def test_file_of_ten_terabytes_of_nothing(tmp_path: Path, worker: DecodeWorker) -> None:
    path = tmp_path / "sparse.mp4"
    with open(path, "wb") as file:
        file.truncate(10 << 40)
    assert refused(worker, path).reason is Reason.TOO_LARGE
    assert len(content_id(source_of(path), False)) == 32  # by blocks, not by ten terabytes
