"""Train the first epoch on an incomplete cache: entries that a step lacks are encoded before it, each once, by one process.

Preprocess encodes (`OnlineEncoder`); this module decides which rank encodes which entry, and when. That is a function of the order of
training alone, so the ranks agree without communication. Before every step they exchange the locations of new entries and the keys
of samples that are lost because their source failed. The entries themselves pass between processes through the cache's files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import torch.distributed as dist

from mmspeed import comm
from mmspeed.data.cache.reader import DatasetCache
from mmspeed.data.cache.tables import Entry, Sample
from mmspeed.data.sampling.rank_batches import ranks_of_samples
from mmspeed.data.sampling.sampler import BatchSampler, SampleUse
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine, Working, format_bytes, get_logger

log = get_logger("data")

_PART = 256  # samples encoded between two exchanges of the ranks, outside of steps


@dataclass
class EncodedEntries:
    """The result of an encoding job: new entries, entries that moved since they were reported, lost samples and captions."""

    entries: list[Entry] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)  # keys of samples
    rejections: list[tuple[str, str, str]] = field(default_factory=list)  # (source, reason, detail) of the lost samples
    # captions that cannot be encoded: the detail of each, by key
    lost_texts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class EncodeJob:
    """Sources and captions (keys of texts) that one rank encodes before one step."""

    sources: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()


class OnlineEncoder(Protocol):
    """Interface through which training uses preprocess to encode entries. All its files are in the cache's format.

    texts_with_sources: True, after `plan`, where captions are encoded with the sources that they belong to; jobs then name no texts.
    """

    texts_with_sources: bool

    def plan(self, device: Device, rank: int, world: int, group: dist.ProcessGroup | None) -> None:
        """Examine every source and write the tables of the future samples. A collective call.

        Raises UserError if there is nothing to train on.
        """
        ...

    def start(self, cache: DatasetCache, tasks: Sequence[EncodeJob]) -> None:
        """Prepare this rank's tasks in their order: decoding may run ahead."""
        ...

    def make(self, task: EncodeJob) -> EncodedEntries:
        """Encode one task and store it. Entries that other ranks may read are durable when this returns."""
        ...

    def acknowledge(self) -> None:
        """Note that all ranks have received everything that `make` returned, and have read all they need for earlier steps."""
        ...

    def close(self) -> None:
        """Store everything durably and end child processes. The cache may be left incomplete."""
        ...

    def conclude(
        self, lost: Sequence[str], rejections: Sequence[tuple[str, str, str]], lost_texts: Mapping[str, str]
    ) -> None:
        """Write the tables of a complete cache; called on rank 0.

        Args:
            lost: the keys of the samples that no step can use.
            rejections: (source, reason, detail) of those whose source failed.
            lost_texts: captions that cannot be encoded, by key, with the detail of each.
        """
        ...

    def free(self) -> tuple[int, int]:
        """Drop the encoders; return bytes of device memory in use (on the CPU: of the process) before and after."""
        ...


class EncodeOwners:
    """Assignment of sources and captions to ranks: each is encoded before its first use, by the ranks that use it in turn.

    Several ranks use a sample under sequence or tensor parallelism.
    """

    def __init__(self) -> None:
        self.by_thing: dict[str, tuple[int, int]] = {}  # (step, rank), in the order of first uses
        self._turns: dict[tuple[int, ...], int] = {}

    def used(self, thing: str, step: int, ranks: tuple[int, ...]) -> None:
        """Record a use of a missing source or caption; uses come in the order of training."""
        if thing not in self.by_thing:
            turn = self._turns[ranks] = self._turns.get(ranks, -1) + 1
            self.by_thing[thing] = step, ranks[turn % len(ranks)]


class FirstEpoch:
    """Drive an encoder through the rest of the first epoch, in the same way on every rank.

    Args:
        cache: opened with `partial=True`; it receives new entries here, and is complete after `finish`.
        sampler: the order of training.
        maker: encodes this rank's share.
        rank: this process among all of `group`.
        world: number of processes that share the batches.
        start: the first step of this run.
        stop: the step at which training ends; no entry is encoded for later steps.
        held_out: samples that validation reads; encoded before the first step.
        group: process group for the exchanges between ranks, with a long time-out; None for one process.
    """

    def __init__(
        self,
        cache: DatasetCache,
        sampler: BatchSampler[Sample],
        maker: OnlineEncoder,
        rank: int,
        world: int,
        start: int,
        stop: int,
        held_out: Sequence[Sample] = (),
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.cache, self.sampler, self.maker = cache, sampler, maker
        self.rank, self.world, self.group = rank, world, group
        self.active = True
        self.freed: tuple[int, int] | None = None  # bytes of device memory before and after the encoders were dropped
        self.encoded = self.encoded_here = 0  # entries, of all ranks and of this one
        self.lost = {sample.key for sample in cache.samples if sample.lost}
        self.lost_texts: dict[str, str] = {}  # captions that cannot be encoded, by key
        self.rejections: list[tuple[str, str, str]] = []
        self._next = start
        last = min(stop, sampler.first_pass)
        self._tasks = self._plan(held_out, range(start, last))
        maker.start(cache, [self._tasks[step] for step in sorted(self._tasks)])

    def provide(self, step: int) -> None:
        """Encode the entries that `step` lacks; afterwards every rank can read them. A collective call.

        At the first step of the second epoch the cache is completed, and the encoders are dropped.
        """
        if not self.active:
            return
        if step >= self.sampler.first_pass:
            self.finish()
            return
        if step < self._next:  # after a roll-back
            return
        self._next = step + 1
        task = self._tasks.pop(step, EncodeJob())
        with Working(f"encoding {len(task.sources)} sources for step {step + 1}", tell=False):
            self._share(task)

    def mark(self, draws: Sequence[SampleUse[Sample]]) -> list[SampleUse[Sample]]:
        """The draws, with samples marked as lost if their source or all of their captions have failed.

        Samples that lost some of their captions have the others. Every caption of a sample is tried before its first use, so no use
        depends on when a run was stopped.
        """
        marked = [
            replace(draw, sample=replace(draw.sample, lost=True)) if draw.sample.key in self.lost else draw
            for draw in draws
        ]
        if not self.lost_texts:
            return marked
        return [replace(draw, sample=self._with_texts(draw.sample)) for draw in marked]

    def present(self, samples: Iterable[Sample]) -> list[Sample]:
        """The samples that are not lost, with the captions that are not."""
        return [self._with_texts(sample) for sample in samples if sample.key not in self.lost]

    def _with_texts(self, sample: Sample) -> Sample:
        kept = tuple(key for key in sample.text_keys if key not in self.lost_texts)
        return replace(sample, text_keys=kept) if kept else sample

    def finish(self) -> None:
        """Encode all remaining entries, write the tables of a complete cache, free the encoders. A collective call."""
        if not self.active:
            return
        remaining = self._plan([sample for sample in self.cache.samples if sample.key not in self.lost], range(0))
        self.maker.start(self.cache, list(remaining.values()))
        with ProgressLine("cache", len(remaining), "part") as line:
            for task in remaining.values():
                self._share(task)
                line.advance()
        self.maker.close()
        comm.barrier(self.group)  # every shard is sealed and indexed
        conclude = partial(self.maker.conclude, sorted(self.lost), self.rejections, self.lost_texts)
        comm.first_does(conclude, self.rank, self.group)
        self.cache.complete()
        self.active = False
        before, after = self.freed = self.maker.free()
        log.info(
            f"the cache is complete: {self.encoded} entries were encoded in the first epoch, {len(self.lost)} samples are lost; "
            f"encoders freed: {format_bytes(before)} in use before, {format_bytes(after)} after"
        )

    def close(self) -> None:
        """Store the encoded entries; the next run continues from them."""
        if self.active:
            self.maker.close()
            self.active = False

    def _plan(self, first: Sequence[Sample], steps: range) -> dict[int, EncodeJob]:
        """This rank's tasks by step: `first` with the first step (in parts without steps), then the uses of `steps` in order."""
        sources, texts = EncodeOwners(), EncodeOwners()
        for step, ranks, sample in self._uses(first, steps):
            missing = [
                key for key in sample.text_keys if key not in self.lost_texts and not self.cache.has("texts", key)
            ]
            lacks_latent = any(not self.cache.has("latents", key) for key in sample.keys("latents"))
            if lacks_latent or (missing and self.maker.texts_with_sources):
                sources.used(sample.source, step, ranks)
            for key in () if self.maker.texts_with_sources else missing:
                texts.used(key, step, ranks)
        by_step: dict[int, tuple[list[str], list[str]]] = {}
        for kind, owners in enumerate((sources, texts)):
            for thing, (step, rank) in owners.by_thing.items():
                lists = by_step.setdefault(step, ([], []))
                if rank == self.rank:
                    lists[kind].append(thing)
        return {step: EncodeJob(tuple(names), tuple(keys)) for step, (names, keys) in sorted(by_step.items())}

    def _uses(self, first: Sequence[Sample], steps: range) -> Iterable[tuple[int, tuple[int, ...], Sample]]:
        """Yield (step, ranks, sample) of `first` and of the draws of `steps`; a stage is skipped once all its samples have occurred."""
        for position, sample in enumerate(first):
            yield steps.start if steps else position // _PART, (position % self.world,), sample
        stage, seen_keys, sample_count = -1, set[str](), 0
        for step in steps:
            if self.sampler.stage_at(step) != stage:
                stage, seen_keys = self.sampler.stage_at(step), set()
                sample_count = self.sampler.samples_of(stage)
            if len(seen_keys) == sample_count:
                continue
            for draw, ranks in ranks_of_samples(self.sampler.draws(step), self.sampler.batching, self.world):
                if draw.sample.key not in seen_keys and draw.sample.key not in self.lost:
                    yield step, ranks, draw.sample
                seen_keys.add(draw.sample.key)

    def _share(self, task: EncodeJob) -> None:
        """Encode a task and report it to all ranks; a UserError of one rank is raised on all."""
        encoded, problem = EncodedEntries(), None
        try:
            encoded = self.maker.make(task)
        except UserError as error:
            problem = str(error)
        rows = [[e.section, e.key, e.shard, e.offset, e.bytes, e.checksum, e.tokens] for e in encoded.entries]
        results = [rows, encoded.lost, encoded.rejections, encoded.lost_texts, problem]
        reports = comm.all_gather_objects(results, self.group)
        problems = [part[4] for part in reports if part[4] is not None]
        if problems:
            raise UserError(problems[0])
        for rank, (rows, lost, rejections, lost_texts, _) in enumerate(reports):
            entries = [_entry(*row) for row in rows]
            new = sum(not self.cache.has(entry.section, entry.key) for entry in entries)
            self.encoded += new
            self.encoded_here += new if rank == self.rank else 0
            self.cache.overlay(entries)
            self.lost.update(lost)
            self.rejections += [(source, reason, detail) for source, reason, detail in rejections]
            self.lost_texts.update(lost_texts)
        if any(part[3] for part in reports):
            self._lose_uncaptioned()
        self.maker.acknowledge()

    def _lose_uncaptioned(self) -> None:
        """Count the samples that have no caption left as lost. Whoever has no caption from the start takes the empty one."""
        bare = [s for s in self.cache.samples if s.text_keys and all(key in self.lost_texts for key in s.text_keys)]
        self.lost.update(sample.key for sample in bare)


def _entry(section: str, key: str, shard: str, offset: int, size: int, checksum: str, tokens: int) -> Entry:
    """An entry with only the fields that reading needs."""
    return Entry(key, section, shard, offset, size, checksum, None, tokens, "", (), None, None, "{}")
