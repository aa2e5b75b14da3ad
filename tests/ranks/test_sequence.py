"""Law 2 for sequence and tensor parallelism: loss and every gradient of 2 and 4 ranks against one process in float32; and what
they send, against the formulas of `mmspeed.plan.traffic`, to the byte.

The tolerance is 1.5e-5 of each gradient's largest element (1.1e-5 on a processor with AMX, 1e-5 on others): sums over tokens are made in
another order, and attention's softmax from parts.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter
from typing import Any

import pytest

from mmspeed.models.sora.model import SoraDiTConfig, on_meta
from mmspeed.plan.traffic import AttentionWorkload, Sent, gradient_traffic, places, step_traffic
from tests.support.sequence_steps import LATENTS, MODEL, SAMPLES, Case, work
from tests.support.spawn import run_ranks

TOLERANCE = 1.5e-5
FLOAT = 4  # bytes; the steps compute in float32
TEXT_TOKENS = 7

StepsOfRanks = list[list[dict[str, Any]]]


@pytest.fixture(
    scope="module",
    params=[
        (2, True),
        pytest.param((2, False), marks=pytest.mark.slow),
        pytest.param((4, False), marks=pytest.mark.slow),
    ],
    ids=["2 ranks, some", "2 ranks, all", "4 ranks, all"],
)
def ranks(request: pytest.FixtureRequest) -> StepsOfRanks:
    """All cases of a world, or few of them, in which each kind of layout and of step is still there."""
    world, few = request.param
    return run_ranks(work, world, world, few, timeout=900)


def test_loss_and_gradients_equal_one_process(ranks: StepsOfRanks) -> None:
    wrong = [
        f"{actual['case']}: loss {actual['loss']:.1e}, norm {actual['norm']:.1e}, {actual['worst']} {actual['gap']:.1e}"
        for rank in ranks
        for actual in rank
        if not actual["names"] or max(actual["loss"], actual["norm"], actual["gap"]) > TOLERANCE
    ]
    assert not wrong, "\n".join(wrong)


def test_every_layout_and_kind_of_step_is_there(ranks: StepsOfRanks) -> None:
    met = [row["case"] for row in ranks[0]]
    assert {case.model for case in met} == {"switch", "ulysses", "space", "full"}
    assert {case.latent for case in met} == set(LATENTS) and {case.strategy for case in met} == {"ddp", "fsdp"}
    assert {case.tp for case in met} == {1, 2} and {case.masked for case in met} == {True, False}
    assert {case.times for case in met} == {"samples", "frames"} and {case.text for case in met} == {"whole", "split"}
    if len(ranks) == 4:
        products = {(case.ulysses, case.ring, case.model) for case in met if case.dsp > 1}
        assert products >= {(2, 1, "ulysses"), (1, 2, "ulysses"), (2, 1, "space"), (1, 2, "space")}
    pairs = {(case.ulysses, case.ring) for case in met}
    assert pairs >= ({(2, 1), (1, 2)} if len(ranks) == 2 else {(4, 1), (2, 2), (1, 4)})


def test_the_exchanges_ran_and_images_make_none(ranks: StepsOfRanks) -> None:
    """What the ledger of each rank must hold, so that no layout passes by computing everything everywhere."""
    for row in (row for rank in ranks for row in rank):
        case, sent = row["case"], row["sent"]
        axes = {axis for (_, axis), count in sent.items() if count}
        expected = {"tp"} if case.tp > 1 else set()
        if case.latent != "image" and case.processes > 1:
            expected.add("sequence")  # joined at the end
            expected |= {"dsp"} if case.parallel.dsp > 1 else set()  # re-sharded
            crossing = case.model != "switch"
            assert case.latent == "few frames" or (sent.get(("ring", "sequence"), 0) > 0) == (case.text == "split"), (
                case
            )
            expected |= {axis for axis in ("ulysses", "ring") if crossing and getattr(case, axis) > 1}
            if case.extra == "window":
                expected.add("ring_outer")
        # with fewer frames than ranks some have nothing to send
        assert axes == expected or (case.latent == "few frames" and axes <= expected), case


# -- bytes ---------------------------------------------------------------------------------------------------------------


def foretold(case: Case, world: int, rank: int) -> Sent:
    """By the formulas: a step of the samples that this rank has."""
    config = SoraDiTConfig(**{**vars(MODEL), "arrangement": "full" if case.model == "full" else "factorised"})
    parallel, image = case.parallel, case.latent == "image"
    together = case.tp * (1 if image else case.processes)
    work = AttentionWorkload(
        batch=len(range(rank // together, SAMPLES, world // together))
        or 1,  # a rank without a sample computes a filler
        grid=config.grid(LATENTS[case.latent]),
        width=config.width,
        heads=config.heads,
        spans=tuple(config.span(block) for block in range(config.depth)),
        values=config.patch_values,
        text=TEXT_TOKENS,
        element_size=FLOAT,
        masked=case.masked,
        image=image,
    )
    if case.extra == "accumulate":  # micro-batches of one sample; bytes are linear in samples
        rows = -(-SAMPLES // (world // together))
        assert work.batch <= rows
        work = AttentionWorkload(**{**vars(work), "batch": rows})
    group = list(places(parallel))
    place = group[rank % len(group)]
    recomputed = range(config.depth) if case.extra == "exchange again" else ()  # else what came is kept
    sent = step_traffic(work, parallel, place, recomputed=recomputed)
    return sent + gradient_traffic(shared_bytes(config, world // case.tp, rank // case.tp), case.tp)


def shared_bytes(config: SoraDiTConfig, shards: int, place: int) -> int:
    """Of gradients of parameters without a role, in the shard of one rank (cut along the first dim, as `fully_shard` does)."""
    count, model = 0, on_meta(config)
    for name, parameter in model.named_parameters():
        module, _, kind = name.rpartition(".")
        linears = model.plan.linears.items()
        role = next((linear.role for pattern, linear in linears if fnmatch.fnmatchcase(module, pattern)), None)
        if role is None or (role == "row" and kind == "bias"):
            size = -(-parameter.shape[0] // shards)
            rows = max(0, min(size, parameter.shape[0] - size * place))
            count += rows * math.prod(parameter.shape[1:]) * FLOAT
    return count


def test_formulas_equal_the_ledger_to_the_byte(ranks: StepsOfRanks) -> None:
    wrong = []
    for rank, of_rank in enumerate(ranks):
        for case, sent in ((row["case"], Counter(row["sent"])) for row in of_rank):
            wanted = foretold(case, len(ranks), rank)
            if +sent != wanted:
                wrong.append(f"rank {rank}, {case}: sent {dict(+sent)}, foretold {dict(wanted)}")
    assert not wrong, "\n".join(wrong[:20])


def test_dsp_moves_at_most_half_of_what_ulysses_moves(ranks: StepsOfRanks) -> None:
    """All-to-alls of a step, summed over the group's ranks: shards of odd numbers of frames and places are not quite even."""
    world = len(ranks)

    def moved(case: Case) -> int:
        results = [met["sent"] for of_rank in ranks for met in of_rank if met["case"] == case]
        assert len(results) == world
        return sum(count for sent in results for (kind, _), count in sent.items() if kind == "all_to_all")

    assert 0 < moved(Case(world, 1, "switch")) <= moved(Case(world, 1, "ulysses")) / 2
