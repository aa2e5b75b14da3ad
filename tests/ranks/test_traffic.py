"""The bytes that `mmspeed.plan.traffic` foretells, against the ledger of real training steps, on each rank.

The steps are those of `test_sequence`: every scheme, layout and kind of input of 2 and 4 ranks.
"""

from __future__ import annotations

import fnmatch
import math
from collections import Counter

import pytest

from mmspeed.config.parallel import ParallelConfig
from mmspeed.models.sora_dit import SoraDiT, SoraDiTConfig, on_meta
from mmspeed.plan.traffic import Sent, Work, gradient_traffic, places, step_traffic
from tests.ranks.test_sequence import LATENTS, MODEL, SAMPLES, Case, Groups, cases, step
from tests.spawn import run_ranks

FLOAT = 4  # bytes; the steps compute in float32
TEXT_TOKENS = 7
Counted = list[list[tuple[Case, Sent]]]  # by rank, by case


def some_cases(world: int) -> list[Case]:
    """Each scheme, axis and kind of input of that many ranks once or twice; `test_sequence` has them all."""
    n, half = world, world // 2
    found = [Case(n, 1, model) for model in ("switch", "ulysses", "full")]
    found += [Case(1, n, model, masked=True, extra="checkpointing") for model in ("switch", "ulysses", "space", "full")]
    found += [Case(n, 1, model, masked=True, text="split") for model in ("switch", "ulysses", "space", "full")]
    found += [Case(n, 1, model, "few frames") for model in ("switch", "ulysses")]
    found += [Case(half, 1, m, "odd", "fsdp", 2, True, text="split", extra="checkpointing") for m in ("switch", "full")]
    found += [Case(half, 1, "ulysses", "few frames", "fsdp", 2), Case(half, 1, "switch", "image", "fsdp", 2)]
    found += [Case(n, 1, "switch", "image"), Case(1, n, "full", extra="accumulate")]
    if n == 4:
        found += [Case(2, 2, model, masked=True, text="split") for model in ("switch", "ulysses", "full")]
        found += [Case(1, 4, "full", masked=True, extra="window"), Case(1, 2, "space", "odd", "fsdp", 2, True)]
    return found


def counted(world: int, everything: bool) -> list[tuple[Case, Sent]]:
    """What the ledger of this rank has of each case."""
    groups = Groups()
    chosen = cases(world) if everything else some_cases(world)
    return [(case, Counter(step(case, world, groups)["sent"])) for case in chosen]


@pytest.fixture(
    scope="module",
    params=[(2, False), (4, False), *(pytest.param((n, True), marks=pytest.mark.slow) for n in (2, 4))],
    ids=["2 ranks, some", "4 ranks, some", "2 ranks, all", "4 ranks, all"],
)
def ranks(request: pytest.FixtureRequest) -> Counted:
    world, everything = request.param
    return run_ranks(counted, world, world, everything, timeout=900)


def parallel_of(case: Case) -> ParallelConfig:
    return ParallelConfig(
        ring=case.ring,
        ulysses=case.ulysses,
        tp=case.tp,
        scheme="ulysses" if case.model in ("ulysses", "space") else "switch",
        shard="space" if case.model == "space" else "frames",
        shard_text=2 if case.text == "split" else None,
        ring_window=2 if case.extra == "window" else None,
    )


def foretold(case: Case, world: int, rank: int) -> Sent:
    """By the formulas: a step of the samples that this rank has."""
    config = SoraDiTConfig(**{**vars(MODEL), "arrangement": "full" if case.model == "full" else "factorised"})
    parallel, image = parallel_of(case), case.latent == "image"
    together = case.tp * (1 if image else case.ulysses * case.ring)
    work = Work(
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
        work = Work(**{**vars(work), "batch": rows})
    group = list(places(parallel))
    place = group[rank % len(group)]
    recomputed = range(config.depth) if case.extra == "checkpointing" else ()
    sent = step_traffic(work, parallel, place, recomputed=recomputed)
    return sent + gradient_traffic(shared_bytes(config, world // case.tp, rank // case.tp), case.tp)


def shared_bytes(config: SoraDiTConfig, shards: int, place: int) -> int:
    """Of gradients of parameters without a role, in the shard of one rank (cut along the first dim, as `fully_shard` does)."""
    found = 0
    for name, parameter in on_meta(config).named_parameters():
        module, _, kind = name.rpartition(".")
        role = next((role for pattern, role in SoraDiT.roles.items() if fnmatch.fnmatchcase(module, pattern)), None)
        if role is None or (role == "row" and kind == "bias"):
            size = -(-parameter.shape[0] // shards)
            rows = max(0, min(size, parameter.shape[0] - size * place))
            found += rows * math.prod(parameter.shape[1:]) * FLOAT
    return found


def test_formulas_equal_the_ledger_to_the_byte(ranks: Counted) -> None:
    wrong = []
    for rank, of_rank in enumerate(ranks):
        for case, sent in of_rank:
            wanted = foretold(case, len(ranks), rank)
            if +sent != wanted:
                wrong.append(f"rank {rank}, {case}: sent {dict(+sent)}, foretold {dict(wanted)}")
    assert not wrong, "\n".join(wrong[:20])


def test_the_cases_send_something(ranks: Counted) -> None:
    met = {(kind, axis) for of_rank in ranks for _, sent in of_rank for kind, axis in +sent}
    everything = {
        ("all_to_all", "sequence"), ("all_to_all", "ulysses"), ("all_gather", "ulysses"), ("ring", "ring"),
        ("all_gather", "sequence"), ("reduce_scatter", "sequence"), ("all_gather", "tp"), ("reduce_scatter", "tp"),
        ("all_reduce", "tp"),
    }  # fmt: skip
    assert met >= everything


def test_switch_moves_at_most_half_of_what_ulysses_moves(ranks: Counted) -> None:
    """All-to-alls of a step, summed over the group's ranks: shards of odd numbers of frames and places are not quite even."""
    world = len(ranks)

    def moved(case: Case) -> int:
        found = [sent for of_rank in ranks for met, sent in of_rank if met == case]
        assert len(found) == world
        return sum(count for sent in found for (kind, _), count in sent.items() if kind == "all_to_all")

    assert 0 < moved(Case(world, 1, "switch")) <= moved(Case(world, 1, "ulysses")) / 2
