"""The mutation tests of law 5: change one thing that entries are made from, and exactly those that depend on it are stale,
are named by `check`, and are encoded again; change what they do not depend on, and nothing is.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch

from mmspeed.config import Bucket, Config, make_config
from mmspeed.data import DatasetCache
from mmspeed.data.cache.keys import entry_key
from mmspeed.preprocess import CacheBuilder, check
from mmspeed.preprocess.decoding.clips import Clip
from mmspeed.preprocess.records import keys
from mmspeed.preprocess.records.keys import latent_parts, text_parts
from mmspeed.preprocess.sources.source import Source
from tests.support.runs import CLIPS
from tests.support.tiny_models import save_tiny_text_encoder, save_tiny_vae

CLIP_FILES = [CLIPS.parent / json.loads(line)["video"] for line in CLIPS.read_text(encoding="utf-8").splitlines()[:6]]


@dataclass
class World:
    """All that a cache is made from, in a folder that a test may change: media, encoders, and the config."""

    folder: Path
    tree: dict[str, Any]

    @property
    def media(self) -> Path:
        return self.folder / "media"

    @property
    def config(self) -> Config:
        tree = json.loads(json.dumps(self.tree).replace("FOLDER", str(self.folder)))
        return make_config(tree, origin="test")


def make_world(folder: Path) -> World:
    """Three clips, each with a caption, a tiny Wan autoencoder and a tiny BERT."""
    world = World(
        folder,
        {
            "output": "FOLDER/runs",
            "data": {
                "sources": [{"path": "FOLDER/media"}],
                "cache": "FOLDER/cache",
                "buckets": [{"frames": 5, "height": 32, "width": 32}],
            },
            "vae": {"kind": "diffusers", "pretrained": "FOLDER/vae"},
            "text": {"kind": "transformers", "pretrained": "FOLDER/text", "max_tokens": 24},
            "preprocess": {"decode_workers": 1},
            "device": {"kind": "cpu", "peak_tflops": 0.1},
        },
    )
    world.media.mkdir(parents=True)
    for number in range(3):
        shutil.copyfile(CLIP_FILES[number], world.media / f"{number}.mp4")
        (world.media / f"{number}.txt").write_text(f"a rabbit {'runs ' * number}in the sun")
    save_tiny_vae(folder / "vae")
    save_tiny_text_encoder(folder / "text", "bert")
    return world


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A world whose cache is complete."""
    world = make_world(tmp_path_factory.mktemp("keys") / "world")
    report = CacheBuilder(world.config).run()
    assert (report.encoded, report.texts) == (3, 4)
    return world


@pytest.fixture
def world(built: World, tmp_path: Path) -> World:
    """A copy of it, to be changed."""
    shutil.copytree(built.folder, tmp_path / "world")
    return World(tmp_path / "world", json.loads(json.dumps(built.tree)))


def change(**settings: Any) -> Callable[[World], None]:
    """Set `section__name` of the config."""

    def mutate(world: World) -> None:
        for name, value in settings.items():
            section, _, key = name.partition("__")
            world.tree[section][key] = value

    return mutate


def change_weights(folder: str) -> Callable[[World], None]:
    """Change one number of one tensor of an encoder."""

    def mutate(world: World) -> None:
        (path,) = (world.folder / folder).glob("*.safetensors")
        tensors = safetensors.torch.load_file(path)
        first = tensors[min(tensors)].flatten()
        first[0] += 0.5
        safetensors.torch.save_file(tensors, path, {"format": "pt"})

    return mutate


def change_caption(world: World) -> None:
    (world.media / "1.txt").write_text("an owl in the dark")


def add_namesake(world: World) -> None:
    """A clip of the same name in another folder, with another content and the same caption."""
    (world.media / "more").mkdir()
    shutil.copyfile(CLIP_FILES[5], world.media / "more" / "0.mp4")
    shutil.copyfile(world.media / "0.txt", world.media / "more" / "0.txt")


def move_all(world: World) -> None:
    """Rename every file, and move the data set, the encoders and the cache's folder."""
    (world.media / "deep").mkdir()
    for number in range(3):
        for ending in ("mp4", "txt"):
            (world.media / f"{number}.{ending}").rename(world.media / "deep" / f"x{2 - number}.{ending}")
    world.media.rename(world.folder / "moved")
    world.tree["data"]["sources"][0]["path"] = "FOLDER/moved"
    for name in ("vae", "text"):
        (world.folder / name).rename(world.folder / f"other-{name}")
        world.tree[name]["pretrained"] = f"FOLDER/other-{name}"
    (world.folder / "cache").rename(world.folder / "other-cache")
    world.tree["data"]["cache"] = "FOLDER/other-cache"


MUTATIONS: dict[str, tuple[Callable[[World], None], int, int, str]] = {
    # what is changed: (how, latents that are missing then, texts, how check explains them)
    "crops": (change(data__crops=3), 6, 0, ""),  # the middle one is there
    "codec weights": (change_weights("vae"), 3, 0, "codec"),
    "latent dtype": (change(preprocess__latent_dtype="bfloat16"), 3, 0, "dtype"),
    "caption": (change_caption, 0, 1, ""),
    "length limit": (change(text__max_tokens=20), 0, 3, "encoder"),
    "text dtype": (change(preprocess__text_dtype="bfloat16"), 0, 3, "dtype"),
    "a clip of the same name": (add_namesake, 1, 0, ""),
    "names and places": (move_all, 0, 0, ""),
    "what entries do not depend on": (
        change(
            data__val_fraction=0.4,
            data__repeats=3,
            data__variants="draw",
            preprocess__encode_batch=4,
            preprocess__text_batch=1,
            preprocess__shard_mb=1,
        ),
        *(0, 0, ""),
    ),
}


# their parts of a key are seen below and by the tests of the encoders' fingerprints
SEEN_ELSEWHERE = ("latent dtype", "length limit", "text dtype", "crops")


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=[pytest.mark.slow] if what in SEEN_ELSEWHERE else []) for what in MUTATIONS]
)
def test_what_depends_on_a_change_is_named_and_made_again_and_nothing_else(world: World, what: str) -> None:
    mutate, latents, texts, words = MUTATIONS[what]
    mutate(world)
    assert_stale(world, latents, texts, words)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("constant", "value", "texts", "words"),
    [("ENCODING_VERSION", 9, 3, "version"), ("TRANSFORM", "x/1", 0, "transform")],
)
def test_another_way_of_encoding_makes_all_that_it_touches_stale(
    world: World, monkeypatch: pytest.MonkeyPatch, constant: str, value: Any, texts: int, words: str
) -> None:
    monkeypatch.setattr(keys, constant, value)
    assert_stale(world, 3, texts, words)


def assert_stale(world: World, latents: int, texts: int, words: str) -> None:
    """`check` says so before, and the build encodes just that."""
    config = world.config
    said = "\n".join(check(config).lines())
    assert f" present, {latents} missing" in line_of(said, "cache latents:")
    assert f" present, {texts} missing" in line_of(said, "cache texts:")
    count = latents or texts
    assert (f"stale: {count}, made with another {words}\n" in said) if words else "stale" not in said, said
    null = 1 if texts == 3 else 0  # with the encoder the empty caption is another too
    report = CacheBuilder(config).run()
    assert (report.clips_encoded, report.texts) == (latents, texts + null)
    assert report.sources == report.encoded + report.reused and report.rejected == 0
    cache = DatasetCache(config.cache_dir)
    assert len({sample.latent_keys for sample in cache.samples}) == len(cache.samples)


def line_of(text: str, start: str) -> str:
    (line,) = (line for line in text.splitlines() if line.startswith(start))
    return line


CLIP = Clip(
    source=Source("a.mp4", "a.mp4", None, None, "video", ("a",), "train"),
    bucket=Bucket(5, 32, 32),
    indices=(0, 3, 6, 9, 12),
    crop=(10, 0, 190, 180),
    content_id="0" * 32,
    fps=8.0,
    seconds=0.625,
)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"content_id": "1" * 32}, "content"),
        ({"indices": (0, 3, 6, 9, 13)}, "frames"),
        ({"crop": (11, 0, 191, 180)}, "crop"),
        ({"bucket": Bucket(5, 32, 40)}, "bucket"),
        ({"fps": 8.5}, "fps"),
        ({"source": replace(CLIP.source, name="b.mp4", path="b.mp4", captions=("b",), split="val")}, None),
        ({"window": 2, "crop_number": 1, "decoder": "x", "seconds": 1.0}, None),
    ],
)
def test_each_part_of_a_clip_by_itself(built: World, changes: dict[str, Any], part: str | None) -> None:
    one, other = (latent_parts(built.config, "codec", clip) for clip in (CLIP, replace(CLIP, **changes)))
    assert [name for name in one if one[name] != other[name]] == ([part] if part else [])
    assert (entry_key(one) == entry_key(other)) == (part is None)


def test_encoders_and_captions_by_themselves(built: World) -> None:
    config = built.config
    assert entry_key(latent_parts(config, "a", CLIP)) != entry_key(latent_parts(config, "b", CLIP))
    assert len({entry_key(text_parts(config, *pair)) for pair in (("a", "x"), ("a", "y"), ("b", "x"))}) == 3
