"""A first config fitted to media: what it says is usable is what preprocess then encodes, on five shapes of folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mmspeed.cli.init import write_config
from mmspeed.config import Bucket, load_config
from mmspeed.errors import UserError
from mmspeed.media.probe import Probe
from mmspeed.media.source import Source
from mmspeed.preprocess import CacheBuilder, fit_data
from mmspeed.preprocess.report.bucket_fit import BucketGrid
from mmspeed.preprocess.report.starting import (
    FRAMES,
    MOST_BUCKETS,
    PROMPT_CHARS,
    SIZES,
    choose_prompts,
    fit_buckets,
    fit_rate,
    target_of,
)
from tests.support.decoding import probed
from tests.support.folder_shapes import FOLDER_SHAPES, USABLE, flat_folder, mixed_folder
from tests.support.media import write_image, write_video

GRID = BucketGrid(temporal=4, patch_frames=1, height=16, width=16)
QUICK = "mixed_folder"  # the one that is built by default


@pytest.mark.slow
@pytest.mark.parametrize("shape", FOLDER_SHAPES)
def test_what_is_said_to_be_usable_is_what_is_encoded(shape: str, tmp_path: Path) -> None:
    said: list[str] = []
    path = write_config(tmp_path / "run", FOLDER_SHAPES[shape](tmp_path / "data"), tell=said.append)
    usable, sources = USABLE[shape]
    assert any(line.startswith(f"sources: {usable} of {sources} usable") for line in said), said
    config = load_config(path, ["vae.channels=4", "preprocess.decode_workers=1"])
    report = CacheBuilder(config).run()
    assert report.encoded + report.reused == usable
    held_out = next(line for line in said if "held out for validation: " in line)
    assert held_out.endswith(f": {report.splits['val']}") and report.splits["val"] >= 1
    assert report.splits["train"] == usable - report.splits["val"]
    used = {f"  bucket {bucket}: {clips}" for bucket, clips in report.buckets.items()}
    assert used == {line for line in said if line.startswith("  bucket ")} and len(used) == len(config.data.buckets)


@pytest.mark.parametrize("shape", [shape for shape in FOLDER_SHAPES if shape != QUICK])
def test_the_five_shapes_are_counted(shape: str, tmp_path: Path) -> None:
    fit = fit_data(FOLDER_SHAPES[shape](tmp_path / "data"))
    assert (fit.usable, fit.sources) == USABLE[shape] and sum(fit.clips) == fit.usable
    assert fit.held_out >= 1 and len(fit.prompts) == 2
    assert (fit.val_fraction == 0) == (shape == "jsonl_manifest"), "whose rows are marked"
    if shape == "csv_manifest":
        assert fit.fps == 16.0 and fit.buckets[0].frames == FRAMES, "short clips fill the bucket at a higher rate"


def test_fitted_buckets_take_what_a_fixed_one_loses(tmp_path: Path) -> None:
    data = mixed_folder(tmp_path / "data")
    fit = fit_data(data)
    assert any(bucket.is_image for bucket in fit.buckets) and not fit.buckets[0].is_image
    assert any(bucket.height > bucket.width for bucket in fit.buckets), "the tall clip"
    values = fit.values()
    fixed = {"frames": 13, "height": 96, "width": 160}
    assert fixed in values["data"]["buckets"] and len(fit.buckets) <= MOST_BUCKETS
    assert [rejection.reason.value for rejection in fit.rejections] == ["no_caption"]


def test_pictures_alone(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("Squares", encoding="utf-8")
    fit = fit_data(tmp_path)
    assert fit.buckets == (Bucket(1, 64, 96),) and fit.fps == 8 and fit.prompts == ("Squares",)
    assert (fit.val_fraction, fit.held_out) == (0.0, 0), "the only sample is trained on"


def test_a_part_of_a_large_set_is_probed(tmp_path: Path) -> None:
    data = flat_folder(tmp_path / "data")
    fit = fit_data(data, most=3)
    assert (fit.probed, fit.listed, fit.sources) == (3, 6, 7)
    assert fit.headline().startswith(f"about {fit.usable * 2} of 7 usable, by 3 that were probed")
    with pytest.raises(UserError, match="most is 0"):
        fit_data(data, most=0)


@pytest.mark.parametrize(
    ("frames", "caption", "expected"),
    [(2, "A clip", "1 too_short: The clip is shorter"), (36, "", "1 no_caption: The media file has no caption")],
)
def test_nothing_usable_is_an_error_with_the_reason(frames: int, caption: str, expected: str, tmp_path: Path) -> None:
    data = tmp_path / "data"
    write_video(data / "a.mp4", frames=frames)
    if caption:
        (data / "a.txt").write_text(caption, encoding="utf-8")
    with pytest.raises(UserError, match="none of the 1 sources is usable") as caught:
        write_config(tmp_path / "run", data)
    assert expected in str(caught.value) and not (tmp_path / "run.yaml").exists()


@pytest.mark.parametrize(
    ("probes", "expected"),
    [
        ([], 8.0),
        ([probed(frames=1)], 8.0),
        ([probed(frames=49)], 8.0),
        ([probed(frames=25)], 12.0),  # a second, in which there are 9 frames at 8
        ([probed(frames=6)], 24.0),  # as many as there are
        ([probed(frames=49, fps=5.0)], 5.0),  # no frame is repeated
        ([probed(frames=49, fps=1.0), *[probed(frames=49)] * 3], 8.0),  # one slow clip does not slow all
        ([probed(fps=10.0, frames=10)], 8.0),
    ],
)
def test_the_rate(probes: list[Probe], expected: float) -> None:
    assert fit_rate(probes) == expected


def test_buckets_are_few_where_sources_are_alike_and_small_where_they_are_small() -> None:
    assert fit_buckets([probed(frames=49)] * 9, 8.0, GRID).buckets == (Bucket(FRAMES, *SIZES[0]),)
    small = fit_buckets([probed(40, 40, 49)] * 3, 8.0, GRID)
    assert small.rejected == 0 and small.buckets == (Bucket(FRAMES, 32, 32),)
    both = fit_buckets([probed(frames=49)] * 50 + [probed(180, 320, 49)] * 50 + [probed(640, 640)] * 50, 8.0, GRID)
    assert both.rejected == 0 and len(both.buckets) == 3
    none = fit_buckets([probed(8, 8, 49)], 8.0, GRID)
    assert not none.buckets and none.rejected == 1


def test_buckets_of_a_model_of_one_size_have_that_size(tmp_path: Path) -> None:
    """CogVideoX 5b I2V, whose positions are learnt for 480x720 alone."""
    target = target_of("cogvideox-5b-i2v")
    assert target.grid is not None and target.sizes == ((480, 720),)
    shapes = [(1920, 1080), (1080, 1920), (720, 720)]
    fit = fit_buckets([probed(w, h, frames) for w, h in shapes for frames in (49, 30)], 8.0, target.grid, target)
    assert {(b.height, b.width) for b in fit.buckets} == {(480, 720)} and len(fit.buckets) == 2
    write_video(tmp_path / "a.mp4", frames=36)
    (tmp_path / "a.txt").write_text("A clip")
    small = fit_data(tmp_path, target=target)
    assert [str(bucket) for bucket in small.buckets] == ["9x480x720"] and small.values()["data"]["allow_upscale"]
    assert "allow_upscale" in "".join(small.lines()) and "allow_upscale" not in fit_data(tmp_path).values()["data"]


def test_prompts_are_two_different_captions_of_videos() -> None:
    one = Source("a", "a", None, None, "video", ("first",), "train")
    others = [replace(one, name=text, captions=(text,)) for text in ("x" * (PROMPT_CHARS + 1), "second", "third")]
    picture = replace(one, kind="image", captions=("picture",))
    assert choose_prompts([picture, one, *others]) == ("first", "second")
    assert choose_prompts([one, one]) == ("first",) and choose_prompts([picture]) == ("picture",)
    assert choose_prompts([others[0]]) == ("x" * (PROMPT_CHARS + 1),)
