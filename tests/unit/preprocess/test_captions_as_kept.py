"""The ways in which people keep captions beside media, and what is said where none is found."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmspeed.config import make_config
from mmspeed.config.schema import DataConfig
from mmspeed.errors import UserError
from mmspeed.media.rejections import Reason
from mmspeed.preprocess import CacheBuilder, check, fit_data
from mmspeed.preprocess.sources.discover import usual_columns
from tests.support.listing import BUCKETS, listed
from tests.unit.preprocess.test_sources import captions, media, reasons

NAMES, WORDS = ["a b.mp4", "短片.mp4"], ["a red ball, which bounces", "一个红色的球"]
WANTED = {name: (words,) for name, words in zip(NAMES, WORDS, strict=True)}


def table(media_name: str, caption: str, separator: str) -> bytes:
    text = io.StringIO()
    rows = csv.writer(text, delimiter=separator)
    rows.writerows(
        [(media_name, caption, "frames"), *((name, words, 1) for name, words in zip(NAMES, WORDS, strict=True))]
    )
    return text.getvalue().encode()


def objects(media_name: str, caption: str) -> list[dict[str, str]]:
    return [{media_name: name, caption: words} for name, words in zip(NAMES, WORDS, strict=True)]


def parquet(path: Path) -> None:
    pq.write_table(pa.table({"video": NAMES, "caption": WORDS}), path)


def lines(rows: list[dict[str, str]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


STYLES: dict[str, Callable[[Path], object]] = {
    "meta.csv": lambda path: path.write_bytes(table("path", "text", ",")),
    "list.tsv": lambda path: path.write_bytes(table("file_name", "prompt", "\t")),
    "excel.csv": lambda path: path.write_bytes(table("video", "caption", ";")),
    "dataset.jsonl": lambda path: path.write_bytes(lines(objects("video_path", "caption"))),
    "lines.json": lambda path: path.write_bytes(lines(objects("video", "caption"))),
    "rows.ndjson": lambda path: path.write_bytes(lines(objects("video", "caption"))),
    "videos2caption.json": lambda path: path.write_text(
        json.dumps([row | {"cap": [row["cap"]], "size": {"w": 1}} for row in objects("path", "cap")])
    ),
    "data.parquet": parquet,
    "videos.txt": lambda path: (
        path.write_text("\n".join(NAMES)),
        path.with_name("prompts.txt").write_text("\n".join(WORDS)),
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        media(tmp_path / "set" / name)
    return tmp_path / "set"


@pytest.mark.parametrize("name", STYLES)
def test_the_only_manifest_of_a_folder_is_found(folder: Path, name: str) -> None:
    """By its columns, whatever its name; and it is the same when it is named itself."""
    STYLES[name](folder / name)
    for place in (folder, folder / name):
        data = DataConfig(sources=[{"path": str(place)}], buckets=BUCKETS)  # type: ignore[list-item]
        assert captions(listed(place, **usual_columns(data))) == WANTED


def test_other_tables_are_no_manifests(folder: Path) -> None:
    """A table of something else is passed over; captions beside the media come first; of several none is chosen."""
    (folder / "sizes.csv").write_text("video,width\na b.mp4,3\n")
    STYLES["data.parquet"](folder / "data.parquet")
    assert captions(listed(folder)) == WANTED
    STYLES["excel.csv"](folder / "excel.csv")
    with pytest.raises(
        UserError,
        match=r"2 media without a caption beside them.*\(data.parquet, excel.csv, sizes.csv\): name one of them",
    ):
        listed(folder)
    (folder / "data.parquet").write_bytes(b"")
    with pytest.raises(UserError, match=r"\(set/data.parquet, set/excel.csv, set/sizes.csv\): name one of them"):
        listed(folder.parent)
    (folder / "a b.caption").write_text("beside it")
    listing = listed(folder)
    assert captions(listing) == {"a b.mp4": ("beside it",)}
    assert reasons(listing)["excel.csv"] == Reason.NOT_MEDIA and reasons(listing)[NAMES[1]] == Reason.NO_CAPTION


def test_lists_of_unlike_length(folder: Path) -> None:
    STYLES["videos.txt"](folder / "videos.txt")
    (folder / "prompts.txt").write_text(WORDS[0])
    with pytest.raises(UserError, match=r"differ in length: captions end before line 2"):
        listed(folder)
    (folder / "prompts.txt").unlink()
    with pytest.raises(UserError, match=r"has no list of captions beside it \(prompts.txt, prompt.txt, captions.txt\)"):
        listed(folder / "videos.txt")


def test_no_captions_and_bad_rows_say_why(folder: Path) -> None:
    with pytest.raises(UserError, match=r"2 no_caption: .*data\.missing_caption"):
        fit_data(folder)
    tree = {
        "data": {"sources": [{"path": str(folder)}], "cache": str(folder / "cache"), "buckets": BUCKETS},
        "vae": {"kind": "linear"},
    }
    config = make_config(tree, (), origin="test")
    assert any("data.missing_caption" in problem for problem in check(config).problems)
    with pytest.raises(UserError, match=r"2 no_caption.*data\.missing_caption"):
        CacheBuilder(config).run()
    rows = [
        {"video": None, "caption": "a"},
        {"video": "  "},
        {"video": 3},
        {"video": NAMES[0], "caption": {}},
        [1],
        {"video": NAMES[0], "split": "x"},
        {"video": NAMES[0], "split": ["val"]},
    ]
    (folder / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    for place in (folder / "m.jsonl", folder):
        with pytest.raises(
            UserError, match=r"8 bad_row: The manifest row .* m.jsonl line 1: 'video' names no file: it is missing"
        ):
            fit_data(place)
    details = [rejection.detail.partition(": ")[2] for rejection in listed(folder / "m.jsonl").rejections]
    assert details[:3] == [f"'video' names no file: it is {what}" for what in ("missing", "empty", "of type int")]
    assert details[3].startswith("the caption is a dict") and details[4] == "a JSON list, not an object"
    assert details[5] == "'split' is 'x', neither train nor val" and details[7].startswith("not JSON: ")
    assert details[6] == "'split' is ['val'], neither train nor val"


@pytest.mark.parametrize(
    ("data", "says"), [(b"{}", "holds a JSON dict, not an array"), (b"[1", "is not JSON"), (b"[]", "holds no rows")]
)
def test_broken_arrays(folder: Path, data: bytes, says: str) -> None:
    (folder / "m.json").write_bytes(data)
    with pytest.raises(UserError, match=says):
        listed(folder / "m.json")
