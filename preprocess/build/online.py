"""Preprocess during training: missing entries are encoded in the first epoch, in the order in which training needs them.

`OnlineBuilder` is passed to `TrainPipeline`, which knows it only as `mmspeed.data.loading.first_epoch.OnlineEncoder`.
Its entries equal those of
`mmspeed preprocess`, byte for byte: planning, decoding, encoding and storing are the same code.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch.distributed as dist

from mmspeed import comm
from mmspeed.config import Config
from mmspeed.data import CacheWriter, DatasetCache, Entry, Sample
from mmspeed.data.cache.files import TempFile
from mmspeed.data.cache.index import compile_index
from mmspeed.data.cache.splits import copies_of_held_out
from mmspeed.data.cache.tables import read_samples, write_rejects, write_samples
from mmspeed.data.loading.first_epoch import EncodedEntries, EncodeJob
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine, get_logger
from mmspeed.media.rejections import Reason, Rejected, Rejection, reasons_in_words
from mmspeed.preprocess.build.coordination import ProcessRecord, read_part, write_part
from mmspeed.preprocess.build.setup import BuildSetup
from mmspeed.preprocess.decoding.clips import split_of
from mmspeed.preprocess.decoding.pool import DecodePool, Event, Failed, Finished, Selected
from mmspeed.preprocess.encoding.async_writer import BackgroundWriter
from mmspeed.preprocess.encoding.encode import TrustedBatches, encode_texts, text_entry
from mmspeed.preprocess.encoding.latent_stage import LatentStage
from mmspeed.preprocess.records.build_report import BuildReport, held_out_line
from mmspeed.preprocess.records.sample_table import (
    ClipRow,
    PlannedSource,
    caption_rejections,
    kept_captions,
    rows_of,
    samples_of_rows,
)

log = get_logger("preprocess")


class OnlineBuilder:
    """Build a config's cache during training: a `mmspeed.data.loading.first_epoch.OnlineEncoder`."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._stack = ExitStack()  # resources that are open between `start` and `close`
        self.texts_with_sources = False
        self._moved: list[Entry] = []  # entries of shards that were sealed after their locations were reported

    # -- before the first step ------------------------------------------------------------------------------------

    def plan(self, device: Device, rank: int, world: int, group: dist.ProcessGroup | None) -> None:
        """Probe every source, each rank its share, and write the tables of the future samples.

        A collective call. Raises UserError if there is nothing to train on, or an encoder cannot be found.
        """
        self.rank, self.world = rank, world
        self.setup = BuildSetup(self.config, device)
        self.setup.require_same(comm.all_gather_objects(self.setup.agreement.to_json(), group))
        if rank == 0:
            self.setup.mend()
            self.setup.fit_when_missing()
        comm.barrier(group)
        self.setup.check_buckets()
        rows, rejections = self._probe(rank, world)
        rows, rejections = self._gather(rows, rejections, group)
        comm.first_does(lambda: self._write_plan(rows, [*self.setup.listing.rejections, *rejections]), rank, group)
        self.texts_with_sources = self.setup.encoders.sees_pictures
        listed = () if self.texts_with_sources else self.setup.listing.sources
        self._captions = {
            self.setup.encoders.text_key(caption): caption for source in listed for caption in source.captions
        }
        self._sources = {source.name: source for source in self.setup.listing.sources}

    def _probe(self, rank: int, world: int) -> tuple[list[ClipRow], list[Rejection]]:
        """The rows and rejections of this rank's share of the sources; nothing is decoded."""
        config, encoders = self.config, self.setup.encoders
        sources = self.setup.listing.sources[rank::world]
        rows: list[ClipRow] = []
        rejections: list[Rejection] = []
        with (
            DecodePool(config, sources, self.setup.recipe) as pool,
            ProgressLine("probe", len(sources), "clip") as line,
        ):
            for event in pool.run(None):
                if isinstance(event, Selected):
                    content_id = event.clips[0].content_id
                    split = split_of(event.source, content_id, config.data, config.seed)
                    planned = PlannedSource(event.source, split, content_id, event.clips)
                    rows += rows_of([planned], encoders.latent_key, encoders.text_key)
                    rejections += event.dropped
                elif isinstance(event, Failed):
                    rejections.append(event.rejected.of(event.source.name))
                elif isinstance(event, Finished):
                    line.advance()
        return rows, rejections

    def _gather(
        self, rows: list[ClipRow], rejections: list[Rejection], group: dist.ProcessGroup | None
    ) -> tuple[list[ClipRow], list[Rejection]]:
        """The results of all ranks, on rank 0; nothing on the others. They pass through a folder of this run."""
        if self.world == 1:
            return rows, rejections
        name = comm.broadcast_object(f"online-{secrets.token_hex(8)}", group=group)
        folder = self.setup.root / "parts" / name
        mark = TempFile(folder) if self.rank == 0 else None  # its lock marks the folder as in use
        facts = {"rejections": [[r.source, r.reason.value, r.detail] for r in rejections]}
        write_part(folder / f"rank-{self.rank:05d}.parquet", ProcessRecord(rows, facts))
        comm.barrier(group)
        if mark is None:
            return [], []
        parts = [read_part(folder / f"rank-{rank:05d}.parquet") for rank in range(self.world)]
        mark.discard()
        self.setup.remove_parts(name)
        rejected = [
            Rejection(s, Reason(reason), detail) for part in parts for s, reason, detail in part.facts["rejections"]
        ]
        return [row for part in parts for row in part.rows], rejected

    def _write_plan(self, rows: Sequence[ClipRow], rejections: Sequence[Rejection]) -> None:
        """Write the tables of an incomplete cache, and the empty caption."""
        setup, encoders = self.setup, self.setup.encoders
        self._rejections = [(r.source, r.reason.value, r.detail) for r in rejections]
        write_rejects(setup.root, self._rejections)
        if not rows:
            raise UserError(
                f"no source of {len(setup.listing.sources)} can be used ({reasons_in_words(rejections)}); each is listed in {setup.root / 'rejects'}"
            )
        with CacheWriter(setup.root, mend=False) as writer:
            if not writer.has("null", encoders.text_key("")):
                [(caption, tensors)] = encode_texts(encoders, TrustedBatches(1), [""])
                assert not isinstance(tensors, Rejected)  # the empty caption's failure is an error
                writer.add(**text_entry(encoders, caption, tensors, "null"))
        if copies := sorted({row.source for row in copies_of_held_out(rows)}):
            log.warning(held_out_line(copies).strip())
        samples = samples_of_rows(rows, self.config.data, encoders.strides)
        write_samples(setup.root, samples, encoders.text_key(""))
        setup.write_info()  # last: what it records holds of the samples
        compile_index(setup.root)

    # -- during the first epoch -----------------------------------------------------------------------------------

    def start(self, cache: DatasetCache, tasks: Sequence[EncodeJob]) -> None:
        """Start decoding the sources of the tasks, in order, a bounded number ahead."""
        self.close()
        self._stack = ExitStack()
        config = self.config
        shard_bytes = int(config.preprocess.shard_mb * 1e6)
        self._writer = self._stack.enter_context(CacheWriter(self.setup.root, shard_bytes, mend=False, defer=True))
        self._store = self._stack.enter_context(BackgroundWriter(self._writer))
        self._report = BuildReport.of(self.setup.root, self.setup.listing)
        recipe = self.setup.recipe
        self._stage = LatentStage(config, self.setup.encoders, self._store, self._report, recipe=recipe)
        self._trusted = TrustedBatches(config.preprocess.text_batch, config.preprocess.exact_batches)
        names = [name for task in tasks for name in task.sources]
        self._samples: dict[str, list[Sample]] = {name: [] for name in names}
        for sample in cache.samples:
            if sample.source in self._samples:
                self._samples[sample.source].append(sample)
        self._events: Iterator[Event] = iter(())
        if names:
            pool = self._stack.enter_context(DecodePool(config, [self._sources[name] for name in names], recipe))
            self._events = pool.run(self._stage.wanted)

    def make(self, task: EncodeJob) -> EncodedEntries:
        """Encode the sources and captions of a task; every rank can then read the returned entries."""
        pending = set(task.sources)
        while pending:
            event = next(self._events)
            self._stage.take(event)
            if isinstance(event, Finished):
                pending.discard(event.source.name)
        self._stage.flush()
        captions = [self._captions[key] for key in task.texts if not self._store.has("texts", key)]
        encoded = EncodedEntries(lost_texts=dict(self._stage.failed_captions))
        for caption, tensors in encode_texts(self.setup.encoders, self._trusted, captions) if captions else ():
            if isinstance(tensors, Rejected):
                encoded.lost_texts[self.setup.encoders.text_key(caption)] = tensors.detail
            else:
                self._store.add(**text_entry(self.setup.encoders, caption, tensors, "texts"))
        encoded.entries = [self._place(section, key) for section, key in self._store.drain()]
        if self.world > 1 and encoded.entries:
            self._writer.sync()  # makes the entries visible to other machines
        encoded.entries += self._moved
        self._moved = []
        self._stage.settle()
        for name in task.sources:
            self._settle(name, encoded)
        return encoded

    def acknowledge(self) -> None:
        """Drop the temporary names of the shards sealed last time, and start sealing those that are full now."""
        self._writer.drop_names()
        self._store.call(self._seal)

    def close(self) -> None:
        """Seal the stored entries and end the decoders. The cache may be left incomplete: the next run continues from it."""
        stack, self._stack = self._stack, ExitStack()
        stack.close()

    def conclude(
        self, lost: Sequence[str], rejections: Sequence[tuple[str, str, str]], lost_texts: Mapping[str, str]
    ) -> None:
        """Write the tables of the complete cache: the planned samples, with lost ones marked and without lost captions.

        Keys of samples stay those of the plan, by which training has drawn.
        """
        root, gone = self.setup.root, set(lost)
        samples, null_key = read_samples(root)
        captions = {sample.source: sample.text_keys for sample in samples} if lost_texts else {}
        failed = {source for source, _, _ in rejections}
        named = [
            (rejection.source, rejection.reason.value, rejection.detail)
            for source, text_keys in captions.items()
            if source not in failed
            for rejection in caption_rejections(source, text_keys, lost_texts)
        ]
        write_rejects(root, [*self._rejections, *rejections, *named])
        marked = [
            replace(sample, lost=sample.key in gone, text_keys=kept_captions(sample.text_keys, lost_texts))
            for sample in samples
        ]
        write_samples(root, marked, null_key)
        compile_index(root)

    def free(self) -> tuple[int, int]:
        """Drop both encoders; return bytes of device memory in use before and after."""
        self.setup.close()
        return self.setup.encoders.free()

    def _place(self, section: str, key: str) -> Entry:
        entry = self._writer.place(section, key)
        if entry is None:
            raise RuntimeError(f"{section} {key} was stored and is missing")
        return entry

    def _seal(self) -> None:
        self._moved += self._writer.seal_full()

    def _settle(self, source: str, encoded: EncodedEntries) -> None:
        """Report the lost samples of a source, those with a latent that is still missing, with the reasons."""
        lost = [
            s for s in self._samples.pop(source) if any(not self._writer.has("latents", k) for k in s.keys("latents"))
        ]
        if not lost:
            return
        encoded.lost += [sample.key for sample in lost]
        reasons = [r for r in self._report.rejections if r.source == source or r.source.startswith(f"{source} [")]
        reasons = reasons or [Rejection(source, Reason.ENCODE_FAILED, "the file changed since training began")]
        encoded.rejections += [(r.source, r.reason.value, r.detail) for r in reasons]
