"""Batches from the cache: what a sample meets depends on its name alone; reading ahead changes nothing but the time."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmspeed import rng
from mmspeed.data import (
    BatchSampler,
    CacheWriter,
    DatasetCache,
    Draw,
    Loader,
    Sample,
    assemble,
    choose_text,
    count_present,
    entry_key,
    latent_tensors,
    read_ahead,
    sample_key,
    text_tensors,
    write_info,
    write_samples,
)
from mmspeed.data.tables import read_samples
from mmspeed.errors import UserError
from mmspeed.protocol import Batch, TextEntry
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


def draw_of(cache: DatasetCache, source: str, epoch: int = 0, repeat: int = 0) -> Draw:
    return Draw(next(s for s in cache.samples if s.source == source), epoch, repeat)


def by_name(batches: list[Batch]) -> dict[tuple[str, int, int], tuple[torch.Tensor, torch.Tensor]]:
    """Latent and real text tokens of each weighted sample."""
    found = {}
    for batch in batches:
        for row, name in enumerate(batch.names):
            if batch.weights_B[row] > 0:
                assert name not in found
                found[name] = (batch.latents_BCThw[row], batch.text_BLD[row][batch.text_mask_BL[row]])
    return found


def assert_same(a: list[Batch], b: list[Batch]) -> None:
    left, right = by_name(a), by_name(b)
    assert left.keys() == right.keys()
    for name, tensors in left.items():
        assert all(torch.equal(x, y) for x, y in zip(tensors, right[name], strict=True))


# -- assemble -----------------------------------------------------------------------------------------------------


def test_padding_and_mask(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    draws = [(draw_of(cache, f"{number}.mp4"), 1.0) for number in range(7)]
    batch = assemble(cache, draws, seed=0, caption_dropout=0.0)
    assert batch.latents_BCThw.shape == (7, 4, 2, 2, 4) and batch.latents_BCThw.dtype == torch.float32
    assert batch.bucket == VIDEO and batch.sources[3] == "3.mp4" and batch.names[3] == draws[3][0].name
    lengths = batch.text_mask_BL.sum(1)
    assert batch.text_mask_BL.dtype == torch.bool and batch.text_BLD.shape == (7, int(lengths.max()), WIDTH)
    assert len(set(lengths.tolist())) > 1  # several captions were chosen, so there is padding to look at
    for text_LD, mask_L, length in zip(batch.text_BLD, batch.text_mask_BL, lengths, strict=True):
        assert torch.equal(text_LD[mask_L], embeds_of("v" * (int(length) - 1)))
        assert mask_L[: int(length)].all() and not text_LD[~mask_L].any()


def test_posterior_is_drawn_anew_each_epoch_and_by_name(tmp_path: Path) -> None:
    cache = make_cache(tmp_path, logvar=-2.0)
    draws = [draw_of(cache, "0.mp4", epoch, repeat) for epoch, repeat in ((0, 0), (1, 0), (0, 1))]
    latents = [assemble(cache, [(draw, 1.0)], 5, 0.0).latents_BCThw[0] for draw in draws]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(latents, 2))
    mean = mean_of(0, VIDEO)
    for draw, latent in zip(draws, latents, strict=True):
        noise = rng.normal(mean.shape, 5, "posterior", *draw.name)
        assert torch.allclose(latent, mean + torch.e**-1 * noise, atol=1e-6)
    again = assemble(cache, [(draw, 1.0) for draw in draws[::-1]], 5, 0.0).latents_BCThw.flip(0)
    assert torch.equal(again, torch.stack(latents))
    assert not torch.equal(assemble(cache, [(draws[0], 1.0)], 6, 0.0).latents_BCThw[0], latents[0])


def test_a_deterministic_latent_is_its_mean(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    batch = assemble(cache, [(draw_of(cache, "8.mp4", epoch), 1.0) for epoch in (0, 1)], 0, 0.0)
    expected = mean_of(8, IMAGE).bfloat16().float()
    assert torch.equal(batch.latents_BCThw, torch.stack([expected, expected]))
    assert batch.text_mask_BL.shape == (2, 1)  # no caption: the empty one
    assert torch.equal(batch.text_BLD[0], embeds_of(""))


def test_caption_dropout_is_the_stored_empty_caption(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    batch = assemble(cache, [(draw_of(cache, "0.mp4", epoch), 1.0) for epoch in range(4)], 0, caption_dropout=1.0)
    assert batch.text_mask_BL.tolist() == [[True]] * 4
    assert torch.equal(batch.text_BLD[2], cache.null_text().embeds_LD)


def test_a_dropped_caption_takes_its_mask_and_pooled_vector_along(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    draws = [(draw_of(cache, f"{number % 7}.mp4", number // 7), 1.0) for number in range(28)]
    batch = assemble(cache, draws, seed=0, caption_dropout=0.5)
    null, lengths = cache.null_text(), batch.text_mask_BL.sum(1)
    assert batch.pooled_BD is not None and null.pooled_D is not None
    dropped = [torch.equal(pooled_D, null.pooled_D) for pooled_D in batch.pooled_BD]
    assert 5 < sum(dropped) < 23
    for text_LD, pooled_D, length, is_null in zip(batch.text_BLD, batch.pooled_BD, lengths, dropped, strict=True):
        assert is_null == (int(length) == 1) == torch.equal(text_LD[:1], null.embeds_LD)
        assert torch.equal(pooled_D, text_LD[0] * 2)


def test_captions_and_dropout_have_their_shares(tmp_path: Path) -> None:
    sample = draw_of(make_cache(tmp_path), "0.mp4").sample
    names = [(sample.key, epoch, 0) for epoch in range(3000)]
    chosen = Counter(choose_text(sample, 0, name, 0.25) for name in names)
    assert set(chosen) == {None, *sample.text_keys}
    assert all(abs(count - 750) < 120 for count in chosen.values())  # 5 standard deviations
    undropped = [choose_text(sample, 0, name, 0.0) for name in names]
    kept = [(a, b) for a, b in zip(undropped, (choose_text(sample, 0, n, 0.25) for n in names), strict=True) if b]
    assert all(a == b for a, b in kept)  # the rate changes who is dropped, not who says what


def test_latents_of_two_shapes_are_named(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    draws = [(draw_of(cache, "0.mp4"), 1.0), (draw_of(cache, "8.mp4"), 1.0)]
    with pytest.raises(UserError, match=r"8\.mp4 has shape \(4, 1, 2, 2\)"):
        assemble(cache, draws, 0, 0.0)


# -- loader -------------------------------------------------------------------------------------------------------


def test_world_size_micro_batches_and_prefetch_change_no_sample(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    sampler = BatchSampler(cache.samples, 4, seed=1, repeats=2)
    steps = 2 * sampler.steps_per_epoch

    def run(world: int, micro: int | None, prefetch: int) -> list[list[Batch]]:
        """All ranks' micro-batches of each step."""
        ranks = [
            [step.batches for step in Loader(cache, sampler, rank, world, micro, 3, 0.3, prefetch).steps(0, steps)]
            for rank in range(world)
        ]
        for parts in zip(*ranks, strict=True):
            assert len({len(part) for part in parts}) == 1
        return [[batch for part in parts for batch in part] for parts in zip(*ranks, strict=True)]

    truth = run(1, None, 0)
    assert all(len(step) == 1 for step in truth) and sum(len(by_name(step)) for step in truth) == 2 * 2 * 10
    for world, micro, prefetch in ((1, 1, 3), (2, None, 2), (3, 1, 1), (5, 2, 8)):
        for step, other in zip(truth, run(world, micro, prefetch), strict=True):
            assert_same(step, other)


def test_resume_in_the_middle_gives_the_same_batches(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    sampler = BatchSampler(cache.samples, 4, seed=1)
    whole = list(Loader(cache, sampler, seed=3, caption_dropout=0.2).steps(0, 8))
    rest = list(Loader(cache, sampler, seed=3, caption_dropout=0.2, prefetch=2).steps(5, 8))
    assert len(whole) == 8
    for step, other in zip(whole[5:], rest, strict=True):
        assert_same(step.batches, other.batches)


def test_fillers_carry_no_weight(tmp_path: Path) -> None:
    cache = make_cache(tmp_path, videos=1, images=0)
    sampler = BatchSampler(cache.samples, 4, seed=0)
    (batch,) = next(Loader(cache, sampler, rank=2, world=3).steps(0, 1)).batches
    assert batch.weights_B.tolist() == [0.0] and batch.size == 1


def test_lost_samples_keep_their_place_and_are_not_read(tmp_path: Path) -> None:
    make_cache(tmp_path, videos=7, images=3)
    samples, _ = read_samples(tmp_path)
    order = BatchSampler(samples, 4, seed=1)
    lost = {draw.sample.key for draw in order.step(0, 0)[:2]} | {s.key for s in samples if s.bucket == IMAGE}
    written = [replace(s, lost=True, latent_keys=("f" * 32,)) if s.key in lost else s for s in samples]
    write_samples(tmp_path, written)
    cache = DatasetCache(tmp_path)
    sampler = BatchSampler(cache.samples, 4, seed=1)
    steps = list(Loader(cache, sampler, seed=3, micro_batch_size=2, prefetch=1).steps(0, sampler.steps_per_epoch))
    for step, place in zip(steps, range(sampler.steps_per_epoch), strict=True):
        assert [draw.name for draw in step.draws] == [draw.name for draw in order.step(0, place)]
        present = {draw.name for draw in step.draws if draw.sample.key not in lost}
        assert set(by_name(step.batches)) == present and count_present(step.draws) == len(present)
        assert bool(step.batches) == bool(present)
    assert any(not step.batches for step in steps) and any(0 < count_present(s.draws) < len(s.draws) for s in steps)


def test_an_error_while_reading_ahead_reaches_the_consumer(tmp_path: Path) -> None:
    cache = make_cache(tmp_path, videos=4, images=0)
    sampler = BatchSampler(cache.samples, 1, seed=0)
    entry = cache.entry(sampler.step(0, 2)[0].sample.latent_keys[0])
    with open(tmp_path / entry.shard, "r+b") as file:
        file.seek(entry.offset + entry.bytes - 4)
        file.write(b"\xff\xff\xff\xff")
    for prefetch in (0, 3):
        steps = Loader(cache, sampler, prefetch=prefetch).steps(0, 4)
        assert [next(steps).batches[0].names[0][0] for _ in range(2)] == [
            sampler.step(0, i)[0].sample.key for i in range(2)
        ]
        with pytest.raises(UserError, match=f"damaged at entry {entry.key}"):
            next(steps)
    assert not read_ahead_threads()


def test_the_thread_ends_when_the_consumer_stops(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    loader = Loader(cache, BatchSampler(cache.samples, 2, seed=0), prefetch=2)
    steps = loader.steps(0, 10**6)
    next(steps)
    assert len(read_ahead_threads()) == 1
    steps.close()
    assert not read_ahead_threads()
    assert loader.waited_seconds > 0


def read_ahead_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "mmspeed-read-ahead"]


def test_read_ahead_keeps_order_and_its_bound() -> None:
    made: list[int] = []

    def source() -> Iterator[int]:
        for number in range(20):
            made.append(number)
            yield number

    ahead = read_ahead(source(), depth=3)
    seen = []
    for number in ahead:
        seen.append(number)
        time.sleep(0.002)
        # `depth` items wait, and permission for one more is given when the consumer asks for it
        assert len(made) - len(seen) <= 3
    assert seen == made == list(range(20))


def test_read_ahead_works_while_the_consumer_is_busy() -> None:
    reached = threading.Event()

    def source() -> Iterator[int]:
        yield 0
        yield 1
        reached.set()
        yield 2

    ahead = read_ahead(source(), depth=3)
    assert next(ahead) == 0
    assert reached.wait(5), "nothing was read while the consumer held its item"
    assert list(ahead) == [1, 2]


def test_read_ahead_ends_with_an_empty_source() -> None:
    assert list(read_ahead(iter(()), depth=1)) == []
