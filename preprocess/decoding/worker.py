"""A decoder in a separate process, so that a file that hangs or crashes a decoder affects only itself.

Legend: F frames, H W height and width in pixels.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mmspeed.errors import UserError
from mmspeed.media.decode import Cut
from mmspeed.media.other_decoders import OtherDecoder
from mmspeed.media.probe import Probe
from mmspeed.media.rejections import Reason, Rejected, death_in_words
from mmspeed.media.source import Source
from mmspeed.preprocess.decoding.decode_worker import HEADER, cut_to_json, pack, source_to_json
from mmspeed.preprocess.decoding.scenes import SceneDetector

_THUMBNAIL_SECONDS = 20.0
_START_SECONDS = 120.0  # a cold file system on a busy machine takes long to import from


class _OverrunError(Exception):
    """The child did not answer in time."""


class _DiedError(Exception):
    """The child's end of the pipe is closed."""


class _KilledError(Exception):
    """The child was killed before it was ready. Its text is the end of the child in words."""


class StoppedError(Exception):
    """The worker was stopped."""


class _TogetherError(Rejected):
    """A request failed as a whole, and any of its cuts may be the cause."""


class DecodeWorker(AbstractContextManager["DecodeWorker"]):
    """Probe and decode files in a child process, which is killed when it overruns and restarted when it has ended.

    `other` is a decoder to use in place of PyAV for the files of which it gives the same frames. Not thread-safe, except `stop`. Use as a context manager, or call `close`.
    """

    def __init__(self, other: OtherDecoder | None = None) -> None:
        self._other = other
        self._libraries: tempfile.TemporaryDirectory[str] | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._errors: BinaryIO | None = None
        self._limits = {"max_file_bytes": sys.maxsize, "max_pixels": sys.maxsize}
        self._lock = threading.Lock()  # guards the child and `_stopped`
        self._stopped = False

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is no child."""
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    def open(self, source: Source, max_file_bytes: int, max_pixels: int, time_limit: float) -> Probe:
        """Probe `source`. Raises Rejected; `time_limit` is in seconds."""
        self._limits = {"max_file_bytes": max_file_bytes, "max_pixels": max_pixels}
        ((reply, _),) = self._ask({"command": "open", "source": source_to_json(source)}, time_limit)
        return Probe.from_json(reply["probe"])

    def read(
        self, source: Source, cuts: Sequence[Cut], time_limit: float
    ) -> Iterator[tuple[int, np.ndarray | Rejected]]:
        """Yield for each cut of `source` its position and its frames (F, H, W, 3), uint8, or its rejection.

        Cuts come in the order in which they are complete. The arrays are views of planes (F, 3, H, W). Each cut has `time_limit`
        seconds, counted while waiting for it; after that, all remaining cuts are rejected. If the process dies, each remaining
        cut is tried once, alone. The child waits while its decoded frames are not consumed.
        """
        remaining = dict(enumerate(cuts))
        try:
            yield from self._read(source, remaining, time_limit)
        except _TogetherError:
            for position, cut in list(remaining.items()):
                try:
                    yield from self._read(source, {position: cut}, time_limit)
                except Rejected as rejected:
                    yield position, rejected
        except Rejected as rejected:
            for position in remaining:
                yield position, rejected

    def scene_cuts(self, source: Source, detector: SceneDetector, time_limit: float) -> list[int]:
        """The scene cuts of a video. Each batch of frames has `time_limit` seconds. Raises Rejected."""
        request = {"command": "scenes", "source": source_to_json(source), "detector": detector.to_json()}
        return [cut for reply, _ in self._ask(request, time_limit) for cut in reply.get("cuts", ())]

    def thumbnail(self, source: Source, width: int, time_limit: float = _THUMBNAIL_SECONDS) -> np.ndarray:
        """The first frame as (H, W, 3) uint8, upright, at most `width` wide. Raises Rejected."""
        probe = self.open(source, **self._limits, time_limit=time_limit)
        width = min(width, probe.width)
        height = max(1, round(probe.height * width / probe.width))
        cut = Cut((0,), (0, 0, probe.width, probe.height), width, height)
        ((_, result),) = self.read(source, [cut], time_limit)
        if isinstance(result, Rejected):
            raise result
        return np.ascontiguousarray(result[0])

    def stop(self) -> None:
        """Kill the child, from any thread. Current and later calls raise StoppedError."""
        with self._lock:
            self._stopped = True
            if self._child is not None:
                self._child.kill()

    def close(self) -> None:
        """End the child process."""
        with self._lock:
            child, errors, libraries = self._child, self._errors, self._libraries
            self._child = self._errors = self._libraries = None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout, errors):
                if pipe is not None:
                    with suppress(OSError):  # its other end may be gone
                        pipe.close()
        if libraries is not None:
            libraries.cleanup()

    def _read(
        self, source: Source, left: dict[int, Cut], time_limit: float
    ) -> Iterator[tuple[int, np.ndarray | Rejected]]:
        """Yield the cuts in `left` by position, removing each from it. Raises Rejected for the rest."""
        if not left:
            return
        positions = list(left)
        cuts = [cut_to_json(cut) for cut in left.values()]
        for reply, planes_FCHW in self._ask(
            {"command": "read", "source": source_to_json(source), "cuts": cuts}, time_limit
        ):
            if "position" in reply:
                position = positions[reply["position"]]
                del left[position]
                yield position, _rejected(reply) if planes_FCHW is None else planes_FCHW.transpose(0, 2, 3, 1)

    def _ask(self, request: dict[str, Any], time_limit: float) -> Iterator[tuple[dict[str, Any], np.ndarray | None]]:
        """Send a request, and yield its answers with their planes. Raises Rejected, StoppedError."""
        child = self._started()
        assert child.stdin is not None
        try:
            other = None if self._other is None else self._other.to_json()
            _write(child.stdin, pack(request | self._limits | {"other": other}))
            ended = False
            while not ended:
                deadline = time.monotonic() + time_limit
                reply = self._message(deadline)
                planes_FCHW = None
                if "shape" in reply:
                    planes_FCHW = np.empty(reply["shape"], np.uint8)
                    self._fill(planes_FCHW.data.cast("B"), deadline)
                ended = "position" not in reply
                if ended and "rejected" in reply:
                    break
                yield reply, planes_FCHW
        except _OverrunError:
            self.close()
            raise Rejected(Reason.TIME_LIMIT, f"no answer within {time_limit:g} s") from None
        except (_DiedError, OSError):
            _, cause = self._death()
            self.close()
            if self._stopped:
                raise StoppedError from None
            raise _TogetherError(Reason.DECODER_CRASHED, f"the decoder process {cause}") from None
        except BaseException:
            self.close()  # unread answers may be in the pipe
            raise
        if "rejected" in reply:
            raise _rejected(reply)

    def _started(self) -> subprocess.Popen[bytes]:
        """The running child, started if necessary.

        One that is killed before it is ready, as where memory is short for a moment, is started once more.

        Raises Rejected (decoder_crashed) if that is killed too, UserError if it does not start otherwise, StoppedError after `stop`.
        """
        if self._child is not None and self._child.poll() is not None:
            self.close()
        if self._child is not None:
            return self._child
        try:
            return self._start()
        except _KilledError:
            try:
                return self._start()
            except _KilledError as again:
                detail = f"the decoder process {again} before it was ready, twice"
                raise Rejected(Reason.DECODER_CRASHED, detail) from None

    def _start(self) -> subprocess.Popen[bytes]:
        """A new child that is ready. Raises _KilledError, UserError, StoppedError."""
        with self._lock:
            if self._stopped:
                raise StoppedError
            self._errors = tempfile.TemporaryFile()
            command, environment = [sys.executable, "-m", "mmspeed.preprocess.decoding.decode_worker"], None
            if self._other is not None:
                command.append(json.dumps(self._other.to_json()))
                self._libraries = tempfile.TemporaryDirectory(prefix="mmspeed-libraries-")
                environment = with_pyav_libraries(Path(self._libraries.name))
            self._child = child = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                start_new_session=True,  # the parent handles Ctrl-C
            )
        try:
            first = self._message(time.monotonic() + _START_SECONDS)
        except (_OverrunError, _DiedError):
            code, cause = self._death()
            self.close()
            if self._stopped:
                raise StoppedError from None
            if code is not None and (code < 0 or "MemoryError" in cause):
                raise _KilledError(cause) from None
            raise UserError(f"the decoder process does not start: it {cause}; see `mmspeed doctor`") from None
        if "unusable" in first:
            self.close()
            assert self._other is not None
            raise UserError(
                f"preprocess.decoder: {self._other.name} cannot be imported: {first['unusable']}; "
                "`mmspeed doctor` tells more, and decoder: pyav needs nothing else"
            )
        return child

    def _message(self, deadline: float) -> dict[str, Any]:
        header = bytearray(HEADER.size)
        self._fill(memoryview(header), deadline)
        text = bytearray(HEADER.unpack(header)[0])
        self._fill(memoryview(text), deadline)
        return json.loads(text)

    def _fill(self, buffer: memoryview, deadline: float) -> None:
        """Read until `buffer` is full. Raises _OverrunError or _DiedError."""
        assert self._child is not None and self._child.stdout is not None
        pipe: Any = self._child.stdout  # unbuffered, so that `poll` sees all data
        poller = select.poll()  # `select.select` takes no descriptor above 1023
        poller.register(pipe, select.POLLIN)
        done = 0
        while done < len(buffer):
            if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise _OverrunError
            count = pipe.readinto(buffer[done:])
            if not count:
                raise _DiedError
            done += count

    def _death(self) -> tuple[int | None, str]:
        """The child's return code, None while it lives, and its end in words with the last line that it wrote."""
        assert self._child is not None
        try:
            code = self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return None, "does not answer"
        how = death_in_words(code)
        last = ""
        if self._errors is not None:
            self._errors.seek(max(0, self._errors.seek(0, 2) - 2000))
            last = (self._errors.read().decode("utf-8", "replace").strip().splitlines() or [""])[-1]
        return code, f"{how}: {last}" if last else how


def _rejected(reply: dict[str, Any]) -> Rejected:
    kind = _TogetherError if reply.get("together") else Rejected
    return kind(Reason(reply["rejected"]), reply["detail"])


def _write(pipe: Any, data: bytes) -> None:
    """Write all of `data` to an unbuffered pipe."""
    view = memoryview(data)
    while view:
        view = view[pipe.write(view) :]


_BUNDLED = re.compile(r"(lib(?:av|sw)\w+)-[0-9a-f]+(\.so\.\d+)[.\d]*")  # such as libavutil-5809ad29.so.60.26.102
_SEARCHED = "LD_LIBRARY_PATH"


def with_pyav_libraries(folder: Path) -> dict[str, str]:
    """This process's environment, in which a child finds PyAV's FFmpeg libraries first, by links in `folder` with their usual names.

    So both decoders have one FFmpeg. Unchanged where PyAV brings none, as a PyAV built from source does not.
    """
    environment = dict(os.environ)
    spec = importlib.util.find_spec("av")
    if spec is None or spec.origin is None:
        return environment
    bundle = Path(spec.origin).parent.parent / "av.libs"
    names = {path: match for path in bundle.glob("lib*") if (match := _BUNDLED.fullmatch(path.name))}
    if not names:
        return environment
    for path, match in names.items():
        (folder / f"{match[1]}{match[2]}").symlink_to(path)
    before = environment.get(_SEARCHED)
    environment[_SEARCHED] = os.pathsep.join([str(folder), str(bundle), *([before] if before else [])])
    return environment
