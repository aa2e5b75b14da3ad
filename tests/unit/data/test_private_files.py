"""Files in progress are their owner's alone, under names that nobody can foresee, and then have a new file's permissions."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from mmspeed.data.cache.bounded import BoundedFolder
from mmspeed.data.cache.files import TempFile, private_file, write_whole
from mmspeed.pipelines.inference.media import Video
from tests.support.caches import build


@pytest.fixture(autouse=True)
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("publish", ["replace", "link"])
def test_a_file_in_progress_is_private_until_it_has_its_name(tmp_path: Path, publish: str) -> None:
    temp = TempFile(tmp_path)
    temp.write(b"secret so far")
    assert mode_of(temp.path) == 0o600
    getattr(temp, publish)(tmp_path / "whole")
    assert mode_of(tmp_path / "whole") == 0o644
    temp.discard()


def test_files_for_writers_that_open_a_name_are_private_and_vanish_after_errors(tmp_path: Path) -> None:
    names = set()
    for number in range(2):
        with private_file(tmp_path / "whole") as path:
            path.write_bytes(b"x" * number)
            assert mode_of(path) == 0o600
            names.add(path.name)
    assert len(names) == 2 and all(str(os.getpid()) + "-" in name and len(name) > 16 for name in names)
    assert mode_of(tmp_path / "whole") == 0o644 and (tmp_path / "whole").read_bytes() == b"x"
    with pytest.raises(KeyboardInterrupt), private_file(tmp_path / "whole"):
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_published_files_may_be_read_by_others_and_secret_ones_not(tmp_path: Path) -> None:
    build(tmp_path / "cache")
    files = [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert {mode_of(path) for path in files} == {0o644}
    with BoundedFolder(tmp_path / "kept", 100).add("abcd", 1, lambda temp: temp.write(b"a")) as pin:
        assert mode_of(pin.path) == 0o644
    write_whole(tmp_path / "config.yaml", b"token", mode=0o600)
    assert mode_of(tmp_path / "config.yaml") == 0o600


def test_a_link_planted_under_a_foreseen_name_gets_nothing(tmp_path: Path) -> None:
    """Videos were written through `.NAME.PID.tmp`, which in a shared folder could be a link to another user's file."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"untouched")
    (tmp_path / f".v.png.{os.getpid()}.tmp").symlink_to(victim)
    Video(torch.zeros(1, 8, 8, 3, dtype=torch.uint8).numpy(), 8.0).save(tmp_path / "v.png")
    assert victim.read_bytes() == b"untouched" and mode_of(tmp_path / "v.png") == 0o644
