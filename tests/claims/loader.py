"""How fast samples are read: our cache beside the formats that other trainers keep latents in, on the same tensors.

Every reader puts each sample's numbers into one preallocated float32 batch, so that a view of a mapped file wins nothing by
being never read. One process, one thread, one random order for all formats of a round.

The rate to plan with is that of `mmspeed, as training gets it`: batches of the loader, with the draws that training makes of each sample
(posterior, noise, timestep, caption). The other rows compare formats.

Legend: B samples of the batch, C channels, T h w latent, L caption tokens, D text width; posterior = mean and log-variance.
"""

from __future__ import annotations

import argparse
import gc
import io
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from mmspeed.bench.attention_bench import one_thread
from mmspeed.config.training import TrainConfig
from mmspeed.data import BatchSampler, DatasetCache, Loader
from mmspeed.data.loading.collate import VideoCollate
from mmspeed.errors import UserError
from mmspeed.log import ProgressLine, format_bytes, setup
from mmspeed.rng import permutation

from .formats import (
    ROWS_A_FILE,
    TEXT_LENGTHS,
    TEXT_WIDTH,
    Format,
    Numbers,
    Reader,
    contents,
    files_of,
    make_samples,
    ours_reader,
    write_others,
    write_ours,
)

SHAPES = ("16x13x60x106", "16x5x22x40")  # a clip of 49x480x848 and one of 17x176x320, 16 channels, strides 4x8x8
BATCH = 4
TRAINED = "mmspeed, as training gets it"
FIRST, LATER, VIEW, RAW = "mmspeed, first touch", "mmspeed, later", "mmspeed, view only", "raw sequential read"
TIMES = 3.0  # of the best other format: what is wanted of `mmspeed, later`


class BatchBuffer:
    """The memory that every reader fills: BATCH samples, one after the other, over and over."""

    def __init__(self, shape_CThw: tuple[int, ...]) -> None:
        sizes = (2 * int(np.prod(shape_CThw)), TEXT_LENGTHS[1] * TEXT_WIDTH)
        self.memory = np.zeros(BATCH * sum(sizes), np.float32)
        latents, texts = np.split(self.memory, [BATCH * sizes[0]])
        self.latents_BCThw = latents.reshape(BATCH, 2, *shape_CThw)
        self.text_BLD = texts.reshape(BATCH, TEXT_LENGTHS[1], TEXT_WIDTH)

    def put(self, slot: int, sample: Numbers) -> None:
        """Copy a sample into its place."""
        np.copyto(self.latents_BCThw[slot, 0], sample.mean_CThw)
        np.copyto(self.latents_BCThw[slot, 1], sample.logvar_CThw)
        np.copyto(self.text_BLD[slot, : len(sample.embeds_LD)], sample.embeds_LD)


@dataclass(frozen=True)
class Rates:
    """Medians over the rounds, of one format at one temperature."""

    samples_s: float
    mb_s: float  # of tensors, 10^6 bytes
    processor_samples_s: float = 0.0  # by the time of all processors, which other work on the machine disturbs little


@dataclass
class ShapeResult:
    """What was measured at one shape of latents."""

    latent: str
    samples: int
    sample_bytes: int  # mean over the samples, tensors only
    disk_bytes: dict[str, int]  # of each format's files
    open_seconds: float  # opening our cache, median
    rates: dict[str, dict[str, Rates]]  # temperature -> row -> rates

    def lines(self) -> list[str]:
        """The table, in Markdown."""
        head = f"latents {self.latent} with log-variance and a caption: {self.samples} samples of {format_bytes(self.sample_bytes)}"
        rows = [head, "", "| format | " + " | ".join(f"{t}: samples/s | MB/s" for t in self.rates) + " | on disk |"]
        rows.append("|---|" + "---:|---:|" * len(self.rates) + "---:|")
        for name in self.rates["warm"]:
            cells = [f"{r[name].samples_s:,.0f} | {r[name].mb_s:,.0f}" for r in self.rates.values()]
            size = self.disk_bytes.get(name)
            rows.append(f"| {name} | {' | '.join(cells)} | {format_bytes(size) if size else ''} |")
        opening = f"opening the mmspeed cache, once a process: {1000 * self.open_seconds:.1f} ms"
        trained, reader = (self.rates["warm"][name] for name in (TRAINED, LATER))
        training = (
            f"training gets {trained.processor_samples_s:,.0f} samples/s of one processor's time, warm "
            f"(the reader alone: {reader.processor_samples_s:,.0f}); by the clock {trained.samples_s:,.0f}, "
            f"cold {self.rates['cold'][TRAINED].samples_s:,.0f}"
        )
        return [*rows, "", training, *map(compared, self.rates.items()), opening]


def parse_shape(text: str) -> tuple[int, ...]:
    """(C, T, h, w) of `16x13x60x106`."""
    return tuple(map(int, text.split("x")))


def read_all(reader: Reader, order: Sequence[int], buffer: BatchBuffer, touch: bool = True) -> float:
    """Seconds that it takes to read the samples in that order into the batch; without `touch` only to get at them."""
    started = time.perf_counter()
    for place, number in enumerate(order):
        sample = reader(number)
        if touch:
            buffer.put(place % BATCH, sample)
    return time.perf_counter() - started


def one_pass(
    open_reader: Callable[[], Reader], buffer: BatchBuffer, touch: bool = True
) -> Callable[[Sequence[int]], float]:
    """`read_all` with a reader that is opened when the pass begins, before its time counts."""
    return lambda order: read_all(open_reader(), order, buffer, touch)


def one_epoch(
    open_cache: Callable[[], DatasetCache], samples: int, batch: int = BATCH
) -> Callable[[Sequence[int]], float]:
    """A pass in the order of training: seconds until a consumer that does nothing else has had every batch of an epoch.

    Each pass is of the next epoch, whose draws are others. The cache is opened before the time counts.
    """
    epochs, training = itertools.count(), TrainConfig()

    def run(_: Sequence[int]) -> float:
        cache = open_cache()
        sampler = BatchSampler(cache.split("train"), batch, seed=0)
        collate = VideoCollate(cache, 0, training.caption_dropout)
        loader = Loader(sampler, collate, prefetch=training.prefetch, workers=training.loader_workers)
        steps, epoch, met = -(-samples // batch), next(epochs), 0
        started = time.perf_counter()
        for step in loader.steps(epoch * steps, (epoch + 1) * steps):
            met += sum(each.size for each in step.batches)
        seconds = time.perf_counter() - started
        if met != samples:
            raise RuntimeError(f"an epoch of {samples} samples had {met}")
        return seconds

    return run


def read_raw(paths: Sequence[Path], buffer: BatchBuffer) -> float:
    """Seconds that it takes to read the files from end to end, in their order, into the batch's memory."""
    view = memoryview(buffer.memory.data).cast("B")
    started = time.perf_counter()
    for path in paths:
        with io.FileIO(path) as file:
            while file.readinto(view):
                pass
    return time.perf_counter() - started


def forget(paths: Sequence[Path]) -> None:
    """Drop files from the page cache. Pages that somebody has mapped stay, so readers must be gone."""
    gc.collect()
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # what is not written yet cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


class LoaderBench:
    """The formats at one shape of latents, written below `root`, and their measurement."""

    def __init__(self, root: Path, shape: str, count: int) -> None:
        self.shape, self.count, self.root = shape, count, root
        self.shape_CThw = parse_shape(shape)
        samples = make_samples(count, self.shape_CThw)
        self.sample_bytes = sum(array.nbytes for sample in samples for array in sample) // count
        self.keys = write_ours(root / "ours", samples)
        self.others = write_others(root, samples)
        self.buffer = BatchBuffer(self.shape_CThw)
        self.shards = [path for path in files_of(root / "ours") if path.suffix == ".tar" and path.parent.name != "null"]
        self.opened: list[float] = []

    def ours(self, verify: bool) -> Reader:
        """Our cache, opened again; the time that takes is kept."""
        started = time.perf_counter()
        cache = DatasetCache(self.root / "ours", verify=verify)
        self.opened.append(time.perf_counter() - started)
        return ours_reader(cache, *self.keys)

    def formats(self) -> list[Format]:
        """Every format, ours first."""
        return [Format(FIRST, self.root / "ours", lambda: self.ours(verify=True)), *self.others]

    def check_contents(self) -> None:
        """Raises UserError unless all formats give the same tensors, bit for bit. Leaves all files in memory."""
        digests = {format.name: contents(format.open(), self.count) for format in self.formats()}
        if len(set(digests.values())) != 1:
            raise UserError(f"the formats do not give the same tensors: {digests}")

    def passes(self, cold: bool) -> dict[str, tuple[Path, Callable[[Sequence[int]], float]]]:
        """What is measured: the row's name, its folder, and one pass over the samples in an order, in seconds."""
        ours, buffer = self.root / "ours", self.buffer
        # A map that stays open would keep its pages in memory, so cold passes open it again, and trust what was verified.
        later = partial(self.ours, verify=False) if cold else self._verified()
        trained = partial(DatasetCache, ours, verify=False) if cold else self._trained()
        rows: dict[str, tuple[Path, Callable[[Sequence[int]], float]]] = {
            FIRST: (ours, one_pass(lambda: self.ours(verify=True), buffer)),
            TRAINED: (ours, one_epoch(trained, self.count)),
            LATER: (ours, one_pass(later, buffer)),
            VIEW: (ours, one_pass(later, buffer, touch=False)),
        }
        for format in self.others:
            rows[format.name] = (format.folder, one_pass(format.open, buffer))
        rows[RAW] = (ours, lambda order: read_raw(self.shards, buffer))
        return rows

    def _verified(self) -> Callable[[], Reader]:
        """Gives one and the same reader again and again; it has read, and so verified, everything once."""
        kept = self.ours(verify=True)
        read_all(kept, range(self.count), self.buffer)
        return lambda: kept

    def _trained(self) -> Callable[[], DatasetCache]:
        """Gives one and the same cache again and again; an epoch of it has been read, and so verified."""
        kept = DatasetCache(self.root / "ours", verify=True)
        one_epoch(lambda: kept, self.count)([])
        return lambda: kept

    def measure(self, rounds: int, cold: bool, line: ProgressLine) -> dict[str, Rates]:
        """Each row's median over the rounds; the order of the rows turns and alternates from round to round."""
        rows = self.passes(cold)
        names = list(rows)
        seconds: dict[str, list[float]] = {name: [] for name in rows}
        used: dict[str, list[float]] = {name: [] for name in rows}
        for turn in range(rounds):
            order = permutation(self.count, 0, "bench order", turn).tolist()
            turned = names[turn % len(names) :] + names[: turn % len(names)]
            for name in turned if turn % 2 == 0 else reversed(turned):
                folder, run = rows[name]
                if cold:
                    forget(files_of(folder))
                before = time.process_time()
                seconds[name].append(run(order))
                used[name].append(max(time.process_time() - before, 1e-6))
                line.advance()
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        total = self.count * self.sample_bytes
        return {
            name: Rates(self.count / value, total / value / 1e6, self.count / statistics.median(used[name]))
            for name, value in medians.items()
        }

    def run(self, rounds: int) -> ShapeResult:
        """Measure warm, then cold."""
        self.check_contents()
        with ProgressLine(f"loader {self.shape}", 2 * rounds * (len(self.others) + 5), "passes") as line:
            rates = {"warm": self.measure(rounds, False, line), "cold": self.measure(rounds, True, line)}
        folders = {LATER: self.root / "ours"} | {format.name: format.folder for format in self.others}
        return ShapeResult(
            latent=self.shape,
            samples=self.count,
            sample_bytes=self.sample_bytes,
            disk_bytes={name: sum(p.stat().st_size for p in files_of(folder)) for name, folder in folders.items()},
            open_seconds=statistics.median(self.opened),
            rates=rates,
        )


def compared(measured: tuple[str, dict[str, Rates]]) -> str:
    """`mmspeed, later` at one temperature, against the best other format and the raw read."""
    temperature, rates = measured
    others = {name: row.samples_s for name, row in rates.items() if name not in (FIRST, TRAINED, LATER, VIEW, RAW)}
    best, mine = max(others, key=others.__getitem__), rates[LATER].samples_s
    return (
        f"{temperature}: {mine / others[best]:.1f} x the best other format ({best}; wanted: {TIMES:.0f} x), "
        f"{100 * mine / rates[RAW].samples_s:.0f} % of a raw sequential read"
    )


def samples_for(shape: str) -> int:
    """How many samples make about half a gigabyte, at most 1,024."""
    return max(2 * ROWS_A_FILE, min(1024, 500_000_000 // (8 * int(np.prod(parse_shape(shape))))))


def bench_loader(output: Path, shapes: Sequence[str], samples: int | None = None, rounds: int = 5) -> list[ShapeResult]:
    """Measure every shape; the formats' files lie in a temporary folder below `output` meanwhile."""
    counts = {shape: samples or samples_for(shape) for shape in shapes}
    output.mkdir(parents=True, exist_ok=True)
    results = []
    for shape, count in counts.items():
        with one_thread(), tempfile.TemporaryDirectory(prefix=".bench-loader-", dir=output) as folder:
            results.append(LoaderBench(Path(folder), shape, count).run(rounds))
    return results


def main() -> None:
    """Measure, and print the tables."""
    parser = argparse.ArgumentParser(prog="python -m tests.claims.loader", description=main.__doc__)
    parser.add_argument("--output", type=Path, default=Path("runs/loader"), help="where files lie meanwhile")
    parser.add_argument("--bucket-latent", action="append", help=f"latents' shape; again for more; default {SHAPES}")
    parser.add_argument("--samples", type=int, help="samples per shape; by default half a gigabyte of them")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each format; the median counts")
    chosen = parser.parse_args()
    setup()
    results = bench_loader(chosen.output, chosen.bucket_latent or SHAPES, chosen.samples, chosen.rounds)
    print("\n\n".join("\n".join(result.lines()) for result in results))


if __name__ == "__main__":
    main()
