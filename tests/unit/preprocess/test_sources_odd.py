"""Listing of odd places: what may not be read, broken tables, bytes that are no text, and names that are no plain words."""

from __future__ import annotations

import builtins
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mmspeed.errors import UserError
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.preprocess.sources.fetched import MediaStore
from tests.support.listing import listed
from tests.support.media import write_tar
from tests.unit.preprocess.test_sources import accounted, captions, media, reasons


def pair(path: Path, caption: bytes = b"words") -> Path:
    path.with_suffix(".txt").parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".txt").write_bytes(caption)
    return media(path)


def forbid(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """`path` cannot be opened or listed, as modes would have it; for root, who is above modes, too."""

    def guarded(call: Callable[..., Any]) -> Callable[..., Any]:
        def guard(name: Any, *args: Any, **options: Any) -> Any:
            if not isinstance(name, int) and os.fspath(name) == str(path):
                raise PermissionError(13, "Permission denied", str(path))
            return call(name, *args, **options)

        return guard

    monkeypatch.setattr(os, "scandir", guarded(os.scandir))
    monkeypatch.setattr(builtins, "open", guarded(open))


def test_unreadable_folder_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair(tmp_path / "a.mp4")
    pair(tmp_path / "in" / "closed" / "b.mp4")
    forbid(monkeypatch, tmp_path / "in" / "closed")
    listing = listed(tmp_path)
    (rejection,) = listing.rejections
    assert (rejection.source, rejection.reason) == ("in/closed/", Reason.UNREADABLE)
    assert rejection.detail == "the folder cannot be read: no permission to read it"
    assert accounted(listing) == listing.files == 3


def test_unreadable_caption_rejects_its_media(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair(tmp_path / "a.mp4")
    pair(tmp_path / "b.mp4")
    forbid(monkeypatch, tmp_path / "a.txt")
    listing = listed(tmp_path)
    assert captions(listing) == {"b.mp4": ("words",)}
    assert reasons(listing) == {"a.mp4": Reason.UNREADABLE}
    assert "a.txt" in listing.rejections[0].detail
    assert accounted(listing) == listing.files == 4


def test_unreadable_tar_is_rejected_and_manifest_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("0", "1"):
        write_tar(tmp_path / f"{name}.tar", [("a.mp4", b"x"), ("a.txt", b"a")])
    (tmp_path / "m.csv").write_text("video,caption\n")
    forbid(monkeypatch, tmp_path / "0.tar")
    listing = listed(tmp_path / "*.tar")
    assert (captions(listing), reasons(listing)) == ({"1.tar!a.mp4": ("a",)}, {"0.tar": Reason.UNREADABLE})
    assert accounted(listing) == listing.files
    forbid(monkeypatch, tmp_path / "m.csv")
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        listed(tmp_path / "m.csv")


# -- tables -----------------------------------------------------------------------------------------------------------


def test_unclosed_quote_is_a_bad_row_named_by_its_first_line(tmp_path: Path) -> None:
    media(tmp_path / "a.mp4")
    (tmp_path / "m.csv").write_text('video,caption\na.mp4,"one\nand more"\na.mp4,"two\na.mp4,x\na.mp4,"three, four"\n')
    listing = listed(tmp_path / "m.csv")
    assert captions(listing) == {"a.mp4": ("one and more",)}
    assert reasons(listing) == {"m.csv:4": Reason.BAD_ROW}
    assert "m.csv line 4" in listing.rejections[0].detail and "lines 4 to 6" in listing.rejections[0].detail
    assert accounted(listing) == listing.files == 2


def test_broken_header_and_columns_of_one_name(tmp_path: Path) -> None:
    media(tmp_path / "a.mp4")
    table = tmp_path / "m.csv"
    table.write_text('video,"caption\na.mp4,x\n')
    with pytest.raises(UserError, match="broken header in line 1"):
        listed(table)
    table.write_text("video,caption, caption\na.mp4,x,y\n")
    with pytest.raises(UserError, match="2 columns 'caption'"):
        listed(table)
    table.write_text("video,caption,note,note\na.mp4,x,y,z\n")
    assert captions(listed(table)) == {"a.mp4": ("x",)}
    columns = [pa.array(["a.mp4"]), pa.array(["x"]), pa.array(["y"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["video", "caption", "video"]), tmp_path / "m.parquet")
    with pytest.raises(UserError, match="2 columns 'video'"):
        listed(tmp_path / "m.parquet")


ODD = r"""http://[::1 http://[::1]:99/x http:// https:// s3:// hf:// hf://x hf://datasets/x gs:// gs://b/x.mp4 :// a:// foo://x.mp4
    ssh://user@h/x git://x FILE:///x file:///etc/hostname file:// local:///etc/hostname http://127.0.0.1:9/x http://10.0.0.1:99999/x
    http://10.0.0.1:abc/x simplecache::s3://b/x zip://*::file:///a.zip data://x reference://x ftp://127.0.0.1/x http:///etc/passwd smb://h/x
    dask://x libarchive://x::y hdfs://h:1/x jupyter://127.0.0.1/x s3://[::1]/x github://a:b@/x http://user:pw@[fe80::1%25lo]/x
    ~root/x http:/x data:text/plain,x \\\\server\\share / . CON""".split()


def test_rows_are_rejected_by_name_whatever_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMSPEED_CACHE", str(tmp_path / "store"))
    media(tmp_path / "a.mp4")
    odd = [
        *ODD,
        "http://\ud800/x",
        "http://10.0.0.1 b/x",
        "http://a\u2028/x",
        f"http://{'a' * 300}/x",
        "x" * 5000,
        "\ud800",
        "\0",
        " ",
    ]
    rows = [{"video": one, "caption": "c"} for one in [*odd, None, 1, 10**400, float("inf"), [], {"url": "x"}]]
    rows += [{"video": "a.mp4", "caption": one} for one in (1, {}, [1], [["x"]], "last")]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    listing, store = listed(tmp_path / "m.jsonl"), MediaStore(10**9)
    for source in listing.sources[:-1]:
        with pytest.raises(Rejected), store.local(source):
            pass
    assert listing.sources[-1].captions == ("last",) and accounted(listing) == len(rows)


def test_nan_is_missing_and_rejections_name_their_line(tmp_path: Path) -> None:
    media(tmp_path / "a.mp4")
    nan = float("nan")
    rows: list[dict[str, Any]] = [
        {"video": "a.mp4", "caption": "x", "split": nan},
        {"video": "a.mp4", "caption": nan, "split": "val"},
        {"video": nan, "caption": "x"},
        {"video": "gone.mp4", "caption": "x"},
        {"video": "a.mp4", "caption": 3.5},
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    listing = listed(tmp_path / "m.jsonl")
    assert [(s.captions, s.split) for s in listing.sources] == [(("x",), "train")]
    assert [r.reason for r in listing.rejections] == [
        Reason.NO_CAPTION,
        Reason.BAD_ROW,
        Reason.MISSING_FILE,
        Reason.BAD_ROW,
    ]
    for number, rejection in enumerate(listing.rejections, 2):
        assert f"m.jsonl line {number}" in rejection.detail


# -- bytes that are no text -------------------------------------------------------------------------------------------


def test_captions_that_are_no_text_are_rejected_in_every_format(tmp_path: Path) -> None:
    bad = b"caf\xe9"
    places = [tmp_path / "folder", tmp_path / "m.jsonl", tmp_path / "m.csv", tmp_path / "m.parquet"]
    pair(tmp_path / "folder" / "a.mp4", bad)
    pair(tmp_path / "folder" / "b.mp4", "fine é".encode())
    pair(tmp_path / "folder" / "c.mp4", "lost \ufffd before".encode())
    media(tmp_path / "a.mp4")
    places[1].write_bytes(b'{"video": "a.mp4", "caption": "' + bad + b'"}\n{"video": "a.mp4", "caption": "fine"}\n')
    places[2].write_bytes(b"video,caption\na.mp4," + bad + b"\na.mp4,fine\n")
    text = pa.Array.from_buffers(pa.string(), 2, pa.array([bad, b"fine"], pa.binary()).buffers())
    pq.write_table(pa.table({"video": ["a.mp4", "a.mp4"], "caption": text}), places[3])
    places.append(write_tar(tmp_path / "t.tar", [("a.mp4", b"x"), ("a.txt", bad), ("b.mp4", b"x"), ("b.txt", b"b")]))
    for place in places:
        listing = listed(place)
        (first, *others) = listing.rejections
        assert first.reason == Reason.CAPTION_ENCODING and "its caption is not UTF-8: 'caf\ufffd'" in first.detail, (
            place
        )
        assert "data.caption_encoding, such as gb18030" in first.detail and len(listing.sources) == 1, place
        assert [one.detail[:25] for one in others] == ["its caption holds U+FFFD,"] * (place.name == "folder"), place


KEPT = {  # words, encodings that the key names, and those that a mark shows
    "gb18030": "一个红色的球 €",
    "shift_jis": "赤いボール ソ表",
    "cp1252": "café “noir” €",
    "utf-16-le": "mark of none",
}


@pytest.mark.parametrize("encoding", KEPT)
def test_the_encoding_of_captions_and_manifests_is_named(tmp_path: Path, encoding: str) -> None:
    """Bytes alone do not tell encodings apart; a byte-order mark does, whatever the key says."""
    words, rows = KEPT[encoding], []
    pair(tmp_path / "folder" / "a.mp4", words.encode(encoding))
    pair(tmp_path / "folder" / "b.mp4", words.encode("utf-8-sig"))
    pair(tmp_path / "folder" / "c.mp4", words.encode("utf-16"))
    pair(tmp_path / "folder" / "d.mp4", words.encode("utf-32"))
    media(tmp_path / "a.mp4")
    places = {"m.csv": f"video;caption\na.mp4;{words}\n", "m.tsv": f"video\tcaption\r\na.mp4\t{words}\r\n"}
    places |= {"m.json": json.dumps([{"video": "a.mp4", "caption": words}], ensure_ascii=False), "m.jsonl": ""}
    places["m.jsonl"] = places["m.json"][1:-1] + "\n"
    for name, text in places.items():
        (tmp_path / name).write_bytes(text.encode(encoding))
        (tmp_path / f"marked-{name}").write_bytes(text.encode("utf-16"))
        rows += [tmp_path / name, tmp_path / f"marked-{name}"]
    assert set(captions(listed(tmp_path / "folder", caption_encoding=encoding)).values()) == {(words,)}
    for place in rows:
        assert captions(listed(place, caption_encoding=encoding)) == {"a.mp4": (words,)}, place
    for unknown in ("klingon", "rot13", "idna"):
        with pytest.raises(ValueError, match=f"'{unknown}' is not an encoding"):
            listed(tmp_path / "folder", caption_encoding=unknown)


@pytest.mark.parametrize(
    ("words", "written", "named"),
    [("a cat 中", "utf-16-le", None), ("größe", "utf-8", "cp1252"), ("一个红色的球", "utf-8", "gb18030")],
)
def test_captions_that_another_encoding_reads_as_other_words(
    tmp_path: Path, words: str, written: str, named: str | None
) -> None:
    pair(tmp_path / "a.mp4", words.encode(written))
    pair(tmp_path / "b.mp4", "联通 é".encode(named or "utf-8", "ignore"))
    (tmp_path / "m.csv").write_bytes(b"video,caption\na.mp4," + words.encode("utf-8") + b"\nb.mp4,b\n")
    for place in (tmp_path, *[tmp_path / "m.csv"] * (written == "utf-8")):
        (rejected,) = (one for one in listed(place, caption_encoding=named).rejections if "encoding" in one.reason)
        assert f"its caption is not {named or 'UTF-8'}: " in rejected.detail and rejected.source == "a.mp4"


def test_utf16_captions(tmp_path: Path) -> None:
    pair(tmp_path / "a.mp4", "\ufeffé".encode("utf-16-le"))
    pair(tmp_path / "b.mp4", "\ufeffé".encode("utf-16-le") + b"\x00")
    listing = listed(tmp_path)
    assert captions(listing) == {"a.mp4": ("é",)}
    assert reasons(listing) == {"b.mp4": Reason.CAPTION_ENCODING}


# -- names ------------------------------------------------------------------------------------------------------------


def test_only_the_star_is_a_wildcard(tmp_path: Path) -> None:
    folder = "set[1]"
    for place in (folder, "set1", "setx", "b"):
        (tmp_path / place).mkdir()
        write_tar(tmp_path / place / "0.tar", [("a.mp4", place.encode()), ("a.txt", b"a")])
    assert [s.open().read() for s in listed(tmp_path / folder / "*.tar").sources] == [folder.encode()]


def test_control_characters_in_names_are_shown_escaped(tmp_path: Path) -> None:
    root = tmp_path / "ro\not"
    pair(root / "a\x1b[2J\n.mp4")
    pair(root / "a\\x1b[2J\\n.mp4")
    media(root / "b\r.mp4")
    media(root / "c.p\x1bdf")
    listing = listed(root)
    assert sorted(s.name for s in listing.sources) == ["a\\x1b[2J\\n.mp4", "ro\\not/a\\x1b[2J\\n.mp4"]
    assert all(source.open().read() == b"media" for source in listing.sources)
    assert reasons(listing) == {"b\\r.mp4": Reason.NO_CAPTION, "c.p\\x1bdf": Reason.NOT_MEDIA}
    assert "\x1b" not in "".join(rejection.detail for rejection in listing.rejections)
