"""The bench of preprocess, on clips so small that it takes seconds; its measurements are real, and speed is not judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from mmspeed.cli.app import ray_workers
from mmspeed.errors import UserError
from mmspeed.preprocess.build.ray import import_ray
from tests.claims.decoding import FRAMES, bare_ways, clips_of, make_clips, start_seconds
from tests.claims.preprocess import (
    DecoderSpeed,
    EncoderBusy,
    PreprocessResult,
    TextSpeed,
    decoder_speed,
    encoder_busy,
    made_up_captions,
)


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
    result = PreprocessResult(1, encoder, decoder, None)
    assert json.loads(result.to_json())["decoder"]["frames"] == clips.frames
    assert any("bare PyAV" in line for line in result.lines())
    assert start_seconds(1, clips) >= 0


def test_the_verdict_needs_both_halves() -> None:
    encoder = EncoderBusy(10, 100.0, 95.0, 1.0, 4.0, 0.0)
    decoder = DecoderSpeed(1, 150, 1, 95.0, 96.0, 0.1, 0.1, {"build": 6.0, "a": 5.0, "b": 5.0}, {"a": 100.0, "b": 90.0})
    text = TextSpeed(10, 1.0, 2.0, True)
    assert PreprocessResult(2, encoder, decoder, text).passed() and decoder.best == "a"
    slow = DecoderSpeed(1, 150, 1, 89.0, 96.0, 0.1, 0.1, decoder.cpu_ms, decoder.bare)
    assert not PreprocessResult(2, encoder, slow, text).passed()
    idle = EncoderBusy(10, 100.0, 89.0, 1.0, 4.0, 0.0)
    lines = PreprocessResult(2, idle, decoder, text).lines()
    assert not PreprocessResult(2, idle, decoder, text).passed() and "FAILED" in lines[1] and "same bytes" in lines[-1]


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
