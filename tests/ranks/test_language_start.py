"""A language run of two processes without a cache: the first makes the cache of `preprocess`, while the other waits."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from mmspeed.pipelines import TrainPipeline
from mmspeed.preprocess.texts.preparation import TextPreparation
from tests.support.spawn import run_ranks
from tests.unit.pipelines.test_language_start import config, files, losses


def train(home: str) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # ranks of a launcher may have children
    TrainPipeline(config(Path(home)), online=True).run()


@pytest.mark.slow
def test_two_processes_complete_the_cache_and_train_as_one(tmp_path: Path) -> None:
    before, online = tmp_path / "before", tmp_path / "online"
    for home in (before, online):
        home.mkdir()
    TextPreparation(config(before)).build()
    train(str(before))
    run_ranks(train, 2, str(online))
    assert files(before / "cache") == files(online / "cache")
    np.testing.assert_allclose(losses(online, "run"), losses(before, "run"), rtol=1e-5)
