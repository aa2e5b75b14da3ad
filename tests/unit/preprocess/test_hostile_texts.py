"""Hostile tables and captions: of megabytes, of gigabytes once unpacked, of no text, of no end. Bounded, refused and counted."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.errors import UserError
from mmspeed.media.rejections import Reason
from mmspeed.preprocess.sources import parquet_rows
from mmspeed.preprocess.sources.captions import MAX_CAPTION_BYTES, MAX_CAPTIONS
from tests.support.listing import listed
from tests.unit.preprocess.test_sources import accounted, captions, media, reasons

# -- how much memory a listing takes ----------------------------------------------------------------------------------

_PEAK = """
import resource, sys
from tests.support.listing import listed
from mmspeed.errors import UserError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    listing = listed(sys.argv[1])
    print(len(listing.sources), len(listing.rejections), listing.captions_cut, listing.captions_dropped)
except UserError as error:
    print(str(error)[:500])
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
"""


def listed_apart(path: Path) -> tuple[str, float]:
    """The result of a listing in a separate process, and the growth of its peak of memory in MB."""
    root = Path(__file__).parents[3]
    run = subprocess.run(
        [sys.executable, "-c", _PEAK, str(path)], capture_output=True, text=True, cwd=root, check=True,
        env=os.environ | {"PYTHONPATH": str(root)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (6 << 30, 6 << 30)),
    )  # fmt: skip
    said, grown = run.stdout.rsplit("\n", 2)[:2]
    return said, int(grown) / 1e6


@pytest.mark.slow
def test_lines_without_end(tmp_path: Path) -> None:
    media(tmp_path / "a.mp4")
    good = b'{"video": "a.mp4", "caption": "words"}\n'
    (tmp_path / "m.jsonl").write_bytes(good + b'{"video": "' + b"a" * 60_000_000 + b'"}\n' + good + b"[" * 50_000_000)
    said, grown = listed_apart(tmp_path / "m.jsonl")
    assert said == "2 2 0 0"
    assert grown < 40
    (tmp_path / "m.csv").write_bytes(b"video,caption\na.mp4,words\na.mp4," + b"x" * 60_000_000 + b"\na.mp4,words\n")
    said, grown = listed_apart(tmp_path / "m.csv")
    assert said == "2 1 0 0"
    assert grown < 40


def write_table(path: Path, rows: int, caption: str, **options: Any) -> Path:
    """A table of one media file and one caption, `rows` times; the caption is written once."""
    media(path.parent / "a.mp4")
    indices = pa.array([0] * rows, pa.int32())
    columns = {"video": "a.mp4", "caption": caption}
    table = {name: pa.DictionaryArray.from_arrays(indices, pa.array([text])) for name, text in columns.items()}
    pq.write_table(pa.table(table), path, store_schema=False, **options)
    return path


@pytest.mark.slow
def test_table_that_names_one_long_text_often(tmp_path: Path) -> None:
    path = write_table(tmp_path / "m.parquet", 40, "z" * 20_000_000, compression="zstd")
    assert path.stat().st_size < 100_000  # 0.8 GB of captions
    said, grown = listed_apart(path)
    assert said == "40 0 40 0"
    assert grown < 200


def test_table_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_table(tmp_path / "m.parquet", 12, "z" * 20_000_000, compression="zstd")
    monkeypatch.setattr(parquet_rows, "_MAX_CHUNK_BYTES", 10_000_000)
    with pq.ParquetFile(path) as file:
        with pytest.raises(ValueError, match=r"'caption' of row group 0 unpacks to 20 MB .* smaller row groups"):
            parquet_rows._check_size(str(path), file, ["caption"])
        assert parquet_rows._check_size(str(path), file, ["video"]) == ["video"]


def test_reader_that_dies_is_an_error_for_people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_table(tmp_path / "m.parquet", 3, "words")
    head, row = '{"names": ["video", "caption"], "read": ["video", "caption"]}', '["end", "end"]'
    (tmp_path / "python").write_text(f"#!/bin/sh\necho '{head}'\necho '{row}'\nprintf '[\"vi'\nkill -ABRT $$\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(UserError, match=r"its reader died \(SIGABRT\) after 1 rows"):
        listed(path)


# -- tables -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("captions", "good"),
    [
        (pa.array([{"a": "x"}]), None),
        (pa.array([[("k", "v")]], pa.map_(pa.string(), pa.string())), None),
        (pa.array([b"x"], pa.binary()), None),
        (pa.array([10**15], pa.timestamp("us", "No/Where")), None),
        (pa.array(["x"]).dictionary_encode(), ("x",)),
        (pa.array([["x", "y", None]]), None),
        (pa.array([["x", "y"]]), ("x", "y")),
        (pa.array([None], pa.null()), ()),
        (pa.ExtensionArray.from_storage(pa.json_(), pa.array(['"x"'])), ('"x"',)),
    ],
    ids=lambda value: str(getattr(value, "type", "")),
)
def test_captions_of_every_type(tmp_path: Path, captions: Any, good: tuple[str, ...] | None) -> None:
    media(tmp_path / "a.mp4")
    pq.write_table(pa.table({"video": pa.array(["a.mp4"]), "caption": captions}), tmp_path / "m.parquet")
    listing = listed(tmp_path / "m.parquet")
    assert accounted(listing) == listing.files == 1
    if good:
        assert listing.sources[0].captions == good
    else:
        assert listing.rejections[0].reason is (Reason.BAD_ROW if good is None else Reason.NO_CAPTION)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_any_damage_of_a_table_is_an_error_for_people(data: st.DataObject) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = write_table(Path(folder) / "m.parquet", 20, "some words")
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        try:
            listing = listed(path)
        except UserError as error:
            assert str(error).isprintable()
            return
        assert accounted(listing) == listing.files


def test_hostile_names_of_columns_are_shown_short_and_plain(tmp_path: Path) -> None:
    names = [f"\x1b[2J\u202e{number}" + "n" * 10_000 for number in range(100)]
    (tmp_path / "m.csv").write_text(",".join(names) + "\n")
    (tmp_path / "m.jsonl").write_text(json.dumps(dict.fromkeys(names, 1)) + "\n")
    for place in ("m.csv", "m.jsonl"):
        with pytest.raises(UserError, match="and 80 more: set media_column") as error:
            listed(tmp_path / place)
        assert str(error.value).isprintable() and len(str(error.value)) < 4000


def test_hostile_csv_rows(tmp_path: Path) -> None:
    media(tmp_path / "a.mp4")
    rows = [
        b"a.mp4,words",
        b"a.mp4,nul\0inside",
        b"a.mp4," + b"x" * 200_000,
        b'a.mp4,"y' + b'"" y' * 50_000 + b'"',
        b"a.mp4,end",
    ]
    (tmp_path / "m.csv").write_bytes(b"video,caption\n" + b"\n".join(rows) + b"\n")
    listing = listed(tmp_path / "m.csv")
    assert listing.sources[0].captions == ("words",) and listing.sources[-1].captions == ("end",)
    assert {"m.csv:4", "m.csv:5"} <= set(reasons(listing)) and set(reasons(listing).values()) == {Reason.BAD_ROW}
    assert accounted(listing) == listing.files == 5


def test_hostile_jsonl_rows(tmp_path: Path) -> None:
    media(tmp_path / "a.mp4")
    rows = [
        b'{"video": "a.mp4", "caption": ' + b"9" * 100_000 + b"}",
        b'{"video": "a.mp4", "caption": ' + b'{"a":' * 500_000 + b"}",
        b'{"video": "a.mp4", "caption": NaN}',
        b'{"video": "\\ud800.mp4", "caption": "x"}',
        b'{"video": "' + b"../" * 100_000 + b'a.mp4", "caption": "x"}',
        b'{"video": "/dev/zero", "caption": "x"}',
        b'{"video": ["a.mp4"], "caption": "x"}',
        b'{"video": "a.mp4", "caption": "x", "split": {"a": 1}}',
        b"\0\0\0",
    ]
    (tmp_path / "m.jsonl").write_bytes(b"\n".join(rows) + b"\n")
    listing = listed(tmp_path / "m.jsonl")
    assert listing.sources == [] and accounted(listing) == listing.files == len(rows)
    counted = Counter(rejection.reason for rejection in listing.rejections)
    assert counted == {Reason.BAD_ROW: 5, Reason.MISSING_FILE: 2, Reason.NO_CAPTION: 1, Reason.NOT_MEDIA: 1}


# -- captions ---------------------------------------------------------------------------------------------------------


def listed_caption(folder: Path, data: bytes, name: str = "a.txt", **options: Any) -> Any:
    folder.mkdir(exist_ok=True)
    media(folder / "a.mp4")
    (folder / name).write_bytes(data)
    listing = listed(folder, **options)
    assert accounted(listing) == listing.files == 2
    return listing


def test_caption_of_megabytes_is_cut_and_counted(tmp_path: Path) -> None:
    listing = listed_caption(tmp_path, "wörds ".encode() * 500_000)
    assert listing.captions_cut == len(listing.sources) == 1
    assert len(listing.sources[0].captions[0]) in (4095, 4096)
    listing = listed_caption(tmp_path, "é".encode() * MAX_CAPTION_BYTES, max_caption_chars=10**9)
    assert listing.captions_cut == len(listing.sources) == 1
    assert len(listing.sources[0].captions[0]) == MAX_CAPTION_BYTES // 2
    listing = listed_caption(tmp_path, b"x" + "é".encode() * MAX_CAPTION_BYTES, max_caption_chars=10**9)
    assert listing.captions_cut == len(listing.sources) == 1  # a sign cut in two is no damage


def test_white_space_alone_is_no_caption(tmp_path: Path) -> None:
    for number, data in enumerate(
        (b" " * (3 << 20), b"\0" * 5000, "\u200b\u202e\ufeff\u3000\u2028".encode(), b"\xef\xbb\xbf")
    ):
        assert reasons(listed_caption(tmp_path / str(number), data)) == {"a.mp4": Reason.NO_CAPTION}


@pytest.mark.parametrize(
    ("text", "clean", "stripped"),
    [
        ("a\x1b[31mred\x07", "a[31mred", True),
        ("pay \u202egnp.exe\u202c now", "pay gnp.exe now", True),
        ("a\u200bb\ufeffc\u2060d", "abcd", True),
        ("a" + "\u200d" * 5000 + "b", "a\u200d\u200db", True),
        ("\U0001f468\u200d\U0001f469\u200d\U0001f467 \u2764\ufe0f\u200d\U0001f525",) * 2 + (False,),
        ("می\u200cخواهم",) * 2 + (False,),
        ("tab\tand\nline\u2028end", "tab and line end", False),
    ],
)
def test_control_and_unseen_signs_are_taken_out_and_counted(
    tmp_path: Path, text: str, clean: str, stripped: bool
) -> None:
    listing = listed_caption(tmp_path, text.encode())
    assert captions(listing) == {"a.mp4": (clean,)}
    assert (listing.captions_stripped, listing.captions_cut) == (stripped, 0)


@pytest.mark.parametrize("data", [b"\xff" * 3000, b"\xff\xfe\x00\xd8" + b"a\0", b"\xed\xa0\x80"])
def test_what_is_no_unicode_is_rejected(tmp_path: Path, data: bytes) -> None:
    listing = listed_caption(tmp_path, data)
    assert reasons(listing) == {"a.mp4": Reason.CAPTION_ENCODING}
    assert "data.caption_encoding" in listing.rejections[0].detail and listing.rejections[0].detail.encode()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"[" * 1_000_000, "nested too deep"),
        (b"7", "a int"),
        (b"!!python/object/apply:os.system [id]", "not JSON"),
        (b'["' + b"x" * (2 << 20) + b'"]', "larger than"),
    ],
)
def test_hostile_json_captions_say_why_there_is_none(tmp_path: Path, data: bytes, says: str) -> None:
    listing = listed_caption(tmp_path, data, "a.json")
    assert [(r.source, r.reason) for r in listing.rejections] == [("a.mp4", Reason.NO_CAPTION)]
    assert says in listing.rejections[0].detail


def test_a_clip_keeps_so_many_captions(tmp_path: Path) -> None:
    many = [f"caption {number}" for number in range(MAX_CAPTIONS + 50)]
    listing = listed_caption(tmp_path, json.dumps([*many, *many[:20]]).encode(), "a.json")
    assert listing.sources[0].captions == tuple(many[:MAX_CAPTIONS])
    assert listing.captions_dropped == 50
