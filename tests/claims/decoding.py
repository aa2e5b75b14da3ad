"""What the claim on preprocess holds the decoder against: clips made on the spot, and bare PyAV and decord on the same cores.

Bare means: every frame of the files as a full-size RGB array, thrown away at once, by processes that take the next file when they
are done with one.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import resource
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from mmspeed.cli.demo import CLIPS
from mmspeed.log import progress

FPS = 30
FRAMES = 150


@dataclass(frozen=True)
class ClipFiles:
    """Files to measure on: `manifest` lists them, `frames` counts the pictures of all of them."""

    manifest: Path
    paths: tuple[Path, ...]
    frames: int


def make_clips(folder: Path, count: int, height: int) -> ClipFiles:
    """`count` H.264 clips of `height` lines and 5 seconds, enlarged from those that ship with the package; kept for the next run."""
    rows = [json.loads(line) for line in CLIPS.read_text(encoding="utf-8").splitlines()]
    chosen = rows[:: max(1, len(rows) // count)][:count]
    paths = [folder / f"{Path(row['video']).stem}-{height}.mp4" for row in chosen]
    todo = [(CLIPS.parent / row["video"], path) for row, path in zip(chosen, paths, strict=True) if not path.exists()]
    for source, path in progress(todo, f"make {height}p clips", len(todo)) if todo else ():
        _enlarge(source, path, height)
    return _manifest(folder / f"clips-{height}.jsonl", paths, [row["caption"] for row in chosen])


def clips_of(folder: Path, output: Path, count: int) -> ClipFiles:
    """The first videos of a folder of the user's own. Raises UserError when there are none."""
    from mmspeed.errors import UserError
    from mmspeed.preprocess.sources.listing import VIDEO_ENDINGS

    paths = sorted(path.resolve() for path in folder.rglob("*") if path.suffix.lower() in VIDEO_ENDINGS)[:count]
    if not paths:
        raise UserError(f"{folder} holds no video files")
    return _manifest(output / "own-clips.jsonl", paths, [path.stem for path in paths])


def _manifest(manifest: Path, paths: Sequence[Path], captions: Sequence[str]) -> ClipFiles:
    rows = [{"video": str(path), "caption": caption} for path, caption in zip(paths, captions, strict=True)]
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return ClipFiles(manifest, tuple(paths), sum(map(_count, paths)))


def _count(path: Path) -> int:
    import av

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        return sum(packet.size > 0 for packet in container.demux(stream))


def _enlarge(source: Path, path: Path, height: int) -> None:
    """Write the clip forwards and backwards until it has `FRAMES` frames, 16:9, `height` lines."""
    import av

    with av.open(str(source)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part.mp4")
    with av.open(str(partial), "w") as output:
        stream: Any = output.add_stream("libx264", rate=FPS, options={"crf": "20", "preset": "fast"})
        stream.width, stream.height, stream.pix_fmt = height * 16 // 9 // 2 * 2, height, "yuv420p"
        for picture in islice(cycle(frames + frames[-2:0:-1]), FRAMES):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            output.mux(stream.encode(frame.reformat(stream.width, stream.height, "yuv420p", interpolation="BICUBIC")))
        output.mux(stream.encode())
    partial.replace(path)


@dataclass(frozen=True)
class DecodingSpeed:
    """How fast files were decoded, and the CPU seconds that all processes took for it."""

    frames_per_s: float
    cpu_seconds: float


def bare_ways(cores: int) -> dict[str, Callable[[ClipFiles], DecodingSpeed]]:
    """The bare decoders that are installed, by their names; each measures itself on some clips."""
    libraries = {"PyAV": _read_pyav}
    if importlib.util.find_spec("decord") is not None:
        libraries["decord"] = _read_decord
    ways: dict[str, Callable[[ClipFiles], DecodingSpeed]] = {}
    for library, read in libraries.items():
        for processes, threads in {(cores, 1), (1, cores)}:
            name = f"{library}, {processes} process{'es' if processes > 1 else ''} x {threads} thread{'s' if threads > 1 else ''}"
            ways[name] = partial(_measure, read, processes, threads)
    return dict(sorted(ways.items()))


def _measure(read: Callable[[str, int], int], processes: int, threads: int, clips: ClipFiles) -> DecodingSpeed:
    """Decode all files; neither starting the processes nor importing the library counts."""
    before = cpu_seconds()
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_import, [read] * processes * 2))
        started = time.monotonic()
        frames = sum(pool.map(read, map(str, clips.paths), [threads] * len(clips.paths)))
        seconds = time.monotonic() - started
    return DecodingSpeed(frames / seconds, cpu_seconds() - before)


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _import(read: Callable[[str, int], int]) -> None:
    """Load the library, and stay a moment, so that every process gets to do so."""
    importlib.import_module("av" if read is _read_pyav else "decord")
    time.sleep(0.5)


def _read_pyav(path: str, threads: int) -> int:
    import av

    count = 0
    with av.open(path) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = threads
        stream.codec_context.thread_type = "AUTO" if threads > 1 else "NONE"
        for frame in container.decode(stream):
            frame.to_ndarray(format="rgb24")
            count += 1
    return count


def _read_decord(path: str, threads: int) -> int:
    import decord

    reader = decord.VideoReader(path, num_threads=threads)
    for index in range(len(reader)):
        reader[index].asnumpy()
    return len(reader)


def start_seconds(processes: int, clips: ClipFiles) -> float:
    """How long `processes` decoder processes take to start at once: their first answer less their second."""
    import sys

    from mmspeed.preprocess.decoding.worker import DecodeWorker
    from mmspeed.preprocess.sources.source import Source

    def start(path: Path) -> float:
        source = Source(path.name, str(path), None, None, "video", (), "train")
        times = [time.monotonic()]
        with DecodeWorker() as worker:
            for _ in range(2):
                worker.open(source, sys.maxsize, sys.maxsize, 60.0)
                times.append(time.monotonic())
        return max(0.0, (times[1] - times[0]) - (times[2] - times[1]))

    with ThreadPoolExecutor(processes) as pool:
        return max(pool.map(start, islice(cycle(clips.paths), processes)))
