"""A decoder in a process of its own, so that a file that hangs or crashes a decoder costs that file and nothing else.

Legend: F frames, H W height and width in pixels.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from mmspeed.errors import UserError
from mmspeed.preprocess.decode_worker import HEADER, pack, source_to_json
from mmspeed.preprocess.probe import Probe
from mmspeed.preprocess.reasons import Reason, Rejected
from mmspeed.preprocess.source import Source

_START_SECONDS = 120.0  # a cold file system on a busy machine takes long to import from


class _OverrunError(Exception):
    """The child has not answered in time."""


class _DiedError(Exception):
    """The child's end of the pipe is closed."""


class DecodeWorker:
    """Probes and decodes files in a child process, which is killed when it overruns and started anew when it is gone.

    Not for several threads at once. Use as a context manager, or call `close`.
    """

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._errors: BinaryIO | None = None
        self._limits = {"max_file_bytes": sys.maxsize, "max_pixels": sys.maxsize}

    def __enter__(self) -> DecodeWorker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is no child."""
        return self._child.pid if self._child is not None and self._child.poll() is None else None

    def open(self, source: Source, max_file_bytes: int, max_pixels: int, time_limit: float) -> Probe:
        """What `source` is. Raises Rejected; `time_limit` is in seconds."""
        self._limits = {"max_file_bytes": max_file_bytes, "max_pixels": max_pixels}
        reply, _ = self._call({"command": "open", "source": source_to_json(source)}, time_limit)
        return Probe.from_json(reply["probe"])

    def read(self, source: Source, indices: Sequence[int], time_limit: float) -> tuple[np.ndarray, str]:
        """The frames `indices` of `source` as (F, H, W, 3) uint8, and the decoder's name. Raises Rejected.

        A crash is tried once more without decord, whose crash it most likely was.
        """
        request = {"command": "read", "source": source_to_json(source), "indices": list(indices), "decord": True}
        deadline = time.monotonic() + time_limit
        try:
            reply, frames_FHWC = self._call(request, time_limit)
        except Rejected as rejected:
            left = deadline - time.monotonic()
            if rejected.reason is not Reason.DECODER_CRASHED or left <= 0:
                raise
            reply, frames_FHWC = self._call(request | {"decord": False}, left)
        assert frames_FHWC is not None
        return frames_FHWC, reply["decoder"]

    def close(self) -> None:
        """End the child process."""
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            for pipe in (self._child.stdin, self._child.stdout, self._errors):
                if pipe is not None:
                    _close_quietly(pipe)
        self._child = self._errors = None

    def _call(self, request: dict[str, Any], time_limit: float) -> tuple[dict[str, Any], np.ndarray | None]:
        """Send a request and await its answer, with the frames when it has any. Raises Rejected."""
        child = self._started()
        assert child.stdin is not None
        deadline = time.monotonic() + time_limit
        try:
            child.stdin.write(pack(request | self._limits))
            child.stdin.flush()
            reply = self._message(deadline)
            frames_FHWC = None
            if "shape" in reply:
                frames_FHWC = np.empty(reply["shape"], np.uint8)
                self._fill(frames_FHWC.data.cast("B"), deadline)
        except _OverrunError:
            self.close()
            raise Rejected(Reason.TIME_LIMIT, f"no answer within {time_limit:g} s") from None
        except (_DiedError, OSError):
            detail = self._death()
            self.close()
            raise Rejected(Reason.DECODER_CRASHED, detail) from None
        except BaseException:
            self.close()  # half an answer may be in the pipe
            raise
        if "rejected" in reply:
            raise Rejected(Reason(reply["rejected"]), reply["detail"])
        return reply, frames_FHWC

    def _started(self) -> subprocess.Popen[bytes]:
        """The running child. Raises UserError when it does not start."""
        if self._child is not None and self._child.poll() is not None:
            self.close()
        if self._child is None:
            self._errors = tempfile.TemporaryFile()
            self._child = subprocess.Popen(
                [sys.executable, "-m", "mmspeed.preprocess.decode_worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                bufsize=0,
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
            try:
                self._message(time.monotonic() + _START_SECONDS)
            except (_OverrunError, _DiedError):
                why = self._death()
                self.close()
                raise UserError(f"the decoder process does not start: {why}; see `mmspeed doctor`") from None
        return self._child

    def _message(self, deadline: float) -> dict[str, Any]:
        header = bytearray(HEADER.size)
        self._fill(memoryview(header), deadline)
        text = bytearray(HEADER.unpack(header)[0])
        self._fill(memoryview(text), deadline)
        return json.loads(text)

    def _fill(self, buffer: memoryview, deadline: float) -> None:
        """Read until `buffer` is full. Raises _OverrunError or _DiedError."""
        assert self._child is not None and self._child.stdout is not None
        pipe: Any = self._child.stdout  # unbuffered, so that `select` sees all there is
        done = 0
        while done < len(buffer):
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise _OverrunError
            count = pipe.readinto(buffer[done:])
            if not count:
                raise _DiedError
            done += count

    def _death(self) -> str:
        """How the child died, and the last line that it wrote."""
        assert self._child is not None
        try:
            code = self._child.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        last = ""
        if self._errors is not None:
            self._errors.seek(max(0, self._errors.seek(0, 2) - 2000))
            last = (self._errors.read().decode("utf-8", "replace").strip().splitlines() or [""])[-1]
        return f"{how}: {last}" if last else how


def _close_quietly(pipe: Any) -> None:
    """Close a pipe whose other end may be gone."""
    try:
        pipe.close()
    except OSError:
        return
