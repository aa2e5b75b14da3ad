"""Videos from images: `mmspeed sample --image` with a run that was trained with given frames, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from mmspeed.__main__ import main
from mmspeed.config.conditioning import ConditioningConfig
from mmspeed.data import DatasetCache
from mmspeed.errors import UserError
from mmspeed.media.pixel_rules import NEWEST_RULES
from mmspeed.media.reading import first_frame, last_frames
from mmspeed.pipelines import TextToVideo, TrainPipeline
from mmspeed.pipelines.inference.conditioning_media import conditioning_latents, mode_of
from mmspeed.pipelines.inference.media import Video
from mmspeed.pipelines.inference.prompts import VideoRequest, read_requests
from mmspeed.shapes import Bucket
from tests.claims import conditioning
from tests.support.decoding import video_of
from tests.support.runs import small_config

SHARES = ("conditioning.first=0.4", "conditioning.mask=0.4", "conditioning.prefix_frames=5", "sample.frames=9")


@pytest.fixture(scope="module")
def run(small_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps, and a picture and a video beside it."""
    home = Path(shutil.copytree(small_cache, tmp_path_factory.mktemp("given") / "home"))
    config = small_config(home, "train.steps=2", *SHARES)
    TrainPipeline(config).run()
    rows, columns = np.mgrid[0:40, 0:70]
    picture = np.stack([rows * 3 + columns] * 3, axis=-1).astype(np.uint8)  # grey: the codec's few channels hold it
    Image.fromarray(picture).save(config.run_dir / "first.png")
    Image.fromarray(255 - picture).save(config.run_dir / "last.png")
    Video(np.stack([np.roll(picture, 3 * number, axis=1) for number in range(20)]), 16.0).save(config.run_dir / "v.mp4")
    return config.run_dir


@pytest.fixture(scope="module")
def pipe(run: Path) -> TextToVideo:
    return TextToVideo.from_run(run, device="cpu")


def decoded(pipe: TextToVideo, request: VideoRequest) -> tuple[np.ndarray, np.ndarray]:
    """(frames of the sampled video, frames of its given latents)."""
    size = pipe.size()
    conditioning = conditioning_latents([request], pipe.config, pipe.codec, size, pipe.predictor.conditioning)
    assert conditioning is not None
    ((_, video),) = pipe.sample([request], together=1)
    clean = pipe.codec.decode(conditioning.held_PCThw)[0].permute(1, 2, 3, 0)
    return video.frames_FHWC.astype(int), ((clean + 1) * 127.5).round().clamp(0, 255).numpy().astype(int)


def test_given_frames_are_held_to_the_end(run: Path, pipe: TextToVideo) -> None:
    first, last, video = (str(run / name) for name in ("first.png", "last.png", "v.mp4"))
    frames = pipe.size().frames
    for request, same in (
        (VideoRequest("a", image=first), [0]),
        (VideoRequest("a", image=first, last_image=last), [0, frames - 1]),
        (VideoRequest("a", video=video), [0, 4]),
    ):
        videos, clean = decoded(pipe, request)
        assert np.abs(videos[same] - clean[same]).max() <= 1
    picture = first_frame(run / "first.png", pipe.size(), NEWEST_RULES).astype(int)
    videos, _ = decoded(pipe, VideoRequest("a", image=first))
    error = np.abs(videos[0] - picture).mean()
    ((_, plain),) = pipe.sample([VideoRequest("a")], together=1)
    assert 4 * error < np.abs(plain.frames_FHWC[0].astype(int) - picture).mean()


def test_a_request_among_others_is_as_alone(run: Path, pipe: TextToVideo) -> None:
    requests = [VideoRequest("a", image=str(run / "first.png")), VideoRequest("b")]
    together = [video.frames_FHWC.astype(int) for _, video in pipe.sample(requests)]
    for request, frames in zip(requests, together, strict=True):
        ((_, alone),) = pipe.sample([request], together=1)
        assert np.abs(alone.frames_FHWC.astype(int) - frames).max() <= 1


def test_a_call_takes_images_in_memory_and_the_words_of_diffusers(run: Path, pipe: TextToVideo) -> None:
    first, last = run / "first.png", run / "last.png"
    expected = pipe("a", image=first, last_image=last, steps=3, guidance=2.0)[0].frames_FHWC
    with Image.open(first) as image, Image.open(last) as last_image:
        turned = image.transpose(Image.Transpose.ROTATE_90)
        turned.getexif()[0x0112] = 6  # turn it by 90 degrees to the right
        for picture in (image, image.convert("CMYK"), turned):
            got = pipe("a", image=picture, last_image=last_image, num_inference_steps=3, guidance_scale=2.0)
            assert np.array_equal(got[0].frames_FHWC, expected)
    with pytest.raises(UserError, match="give steps or num_inference_steps, not both"):
        pipe("a", steps=3, num_inference_steps=3)
    with pytest.raises(TypeError, match="ndarray"):
        pipe("a", image=np.zeros((8, 8, 3), np.uint8))  # type: ignore[arg-type]


def test_the_command_reads_images_and_files_of_prompts(run: Path, tmp_path: Path) -> None:
    common = ["sample", str(run), "--device", "cpu", "--steps", "2"]
    out = tmp_path / "v.mp4"
    assert main([*common, "-p", "a", "--image", str(run / "first.png"), "-o", str(out)]) == 0
    assert video_of(out)[0].shape[0] == TextToVideo.from_run(run, device="cpu").size().frames
    shutil.copy(run / "first.png", tmp_path / "one.png")
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", "image": "one.png"}) + "\n", encoding="utf-8")
    (request,) = read_requests(tmp_path / "p.jsonl")
    assert request.image == str(tmp_path / "one.png")
    assert main([*common, "--prompts", str(tmp_path / "p.jsonl"), "-o", str(tmp_path / "w.mp4")]) == 0
    # a value that is rounded otherwise moves all that H.264 makes of its block
    assert np.abs(video_of(tmp_path / "w-0001.mp4")[0].astype(int) - video_of(out)[0]).mean() <= 1


def test_samples_in_training_begin_with_the_frames_of_held_out_clips(run: Path) -> None:
    home = run.parent.parent
    own = ("name=alone", "train.steps=1", "conditioning.first=1", "validate.prompts=[]")
    config = small_config(home, *own)
    TrainPipeline(config).run()
    clips = [clip for clip in DatasetCache(config.cache_root).split("val") if not clip.bucket.is_image][:2]
    pipe, cache = TextToVideo.from_run(config.run_dir, device="cpu"), DatasetCache(config.cache_root)
    assert clips
    for number, clip in enumerate(clips):
        place = config.run_dir / "samples" / "step-00000001" / f"{number:03d}.mp4"
        frames = video_of(place)[0].astype(int)
        clean_1CThw = cache.latent(clip.latent_keys[0])["mean"][None].float()
        shown = ((pipe.codec.decode(clean_1CThw)[0, :, 0].permute(1, 2, 0) + 1) * 127.5).clamp(0, 255).numpy()
        assert place.with_suffix(".txt").read_text() == clip.source
        assert frames.shape[:3] == (clip.bucket.frames, clip.bucket.height, clip.bucket.width)
        assert np.abs(frames[0] - shown).mean() < 12  # H.264 moves it a little


def test_pictures_are_fitted_and_the_end_of_a_video_is_taken(run: Path) -> None:
    size = Bucket(9, 16, 32)
    assert first_frame(run / "first.png", size, NEWEST_RULES).shape == (16, 32, 3)
    at_rate, every = (
        last_frames(run / "v.mp4", 5, 8.0, size, NEWEST_RULES),
        last_frames(run / "v.mp4", 9, None, size, NEWEST_RULES),
    )
    assert at_rate.shape == (5, 16, 32, 3) and np.array_equal(at_rate, every[::2])
    with pytest.raises(UserError, match=r"v\.mp4: is shorter than the 33 frames that are given at 8 frames a second"):
        last_frames(run / "v.mp4", 33, 8.0, size, NEWEST_RULES)
    with pytest.raises(UserError, match=r"run\.json: is no picture that can be read"):
        first_frame(run / "run.json", size, NEWEST_RULES)
    with pytest.raises(UserError, match=r"run\.json: is no video that can be read"):
        last_frames(run / "run.json", 5, None, size, NEWEST_RULES)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"last_image": "a.png"}, "--last-image goes with --image"),
        ({"image": "none.png"}, "none.png: is no picture"),
        ({"video": "v.mp4", "prefix_frames": 4}, "4 given frames end within a latent frame"),
    ],
)
def test_what_does_not_go_together_is_one_line(pipe: TextToVideo, files: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(pipe.sample([VideoRequest("a", **files)]))  # type: ignore[arg-type]


def test_a_run_without_the_mode_says_so(pipe: TextToVideo) -> None:
    conditioning = ConditioningConfig(first=0.2, prefix=0.1, prefix_frames=5)
    config = pipe.config.model_copy(update={"conditioning": conditioning})
    assert mode_of(VideoRequest("a", video="v.mp4", prefix_frames=5), config) == "prefix"
    with pytest.raises(UserError, match="the run was trained to go on from 5 frames"):
        mode_of(VideoRequest("a", video="v.mp4", prefix_frames=9), config)
    with pytest.raises(UserError, match=r"--last-image: the run was trained without conditioning\.first_last"):
        mode_of(VideoRequest("a", image="a.png", last_image="b.png"), config)


@pytest.mark.slow
def test_given_frames_are_learnt(tmp_path: Path) -> None:
    """On held-out clips the loss is clearly lower with the right first frame than with another clip's, or none."""
    result = conditioning.measure(tmp_path)
    assert result.passed, result.line()
