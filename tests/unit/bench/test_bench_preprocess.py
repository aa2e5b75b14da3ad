"""The bench of preprocess, on clips so small that it takes seconds; its measurements are real, and speed is not judged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mmspeed.cli.app import ray_workers
from mmspeed.errors import UserError
from mmspeed.preprocess.build.ray import import_ray
from tests.claims.decoding import FRAMES, bare_ways, clips_of, make_clips, start_seconds
from tests.claims.preprocess import decoder_speed, encoder_busy, made_up_captions


@pytest.mark.slow
def test_both_halves_are_measured(tmp_path: Path) -> None:
    clips = make_clips(tmp_path / "clips", 2, 96)
    assert clips.frames == 2 * FRAMES and len(clips.paths) == 2
    decoder = decoder_speed(tmp_path, clips, cores=1, rounds=1)
    assert decoder.files == 2 and min(decoder.build, *decoder.bare.values()) > 0
    assert 0 < decoder.build_busy < 1 and decoder.build_once_begun >= decoder.build
    assert set(decoder.cpu_ms) == {"build", *bare_ways(1)} and "PyAV, 1 process x 1 thread" in decoder.bare
    encoder = encoder_busy(tmp_path, clips, cores=1, vae_width=8)
    assert encoder.clips == 2 and 0 < encoder.start_seconds < encoder.seconds
    assert 0 < encoder.busy < encoder.busy_once_begun <= 1.001
    assert decoder.frames == clips.frames
    assert start_seconds(1, clips) >= 0


@pytest.mark.slow
def test_clips_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no video files"):
        clips_of(tmp_path, tmp_path, 4)
    clips = make_clips(tmp_path / "clips", 3, 96)
    own = clips_of(tmp_path / "clips", tmp_path, 2)
    assert len(own.paths) == 2 and set(own.paths) < {path.resolve() for path in clips.paths}


def test_captions_are_distinct_and_of_many_lengths() -> None:
    captions = made_up_captions(500)
    assert len(set(captions)) == 500 and len({len(caption.split()) for caption in captions}) > 10


def test_number_of_ray_workers() -> None:
    assert ray_workers(None, alone=False) is None and ray_workers("auto", alone=True) is None
    assert ray_workers("3", alone=True) == 3
    for number in ("0", "-1", "two", ""):
        with pytest.raises(UserError, match="number of workers, or auto"):
            ray_workers(number, alone=True)
    with pytest.raises(UserError, match="not with --shard"):
        ray_workers("3", alone=False)


def test_without_ray_the_command_to_install_it_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install 'ray\[data\]'"):
        import_ray()
