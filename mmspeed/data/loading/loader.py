"""Load a rank's batches of any range of steps, ahead of the consumer.

Threads and processes that read ahead are in `prefetch.py`; the task turns samples into a batch (`Collate`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, overload

from mmspeed.data.sampling.rank_batches import count_present, imbalance, rank_batches
from mmspeed.data.sampling.sampler import Sampler, SampleUse
from mmspeed.device import Device
from mmspeed.protocols import Batch, BatchShape, Item, StepData, UseName

from .first_epoch import FirstEpoch
from .prefetch import in_workers, on_device, read_ahead

MicroBatchUses = list[tuple[SampleUse[Any], float]]  # a micro-batch before it is read


class Collate(Protocol):
    """A picklable callable that makes the batch of (draw, weight) pairs of one shape class."""

    def __call__(self, draws: MicroBatchUses, /) -> Batch:
        """Make the padded batch. An item does not depend on the others in its batch."""
        ...

    def shape(self, draws: MicroBatchUses, /) -> BatchShape:
        """The shapes of the batch's tensors, without reading them."""
        ...


class Batches:
    """A step's micro-batches on this rank: their number is known, each is read in its turn, and yielded once."""

    def __init__(self, count: int, first: Batch | None, pull: Callable[[], Batch | None]) -> None:
        self._count = self._left = count
        self._first, self._pull = first, pull
        self._started = False
        self._extents: dict[str, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        if self._started:
            raise RuntimeError("the micro-batches of a step can be iterated only once")
        self._started = True
        return self._hand_out()

    def _hand_out(self) -> Iterator[Batch]:
        while self._left:
            yield self._next()  # unnamed: a local reference would keep it in memory

    def _next(self) -> Batch:
        self._left -= 1
        batch, self._first = self._first or self._pull(), None
        assert batch is not None
        for name, tensor in batch.tensors.items():
            before = self._extents.get(name, tuple(tensor.shape))
            self._extents[name] = tuple(map(max, before, tensor.shape))
        return batch

    @property
    def extents(self) -> dict[str, tuple[int, ...]]:
        """The largest size along each dim of each tensor, of the batches yielded so far."""
        return dict(self._extents)

    def drop(self) -> None:
        """Skip the micro-batches that were not consumed."""
        while self._left:
            self._next()


class DrawnItems(Sequence[Item]):
    """The items of a step's draws, each built on access."""

    def __init__(self, draws: Sequence[SampleUse[Any]]) -> None:
        self.draws = draws

    def __len__(self) -> int:
        return len(self.draws)

    @overload
    def __getitem__(self, place: int) -> Item: ...

    @overload
    def __getitem__(self, place: slice) -> list[Item]: ...

    def __getitem__(self, place: int | slice) -> Item | list[Item]:
        if isinstance(place, slice):
            return [_item(draw) for draw in self.draws[place]]
        return _item(self.draws[place])


def _item(draw: SampleUse[Any]) -> Item:
    return Item(*draw.name, draw.sample.source, draw.sample.bucket.name, left_out=draw.left_out)


_Tag = tuple[list[SampleUse[Any]], int]  # of a micro-batch: its step's draws, and the step's number of micro-batches
_Source = Generator[tuple[_Tag, Batch | None], None, None]


class Loader:
    """A rank's batches of any range of steps.

    Args:
        sampler: the order of samples.
        collate: makes batches.
        rank, world: this rank among those that split the batch.
        prefetch: micro-batches that a thread keeps in memory ahead of the current one; 0: read on demand.
        workers: processes that read, beside the thread. Each has at least one micro-batch in progress, and one waits here
            (two with an accelerator), even if `prefetch` is less.
        device: accelerator to copy batches to, one ahead; on the CPU, or without it, they stay as they were read.
    """

    def __init__(
        self,
        sampler: Sampler[Any],
        collate: Collate,
        rank: int = 0,
        world: int = 1,
        prefetch: int = 0,
        workers: int = 0,
        device: Device | None = None,
    ) -> None:
        self.sampler, self.collate = sampler, collate
        self.rank, self.world = rank, world
        self.prefetch = prefetch
        self.workers, self.device = workers, device
        # set before `steps`, it encodes the missing entries of an incomplete cache
        self.first_epoch: FirstEpoch | None = None
        self.waited_seconds = 0.0  # time the consumer waited for data, over all steps so far

    def steps(self, start: int, stop: int) -> Generator[StepData, None, None]:
        """Yield the optimizer steps in [start, stop), counted from the start of training, with the micro-batches of each.

        A step's micro-batches are available until the next step is requested. While the first epoch encodes, they are read
        on demand, because all ranks then encode together. An error while reading ahead is raised here, at the
        micro-batch it belongs to. Closing the generator ends the thread and the processes.
        """
        while start < stop and self.first_epoch is not None and self.first_epoch.active:
            began = time.perf_counter()
            self.first_epoch.provide(start)
            self.waited_seconds += time.perf_counter() - began
            yield from self._grouped(self._read(self._jobs(range(start, start + 1))))
            start += 1
        if self.first_epoch is not None and start >= self.sampler.first_pass:
            self.first_epoch.finish()
        source = self._source(self._jobs(range(start, stop)))
        try:
            yield from self._grouped(source)
        finally:
            source.close()

    def _grouped(self, source: _Source) -> Generator[StepData, None, None]:
        """Group a stream of micro-batches by step."""
        while (first := self._pull(source)) is not None:
            (draws, count), batch = first
            batches = Batches(count, batch, lambda: _batch(self._pull(source)))
            del first, batch  # only the consumer holds it, so it is freed when the consumer drops it
            yield self._step(draws, batches)
            batches.drop()

    def _step(self, draws: list[SampleUse[Any]], batches: Batches) -> StepData:
        """A step's data; its divisor is the number of its samples that are not lost."""
        present = [draw for draw in draws if not draw.lost]
        return StepData(
            divisors={"samples": float(len(present))},
            batches=batches,
            items=DrawnItems(draws),
            counts=Counter(draw.sample.bucket for draw in present),
            left_out=sum(draw.left_out for draw in draws),
            imbalance=partial(imbalance, draws, self.sampler.batching, self.world),
        )

    def again(self, step: int, without: Collection[UseName]) -> Batches | None:
        """This rank's micro-batches of a step, read again on demand without some of its uses; None where no use is left.

        The other uses are divided among ranks and micro-batches as before.
        """
        draws, parts = self._parts(step, without)
        if not parts:
            return None
        source = self._read(iter([((draws, len(parts)), part) for part in parts]))
        return Batches(len(parts), None, lambda: _batch(self._pull(source)))

    def shapes(self, step: int) -> list[BatchShape]:
        """The shapes of this rank's micro-batches of a step, before any of them is read."""
        return [self.collate.shape(part) for part in self._parts(step)[1]]

    def _pull(self, source: _Source) -> tuple[_Tag, Batch | None] | None:
        """The next micro-batch, None at the end; the time it takes is added to `waited_seconds`."""
        began = time.perf_counter()
        try:
            return next(source, None)
        finally:
            self.waited_seconds += time.perf_counter() - began

    # -- reading ------------------------------------------------------------------------------------------------

    def _parts(self, step: int, without: Collection[UseName] = ()) -> tuple[list[SampleUse[Any]], list[MicroBatchUses]]:
        """A step's draws over all ranks, and this rank's micro-batches; none of the latter if all samples are lost.

        `without`: names of draws that are left out.
        """
        draws = self.sampler.draws(step)
        if without:
            draws = [replace(draw, left_out=True) if draw.name in without else draw for draw in draws]
        if self.first_epoch is not None:
            draws = self.first_epoch.mark(draws)
        if not count_present(draws):
            return draws, []
        return draws, rank_batches(draws, self.sampler.batching, self.rank, self.world)

    def _jobs(self, steps: range) -> Iterator[tuple[_Tag, MicroBatchUses]]:
        """Yield the micro-batches of all steps in order; an empty one for a step that has none."""
        for step in steps:
            draws, parts = self._parts(step)
            for part in parts or [[]]:
                yield (draws, len(parts)), part

    def _read(self, jobs: Iterator[tuple[_Tag, MicroBatchUses]], pin: bool = False) -> _Source:
        """Yield the micro-batches of `jobs`, read on demand."""
        for tag, part in jobs:
            yield tag, _read_batch(self.collate, part, pin)

    def _source(self, jobs: Iterator[tuple[_Tag, MicroBatchUses]]) -> _Source:
        """A stream of the micro-batches of `jobs`, read and copied ahead."""
        copied = self.device is not None and self.device.kind != "cpu" and (self.prefetch >= 2 or self.workers > 0)
        ahead = self.prefetch - copied  # the copy on the device is one of them
        source: _Source
        if self.workers:
            read_batch = partial(_read_batch, self.collate)
            per_worker = max(1, (ahead - 1) // self.workers)  # the one that the thread holds also counts
            finish = _pinned if copied else None
            source = read_ahead(in_workers(jobs, read_batch, self.workers, per_worker, finish), 1)
        else:
            source = self._read(jobs, pin=copied)
            source = read_ahead(source, ahead) if ahead else source
        if copied:
            assert self.device is not None
            return on_device(source, self.device)
        return source


def _read_batch(collate: Collate, part: MicroBatchUses, pin: bool = False) -> Batch | None:
    """A micro-batch; None for a step without any."""
    batch = collate(part) if part else None
    return _pinned(batch) if pin else batch


def _batch(item: tuple[_Tag, Batch | None] | None) -> Batch | None:
    return None if item is None else item[1]


def _pinned(batch: Batch | None) -> Batch | None:
    return None if batch is None else batch.pin_memory()
