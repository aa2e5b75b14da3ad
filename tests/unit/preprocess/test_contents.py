"""Content ids of large files: files whose samples are equal and that differ are never taken for each other."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmspeed.config import Config
from mmspeed.data import DatasetCache
from mmspeed.data.cache.contents import CONTENTS, ContentLine, append_content, read_contents
from mmspeed.data.maintenance.merge import merge
from mmspeed.errors import UserError
from mmspeed.preprocess import CacheBuilder
from mmspeed.preprocess.sources.contents import ContentIds, whole_hash
from mmspeed.preprocess.sources.source import SAMPLED_ABOVE, Source, content_id
from tests.support.decoding import source_of
from tests.support.runs import small_config

SIZE = SAMPLED_ABOVE + (4 << 20)
BETWEEN = 3 << 20  # where no block is read


def large(path: Path, seed: int = 0, size: int = SIZE) -> Source:
    """A file of 20 MiB whose samples are the same for every `seed`: 200,000 bytes between two of them differ."""
    data = np.random.default_rng(9).integers(0, 256, size, np.uint8)
    if seed:
        data[BETWEEN : BETWEEN + 200_000] = np.random.default_rng(seed).integers(0, 256, 200_000, np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.tobytes())
    return source_of(path)


def opened(root: Path, *listed: Source, **changes: Any) -> ContentIds:
    return ContentIds(root, **({"listed": listed, "reads": True, "records": True} | changes))


def test_files_that_differ_between_their_samples_have_ids_of_their_own(tmp_path: Path) -> None:
    """Whatever their order, and a copy of one has its id."""
    one, other = large(tmp_path / "one"), large(tmp_path / "other", 1)
    copy = source_of(Path(shutil.copyfile(one.path, tmp_path / "copy")))
    assert content_id(one, False) == content_id(other, False)
    first, second = opened(tmp_path / "c", one, other, copy), opened(tmp_path / "d", copy, other, one)
    ids = [[contents.id_of(source) for source in (one, other, copy)] for contents in (first, second)]
    assert ids[0] == ids[1] and ids[0][0] == ids[0][2] != ids[0][1]
    assert content_id(one, False) not in ids[0]
    assert opened(tmp_path / "e", one, copy).id_of(one) == content_id(one, False)  # alike, and the same
    assert opened(tmp_path / "f", one, other, full=True).id_of(one) == content_id(one, True)


def test_a_later_file_is_compared_with_the_one_that_was_encoded(tmp_path: Path) -> None:
    """Though that one is no longer listed; what is known keeps its id in every later listing."""
    root, one, other = tmp_path / "cache", large(tmp_path / "one"), large(tmp_path / "other", 1)
    first = opened(root, one)
    content = first.id_of(one)
    assert content == content_id(one, False) and not list(read_contents(root))  # nothing is read whole to plan
    first.remember(one, content)
    later = opened(root, other).id_of(other)
    assert later != content
    both = opened(root, one, other)
    assert (both.id_of(one), both.id_of(other)) == (content, later)
    moved = replace(one, path=str(Path(one.path).rename(tmp_path / "moved")))
    assert opened(root, moved).id_of(moved) == content
    planning = opened(root, other, reads=False, records=False)
    assert planning.id_of(other) == later  # remembered


def test_hashes_are_remembered_by_the_state_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, one = tmp_path / "cache", large(tmp_path / "one")
    read: list[str] = []
    monkeypatch.setattr(
        "mmspeed.preprocess.sources.contents.whole_hash", lambda source: read.append(source.name) or whole_hash(source)
    )
    for _ in range(3):
        contents = opened(root, one)
        contents.remember(one, contents.id_of(one))
    assert read == ["one"] and len(list(read_contents(root))) == 1
    os.utime(one.path, ns=(1, 1))
    opened(root, one).id_of(one)
    assert read == ["one", "one"]
    small = large(tmp_path / "small", size=1000)
    opened(root, small).remember(small, opened(root, small).id_of(small))
    assert read == ["one", "one"]  # all of a small file is in its id
    planning = opened(tmp_path / "other", one, large(tmp_path / "two", 1), reads=False, records=False)
    assert planning.id_of(one) == content_id(one, False) and not (tmp_path / "other").exists()


def test_lines_are_whole_or_absent(tmp_path: Path) -> None:
    line = ContentLine(("/a", 0, 1, 2, 3), "s", "w", "c")
    append_content(tmp_path, "one", line)
    append_content(tmp_path, "one", replace(line, content="d"))
    path = tmp_path / CONTENTS / "one.jsonl"
    path.write_text(path.read_text()[:-20])
    assert list(read_contents(tmp_path)) == [line]
    path.write_text(path.read_text().replace("/a", "/b"))
    assert not list(read_contents(tmp_path))


def config_of(folder: Path, media: Path, cache: str = "cache", *more: str) -> Config:
    data = ("data.buckets.0.frames=1", "data.fps=null", f"data.sources.0.path={media}", f"data.cache={folder / cache}")
    return small_config(folder, *data, *more, clips=1)


def bitmap(path: Path, number: int) -> None:
    """A picture of 20 MiB, of which only the middle depends on `number`: no sampled block reads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((2304, 3072, 3), 90, np.uint8)).save(path)
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle - 100_000 : middle + 100_000] = bytes([number]) * 200_000
    path.write_bytes(bytes(data))
    path.with_suffix(".txt").write_text("a picture")


def bitmaps(folder: Path) -> Config:
    """A config of two pictures whose samples are equal."""
    for number in (1, 2):
        bitmap(folder / "media" / f"{number}.bmp", 90 * number)
    one, other = (source_of(folder / "media" / f"{number}.bmp") for number in (1, 2))
    assert one.bytes() > SAMPLED_ABOVE and content_id(one, False) == content_id(other, False)
    return config_of(folder, folder / "media")


@pytest.mark.slow
def test_files_of_later_builds_and_other_caches_are_compared(tmp_path: Path) -> None:
    """Each alone has the same id: caches of both do not merge, and where the second comes later, it gets latents of its own."""
    config = bitmaps(tmp_path)
    CacheBuilder(config).run()
    assert CacheBuilder(config).run().reused == 2
    caches = []
    for number in (1, 2):
        alone = tmp_path / f"alone{number}"
        alone.mkdir()
        for ending in ("bmp", "txt"):
            shutil.copyfile(tmp_path / "media" / f"{number}.{ending}", alone / f"{number}.{ending}")
        caches.append(config_of(tmp_path, alone, f"cache{number}", f"vae.weights={config.codec_weights}"))
        CacheBuilder(caches[-1]).run()
    with pytest.raises(UserError, match="have the same samples, and differ; build one cache of both"):
        merge(tmp_path / "merged", [cache.cache_dir for cache in caches])
    shutil.copytree(tmp_path / "alone2", tmp_path / "alone1", dirs_exist_ok=True)  # the second comes later
    report = CacheBuilder(caches[0]).run()
    assert (report.encoded, report.reused) == (1, 1)
    assert len({sample.latent_keys for sample in DatasetCache(caches[0].cache_dir).samples}) == 2
