"""Suggested buckets: the search against brute force, the loss against the rule that sources are really placed by, and real files."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.config import Config, make_config
from mmspeed.errors import UserError
from mmspeed.preprocess import check
from mmspeed.preprocess.decoding.probe import Probe
from mmspeed.preprocess.decoding.transform import rank_buckets
from mmspeed.preprocess.decoding.windows import covers, frames_available
from mmspeed.preprocess.report.bucket_fit import BucketFitter, BucketGrid, SourceCells, SourceShapes, search
from mmspeed.preprocess.sources.rejections import Rejected
from mmspeed.shapes import Bucket
from tests.support.decoding import probed as of_size
from tests.support.media import write_image, write_video
from tests.support.runs import small_tree

GRID = BucketGrid(temporal=4, patch_frames=1, height=16, width=16)
FPS = 8.0
Shape = tuple[int, int, int, bool]  # width, height, frames, image


def kept_by(values_MC: np.ndarray, weights_C: np.ndarray, chosen: Sequence[int]) -> float:
    return float(values_MC[list(chosen)].max(axis=0) @ weights_C) if chosen else 0.0


def brute(values_MC: np.ndarray, weights_C: np.ndarray, most: int) -> float:
    """The most that any choice of up to `most` candidates keeps."""
    sizes = range(1, min(most, len(values_MC)) + 1)
    return max(kept_by(values_MC, weights_C, pick) for n in sizes for pick in combinations(range(len(values_MC)), n))


def greedy(values_MC: np.ndarray, weights_C: np.ndarray, most: int) -> float:
    chosen: list[int] = []
    for _ in range(most):
        chosen.append(max(range(len(values_MC)), key=lambda m: kept_by(values_MC, weights_C, [*chosen, m])))
    return kept_by(values_MC, weights_C, chosen)


def test_search_is_near_brute_force_and_no_worse_than_greedy() -> None:
    behind = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        values_MC = rng.random((9, 14)) * (rng.random((9, 14)) < 0.7)
        weights_C = rng.random(14)
        weights_C /= weights_C.sum()
        most = int(rng.integers(1, 5))
        chosen = search(values_MC, weights_C, most)
        assert len(set(chosen)) == len(chosen) <= most and chosen == search(values_MC, weights_C, most)
        kept, best = kept_by(values_MC, weights_C, chosen), brute(values_MC, weights_C, most)
        assert kept >= greedy(values_MC, weights_C, most) - 1e-9
        behind.append(1 - kept / best)
    assert max(behind) < 0.07 and np.mean(behind) < 0.005


def probed(width: int, height: int, frames: int, image: bool = False) -> Probe:
    return of_size(width, height, 1 if image else frames, FPS)


def counted(shapes: Sequence[Shape], present: Sequence[Bucket]) -> SourceCells:
    shapes_of_sources = SourceShapes(max(bucket.frames for bucket in present))
    for shape in shapes:
        shapes_of_sources.add(probed(*shape), FPS)
    return shapes_of_sources.cells()


def kept_share(shape: Shape, bucket: Bucket, present: Sequence[Bucket]) -> float:
    """The definition, written again."""
    width, height, frames, image = shape
    could = 1 if image else min(frames, max(b.frames for b in present))
    inside = min(width, height * bucket.width / bucket.height) * min(height, width * bucket.height / bucket.width)
    largest = min(width * height, max(b.height * b.width for b in present))
    size = min(1.0, math.sqrt(bucket.height * bucket.width / largest))
    return bucket.frames / could * inside / (width * height) * size


sides = st.sampled_from((100, 128, 160, 180, 256, 320, 426, 480, 640, 854, 1280))
shapes_of = st.tuples(sides, sides, st.integers(2, 40), st.booleans())
buckets_of = st.builds(
    Bucket, st.sampled_from((1, 5, 9, 17, 25)), *(st.sampled_from((64, 96, 128, 160, 256, 320, 480)) for _ in "hw")
)


@given(
    st.lists(shapes_of, min_size=1, max_size=25),
    st.lists(buckets_of, min_size=1, max_size=4),
    st.integers(1, 6),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_losses_are_those_of_the_rule_that_places_sources(
    shapes: list[Shape], present: list[Bucket], number: int, allow_upscale: bool
) -> None:
    fitter = BucketFitter(counted(shapes, present), present, allow_upscale)
    fit, now = fitter.fit(GRID, number), fitter.judge(list(dict.fromkeys(present)))
    assert len(fit.buckets) <= number and all(fit.clips)
    for outcome in (fit, now):
        placed, kept = Counter[Bucket](), 0.0
        for shape in shapes:
            try:
                first = (
                    rank_buckets(probed(*shape), outcome.buckets, FPS, allow_upscale)[0] if outcome.buckets else None
                )
            except Rejected:
                first = None
            if first is not None:
                placed[first] += 1
                kept += kept_share(shape, first, present)
        assert dict(zip(outcome.buckets, outcome.clips, strict=True)) == {b: placed[b] for b in outcome.buckets}
        assert outcome.rejected == len(shapes) - placed.total()
        assert outcome.kept == pytest.approx(kept / len(shapes))
    if len(set(present)) <= number and all(map(GRID.holds, present)):
        assert fit.kept >= now.kept - 1e-6
    for bucket in fit.buckets:
        assert GRID.holds(bucket)
        asked = (b for b in present if b.frames >= bucket.frames)
        assert any(b.height * b.width >= bucket.height * bucket.width for b in asked), (
            "no larger than what is asked for"
        )


def test_lengths_and_sides_fit_codec_and_patch() -> None:
    assert [GRID.frames(n) for n in (0, 1, 4, 5, 8, 9, 50)] == [0, 1, 1, 5, 5, 9, 49]
    pairs = BucketGrid(temporal=4, patch_frames=2, height=16, width=32)
    assert [pairs.frames(n) for n in (1, 4, 5, 12, 13)] == [0, 0, 5, 5, 13]  # 2 and 4 latent frames
    assert (
        pairs.holds(Bucket(13, 48, 64)) and not pairs.holds(Bucket(13, 64, 48)) and not pairs.holds(Bucket(9, 48, 64))
    )


@given(st.lists(shapes_of, min_size=1, max_size=60), st.integers(2, 12), st.randoms())
@settings(max_examples=60, deadline=None)
def test_shapes_are_in_few_cells_in_any_order(shapes: list[Shape], most: int, rng: Any) -> None:
    def cells(order: Sequence[Shape], most: int) -> SourceCells:
        counts = SourceShapes(30)
        for shape in order:
            counts.add(probed(*shape), FPS)
        return counts.cells(most)

    shuffled = list(shapes)
    rng.shuffle(shuffled)
    few, exact = cells(shapes, most), cells(shapes, 10_000)
    assert len(few) <= most and few.sources == len(shapes)
    for name in ("counts", "widths", "heights", "frames", "images"):
        np.testing.assert_array_equal(getattr(few, name), getattr(cells(shuffled, most), name))
    assert few.counts[few.images].sum() == sum(image for *_, image in shapes)
    assert few.binned == (len({(w, h, 1 if i else min(f, 30), i) for w, h, f, i in shapes}) > most)
    assert exact.frames.max() <= 30 and not exact.binned
    assert few.widths.min() == exact.widths.min() and few.heights.min() == exact.heights.min()


@given(
    st.lists(st.integers(1, 400), min_size=0, max_size=40),
    st.one_of(st.none(), st.sampled_from((2.0, 7.3, 8.0, 24.0, 60.0))),
)
def test_frames_available_are_the_most_that_are_covered(steps_ms: list[int], fps: float | None) -> None:
    pts = [0.0, *(float(t) / 1000 for t in np.cumsum(steps_ms))]
    count = frames_available(pts, fps)
    assert covers(pts, count, fps)
    if fps is None or len(pts) > 1:
        assert not covers(pts, count + 1, fps)


def files_config(folder: Path, buckets: list[dict[str, int]], **data: Any) -> Config:
    """Wide and tall videos of two lengths, some pictures, one video too short and one too small for the first bucket."""
    media = folder / "media"
    if not media.exists():
        media.mkdir()
        for number in range(3):
            write_video(media / f"wide{number}.mp4", width=160, height=96, frames=36)
            write_video(media / f"tall{number}.mp4", width=96, height=160, frames=36)
            write_image(media / f"photo{number}.png")
        write_video(media / "short.mp4", width=160, height=96, frames=18)
        write_video(media / "small.mp4", width=48, height=32, frames=36)
        (media / "broken.mp4").write_bytes(b"no video at all")
        for path in [*media.iterdir()]:
            path.with_suffix(".txt").write_text("a clip")
    tree = small_tree(folder)
    tree["data"] = {
        "sources": [{"path": str(media)}],
        "cache": str(folder / "cache"),
        "fps": FPS,
        "buckets": buckets,
    } | data
    return make_config(tree, origin="test")


def suggested(config: Config, number: int) -> tuple[list[str], list[dict[str, int]]]:
    """The lines about buckets, and the list in them read as YAML."""
    lines = check(config, suggest_buckets=number).lines()
    start = next(at for at, line in enumerate(lines) if line.startswith("suggested buckets"))
    stop = next(at for at, line in enumerate(lines) if line.startswith("  lost are"))
    pasted = "\n".join(lines[start + 1 : stop])
    return lines[start:], yaml.safe_load("data:\n" + pasted)["data"]["buckets"] if pasted else []


def test_the_list_of_check_can_be_pasted_and_does_what_it_says(tmp_path: Path) -> None:
    config = files_config(tmp_path, [{"frames": 13, "height": 64, "width": 64}])
    lines, buckets = suggested(config, 4)
    assert "suggested buckets for 11 sources" in lines[0]
    said = {line.split("}")[0]: int(re.findall(r"# (\d+) clip", line)[0]) for line in lines if "# " in line}
    assert sum(said.values()) == 10 and any("1 of the sources go to none of these" in line for line in lines)
    assert {b["frames"] for b in buckets} == {1, 5, 9} and len(buckets) == 4
    rows = {line.split("  ")[1]: line.split() for line in lines if line.endswith("%")}
    assert set(rows) == {"suggested", "data.buckets"}
    assert rows["data.buckets"][-2:] == ["11", "0.0%"] and rows["suggested"][-2] == "1"

    pasted = files_config(tmp_path, buckets)
    numbers = check(pasted).statistics
    assert [numbers.clips().get(b, 0) for b in pasted.buckets] == list(said.values())
    again = {line.split("  ")[1]: line.split() for line in suggested(pasted, 1)[0] if line.endswith("%")}
    assert again["data.buckets"][-2] == "1", "the present list is what was suggested"
    assert "as if data.buckets[].keep were 1" in "\n".join(
        suggested(files_config(tmp_path, [b | {"keep": 0.5} for b in buckets]), 1)[0]
    )


def test_what_no_bucket_can_take_is_said(tmp_path: Path) -> None:
    config = files_config(tmp_path, [{"frames": 1, "height": 512, "width": 512}])
    with pytest.raises(UserError, match="--suggest-buckets 0: ask for 1 or more"):
        check(config, suggest_buckets=0)
    lines, buckets = suggested(config, 3)
    assert buckets == [] and lines[0] == (
        "suggested buckets: none, since no bucket up to the size of data.buckets takes any of the sources"
    )
    assert any("8 videos are left out: data.buckets has images only" in line for line in lines)
    lines, buckets = suggested(
        files_config(tmp_path, [{"frames": 1, "height": 512, "width": 512}], allow_upscale=True), 3
    )
    assert len(buckets) == 1 and "1 bucket, and not 3, since more would keep no more" in lines[0]
