"""Files are on disk before they get their names, and names before anybody learns of them: a power cut loses no finished work."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspeed.data.cache.files import TempFile
from tests.support.disk_log import DiskLog

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names of open files are read from /proc")


@pytest.mark.parametrize("how", ["replace", "link"])
def test_contents_are_synced_before_the_name_and_the_folder_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    log, target = DiskLog(monkeypatch), tmp_path / "shard.tar"
    file = TempFile(tmp_path)
    temporary = file.path
    file.write(b"contents")
    getattr(file, how)(target)
    file.release()
    assert log.place("sync", temporary) < log.place("name", target) < log.place("sync", tmp_path)
    assert target.read_bytes() == b"contents"
