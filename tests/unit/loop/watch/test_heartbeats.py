"""Signs of life in a real store, by a clock that is set."""

from __future__ import annotations

import torch.distributed as dist

from mmspeed.loop.watch.heartbeats import Heartbeats, SilenceRule
from tests.support.standing_clock import Clock


def test_silence_is_named_after_a_minute_and_ended_after_ten() -> None:
    clock = Clock()
    rule = SilenceRule(60, 600, clock)
    said = []
    assert rule.look(None) is None
    assert rule.look("1") is None
    for _ in range(70):
        clock.now += 10
        verdict = rule.look("1")
        if verdict is not None:
            said.append(verdict)
    assert said == [(70, False), (610, True)]
    clock.now += 10
    assert rule.look("2") is None


def test_a_process_that_was_stopped_itself_blames_nobody() -> None:
    clock = Clock()
    rule = SilenceRule(60, 600, clock)
    rule.look("1")
    clock.now += 700  # stopped: the others were silent for it alone
    assert rule.look("1") is None
    clock.now += 10
    assert rule.look("1") is None


def test_each_rank_looks_at_the_next() -> None:
    clock, store = Clock(), dist.HashStore()
    ranks = [Heartbeats(store, rank, 3, 4000 + rank, 60, 600, clock) for rank in range(3)]
    results = []
    for minute in range(14):
        for rank in ranks:
            if rank.rank != 1 or minute < 2:  # rank 1 is stopped
                rank.beat(f"step {minute}")
        for rank in ranks:
            if rank.rank != 1 and (seen := rank.look()) is not None:
                results.append((rank.rank, *seen))
        clock.now += 20
    ((by, silence, kill),) = results
    assert (by, silence.rank, silence.process, kill) == (0, 1, 4001, False)
    assert f"rank 1 ({ranks[1].host}, process 4001) has given no sign of life for 80 s" in silence.sentence()
    assert silence.sentence().endswith("its last place was step 1")


def test_ranks_that_end_say_so() -> None:
    clock, store = Clock(), dist.HashStore()
    first, second = (Heartbeats(store, rank, 2, 1, 60, 600, clock) for rank in range(2))
    second.beat("step 1")
    assert first.look() is None
    second.end()
    for _ in range(100):
        clock.now += 20
        assert first.look() is None
