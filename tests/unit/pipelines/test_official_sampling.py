"""`mmspeed sample --official`: the official pipeline makes the videos of `mmspeed sample`, from runs and from exports."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from mmspeed.cli.app import app
from mmspeed.config import make_config
from mmspeed.errors import UserError
from mmspeed.pipelines.inference.export import export_run
from mmspeed.pipelines.inference.official import OfficialSampler, published_section
from mmspeed.pipelines.inference.prompts import VideoRequest
from mmspeed.pipelines.inference.text_to_video import SamplerChoice, TextToVideo
from mmspeed.shapes import Bucket
from tests.support.covers import slow_but
from tests.support.official_pipelines import NEGATIVE, PROMPT, made_run, shape_of
from tests.support.tiny_repositories import REPOSITORIES, save_wan, save_wan_images

CHOICE = SamplerChoice(steps=2, guidance=3.0)


def requests_of(name: str) -> list[VideoRequest]:
    """Two videos of one size."""
    size, _ = shape_of(name)
    sizes = {"frames": size.frames, "height": size.height, "width": size.width}
    return [VideoRequest(PROMPT, NEGATIVE, seed=3, **sizes), VideoRequest('a sign that says "rain"', seed=4, **sizes)]


@pytest.mark.parametrize("name", slow_but(REPOSITORIES, {"ltx"}))
def test_the_videos_are_those_of_mmspeed_sample(tmp_path: Path, name: str) -> None:
    run, _ = made_run(tmp_path, REPOSITORIES[name](tmp_path / "base"), frozen=1)
    requests = requests_of(name)
    own = [video for _, video in TextToVideo.from_run(run, device="cpu").sample(requests, CHOICE)]
    progress: list[tuple[int, int]] = []
    official = OfficialSampler.open(run, device="cpu").sample(requests, CHOICE, lambda *done: progress.append(done))
    for (request, video), expected, asked in zip(official, own, requests, strict=True):
        assert request is asked and video.fps == expected.fps
        assert video.frames_FHWC.shape == expected.frames_FHWC.shape
        assert np.abs(video.frames_FHWC.astype(int) - expected.frames_FHWC).max() <= 1  # rounded once, from float32
    assert progress == [(2, 4), (4, 4)]
    assert np.abs(own[0].frames_FHWC.astype(int) - own[1].frames_FHWC).max() > 2


def test_videos_from_images_are_those_of_mmspeed_sample(tmp_path: Path) -> None:
    base = save_wan_images(tmp_path / "base", last=True)
    run, _ = made_run(tmp_path, base, frozen=1, conditioning={"first_last": 1.0})
    size = Bucket(9, 64, 96)
    pictures = {}
    for seed, name in enumerate(("image", "last_image")):
        pixels = np.random.default_rng(seed).integers(0, 256, (size.height, size.width, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{name}.png")
        pictures[name] = str(tmp_path / f"{name}.png")
    request = VideoRequest(PROMPT, NEGATIVE, 3, size.frames, size.height, size.width, **pictures)
    ((_, own),) = TextToVideo.from_run(run, device="cpu").sample([request], CHOICE)
    ((_, official),) = OfficialSampler.open(run, device="cpu").sample([request], CHOICE)
    assert np.abs(official.frames_FHWC.astype(int) - own.frames_FHWC).max() <= 1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("official")
    return made_run(folder, save_wan(folder / "base"), frozen=0)[0]


def test_the_command_samples_a_run_and_its_export(tmp_path: Path, run: Path) -> None:
    """The same prompts file, the same kinds of outputs, and the same pictures from run and export."""
    size = {"frames": 1, "height": 32, "width": 48}
    rows = [{"prompt": PROMPT, "seed": 3, **size}, {"prompt": "rain", "negative": NEGATIVE, **size}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    export_run(run, tmp_path / "export")
    options = ["--prompts", str(tmp_path / "prompts.jsonl"), "--official", "--steps", "2", "--device", "cpu"]
    for place in (run, tmp_path / "export"):
        out = tmp_path / place.name / "of.png"
        result = CliRunner().invoke(app, ["sample", str(place), *options, "--out", str(out)])
        assert result.exit_code == 0, result.output
        for name in ("of-0001.png", "of-0002.png"):
            assert f"{out.with_name(name)}\n" in result.output and out.with_name(name).exists()
    first, second = (np.asarray(Image.open(tmp_path / name / "of-0001.png")) for name in (run.name, "export"))
    np.testing.assert_array_equal(first, second)
    assert np.asarray(Image.open(tmp_path / "export" / "of-0002.png")).shape == (32, 48, 3)


@pytest.mark.parametrize(
    ("change", "choice", "message"),
    [
        ({}, SamplerChoice(sampler="euler"), r"--sampler euler: WanPipeline has its repository's scheduler: leave"),
        ({"image": "a.png"}, CHOICE, r"--image: WanPipeline takes no image"),
        ({"frames": 2}, CHOICE, r"a video of 2x32x48 \(frames x height x width\) cannot be made: "),
    ],
)
def test_what_the_pipeline_cannot_do_is_one_line(
    official: OfficialSampler, change: dict[str, str], choice: SamplerChoice, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        list(official.sample([VideoRequest(PROMPT, **change)], choice))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def official(run: Path) -> OfficialSampler:
    return OfficialSampler.open(run, device="cpu")


def test_runs_without_an_official_pipeline_say_so(tmp_path: Path, run: Path) -> None:
    with pytest.raises(UserError, match=r"no such run"):
        OfficialSampler.open(tmp_path / "nothing", device="cpu")
    result = CliRunner().invoke(app, ["sample", str(run), "-p", PROMPT, "--official", "--nproc", "2"])
    assert result.exit_code == 1 and "--official: the official pipeline samples in one process" in str(result.exception)
    tree = {"data": {"sources": [{"path": "."}], "buckets": [{"frames": 1, "height": 16, "width": 16}]}}
    with pytest.raises(UserError, match=r"--official: runs/own is a run of kind sora, which no pipeline of diffusers"):
        published_section(make_config(tree), "runs/own")
    other = {**tree, "model": {"kind": "diffusers", "pretrained": "a/b"}, "text": {"kind": "minilm"}}
    with pytest.raises(UserError, match=r"runs/own was trained with another text encoder than that of a/b, which the"):
        published_section(make_config(other), "runs/own")
