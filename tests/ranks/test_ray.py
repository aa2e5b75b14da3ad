"""Ray Data builds the cache with two workers on this machine: the same entries and the same table as one process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from mmspeed.config import Config
from mmspeed.errors import UserError
from mmspeed.preprocess import CacheBuilder
from mmspeed.preprocess.build.ray import build_on_ray
from tests.ranks.test_build import another, assert_same, one  # noqa: F401 (a fixture)
from tests.support.caches import tar_bytes
from tests.support.runs import small_config

pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process that a test starts outlives it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = set(psutil.pids())
    yield
    deadline = time.monotonic() + 20
    while (left := ray_processes(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left == []


def ray_processes(before: set[int]) -> list[str]:
    """Names of Ray's processes under this one, or left alone, that were not there before."""
    names = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if process.pid not in before and ("ray::" in words or "/ray/" in words or "decode_worker" in words):
                names.append(words[:100])
    return names


def test_two_workers_make_the_same_bytes_as_one_process(one: Config, tmp_path: Path) -> None:  # noqa: F811
    config = another(one, tmp_path)
    report = build_on_ray(config, 2)
    counts = report.sources, report.encoded, report.reused, report.rejected, report.texts
    assert counts == (9, 8, 0, 1, 10)
    assert [r.source for r in report.rejections] == ["bad.mp4"]
    assert_same(config, one)
    again = build_on_ray(config, 2)
    assert (again.encoded, again.reused, again.texts, again.texts_reused) == (0, 8, 0, 10)
    assert_same(config, one)
    # it is the cache of that config for everyone: one process has nothing to do
    alone = CacheBuilder(config).run()
    assert (alone.encoded, alone.texts) == (0, 0)
    assert_same(config, one)


def test_a_worker_that_is_killed_is_replaced(one: Config, tmp_path: Path) -> None:  # noqa: F811
    config = another(one, tmp_path)
    killed: list[int] = []

    def kill_one() -> None:
        """Kill the first worker that has a shard of latents in progress."""
        while not killed:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    shards = [f for f in process.open_files() if f"{config.cache_dir}/latents" in f.path]
                    if shards and not killed:
                        process.kill()
                        killed.append(process.pid)
            time.sleep(0.01)

    killer = threading.Thread(target=kill_one, daemon=True)
    killer.start()
    report = build_on_ray(config, 2)
    killer.join(5)
    assert killed and (report.encoded + report.reused, report.rejected) == (8, 1)
    assert tar_bytes(config.cache_dir) == tar_bytes(one.cache_dir)
    assert_same(config, one)


def test_what_goes_wrong_in_a_worker_is_reported_in_its_words(tmp_path: Path) -> None:
    config = small_config(tmp_path, "text.kind=transformers", "text.pretrained=/nowhere", clips=2)
    with pytest.raises(UserError, match="nowhere"):
        build_on_ray(config, 1)


def test_more_workers_than_devices_are_an_error(one: Config, tmp_path: Path) -> None:  # noqa: F811
    with pytest.raises(UserError, match="Ray has no"):
        build_on_ray(another(one, tmp_path, "device.kind=cuda"), 1)
