"""Sources behind URLs: a real HTTP server with and without ranges, and fsspec's store in memory."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from mmspeed.config.schema import DataConfig
from mmspeed.errors import UserError
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.media.source import Source
from mmspeed.preprocess.sources.discover import SourceListing, list_sources
from mmspeed.preprocess.sources.fetched import MediaStore
from tests.support.http_files import served
from tests.support.listing import BUCKETS, listed
from tests.support.media import write_hostile_tar, write_tar

CLIP = bytes(range(256)) * 400  # 100 KB that stand for a video


@pytest.fixture(autouse=True)
def own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A local store of this test, and a memory that holds nothing afterwards."""
    monkeypatch.setenv("MMSPEED_CACHE", str(tmp_path / "store"))
    yield tmp_path / "store" / "media"
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def tar_of(path: Path, names: str, size: int = 100_000) -> Path:
    """A tar of one clip and caption for each letter."""
    path.parent.mkdir(parents=True, exist_ok=True)
    members = [(f"{n}.mp4", n.encode() * size) for n in names]
    captions = [(f"{n}.txt", f"about {n}".encode()) for n in names]
    return write_tar(path, [member for pair in zip(members, captions, strict=True) for member in pair])


def shape(listing: SourceListing) -> list[object]:
    """All of a listing but where it is."""
    sources = [(s.name, s.offset, s.size, s.kind, s.captions, s.split) for s in listing.sources]
    return [sources, listing.rejections, listing.files, listing.ignored, listing.caption_files]


def contents(store: MediaStore, sources: list[Source]) -> list[bytes]:
    """The bytes of fetched sources."""
    results = []
    for source in sources:
        with store.local(source) as here:
            results.append(here.open().read())
    return results


def fill_memory(folder: Path, root: str = "/bucket") -> str:
    memory = fsspec.filesystem("memory")
    for path in folder.rglob("*"):
        if path.is_file():
            memory.pipe_file(f"{root}/{path.relative_to(folder)}", path.read_bytes())
    return f"memory:/{root}"


# -- listing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranges", [True, False])
def test_remote_tars_are_listed_as_local_ones(tmp_path: Path, ranges: bool) -> None:
    tar = tar_of(tmp_path / "files" / "a.tar", "xyz")
    hostile = tmp_path / "files" / "b.tar"
    write_hostile_tar(hostile, CLIP)
    cut = tmp_path / "files" / "c.tar"
    cut.write_bytes(tar.read_bytes()[:-150_000])
    with served(tmp_path / "files", ranges=ranges) as server:
        for path in (tar, hostile, cut):
            assert shape(listed(f"{server.url}/{path.name}")) == shape(listed(path)), path
        share = server.sent["a.tar"] / tar.stat().st_size
        assert share < 0.6 if ranges else share < 2.1  # once, and the answer by which it showed that it has no ranges


def test_tar_headers_are_read_once_while_the_store_names_the_same_content(tmp_path: Path) -> None:
    tar = tar_of(tmp_path / "files" / "a.tar", "xy")
    with served(tmp_path / "files", checksum="ab" * 16) as server:
        first = listed(f"{server.url}/a.tar")
        gets = server.gets("a.tar")
        assert shape(listed(f"{server.url}/a.tar")) == shape(first) and server.gets("a.tar") <= gets + 1
        tar_of(tar, "xyz")
        server.checksum = "cd" * 16
        assert len(listed(f"{server.url}/a.tar").sources) == 3


def test_braces_and_sets(tmp_path: Path) -> None:
    for number in range(12):
        tar_of(tmp_path / "one" / f"{number:06d}.tar", chr(97 + number), 10)
    tar_of(tmp_path / "two" / "v.tar", "v", 10)
    tar_of(tmp_path / "two" / "w.tar", "w", 10)
    pattern = f"{tmp_path}/one/{{000000..000011}}.tar::{tmp_path}/two/{{v,w}}.tar"
    assert [s.captions[0][-1] for s in listed(pattern).sources] == list("abcdefghijklvw")
    with served(tmp_path) as server:
        remote = f"{server.url}/one/{{000009..000011}}.tar::{server.url}/two/v.tar"
        assert [s.captions[0][-1] for s in listed(remote).sources] == list("jklv")
    url = fill_memory(tmp_path)
    assert [s.captions[0][-1] for s in listed(f"{url}/two/*.tar").sources] == ["v", "w"]
    for place, says in (
        (f"{tmp_path}/one/{{000000..000013}}.tar", "000012.tar does not exist .2 of the 14 files"),
        (f"{tmp_path}/one/{{000000..9.tar", "a brace without its partner|does not exist"),
        (f"{tmp_path}/{{0..99999999}}.tar", "more than 1000000 names"),
        (f"{url}/three/*.tar", "matches no file"),
    ):
        with pytest.raises(UserError, match=says):
            listed(place)


def test_a_remote_folder_is_listed_as_a_local_one(tmp_path: Path) -> None:
    root = tmp_path / "set"
    for name in ("b.mp4", "deep/c.jpg", "bare.png", "notes.pdf", ".hidden", ".git/x.mp4", "evil.pkl"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(CLIP)
    for name in ("b", "deep/c", "orphan"):
        (root / f"{name}.txt").write_text(f"about {name}")
    here, remote = listed(root), listed(fill_memory(root))
    assert sorted(shape(remote)[0]) == sorted(shape(here)[0])  # type: ignore[arg-type]
    assert sorted(map(str, remote.rejections)) == sorted(map(str, here.rejections))
    assert (remote.files, remote.ignored) == (here.files, here.ignored)
    assert contents(MediaStore(10**9), remote.sources) == [CLIP, CLIP]


def test_manifests_name_remote_media(tmp_path: Path) -> None:
    root = tmp_path / "set"
    (root / "clips").mkdir(parents=True)
    (root / "clips" / "a b.mp4").write_bytes(CLIP)
    with served(root) as server:
        rows = [
            {"video": "clips/a b.mp4", "caption": "relative"},
            {"video": f"{server.url}/clips/a b.mp4?token=secret", "caption": "by its address"},
            {"video": "/etc/hostname", "caption": "of this machine"},
            {"video": "file:///etc/hostname", "caption": "of this machine"},
            {"video": "clips/gone.mp4", "caption": "gone"},
        ]
        (root / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
        listing = listed(f"{server.url}/list.jsonl")
        assert [r.reason for r in listing.rejections] == [Reason.BAD_ROW] * 2
        assert "secret" not in "".join(source.name for source in listing.sources)
        store = MediaStore(10**9)
        assert contents(store, listing.sources[:2]) == [CLIP, CLIP]
        with pytest.raises(Rejected) as error, store.local(listing.sources[2]):
            pass
        assert error.value.reason == Reason.MISSING_FILE
        local = tmp_path / "here.csv"
        local.write_text(f"video,caption\n{server.url}/clips/a b.mp4,from here\n")
        assert contents(store, listed(local).sources) == [CLIP]
        assert len(listed(fill_memory(root) + "/list.jsonl").sources) == 3


# -- fetching ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranges", [True, False])
def test_members_are_fetched_in_one_pass_without_the_tar(tmp_path: Path, own_store: Path, ranges: bool) -> None:
    tar = tar_of(tmp_path / "files" / "a.tar", "stuvwxyz")
    with served(tmp_path / "files", ranges=ranges) as server:
        sources = listed(f"{server.url}/a.tar").sources
        server.sent.clear()
        gets, most = server.gets("a.tar"), 0
        store = MediaStore(350_000)
        store.expect(sources)
        pairs = [(1, 0), (2, 3), (5, 4), (6, 7)]  # as two decoders ask: a little out of order
        for number in (number for pair in pairs for number in pair):
            with store.local(sources[number]) as here:
                assert here.open().read() == b"stuvwxyz"[number : number + 1] * 100_000
                most = max(most, sum(p.stat().st_size for p in own_store.rglob("*") if p.is_file()))
        store.close()
        assert server.sent["a.tar"] <= 1.1 * tar.stat().st_size
        assert ranges or server.gets("a.tar") == gets + 1
        assert most <= 350_000 + 20_000 < tar.stat().st_size


def test_a_streamed_tar_read_backwards_begins_again_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tar_of(tmp_path / "files" / "a.tar", "xyz")
    with served(tmp_path / "files", ranges=False) as server:
        sources = listed(f"{server.url}/a.tar").sources
        store = MediaStore(10**9)
        assert contents(store, sources[::-1]) == [letter * 100_000 for letter in (b"z", b"y", b"x")]
        store.close()
    assert caplog.text.count("is read from its beginning again") == 1


@pytest.mark.parametrize("ranges", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_connection_that_dies_is_tried_again_and_then_named(tmp_path: Path, ranges: bool) -> None:
    tar_of(tmp_path / "a.tar", "xy")
    (tmp_path / "v.mp4").write_bytes(CLIP)
    (tmp_path / "list.jsonl").write_text('{"video": "v.mp4", "caption": "v"}')
    with served(tmp_path, ranges=ranges) as server:
        sources = [*listed(f"{server.url}/a.tar").sources, *listed(f"{server.url}/list.jsonl").sources]
        server.broken |= {"a.tar": 1, "v.mp4": 2}
        store = MediaStore(10**9)
        assert contents(store, sources) == [b"x" * 100_000, b"y" * 100_000, CLIP]
        server.broken["v.mp4"] = 9
        other = MediaStore(10**9, tmp_path / "other")
        with pytest.raises(Rejected) as error, other.local(sources[2]):
            pass
        assert error.value.reason == Reason.UNREADABLE and "cannot be fetched" in error.value.detail
        assert not [path for path in (tmp_path / "other").rglob("*") if path.stat().st_size and path.is_file()]
        server.broken.clear()
        assert contents(other, sources[2:]) == [CLIP]
        server.broken["a.tar"] = 99
        with pytest.raises(UserError, match=r"a\.tar cannot be read"):
            listed(f"{server.url}/a.tar")


def test_stores_that_refuse_are_named_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tar_of(tmp_path / "a.tar", "x")
    (tmp_path / "empty.tar").write_bytes(b"")
    with served(tmp_path, refused={"closed.tar": 403, "down.tar": 503}, circular=("loop.tar",)) as server:
        for place, says in (
            (f"{server.url}/closed.tar", r"closed.tar cannot be read \(no permission \(status 403\)\)"),
            (f"{server.url}/down.tar", "status 503"),
            (f"{server.url}/gone.tar", "gone.tar does not exist; correct the address"),
            (f"{server.url}/loop.tar", "its redirections never end"),
            (f"{server.url}/empty.tar", "holds no media .*an empty tar"),
            (f"{server.url}/a.tar.gz", "compressed tar"),
            (f"{server.url}/folder", "folders cannot be listed over http"),
            (f"{server.url}/*.tar", "folders cannot be listed over http"),
            ("http://127.0.0.1:9/a.tar", "cannot be read .*is the address right"),
            ("memory://nobody/set", "does not exist"),
            ("nonsense://bucket/a.tar", "unknown protocol nonsense://"),
        ):
            with pytest.raises(UserError, match=says) as error:
                listed(place)
            assert "\n" not in str(error.value)
        assert server.requests.count(("HEAD", "closed.tar")) == 1 < server.requests.count(("HEAD", "down.tar"))
    for package, place in (("s3fs", "s3://bucket/set"), ("huggingface_hub", "hf://datasets/owner/name")):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, place.split(":")[0], raising=False)
        with pytest.raises(UserError, match=f"needs the package {package}: pip install {package}"):
            listed(place)


def test_size_zero_and_too_large(tmp_path: Path) -> None:
    (tmp_path / "v.mp4").write_bytes(b"")
    (tmp_path / "w.mp4").write_bytes(CLIP)
    rows = ['{"video": "v.mp4", "caption": "v"}', '{"video": "w.mp4", "caption": "w"}']
    (tmp_path / "list.jsonl").write_text("\n".join(rows))
    for sized in (True, False):
        with served(tmp_path, sized=sized) as server:
            empty, large = listed(f"{server.url}/list.jsonl").sources
            assert contents(MediaStore(10**9), [empty, large]) == [b"", CLIP]
            store = MediaStore(10**9, tmp_path / "other", max_file_bytes=50_000)
            with pytest.raises(Rejected) as error, store.local(large):
                pass
            assert error.value.reason == Reason.TOO_LARGE


# -- the bounded store ------------------------------------------------------------------------------------------------


def test_the_oldest_files_that_nobody_uses_go_first(tmp_path: Path) -> None:
    kept = MediaStore(350, tmp_path).kept

    def add(*names: str) -> None:
        for name in names:
            kept.add(name, 100, lambda temp: temp.write(b"x" * 100)).close()
            time.sleep(0.01)

    add("aa", "bb", "cc")
    pin = kept.pin("aa")  # in use, and now the newest
    time.sleep(0.01)
    add("dd")
    assert [name for name in ("aa", "bb", "cc", "dd") if (tmp_path / name / name).exists()] == ["aa", "cc", "dd"]
    add("ee", "ff", "gg")
    assert pin is not None and pin.path.exists()
    pin.close()
    add("hh", "ii", "jj")
    assert not pin.path.exists()


def test_many_threads_and_processes_share_a_store(tmp_path: Path) -> None:
    names = "abcdefgh"
    tar_of(tmp_path / "files" / "a.tar", names, 20_000)
    with served(tmp_path / "files", checksum="ab" * 16) as server:
        sources = listed(f"{server.url}/a.tar").sources
        problems: list[object] = []

        def work(seed: int) -> None:
            store = MediaStore(50_000, tmp_path / "other")
            for step in range(12):
                number = hashlib.sha256(f"{seed} {step}".encode()).digest()[0] % len(names)
                try:
                    with store.local(sources[number]) as here:
                        if here.open().read() != names[number].encode() * 20_000:
                            problems.append(number)
                except Exception as error:
                    problems.append(error)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        MediaStore(50_000, tmp_path / "other").kept.add("zz", 1, lambda temp: temp.write(b"z")).close()
        assert sum(p.stat().st_size for p in (tmp_path / "other").rglob("*") if p.is_file()) <= 50_000


# -- captions ---------------------------------------------------------------------------------------------------------


def test_media_without_captions(tmp_path: Path) -> None:
    for name in ("a.mp4", "b.mp4", "bad.mp4"):
        (tmp_path / name).write_bytes(CLIP)
    (tmp_path / "a.txt").write_text("a cat")
    (tmp_path / "bad.json").write_text("{")

    def by(**keys: str) -> SourceListing:
        data = {"sources": [{"path": str(tmp_path)}], "buckets": BUCKETS, **keys}
        return list_sources(DataConfig(**data))

    assert [s.name for s in by().sources] == ["a.mp4"] and by().missing_captions == 0
    empty = by(missing_caption="empty")
    assert {s.name: s.captions for s in empty.sources} == {"a.mp4": ("a cat",), "b.mp4": ()}
    assert empty.missing_captions == 1 and [r.source for r in empty.rejections] == ["bad.mp4"]
    default = by(missing_caption="default", default_caption="a video")
    assert {s.name: s.captions for s in default.sources} == {"a.mp4": ("a cat",), "b.mp4": ("a video",)}
