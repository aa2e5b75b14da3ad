"""A small cache of two buckets for tests of the loader, and how batches are compared; used as `from tests.support.loading import ...`."""

from __future__ import annotations

from pathlib import Path

import torch

from mmspeed.data import CacheWriter, DatasetCache, Sample, SampleUse
from mmspeed.data.cache.keys import entry_key, sample_key
from mmspeed.data.cache.tables import write_info, write_samples
from mmspeed.data.cache.writer import latent_tensors, text_tensors
from mmspeed.protocols import Batch, TextEntry
from mmspeed.shapes import Bucket

VIDEO, IMAGE = Bucket(5, 16, 32), Bucket(1, 16, 16)
WIDTH = 6


def mean_of(number: int, bucket: Bucket) -> torch.Tensor:
    shape = (4, 2, 2, 4) if bucket == VIDEO else (4, 1, 2, 2)
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


def embeds_of(caption: str) -> torch.Tensor:
    return torch.full((len(caption) + 1, WIDTH), float(len(caption))) + torch.arange(WIDTH)


def make_cache(root: Path, videos: int = 7, images: int = 3, logvar: float | None = -2.0) -> DatasetCache:
    """Video n has the captions `v`, `vv` and `vvv`; images have none; images are deterministic, in bfloat16."""
    samples = []
    with CacheWriter(root) as writer:
        texts = [entry_key({"caption": caption}) for caption in ("v", "vv", "vvv")]
        for key, caption in zip([*texts, entry_key({"caption": ""})], ("v", "vv", "vvv", ""), strict=True):
            section = "texts" if caption else "null"
            embeds_LD = embeds_of(caption)
            writer.add(section, key, text_tensors(TextEntry(embeds_LD, embeds_LD[0] * 2)), {"caption": caption})
        for number in range(videos + images):
            bucket = VIDEO if number < videos else IMAGE
            mean = mean_of(number, bucket)
            spread = torch.full_like(mean, logvar) if logvar is not None and bucket == VIDEO else None
            tensors = latent_tensors(mean if bucket == VIDEO else mean.bfloat16(), spread)
            key = entry_key({"number": number})
            writer.add("latents", key, tensors, {"number": number}, bucket=bucket)
            captions = tuple(texts) if bucket == VIDEO else ()
            samples.append(Sample(sample_key([key], captions), (key,), captions, "train", bucket, f"{number}.mp4"))
    write_info(root, {})
    write_samples(root, samples)
    return DatasetCache(root)


def draw_of(cache: DatasetCache, source: str, epoch: int = 0, repeat: int = 0) -> SampleUse:
    return SampleUse(next(s for s in cache.samples if s.source == source), epoch, repeat)


def by_name(batches: list[Batch]) -> dict[tuple[str, int, int], tuple[torch.Tensor, torch.Tensor]]:
    """Latent and real text tokens of each weighted sample."""
    results = {}
    for batch in batches:
        for row, name in enumerate(batch.names):
            if batch.weights_I[row] > 0:
                assert name not in results
                results[name] = (batch["latents"][row], batch["text"][row][batch["text_mask"][row]])
    return results


def assert_same(a: list[Batch], b: list[Batch]) -> None:
    left, right = by_name(a), by_name(b)
    assert left.keys() == right.keys()
    for name, tensors in left.items():
        assert all(torch.equal(x, y) for x, y in zip(tensors, right[name], strict=True))
