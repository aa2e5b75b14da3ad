"""`mmspeed init`: a short file fitted to the videos, the full one with every key, both right by the schema that they name."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import yaml

from mmspeed.__main__ import main
from mmspeed.cli.init import source_path, template, write_config
from mmspeed.config import json_schema, load_config
from mmspeed.errors import UserError
from tests.support.folder_shapes import USABLE, mixed_folder
from tests.support.json_schemas import mistakes


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mixed_folder(tmp_path_factory.mktemp("init") / "my videos")


def test_a_short_config_is_fitted_to_the_videos(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", str(tmp_path / "my-run"), "--videos", str(videos)]) == 0
    said = capsys.readouterr().out.splitlines()
    usable, listed = USABLE["mixed_folder"]
    assert said[0] == f"reading {videos}" and said[1].startswith(f"sources: {usable} of {listed} usable (")
    assert said[-1].endswith(f"then run `mmspeed check {tmp_path / 'my-run.yaml'}`")
    text = (tmp_path / "my-run.yaml").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines()[1:])) <= 120
    config = load_config(tmp_path / "my-run.yaml")
    assert config.name == "my-run" and config.data.sources[0].path == str(videos)
    assert any(bucket.is_image for bucket in config.buckets) and len(config.buckets) >= 3
    assert len(config.validate_.prompts) == 2 and config.data.val_fraction > 0
    assert {f"  bucket {b}" for b in config.buckets} == {s.split(":")[0] for s in said if s.startswith("  bucket ")}
    assert mistakes(yaml.safe_load(text), json_schema()) == []


def test_full_has_every_key_and_the_same_values(videos: Path, tmp_path: Path) -> None:
    for name, more in (("short", []), ("full", ["--full"])):
        assert main(["init", str(tmp_path / name), "--videos", str(videos), *more]) == 0
    short, full = (
        load_config(tmp_path / f"{name}.yaml", ["name=run", "data.cache=cache"]) for name in ("short", "full")
    )
    assert full == short
    text = (tmp_path / "full.yaml").read_text(encoding="utf-8")
    assert len(text.splitlines()) > 300 and "\n#curriculum: []\n" in text
    assert text.startswith("# yaml-language-server: $schema=")


def test_the_short_template_holds_what_people_change() -> None:
    text = template("my-run", "clips", full=False)
    assert mistakes(yaml.safe_load(text), json_schema()) == []
    for line in (
        "  cache: cache/my-run",
        "  fps: 8.0",
        "model: {size: tiny}",
        "  steps: 1000",
        "device: {dtype: float32}",
    ):
        assert f"\n{line}  # " in text, line
    assert "memory" not in yaml.safe_load(text)
    odd = {"data": {"sources": [{"path": "a: {b}, #c"}]}, "validate": {"prompts": ["- x: [1]", "two\nlines", "'q' #"]}}
    again = yaml.safe_load(template("my-run", "clips", full=False, values=odd))
    assert again["data"] == odd["data"] and again["validate"]["prompts"] == odd["validate"]["prompts"]


def test_a_file_that_exists_is_refused_before_the_videos_are_read(
    videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my-run.yaml").write_text("mine", encoding="utf-8")
    assert main(["init", str(tmp_path / "my-run"), "--videos", str(videos)]) == 1
    captured = capsys.readouterr()
    assert "--force" in captured.err and "reading" not in captured.out
    assert (tmp_path / "my-run.yaml").read_text(encoding="utf-8") == "mine"


def test_init_with_videos(tmp_path: Path, demo_clips: Path) -> None:
    (tmp_path / "clips").mkdir()
    with pytest.raises(UserError, match="clips holds no media"):
        write_config(tmp_path / "run.yaml", tmp_path / "clips")
    assert not (tmp_path / "run.yaml").exists()
    shutil.copy(demo_clips.parent / "videos" / "bbb_000.mp4", tmp_path / "clips" / "a.mp4")
    (tmp_path / "clips" / "a.txt").write_text("A meadow", encoding="utf-8")
    config = write_config(tmp_path / "run.yaml", tmp_path / "clips")
    assert yaml.safe_load(config.read_text(encoding="utf-8"))["data"]["sources"][0]["path"] == "clips"
    assert load_config(config).data.sources[0].path == str(tmp_path / "clips")
    outside = source_path(tmp_path / "deep" / "run.yaml", tmp_path / "clips")
    assert outside == str(tmp_path / "clips")
    for absent, words in ((tmp_path / "absent", "absent does not exist"), (Path("s3://b/set"), "write s3://b/set")):
        with pytest.raises(UserError, match=f"--videos: .*{words}"):
            write_config(tmp_path / "other.yaml", absent)
    with pytest.raises(UserError, match="is a folder"):
        write_config(Path("."))


def test_adapters_are_of_published_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, said in (
        (["--adapter", "lora"], "--adapter: adapters train beside a published model: name one with --model"),
        (["--model", "a/b", "--rank", "4"], "--rank 4: add --adapter lora"),
        (["--model", "a/b", "--adapter", "lora", "--rank", "0"], "--rank 0: use 1 or more"),
        (["--model", "a/b", "--adapter", "dora"], "--adapter: 'dora' is not known; use lora"),
        (
            ["--task", "language", "--model", "tiny-qwen3-0.6b", "--adapter", "lora"],
            "begins with random weights; adapters",
        ),
    ):
        assert main(["init", str(tmp_path / "run.yaml"), *options]) == 1
        assert said in capsys.readouterr().err and not (tmp_path / "run.yaml").exists()
