"""Who holds which tokens, for any sizes and degrees, simulated in one process: every token once, and there and back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmspeed.comm import Axis, even_sizes
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes
from mmspeed.parallel.tokens import WHOLE, ShardedTokens, TokenLayout, TokenPlacement, TokenShard, shard_of, split_range

sizes = st.integers(0, 13)
lengths = st.integers(1, 13)  # of what a model sees
degrees = st.integers(1, 5)
kinds = st.sampled_from(["frames", "space", "full"])
# how tokens are held: in blocks that attend along the dim that is cut over ring x ulysses, and in the others
CROSSING = [TokenPlacement(("spread",), ("dsp",)), TokenPlacement(("dsp",), ("spread",))]
OTHERS = [TokenPlacement(("spread", "dsp"), ()), TokenPlacement((), ("spread", "dsp"))]


def layout_at(
    dsp: int, ring: int, ulysses: int, tp: int, place: int, part: int, kind: str, text: int | None = None
) -> TokenLayout:
    """Of one process, without groups: it can tell who holds what, and exchange nothing."""
    spread = place % (ring * ulysses)

    def axis(name: str, size: int, rank: int) -> Axis:
        return Axis(name, None, size, rank)

    return TokenLayout(
        axes=SequenceAxes(axis("ring", ring, spread // ulysses), axis("ulysses", ulysses, spread % ulysses)),
        whole=axis("sequence", dsp * ring * ulysses, place),
        dsp=axis("dsp", dsp, place // (ring * ulysses)),
        tensor=axis("tp", tp, part),
        shard="columns" if kind == "space" else "rows",
        text_from=text,
    )


def spread_at(
    layout: TokenLayout, shape: tuple[int, int], kind: str, image: bool = False, masked: bool = False
) -> ShardedTokens:
    rows, columns = shape
    number = torch.arange(rows * columns).view(rows, columns)
    pos_TSX = torch.stack((number // columns, number % columns, number), -1)
    mask = (number % 3 != 0)[None] if masked else None
    return layout.shard_tokens(pos_TSX, mask, 7, full=kind == "full", image=image)


@given(start=st.integers(-5, 50), length=st.integers(0, 60), parts=st.integers(1, 70))
def test_parts_of_a_range_join_to_it(start: int, length: int, parts: int) -> None:
    whole = range(start, start + length)
    found = [split_range(whole, parts, part) for part in range(parts)]
    assert [place for part in found for place in part] == list(whole)
    assert tuple(map(len, found)) == even_sizes(length, parts)


@given(
    rows=sizes,
    columns=sizes,
    dsp=degrees,
    spread=degrees,
    m=degrees,
    holding=st.sampled_from([*CROSSING, *OTHERS, WHOLE]),
)
def test_every_token_is_held_once(rows: int, columns: int, dsp: int, spread: int, m: int, holding: Any) -> None:
    n = dsp * spread
    counts = torch.zeros(rows, columns, dtype=torch.int64)
    for place in range(n):
        held = shard_of(holding, (rows, columns), (dsp, spread), place, m)
        assert len(held.columns) == m and held.tokens == len(held.rows) * held.width
        for own in held.columns:
            counts[held.rows.start : held.rows.stop, own.start : own.stop] += 1
    assert bool((counts == (n if holding == WHOLE else 1)).all())


@settings(deadline=None)
@given(rows=sizes, columns=sizes, n=degrees, m=degrees)
def test_shares_differ_little(rows: int, columns: int, n: int, m: int) -> None:
    """By one row, or by one column for each tensor-parallel process."""
    for holding, each in zip(OTHERS, (columns, rows * m), strict=True):
        tokens = [shard_of(holding, (rows, columns), (n, 1), place, m).tokens for place in range(n)]
        assert tokens == [shard_of(holding, (rows, columns), (1, n), place, m).tokens for place in range(n)]
        assert max(tokens) - min(tokens) <= each


@settings(deadline=None, max_examples=60)
@given(rows=lengths, columns=lengths, degree=st.tuples(*[st.integers(1, 3)] * 4), kind=kinds, image=st.booleans())
def test_parts_of_all_processes_agree(rows: int, columns: int, degree: Any, kind: str, image: bool) -> None:
    """Cuts join to the whole; frames, positions, masks and lengths are those of the tokens."""
    dsp, ring, ulysses, tp = degree
    dsp = 1 if kind == "full" else dsp
    n, shape = dsp * ring * ulysses, (1 if kind == "full" else rows, columns)
    whole = torch.arange(shape[0] * shape[1]).view(1, *shape)
    for along in ("S",) if kind == "full" else ("T", "S"):
        counts = torch.zeros(shape[0] * shape[1], dtype=torch.int64)
        for place in range(n):
            seen: list[Tensor] = []
            for part_number in range(tp):
                layout = layout_at(dsp, ring, ulysses, tp, place, part_number, kind)
                spread = spread_at(layout, shape, kind, image, masked=True)
                part = spread.shard_along(along)  # type: ignore[arg-type]
                own = spread.shard(whole, part)
                check_part(part, own, kind, along, shape)
                counts[own.flatten()] += 1
                seen.append(own)
            joined = torch.cat(seen, 2)
            assert part.tokens[place] == joined.numel() and part.mask_BTS is not None
            assert torch.equal(
                part.mask_BTS, joined % 3 != 0
            )  # of the tokens seen, in the order in which they are gathered
        split = n > 1 and not image
        assert bool((counts == (1 if split else n)).all())


def check_part(part: TokenShard, own: Tensor, kind: str, along: str, shape: tuple[int, int]) -> None:
    """One process's part, whose own tokens have the numbers `own`."""
    rows, columns = shape
    assert own.shape[2] == part.widths[part.sharded.layout.tensor.rank] and sum(part.widths) == part.held.width
    frames = own[0] // columns
    assert torch.equal(part.frames.expand(own.shape[1:]) if own.numel() else frames, frames)
    layout = part.sharded.layout
    cuts = part.placement.rows if along == "T" else part.placement.columns
    length = len(part.held.rows) if along == "T" else part.held.width
    assert len(part.pos_NX) == length
    if part.lengths is None:
        assert (not cuts or layout.axes.size == 1) and length == (rows if along == "T" else columns)
    else:
        assert cuts == ("spread",) and sum(part.lengths) == (rows if along == "T" else columns)
        assert part.lengths[layout.axes.rank] == length
        assert torch.equal(part.positions_of_all()[sum(part.lengths[: layout.axes.rank]) :][:length], part.pos_NX)


@settings(deadline=None, max_examples=80)
@given(
    rows=sizes, columns=sizes, dsp=st.integers(1, 4), spread=st.integers(1, 3), m=st.integers(1, 3),
    shard=st.sampled_from([0, 1]), back=st.booleans(),
)  # fmt: skip
def test_tokens_turn_there_and_back(
    rows: int, columns: int, dsp: int, spread: int, m: int, shard: int, back: bool
) -> None:
    """The exchange of all places on dsp, made by hand from what `reshard` says it moves, gives what is wanted."""
    whole = torch.arange(rows * columns).view(1, rows, columns)
    n, ways = dsp * spread, (CROSSING[shard], OTHERS[shard])
    now, wanted = ways[::-1] if back else ways
    scatter, gather = (1, 2) if (shard == 0) != back else (2, 1)  # of the tensors of `now`
    for part_number in range(m):
        held = {
            holding: [cut(whole, shard_of(holding, (rows, columns), (dsp, spread), place, m), part_number) for place in range(n)]
            for holding in (now, wanted)
        }  # fmt: skip
        for at in range(spread):  # only places of one spread exchange
            sends = [x.split(even_sizes(x.shape[scatter], dsp), scatter) for x in held[now][at::spread]]
            for place, expected in enumerate(held[wanted][at::spread]):
                assert torch.equal(torch.cat([of_sender[place] for of_sender in sends], gather), expected)


def cut(whole_BTS: Tensor, held: Any, part: int) -> Tensor:
    own = held.columns[part]
    return whole_BTS[:, held.rows.start : held.rows.stop, own.start : own.stop]


@given(place=st.integers(0, 5), tokens=st.integers(1, 20), least=st.integers(1, 20), image=st.booleans())
def test_captions_are_split_from_a_length_on(place: int, tokens: int, least: int, image: bool) -> None:
    layout = layout_at(1, 3, 2, 1, place, 0, "full", least)
    spread = replace(spread_at(layout, (1, 12), "full", image), text_tokens=tokens)
    spread = layout.shard_tokens(spread.pos_TSX, None, tokens, full=True, image=image)
    text_BL = torch.arange(tokens)[None]
    if tokens < least or image:
        assert not spread.text_is_split and spread.text(text_BL) is text_BL
    else:
        assert spread.text(text_BL)[0].tolist() == list(split_range(range(tokens), 6, place))


def test_one_process_moves_nothing() -> None:
    layout = TokenLayout()
    spread = spread_at(layout, (3, 4), "frames")
    x = torch.randn(2, 3, 4, 5)
    rows, columns = spread.shard_along("S"), spread.shard_along("T")
    assert spread.reshard(x, rows, columns) is x and spread.unshard(x, columns) is x
    assert rows.all_gather(x) is x and rows.reduce_scatter(x) is x and rows.lengths is None and not layout.ledger.calls
