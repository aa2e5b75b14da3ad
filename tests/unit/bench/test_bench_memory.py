"""The bench of memory: what it measures is let go again, and tiers have the bytes that they are meant to have."""

from __future__ import annotations

import gc
import weakref
from typing import Any

from mmspeed.bench.memory import BenchModel
from mmspeed.bench.memory_tiers import TierModelSize, measure_tiers
from tests.claims.memory import WaysSetting
from tests.support.memory_counts import kept_bytes

TINY = WaysSetting(width=96, heads=4, rank=8, depth=2, latent=(5, 16, 16), rounds=1, device="cpu")


def test_what_is_measured_is_let_go() -> None:
    stage = BenchModel(TINY)
    seen = []

    def forward() -> Any:
        out = stage.model.blocks[0].register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
        loss = stage.forward()
        out.remove()
        return loss

    assert kept_bytes(stage.device, stage.model, forward, stage.inputs) > 1e6
    gc.collect()
    assert len(seen) == 1 and seen[0]() is None
    assert all(parameter.grad is None for parameter in stage.model.parameters())


def test_tiers_have_the_bytes_they_are_meant_to_have() -> None:
    rows = measure_tiers(TierModelSize(width=192, depth=2, heads=6, rank=16), rounds=1, device="cpu", bucket="1MiB")
    assert [round(row.device) for row in rows] == [12, 4, 14, 12, 4, 2]
    assert [row.equal for row in rows] == [None, True, None, True, True, True]
    assert all(row.passed() for row in rows)
