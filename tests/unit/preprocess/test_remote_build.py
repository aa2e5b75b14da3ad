"""Caches built from remote sources: the bytes of local ones, also after a kill; failures are counted, and nothing is lost."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from mmspeed.config import Config
from mmspeed.data import DatasetCache
from mmspeed.preprocess import CacheBuilder
from mmspeed.preprocess.sources.contents import ContentIds
from mmspeed.preprocess.sources.fetched import AddressRules, MediaStore
from tests.support.caches import tar_bytes
from tests.support.forks import fork, kill, wait
from tests.support.http_files import FileServer, served
from tests.support.listing import listed
from tests.support.media import write_tar
from tests.support.runs import CLIPS, small_config

pytestmark = pytest.mark.usefixtures("own_store")


def clips_tar(path: Path, count: int = 3) -> Path:
    """A tar of packaged clips; the last has no caption."""
    path.parent.mkdir(parents=True, exist_ok=True)
    members = []
    for number, row in enumerate(map(json.loads, CLIPS.read_text(encoding="utf-8").splitlines()[:count])):
        members.append((f"{number}.mp4", (CLIPS.parent / row["video"]).read_bytes()))
        members += [(f"{number}.txt", row["caption"].encode())] * (number < count - 1)
    return write_tar(path, members)


def config_of(folder: Path, place: str | Path) -> Config:
    return small_config(folder, f"data.sources.0.path={place}", "data.missing_caption=empty", clips=1)


@pytest.mark.slow
@pytest.mark.parametrize("ranges", [False, True])
def test_a_killed_build_from_a_remote_tar_ends_as_a_local_one(tmp_path: Path, own_store: Path, ranges: bool) -> None:
    torch.set_num_threads(1)  # forked processes have no threads of ours to compute with
    tar = clips_tar(tmp_path / "files" / "set.tar")
    local = config_of(tmp_path / "local", tar)
    report = CacheBuilder(local).run()
    assert report.encoded == 3 and report.missing_captions == 1
    assert any("without a caption, taken by data.missing_caption: 1" in line for line in report.lines())
    assert sorted(len(sample.text_keys) for sample in DatasetCache(local.cache_dir).samples) == [0, 1, 1]
    with served(tmp_path / "files", ranges=ranges, checksum="ab" * 16) as server:
        remote = config_of(tmp_path / "remote", f"{server.url}/set.tar")
        log = tmp_path / "log.txt"
        pid = fork(CacheBuilder(remote).run, log)
        while len([path for path in own_store.rglob("*") if path.is_file() and path.suffix != ".tmp"]) < 4:
            time.sleep(0.02)  # until the headers, the lock and two members are there
        kill(pid)
        assert wait(fork(CacheBuilder(remote).run, log)) == 0, log.read_text()
    assert tar_bytes(remote.cache_dir) == tar_bytes(local.cache_dir)


def test_remote_files_are_named_by_their_checksum_else_as_local_ones(tmp_path: Path) -> None:
    large = bytes(range(251)) * 80_000  # 20 MB, more than is digested whole
    other = large[:7_000_000] + b"other" + large[7_000_005:]  # equal in all blocks of the digest
    (tmp_path / "files").mkdir()
    for name, data in (("a", large), ("b", other), ("c", large)):
        (tmp_path / "files" / f"{name}.mp4").write_bytes(data)
        (tmp_path / "files" / f"{name}.txt").write_text(name)
    here = listed(tmp_path / "files").sources
    write_tar(tmp_path / "files" / "t.tar", [("a.mp4", large), ("a.txt", b"a"), ("b.mp4", other), ("b.txt", b"b")])
    rows = [{"video": f"{name}.mp4", "caption": name} for name in "abc"]
    (tmp_path / "files" / "list.jsonl").write_text("\n".join(map(json.dumps, rows)))
    local = ContentIds(tmp_path / "one", listed=here, reads=True)
    ids = [local.id_of(source) for source in here]

    def remote_ids(server: FileServer, name: str) -> list[str]:
        sources = listed(f"{server.url}/{name}").sources
        contents, results = ContentIds(tmp_path / "two", listed=sources, reads=True), []
        for source in sources:
            with MediaStore(10**9, addresses=AddressRules(("127.0.0.1",))).local(source) as copy:
                results.append(contents.id_of(copy))
        return results

    with served(tmp_path / "files") as server:
        assert remote_ids(server, "t.tar") == ids[:2]  # by blocks, and the whole files compared by ranges
        rows_ids = remote_ids(server, "list.jsonl")  # all bytes: their lengths stood in no listing
        assert rows_ids[0] == rows_ids[2] != rows_ids[1]
        server.checksum = "0123456789abcdef" * 2
        assert len(set(remote_ids(server, "list.jsonl"))) == 1  # the store says that they are one
        server.checksum = "5f-62a"  # of time and size, as some web servers have it: not of the content
        assert remote_ids(server, "list.jsonl") == rows_ids
