"""torchcodec and decord in place of PyAV: which files they read, what the keys say, and the messages to the user."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmspeed.config.load import load_config
from mmspeed.data import DatasetCache
from mmspeed.errors import UserError
from mmspeed.media.containers import is_plain_container
from mmspeed.media.decode import Cut
from mmspeed.media.other_decoders import MOST_DIFFERENT, OtherDecoder
from mmspeed.media.pixel_rules import NEWEST_RULES, PixelRules
from mmspeed.media.probe import Probe
from mmspeed.media.scaling import pixel_parts
from mmspeed.preprocess import CacheBuilder
from mmspeed.preprocess.decoding.worker import DecodeWorker
from mmspeed.preprocess.report.check import check
from tests.support.decoding import LIMITS, read, source_of, whole
from tests.support.media import corners_of, number_of, write_image, write_video


def decoder(name: str, *marks: pytest.MarkDecorator) -> Any:
    """The name as a parameter of a test, which is skipped where the decoder is not installed."""
    missing = pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"{name} has no wheel here")
    return pytest.param(name, marks=[missing, *marks])


OTHERS = [decoder("torchcodec"), decoder("decord")]
FILES: dict[str, dict[str, Any]] = {
    "h264.mp4": {"sound": True},
    "hevc.mp4": {"codec": "libx265"},
    "vp9.webm": {"codec": "libvpx-vp9"},
    "av1.mp4": {"codec": "libsvtav1"},
    "mpeg4.avi": {"codec": "mpeg4"},
    "uneven.mp4": {"times_ms": [0, 33, 153, 219, 252, 372, 438, 471, 591]},
    "turned.mp4": {"rotation": 90},
    "below.mp4": {"rotation": 180},
    "grey.mkv": {"codec": "ffv1", "pix_fmt": "gray"},
    "rgb.mkv": {"codec": "ffv1", "pix_fmt": "bgr0"},
    "alpha.mkv": {"codec": "ffv1", "pix_fmt": "bgra"},
    "stream.ts": {},
    "b frames.avi": {"codec": "mpeg4", "options": {"bf": "2"}},
    "untagged.mp4": {"width": 1280, "height": 720, "options": {"preset": "ultrafast"}, "frames": 3},
}
# What PyAV reads instead, and why; the rest is read by either decoder.
ALWAYS = {
    "alpha.mkv": "transparent",
    "stream.ts": "container",
    "b frames.avi": "times",
    "untagged.mp4": "colours",
}
REFUSED = {
    "torchcodec": ALWAYS | {"b frames.avi": "frames"},
    "decord": ALWAYS | {"av1.mp4": "opened"},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("files")
    shorter = {name: settings if name == "av1.mp4" else {"frames": 9, **settings} for name, settings in FILES.items()}
    return {name: write_video(folder / name, **settings) for name, settings in shorter.items()}


@pytest.fixture(scope="module", params=[decoder("torchcodec", pytest.mark.slow), *OTHERS[1:]])  # it imports torch
def worker(request: pytest.FixtureRequest) -> Iterator[tuple[str, DecodeWorker]]:
    """A worker of one of the decoders, with its name."""
    with DecodeWorker(OtherDecoder(request.param, "cpu", NEWEST_RULES)) as started:
        yield request.param, started


@pytest.mark.slow
def test_a_file_is_read_where_frames_and_times_are_the_same(
    worker: tuple[str, DecodeWorker], files: dict[str, Path]
) -> None:
    name, other = worker
    with DecodeWorker() as pyav:
        for file, path in files.items():
            source = source_of(path)
            video, plain = other.open(source, *LIMITS, 60), pyav.open(source, *LIMITS, 60)
            assert video.pts_seconds == plain.pts_seconds and not plain.reader
            if file in REFUSED[name]:
                assert video.reader == "" and REFUSED[name][file] in video.refusal, (file, video.refusal)
                wanted = Cut((0, 2), (0, 0, 96, 64), 48, 32)
            else:
                assert (video.reader, video.refusal) == (name, ""), (file, video.refusal, video.refusal_detail)
                assert video.same_bytes == (file in ("grey.mkv", "rgb.mkv")), file
                wanted = whole(video, range(0, 9, 2))
            one, two = (read(decoder, source, wanted, 60) for decoder in (other, pyav))
            if video.same_bytes or not video.reader:
                np.testing.assert_array_equal(one, two)
            else:
                assert np.abs(one.astype(int) - two).mean() < 2.5, file  # edges of chroma apart
            if file != "untagged.mp4" and "grey" not in file:
                assert [number_of(frame) for frame in one] == [number_of(frame) for frame in two]
                assert corners_of(one[0])[:2] == corners_of(two[0])[:2]


@pytest.mark.parametrize("name", OTHERS[1:])
def test_the_matrix_of_untagged_video_decides(files: dict[str, Path], name: str) -> None:
    """It is read as BT.601: the same colours only where the rules say so too."""
    with DecodeWorker(OtherDecoder(name, "cpu", PixelRules(untagged="bt601"))) as other:
        assert other.open(source_of(files["untagged.mp4"]), *LIMITS, 60).reader == name


def test_the_name_enters_the_key_unless_the_bytes_are_the_same(
    worker: tuple[str, DecodeWorker], files: dict[str, Path]
) -> None:
    name, other = worker
    parts: dict[str, Any] = {}
    for file in ("h264.mp4", "rgb.mkv", "stream.ts"):
        video: Probe = other.open(source_of(files[file]), *LIMITS, 60)
        parts[file] = pixel_parts(NEWEST_RULES, video, (0, 0, 96, 64)).get("decoder")
    assert parts == {"h264.mp4": name, "rgb.mkv": None, "stream.ts": None}
    assert MOST_DIFFERENT == 2 and OtherDecoder(name, "cuda:1", NEWEST_RULES).label == f"{name}/cuda"


def test_what_reads_as_a_playlist_too_is_not_given_away() -> None:
    assert is_plain_container(b"\x00\x00\x00\x20ftypisom")
    assert not is_plain_container(b"#EXTM3U\n/etc/passwd")
    assert not is_plain_container(b"\x1a\x45\xdf\xa3<MPD profiles='urn:mpeg:dash:profile'>")


def _tree(folder: Path, decoder: str) -> dict[str, Any]:
    return {
        "output": str(folder / "runs"),
        "data": {
            "sources": [{"path": str(folder / "videos")}],
            "cache": str(folder / "cache"),
            "fps": 8,
            "buckets": [{"frames": 5, "height": 32, "width": 48}],
        },
        "vae": {"kind": "linear", "channels": 4, "fit_clips": 2},
        "preprocess": {"decoder": decoder},
    }


def _config(folder: Path, decoder: str) -> Any:
    (folder / "run.yaml").write_text(json.dumps(_tree(folder, decoder)))
    return load_config(folder / "run.yaml")


@pytest.mark.slow
@pytest.mark.parametrize("name", [decoder("torchcodec", pytest.mark.slow), decoder("decord")])
def test_a_cache_never_mixes_decoders_unseen(tmp_path: Path, name: str) -> None:
    videos = tmp_path / "videos"
    write_video(videos / "a.mp4", frames=24)
    write_video(videos / "b.mkv", codec="ffv1", pix_fmt="bgr0", frames=24)
    write_video(videos / "c.ts", frames=24)
    for path in list(videos.iterdir()):
        path.with_suffix(".txt").write_text("four colours")
    assert CacheBuilder(_config(tmp_path, "pyav")).run().clips_encoded == 3
    other = _config(tmp_path, name)
    said = check(other)
    assert f"  decoders: {', '.join(sorted((f'{name} 2', 'pyav 1')))}" in said.lines()
    assert "  left to PyAV by preprocess.decoder: 1 sources (1 container that PyAV alone reads)" in said.lines()
    assert "  stale: 1, made with another decoder" in said.lines()
    report = CacheBuilder(other).run()
    assert (report.clips_encoded, report.clips_reused) == (1, 2)
    assert report.decoders == {name: 1} and report.decoder_refusals == {"container that PyAV alone reads": 1}
    assert any("left to PyAV by preprocess.decoder: 1 sources" in line for line in report.lines())
    cache = DatasetCache(other.cache_dir)
    decoders = {
        s.source: json.loads(cache.entry(s.latent_keys[0], "latents").meta).get("decoder") for s in cache.samples
    }
    assert decoders == {"a.mp4": name, "b.mkv": None, "c.ts": None}
    assert CacheBuilder(other).run().clips_encoded == 0


def test_pictures_are_left_to_pillow(worker: tuple[str, DecodeWorker], tmp_path: Path) -> None:
    video = worker[1].open(source_of(write_image(tmp_path / "a.png")), *LIMITS, 60)
    assert (video.decoder, video.reader, video.refusal) == ("pillow", "", "")


@pytest.mark.parametrize("name", OTHERS[:1])
def test_decoding_on_a_gpu_is_refused_where_there_is_none(tmp_path: Path, name: str) -> None:
    write_video(tmp_path / "videos" / "a.mp4", frames=9)
    (tmp_path / "videos" / "a.txt").write_text("words")
    tree = _tree(tmp_path, name)
    tree["preprocess"]["decoder_device"] = "run"
    tree["device"] = {"kind": "cpu"}
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    with pytest.raises(UserError, match=r"decoder_device: run, but torch .* has no GPU here that decodes video"):
        check(load_config(tmp_path / "run.yaml"))


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real package that misses a library, in a folder of its own."""
    (tmp_path / "decord.py").write_text("raise OSError('libnvcuvid.so.1: cannot open shared object file')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    with DecodeWorker(OtherDecoder("decord", "cpu", NEWEST_RULES)) as other:
        with pytest.raises(
            UserError, match=r"preprocess.decoder: decord cannot be imported: libnvcuvid.so.1: .* doctor"
        ):
            other.open(source_of(tmp_path / "a.mp4"), *LIMITS, 60)
