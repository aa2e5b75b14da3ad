"""Batches from the cache: what a sample meets depends on its name alone; reading ahead changes nothing but the time."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mmspeed import rng
from mmspeed.data import Batching, BatchSampler, DatasetCache, Loader
from mmspeed.data.cache.tables import read_samples, write_samples
from mmspeed.data.loading.collate import VideoCollate, assemble, choose_text, draw_noise, draw_quantiles
from mmspeed.data.sampling.order import TrainingStage
from mmspeed.errors import UserError
from mmspeed.protocols import Batch
from tests.support.loading import IMAGE, VIDEO, WIDTH, assert_same, by_name, draw_of, embeds_of, make_cache, mean_of


def test_padding_and_mask(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    draws = [(draw_of(cache, f"{number}.mp4"), 1.0) for number in range(7)]
    batch = assemble(cache, draws, seed=0, caption_dropout=0.0)
    assert batch["latents"].shape == (7, 4, 2, 2, 4) and batch["latents"].dtype == torch.float32
    assert batch.shape == VIDEO and batch.sources[3] == "3.mp4" and batch.names[3] == draws[3][0].name
    lengths = batch["text_mask"].sum(1)
    assert batch["text_mask"].dtype == torch.bool and batch["text"].shape == (7, int(lengths.max()), WIDTH)
    assert len(set(lengths.tolist())) > 1  # several captions were chosen, so there is padding to look at
    for text_LD, mask_L, length in zip(batch["text"], batch["text_mask"], lengths, strict=True):
        assert torch.equal(text_LD[mask_L], embeds_of("v" * (int(length) - 1)))
        assert mask_L[: int(length)].all() and not text_LD[~mask_L].any()


def test_posterior_is_drawn_again_each_epoch_and_by_name(tmp_path: Path) -> None:
    cache = make_cache(tmp_path, logvar=-2.0)
    draws = [draw_of(cache, "0.mp4", epoch, repeat) for epoch, repeat in ((0, 0), (1, 0), (0, 1))]
    latents = [assemble(cache, [(draw, 1.0)], 5, 0.0)["latents"][0] for draw in draws]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(latents, 2))
    mean = mean_of(0, VIDEO)
    for draw, latent in zip(draws, latents, strict=True):
        noise = rng.normal(mean.shape, 5, "posterior", *draw.name)
        assert torch.allclose(latent, mean + torch.e**-1 * noise, atol=1e-6)
    again = assemble(cache, [(draw, 1.0) for draw in draws[::-1]], 5, 0.0)["latents"].flip(0)
    assert torch.equal(again, torch.stack(latents))
    assert not torch.equal(assemble(cache, [(draws[0], 1.0)], 6, 0.0)["latents"][0], latents[0])


def test_a_dropped_caption_takes_its_mask_and_pooled_vector_along(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    draws = [(draw_of(cache, f"{number % 7}.mp4", number // 7), 1.0) for number in range(28)]
    batch = assemble(cache, draws, seed=0, caption_dropout=0.5)
    null, lengths = cache.null_text(), batch["text_mask"].sum(1)
    assert batch["text_pooled"] is not None and null.pooled_D is not None
    dropped = [torch.equal(pooled_D, null.pooled_D) for pooled_D in batch["text_pooled"]]
    assert 5 < sum(dropped) < 23
    for text_LD, pooled_D, length, is_null in zip(batch["text"], batch["text_pooled"], lengths, dropped, strict=True):
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


def test_noise_and_time_come_with_the_batch_where_they_are_wanted(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    draws = [(draw_of(cache, "0.mp4", epoch), 1.0) for epoch in range(3)]
    plain, batch = (assemble(cache, draws, 5, 0.0, noise=noise) for noise in (False, True))
    assert "noise" not in plain and "quantiles" not in plain
    assert batch["noise"] is not None and batch["quantiles"] is not None
    assert torch.equal(batch["noise"], draw_noise(batch.names, (4, 2, 2, 4), 5))
    assert torch.equal(batch["quantiles"], draw_quantiles(batch.names, 5)) and batch["quantiles"].dtype == torch.float64
    for row, (draw, _) in enumerate(draws):
        assert torch.equal(batch["noise"][row], rng.normal((4, 2, 2, 4), 5, "noise", *draw.name))
        assert batch["quantiles"][row].item() == rng.uniform(5, "timestep", *draw.name)
    half = batch.to(torch.device("cpu"), torch.bfloat16)
    assert half["noise"] is not None and half["noise"].dtype == half["text"].dtype == torch.bfloat16
    assert (
        half["quantiles"] is batch["quantiles"]
        and half.weights_I is batch.weights_I
        and half["text_mask"] is batch["text_mask"]
    )


def test_world_size_micro_batches_and_prefetch_change_no_sample(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    sampler = BatchSampler(cache.samples, 4, seed=1, stages=[TrainingStage(repeats=2)])
    steps = 2 * sampler.steps_per_epoch

    def run(world: int, micro: int | None, prefetch: int) -> list[list[Batch]]:
        """All ranks' micro-batches of each step."""
        sampler = BatchSampler(cache.samples, Batching(4, most=micro), seed=1, stages=[TrainingStage(repeats=2)])
        ranks = [
            [
                list(step.batches)
                for step in Loader(sampler, VideoCollate(cache, 3, 0.3), rank, world, prefetch).steps(0, steps)
            ]
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


def test_lost_samples_keep_their_place_and_are_not_read(tmp_path: Path) -> None:
    make_cache(tmp_path, videos=7, images=3)
    samples, _ = read_samples(tmp_path)
    order = BatchSampler(samples, 4, seed=1)
    lost = {draw.sample.key for draw in order.draws(0)[:2]} | {s.key for s in samples if s.bucket == IMAGE}
    written = [replace(s, lost=True, latent_keys=("f" * 32,)) if s.key in lost else s for s in samples]
    write_samples(tmp_path, written)
    cache = DatasetCache(tmp_path)
    sampler = BatchSampler(cache.samples, Batching(4, most=2), seed=1)
    lengths, counts = [], []
    loader = Loader(sampler, VideoCollate(cache, 3), prefetch=1)
    for place, step in enumerate(loader.steps(0, sampler.steps_per_epoch)):
        assert [item.name for item in step.items] == [draw.name for draw in order.draws(place)]
        present = {item.name for item in step.items if item.sample not in lost}
        lengths.append(len(step.batches))
        counts.append((sum(step.counts.values()), len(step.items)))
        assert set(by_name(list(step.batches))) == present and counts[-1][0] == len(present)
        assert bool(lengths[-1]) == bool(present)
    assert 0 in lengths and any(0 < some < every for some, every in counts)


def test_a_step_hands_out_its_micro_batches_once(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    sampler = BatchSampler(cache.samples, Batching(4, most=1), seed=1)
    steps = Loader(sampler, VideoCollate(cache), prefetch=2).steps(0, 3)
    first = next(steps)
    assert len(first.batches) == len(first.items) > 2
    assert next(iter(first.batches)).names == [first.items[0].name]
    with pytest.raises(RuntimeError, match="once"):
        next(iter(first.batches))
    second = next(steps)  # what is left of the first is passed over
    assert [batch.names[0] for batch in second.batches] == [item.name for item in second.items]
    assert len(second.batches) == len(second.items)
    assert second.batches.extents["text_mask"][1] > 0


def test_a_deterministic_latent_is_its_mean(tmp_path: Path) -> None:
    cache = make_cache(tmp_path)
    batch = assemble(cache, [(draw_of(cache, "8.mp4", epoch), 1.0) for epoch in (0, 1)], 0, 0.0)
    expected = mean_of(8, IMAGE).bfloat16().float()
    assert torch.equal(batch["latents"], torch.stack([expected, expected]))
    assert batch["text_mask"].shape == (2, 1)  # no caption: the empty one
    assert torch.equal(batch["text"][0], embeds_of(""))
