"""From steps to batches: reads the cache, draws what an epoch draws anew, pads captions, reads ahead of the consumer.

No encoder and no video is touched here. Legend: B batch, C channels, T h w latent, L caption tokens, D text width.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from mmspeed.errors import UserError
from mmspeed.protocol import Batch, TextEntry
from mmspeed.rng import normal, uniform

from .cache import DatasetCache
from .online import FirstEpoch
from .sampler import BatchSampler, Draw, count_present, micro_batches
from .tables import Sample

Item = TypeVar("Item")
Name = tuple[str, int, int]


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


def assemble(cache: DatasetCache, draws: Sequence[tuple[Draw, float]], seed: int, caption_dropout: float) -> Batch:
    """The batch of (draw, weight) pairs of one bucket; each is as it would be in any other company.

    No draw may be of a lost sample; `micro_batches` puts others in their place. Raises UserError when an entry is missing or
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
    return Batch(
        latents_BCThw=torch.stack(latents),
        text_BLD=text_BLD,
        text_mask_BL=mask_BL,
        weights_B=torch.tensor([weight for _, weight in draws], dtype=torch.float32),
        names=[draw.name for draw, _ in draws],
        bucket=draws[0][0].sample.bucket,
        sources=[draw.sample.source for draw, _ in draws],
        pooled_BD=torch.stack(pooled).float() if len(pooled) == len(texts) else None,
    )


@dataclass(frozen=True)
class Step:
    """One optimizer step: its draws over all ranks, and this rank's micro-batches; none when all its samples are lost."""

    draws: list[Draw]
    batches: list[Batch]


_Part = tuple[list[Draw], Batch | None, bool]  # a step's draws, a micro-batch of it, and whether it is the last


class Loader:
    """A rank's batches of any range of steps.

    Args:
        cache, sampler: where samples lie, and in which order they come.
        rank, world: this rank among those that split the batch.
        micro_batch_size: samples that one device computes at a time; None: its whole share of a step.
        seed, caption_dropout: of the draws that are made when a sample is read.
        prefetch: micro-batches read ahead by a thread; 0: read when asked for.
        first_epoch: makes what an incomplete cache lacks; may be set later, before `steps`.
    """

    def __init__(
        self,
        cache: DatasetCache,
        sampler: BatchSampler,
        rank: int = 0,
        world: int = 1,
        micro_batch_size: int | None = None,
        seed: int = 0,
        caption_dropout: float = 0.0,
        prefetch: int = 0,
        first_epoch: FirstEpoch | None = None,
    ) -> None:
        self.cache, self.sampler = cache, sampler
        self.rank, self.world, self.micro_batch_size = rank, world, micro_batch_size
        self.seed, self.caption_dropout, self.prefetch = seed, caption_dropout, prefetch
        self.first_epoch = first_epoch
        self.waited_seconds = 0.0  # time the consumer stood still for data, over all steps so far

    def steps(self, start: int, stop: int) -> Generator[Step, None, None]:
        """The micro-batches of each optimizer step in [start, stop), counted from the start of training.

        While a first epoch is being made, each step is read when it is asked for, as all ranks make it together then. An
        error while reading ahead is raised here, at the step it belongs to. Closing the generator ends the thread.
        """
        while start < stop and self.first_epoch is not None and self.first_epoch.active:
            began = time.perf_counter()
            self.first_epoch.provide(start)
            step = self._gathered(self._micro_batches(start))
            self.waited_seconds += time.perf_counter() - began
            yield step
            start += 1
        if self.first_epoch is not None and start >= self.sampler.steps_per_epoch:
            self.first_epoch.finish()
        parts = (part for step in range(start, stop) for part in self._micro_batches(step))
        source = read_ahead(parts, self.prefetch) if self.prefetch else parts
        try:
            for _ in range(start, stop):
                began = time.perf_counter()
                step = self._gathered(source)
                self.waited_seconds += time.perf_counter() - began
                yield step
        finally:
            source.close()

    @staticmethod
    def _gathered(parts: Iterator[_Part]) -> Step:
        """The next step's parts together."""
        batches = []
        for draws, batch, last in parts:
            batches += [] if batch is None else [batch]
            if last:
                return Step(draws, batches)
        raise RuntimeError("a step without an end")

    def _micro_batches(self, step: int) -> Iterator[_Part]:
        """The micro-batches of a step, one by one."""
        draws = self.sampler.step(*self.sampler.locate(step))
        if self.first_epoch is not None:
            draws = self.first_epoch.mark(draws)
        if not count_present(draws):
            yield draws, None, True
            return
        parts = micro_batches(draws, self.rank, self.world, self.micro_batch_size)
        for number, part in enumerate(parts, start=1):
            yield draws, assemble(self.cache, part, self.seed, self.caption_dropout), number == len(parts)


def read_ahead(source: Iterator[Item], depth: int) -> Generator[Item, None, None]:
    """The items of `source`, made by a thread that is at most `depth` items ahead of the consumer.

    Items, errors and the end come in their order. When the generator is closed, the thread finishes the item it is at
    and ends.
    """
    done: queue.SimpleQueue[tuple[Item | None, BaseException | None]] = queue.SimpleQueue()
    permits, stopped = threading.Semaphore(depth), threading.Event()

    def produce() -> None:
        try:
            while permits.acquire() and not stopped.is_set():
                done.put((next(source), None))
        except BaseException as error:  # also StopIteration, which is the end
            done.put((None, error))

    thread = threading.Thread(target=produce, name="mmspeed-read-ahead", daemon=True)
    thread.start()
    try:
        while True:
            item, error = done.get()
            if isinstance(error, StopIteration):
                return
            if error is not None:
                raise error
            permits.release()
            yield item  # type: ignore[misc]
    finally:
        stopped.set()
        permits.release()
        thread.join()
