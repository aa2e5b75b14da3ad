"""From steps to batches: reads the cache, draws what an epoch draws anew (noise and timesteps too), pads captions.

How that is done ahead of the consumer, in a thread or in processes, stands in `feed.py`.

No encoder and no video is touched here. Legend: B batch, C channels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.protocol import Batch, TextEntry
from mmspeed.rng import normal, uniform

from .cache import DatasetCache
from .feed import in_workers, on_device, read_ahead
from .online import FirstEpoch
from .sampler import BatchSampler, Draw
from .shares import count_present, share
from .tables import Sample

Name = tuple[str, int, int]
Part = list[tuple[Draw, float]]  # a micro-batch before it is read


def draw_latent(stored: dict[str, Tensor], seed: int, name: Name) -> Tensor:
    """A latent (C, T, h, w) in float32: the stored mean, or a draw from the stored posterior that `name` determines."""
    mean_CThw = stored["mean"].float()
    if "logvar" not in stored:
        return mean_CThw
    noise_CThw = normal(mean_CThw.shape, seed, "posterior", *name)
    return mean_CThw + torch.exp(0.5 * stored["logvar"].float()) * noise_CThw


def first_frame(stored: dict[str, Tensor]) -> Tensor:
    """The latent (C, 1, h, w), float32, of a clip's first frame alone: what image-to-video training is conditioned on.

    It is the entry's own first latent frame, since a causal codec sees nothing but the first frame there; for codecs that
    see more, `preprocess.first_frame` stores it apart.
    """
    return (stored["first"] if "first" in stored else stored["mean"][:, :1]).float()


def choose_latent(sample: Sample, seed: int, name: Name) -> str:
    """The key of the latent that this use of a sample meets: one of its windows and crops, drawn evenly."""
    if len(sample.latent_keys) == 1:
        return sample.latent_keys[0]
    return sample.latent_keys[int(uniform(seed, "variant", *name) * len(sample.latent_keys))]


def choose_text(sample: Sample, seed: int, name: Name, caption_dropout: float) -> str | None:
    """The key of the caption that this use of a sample meets; None stands for the empty caption.

    One of several captions is drawn evenly. The dropout is a draw of its own, so changing its rate changes no choice.
    """
    if not sample.text_keys or uniform(seed, "caption_dropout", *name) < caption_dropout:
        return None
    return sample.text_keys[int(uniform(seed, "caption", *name) * len(sample.text_keys))]


def pad_texts(texts: Sequence[TextEntry]) -> tuple[Tensor, Tensor]:
    """Captions (B, L, D) in float32, padded with zeros to the longest, and the mask (B, L), True at real tokens."""
    lengths_B = torch.tensor([text.embeds_LD.shape[0] for text in texts])
    text_BLD = torch.nn.utils.rnn.pad_sequence([text.embeds_LD.float() for text in texts], batch_first=True)
    mask_BL = torch.arange(text_BLD.shape[1])[None, :] < lengths_B[:, None]
    return text_BLD, mask_BL


def draw_noise(names: Sequence[Name], shape_CThw: tuple[int, ...], seed: int) -> Tensor:
    """Standard normal noise (B, C, T, h, w), float32 on the CPU, of samples named (key, epoch, repeat) (law 1)."""
    return torch.stack([normal(shape_CThw, seed, "noise", *name) for name in names])


def draw_quantiles(names: Sequence[Name], seed: int) -> Tensor:
    """Where in the training distribution of times each sample stands: (B,), float64 in [0, 1), on the CPU (law 1)."""
    return torch.tensor([uniform(seed, "timestep", *name) for name in names], dtype=torch.float64)


def assemble(
    cache: DatasetCache,
    draws: Sequence[tuple[Draw, float]],
    seed: int,
    caption_dropout: float,
    noise: bool = False,
) -> Batch:
    """The batch of (draw, weight) pairs of one bucket; each is as it would be in any other company.

    With `noise` it carries what training draws by name, so that this is not drawn where the model waits for it.

    No draw may be of a lost sample; `share` puts others in their place. Raises UserError when an entry is missing or
    damaged, or when latents of the bucket differ in shape.
    """
    latents, texts = [], []
    for draw, _ in draws:
        latent_key = choose_latent(draw.sample, seed, draw.name)
        latents.append(draw_latent(cache.latent(latent_key), seed, draw.name))
        text_key = choose_text(draw.sample, seed, draw.name, caption_dropout)
        texts.append(cache.null_text() if text_key is None else cache.text(text_key))
    for latent_CThw, (draw, _) in zip(latents, draws, strict=True):
        if latent_CThw.shape != latents[0].shape:
            raise UserError(
                f"cache {cache.location}: the latent of {draw.sample.source} has shape "
                f"{tuple(latent_CThw.shape)}, others of its bucket {tuple(latents[0].shape)}; "
                "run mmspeed preprocess again"
            )
    text_BLD, mask_BL = pad_texts(texts)
    pooled = [text.pooled_D for text in texts if text.pooled_D is not None]
    names = [draw.name for draw, _ in draws]
    return Batch(
        latents_BCThw=torch.stack(latents),
        text_BLD=text_BLD,
        text_mask_BL=mask_BL,
        weights_B=torch.tensor([weight for _, weight in draws], dtype=torch.float32),
        names=names,
        bucket=draws[0][0].sample.bucket,
        sources=[draw.sample.source for draw, _ in draws],
        pooled_BD=torch.stack(pooled).float() if len(pooled) == len(texts) else None,
        noise_BCThw=draw_noise(names, tuple(latents[0].shape), seed) if noise else None,
        u_B=draw_quantiles(names, seed) if noise else None,
    )


class Batches:
    """A step's micro-batches on this rank: their number is known, each is read when its turn comes, and handed out once."""

    def __init__(self, count: int, first: Batch | None, pull: Callable[[], Batch | None]) -> None:
        self._count = self._left = count
        self._first, self._pull = first, pull
        self._started = False
        self.text_tokens = 0  # longest padded caption of those handed out

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Batch]:
        if self._started:
            raise RuntimeError("the micro-batches of a step are handed out once")
        self._started = True
        return self._hand_out()

    def _hand_out(self) -> Iterator[Batch]:
        while self._left:
            yield self._next()  # no name for it here, which would keep it in memory

    def _next(self) -> Batch:
        self._left -= 1
        batch, self._first = self._first or self._pull(), None
        assert batch is not None
        self.text_tokens = max(self.text_tokens, batch.text_mask_BL.shape[1])
        return batch

    def drop(self) -> None:
        """Pass over those that nobody asked for."""
        while self._left:
            self._next()


@dataclass(frozen=True)
class Step:
    """One optimizer step: its draws over all ranks, and this rank's micro-batches; none when all its samples are lost."""

    draws: list[Draw]
    batches: Batches


_Tag = tuple[list[Draw], int]  # of a micro-batch: its step's draws, and how many micro-batches the step has
_Source = Generator[tuple[_Tag, Batch | None], None, None]


class _Reader:
    """Reads a part. In another process it opens the cache anew, when it first reads, so that errors find their way."""

    def __init__(self, cache: DatasetCache, seed: int, caption_dropout: float) -> None:
        self._cache: DatasetCache | None = cache
        self._opening = cache.__reduce__()
        self._seed, self._caption_dropout = seed, caption_dropout

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_cache": None}

    def __call__(self, part: Part) -> Batch | None:
        if not part:
            return None
        if self._cache is None:
            kind, arguments = self._opening
            self._cache = kind(*arguments)
        return assemble(self._cache, part, self._seed, self._caption_dropout, noise=True)


class Loader:
    """A rank's batches of any range of steps.

    Args:
        cache, sampler: where samples lie, and in which order they come.
        rank, world: this rank among those that split the batch.
        seed, caption_dropout: of the draws that are made when a sample is read.
        prefetch: micro-batches in memory ahead of the one that was asked for, by a thread; 0: read when asked for.
        first_epoch: makes what an incomplete cache lacks; may be set later, before `steps`.
        workers: processes that read, beside the thread. Each has one micro-batch under way at least, and one waits here
            (two where there is an accelerator), even if `prefetch` is less.
        device: where an accelerator's batches are brought to, one ahead; on the CPU, or without it, they stay as they were read.
    """

    def __init__(
        self,
        cache: DatasetCache,
        sampler: BatchSampler,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        caption_dropout: float = 0.0,
        prefetch: int = 0,
        first_epoch: FirstEpoch | None = None,
        workers: int = 0,
        device: Device | None = None,
    ) -> None:
        self.cache, self.sampler = cache, sampler
        self.rank, self.world = rank, world
        self.seed, self.caption_dropout, self.prefetch = seed, caption_dropout, prefetch
        self.first_epoch, self.workers, self.device = first_epoch, workers, device
        self.waited_seconds = 0.0  # time the consumer stood still for data, over all steps so far

    def steps(self, start: int, stop: int) -> Generator[Step, None, None]:
        """The optimizer steps in [start, stop), counted from the start of training, with the micro-batches of each.

        A step's micro-batches are there until the next step is asked for. While a first epoch is being made, they are read
        when they are asked for, as all ranks make it together then. An error while reading ahead is raised here, at the
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

    def _grouped(self, source: _Source) -> Generator[Step, None, None]:
        """A stream of micro-batches by their steps."""
        while (first := self._pull(source)) is not None:
            (draws, count), batch = first
            batches = Batches(count, batch, lambda: _batch(self._pull(source)))
            del first, batch  # it is the consumer's alone, and gone when the consumer is done with it
            yield Step(draws, batches)
            batches.drop()

    def _pull(self, source: _Source) -> tuple[_Tag, Batch | None] | None:
        """The next micro-batch, None at the end, and the time that this takes."""
        began = time.perf_counter()
        try:
            return next(source, None)
        finally:
            self.waited_seconds += time.perf_counter() - began

    # -- what is read, and where ------------------------------------------------------------------------------------

    def _parts(self, step: int) -> tuple[list[Draw], list[Part]]:
        """A step's draws over all ranks, and this rank's micro-batches; none of these when all samples are lost."""
        draws = self.sampler.draws(step)
        if self.first_epoch is not None:
            draws = self.first_epoch.mark(draws)
        if not count_present(draws):
            return draws, []
        return draws, share(draws, self.sampler.batching, self.rank, self.world)

    def _jobs(self, steps: range) -> Iterator[tuple[_Tag, Part]]:
        """The parts of all steps in their order; an empty one for a step that has none."""
        for step in steps:
            draws, parts = self._parts(step)
            for part in parts or [[]]:
                yield (draws, len(parts)), part

    def _read(self, jobs: Iterator[tuple[_Tag, Part]], pin: bool = False) -> _Source:
        """The micro-batches of `jobs`, read when they are asked for."""
        read = _Reader(self.cache, self.seed, self.caption_dropout)
        for tag, part in jobs:
            yield tag, (_pinned(read(part)) if pin else read(part))

    def _source(self, jobs: Iterator[tuple[_Tag, Part]]) -> _Source:
        """The micro-batches of `jobs`, read and copied ahead."""
        copied = self.device is not None and self.device.kind != "cpu" and (self.prefetch >= 2 or self.workers > 0)
        ahead = self.prefetch - copied  # the copy on the device is one of them
        source: _Source
        if self.workers:
            read = _Reader(self.cache, self.seed, self.caption_dropout)
            each = max(1, (ahead - 1) // self.workers)  # the one that the thread has taken is one of them too
            finish = _pinned if copied else None
            source = read_ahead(in_workers(jobs, read, self.workers, each, finish), 1)
        else:
            source = self._read(jobs, pin=copied)
            source = read_ahead(source, ahead) if ahead else source
        if copied:
            assert self.device is not None
            return on_device(source, self.device)
        return source


def _batch(item: tuple[_Tag, Batch | None] | None) -> Batch | None:
    return None if item is None else item[1]


def _pinned(batch: Batch | None) -> Batch | None:
    return None if batch is None else batch.pin_memory()
