"""The pool of decoders: order of events, bounds, and a quick end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmspeed.config import Config
from mmspeed.errors import UserError
from mmspeed.media.rejections import Reason
from mmspeed.media.source import Source
from mmspeed.preprocess.decoding.clips import Clip
from mmspeed.preprocess.decoding.pool import DecodePool, Event, Failed, Finished, Frames, Selected
from tests.support.decoding import source_of
from tests.support.media import cut, damage, number_of, write_image, write_video

FASTSTART = {"movflags": "faststart"}


def config_of(workers: int = 2, **data: Any) -> Config:
    buckets = [{"frames": 4, "height": 32, "width": 48}, {"frames": 1, "height": 32, "width": 48}]
    data = {"sources": [{"path": "x"}], "buckets": buckets, "fps": 4, "windows": "all"} | data
    tree = {
        "data": data,
        "vae": {"kind": "linear"},
        "text": {"kind": "minilm"},
        "model": {"kind": "sora", "size": "tiny"},
    }
    return Config.model_validate(tree | {"name": "x", "preprocess": {"decode_workers": workers}})


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[Source]:
    folder = tmp_path_factory.mktemp("media")
    paths = [write_video(folder / "a.mp4", frames=38, fps=4), write_image(folder / "b.png")]
    paths += [cut(write_video(folder / "c.mp4", frames=20, fps=4), 0.7)]
    broken = write_video(folder / "d.mp4", frames=39, fps=4, options={"g": "4", "bf": "0"}, container=FASTSTART)
    paths += [damage(broken, 0.5, 0.55), write_video(folder / "e.mp4", frames=38, fps=4)]
    return [source_of(path) for path in paths]


def run(config: Config, sources: Sequence[Source], wanted: Callable[[Clip], bool] = lambda clip: True) -> list[Event]:
    with DecodePool(config, sources) as pool:
        return list(pool.run(wanted))


def test_events_of_a_source_come_together_and_in_order(sources: list[Source]) -> None:
    events = run(config_of(3), sources)
    names = [event.source.name for event in events]
    assert names == sorted(names)
    for source in sources:
        of_source = [event for event in events if event.source is source]
        assert isinstance(of_source[-1], Finished) and sum(isinstance(e, Finished) for e in of_source) == 1
        if source.name == "c.mp4":
            (failed, _) = of_source
            assert isinstance(failed, Failed) and failed.clip is None and failed.rejected.reason is Reason.TRUNCATED
            continue
        selected, *rest = of_source[:-1]
        assert isinstance(selected, Selected) and selected.clips
        assert len(selected.probe.pts_seconds) == {"b.png": 1, "d.mp4": 39}.get(source.name, 38)
        clips = [event.clip for event in rest if isinstance(event, Frames | Failed)]
        assert len(clips) == len(rest) == len(selected.clips) and {c.indices for c in clips if c} == {
            clip.indices for clip in selected.clips
        }
        failed = [event for event in rest if isinstance(event, Failed)]
        assert (1 <= len(failed) < len(rest)) if source.name == "d.mp4" else not failed
        for event in rest:
            if isinstance(event, Frames):
                assert event.frames_FHWC.shape == (len(event.clip.indices), 32, 48, 3)
                assert event.frames_FHWC.dtype == np.uint8
                assert event.clip.decoder == ("pillow" if source.name == "b.png" else "pyav")
                if source.name != "d.mp4":
                    assert [number_of(frame) for frame in event.frames_FHWC] == list(event.clip.indices)


def test_only_wanted_clips_are_decoded(sources: list[Source]) -> None:
    events = run(config_of(), sources, lambda clip: clip.window == 1)
    assert [(e.source.name, e.clip.window) for e in events if isinstance(e, Frames)] == [
        (name, 1) for name in ("a.mp4", "d.mp4", "e.mp4")
    ]
    assert sum(isinstance(event, Selected) for event in events) == 4
    assert not any(isinstance(e, Frames | Failed) and e.clip for e in run(config_of(), sources, lambda clip: False))


def test_the_pool_runs_ahead_by_a_bounded_number(sources: list[Source]) -> None:
    many = [sources[0]] * 9
    asked: list[Clip] = []

    def wanted(clip: Clip) -> bool:
        asked.append(clip)
        return True

    with DecodePool(config_of(2), many) as pool:
        events = pool.run(wanted)
        first = next(events)
        assert isinstance(first, Selected)
        clips, before = len(first.clips), -1
        while before != len(asked) or not asked:
            before = len(asked)
            time.sleep(0.5)
        # Sources of many clips wait for the consumer: each worker holds one.
        assert clips > 4 and len(asked) == 2 * clips
        assert pool.waiting_clips() == 4
        taken = 1 + sum(1 for _ in events)
    assert taken == 9 * (clips + 2) and len(asked) == 9 * clips


def test_leaving_early_ends_at_once(sources: list[Source]) -> None:
    threads = threading.active_count()
    with DecodePool(config_of(3), [sources[0]] * 9) as pool:
        for event in pool.run(lambda clip: True):
            if isinstance(event, Frames):
                break
        time.sleep(0.5)  # the threads are stopped by full queues
    assert threading.active_count() == threads


def test_errors_of_the_threads_come_out(sources: list[Source]) -> None:
    def wanted(clip: Clip) -> bool:
        raise UserError("asked in vain")

    with pytest.raises(UserError, match="asked in vain"):
        run(config_of(), sources, wanted)


def test_a_file_that_is_gone_is_a_failure(tmp_path: Path) -> None:
    gone = source_of(tmp_path / "gone.mp4")
    failed, finished = run(config_of(), [gone])
    assert isinstance(failed, Failed) and failed.rejected.reason is Reason.MISSING_FILE
    assert isinstance(finished, Finished) and run(config_of(), []) == []


def test_sources_mixed_are_the_same_events(sources: list[Source]) -> None:
    def summary(events: Iterable[Event]) -> list[str]:
        return sorted(f"{type(e).__name__} {e.source.name} {getattr(e, 'clip', None)}" for e in events)

    with DecodePool(config_of(3), sources) as pool:
        mixed = list(pool.run(lambda clip: True, ordered=False))
        assert summary(mixed) == summary(pool.run(lambda clip: True))
    for source in sources:
        of_source = [event for event in mixed if event.source is source]
        assert isinstance(of_source[-1], Finished) and isinstance(of_source[0], Selected | Failed)
