"""Packing copies of a whole training step of SoraDiT, forward and backward: by micro-batch, arrangement and the layout on the way.

Law (docs/communication.md): where heads are cut or joined an exchange makes one copy, where tokens are cut or joined none. So an attention
of one video makes 4 copies of 8 units, and nothing else of a step makes any; the CPU's kernel adds one of 3 units where it writes
gradients of several videos with their samples first. A unit is the bytes of a rank's queries, which are those of its keys, its values and
its output, and of some heads of all tokens: tokens and heads divide by the ranks here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import pytest

from mmspeed.comm import Ledger
from mmspeed.parallel.sequence import hybrid_attention
from mmspeed.parallel.sequence.layouts import memory_order, tokens_first
from tests.support import sequence_steps
from tests.support.sequence_steps import MODEL, Case, Groups, step
from tests.support.spawn import run_ranks

pytestmark = pytest.mark.slow

RANKS = 2
LATENT = (4, 6, 8)  # T, h, w: 4 x 12 tokens
UNIT = 4 * 12 // RANKS * MODEL.width * 4  # bytes of one video's
OUT = 4 * 12 // RANKS * 12 * 4  # of a rank's part of one video's prediction, before patches are put together
WAYS = {"BSH": memory_order, "SBH": tokens_first}  # in which tokens lie on the way
ATTENTIONS = {"full": 4, "ulysses": 2}  # of so many blocks attention goes over the ranks


@dataclass(frozen=True)
class Step:
    """Results and counts of a step on one rank."""

    loss: float
    grads: dict[str, Any]
    bytes: Counter[tuple[str, str]]
    copies: Counter[tuple[str, str, str]]
    copied: Counter[tuple[str, str, str]]


@dataclass(frozen=True)
class Steps:
    """Steps by (model, videos, way), and of one process."""

    ranks: dict[tuple[str, int, str], Step] = field(default_factory=dict)
    truths: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)


def work() -> Steps:
    """Steps of this rank with micro-batches of one and of two videos."""
    groups, results = Groups(), Steps()
    for videos in (1, 2):
        with (
            mock.patch.object(sequence_steps, "SAMPLES", videos),
            mock.patch.dict(sequence_steps.LATENTS, even=LATENT),
        ):
            for model in (*ATTENTIONS, "switch"):
                case = Case(RANKS, 1, model, "even")
                plain = "full" if model == "full" else "switch"
                results.truths[model, videos] = step(Case(1, 1, plain, "even"), 1, groups)
                for way in WAYS if model in ATTENTIONS else ("SBH",):
                    with mock.patch.object(hybrid_attention, "tokens_first", WAYS[way]):
                        results.ranks[model, videos, way] = counted(case, groups)
    return results


def counted(case: Case, groups: Groups) -> Step:
    """A step, and what its ledger says."""
    ledger: Ledger = groups.of(-1, 1, case.parallel)[1].ledger
    before = ledger.copy()
    result, since = step(case, RANKS, groups), ledger.since(before)
    return Step(result["loss"], result["grads"], since.bytes, since.copies, since.copied)


@pytest.fixture(scope="module")
def steps() -> list[Steps]:
    return run_ranks(work, RANKS)


def packing(model: str, videos: int, way: str) -> tuple[dict[str, int], dict[str, int]]:
    """Copies of a step over the "ulysses" axis by side, and units of one video that they copy, as the law has it."""
    times, more = ATTENTIONS[model], int(videos > 1)
    copies, units = {"pack": 2 + more, "unpack": 2}, {"pack": 4 + 3 * more, "unpack": 4}
    if way == "BSH" and videos > 1:  # whose tokens do not come first: where they are cut or joined they are copied too
        copies, units = {"pack": 4, "unpack": 4}, {"pack": 8, "unpack": 8}
    return {side: times * n for side, n in copies.items()}, {side: times * videos * n for side, n in units.items()}


def test_copies_and_bytes_are_those_of_the_law(steps: list[Steps]) -> None:
    for of_rank in steps:
        for (model, videos, way), actual in of_rank.ranks.items():
            if model not in ATTENTIONS:
                continue
            copies, units = packing(model, videos, way)
            wanted = {("all_to_all", "ulysses", side): count for side, count in copies.items()}
            copied = {("all_to_all", "ulysses", side): count * UNIT for side, count in units.items()}
            if videos > 1:  # the predictions of several videos are put together
                ends = (("all_gather", "sequence", "unpack"), ("reduce_scatter", "sequence", "pack"))
                wanted |= dict.fromkeys(ends, 1)
                copied |= dict.fromkeys(ends, RANKS * videos * OUT)
            assert (actual.copies, actual.copied) == (wanted, copied), (model, videos, way)


def test_the_default_copies_least_and_sends_no_more(steps: list[Steps]) -> None:
    for of_rank in steps:
        for model, videos in ((model, videos) for model in ATTENTIONS for videos in (1, 2)):
            default, other = (of_rank.ranks[model, videos, way] for way in ("SBH", "BSH"))
            assert default.copies.total() <= other.copies.total() and default.copied.total() <= other.copied.total()
            assert (default.copied == other.copied) == (videos == 1)
            assert default.bytes == other.bytes


def test_results_are_equal_in_both_layouts_and_near_one_process(steps: list[Steps]) -> None:
    for of_rank in steps:
        for (model, videos, way), actual in of_rank.ranks.items():
            default, truth = of_rank.ranks[model, videos, "SBH"], of_rank.truths[model, videos]
            assert actual.loss == default.loss and actual.grads.keys() == truth["grads"].keys(), (model, videos, way)
            assert actual.loss == pytest.approx(truth["loss"], rel=1e-5)
            for name, grad in truth["grads"].items():
                assert np.array_equal(actual.grads[name], default.grads[name]), (model, videos, way, name)
                # sums over tokens are made in another order
                np.testing.assert_allclose(actual.grads[name], grad, atol=1e-5 * max(np.abs(grad).max(), 1e-3))


def test_copies_of_re_sharding(steps: list[Steps]) -> None:
    """Between blocks one dim of the tokens is cut and the other joined: one of them comes first where there is one video, else neither."""
    switches = MODEL.depth - 1
    for of_rank in steps:
        for videos in (1, 2):
            actual = of_rank.ranks["switch", videos, "SBH"]
            sides = (("all_to_all", "dsp", "pack"), ("all_to_all", "dsp", "unpack"))
            ends = (("all_gather", "sequence", "unpack"), ("reduce_scatter", "sequence", "pack"))
            assert actual.copies == {**dict.fromkeys(sides, videos * switches), **dict.fromkeys(ends, 1)}
            units = dict.fromkeys(sides, videos * videos * switches * UNIT)  # the number of copies, of so many videos
            assert actual.copied == units | dict.fromkeys(ends, RANKS * videos * OUT)
