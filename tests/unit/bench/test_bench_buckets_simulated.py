"""The bench of the order of training on a synthetic data set: its clips, its figures counted again by hand, and the rules beside it."""

from __future__ import annotations

from collections import Counter

import pytest

from mmspeed.media.rejections import Rejected
from mmspeed.media.windows import covers
from mmspeed.preprocess.decoding.transform import rank_buckets
from mmspeed.shapes import Bucket
from tests.claims.buckets_simulated import (
    SAME,
    dealt_out_row,
    simulate_buckets,
)
from tests.claims.web_video import (
    FPS,
    FRAMES,
    assign,
    draw_clips,
    lengths_covered,
    make_buckets,
    probe_of,
)

LARGE, MIDDLE, SMALL = Bucket(129, 576, 1024), Bucket(33, 480, 848), Bucket(1, 192, 336)
COUNTS = {LARGE: 101, MIDDLE: 230, SMALL: 1007}
SIZES = {LARGE: 2, MIDDLE: 9, SMALL: 55}
EACH = {LARGE: 10.0, MIDDLE: 2.2, SMALL: 0.35}


@pytest.mark.slow
def test_clips_go_where_preprocess_would_put_them() -> None:
    """The fast way, by kinds of clips, against the rule itself, applied to each clip with all its frames."""
    clips, buckets = draw_clips(300, seed=1), make_buckets()
    best, fell_out = assign(clips, buckets)
    lost: Counter[str] = Counter()
    for place in range(len(clips)):
        probe = probe_of(clips, place)
        probe = type(probe)(
            **{**vars(probe), "pts_seconds": every_time(int(clips.frames[place]), int(clips.fps[place]))}
        )
        level = sum(covers(probe.pts_seconds, frames, FPS) for frames in FRAMES)
        assert clips.frames[place] == 1 or lengths_covered(clips, FRAMES, FPS)[place] == level
        try:
            assert buckets[best[place]] == rank_buckets(probe, buckets, FPS, False)[0]
        except Rejected as rejected:
            assert best[place] == -1
            lost[rejected.reason.value.replace("_", " ")] += 1
    assert lost == fell_out and (best >= 0).sum() > 290


def every_time(frames: int, fps: int) -> list[float]:
    return [number / fps for number in range(frames)]


def test_shuffled_batches_dealt_out() -> None:
    row = dealt_out_row("dealt out", COUNTS, SIZES, EACH, 4, 0)
    batches = [COUNTS[bucket] // SIZES[bucket] for bucket in COUNTS]  # 50, 25, 18
    assert batches == [50, 25, 18] and row.steps == sum(batches) // 4 == 23
    dropped = 101 - 100 + 230 - 225 + 1007 - 990
    assert row.lost - dropped in SIZES.values()  # the one batch that makes no step
    assert 1 < row.imbalance == row.once <= row.worst < 4 and row.idle == 0
    assert dealt_out_row("dealt out", COUNTS, SIZES, EACH, 4, 1) != row
    one = dealt_out_row("dealt out", COUNTS, SIZES, EACH, 1, 0)
    assert one.imbalance == one.worst == one.epoch == 1 and one.lost == dropped
    equal = dealt_out_row("dealt out", COUNTS, dict.fromkeys(COUNTS, 1), dict.fromkeys(COUNTS, 2.0), 8, 0)
    assert equal.imbalance == equal.epoch == 1 and equal.lost == 1338 % 8


@pytest.mark.slow
def test_the_default_rule_beside_others() -> None:
    full, factorised = simulate_buckets(20_000, "2,8", 0).tables
    rows = {(row.rule, row.ranks): row for row in full.rows}
    assert len(rows) == 6 * 2 and [row.rule for row in factorised.rows] == [SAME, SAME]
    for world in (2, 8):
        ours, equal = rows[SAME, world], rows["dealt out, our sizes", world]
        assert ours.lost == 0 and 1 <= ours.epoch < 1.02
        assert rows["dealt out, hand-tuned", world].imbalance > equal.imbalance > ours.imbalance
        assert rows["same shape, tails drop", world].lost > equal.lost > 0
