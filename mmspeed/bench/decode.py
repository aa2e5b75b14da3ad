"""Speed of PyAV, torchcodec and decord on some videos, as a decoder process of preprocess uses them: probe, decode, crop, scale."""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from mmspeed.errors import UserError
from mmspeed.media.decode import Cut
from mmspeed.media.other_decoders import OtherDecoder
from mmspeed.media.pixel_rules import NEWEST_RULES
from mmspeed.media.rejections import Rejected
from mmspeed.media.source import Source
from mmspeed.preprocess.decoding.transform import crop_box
from mmspeed.preprocess.decoding.worker import DecodeWorker
from mmspeed.preprocess.sources.listing import VIDEO_ENDINGS
from mmspeed.shapes import Bucket

_DEMO = Path(__file__).resolve().parent.parent / "assets" / "demo-clips" / "videos"
_NAMES = ("pyav", "torchcodec", "decord")
_SECONDS = 600.0  # for one file
_MOST_BYTES, _MOST_PIXELS = 1 << 40, 1 << 26


@dataclass(frozen=True)
class DecoderSpeed:
    """One decoder: medians of its rounds over all files, of which it read `files_read` itself and left the `refusals` to PyAV."""

    name: str
    frames_per_s: float
    cpu_ms_per_frame: float
    probe_ms_per_file: float
    files_read: int
    refusals: dict[str, int]


@dataclass(frozen=True)
class DecodeBench:
    """The speeds of the decoders that are installed, on the same files."""

    files: int
    frames: int
    size: str
    rows: tuple[DecoderSpeed, ...]

    def lines(self) -> list[str]:
        """The figures as a table."""
        lines = [f"{self.frames} frames of {self.files} files to {self.size}, one process with one thread"]
        lines.append(f"{'decoder':12}{'frames/s':>10}{'CPU ms/frame':>14}{'probe ms/file':>15}  files it read itself")
        for row in self.rows:
            left = ", ".join(f"{count} {reason}" for reason, count in sorted(row.refusals.items()))
            lines.append(
                f"{row.name:12}{row.frames_per_s:>10.0f}{row.cpu_ms_per_frame:>14.2f}{row.probe_ms_per_file:>15.1f}"
                f"  {row.files_read} of {self.files}{f' (left to pyav: {left})' if left else ''}"
            )
        absent = [name for name in _NAMES if name not in {row.name for row in self.rows}]
        return [*lines, *([f"not installed: {', '.join(absent)}"] if absent else [])]

    def to_json(self) -> str:
        """The figures as JSON."""
        return json.dumps(asdict(self), indent=2)


def bench_decode(videos: Path | None, count: int, size: str, rounds: int) -> DecodeBench:
    """Decode every frame of up to `count` videos of a folder (None: demo clips) with each decoder that is installed, in turns.

    Raises UserError without videos, for a `size` that is none, and where an installed decoder cannot be imported.
    """
    try:
        bucket = Bucket.parse(f"1x{size}")
    except ValueError:
        raise UserError(f"--size {size}: give height and width in pixels, such as 96x160") from None
    folder = videos or _DEMO
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in VIDEO_ENDINGS)[:count]
    if not paths:
        raise UserError(f"{folder} holds no video files")
    sources = [Source(str(path), str(path.resolve()), None, None, "video", (), "train") for path in paths]
    names = [name for name in _NAMES if name == "pyav" or importlib.util.find_spec(name) is not None]
    results: dict[str, list[_Round]] = {name: [] for name in names}
    for _ in range(rounds):
        for name in names:
            results[name].append(_round(name, sources, bucket))
    frames = max(result.frames for result in results["pyav"])
    if not frames:
        raise UserError(f"{folder} holds no video that can be decoded")
    return DecodeBench(len(sources), frames, size, tuple(_medians(name, results[name]) for name in names))


@dataclass(frozen=True)
class _Round:
    frames: int
    seconds: float
    probe_seconds: float
    cpu_seconds: float
    files_read: int
    refusals: Counter[str]


def _round(name: str, sources: Sequence[Source], bucket: Bucket) -> _Round:
    """Probe and decode all files once, after the first file, so that neither the process's start nor its imports count."""
    other = None if name == "pyav" else OtherDecoder(name, "cpu", NEWEST_RULES)
    refusals, begun = Counter[str](), 0.0
    frames, files_read, probing, decoding = 0, 0, 0.0, 0.0
    with DecodeWorker(other) as worker:
        for number, source in enumerate([sources[0], *sources]):  # the first file once more, so that all is loaded
            started = time.monotonic()
            try:
                probe = worker.open(source, _MOST_BYTES, _MOST_PIXELS, _SECONDS)
            except Rejected:
                continue
            opened = time.monotonic()
            indices = tuple(range(len(probe.pts_seconds)))
            cut = Cut(indices, crop_box(probe.width, probe.height, bucket), bucket.width, bucket.height)
            ((_, result),) = worker.read(source, [cut], _SECONDS)
            if number == 0:
                begun = _cpu_seconds(worker)
            elif not isinstance(result, Rejected):
                frames += len(indices)
                probing += opened - started
                decoding += time.monotonic() - opened
                files_read += probe.reader != "" or name == "pyav"
                refusals.update([probe.refusal] if probe.refusal else [])
        spent = _cpu_seconds(worker) - begun
    return _Round(frames, decoding, probing, spent, files_read, refusals)


def _medians(name: str, results: Sequence[_Round]) -> DecoderSpeed:
    first = results[0]
    files = first.files_read + first.refusals.total()
    return DecoderSpeed(
        name,
        statistics.median(result.frames / max(result.seconds, 1e-9) for result in results),
        statistics.median(1000 * result.cpu_seconds / max(result.frames, 1) for result in results),
        statistics.median(1000 * result.probe_seconds / max(files, 1) for result in results),
        first.files_read,
        dict(first.refusals),
    )


def _cpu_seconds(worker: DecodeWorker) -> float:
    """CPU seconds that a worker's process has taken; 0 if it has ended."""
    if worker.pid is None:
        return 0.0
    times = psutil.Process(worker.pid).cpu_times()
    return float(times.user + times.system)
