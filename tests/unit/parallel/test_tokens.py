"""Who holds which tokens, for any sizes and degrees, simulated in one process: every token once, and there and back."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mmspeed.comm import Axis, even_sizes
from mmspeed.models.sora.sora_plan import sora_plan
from mmspeed.parallel.boundaries import record as record_module
from mmspeed.parallel.boundaries.layout import TokenLayout, TokenRange, split_range
from mmspeed.parallel.boundaries.record import ForwardRecord, Sequences
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes
from mmspeed.protocols.plan import Attended, Gather, Split, Tokens

sizes = st.integers(0, 13)
lengths = st.integers(1, 13)  # of what a model sees
degrees = st.integers(1, 5)
kinds = st.sampled_from(["frames", "space", "full"])
dims: st.SearchStrategy[Attended] = st.sampled_from(["rows", "columns"])
PLANS = {False: sora_plan(["spatial", "temporal"], 4), True: sora_plan(["full"], 4)}  # by full
VIDEO, TEXT = Split("video", dim=2, rows=1), Split("text", dim=1)


def layout_at(
    dsp: int, ring: int, ulysses: int, tp: int, place: int, part: int, kind: str, text: int | None = None
) -> TokenLayout:
    """Of one process, without groups: it can tell who holds what, and exchange nothing."""
    spread = place % (ring * ulysses)

    def axis(name: str, size: int, rank: int) -> Axis:
        return Axis(name, None, size, rank)

    return TokenLayout(
        axes=SequenceAxes(axis("ring", ring, spread // ulysses), axis("ulysses", ulysses, spread % ulysses)),
        hybrid=axis("sequence", ring * ulysses, spread),
        dsp=axis("dsp", dsp, place // (ring * ulysses)),
        whole=axis("sequence", dsp * ring * ulysses, place),
        tensor=axis("tp", tp, part),
        shard="columns" if kind == "space" else "rows",
        text_from=text,
    )


def record_at(layout: TokenLayout, kind: str, image: bool = False) -> ForwardRecord:
    return ForwardRecord(Sequences(PLANS[kind == "full"], layout), image)


def numbers(shape: tuple[int, int]) -> Tensor:
    """Of tokens, as a model has them whole: (1, T, S)."""
    return torch.arange(shape[0] * shape[1]).view(1, *shape)


@given(start=st.integers(-5, 50), length=st.integers(0, 60), parts=st.integers(1, 70))
def test_parts_of_a_range_join_to_it(start: int, length: int, parts: int) -> None:
    whole = range(start, start + length)
    results = [split_range(whole, parts, part) for part in range(parts)]
    assert [place for part in results for place in part] == list(whole)
    assert tuple(map(len, results)) == even_sizes(length, parts)


@given(
    rows=sizes,
    columns=sizes,
    dsp=degrees,
    hybrid=degrees,
    m=degrees,
    kind=st.sampled_from(["frames", "space"]),
    attends=dims,
    whole=st.booleans(),
)
def test_every_token_is_held_once(
    rows: int, columns: int, dsp: int, hybrid: int, m: int, kind: str, attends: Attended, whole: bool
) -> None:
    counts, shape = torch.zeros(rows, columns, dtype=torch.int64), (rows, columns)
    layout = layout_at(dsp, hybrid, 1, m, 0, 0, kind)
    assert len(set(layout.places())) == dsp * hybrid
    for h, d in layout.places():
        held = layout.unsplit(shape) if whole else layout.held(shape, attends, True, h, d)
        assert len(held.columns) == m and held.tokens == len(held.rows) * held.width
        for own in held.columns:
            counts[held.rows.start : held.rows.stop, own.start : own.stop] += 1
    assert bool((counts == (dsp * hybrid if whole else 1)).all())


@settings(deadline=None, max_examples=60)
@given(rows=lengths, columns=lengths, degree=st.tuples(*[st.integers(1, 3)] * 4), kind=kinds, image=st.booleans())
def test_parts_of_all_processes_agree(rows: int, columns: int, degree: Any, kind: str, image: bool) -> None:
    """Cuts join to the whole; frames, positions, masks and lengths are those of the tokens."""
    dsp, ring, ulysses, tp = degree
    dsp = 1 if kind == "full" else dsp
    n, shape = dsp * ring * ulysses, (1 if kind == "full" else rows, columns)
    along: tuple[Attended, ...] = ("columns",) if kind == "full" else ("rows", "columns")
    for attends in along:
        counts = torch.zeros(shape[0] * shape[1], dtype=torch.int64)
        for place in range(n):
            seen: list[Tensor] = []
            for part_number in range(tp):
                record = record_at(layout_at(dsp, ring, ulysses, tp, place, part_number, kind), kind, image)
                own = record.cut(numbers(shape), VIDEO, attends, "test")
                check_part(record, own, attends, shape, kind)
                counts[own.flatten()] += 1
                seen.append(own)
            joined = torch.cat(seen, 2)
            assert record.all_sizes("video", attends, "test")[place] == joined.numel()
            mask = record.cut(numbers(shape) % 3 != 0, block_split("mask_BTS", kind), attends, "test")
            assert torch.equal(mask, joined % 3 != 0)  # of the tokens seen, in the order in which they are gathered
        split = n > 1 and not image
        assert bool((counts == (1 if split else n)).all())


def block_split(argument: str, kind: str) -> Split:
    """What the plan of SoraDiT says of an argument of its blocks."""
    split = PLANS[kind == "full"].inputs["blocks.*"][argument]
    assert isinstance(split, Split)
    return split


def check_part(record: ForwardRecord, own: Tensor, attends: Attended, shape: tuple[int, int], kind: str) -> None:
    """One process's part, whose own tokens have the numbers `own`."""
    rows, columns = shape
    layout, held = record.sequences.layout, record.held("video", attends, "test")
    widths = record.widths("video", attends, "test")
    assert own.shape[2] == widths[layout.tensor.rank] and sum(widths) == held.width
    number = numbers(shape)[0]
    of_places = number // columns  # of frames, here
    frames = record.cut(
        of_places if kind == "full" else of_places[:, :1], block_split("frame_TS", kind), attends, "test"
    )
    assert not own.numel() or torch.equal(frames.expand(own.shape[1:]), own[0] // columns)
    pos_TSX = torch.stack((number // columns, number % columns, number), -1)
    pos_T1X = record.cut(pos_TSX[:, :1], block_split("pos_T1X", kind), attends, "test")
    pos_1SX = record.cut(pos_TSX[:1], block_split("pos_1SX", kind), attends, "test")
    pos_NX = pos_T1X[:, 0] if attends == "rows" else pos_1SX[0]
    length = len(held.rows) if attends == "rows" else held.width
    assert len(pos_NX) == length or (len(pos_NX) == 1 and shape[attends == "columns"] == 1)
    crosses = record.crosses(("video",), attends, "test")
    if not crosses:
        assert length == (rows if attends == "rows" else columns)
        return
    assert attends == layout.crossing(kind != "full") and layout.hybrid.size > 1
    of_all = record.attended_sizes(("video",), attends, "test")
    assert sum(of_all) == (rows if attends == "rows" else columns) and of_all[layout.axes.rank] == length
    everyone = record.positions_of_all("video", attends, "test")
    assert len(everyone) == sum(of_all)
    mine = everyone[sum(of_all[: layout.axes.rank]) :][:length]
    assert torch.equal(mine, pos_NX[:length])


@settings(deadline=None, max_examples=80)
@given(
    rows=sizes, columns=sizes, dsp=st.integers(1, 4), spread=st.integers(1, 3), m=st.integers(1, 3),
    kind=st.sampled_from(["frames", "space"]), back=st.booleans(),
)  # fmt: skip
def test_tokens_turn_there_and_back(
    rows: int, columns: int, dsp: int, spread: int, m: int, kind: str, back: bool
) -> None:
    """The exchange of all places on dsp, made by hand from what `reshard` says it moves, gives what is wanted."""
    ways: tuple[Attended, Attended] = ("columns", "rows") if back else ("rows", "columns")
    tokens = Tokens("video", dim=2, rows=1)
    for part in range(m):
        layout = layout_at(dsp, spread, 1, m, 0, part, kind)
        held = {w: [cut(layout.held((rows, columns), w, True, h, d), part) for h, d in layout.places()] for w in ways}
        parts = {w: [numbers((rows, columns))[:, one, other] for one, other in actual] for w, actual in held.items()}
        for at in range(spread):  # only places of one spread exchange
            moved = []
            for place in range(at, dsp * spread, spread):
                record = record_at(layout_at(dsp, spread, 1, m, place, part, kind), kind)
                record.tell("video", (rows, columns), "test")
                with patch.object(record_module, "all_to_all", lambda *args: args):
                    moved.append(record.reshard(parts[ways[0]][place], tokens, *ways, "test"))
            for number, (expected, sent) in enumerate(zip(parts[ways[1]][at::spread], moved, strict=True)):
                if dsp == 1:
                    assert torch.equal(sent, expected)
                    continue
                pieces = [x.split(list(out), scatter)[number] for x, _, scatter, _, out, _ in moved]  # type: ignore[misc]
                _, axis, _, gather, _, come = sent  # type: ignore[misc]
                assert axis.name == "dsp" and [piece.shape[gather] for piece in pieces] == list(come)
                assert torch.equal(torch.cat(pieces, gather), expected)


def cut(held: TokenRange, part: int) -> tuple[slice, slice]:
    own = held.columns[part]
    return slice(held.rows.start, held.rows.stop), slice(own.start, own.stop)


@given(place=st.integers(0, 5), tokens=st.integers(1, 20), least=st.integers(1, 20), image=st.booleans())
def test_captions_are_split_from_a_length_on(place: int, tokens: int, least: int, image: bool) -> None:
    text_BL = torch.arange(tokens)[None]
    for dsp, ring, kind in ((1, 3, "full"), (3, 1, "frames")):
        record = record_at(layout_at(dsp, ring, 2, 1, place, 0, kind, least), kind, image)
        part = record.cut(text_BL, TEXT, "columns", "test")
        if tokens < least or image:
            assert not record.is_split("text", "test") and part is text_BL
        else:
            assert part[0].tolist() == list(split_range(range(tokens), 6, place))
            sizes = record.all_sizes("text", "columns", "test")
            assert sizes == even_sizes(tokens, 6) and sizes[place] == part.shape[1]


def test_one_process_moves_nothing() -> None:
    layout = TokenLayout()
    record = record_at(layout, "frames")
    x = torch.randn(2, 3, 4, 5)
    assert record.cut(x, VIDEO, "rows", "test") is x
    assert record.reshard(x, Tokens("video", dim=2, rows=1), "columns", "rows", "test") is x
    assert record.gather(x, Gather("video", dim=2, rows=1), "rows", "test") is x
    for attends in ("rows", "columns"):
        assert record.gather_seen(x, "video", 2, attends, "test") is x  # type: ignore[arg-type]
        assert record.scatter_own(x, "video", 2, attends, "test") is x  # type: ignore[arg-type]
        assert not record.crosses(("video",), attends, "test")  # type: ignore[arg-type]
    assert not layout.ledger.calls
