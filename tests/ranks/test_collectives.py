"""Exchanges of plain values between processes."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from mmspeed.comm.collectives import all_gather_objects, broadcast_object, first_does
from mmspeed.errors import UserError
from tests.support.spawn import run_ranks


def exchanged() -> dict[str, Any]:
    rank = dist.get_rank()
    calls: list[int] = []

    def refuse() -> None:
        calls.append(rank)
        raise UserError("the disk is full")

    try:
        first_does(refuse, rank)
        raised = ""
    except UserError as error:
        raised = str(error)
    first_does(lambda: calls.append(rank), rank)  # nothing is wrong now: it returns on all
    return {
        "raised": raised,
        "calls": calls,
        "gathered": all_gather_objects({"rank": rank, "more": "x" * 10 * rank}),
        "sent": broadcast_object([rank], source=1),
    }


def test_values_and_refusals_of_one_process_reach_all() -> None:
    first, second = run_ranks(exchanged, 2, timeout=30)
    gathered = [{"rank": 0, "more": ""}, {"rank": 1, "more": "x" * 10}]
    wanted = {"raised": "the disk is full", "gathered": gathered, "sent": [1]}
    assert first == {**wanted, "calls": [0, 0]}
    assert second == {**wanted, "calls": []}
