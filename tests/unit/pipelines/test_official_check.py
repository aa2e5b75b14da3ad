"""The call that training makes of each published class, from captions of its own encoders, is the official pipeline's."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import pytest
import torch
from typer.testing import CliRunner

from mmspeed.cli.app import app
from mmspeed.cli.demo import write_manifest
from mmspeed.config import Config, make_config
from mmspeed.errors import UserError
from mmspeed.pipelines.check.official import check_against_official
from mmspeed.pipelines.check.official_calls import compared
from mmspeed.pipelines.domains.video.domain import VideoDomain
from mmspeed.preprocess import CacheBuilder
from mmspeed.preprocess import check as check_data
from mmspeed.preprocess.build.excerpts import captions_by_key, clip_pictures
from mmspeed.preprocess.report.starting import target_of
from mmspeed.shapes import as_bucket
from tests.support.covers import slow_but
from tests.support.tiny_repositories import (
    REPOSITORIES,
    save_cogvideox,
    save_hunyuan_video15_images,
    save_hunyuan_video_images,
    save_ltx,
    save_wan,
    save_wan_5b,
    save_wan_images,
)

IMAGES = ("flux", "qwen-image")


def config_of(folder: Path, name: str, *overrides: str) -> Config:
    size = (1, 32, 48) if name in IMAGES else (25, 64, 96) if name == "ltx" else (13, 32, 48)
    tree: dict[str, Any] = {
        "data": {
            "sources": [{"path": str(folder / "clips.jsonl")}],
            "buckets": [dict(zip(("frames", "height", "width"), size, strict=True))],
            "fps": 16.0,
        },
        "model": {"kind": "diffusers", "pretrained": str(folder / name)},
    }
    return make_config(tree, overrides, origin="test")


@pytest.mark.parametrize("name", slow_but(REPOSITORIES, {"wan", "flux"}))
def test_the_call_is_the_official_pipelines(tmp_path: Path, name: str) -> None:
    REPOSITORIES[name](tmp_path / name)
    (check,) = check_against_official(config_of(tmp_path, name))
    assert check.passed, "\n".join(check.lines())
    exact = {argument.name: argument.error for argument in check.arguments}
    assert exact["hidden_states"] == exact["timestep"] == 0.0
    assert any(name.startswith("encoder_hidden_states") for name in exact)
    assert "is the official pipeline's" in check.lines()[0]


def write_pictures(manifest: Path) -> None:
    """Put the first frame of each clip of a manifest in its place."""
    rows = [json.loads(line) for line in manifest.read_text().splitlines()]
    for number, row in enumerate(rows):
        with av.open(row["video"]) as clip:
            next(clip.decode(video=0)).to_image().save(manifest.with_name(f"{number}.png"))
        row["video"] = str(manifest.with_name(f"{number}.png"))
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))


def with_a_cache(folder: Path, name: str) -> Config:
    """A config with two of the demo's clips, or a frame of each, encoded into its cache by the repository's own codec and text encoders."""
    write_manifest(folder / "clips.jsonl", ("bbb_000", "earth_000"))
    if name in IMAGES:
        write_pictures(folder / "clips.jsonl")
    settings = ("train.batch_size=2", "preprocess.decode_workers=1", f"data.cache={folder / 'cache'}")
    config = config_of(folder, name, *settings, f"output={folder / 'runs'}")
    CacheBuilder(config).run()
    return config


@pytest.mark.parametrize("name", slow_but(REPOSITORIES, {"wan"}))
def test_the_call_from_entries_of_the_cache_is_the_official_pipelines(tmp_path: Path, name: str) -> None:
    """Two clips with captions and times of their own, as training reads them."""
    REPOSITORIES[name](tmp_path / name)
    config = with_a_cache(tmp_path, name)
    (check,) = check_against_official(config, captions=lambda: captions_by_key(config))
    assert check.passed, "\n".join(check.lines())
    assert check.lines()[1] == f"  2 samples of the cache {config.cache_root}"
    exact = {argument.name: argument for argument in check.arguments}
    assert exact["hidden_states"].error == exact["timestep"].error == 0.0
    assert exact["timestep"].ours.startswith("int64 (2," if name.startswith("cogvideox") else "float32 (2,")
    if name == "wan":
        with pytest.raises(
            UserError, match=r"its caption in the cache is not that of the sources: run mmspeed preproc"
        ):
            check_against_official(config, captions=dict)
        other = config.model_copy(update={"data": config.data.model_copy(update={"fps": 8.0})})
        (check,) = check_against_official(other, captions=dict)
        assert check.passed and check.lines()[1].startswith("  random latents, because the samples in the cache")


def test_odd_latent_frames_are_an_error_with_the_next_buckets(tmp_path: Path) -> None:
    """Of CogVideoX 1.5: its pipeline adds a frame of noise in front and drops it from the sample, which training does not do."""
    save_cogvideox(tmp_path / "cogvideox", "1.5", ofs_embed_dim=None)
    config = config_of(tmp_path, "cogvideox", "data.buckets=[{frames: 9, height: 32, width: 48}]")
    task = VideoDomain(config)
    task.open_without_data()
    with pytest.raises(
        UserError, match=r"latent frames 3 of \(3, 4, 6\) is .* use 2 or 4 \(buckets of frames 5 or 13 fit\)"
    ):
        task.latent(as_bucket(config.buckets[0]))


def test_a_size_that_the_class_cannot_take_is_refused_from_init_to_the_official_check(tmp_path: Path) -> None:
    """Learnt positions: of 64x96 alone, in any number of frames."""
    save_cogvideox(tmp_path / "learnt", "5b", images=True, use_learned_positional_embeddings=True)
    target = target_of(str(tmp_path / "learnt"))
    assert target.sizes == ((64, 96),)
    config = config_of(tmp_path, "learnt", "data.buckets=[{frames: 9, height: 80, width: 48}]", "conditioning.first=1")
    write_manifest(tmp_path / "clips.jsonl", ("bbb_000", "earth_000"))
    words = r"9x80x48: .*the model takes height 8, width 12 alone \(buckets of 9x64x96 fit\)"
    with pytest.raises(UserError, match=words.replace(": ", " does not fit the model: ", 1)):
        check_against_official(config)
    assert re.search(words, " ".join(check_data(config).problems))


# name -> (repository, modes, arguments of the pipeline that hold what the codec made of images)
IMAGES_TO_VIDEO: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "wan, 36 channels": (lambda folder: save_wan(folder, in_channels=36), ("first", "first_last")),
    "wan 2.1": (save_wan_images, ("first",)),
    "wan 2.1, first and last": (lambda folder: save_wan_images(folder, last=True), ("first_last",)),
    "hunyuan-video-1.5": (save_hunyuan_video15_images, ("first",)),
    "wan 5b": (save_wan_5b, ("none", "first")),
    "ltx": (save_ltx, ("none", "first")),
    "cogvideox-5b": (lambda folder: save_cogvideox(folder, "5b", images=True), ("first",)),
    "cogvideox-1.5": (lambda folder: save_cogvideox(folder, "1.5", images=True), ("first",)),
    "hunyuan-video, channels": (save_hunyuan_video_images, ("first",)),
    "hunyuan-video, replaced": (lambda folder: save_hunyuan_video_images(folder, replaces=True), ("first",)),
}
FAST = {"cogvideox-1.5", "ltx", "wan 5b", "wan, 36 channels", "hunyuan-video, channels", "hunyuan-video, replaced"}


@pytest.mark.parametrize("name", slow_but(IMAGES_TO_VIDEO, FAST))
def test_the_call_from_images_is_the_official_pipelines(tmp_path: Path, name: str) -> None:
    """In each mode: noisy latents, masks and times bitwise, what the codec makes of the images within 1e-6."""
    save, modes = IMAGES_TO_VIDEO[name]
    save(tmp_path / name)
    share = f"conditioning={{{', '.join(f'{mode}: {1 / len(modes)}' for mode in modes)}}}"
    buckets = ["data.buckets=[{frames: 5, height: 32, width: 48}]"] if name == "cogvideox-1.5" else []
    checks = check_against_official(config_of(tmp_path, name, share, *buckets))
    assert [check.mode for check in checks] == list(modes)
    for check in checks:
        assert check.passed, "\n".join(check.lines())
        errors = {argument.name: argument.error for argument in check.arguments}
        assert errors["hidden_states"] == errors["timestep"] == 0.0
        assert ("hidden_states (encoded frames)" in errors) == (check.mode != "none")
        assert ("ofs" in errors) == (name == "cogvideox-1.5")
    assert checks[-1].lines()[0].endswith(f"with frames of mode {modes[-1]}, is the official pipeline's")


def test_images_are_frames_of_the_configs_own_clips(tmp_path: Path) -> None:
    """They are random only where no clip can be read, and the report says so."""
    save_wan(tmp_path / "wan", in_channels=36)
    write_manifest(tmp_path / "clips.jsonl", ("bbb_000", "earth_000"))
    config = config_of(tmp_path, "wan", "conditioning.first=1", "preprocess.decode_workers=1")
    (check,) = check_against_official(config, frames=clip_pictures)
    assert check.passed, "\n".join(check.lines())
    assert check.lines()[1] == "  random latents, and frames of the config's clips"
    (first, last), (other, _) = clip_pictures(config, as_bucket(config.buckets[0]), 2)
    assert first.shape == (32, 48, 3) and (first != last).any() and (first != other).any()
    for row in ("", json.dumps({"video": str(tmp_path / "none.mp4"), "caption": "a"}) + "\n"):
        (tmp_path / "clips.jsonl").write_text(row)
        (check,) = check_against_official(config, frames=clip_pictures)
        assert check.passed and check.lines()[1].startswith("  random latents and images, because ")


def test_wrong_calls_are_found() -> None:
    """Rounded times, another padding, a missing argument and a mask that hides another token."""
    text, mask = torch.randn(2, 3, 4), torch.tensor([[True, True, True], [True, False, False]])
    official = {
        "hidden_states": torch.randn(2, 4, 1, 2, 2), "timestep": torch.tensor([630.4, 630.4]), "guidance": torch.ones(2),
        "encoder_hidden_states": torch.cat([text, torch.randn(2, 2, 4)], 1),
        "encoder_attention_mask": torch.cat([mask, torch.zeros(2, 2)], 1).long(),
    }  # fmt: skip
    ours = {**official, "encoder_hidden_states": text, "encoder_attention_mask": mask}

    def wrong(**changes: Any) -> list[str]:
        return [argument.name for argument in compared({**ours, **changes}, official) if not argument.right]

    assert wrong() == []
    assert wrong(encoder_hidden_states=torch.where(mask[..., None], text, 9.0)) == []  # padding under a mask
    assert wrong(timestep=official["timestep"].round()) == ["timestep"]
    assert wrong(timestep=official["timestep"].bfloat16()) == ["timestep"]
    assert wrong(guidance=None) == ["guidance"]
    assert wrong(hidden_states=official["hidden_states"].transpose(3, 4)) == ["hidden_states"]
    assert wrong(encoder_hidden_states=text + 1e-3) == ["encoder_hidden_states"]
    assert wrong(encoder_attention_mask=torch.ones(2, 3)) == ["encoder_attention_mask"]


def test_only_published_models_have_an_official_pipeline(tmp_path: Path) -> None:
    tree = {"data": {"sources": [{"path": str(tmp_path)}], "buckets": [{"frames": 1, "height": 16, "width": 16}]}}
    with pytest.raises(UserError, match=r"--against-official compares published models: model.kind is sora"):
        check_against_official(make_config(tree, (), origin="test"))


def test_the_command_prints_both_calls(tmp_path: Path) -> None:
    save_wan(tmp_path / "wan")
    source = "data: {sources: [{path: clips.jsonl}], buckets: [{frames: 5, height: 32, width: 32}]}\n"
    (tmp_path / "own.yaml").write_text(source + f"model: {{kind: diffusers, pretrained: {tmp_path / 'wan'}}}\n")
    result = CliRunner().invoke(app, ["check", str(tmp_path / "own.yaml"), "--against-official"])
    assert result.exit_code == 0, result.output
    assert "WanTransformer3DModel: the call of training at 5x32x32 is the official pipeline's" in result.output
    assert "timestep: ours float32 (2,), official float32 (2,): equal" in result.output
