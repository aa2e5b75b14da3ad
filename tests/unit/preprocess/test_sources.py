"""Listing of folders, manifests and tars: nothing uncounted, nothing trusted, and errors that say what to do."""

from __future__ import annotations

import csv
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import webdataset
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.config.schema import DataConfig
from mmspeed.errors import UserError
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.preprocess.sources.captions import clean_caption
from mmspeed.preprocess.sources.discover import SourceListing, content_id, list_sources
from tests.support.listing import BUCKETS, listed
from tests.support.media import write_hostile_tar, write_tar


def reasons(listing: SourceListing) -> dict[str, Reason]:
    return {rejection.source: rejection.reason for rejection in listing.rejections}


def captions(listing: SourceListing) -> dict[str, tuple[str, ...]]:
    return {source.name: source.captions for source in listing.sources}


def accounted(listing: SourceListing) -> int:
    counted = len(listing.sources) + listing.beyond_limit + listing.caption_files
    return counted + len(listing.rejections) + listing.ignored


def media(path: Path, data: bytes = b"media") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


# -- folders ----------------------------------------------------------------------------------------------------------


def test_folder_counts_every_file(tmp_path: Path) -> None:
    for name in ("b.mp4", "a.MP4", "deep/er/c.jpg", "bare.png", "notes.pdf", ".DS_Store", "blank.webm"):
        media(tmp_path / name)
    for name, text in {"a": " a  cat\n", "b": "b", "deep/er/c": "c", "orphan": "nobody", "blank": "\n"}.items():
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "gone.mp4").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe.mp4")
    listing = listed(tmp_path)
    assert captions(listing) == {"a.MP4": ("a cat",), "b.mp4": ("b",), "deep/er/c.jpg": ("c",)}
    assert [source.kind for source in listing.sources] == ["video", "video", "image"]
    assert reasons(listing) == {
        "bare.png": Reason.NO_CAPTION,
        "blank.webm": Reason.NO_CAPTION,
        "notes.pdf": Reason.NOT_MEDIA,
        "orphan.txt": Reason.ORPHAN_CAPTION,
        "gone.mp4": Reason.MISSING_FILE,
        "pipe.mp4": Reason.NOT_MEDIA,
    }
    assert (listing.ignored, listing.caption_files, listing.files) == (1, 4, 14)
    assert accounted(listing) == listing.files


@settings(max_examples=25, deadline=None)
@given(
    st.sets(
        st.tuples(
            st.sampled_from(["", "x/", "x/y/", ".h/"]),
            st.sampled_from(["a", "b.c", ".d", "é"]),
            st.sampled_from([".mp4", ".txt", ".json", ".jpg", ".pdf", ""]),
        ),
        max_size=25,
    ),
    st.integers(1, 5),
)
def test_any_folder_is_accounted_for(tmp_path_factory: pytest.TempPathFactory, names: set[Any], limit: int) -> None:
    root = tmp_path_factory.mktemp("any")
    media(root / "always.mp4")
    (root / "always.txt").write_text("always")
    for folder, stem, ending in names:
        media(root / folder / (stem + ending), b'"words"')
    listing = listed(root, limit=limit, format="folder")
    hidden = [folder for folder, _, _ in names if folder.startswith(".")]
    assert listing.files == len(names) - len(hidden) + bool(hidden) + 2 == accounted(listing)  # a hidden folder is one
    assert len(listing.sources) <= limit
    assert listed(root, limit=limit, format="folder") == listing


def test_folder_json_captions(tmp_path: Path) -> None:
    trees: dict[str, Any] = {
        "list": ["one", "two", "one"],
        "dict": {"caption": "x"},
        "key": {"text": ["y", ""]},
        "bad": {"caption": 3},
    }
    for name, tree in trees.items():
        media(tmp_path / f"{name}.mp4")
        (tmp_path / f"{name}.json").write_text(json.dumps(tree))
    listing = listed(tmp_path, caption_column="text")
    assert captions(listing) == {"dict.mp4": ("x",), "key.mp4": ("y",), "list.mp4": ("one", "two")}
    assert reasons(listing) == {"bad.mp4": Reason.NO_CAPTION}


def test_folder_links_in_circles_end(tmp_path: Path) -> None:
    media(tmp_path / "a" / "v.mp4")
    (tmp_path / "a" / "v.txt").write_text("v")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    assert [source.name for source in listed(tmp_path).sources] == ["a/v.mp4"]


def test_undecodable_file_names_and_texts_stay_valid_unicode(tmp_path: Path) -> None:
    raw = os.fsencode(tmp_path) + b"/caf\xe9"
    with open(raw + b".mp4", "wb") as file:
        file.write(b"x")
    with open(raw + b".txt", "wb") as file:
        file.write(b"caf\xe9 \x00\x1b[1m bold\x7f")
    assert reasons(listed(tmp_path)) == {"caf\\udce9.mp4": Reason.CAPTION_ENCODING}
    (source,) = listed(tmp_path, caption_encoding="cp1252").sources
    assert source.name == "caf\\udce9.mp4"
    assert source.captions == ("café [1m bold",)
    assert source.open().read() == b"x"


@given(st.text(), st.integers(1, 30))
def test_clean_caption_properties(text: str, limit: int) -> None:
    clean, cut, _, _ = clean_caption(text, limit)
    assert len(clean) <= limit and clean == clean.strip() and "  " not in clean
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in clean)
    assert clean_caption(clean, limit) == (clean, False, "\ufffd" in clean, False)
    assert cut == (len(clean_caption(text, 10**6)[0]) > limit)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda root: root / "nothing", "does not exist"),
        (lambda root: root / "owner" / "name", "hf download --repo-type dataset owner/name"),
        (lambda root: root, "holds no media.*looked for .*mp4"),
        (lambda root: media(root / "list.xlsx"), "cannot tell what it is"),
        (lambda root: media(root / "set.tar.gz"), "compressed tar"),
        (lambda root: media(root / "empty.jsonl", b"\n"), "no rows"),
        (lambda root: media(root / "all.jsonl", b"not json\n"), "is not jsonl: line 1"),
        (lambda root: media(root / "bad.parquet", b"PAR0"), "cannot be read as Parquet"),
        (lambda root: media(root / "zero.tar", b""), "holds no media.*empty tar"),
    ],
)
def test_places_without_media_are_errors_for_people(tmp_path: Path, make: Any, says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        listed(make(tmp_path))
    assert str(error.value).count("\n") <= 1


def test_tars_in_a_folder_are_hinted_at(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("a.mp4", b"x"), ("a.txt", b"a")])
    with pytest.raises(UserError, match=r"folder/\*\.tar"):
        listed(tmp_path)


# -- manifests --------------------------------------------------------------------------------------------------------

ROWS: list[dict[str, Any]] = [
    {"video": "clips/a.mp4", "caption": "a", "split": "train"},
    {"video": "clips/b.mp4", "caption": "b", "split": "val"},
    {"video": "clips/missing.mp4", "caption": "c", "split": ""},
    {"video": "clips/a.mp4", "caption": "a again", "split": None},
    {"video": "", "caption": "d", "split": "train"},
    {"video": "clips/b.mp4", "caption": "", "split": "train"},
    {"video": "clips/b.mp4", "caption": "e", "split": "test"},
]


def write_manifest(path: Path) -> Path:
    media(path.parent / "clips" / "a.mp4")
    media(path.parent / "clips" / "b.mp4")
    if path.suffix == ".jsonl":
        path.write_text("\n".join(json.dumps(row) for row in ROWS))
    elif path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(ROWS[0]))
            writer.writeheader()
            writer.writerows(ROWS)
    else:
        pq.write_table(pa.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize(("ending", "by_folder"), [("jsonl", True), ("csv", False), ("parquet", True)])
def test_manifests_agree(tmp_path: Path, ending: str, by_folder: bool) -> None:
    path = write_manifest(tmp_path / f"metadata.{ending}")
    listing = listed(tmp_path if by_folder else path)
    assert [(s.name, s.captions, s.split) for s in listing.sources] == [
        ("clips/a.mp4", ("a",), "train"),
        ("clips/b.mp4", ("b",), "val"),
        (f"metadata.{ending}/clips/a.mp4", ("a again",), "train"),
    ]
    assert [r.reason for r in listing.rejections] == [
        Reason.MISSING_FILE,
        Reason.BAD_ROW,
        Reason.NO_CAPTION,
        Reason.BAD_ROW,
    ]
    assert "neither train nor val" in listing.rejections[3].detail
    assert listing.files == len(ROWS) == accounted(listing)


@pytest.mark.parametrize(
    ("ending", "option"), [("jsonl", "media_column"), ("csv", "caption_column"), ("parquet", "caption_column")]
)
def test_missing_column_names_those_there_are(tmp_path: Path, ending: str, option: str) -> None:
    path = write_manifest(tmp_path / f"m.{ending}")
    with pytest.raises(UserError, match=f"no column 'file'; it has 'video', 'caption', 'split': set {option}"):
        listed(path, None, 100, **{option: "file"})


def test_missing_split_column_is_train(tmp_path: Path) -> None:
    path = write_manifest(tmp_path / "m.jsonl")
    assert {s.split for s in listed(path, split_column="subset").sources} == {"train"}
    assert {s.split for s in listed(path, split_column=None).sources} == {"train"}


def test_csv_rows_with_unquoted_commas_are_not_guessed_at(tmp_path: Path) -> None:
    media(tmp_path / "a.mp4")
    (tmp_path / "m.csv").write_text('video,caption\na.mp4,a cat, sitting\na.mp4\na.mp4,"a cat, sitting"\n')
    listing = listed(tmp_path / "m.csv")
    assert captions(listing) == {"a.mp4": ("a cat, sitting",)}
    assert reasons(listing) == {"m.csv:2": Reason.BAD_ROW, "m.csv:3": Reason.BAD_ROW}


# -- tars -------------------------------------------------------------------------------------------------------------


def test_webdataset_tars_are_read_in_place(tmp_path: Path) -> None:
    for shard in range(2):
        with webdataset.TarWriter(str(tmp_path / f"set-{shard}.tar")) as writer:
            for number in range(3):
                key = f"s{shard}/{number:04d}"
                caption = {"txt": f"caption {number}"} if shard else {"json": {"caption": f"caption {number}", "w": 9}}
                writer.write({"__key__": key, "mp4": f"media {shard} {number}".encode(), "cls": 3, **caption})
    listing = listed(tmp_path / "set-*.tar")
    assert [s.name for s in listing.sources] == [f"set-{s}.tar!s{s}/{n:04d}.mp4" for s in (0, 1) for n in range(3)]
    assert [s.open().read() for s in listing.sources] == [f"media {s} {n}".encode() for s in (0, 1) for n in range(3)]
    assert [s.captions for s in listing.sources] == [(f"caption {n}",) for _ in (0, 1) for n in range(3)]
    assert (listing.ignored, listing.caption_files, listing.files) == (6, 6, 18)
    assert accounted(listing) == listing.files


def test_hostile_members_are_named_and_left_alone(tmp_path: Path) -> None:
    expected = write_hostile_tar(tmp_path / "t.tar", b"media")
    listing = listed(tmp_path / "t.tar")
    good = [name for name, why in expected.items() if not why]
    assert [s.name for s in listing.sources] == [f"t.tar!{name}" for name in good]
    for name, why in expected.items():
        if why:
            assert reasons(listing)[f"t.tar!{name}"] in why
    assert accounted(listing) == listing.files == 13
    assert sorted(p.name for p in tmp_path.parent.glob("evil*")) == []


def test_samples_without_media_or_caption(tmp_path: Path) -> None:
    members = [("a.txt", b"x"), ("b.mp4", b"x"), ("c.npy", b"x"), ("._d.mp4", b"x"), ("e.mp4", b"x"), ("e.cap", b"e")]
    listing = listed(write_tar(tmp_path / "t.tar", members))
    assert captions(listing) == {"t.tar!e.mp4": ("e",)}
    assert reasons(listing) == {
        "t.tar!a.txt": Reason.ORPHAN_CAPTION,
        "t.tar!b.mp4": Reason.NO_CAPTION,
        "t.tar!c.npy": Reason.NOT_MEDIA,
    }
    assert accounted(listing) == listing.files == 6


@pytest.mark.parametrize("keep", [5000, 2560, 2600, 4096 + 30])
def test_cut_tars_give_what_is_whole(tmp_path: Path, keep: int) -> None:
    path = write_tar(
        tmp_path / "t.tar", [("a.txt", b"a"), ("a.mp4", b"m" * 600), ("b.txt", b"b"), ("b.mp4", b"n" * 600)]
    )
    path.write_bytes(path.read_bytes()[:keep])
    listing = listed(path)
    assert [s.open().read() for s in listing.sources] == [b"m" * 600] + [b"n" * 600] * (keep >= 5000)
    assert (Reason.TRUNCATED in reasons(listing).values()) == (keep not in (5120, 2560))
    assert accounted(listing) == listing.files


def test_a_pipe_that_is_called_a_tar_is_rejected_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "t.tar")
    with pytest.raises(UserError, match=r"holds no media \(t\.tar: not a regular file\)"):
        listed(tmp_path / "t.tar")


def test_compressed_tar_under_a_plain_name(tmp_path: Path) -> None:
    plain = write_tar(tmp_path / "ok.tar", [("a.txt", b"a"), ("a.mp4", b"m")])
    (tmp_path / "zip.tar").write_bytes(gzip.compress(plain.read_bytes()))
    listing = listed(tmp_path / "*.tar")
    assert captions(listing) == {"ok.tar!a.mp4": ("a",)}
    assert reasons(listing) == {"zip.tar": Reason.UNDECODABLE}


# -- several places, ids ----------------------------------------------------------------------------------------------


def test_names_stay_unique_over_several_places(tmp_path: Path) -> None:
    for place in ("one", "two"):
        media(tmp_path / place / "v.mp4")
        (tmp_path / place / "v.txt").write_text(place)
    sources = [{"path": str(tmp_path / place)} for place in ("one", "two", "two")]
    listing = list_sources(DataConfig(sources=sources, buckets=BUCKETS))
    assert [source.name for source in listing.sources] == ["v.mp4", "two/v.mp4", "v.mp4#2"]


def test_content_id_is_of_the_content(tmp_path: Path) -> None:
    data = os.urandom(70_000)
    media(tmp_path / "a.mp4", data)
    (tmp_path / "a.txt").write_text("a")
    (plain,) = listed(tmp_path).sources
    (member,) = listed(write_tar(tmp_path / "t.tar", [("x.txt", b"x"), ("x.mp4", data)])).sources
    assert content_id(plain, False) == content_id(member, False) == content_id(plain, True)
    media(tmp_path / "a.mp4", data[:-1] + bytes([data[-1] ^ 1]))
    assert content_id(plain, False) != content_id(member, False)
    (tmp_path / "a.mp4").unlink()
    with pytest.raises(Rejected) as rejected:
        content_id(plain, False)
    assert rejected.value.reason is Reason.MISSING_FILE


def test_content_id_of_large_files_samples_blocks(tmp_path: Path) -> None:
    size = (16 << 20) + 1
    media(tmp_path / "a.mp4", bytes(size))
    (tmp_path / "a.txt").write_text("a")
    (source,) = listed(tmp_path).sources
    sampled, full = content_id(source, False), content_id(source, True)
    assert sampled != full

    def changed(at: int) -> tuple[bool, bool]:
        with open(tmp_path / "a.mp4", "r+b") as file:
            file.seek(at)
            file.write(b"\1")
        now = content_id(source, False) != sampled, content_id(source, True) != full
        with open(tmp_path / "a.mp4", "r+b") as file:
            file.seek(at)
            file.write(b"\0")
        return now

    assert changed(0) == changed(size - 1) == (True, True)
    assert changed(100_000) == (False, True)  # between the first two blocks
