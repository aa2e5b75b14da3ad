"""The measured cost of what keeps a run alive: comparing samples with their hashes, saving, and the watch."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mmspeed.bench.reliability.reading import bench_reading
from mmspeed.bench.reliability.saving import SavingCost, bench_saving
from mmspeed.bench.reliability.watch import bench_watch
from mmspeed.loop.checkpoint import storage
from mmspeed.loop.checkpoint.seals import chunk_digest
from mmspeed.loop.checkpoint.storage import SafetensorsWriter

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_reading_is_measured_and_cheap() -> None:
    cost = bench_reading(rounds=3, samples=1)
    assert cost.megabytes > 8 and cost.checked > cost.plain > 0
    assert cost.passed(), cost.lines()
    assert "GB/s" in cost.lines()[0] and json.loads(cost.to_json())["share"] == cost.share


def test_all_ways_of_saving_are_measured() -> None:
    cost = bench_saving(rounds=1, megabytes=8)
    assert cost.megabytes == pytest.approx(8, rel=0.1)
    assert min(cost.copy, cost.stall, cost.write, cost.hash_share, cost.hash_work) > 0
    assert len(cost.lines()) == 2 and json.loads(cost.to_json())["stall_share"] == cost.stall_share


@pytest.mark.parametrize(("stall", "share", "passed"), [(1.2, 0.02, True), (1.3, 0.02, False), (1.2, 0.04, False)])
def test_both_goals_count(stall: float, share: float, passed: bool) -> None:
    cost = SavingCost(megabytes=1, copy=1, stall=stall, write=10, hash_share=share, hash_work=0.5)
    assert cost.stall_share == stall and cost.passed() is passed
    assert "ends 2.00% later" in cost.lines()[1] or share != 0.02


def test_a_write_that_waits_for_its_hashes_is_that_much_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hash that takes half a second longer than the write shows in the time, whatever the disk does."""
    tensors = {"model.weight": torch.ones(1000)}
    late = []
    for slow in (0.0, 0.5):
        monkeypatch.setattr(
            storage, "chunk_digest", lambda tensor, slow=slow: (time.sleep(slow), chunk_digest(tensor))[1]
        )
        writer = SafetensorsWriter(tmp_path / str(slow), tensors, lambda _: None, tensors)
        (tmp_path / str(slow)).mkdir()
        dcp.save(tensors, storage_writer=writer, no_dist=True)
        late.append(writer.late_seconds)
        assert 0 < writer.hash_seconds < 0.4  # a thread that sleeps does no work
    assert late[1] > late[0] and late[1] > 0.2


def test_the_watch_is_measured_and_cheap() -> None:
    cost = bench_watch(rounds=1, calls=200)
    assert min(cost.phases, cost.record, cost.look, cost.ranks) > 0
    assert cost.passed(), cost.lines()
    assert len(cost.lines()) == 2 and json.loads(cost.to_json())["pause"] == cost.pause == 10
