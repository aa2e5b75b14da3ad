"""Sources in S3 and on the Hugging Face hub, by their own clients: what is listed, fetched and encoded equals what local files give."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import fsspec
import pytest

from mmspeed.errors import UserError
from mmspeed.media.rejections import Reason, Rejected
from mmspeed.preprocess.sources.fetched import MediaStore
from tests.support.listing import listed
from tests.support.media import write_tar
from tests.support.object_stores import ObjectStore, hub_store, s3_store
from tests.support.runs import CLIPS

Serve = Callable[[Path], AbstractContextManager[tuple[ObjectStore, str]]]

pytestmark = pytest.mark.usefixtures("own_store")


@contextmanager
def s3(folder: Path) -> Iterator[tuple[ObjectStore, str]]:
    """A bucket that holds a folder, found by the variables that S3's own tools read; its URL."""
    variables = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
    with s3_store(folder) as store, pytest.MonkeyPatch.context() as patch:
        for name, value in {**variables, "AWS_ENDPOINT_URL": store.url, "AWS_CONFIG_FILE": "/dev/null"}.items():
            patch.setenv(name, value)
        yield store, "s3://bucket"
        fsspec.get_filesystem_class("s3").clear_instance_cache()


@contextmanager
def hub(folder: Path) -> Iterator[tuple[ObjectStore, str]]:
    """A dataset of the hub that holds a folder; its URL. The library reads HF_ENDPOINT when it is imported."""
    from huggingface_hub import close_session, constants

    with hub_store(folder) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", store.url)
        template = store.url + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        close_session()  # one that was made offline
        fsspec.get_filesystem_class("hf").clear_instance_cache()
        yield store, "hf://datasets/owner/name"
        fsspec.get_filesystem_class("hf").clear_instance_cache()


STORES = [
    pytest.param(
        s3, id="s3", marks=pytest.mark.skipif(importlib.util.find_spec("s3fs") is None, reason="s3fs is not installed")
    ),
    pytest.param(hub, id="hf"),
]


def fill(folder: Path, count: int = 4) -> list[bytes]:
    """A folder of captioned clips in folders, a manifest and a tar of the same; the clips' bytes."""
    rows = [json.loads(line) for line in CLIPS.read_text(encoding="utf-8").splitlines()[:count]]
    members, lines, clips = [], [], []
    for number, row in enumerate(rows):
        data, name = (CLIPS.parent / row["video"]).read_bytes(), f"clip {number}"
        place = folder / "clips" / f"part{number % 2}" / f"{name}.mp4"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
        place.with_suffix(".txt").write_text(row["caption"])
        members += [(f"{number}.mp4", data), (f"{number}.txt", row["caption"].encode())]
        lines.append(json.dumps({"video": str(place.relative_to(folder)), "caption": row["caption"]}))
        clips.append(data)
    (folder / "list.jsonl").write_text("\n".join(lines))
    (folder / "shards").mkdir()
    write_tar(folder / "shards" / "000.tar", members[:4])
    write_tar(folder / "shards" / "001.tar", members[4:])
    return clips


@pytest.mark.parametrize("serve", STORES)
@pytest.mark.parametrize("place", ["clips", "list.jsonl", "shards/*.tar"])
def test_sources_are_listed_and_fetched_as_local_ones(
    tmp_path: Path, serve: Serve, place: str, own_store: Path
) -> None:
    folder = tmp_path / "set"
    clips = fill(folder)
    here = listed(folder / place)
    with serve(folder) as (_, url):
        listing = listed(f"{url}/{place}")
        assert [(s.name, s.captions) for s in listing.sources] == [(s.name, s.captions) for s in here.sources]
        assert (listing.files, listing.rejections) == (here.files, here.rejections)
        limit = max(map(len, clips)) * 2
        media = MediaStore(limit)
        read = []
        for source in listing.sources:
            with media.local(source) as copy:
                assert copy.remote is not None and copy.remote.checksum and copy.remote.ranges
                read.append(copy.open().read())
            assert sum(path.stat().st_size for path in own_store.rglob("*") if path.is_file()) <= limit
        assert sorted(read) == sorted(clips)


@pytest.mark.parametrize("serve", STORES)
def test_what_a_store_refuses_is_named_in_one_line(tmp_path: Path, serve: Serve) -> None:
    folder = tmp_path / "set"
    fill(folder, 3)
    (folder / "list.jsonl").write_text(
        "\n".join(
            json.dumps({"video": f"clips/part0/{name}.mp4", "caption": "x"}) for name in ("clip 0", "gone", "clip 2")
        )
    )
    with serve(folder) as (store, url):
        for place, says in (
            ("nothing", "does not exist"),
            ("gone.tar", "does not exist"),
            ("gone/*.tar", "matches no file"),
        ):
            with pytest.raises(UserError, match=says) as error:
                listed(f"{url}/{place}")
            assert "\n" not in str(error.value)
        first, gone, closed = listed(f"{url}/list.jsonl").sources
        media = MediaStore(10**9)
        store.refused["clips/part0/clip 2.mp4"] = 403
        with media.local(first) as copy:
            assert copy.open().read()
        for source, reason, says in (
            (gone, Reason.MISSING_FILE, "no such file"),
            (closed, Reason.UNREADABLE, "no permission"),
        ):
            with pytest.raises(Rejected) as refusal, media.local(source):
                pass
            assert refusal.value.reason == reason and says in refusal.value.detail
