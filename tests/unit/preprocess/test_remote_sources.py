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
from mmspeed.data.cache import stores
from mmspeed.errors import UserError
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.media.source import Source
from mmspeed.preprocess.sources.discover import SourceListing, list_sources
from mmspeed.preprocess.sources.fetched import AddressRules, MediaStore
from tests.support.http_files import served
from tests.support.listing import BUCKETS, listed
from tests.support.media import write_hostile_tar, write_tar

HERE = AddressRules(("127.0.0.1",))
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
        store = MediaStore(10**9, addresses=HERE)
        assert contents(store, listing.sources[:2]) == [CLIP, CLIP]
        with pytest.raises(Rejected) as error, store.local(listing.sources[2]):
            pass
        assert error.value.reason == Reason.MISSING_FILE
        local = tmp_path / "here.csv"
        local.write_text(f"video,caption\n{server.url}/clips/a b.mp4,from here\n")
        assert contents(store, listed(local).sources) == [CLIP]
        assert len(listed(fill_memory(root) + "/list.jsonl").sources) == 3


# -- addresses --------------------------------------------------------------------------------------------------------


def refused(store: MediaStore, url: str, dataset: str = "") -> str:
    """The reason for which a row's address is refused, and its detail; empty: it was fetched."""
    try:
        with store.local(Source("v", url, None, None, "video", (), "train", dataset)) as here:
            assert here.open().read() == CLIP
    except Rejected as error:
        return f"{error.reason}: {error.detail}"
    return ""


ODD_HOSTS = """127.0.0.1 localhost LOCALHOST 2130706433 0x7f.1 0177.0.0.1 127.1 0 0.0.0.0 [::1] [::ffff:127.0.0.1] [64:ff9b::7f00:1]
    [2002:7f00:1::] [::127.0.0.1] 10.0.0.1 169.254.169.254 192.168.1.1 172.16.0.1 100.64.0.1 [fe80::1%25eth0] [fd00::1] [fec0::1]
    ①②⑦.⓪.⓪.① 127。0。0。1 user:pw@127.0.0.1 224.0.0.1 255.255.255.255 999999999999""".split()


def test_rows_reach_no_private_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "v.mp4").write_bytes(CLIP)
    monkeypatch.setenv("no_proxy", "*")
    with served(tmp_path) as server:
        port = server.url.rpartition(":")[2]
        says = {host: refused(MediaStore(10**9), f"http://{host}:{port}/v.mp4") for host in ODD_HOSTS}
        assert not [host for host in says if not says[host].startswith("bad_address: ")] and not server.requests
        assert all("data.allow_addresses" in one for one in says.values())
        near, far = f"http://localhost:{port}/v.mp4", "http://169.254.169.254/v.mp4"
        server.moved = {
            "a": near,
            "b": far,
            "c": f"http://[::1]:{port}/v.mp4",
            "d": f"{server.url}/b",
            "e": "/v.mp4",
            "f.csv": far,
        }
        for allowed, refusals in (("127.0.0.1", "bcd"), ("127.0.0.0/8", "bcd"), ("10.0.0.0/8", "abcde")):
            store = MediaStore(10**9, addresses=AddressRules((allowed,)))
            assert "".join(name for name in "abcde" if "bad_add" in refused(store, f"{server.url}/{name}")) == refusals
        assert refused(MediaStore(10**9, addresses=AddressRules(("localhost",))), near) == ""
        assert "bad_address" in refused(MediaStore(10**9, addresses=AddressRules(("localhost",))), server.url)
        with pytest.raises(UserError, match=r"169\.254\.169\.254 is no public address"):
            listed(f"{server.url}/f.csv")
        for first, says in (("93.184.216.34", "bad_address"), ("10.0.0.5", ""), ("127.0.0.1", "")):
            monkeypatch.setitem(stores._first_answers, "localhost", (first,))  # of the manifest's host, before
            assert (
                refused(MediaStore(10**9, addresses=AddressRules((), {"d": ("//localhost",)})), near, "d")[:11] == says
            )
            store = MediaStore(10**9, addresses=AddressRules((), {"d": ("//localhost",)}))
            assert ("bad" in refused(store, f"{server.url}/v.mp4", "d")) == (first != "127.0.0.1")
        monkeypatch.delenv("no_proxy")
        for host in ("127.0.0.1", "localhost"):
            monkeypatch.setenv("http_proxy", f"http://{host}:{port}")
            assert refused(MediaStore(10**9), "http://files.example/v.mp4") == ""
            assert "bad_address" in refused(MediaStore(10**9), far)


def test_rules_are_those_of_the_config() -> None:
    paths = ("http://{a,b}.lan:80/x.csv::https://10.0.0.9/y.csv", "oss://bucket/z.csv", "local.csv")
    sources = [{"path": path, "name": str(number)} for number, path in enumerate(paths)]
    options = {"sources": sources, "buckets": BUCKETS}
    rules = AddressRules.of(DataConfig(**options, allow_addresses=["d.LAN", "10.0.0.1", "fd00::/8", "ftp://"]))
    allowed = ("d.lan", "10.0.0.1/32", "fd00::/8")
    assert [rules.hosts(name) for name in "0123"] == [
        ("//a.lan", "//b.lan", "10.0.0.9", *allowed), allowed, allowed, ("//a.lan", "//b.lan", "10.0.0.9", *allowed)
    ]  # fmt: skip
    for url in ("oss://bucket/a", "ftp://h/a", "HTTPS://h/a", "gs://b/a"):
        rules.check(url)
    for url in ("simplecache::s3://b/a", "file:///etc/hostname", "sftp://h/a", "http://[::1", "https://", "://"):
        with pytest.raises(Rejected) as error:
            rules.check(url)
        assert error.value.reason == Reason.BAD_ADDRESS
    for wrong in ("10.0.0.1:80", "http://a/b", "", "a b", "10.0.0.0/99"):
        with pytest.raises(ValueError, match="leave out ports and paths"):
            DataConfig(**options, allow_addresses=[wrong])


def test_colons_make_no_chain(tmp_path: Path) -> None:
    (tmp_path / "v.mp4::file:").mkdir()
    (tmp_path / "v.mp4::file:" / "v.mp4").write_bytes(CLIP)
    with served(tmp_path) as server:
        assert refused(MediaStore(10**9, addresses=HERE), f"{server.url}/v.mp4::file:/v.mp4") == ""


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
        store = MediaStore(10**9, addresses=HERE)
        assert contents(store, sources) == [b"x" * 100_000, b"y" * 100_000, CLIP]
        server.broken["v.mp4"] = 9
        other = MediaStore(10**9, tmp_path / "other", addresses=HERE)
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
            assert contents(MediaStore(10**9, addresses=HERE), [empty, large]) == [b"", CLIP]
            store = MediaStore(10**9, tmp_path / "other", max_file_bytes=50_000, addresses=HERE)
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
