"""Media whose bytes stand in the rows of Parquet files, as `datasets` writes them: the same entries as files of the same bytes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from mmspeed.config import Config, make_config
from mmspeed.data import DatasetCache
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.preprocess import CacheBuilder, check, fit_data
from mmspeed.preprocess.sources.fetched import MediaStore
from tests.support.http_files import served
from tests.support.listing import listed
from tests.support.runs import CLIPS, small_tree

ROWS = [json.loads(line) for line in CLIPS.read_text(encoding="utf-8").splitlines()[:5]]
BYTES = [(CLIPS.parent / row["video"]).read_bytes() for row in ROWS]


def picture(shade: int) -> bytes:
    data = io.BytesIO()
    Image.new("RGB", (96, 64), (shade, 0, 0)).save(data, "PNG")
    return data.getvalue()


def parquet(path: Path, column: str, media: list[Any], group: int = 2) -> Path:
    table = pa.table({column: media, "text": [f"words {n}" for n in range(len(media))]})
    pq.write_table(table, path, row_group_size=group)
    return path


def cells(names: bool = True) -> list[Any]:
    return [{"bytes": data, "path": f"c{n}.mp4" if names else None} for n, data in enumerate(BYTES)]


def config(home: Path, place: Path | str, column: str) -> Config:
    tree = small_tree(home)
    tree["data"] |= {
        "sources": [{"path": str(place), "media_column": column, "caption_column": "text"}],
        "cache": str(home / f"cache-{column}"),
        "buckets": [{"frames": 5, "height": 32, "width": 48}, {"frames": 1, "height": 32, "width": 48}],
    }
    return make_config(tree, (), origin="test")


def latents(made: Config) -> list[tuple[str, ...]]:
    return sorted(sample.latent_keys for sample in DatasetCache(made.cache_dir).samples)


@pytest.fixture
def files(tmp_path: Path) -> Config:
    """The cache of the same media as files."""
    folder = tmp_path / "files"
    folder.mkdir()
    rows = [{"file": f"c{n}.mp4", "text": f"words {n}"} for n in range(len(BYTES))]
    for row, data in zip(rows, BYTES, strict=True):
        (folder / row["file"]).write_bytes(data)
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = config(tmp_path, folder, "file")
    CacheBuilder(made).run()
    return made


def test_entries_are_those_of_files(files: Config, tmp_path: Path, own_store: Path) -> None:
    """With and without names, in groups, in a folder, and behind a URL; the codec is the same, since the bytes are."""
    (tmp_path / "set").mkdir()
    named = parquet(tmp_path / "set" / "train-00000-of-00001.parquet", "video", cells())
    assert fit_data(tmp_path / "set").usable == 5
    with served(tmp_path / "set") as server:
        for column, place in {
            "video": tmp_path / "set",
            "clip": parquet(tmp_path / "bare.parquet", "clip", BYTES),
            "unnamed": parquet(tmp_path / "unnamed.parquet", "unnamed", cells(names=False), group=10),
            "remote": f"{server.url}/{named.name}",
        }.items():
            made = config(tmp_path, place, "video" if column == "remote" else column)
            made = made.model_copy(update={"data": made.data.model_copy(update={"cache": str(tmp_path / column)})})
            report = CacheBuilder(made).run()
            assert (report.encoded, report.rejected) == (5, 0), column
            assert latents(made) == latents(files), column
            names = {sample.source for sample in DatasetCache(made.cache_dir).samples}
            kept = {f"c{n}.mp4" for n in range(5)}
            assert names == (
                kept if column in ("video", "remote") else {f"{Path(place).name}:{n}" for n in range(1, 6)}
            )
    assert check(config(tmp_path, tmp_path / "set", "video")).page is not None  # with thumbnails
    assert sum(path.stat().st_size for path in own_store.glob("*/*")) >= sum(map(len, BYTES))


def test_rows_without_bytes_and_broken_files(tmp_path: Path, own_store: Path) -> None:
    mixed = [
        {"bytes": picture(9), "path": None},
        {"bytes": None, "path": "a.png"},
        None,
        {"bytes": b"", "path": "b.png"},
    ]
    listing = listed(parquet(tmp_path / "m.parquet", "image", mixed), media_column="image", caption_column="text")
    assert [r.detail for r in listing.rejections] == ["m.parquet row 3: 'image' names no file: it is missing"]
    store = MediaStore(10**9, own_store)
    store.expect(listing.sources)
    first, second, third = listing.sources
    with store.local(first) as here:
        assert here.open().read() == picture(9) and here.bytes() == len(picture(9))
    with store.local(third) as here:
        assert here.bytes() == 0
    with pytest.raises(Rejected, match=r"image\.bytes of row 2 holds no bytes"), store.local(second):
        pass
    with (
        pytest.raises(Rejected, match="too_large"),
        MediaStore(10**9, tmp_path / "few", max_file_bytes=10).local(first),
    ):
        pass
    data = (tmp_path / "m.parquet").read_bytes()
    (tmp_path / "m.parquet").write_bytes(b"x" * len(data))
    with pytest.raises(Rejected, match="its Parquet file"), store.local(first):
        pass


def test_rows_that_only_name_files(tmp_path: Path) -> None:
    """`datasets` leaves the bytes out of what it does not embed."""
    (tmp_path / "a.png").write_bytes(picture(1))
    rows = [{"bytes": None, "path": "a.png"}, {"bytes": None, "path": "gone.png"}]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table({"image": pa.array(rows, kind), "text": ["one", "two"]})
    pq.write_table(table, tmp_path / "m.parquet")
    listing = listed(tmp_path / "m.parquet", media_column="image", caption_column="text")
    assert [(s.path, s.column, s.kind) for s in listing.sources] == [(str(tmp_path / "a.png"), "", "image")]
    assert [r.reason for r in listing.rejections] == [Reason.MISSING_FILE]
