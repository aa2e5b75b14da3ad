"""The long part of a build: decoder processes feed clips, the codec encodes them, a writer thread stores them, all at once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from mmspeed.config import Bucket, Config
from mmspeed.log import ProgressLine
from mmspeed.preprocess.decoding.clips import Clip, split_of
from mmspeed.preprocess.decoding.pool import DecodePool, Event, Failed, Finished, Frames, Selected
from mmspeed.preprocess.encoding.async_writer import BackgroundWriter
from mmspeed.preprocess.encoding.encode import Encoders, TrustedBatches, encode_latents, latent_entry
from mmspeed.preprocess.records.build_report import BuildReport
from mmspeed.preprocess.records.sample_table import ClipRow, PlannedSource, rows_of
from mmspeed.preprocess.records.statistics import DataStatistics
from mmspeed.preprocess.sources.rejections import Rejected, Rejection
from mmspeed.preprocess.sources.source import Source

_HELD = 4  # batches of decoded clips that may wait for company, of all buckets together


class LatentStage:
    """Encodes what is missing of the clips of some sources; every clip ends as a row or in `report.rejections`.

    Memory does not grow with the length of videos, and with their number only by a row a clip.
    """

    def __init__(
        self,
        config: Config,
        encoders: Encoders,
        store: BackgroundWriter,
        report: BuildReport,
        trusted: TrustedBatches | None = None,
    ) -> None:
        self.config, self.encoders, self.store, self.report = config, encoders, store, report
        settings = config.preprocess
        self.trusted = trusted or TrustedBatches(settings.encode_batch, settings.exact_batches)
        self._counted = self.trusted.counts
        self.statistics = DataStatistics()
        self._rows: list[list[ClipRow]] = []  # of each accepted source
        self._made: dict[str, str] = {}  # the source that a key was, or is being, encoded for
        self._undecoded: dict[tuple[str, str], Rejected] = {}  # by source and key
        self._unencoded: dict[str, Rejected] = {}  # by key, as sources of one content share it
        self._waiting: dict[Bucket, list[tuple[Clip, np.ndarray]]] = {}

    def run(self, sources: Sequence[Source]) -> list[ClipRow]:
        """The rows of all clips that are in the cache now."""
        started, begun = time.monotonic(), False
        data = self.config.data
        # Where sources have many clips, taking them in order would let all workers but one wait.
        single = data.windows == data.crops == data.buckets_per_clip == 1
        with DecodePool(self.config, sources) as pool, ProgressLine("latents", len(sources), "clip") as line:
            for event in self._timed(pool.run(self.wanted, ordered=single)):
                if isinstance(event, Frames) and not begun:
                    self.report.start_seconds += time.monotonic() - started
                    begun = True
                self.take(event)
                line.advance(isinstance(event, Finished))
            self.flush()
        self.report.latent_seconds += time.monotonic() - started
        self.report.latent_batches += self.trusted.counts - self._counted
        return self.rows()

    def rows(self) -> list[ClipRow]:
        """At the end: the rows of all clips that are in the cache; every source is counted, and what failed is named."""
        return self.settle()

    def settle(self) -> list[ClipRow]:
        """The rows of the clips that are in the cache now, of all sources since the last call; those of others are counted."""
        rows, self._rows = self._rows, []
        return [row for of_source in rows for row in self._kept(of_source)]

    def take(self, event: Event) -> None:
        """Meet one event of a `DecodePool`; clips are encoded as soon as enough of a bucket are there."""
        if isinstance(event, Selected):
            self._plan(event)
        elif isinstance(event, Frames):
            self._collect(event)
        elif isinstance(event, Failed):
            self._fail(event)

    def flush(self) -> None:
        """Encode the clips that wait for company, and hand them to the store."""
        for bucket in list(self._waiting):
            self._encode(self._waiting.pop(bucket))

    def _timed(self, events: Iterator[Event]) -> Iterator[Event]:
        """The same events; the time that they are waited for is counted."""
        while True:
            started = time.monotonic()
            event = next(events, None)
            self.report.decode_wait_seconds += time.monotonic() - started
            if event is None:
                return
            yield event

    def wanted(self, clip: Clip) -> bool:
        """Whether a clip must be decoded. Called by the decoders' threads."""
        return not self.store.has("latents", self.encoders.latent_key(clip))

    def _plan(self, event: Selected) -> None:
        content_id = event.clips[0].content_id
        split = split_of(event.source, content_id, self.config.data, self.config.seed)
        self.statistics.add_source(event.source, event.probe, event.clips)
        planned = PlannedSource(event.source, split, content_id, event.clips)
        self._rows.append(list(rows_of([planned], self.encoders.latent_key, self.encoders.text_key)))

    def _fail(self, event: Failed) -> None:
        if event.clip is None:
            self._reject(event.rejected.of(event.source.name), whole=True)
        else:
            self._undecoded[event.source.name, self.encoders.latent_key(event.clip)] = event.rejected

    def _collect(self, event: Frames) -> None:
        """Put a decoded clip to those of its bucket, and encode them when they are a batch."""
        key = self.encoders.latent_key(event.clip)
        if key in self._made or key in self._unencoded or self.store.has("latents", key):
            return  # another source of the same content came first
        self._made[key] = event.source.name
        group = self._waiting.setdefault(event.clip.bucket, [])
        group.append((event.clip, event.frames_FHWC))
        size = self.trusted.limit
        if len(group) >= size:
            self._encode(self._waiting.pop(event.clip.bucket))
        elif sum(map(len, self._waiting.values())) >= _HELD * size:
            fullest = max(self._waiting, key=lambda bucket: len(self._waiting[bucket]))
            self._encode(self._waiting.pop(fullest))

    def _encode(self, videos: list[tuple[Clip, np.ndarray]]) -> None:
        started = time.monotonic()
        with _one_thread(self.config.vae.kind == "linear" and self.encoders.device.kind == "cpu"):
            results = encode_latents(self.encoders, self.trusted, videos)
        self.report.busy_seconds += time.monotonic() - started
        waited = self.store.waited
        for (clip, _), result in zip(videos, results, strict=True):
            if isinstance(result, Rejected):
                key = self.encoders.latent_key(clip)
                self._unencoded[key] = result
                del self._made[key]
                continue
            self.store.add(**latent_entry(self.encoders, clip, result))
            self.report.clips_encoded += 1
            self.report.seconds_of_video += clip.seconds
            self.report.decoders[clip.decoder] += 1
        self.report.write_wait_seconds += self.store.waited - waited

    def _kept(self, rows: list[ClipRow]) -> list[ClipRow]:
        """The rows of one source whose clips are in the cache; those of the others are counted and named."""
        failures = {row: why for row in rows if (why := self._failure(row)) is not None}
        kept = [row for row in rows if row not in failures]
        report = self.report
        report.clips_failed += len(failures)
        if not kept:
            self._reject(next(iter(failures.values())).of(rows[0].source), whole=True)
            return []
        for row, why in failures.items():
            self._reject(why.of(part_name(row)), whole=False)
        report.partial += bool(failures)
        made = sum(self._made.get(row.latent_key) == row.source for row in kept)
        report.clips_reused += len(kept) - made
        report.encoded += made > 0
        report.reused += made == 0
        return kept

    def _reject(self, rejection: Rejection, whole: bool) -> None:
        self.report.rejections.append(rejection)
        self.report.rejected += whole
        self.statistics.add_rejection(rejection, whole)

    def _failure(self, row: ClipRow) -> Rejected | None:
        undecoded = self._undecoded.get((row.source, row.latent_key))
        if undecoded is not None and not self.store.has("latents", row.latent_key):
            return undecoded
        return self._unencoded.get(row.latent_key)


@contextmanager
def _one_thread(wanted: bool) -> Iterator[None]:
    """For the linear codec, which costs next to nothing: threads that wait for each other take the decoders' cores.

    Measured on two cores with two decoders: 0.27 ms a frame of 96 x 160 in place of 4.1 with two threads.
    """
    before = torch.get_num_threads()
    try:
        if wanted:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


def part_name(row: ClipRow) -> str:
    """How one clip of a source is named among the rejections."""
    bucket = Bucket.parse(row.bucket)
    crop = f", crop {row.crop}" if row.crop else ""
    return f"{row.source} [{bucket}, window {row.window}{crop}]"
