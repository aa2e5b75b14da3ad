"""Decoders beside the encoder: a few threads, each with a child process that can be killed, a bounded number of clips ahead."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np

from mmspeed.config import Config
from mmspeed.preprocess.reasons import Reason, Rejected
from mmspeed.preprocess.select import Clip, select_clip
from mmspeed.preprocess.source import Source
from mmspeed.preprocess.worker import DecodeWorker

Outcome = tuple[Source, Clip | Rejected, "np.ndarray | None"]


class DecodePool:
    """Probes and decodes `sources` in order, ahead of the consumer by at most the number of workers plus two.

    Use as a context manager; leaving it ends the child processes.
    """

    def __init__(self, config: Config, sources: Sequence[Source]) -> None:
        self.config = config
        self.sources = sources
        self.size = max(1, min(config.preprocess.decode_workers, len(sources)))
        self._local = threading.local()
        self._workers: list[DecodeWorker] = []
        self._executor = ThreadPoolExecutor(self.size, thread_name_prefix="decode")

    def __enter__(self) -> DecodePool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._executor.shutdown(wait=kind is None, cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def clips(self, wanted: Callable[[Clip], bool]) -> Iterator[Outcome]:
        """Every source in order with its clip and its frames (F, H, W, 3) uint8.

        The frames are None where `wanted(clip)` is false; the clip is a Rejected where there is none.
        """
        ahead: deque[Future[Outcome]] = deque()
        for source in self.sources:
            ahead.append(self._executor.submit(self._one, source, wanted))
            if len(ahead) > self.size + 2:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()

    def _worker(self) -> DecodeWorker:
        worker = getattr(self._local, "worker", None)
        if worker is None:
            worker = self._local.worker = DecodeWorker()
            self._workers.append(worker)
        return worker

    def _one(self, source: Source, wanted: Callable[[Clip], bool]) -> Outcome:
        data, limit = self.config.data, self.config.preprocess.time_limit
        started = time.monotonic()
        try:
            worker = self._worker()
            probe = worker.open(source, int(data.max_file_mb * 1e6), data.max_pixels, limit)
            clip = select_clip(source, probe, data, self.config.preprocess.full_hash)
            if not wanted(clip):
                return source, clip, None
            left = limit - (time.monotonic() - started)
            frames, decoder = worker.read(source, clip.indices, max(left, 0.001))
            return source, clip.decoded_by(decoder), frames
        except Rejected as rejected:
            return source, rejected, None
        except OSError as error:
            return source, Rejected(Reason.UNDECODABLE, f"cannot be read: {error.strerror or error}"), None
