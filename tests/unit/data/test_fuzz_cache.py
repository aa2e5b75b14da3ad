"""Random damages to a cache's files: `verify` notices every one, and readers answer with what was stored or the clear error."""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from tests.support.cache_damages import try_damages
from tests.support.care_caches import build_whole, contents


@pytest.mark.slow
@pytest.mark.parametrize("count", [pytest.param(60, id="60"), pytest.param(2000, id="2000")])
def test_every_damage_is_noticed_and_no_reader_crashes(tmp_path: Path, count: int) -> None:
    build_whole(tmp_path / "base")
    contents(tmp_path / "base")  # opened once, so that derived files are there too
    workers = min(2, os.cpu_count() or 1)
    shares = [range(n * count // workers, (n + 1) * count // workers) for n in range(workers)]
    with ProcessPoolExecutor(
        workers, mp_context=multiprocessing.get_context("spawn")
    ) as pool:  # a crash breaks the pool
        jobs = [
            pool.submit(try_damages, str(tmp_path / "base"), str(tmp_path / f"copy{n}"), seeds)
            for n, seeds in enumerate(shares)
        ]
        wrong = [line for job in jobs for line in job.result()]
    assert not wrong, f"{len(wrong)} of {count}:\n" + "\n".join(wrong[:20])
