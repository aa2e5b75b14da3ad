"""Captions that a text encoder reads beside the clip's first frame: HunyuanVideo's pipeline from images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mmspeed.__main__ import main
from mmspeed.cli.init import write_config
from mmspeed.config import Config, load_config
from mmspeed.data import DatasetCache
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.models.text.encoders import load_text_encoder
from mmspeed.pipelines import TrainPipeline
from mmspeed.preprocess import CacheBuilder
from mmspeed.preprocess.decoding.pool import DecodePool, Frames
from mmspeed.preprocess.sources.discover import list_sources
from tests.support.runs import losses
from tests.support.tiny_repositories import save_hunyuan_video_images

CAPTIONS = ("", "rabbit", 'a rabbit says "hello" in a meadow', "word " * 400, "一只兔子 кролик")
SMALL = (
    "data.limit=3", "data.buckets=[{frames: 5, height: 32, width: 48}]", "data.val_fraction=0", "validate.prompts=[]",
    "train.steps=2", "train.log_every=1", "train.ema_decay=null", "data.fps=8", "preprocess.decode_workers=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def repositories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tiny repositories of both kinds."""
    folder = tmp_path_factory.mktemp("hunyuan")
    return {
        "channels": save_hunyuan_video_images(folder / "channels"),
        "replaces": save_hunyuan_video_images(folder / "replaces", replaces=True),
    }


def official(folder: Path) -> Any:
    from diffusers import HunyuanVideoImageToVideoPipeline

    return HunyuanVideoImageToVideoPipeline.from_pretrained(folder)


def config_of(folder: Path, repository: Path, *overrides: str) -> Config:
    folder.mkdir(exist_ok=True)
    write_config(folder / "own.yaml", model=str(repository))
    return load_config(folder / "own.yaml", (*SMALL, *overrides))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["channels", "replaces"])
def test_entries_are_those_of_the_pipeline(repositories: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """Beside a picture, and beside the black one of negative prompts, of which the pipeline takes other rows."""
    pipeline, config = official(repositories[kind]), config_of(tmp_path, repositories[kind])
    encoder: Any = load_text_encoder(config.text, Device("cpu", 0))
    picture = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    for caption in (*CAPTIONS, as_long_as_it_fits(encoder)):
        for shown in (picture, None):
            image = Image.new("RGB", (64, 48)) if shown is None else Image.fromarray(shown)
            every = {} if shown is None else {"image_embed_interleave": 2 if kind == "channels" else 4}
            rows, pooled, mask = pipeline.encode_prompt(image=image, prompt=caption, **every)
            entry = encoder.encode([caption], [shown])[0]
            torch.testing.assert_close(entry.embeds_LD, rows[0][mask[0].bool()], atol=1e-6, rtol=0)
            torch.testing.assert_close(entry.pooled_D, pooled[0], atol=1e-6, rtol=0)
    assert encoder.truncated == 2


def as_long_as_it_fits(encoder: Any) -> str:
    """The longest caption of one word that is not cut."""
    words = 1
    while not encoder.parts[0].tokenize(" ".join(["meadow"] * (words + 1)))[1]:
        words += 1
    return " ".join(["meadow"] * words)


def first_frames(config: Config) -> dict[str, np.ndarray]:
    """The first frame of each source's clip."""
    with DecodePool(config, list_sources(config.data).sources) as pool:
        events = [event for event in pool.run(lambda clip: True) if isinstance(event, Frames)]
    return {event.clip.source.name: event.frames_FHWC[0] for event in events}


def check_entries(config: Config, pipeline: Any, every: int) -> None:
    """Each stored caption equals the pipeline's, of the words and the first frame of its own clip."""
    frames, cache = first_frames(config), DatasetCache(config.cache_root)
    words = {source.name: source.captions for source in list_sources(config.data).sources}
    for sample in cache.samples:
        for key, caption in zip(sample.text_keys, words[sample.source], strict=True):
            rows, pooled, mask = pipeline.encode_prompt(
                image=Image.fromarray(frames[sample.source]), prompt=caption, image_embed_interleave=every
            )
            entry = cache.text(key)
            torch.testing.assert_close(entry.embeds_LD.float(), rows[0][mask[0].bool()], atol=1e-6, rtol=0)
            assert entry.pooled_D is not None
            torch.testing.assert_close(entry.pooled_D.float(), pooled[0], atol=1e-6, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["channels", "replaces"])
def test_a_cache_is_made_completed_and_trained_from(repositories: dict[str, Path], tmp_path: Path, kind: str) -> None:
    config = config_of(tmp_path / "one", repositories[kind], "preprocess.text_dtype=float32")
    report = CacheBuilder(config).run()
    assert (report.texts, report.texts_reused, report.texts_failed) == (4, 0, 0)  # the empty one, too
    check_entries(config, official(repositories[kind]), 2 if kind == "channels" else 4)
    again = CacheBuilder(config).run()
    assert (again.texts, again.texts_reused, again.clips_encoded) == (0, 4, 0)
    TrainPipeline(config).run()
    # the first epoch makes the same entries
    online = config_of(tmp_path / "two", repositories[kind], "preprocess.text_dtype=float32")
    TrainPipeline(online, online=True).run()
    assert losses(online) == losses(config)
    if kind == "channels":
        lacking = DatasetCache(config.cache_root).samples[0].text_keys[0]
        assert main(["check", str(tmp_path / "one" / "own.yaml"), *SMALL, "preprocess.text_dtype=float32"]) == 0
        changed = change_a_caption(tmp_path, config)
        report = CacheBuilder(changed).run()
        assert (report.texts, report.clips_encoded) == (1, 0)  # the clip is decoded, and not encoded again
        assert lacking in DatasetCache(config.cache_root).keys("texts")


def test_variants_that_share_captions_are_refused(tmp_path: Path) -> None:
    repository = save_hunyuan_video_images(tmp_path / "channels")
    config = config_of(tmp_path, repository, "data.windows=2", "data.variants=draw")
    with pytest.raises(UserError, match=r"data.variants: the model's text encoder sees the first frame"):
        CacheBuilder(config).run()


def change_a_caption(folder: Path, config: Config) -> Config:
    """The config with another caption of one clip, over the same cache."""
    import json

    source = Path(config.data.sources[0].path)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    for row in rows:
        row["video"] = str(source.parent / row["video"])
    rows[0]["caption"] = "another caption"
    (folder / "changed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return load_config(
        folder / "one" / "own.yaml",
        (*SMALL, "preprocess.text_dtype=float32", f"data.sources=[{{path: {folder / 'changed.jsonl'}}}]"),
    )
