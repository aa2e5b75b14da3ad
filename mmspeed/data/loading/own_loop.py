"""A cache in a training loop of your own: `mmspeed.data.webdataset(cache)`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mmspeed.data.cache.reader import DatasetCache
from mmspeed.errors import UserError
from mmspeed.shapes import Bucket

if TYPE_CHECKING:
    from .webdataset_stages import CachePipeline


def webdataset(
    cache: DatasetCache | str | Path,
    split: str = "train",
    *,
    batch_size: int | Callable[[Bucket], int] | None = None,
    shuffle: bool = True,
    seed: int = 0,
    caption_dropout: float = 0.0,
    noise: bool = False,
    drop_last: bool = False,
    equal: bool = False,
    rank: int | None = None,
    world: int | None = None,
) -> CachePipeline:
    """A webdataset pipeline over the samples of a cache's split, each exactly once an epoch over all nodes and workers.

    It yields dictionaries: `latents` (C, T, h, w), `text` (L, D), `text_pooled` where the encoder has one, `fps`, all float32;
    `__key__`, `caption`, `source`, `dataset`, `bucket` (frames, height, width in pixels) and `frames` (those taken of the source). With
    `batch_size` a dictionary holds samples of one bucket: tensors have a first dim more, `text_mask` (B, L) is True at real tokens, and the
    rest are lists. Give the pipeline to `torch.utils.data.DataLoader(pipeline, batch_size=None, num_workers=...)` or to
    `webdataset.WebLoader`, and call `set_epoch` before each epoch.

    Args:
        cache: an open cache, its folder, or its URL.
        split: `train`, or `val` for the held-out samples.
        batch_size: samples of a batch, or a function of the bucket; None: samples one by one.
        shuffle: order of samples and batches, drawn from `seed` and the epoch; False: by bucket and key.
        seed: key of every draw: the order, the posterior's sample, the choice among windows and captions. As in training (law 1), a sample
            meets the same draws on any number of nodes and workers.
        caption_dropout: share of the samples with the empty caption.
        noise: also give the training draws `noise`, as latents, and `quantiles` in [0, 1), for times.
        drop_last: leave out batches below the batch size.
        equal: the same number of batches on every node, as DDP needs; up to one less than `world` are left out, others each epoch.
        rank, world: this node's number of how many, where several processes share a sample; None: those of the launcher.

    Raises UserError where the package webdataset is missing, the cache cannot be read, the split is empty, or a number does not fit.
    """
    try:
        from .webdataset_stages import BatchReading, CachePipeline, EpochPlan, ReadSettings
    except ModuleNotFoundError as error:
        if error.name != "webdataset":
            raise
        raise UserError("mmspeed.data.webdataset needs the package webdataset: `pip install webdataset`") from None
    if (rank is None) != (world is None) or (rank is not None and world is not None and not 0 <= rank < world):
        raise UserError(f"webdataset: rank {rank} of world {world}: give both, with 0 <= rank < world, or neither")
    if split not in ("train", "val"):
        raise UserError(f"webdataset: split {split!r} is not train or val")
    if not 0 <= caption_dropout <= 1:
        raise UserError(f"webdataset: caption_dropout is {caption_dropout}: give a share from 0 to 1")
    opened = cache if isinstance(cache, DatasetCache) else DatasetCache(cache)

    def size_of(bucket: Bucket) -> int:
        size = 1 if batch_size is None else batch_size(bucket) if callable(batch_size) else batch_size
        if size < 1:
            raise UserError(f"webdataset: the batch size of bucket {bucket} is {size}: give 1 or more")
        return size

    plan = EpochPlan(opened, split, size_of, shuffle, seed, drop_last, equal, world)
    if not plan.count():
        reason = (
            "leave drop_last and equal out, or lower batch_size"
            if any(map(len, plan.places.values()))
            else "it is empty"
        )
        raise UserError(f"cache {opened.location}: split {split} gives no batch: {reason}")
    reading = BatchReading(opened, split, ReadSettings(seed, caption_dropout, noise), batch_size is not None)
    return CachePipeline(plan, reading, rank, world)
