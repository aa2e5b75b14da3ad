"""The longest stage of a build: decoder processes supply clips, the codec encodes them and a writer thread stores them, concurrently."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from mmspeed.config import Bucket, Config
from mmspeed.device import parse_dtype
from mmspeed.log import ProgressLine, get_logger
from mmspeed.media.probe import Probe
from mmspeed.media.rejections import Rejected, Rejection
from mmspeed.media.source import Source
from mmspeed.preprocess.decoding.clips import BLANK, Clip, clip_name, left_unmirrored, split_of
from mmspeed.preprocess.decoding.pool import DecodePool, Event, Failed, Finished, Frames, Selected
from mmspeed.preprocess.decoding.recipe import Recipe
from mmspeed.preprocess.decoding.transform import grey_frames
from mmspeed.preprocess.encoding.async_writer import BackgroundWriter
from mmspeed.preprocess.encoding.encode import (
    Encoders,
    TrustedBatches,
    encode_latents,
    encode_seen,
    latent_entry,
    text_entry,
)
from mmspeed.preprocess.records.build_report import BuildReport
from mmspeed.preprocess.records.sample_table import ClipRow, PlannedSource, rows_of
from mmspeed.preprocess.records.statistics import DataStatistics

log = get_logger("preprocess")
_NAMED = 3  # sources of a reason that a process names
_HELD = 4  # batches of decoded clips that may wait to be filled, over all buckets


class LatentStage:
    """Encode the missing clips of some sources; every clip ends as a row or in `report.rejections`.

    Memory does not grow with the length of videos, and with their number only by one row per clip.
    """

    def __init__(
        self,
        config: Config,
        encoders: Encoders,
        store: BackgroundWriter,
        report: BuildReport,
        trusted: TrustedBatches | None = None,
        recipe: Recipe | None = None,
    ) -> None:
        self.config, self.encoders, self.store, self.report = config, encoders, store, report
        self.recipe = recipe
        settings = config.preprocess
        self.trusted = trusted or TrustedBatches(settings.encode_batch, settings.exact_batches)
        self._counted = self.trusted.counts
        self.statistics = DataStatistics()
        self._rows: list[list[ClipRow]] = []  # of each accepted source
        self._source_by_key: dict[str, str] = {}  # key -> the source that it was, or is being, encoded for
        self._undecoded: dict[tuple[str, str], Rejected] = {}  # by source and key
        self._unencoded: dict[str, Rejected] = {}  # by key, which sources of the same content share
        # of text encoders that see pictures: the details of captions that cannot be encoded, and those that were tried, by key
        self.failed_captions: dict[str, str] = {}
        self._captions_tried: set[str] = set()
        self._waiting: dict[Bucket, list[tuple[Clip, np.ndarray]]] = {}

    def run(self, sources: Sequence[Source]) -> list[ClipRow]:
        """Encode the clips of `sources`; return the rows of all their clips that are in the cache."""
        started, begun = time.monotonic(), False
        data = self.config.data
        # If sources have many clips, taking them in order would make all workers but one wait.
        single = data.windows == data.crops == data.buckets_per_clip == 1
        with (
            DecodePool(self.config, sources, self.recipe) as pool,
            ProgressLine("latents", len(sources), "clip") as line,
        ):
            for event in self._timed(pool.run(self.wanted, ordered=single)):
                if isinstance(event, Frames) and not begun:
                    self.report.start_seconds += time.monotonic() - started
                    begun = True
                self.take(event)
                line.advance(isinstance(event, Finished))
            self.flush()
        if self.encoders.sees_pictures:
            keys = {key for rows in self._rows for row in rows for key in row.text_keys}
            self.report.texts_reused += len(keys - self._captions_tried)
        self.report.latent_seconds += time.monotonic() - started
        self.report.latent_batches += self.trusted.counts - self._counted
        return self.rows()

    def rows(self) -> list[ClipRow]:
        """The rows of all clips in the cache, at the end; every source is counted, and failures are reported."""
        return self.settle()

    def settle(self) -> list[ClipRow]:
        """The rows of the clips in the cache, of all sources since the last call; failed clips are counted."""
        rows, self._rows = self._rows, []
        return [row for of_source in rows for row in self._kept(of_source)]

    def take(self, event: Event) -> None:
        """Process one event of a `DecodePool`; clips are encoded as soon as a bucket has a full batch."""
        if isinstance(event, Selected):
            self._plan(event)
        elif isinstance(event, Frames):
            self._collect(event)
        elif isinstance(event, Failed):
            self._fail(event)

    def flush(self) -> None:
        """Encode and store the clips of incomplete batches."""
        for bucket in list(self._waiting):
            self._encode(self._waiting.pop(bucket))

    def _timed(self, events: Iterator[Event]) -> Iterator[Event]:
        """Yield the same events; the time spent waiting for them is counted."""
        while True:
            started = time.monotonic()
            event = next(events, None)
            self.report.decode_wait_seconds += time.monotonic() - started
            if event is None:
                return
            yield event

    def wanted(self, clip: Clip) -> bool:
        """True if a clip must be decoded. Called by the decoders' threads."""
        return not self.store.has("latents", self.encoders.latent_key(clip)) or bool(self._missing_captions(clip))

    def _missing_captions(self, clip: Clip) -> list[str]:
        """The captions of a clip without an entry, where the text encoder sees its first frame beside them; else none."""
        if not self.encoders.sees_pictures or clip.role != "video":
            return []
        keys = {caption: self.encoders.text_key(caption, clip) for caption in clip.source.captions}
        return [
            caption
            for caption, key in keys.items()
            if key not in self.failed_captions and not self.store.has("texts", key)
        ]

    def _plan(self, event: Selected) -> None:
        content_id = event.clips[0].content_id
        split = split_of(event.source, content_id, self.config.data, self.config.seed)
        self.report.scene_cuts += event.cuts
        self.report.cut_videos += event.cuts > 0
        self.statistics.add_cuts(event.cuts)
        unmirrored = left_unmirrored(event.clips, self.config.data)
        self.report.unmirrored += unmirrored
        self.statistics.add_source(event.source, event.probe, event.clips, unmirrored)
        if event.probe.refusal:
            self._tell_refusal(event.source, event.probe)
        planned = PlannedSource(event.source, split, content_id, event.clips)
        self._rows.append(list(rows_of([planned], self.encoders.latent_key, self.encoders.text_key)))
        for clip in event.clips:
            for other in clip.roles:
                if self._lacks_blank(other):
                    self._collect(Frames(event.source, other, grey_frames(other.bucket)))
        for rejection in event.dropped:
            self.report.clips_failed += 1
            self._reject(rejection, whole=False)

    def _lacks_blank(self, clip: Clip) -> bool:
        """True for grey frames that no entry has, and none is on its way."""
        if clip.content_id != BLANK:
            return False
        key = self.encoders.latent_key(clip)
        return not (key in self._source_by_key or key in self._unencoded or self.store.has("latents", key))

    def _tell_refusal(self, source: Source, probe: Probe) -> None:
        """Count a source that the chosen decoder leaves to PyAV; the first few of a reason are named in the log."""
        refusals = self.report.decoder_refusals
        refusals[probe.refusal] += 1
        if refusals[probe.refusal] <= _NAMED:
            detail = f" ({probe.refusal_detail})" if probe.refusal_detail else ""
            log.info(f"{self.config.preprocess.decoder} leaves {source.name} to PyAV: {probe.refusal}{detail}")

    def _fail(self, event: Failed) -> None:
        if event.clip is None:
            self._reject(event.rejected.of(event.source.name), whole=True)
        else:
            named = event.rejected
            if event.clip.role != "video":
                named = Rejected(named.reason, f"its {event.clip.role} {event.clip.source.name}: {named.detail}")
            self._undecoded[event.source.name, self.encoders.latent_key(event.clip)] = named

    def _collect(self, event: Frames) -> None:
        """Add a decoded clip to its bucket, and encode the bucket when its batch is full."""
        self._encode_captions(event.clip, event.frames_FHWC)
        key = self.encoders.latent_key(event.clip)
        if key in self._source_by_key or key in self._unencoded or self.store.has("latents", key):
            return  # another source of the same content came first
        self._source_by_key[key] = event.source.name
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
                del self._source_by_key[key]
                continue
            self.store.add(**latent_entry(self.encoders, clip, result))
            self.report.clips_encoded += 1
            self.report.seconds_of_video += clip.seconds
            self.report.decoders.update([clip.decoder] if clip.decoder else [])
        self.report.write_wait_seconds += self.store.waited - waited

    def _encode_captions(self, clip: Clip, frames_FHWC: np.ndarray) -> None:
        """Encode and store the captions of a clip that are missing, beside its first frame."""
        captions = self._missing_captions(clip)
        if not captions:
            return
        with self.report.counting_captions(self.encoders.text, parse_dtype(self.config.preprocess.text_dtype).itemsize):
            results = encode_seen(self.encoders, captions, frames_FHWC[0])
        for caption, tensors in zip(captions, results, strict=True):
            key = self.encoders.text_key(caption, clip)
            self._captions_tried.add(key)
            if isinstance(tensors, Rejected):
                self.failed_captions[key] = tensors.detail
                self.report.texts_failed += 1
                continue
            entry = text_entry(self.encoders, caption, tensors, clip=clip)
            self.store.add(**entry)
            self.statistics.add_caption_tokens(entry["tokens"])
            self.report.texts += 1

    def _kept(self, rows: list[ClipRow]) -> list[ClipRow]:
        """The rows of one source whose clips are in the cache; the others are counted and reported."""
        failure_by_row = {row: why for row in rows if (why := self._failure(row)) is not None}
        stored = [row for row in rows if row not in failure_by_row]
        report = self.report
        report.clips_failed += len(failure_by_row)
        if not stored:
            self._reject(next(iter(failure_by_row.values())).of(rows[0].source), whole=True)
            return []
        for row, why in failure_by_row.items():
            self._reject(why.of(part_name(row)), whole=False)
        report.partial += bool(failure_by_row)
        encoded = sum(any(self._source_by_key.get(key) == row.source for key in row.latent_keys) for row in stored)
        report.clips_reused += len(stored) - encoded
        report.encoded += encoded > 0
        report.reused += encoded == 0
        return [replace(row, encoded=True) for row in stored] if encoded else stored

    def _reject(self, rejection: Rejection, whole: bool) -> None:
        self.report.rejections.append(rejection)
        self.report.rejected += whole
        self.statistics.add_rejection(rejection, whole)

    def _failure(self, row: ClipRow) -> Rejected | None:
        for key in row.latent_keys:
            undecoded = self._undecoded.get((row.source, key))
            if undecoded is not None and not self.store.has("latents", key):
                return undecoded
            if key in self._unencoded:
                return self._unencoded[key]
        return None


@contextmanager
def _one_thread(enabled: bool) -> Iterator[None]:
    """Use one thread in the block, for the cheap linear codec: threads that wait for each other would take the decoders' cores.

    Measured on two cores with two decoders: 0.27 ms a frame of 96 x 160 in place of 4.1 with two threads.
    """
    before = torch.get_num_threads()
    try:
        if enabled:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


def part_name(row: ClipRow) -> str:
    """The name of one clip of a source among the rejections."""
    return clip_name(row.source, Bucket.parse(row.bucket), row.window, row.crop)
