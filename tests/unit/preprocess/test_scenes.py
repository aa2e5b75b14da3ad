"""Scene cuts: found where the picture changes, crossed by no window, counted, remembered, and with keys of the frames alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmspeed.config import Config, make_config
from mmspeed.config.schema import DataConfig
from mmspeed.data.cache.contents import SceneLine, append_scenes, read_scenes
from mmspeed.data.maintenance.verify import verify
from mmspeed.errors import UserError
from mmspeed.media.decode import Cut, stream
from mmspeed.media.probe import Probe, probe
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.media.source import Source
from mmspeed.preprocess import CacheBuilder, check
from mmspeed.preprocess.decoding.clips import Clip, select_clips
from mmspeed.preprocess.decoding.pool import DecodePool, Failed, Selected
from mmspeed.preprocess.decoding.scenes import SceneDetector, find_cuts, scenes_between
from mmspeed.preprocess.decoding.worker import DecodeWorker
from mmspeed.preprocess.records.keys import latent_parts
from mmspeed.preprocess.sources.discover import list_sources
from tests.support.decoding import probed, source_of
from tests.support.runs import small_tree
from tests.unit.preprocess.test_keep import a_file

installed = pytest.mark.skipif(
    importlib.util.find_spec("scenedetect") is None, reason="the package scenedetect is not installed"
)
FPS, WIDTH, HEIGHT = 8, 96, 64
CONTENT, ADAPTIVE = SceneDetector("content", 27.0), SceneDetector("adaptive", 3.0)


def write_scenes(path: Path, lengths: Sequence[int]) -> Path:
    """A video of scenes of these lengths in frames: a plane of another colour each, with a square that moves slowly."""
    path.parent.mkdir(parents=True, exist_ok=True)
    colours = [(200, 40, 40), (40, 180, 60), (60, 60, 220), (230, 220, 60)]
    with av.open(str(path), "w") as output:
        stream: Any = output.add_stream("libx264", rate=FPS)
        stream.width, stream.height, stream.pix_fmt, stream.options = WIDTH, HEIGHT, "yuv420p", {"crf": "12"}
        frames = ((scene, at) for scene, length in enumerate(lengths) for at in range(length))
        for number, (scene, at) in enumerate(frames):
            pixels = np.full((HEIGHT, WIDTH, 3), colours[scene % len(colours)], np.uint8)
            pixels[20:36, 10 + at % 60 : 26 + at % 60] = 128
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, FPS)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return path


def found_cuts(path: Path, detector: SceneDetector) -> list[int]:
    """The cuts of a file, without a process of its own."""
    source = source_of(path)
    return [cut for cuts in find_cuts(source, probe(source, 10**9, 10**9), detector) for cut in cuts]


def scene_config(folder: Path, *overrides: str) -> Config:
    """One video of three scenes of 20, 4 and 24 frames, and a picture-like one of a single scene; clips of 5 frames."""
    write_scenes(folder / "media" / "three.mp4", [20, 4, 24])
    write_scenes(folder / "media" / "one.mp4", [16])
    for name in ("three", "one"):
        (folder / "media" / f"{name}.txt").write_text(name)
    tree = small_tree(folder, clips=1)
    tree["data"]["sources"] = [{"path": str(folder / "media")}]
    tree["data"] |= {"scenes": {}, "windows": "all", "fps": FPS}
    return make_config(tree, overrides, origin="test")


def planned(config: Config) -> dict[str, tuple[Clip, ...]]:
    """The clips of each source, by its name."""
    with DecodePool(config, list_sources(config.data).sources) as pool:
        return {event.source.name: event.clips for event in pool.run(None) if isinstance(event, Selected)}


@installed
@pytest.mark.parametrize("detector", [CONTENT, ADAPTIVE], ids=lambda one: one.detector)
def test_cuts_are_the_first_frames_of_scenes_also_over_batches(detector: SceneDetector, tmp_path: Path) -> None:
    lengths = [20, 44, 64, 12, 30]  # the second and third cut are where a batch of 64 frames begins
    assert found_cuts(write_scenes(tmp_path / "a.mp4", lengths), detector) == [20, 64, 128, 140]
    assert found_cuts(write_scenes(tmp_path / "b.mp4", [90]), detector) == []
    assert found_cuts(write_scenes(tmp_path / "c.mp4", [9, 9]), SceneDetector("content", 250.0)) == []


@installed
def test_frames_that_cannot_be_decoded_are_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_scenes(tmp_path / "a.mp4", [150, 150])

    def with_damage(source: Source, video: Probe, cuts: Sequence[Cut]) -> Iterator[tuple[int, np.ndarray | Rejected]]:
        """Its second batch comes too late and its fourth not at all, as after damage."""
        results = dict(stream(source, video, cuts))
        for position in (0, 2, 3, 4, 1):
            yield position, Rejected(Reason.UNDECODABLE) if position == 3 else results[position]

    assert found_cuts(path, CONTENT) == [150]
    monkeypatch.setattr("mmspeed.preprocess.decoding.scenes.stream", with_damage)
    assert sorted(found_cuts(path, CONTENT)) == [64, 128, 150, 192, 256]


@installed
def test_the_decoder_process_finds_the_same_cuts(tmp_path: Path) -> None:
    source = source_of(write_scenes(tmp_path / "a.mp4", [70, 70]))
    with DecodeWorker() as worker:
        worker.open(source, 10**9, 10**9, 60.0)
        assert worker.scene_cuts(source, CONTENT, 60.0) == [70]
        assert worker.open(source, 10**9, 10**9, 60.0).width == WIDTH, "the process goes on"


@pytest.mark.slow
@installed
def test_windows_cross_no_cut_and_are_counted(tmp_path: Path) -> None:
    config = scene_config(tmp_path)
    clips = planned(config)
    spans = [(clip.indices[0], clip.indices[-1]) for clip in clips["three.mp4"]]
    assert len(spans) >= 6 and all(last < 20 or first >= 24 for first, last in spans), (
        "nor in the scene of half a second"
    )
    assert [clip.window for clip in clips["three.mp4"]] == list(range(len(spans)))
    uncut = make_config({**config.model_dump(mode="json", by_alias=True)}, ["data.scenes=null"], origin="test")
    crossing = [(clip.indices[0], clip.indices[-1]) for clip in planned(uncut)["three.mp4"]]
    assert any(first < 20 <= last for first, last in crossing), "the test can fail"
    # keys are those of the frames: one scene gives the entries of the uncut video
    parts = [[latent_parts(config, "c", clip) for clip in some["one.mp4"]] for some in (clips, planned(uncut))]
    assert parts[0] == parts[1]
    line = "  scene cuts (data.scenes): 2, in 1 videos"
    checked = check(config)
    assert (
        checked.page is not None and "in 1 of 2 videos; no clip crosses one (data.scenes)" in checked.page.read_text()
    )
    assert line in checked.lines() and not any("scene cuts" in one for one in check(uncut).lines())
    report = CacheBuilder(config).run()
    assert report.encoded == 2 and line in report.lines()
    assert not verify(config.cache_dir).foreign


@installed
def test_each_video_is_looked_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = scene_config(tmp_path)
    first = planned(config)
    lines = {line.content: line for line in read_scenes(config.cache_dir)}
    assert {line.cuts for line in lines.values()} == {(20, 24), ()}
    looked: list[str] = []
    real = DecodeWorker.scene_cuts

    def counting(self: DecodeWorker, source: Source, *rest: Any) -> list[int]:
        looked.append(source.name)
        return real(self, source, *rest)

    monkeypatch.setattr(DecodeWorker, "scene_cuts", counting)
    assert planned(config) == first and looked == []
    other = make_config(config.model_dump(mode="json", by_alias=True), ["data.scenes.threshold=250"], origin="test")
    planned(other)
    assert sorted(looked) == ["one.mp4", "three.mp4"]


@installed
def test_a_video_whose_scenes_are_all_too_short_is_rejected_with_the_reason(tmp_path: Path) -> None:
    config = scene_config(tmp_path, "data.scenes.min_seconds=60")
    with DecodePool(config, list_sources(config.data).sources) as pool:
        failed = {event.source.name: event.rejected for event in pool.run(None) if isinstance(event, Failed)}
    assert {name: why.reason for name, why in failed.items()} == {
        "one.mp4": Reason.TOO_SHORT,
        "three.mp4": Reason.TOO_SHORT,
    }
    assert failed["three.mp4"].detail == "all of its 3 scenes are shorter than data.scenes.min_seconds"


def test_without_the_package_one_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = scene_config(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"data\.scenes needs the package scenedetect: pip install 'mmspeed\[scenes\]'"):
        planned(config)


cut_sets = st.sets(st.integers(1, 199), max_size=20).map(sorted)


@given(cut_sets, st.floats(0, 3), st.integers(1, 30), st.sampled_from([1, 2, "all"]), st.integers(1, 2))
def test_clips_of_scenes_cross_no_cut(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], least: float, frames: int, windows: Any, crops: int
) -> None:
    data = DataConfig.model_validate(
        {
            "sources": [{"path": "x"}],
            "buckets": [{"frames": frames + 1, "height": 32, "width": 32}, {"frames": 3, "height": 64, "width": 64}],
            "scenes": {"min_seconds": least},
            "windows": windows,
            "crops": crops,
            "fps": 8,
        }
    )
    source, video = a_file(tmp_path_factory.getbasetemp(), 0), probed(96, 64, 200, 24)
    scenes = scenes_between(cuts, video.pts_seconds, video.step, least)
    assert all(len(scene) > 1 and len(scene) / 24 >= least - 1e-5 for scene in scenes)
    try:
        clips = select_clips(source, video, data, False, 0, cuts=cuts)
    except Rejected as refusal:
        assert refusal.reason is Reason.TOO_SHORT
        assert not any(len(scene) >= 8 for scene in scenes)  # three frames at 8 of 24 a second
        return
    for clip in clips:
        assert any(clip.indices[0] in scene and clip.indices[-1] in scene for scene in scenes)
    numbered = [(clip.bucket, clip.window, clip.crop_number) for clip in clips]
    assert len(set(numbered)) == len(numbered)
    whole = select_clips(source, video, data, False, 0, cuts=[])
    assert whole == select_clips(source, video, data, False, 0) or least > 200 / 24


def test_lines_of_a_cache_are_read_back_and_damaged_ones_are_absent(tmp_path: Path) -> None:
    lines = [SceneLine("a" * 32, "content", 27.0, 1, (3, 9)), SceneLine("b" * 32, "adaptive", 3.0, 1, ())]
    for line in lines:
        append_scenes(tmp_path, "one", line)
    path = tmp_path / "scenes" / "one.jsonl"
    path.write_text(path.read_text() + path.read_text()[:40])
    assert list(read_scenes(tmp_path)) == lines
