"""Hostile tars and names: made to lead out, to run code, to fill memory or to control terminals. All are refused and counted."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.errors import UserError
from mmspeed.preprocess.sources.containers import is_pickle
from mmspeed.preprocess.sources.rejections import Reason, Rejection
from mmspeed.preprocess.sources.tars import read_headers
from tests.support.listing import listed
from tests.support.media import write_tar
from tests.unit.preprocess.test_sources import accounted, captions, reasons

BARE_PICKLE = b"\x80\x04\x95\x1a\0\0\0\0\0\0\0\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94."


def zipped_pickle() -> bytes:
    """A file like those of torch: a zip whose first file is a pickle."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", BARE_PICKLE)
    return file.getvalue()


def object_array() -> bytes:
    """The head of a NumPy file whose data are a pickle."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "|O", "fortran_order": False, "shape": (1,)})
    return file.getvalue() + BARE_PICKLE


def plain_array() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


def header(name: str = "x.mp4", size: int = 0, kind: bytes = tarfile.REGTYPE, raw_size: bytes | None = None) -> bytes:
    """A tar header of any size field, with a right checksum."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size if raw_size is None else 0
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT)[:512])
    if raw_size is not None:
        block[124:136] = raw_size
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def member(name: str, data: bytes = b"media", kind: bytes = tarfile.REGTYPE) -> bytes:
    return header(name, len(data), kind) + data + bytes(-len(data) % 512)


def pax(fields: dict[str, str | bytes], kind: bytes = tarfile.XHDTYPE) -> bytes:
    """An extended header of these records."""
    data = b""
    for key, value in fields.items():
        record = b" " + key.encode() + b"=" + (value if isinstance(value, bytes) else value.encode()) + b"\n"
        length = len(record) + 1
        while len(str(length)) + len(record) != length:
            length = len(str(length)) + len(record)
        data += str(length).encode() + record
    return member("pax", data, kind)


GOOD = member("good.txt", b"words") + member("good.mp4")
END = bytes(1024)


def listed_tar(path: Path, *parts: bytes) -> Any:
    path.write_bytes(b"".join(parts) + END)
    listing = listed(path)
    assert accounted(listing) == listing.files
    return listing


LEAD_OUT = [
    *("../x.mp4", "a/../../x.mp4", "/x.mp4", "C:\\x.mp4", "C:x.mp4", "..\\x.mp4", "\\\\host\\x.mp4", "file:/x.mp4")
]


def test_names_that_lead_out_are_refused_however_they_are_written(tmp_path: Path) -> None:
    name = LEAD_OUT[0]
    evil = [
        *map(member, LEAD_OUT),
        pax({"path": name}) + member("x.mp4"),
        member("././@LongLink", name.encode() + b"\0", tarfile.GNUTYPE_LONGNAME) + member("x.mp4"),
        pax({"path": name}, tarfile.XGLTYPE) + member("x.mp4"),
    ]
    listing = listed_tar(tmp_path / "t.tar", GOOD, *evil)
    assert [source.name for source in listing.sources] == ["t.tar!good.mp4"]
    assert [rejection.reason for rejection in listing.rejections] == [Reason.UNSAFE_NAME] * len(evil)


def test_what_is_no_plain_file_is_refused(tmp_path: Path) -> None:
    kinds = {
        tarfile.SYMTYPE: "link",
        tarfile.LNKTYPE: "link",
        tarfile.CHRTYPE: "device",
        tarfile.FIFOTYPE: "device",
        tarfile.GNUTYPE_SPARSE: "sparse",
        b"Z": "device",
    }
    heads = [header(f"{number}.mp4", 0, kind) for number, kind in enumerate(kinds)]
    by_header = pax({"GNU.sparse.major": "1"}) + member("x.mp4", b"9" * 600)
    listing = listed_tar(tmp_path / "t.tar", *heads, by_header, GOOD)
    assert [source.name for source in listing.sources] == ["t.tar!good.mp4"]
    assert [rejection.reason for rejection in listing.rejections] == [Reason.UNSAFE_NAME] * (len(kinds) + 1)
    for rejection, says in zip(listing.rejections, [*kinds.values(), "sparse"], strict=True):
        assert says in rejection.detail


def test_endless_map_of_a_sparse_file_ends(tmp_path: Path) -> None:
    block = bytearray(header("x.mp4", 0, tarfile.GNUTYPE_SPARSE))
    block[482] = 1
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    listing = listed_tar(tmp_path / "t.tar", GOOD, bytes(block), b"\1" * 512 * 5000)
    assert reasons(listing) == {"t.tar": Reason.TRUNCATED}
    assert len(listing.sources) == 1


# sizes of a header, sizes of an extended header, and records of one that is damaged
RAW = [b"\x80" + b"\xff" * 11, b"\xff" * 11 + b"\0", b"\xff" * 12, b"77777777777\0", b"no number!!\0"]
SIZES = ["-1", "9" * 5000, "1e3", "0x5", ""]
RECORDS = [b"0 path=x\n", b"9999 path=x\n", b"path=x\n", b"9" * 30 + b" a=b\n"]
ENDS = [
    *(header("x.mp4", raw_size=raw) for raw in RAW),
    *(pax({"size": size}) for size in SIZES),
    *(member("pax", record, tarfile.XHDTYPE) for record in RECORDS),
]


@pytest.mark.parametrize("end", ENDS, ids=range(len(ENDS)))
def test_absurd_sizes_and_damaged_headers_end_the_tar_and_are_counted(tmp_path: Path, end: bytes) -> None:
    listing = listed_tar(tmp_path / "t.tar", GOOD, end, member("late.mp4"))
    assert [source.name for source in listing.sources] == ["t.tar!good.mp4"]
    assert reasons(listing)["t.tar"] is Reason.TRUNCATED


def test_long_names_are_refused_or_passed_over(tmp_path: Path) -> None:
    long = member("././@LongLink", b"n" * 5000 + b".mp4\0", tarfile.GNUTYPE_LONGNAME) + member("x.mp4")
    huge = member("././@LongLink", b"n" * (3 << 20), tarfile.GNUTYPE_LONGNAME) + member("y.mp4")
    listing = listed_tar(tmp_path / "t.tar", long, huge, pax({"comment": "c" * (2 << 20)}), member("z.mp4"), GOOD)
    assert [source.name for source in listing.sources] == ["t.tar!good.mp4"]
    assert [rejection.reason for rejection in listing.rejections] == [Reason.UNSAFE_NAME] * 3
    assert all(len(rejection.source) <= 1024 for rejection in listing.rejections)


def test_chained_headers_do_not_nest(tmp_path: Path) -> None:
    chain = b"".join(pax({"path": f"{number}.mp4"}) for number in range(3_000))
    listing = listed_tar(tmp_path / "t.tar", chain, member("x.mp4"), member("2999.txt", b"last"))
    assert captions(listing) == {"t.tar!2999.mp4": ("last",)}


def test_names_that_come_again_are_samples_of_their_own(tmp_path: Path) -> None:
    twice = b"".join(member("a.mp4", b"m%d" % n) + member("a.txt", b"caption %d" % n) for n in (1, 2, 3))
    listing = listed_tar(tmp_path / "t.tar", twice)
    assert [s.captions for s in listing.sources] == [("caption 1",), ("caption 2",), ("caption 3",)]
    assert [s.open().read() for s in listing.sources] == [b"m1", b"m2", b"m3"]
    assert len({s.name for s in listing.sources}) == 3


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4607), st.integers(0, 255)), max_size=12))
def test_any_damage_of_headers_is_accounted_for(damages: list[tuple[int, int]]) -> None:
    import tempfile

    data = bytearray(pax({"path": "long.mp4"}) + member("x") + member("long.txt", b"words") + GOOD + END)
    for at, value in damages:
        data[at % len(data)] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.tar"
        path.write_bytes(data)
        headers = read_headers(str(path))
        assert all(m.size >= 0 and m.offset >= 512 for m in headers.members)
        try:
            listing = listed(path)
        except UserError:
            return
        assert accounted(listing) == listing.files


def test_pickles_in_tars_are_refused_by_name_and_by_content(tmp_path: Path) -> None:
    members = {
        "a.mp4": b"media",
        "a.txt": b"words",
        "a.pkl": b"anything",
        "a.pt": zipped_pickle(),
        "a.PTH": b"",
        "a.npy": plain_array(),
        "a.features.npy": object_array(),
        "a.bin": BARE_PICKLE,
        "a.zip": zipped_pickle(),
        "b.mp4": BARE_PICKLE,
        "b.txt": b"words",
        "c.mp4": zipped_pickle(),
        "c.txt": b"words",
        "d.pickle": b"",
    }
    listing = listed(write_tar(tmp_path / "t.tar", list(members.items())))
    assert captions(listing) == {"t.tar!a.mp4": ("words",)}
    refused = ("a.pkl", "a.pt", "a.PTH", "a.features.npy", "a.bin", "a.zip", "d.pickle")
    expected = {f"t.tar!{name}": Reason.PICKLE for name in refused}
    assert reasons(listing) == expected | {f"t.tar!{name}": Reason.NOT_MEDIA for name in ("b.mp4", "c.mp4")}
    assert listing.ignored == 1 and accounted(listing) == listing.files == len(members)


def test_pickles_of_every_protocol_are_seen() -> None:
    values = ({"a": 1}, [1, 2], "text", b"bytes", 2**70, (1,), None, 3.5, {1})
    code = f"import pickle\nfor p in 2, 3, 4, 5:\n    for v in {values!r}: print(pickle.dumps(v, p).hex())"
    dumped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert len(dumped) == 36
    for head in dumped:
        assert is_pickle("x.bin", bytes.fromhex(head)), head


def test_good_heads_are_no_pickles() -> None:
    for head in (
        b"",
        b"\x80",
        b"\0\0\0\x20ftypisom",
        b"\x89PNG\r\n",
        b"\xff\xd8\xff",
        b"PK\x03\x04" + bytes(40),
        plain_array(),
    ):
        assert not is_pickle("x.bin", head)


@given(st.text(st.characters(exclude_categories=())), st.text(max_size=2000))
def test_rejections_are_readable_and_short_whoever_makes_them(name: str, detail: str) -> None:
    rejection = Rejection(name * 100, Reason.UNDECODABLE, detail)
    shown = rejection.source + rejection.detail
    assert len(rejection.source) <= 1024 and len(rejection.detail) <= 512 and shown.encode() is not None
    assert not any(ord(c) < 32 or 127 <= ord(c) < 160 for c in shown)
