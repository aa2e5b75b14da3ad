"""Repeated frames in the gaps of a variable frame rate: counted in the entry, and rejected above data.max_repeated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmspeed.config import Config
from mmspeed.media.rejections import Reason
from mmspeed.preprocess import CacheBuilder, check
from mmspeed.preprocess.build.online import OnlineBuilder
from tests.support.caches import entries_of
from tests.support.media import write_video
from tests.support.runs import small_config

SECOND = 1000


def config_of(folder: Path, *overrides: str) -> Config:
    data = (f"data.sources.0.path={folder / 'media'}", "data.buckets.0.frames=13", "data.fps=8", "data.windows=2")
    return small_config(folder, *data, *overrides, clips=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Videos of one frame a second, of an even rate, with one short gap, and with one in the second half."""
    folder = tmp_path_factory.mktemp("repeats")
    even = list(range(0, 4 * SECOND, 125))
    times = {
        "fps1": list(range(0, 5 * SECOND, SECOND)),
        "even": even,
        "short_gap": [time for time in even if not 500 < time < 900],
        "half": [time for time in even if time < 2 * SECOND or time > 3500],
    }
    for name, ms in times.items():
        write_video(folder / "media" / f"{name}.mp4", times_ms=ms)
        (folder / "media" / f"{name}.txt").write_text("a picture")
    return folder


def test_repeats_are_counted_and_too_many_are_rejected(folder: Path) -> None:
    """By preprocess, check and the plan of the first epoch alike; a window is rejected alone, under a name of its own."""
    config = config_of(folder)
    report = CacheBuilder(config).run()
    named = {r.source: (r.reason, r.detail) for r in report.rejections}
    assert set(named) == {"fps1.mp4", "half.mp4 [13x32x48, window 1]"}
    assert {reason for reason, _ in named.values()} == {Reason.REPEATED}
    assert named["fps1.mp4"][1] == "11 of 13 frames repeat the one before; 2 are distinct"
    assert (report.encoded, report.rejected, report.clips_failed) == (3, 1, 1)
    by_source: dict[str, list[int]] = {}
    for entry in entries_of(config.cache_dir):
        if entry.section == "latents":
            by_source.setdefault(str(entry.source), []).append(entry.repeated)
    assert by_source["even.mp4"] == [0, 0] and sorted(by_source["short_gap.mp4"]) != [0, 0]
    assert len(by_source["half.mp4"]) == 1 and max(map(max, by_source.values())) <= 0.25 * 13
    checked = check(config)
    assert checked.statistics.reasons["repeated"] == 2
    text = "\n".join(checked.lines())
    assert "of frames repeated" in text and "hint: 2 rejected as repeated: lower data.fps" in text
    rows, rejections = planned(config)
    assert {r.source for r in rejections} == set(named) and len(rows) == 5


def planned(config: Config) -> tuple[Any, Any]:
    """The rows and rejections that a run would plan its first epoch with."""
    from mmspeed.device import pick
    from mmspeed.preprocess.build.setup import BuildSetup

    builder = OnlineBuilder(config)
    builder.setup = BuildSetup(config, pick("cpu"))
    return builder._probe(0, 1)


def test_the_key_says_how_many(folder: Path) -> None:
    """All of `fps1` passes at 1, and nothing with a gap at 0."""
    counts = {}
    for most in (0.0, 1.0):
        checked = check(config_of(folder, f"data.max_repeated={most}", f"data.cache={folder / f'none{most}'}"))
        counts[most] = checked.statistics.reasons["repeated"]
    assert counts[1.0] == 0 and counts[0.0] == 3
