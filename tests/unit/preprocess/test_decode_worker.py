"""The process that decodes: overruns, crashes, back-pressure, thumbnails, and its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from mmspeed.errors import UserError
from mmspeed.media.decode import Cut
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.preprocess.decoding.pool import DecodePool, Failed, Finished
from mmspeed.preprocess.decoding.worker import DecodeWorker, StoppedError
from tests.support.decoding import COLOURED, LIMITS, read, rejection, source_of, whole
from tests.support.media import Expect, corners_of, number_of, write_video
from tests.support.runs import small_config


def test_the_decoder_process_imports_no_torch() -> None:
    code = "import sys, mmspeed.preprocess.decoding.decode_worker; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_overrun_is_rejected_and_the_next_file_is_served(zoo: tuple[Path, dict[str, Expect]]) -> None:
    source = source_of(zoo[0] / "h264.mp4")
    with DecodeWorker() as worker:
        video = worker.open(source, *LIMITS, 20)
        stuck = worker.pid
        assert stuck is not None
        os.kill(stuck, signal.SIGSTOP)
        assert rejection(lambda: read(worker, source, whole(video, [0]), 0.3)).reason is Reason.TIME_LIMIT
        frames = read(worker, source, whole(video, [4]), 20)
        assert number_of(frames[0]) == 4 and worker.pid not in (None, stuck)


def test_crash_is_rejected_with_its_signal(zoo: tuple[Path, dict[str, Expect]]) -> None:
    source = source_of(zoo[0] / "h264.mp4")
    with DecodeWorker() as worker:
        worker.open(source, *LIMITS, 20)
        first = worker.pid
        assert first is not None
        crash_while_busy(first)
        rejected = rejection(lambda: worker.open(source, *LIMITS, 20))
        assert rejected.reason is Reason.DECODER_CRASHED and rejected.detail == (
            "the decoder process crashed: compiled code read memory that is not its own (SIGSEGV)"
        )
        assert worker.open(source, *LIMITS, 20).width == 96


def starting_badly(folder: Path, times: int, how: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let the interpreter of decoder processes end by `how` at its first starts. Returns a file with a line a start."""
    starts, python = folder / "starts", folder / "python"
    python.write_text(
        f'#!/bin/sh\necho >> {starts}\nif [ $(wc -l < {starts}) -le {times} ]; then {how}; fi\nexec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return starts


def test_a_process_killed_at_both_starts_rejects_the_file_by_name(
    zoo: tuple[Path, dict[str, Expect]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next file is served."""
    starts = starting_badly(tmp_path, 2, "kill -KILL $$", monkeypatch)
    config = small_config(tmp_path)
    sources = [source_of(zoo[0] / name) for name in ("h264.mp4", "turned.mp4")]
    with DecodePool(config, sources) as pool:
        events = list(pool.run(None))
    (failed,) = [event for event in events if isinstance(event, Failed) and event.probe is None]
    assert failed.source.name == sources[0].name and failed.rejected.reason is Reason.DECODER_CRASHED
    assert failed.rejected.detail == (
        "the decoder process was killed, often because the machine ran out of memory (SIGKILL) before it was ready, twice"
    )
    assert len(starts.read_text().splitlines()) == 3
    assert [event.source.name for event in events if isinstance(event, Finished)] == [one.name for one in sources]


def test_a_process_that_cannot_start_is_no_fault_of_a_file(
    zoo: tuple[Path, dict[str, Expect]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = starting_badly(tmp_path, 9, "echo no module >&2; exit 3", monkeypatch)
    with DecodeWorker() as worker, pytest.raises(UserError, match=r"it ended by itself \(exit code 3\): no module"):
        worker.open(source_of(zoo[0] / "h264.mp4"), *LIMITS, 20)
    assert len(starts.read_text().splitlines()) == 1


def test_a_crash_while_reading_costs_no_clip(zoo: tuple[Path, dict[str, Expect]]) -> None:
    """The remaining clips are tried alone in a new process."""
    source = source_of(zoo[0] / "h264.mp4")
    with DecodeWorker() as worker:
        video = worker.open(source, *LIMITS, 20)
        first = worker.pid
        assert first is not None
        crash_while_busy(first)
        frames = dict(worker.read(source, [whole(video, [7]), whole(video, [2, 3])], 20))
        assert [number_of(frame) for position in (0, 1) for frame in frames[position]] == [7, 2, 3]  # type: ignore[union-attr]
        assert worker.pid not in (None, first)


def test_a_surprise_on_one_clip_costs_that_clip(zoo: tuple[Path, dict[str, Expect]]) -> None:
    """A size that no memory holds, between two good ones."""
    source = source_of(zoo[0] / "h264.mp4")
    with DecodeWorker() as worker:
        video = worker.open(source, *LIMITS, 20)
        huge = Cut((3,), (0, 0, 96, 64), 10**8, 10**8)
        frames = dict(worker.read(source, [whole(video, [1]), huge, whole(video, [3])], 20))
        assert isinstance(frames[1], Rejected) and frames[1].reason is Reason.UNDECODABLE
        assert [number_of(frames[position][0]) for position in (0, 2)] == [1, 3]  # type: ignore[index]


def test_the_time_limit_is_for_each_clip(tmp_path: Path) -> None:
    """The time in which nobody takes what is decoded does not count, and each clip starts it again."""
    source = source_of(write_video(tmp_path / "v.mp4", frames=36))
    with DecodeWorker() as worker:
        video = worker.open(source, *LIMITS, 20)
        count = 0
        for _, result in worker.read(source, [whole(video, [index]) for index in range(8)], 1.0):
            assert isinstance(result, np.ndarray)
            count += 1
            time.sleep(0.3)
        assert count == 8


def test_leaving_a_read_early_leaves_a_worker_that_serves(
    zoo: tuple[Path, dict[str, Expect]], worker: DecodeWorker
) -> None:
    source = source_of(zoo[0] / "h264.mp4")
    video = worker.open(source, *LIMITS, 20)
    for _, _ in worker.read(source, [whole(video, [1]), whole(video, [5]), whole(video, [9])], 20):
        break
    assert number_of(read(worker, source, whole(video, [4]), 20)[0]) == 4


def test_thumbnails(zoo: tuple[Path, dict[str, Expect]], worker: DecodeWorker) -> None:
    for name, size in (("turned.mp4", (43, 64, 3)), ("wide_pixels.mp4", (32, 64, 3)), ("phone6.jpg", (43, 64, 3))):
        picture = worker.thumbnail(source_of(zoo[0] / name), 64)
        assert picture.shape == size and picture.dtype == np.uint8 and corners_of(picture) == COLOURED
    assert worker.thumbnail(source_of(zoo[0] / "h264.mp4"), 160).shape == (64, 96, 3)
    assert rejection(lambda: worker.thumbnail(source_of(zoo[0] / "random.mp4"), 64))


def test_stop_from_another_thread(zoo: tuple[Path, dict[str, Expect]]) -> None:
    source = source_of(zoo[0] / "h264.mp4")
    with DecodeWorker() as worker:
        video = worker.open(source, *LIMITS, 20)
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        threading.Timer(0.2, worker.stop).start()
        with pytest.raises(StoppedError):
            list(worker.read(source, [whole(video, [1])], 30))
        with pytest.raises(StoppedError):
            worker.open(source, *LIMITS, 20)


def crash_while_busy(pid: int) -> None:
    """Hold the process, and let it die of SIGSEGV once it has been given work."""
    os.kill(pid, signal.SIGSTOP)

    def crash() -> None:
        os.kill(pid, signal.SIGSEGV)
        os.kill(pid, signal.SIGCONT)

    threading.Timer(0.3, crash).start()


def test_the_process_ends_with_its_parent(zoo: tuple[Path, dict[str, Expect]]) -> None:
    code = (
        "import sys, os\n"
        "from mmspeed.preprocess.decoding.worker import DecodeWorker\n"
        "from mmspeed.media.source import Source\n"
        "worker = DecodeWorker()\n"
        "worker.open(Source('x', sys.argv[1], None, None, 'video', (), 'train'), 10**9, 10**9, 20)\n"
        "print(worker.pid, flush=True)\n"
        "os.kill(worker.pid, 19), os.waitpid(worker.pid, os.WUNTRACED)\n"  # SIGSTOP
        "os._exit(0)\n"
    )
    path = str(zoo[0] / "h264.mp4")
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{done.stdout.strip()}").exists():
        assert time.monotonic() < deadline, "the decoder process outlives its parent"
        time.sleep(0.05)


def test_decoders_do_not_write_to_the_terminal(
    zoo: tuple[Path, dict[str, Expect]], capfd: pytest.CaptureFixture[str]
) -> None:
    with DecodeWorker() as worker:
        for name in ("damaged.mp4", "random.mp4", "cut.jpg"):
            source = source_of(zoo[0] / name)
            with pytest.raises(Rejected):
                read(worker, source, whole(worker.open(source, *LIMITS, 20), range(30)), 20)
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
