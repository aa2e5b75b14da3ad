"""Traffic of sequence and tensor parallelism: bytes that a rank sends, by kind and axis, for any layout, without a process group.

The numbers are those that the ledger of `mmspeed.comm` counts when the same layout trains, to the byte and on each rank:

    exchange                          where                                          kind, axis
    tokens re-sharded (`dsp`)         between blocks of two spans                    all_to_all, dsp
    queries, keys, values, output     attention over shards, "ulysses" part          all_to_all, ulysses
    key mask                          the same                                       all_gather, ulysses
    blocks of keys and gradients      attention over shards, "ring" part             ring, ring (ring_outer between windows)
    the same of cut documents alone   packed documents over a ring (`packed_traffic`)
    tokens of tensor parallelism      3 gathers and 3 sums a block                   all_gather and reduce_scatter, tp
    the prediction                    after the last block                           all_gather and reduce_scatter, sequence and tp
    gradients of shared parameters    once a step                                    all_reduce, tp
    tokens to experts and back        layers of experts (`expert_traffic`)           counts, dispatch and combine, ep
    what travels between stages       once a micro-batch (`stage_traffic`)           activations and gradients, pp
    gradients that all stages have    once a step (`gradient_traffic`)               all_reduce, pp

The gradients of an exchange are sent in reverse, so send and receive sizes swap. A recomputed block keeps the results of its exchanges;
with `memory.exchange_again`, or where it is compiled, it makes its forward exchanges a second time. Gradients that data parallelism
sums belong to the engine and are not counted here.

Legend: B batch, T S rows and columns of tokens (frames x positions of a frame; 1 x all where every block attends over all), E model
width, D head width, P values of a token's prediction, e bytes of a number, n = dsp x ring x ulysses ranks that share a sequence, a = ring x
ulysses of them that attend together, m tensor-parallel ranks.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mmspeed.comm.packing import even_sizes
from mmspeed.config.parallel import ParallelConfig
from mmspeed.log import format_bytes

from .schedules import Pipeline

AttentionType = Literal["spatial", "temporal", "full"]
Sent = Counter[tuple[str, str]]  # bytes by (kind, axis)

GATHERS = (
    3  # of a block, over the tensor-parallel axis: before self-attention, cross-attention and MLP; and a sum after each
)


@dataclass(frozen=True)
class AttentionWorkload:
    """The sizes of a forward pass and its backward pass.

    Args:
        batch: samples.
        grid: patches along (T, h, w).
        spans: the span of each block's attention; all "full", or none.
        values: numbers that the model predicts for a token, channels x patch volume.
        text: tokens of a caption, padding included.
        element_size: bytes of a number in the computation.
        masked: a video mask is given.
        image: the latent has one frame, so every rank of a group computes its own.
    """

    batch: int
    grid: tuple[int, int, int]
    width: int
    heads: int
    spans: tuple[AttentionType, ...]
    values: int
    text: int
    element_size: int = 2
    masked: bool = False
    image: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The token grid (T, S)."""
        t, h, w = self.grid
        return (1, t * h * w) if "full" in self.spans else (t, h * w)

    @property
    def head_width(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class RankCoordinates:
    """A rank's places on the axes."""

    ring: int = 0
    ulysses: int = 0
    tp: int = 0
    dsp: int = 0


def places(parallel: ParallelConfig) -> Iterator[RankCoordinates]:
    """The places of the ranks that compute one video, in the order of the ranks."""
    axes = (parallel.dsp, parallel.ring, parallel.ulysses, parallel.tp)
    for dsp, ring, ulysses, tp in itertools.product(*map(range, axes)):
        yield RankCoordinates(ring, ulysses, tp, dsp)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in a forward and in its backward pass."""

    forward: Sent = field(default_factory=Counter)
    backward: Sent = field(default_factory=Counter)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.forward + other.forward, self.backward + other.backward)

    def over(self, axis: str) -> Traffic:
        """The same bytes, counted under another axis."""
        passes = [
            Counter({(kind, axis): sent for (kind, _), sent in one.items()}) for one in (self.forward, self.backward)
        ]
        return Traffic(*passes)

    @property
    def total(self) -> int:
        """Bytes of both passes and all kinds."""
        return self.forward.total() + self.backward.total()


def step_traffic(
    work: AttentionWorkload,
    parallel: ParallelConfig,
    place: RankCoordinates,
    *,
    recomputed: Collection[int] = (),
    shared_gradients: int = 0,
) -> Sent:
    """The traffic of a step of one micro-batch.

    Args:
        recomputed: numbers of the blocks that repeat the exchanges of their forward pass.
        shared_gradients: bytes that this rank holds of gradients that are not split over `tp` (`gradient_traffic`).
    """
    whole = ends_traffic(work, parallel, place)
    again: Sent = Counter()
    for number, span in enumerate(work.spans):
        block = block_traffic(work, parallel, place, span)
        whole += block
        if number in recomputed:
            again += block.forward
    return whole.forward + whole.backward + again + gradient_traffic(shared_gradients, parallel.tp)


def expert_traffic(
    sends: Sequence[int], comes: Sequence[int], rank: int, experts: int, width: int, element_size: int = 2
) -> Traffic:
    """The exchanges of a layer of experts over `ep`, exact from its routing.

    A row carries its float32 gate to the expert; outputs come back without. Before them go 8 bytes for each expert of another rank.

    Args:
        sends, comes: rows (a token's choice each) that this rank sends to each rank, and gets from it.
        experts: of all ranks. width: of the model. element_size: bytes of a number in products.
    """
    out, back, token = sum(sends) - sends[rank], sum(comes) - comes[rank], width * element_size
    gate = max(4, element_size)
    counts = 8 * experts // len(sends) * (len(sends) - 1)
    forward = ("counts", "ep", counts), ("dispatch", "ep", out * (token + gate)), ("combine", "ep", back * token)
    backward = ("dispatch", "ep", back * (token + gate)), ("combine", "ep", out * token)
    return Traffic(sent_bytes(*forward), sent_bytes(*backward))


def hidden_traffic(
    comes: Sequence[int], rank: int, kinds: int, experts: int, width: int, hidden: int, element_size: int = 2
) -> Traffic:
    """The exchanges of a layer of experts over `etp`, beside those of `expert_traffic` or `node_traffic`.

    Every rank gathers the rows of all, with their gates, and their outputs are summed as they are scattered back; before them goes a count
    for each of the `kinds` of rows that a rank gets. The halves of gate and up that a rank takes lie on others.

    Args:
        comes: rows that come to each rank of `etp`. experts: of this rank. hidden: width of an expert, of all ranks.
    """
    ranks, own, token, gate = len(comes), comes[rank], width * element_size, max(4, element_size)
    others, each = sum(comes) - own, hidden // len(comes)

    def shared(stored: int, taken: int) -> int:
        """Hidden units of gate and up that one rank stores and another takes."""
        piece = range(2 * each * stored, 2 * each * (stored + 1))
        needed = (range(begin + taken * each, begin + (taken + 1) * each) for begin in (0, hidden))
        return sum(max(0, min(piece.stop, part.stop) - max(piece.start, part.start)) for part in needed)

    out, back = (
        sum(shared(*pair) for to in range(ranks) if to != rank for pair in [(rank, to)[::order]]) for order in (1, -1)
    )
    unit = experts * width * element_size
    forward = (
        ("all_gather", "etp", (ranks - 1) * (8 * kinds + own * (token + gate))),
        ("columns", "etp", out * unit),
        ("reduce_scatter", "etp", others * token),
    )
    backward = (
        ("all_gather", "etp", (ranks - 1) * own * token),
        ("columns", "etp", back * unit),
        ("reduce_scatter", "etp", others * (token + gate)),
    )
    return Traffic(sent_bytes(*forward), sent_bytes(*backward))


@dataclass(frozen=True)
class NodeRows:
    """The rows of a layer of experts that this rank sends and gets, by node (tokens) and within its node (choices)."""

    out_O: Sequence[int]
    in_O: Sequence[int]
    out_I: Sequence[int]
    in_I: Sequence[int]
    node: int
    inner: int


def node_traffic(rows: NodeRows, experts: int, width: int, top_k: int, element_size: int = 2) -> Traffic:
    """As `expert_traffic`, with `parallel.ep_inner`: a token crosses to a node once, with the ids and gates of its choices, 8 bytes each."""
    nodes, inner, token = len(rows.out_O), len(rows.out_I), width * element_size
    out, back = sum(rows.out_O) - rows.out_O[rows.node], sum(rows.in_O) - rows.in_O[rows.node]
    onward, come = sum(rows.out_I) - rows.out_I[rows.inner], sum(rows.in_I) - rows.in_I[rows.inner]
    crossing, gate = token + 8 * top_k, max(4, element_size)
    forward = (
        ("counts", "ep_outer", 8 * (1 + experts // nodes) * (nodes - 1)),
        ("counts", "ep_inner", 8 * (experts // nodes // inner) * (inner - 1)),
        ("dispatch", "ep_outer", out * crossing),
        ("dispatch", "ep_inner", onward * (token + gate)),
        ("combine", "ep_inner", come * token),
        ("combine", "ep_outer", back * token),
    )
    backward = (
        ("dispatch", "ep_outer", back * crossing),
        ("dispatch", "ep_inner", come * (token + gate)),
        ("combine", "ep_inner", onward * token),
        ("combine", "ep_outer", out * token),
    )
    return Traffic(sent_bytes(*forward), sent_bytes(*backward))


@dataclass(frozen=True)
class EvenRouting:
    """Tokens that choose `top_k` of `experts`, all alike: of those in `kept` of `groups` groups alone where a router limits groups."""

    experts: int
    top_k: int
    groups: int = 1
    kept: int = 1

    def reaches(self, nodes: int) -> float:
        """The probability that some of a token's experts are on a node."""
        here, group = self.experts // nodes, self.experts // self.groups
        if self.groups % nodes and nodes % self.groups:  # nodes with parts of groups: as if groups were not limited
            return 1 - _none_of(here, self.experts, self.top_k)
        of_kept = self.kept * group
        if nodes > self.groups:
            return self.kept / self.groups * (1 - _none_of(here, of_kept, self.top_k))
        own = self.groups // nodes  # groups of the node, of which the router keeps some
        none = sum(
            math.comb(own, some)
            * math.comb(self.groups - own, self.kept - some)
            * _none_of(some * group, of_kept, self.top_k)
            for some in range(min(own, self.kept) + 1)
        )
        return 1 - none / math.comb(self.groups, self.kept)

    def rows_between(self, nodes: int) -> tuple[float, float]:
        """The rows of a token that go to other nodes in the mean: one for each choice, and one for each node."""
        return self.top_k * (1 - 1 / nodes), (nodes - 1) * self.reaches(nodes)


def _none_of(some: int, experts: int, top_k: int) -> float:
    """The probability that none of `some` experts is among `top_k` of all."""
    return math.comb(experts - some, top_k) / math.comb(experts, top_k)


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of a token that a layer of experts sends in forward and backward, to other nodes and within its own."""

    between: float
    within: float

    def __str__(self) -> str:
        return f"{format_bytes(self.between)} to other nodes and {format_bytes(self.within)} within its own"


def token_bytes(
    routing: EvenRouting, ep: int, inner: int, width: int, element_size: int
) -> tuple[TokenBytes, TokenBytes]:
    """The bytes of a token over `ep` processes, `inner` on a node: of the flat exchange, and of that by way of nodes."""
    tokens, nodes, k = 1 << 20, ep // inner, routing.top_k

    def rows(sent: Traffic, axis: str) -> float:
        passes = (sent.forward, sent.backward)
        return sum(one[kind, axis] for one in passes for kind in ("dispatch", "combine")) / tokens

    each = [tokens * k // ep] * ep
    flat = rows(expert_traffic(each, each, 0, routing.experts, width, element_size), "ep")
    to_nodes, within = [int(tokens * routing.reaches(nodes))] * nodes, [tokens * k // inner] * inner
    sent = node_traffic(NodeRows(to_nodes, to_nodes, within, within, 0, 0), routing.experts, width, k, element_size)
    between = flat * (ep - inner) / (ep - 1)
    return TokenBytes(between, flat - between), TokenBytes(rows(sent, "ep_outer"), rows(sent, "ep_inner"))


NODE = 8  # devices of a node that are assumed where `parallel.ep_inner` does not tell


def expert_lines(parallel: ParallelConfig, routing: EvenRouting, width: int, element_size: int) -> list[str]:
    """A line on what a token sends to experts, by link, with and without `parallel.ep_inner`; none where experts are not spread."""
    ep = parallel.ep
    inner = parallel.ep_inner or max(n for n in range(1, NODE + 1) if ep % n == 0)
    if ep == 1:
        return []
    head = f"experts over {ep} devices: for each layer, at even loads, a token sends"
    if inner == ep:
        (flat, _) = token_bytes(routing, ep, ep, width, element_size)
        return [f"{head} {format_bytes(flat.within)} forward and backward, on one node of {ep}"]
    nodes, ways = ep // inner, token_bytes(routing, ep, inner, width, element_size)
    own, other = ways if parallel.ep_inner is None else ways[::-1]
    way = f"with parallel.ep_inner={inner}" if parallel.ep_inner is None else "without parallel.ep_inner"
    shorter = "this layout" if own.between <= other.between else "the other"
    return [
        f"{head} {own}, forward and backward, on {nodes} nodes of {inner}; {way} it would send {other}: between nodes {shorter} is shorter"
    ]


def gradient_traffic(shared_gradients: int, ranks: int, axis: str = "tp") -> Sent:
    """The sum over an axis of gradients that all its ranks hold, once a step, for any number of micro-batches."""
    return sent_bytes(("all_reduce", axis, 2 * shared_gradients * (ranks - 1) // ranks))


def carried_bytes(tokens: int, width: int, element_size: int = 2, sums: int = 0) -> int:
    """Bytes of what travels between two stages for a micro-batch: the tokens that a rank holds, with those of captions in blocks of two
    streams, and `sums` numbers of float32 that are summed over blocks, such as a pack's auxiliary loss."""
    return tokens * width * element_size + 4 * sums


def stage_traffic(pipeline: Pipeline, rank: int, carried: Sequence[int]) -> Traffic:
    """What a rank sends to other stages in a step: `carried` bytes for each micro-batch from one stage to the next, and as many back."""
    forward, back = (
        sum(
            0 <= to < pipeline.stages and pipeline.rank_of(to) != rank
            for to in (stage + way for stage in pipeline.own(rank))
        )
        for way in (1, -1)
    )
    total = sum(carried)
    return Traffic(sent_bytes(("activations", "pp", forward * total)), sent_bytes(("gradients", "pp", back * total)))


def block_traffic(
    work: AttentionWorkload, parallel: ParallelConfig, place: RankCoordinates, span: AttentionType
) -> Traffic:
    """The traffic of a block, without the re-sharding before or after it."""
    shares, b = _shares(work, parallel, span), work.batch
    held, seen = shares.own(place, parallel), shares.tokens()[_rank(place, parallel)]
    tokens = b * work.width * work.element_size
    gathers = ("all_gather", "tp", GATHERS * (parallel.tp - 1) * held * tokens)
    sums = ("reduce_scatter", "tp", GATHERS * (seen - held) * tokens)
    traffic = Traffic(sent_bytes(gathers, sums), sent_bytes(gathers, sums))
    lengths = shares.lengths(span)
    if lengths is not None:
        rank = _rank(place, parallel)  # rows or columns that attend for themselves
        apart = sum(shares.columns[rank]) if span == "temporal" else shares.rows[rank]
        together = lengths[place.dsp * _spread(parallel) :][: _spread(parallel)]
        traffic += attention_traffic(work, parallel, place, b * apart, together, together, masked=work.masked)
    if shares.split and parallel.shard_text is not None and work.text >= parallel.shard_text:
        # a caption is short compared with a video: its keys are passed round all ranks, and no queries are exchanged
        keys = 2 * b * work.heads // parallel.tp * work.head_width * work.element_size
        text = ring_traffic(
            even_sizes(work.text, _group(parallel)), _rank(place, parallel), None, keys, b, work.element_size
        )
        traffic += text.over("sequence")
    return traffic


def ends_traffic(work: AttentionWorkload, parallel: ParallelConfig, place: RankCoordinates) -> Traffic:
    """The traffic outside of blocks: re-sharding between them, and gathering the prediction on every rank."""
    traffic, (rows, columns) = Traffic(), work.shape
    each = [_shares(work, parallel, span) for span in work.spans]
    for now, wanted in itertools.pairwise(each):
        if (now.rows, now.columns) != (wanted.rows, wanted.columns):
            traffic += _turn(work, parallel, place, now, wanted)
    last = each[-1]
    token, own = work.batch * work.values * work.element_size, last.own(place, parallel)
    outer = even_sizes(columns, parallel.tp)[
        place.tp
    ]  # columns of this tensor-parallel place, on all ranks of the group
    joined = rows * outer
    others = len(last.rows) - 1 if last.split else 0
    forward = (
        ("all_gather", "sequence", others * own * token),
        ("all_gather", "tp", (parallel.tp - 1) * joined * token),
    )
    part = own if last.split else joined
    backward = (
        ("reduce_scatter", "tp", rows * (columns - outer) * token),
        ("reduce_scatter", "sequence", (joined - part) * token),
    )
    return traffic + Traffic(sent_bytes(*forward), sent_bytes(*backward))


def held_tokens(work: AttentionWorkload, parallel: ParallelConfig, span: AttentionType) -> tuple[int, ...]:
    """Tokens of a sample that each place of the group computes in blocks of a span, with all its tensor-parallel ranks."""
    return _shares(work, parallel, span).tokens()


def attention_traffic(
    work: AttentionWorkload,
    parallel: ParallelConfig,
    place: RankCoordinates,
    batch: int,
    q_sizes: Sequence[int],
    k_sizes: Sequence[int],
    *,
    masked: bool,
) -> Traffic:
    """The traffic of a call of attention over shards: `q_sizes`, `k_sizes` are the lengths on all ranks of ring x ulysses."""
    u, first = parallel.ulysses, place.ring * parallel.ulysses
    rank = first + place.ulysses
    heads = work.heads // parallel.tp
    own_heads = even_sizes(heads, u)[place.ulysses]
    row = batch * work.head_width * work.element_size  # bytes of a token's head
    traffic = Traffic()
    if u > 1:
        out = [
            (heads - own_heads) * size for size in (q_sizes[rank], k_sizes[rank])
        ]  # all heads of this part but this rank's
        joined = [sum(sizes[first : first + u]) for sizes in (q_sizes, k_sizes)]
        back = [own_heads * (whole - size) for whole, size in zip(joined, (q_sizes[rank], k_sizes[rank]), strict=True)]
        mask = ("all_gather", "ulysses", (u - 1) * batch * k_sizes[rank] * masked)
        traffic += Traffic(
            sent_bytes(("all_to_all", "ulysses", row * (out[0] + 2 * out[1] + back[0])), mask),
            sent_bytes(("all_to_all", "ulysses", row * (back[0] + 2 * back[1] + out[0]))),
        )
    if parallel.ring > 1:
        blocks = [sum(k_sizes[u * at : u * (at + 1)]) for at in range(parallel.ring)]
        traffic += ring_traffic(
            blocks, place.ring, parallel.ring_window, 2 * own_heads * row, batch * masked, work.element_size
        )
    return traffic


@dataclass(frozen=True)
class RingTraffic:
    """The owners of the blocks that a rank of a ring sends on in a call: inside of windows ("ring") and between them ("ring_outer")."""

    forward: dict[str, list[int]]
    keys: dict[str, list[int]]  # in the backward pass
    gradients: dict[str, list[int]]


def ring_blocks(rank: int, ranks: int, window: int | None = None) -> RingTraffic:
    """The blocks that the schedules of `parallel.ring_steps` send, in closed form. `window` divides `ranks`."""
    width = 1 if window is None or window >= ranks else window
    windows, (of, at) = ranks // width, divmod(rank, width)

    def owner(turn: int, offset: int) -> int:
        return (of - turn) % windows * width + (at - offset) % width

    within = [owner(turn, offset) for turn in range(windows) for offset in range(width - 1)]
    here = [owner(0, offset) for offset in range(width)]  # this window is passed round again in the backward pass
    outer = "ring_outer" if width > 1 else "ring"
    between = [owner(turn, 0) for turn in range(windows - 1)]
    sums = [owner(turn, width - 1) for turn in range(1, windows)]

    def by_axis(inside: list[int], outside: list[int]) -> dict[str, list[int]]:
        return {"ring": inside, outer: outside} if width > 1 else {"ring": outside}

    return RingTraffic(by_axis(within, between), by_axis(within + here[:-1], between), by_axis(within + here[1:], sums))


def ring_traffic(
    blocks: Sequence[int], rank: int, window: int | None, key_bytes: int, mask_bytes: int, element_size: int
) -> Traffic:
    """The traffic of a ring. `blocks`: keys of each rank; bytes of one key (and its value) over batch and heads. Gradients are float32."""
    passed, traffic = ring_blocks(rank, len(blocks), window), Traffic()
    wide = key_bytes * max(element_size, 4) // element_size
    for axis, owners in passed.forward.items():
        traffic.forward["ring", axis] += (key_bytes + mask_bytes) * sum(blocks[owner] for owner in owners)
    for axis in passed.keys:
        keys, grads = (sum(blocks[owner] for owner in of[axis]) for of in (passed.keys, passed.gradients))
        traffic.backward["ring", axis] += (key_bytes + mask_bytes) * keys + wide * grads
    return Traffic(+traffic.forward, +traffic.backward)


@dataclass(frozen=True)
class _TokenShares:
    """The shares of T x S tokens that ranks hold: `rows` by place of the group, `columns` by that and by tensor-parallel place.

    `crossing`: the dim that is split although the blocks attend along it, rows or columns; None: there is none.
    """

    split: bool
    crossing: Literal["rows", "columns"] | None
    rows: tuple[int, ...]
    columns: tuple[tuple[int, ...], ...]

    def own(self, place: RankCoordinates, parallel: ParallelConfig) -> int:
        """Tokens of one rank."""
        rank = _rank(place, parallel)
        return self.rows[rank] * self.columns[rank][place.tp]

    def tokens(self) -> tuple[int, ...]:
        """Tokens by place of the group, summed over its tensor-parallel ranks."""
        return tuple(rows * sum(columns) for rows, columns in zip(self.rows, self.columns, strict=True))

    def lengths(self, span: AttentionType) -> tuple[int, ...] | None:
        """Lengths by place of the dim that a span attends along; None where every place has all of it."""
        if self.crossing is None:
            return None
        return self.rows if self.crossing == "rows" else tuple(map(sum, self.columns))


def _shares(work: AttentionWorkload, parallel: ParallelConfig, span: AttentionType) -> _TokenShares:
    """The token shares in blocks of a span.

    The crossing dim (columns of a full model; rows or columns by `shard`) is split over ring x ulysses. In blocks that attend along it
    dsp splits the other dim; in the others dsp splits each part of it again.
    """
    n, spread, (rows, columns) = _group(parallel), _spread(parallel), work.shape
    outer = even_sizes(columns, parallel.tp)
    if n == 1 or work.image:
        return _TokenShares(False, None, (rows,) * n, (outer,) * n)
    by_rows = span != "full" and parallel.shard == "frames"
    crosses = span in ("full", "temporal" if by_rows else "spatial")

    def crossing(size: int) -> list[int]:
        parts = even_sizes(size, spread)
        if crosses:
            return [*parts] * parallel.dsp
        each = [even_sizes(part, parallel.dsp) for part in parts]
        return [parts[dsp] for dsp in range(parallel.dsp) for parts in each]

    def other(size: int) -> list[int]:
        parts = even_sizes(size, parallel.dsp) if crosses else (size,) * parallel.dsp
        return [part for part in parts for _ in range(spread)]

    of_rows, of_columns = (crossing, other) if by_rows else (other, crossing)
    name: Literal["rows", "columns"] = "rows" if by_rows else "columns"
    columns_held = tuple(zip(*(of_columns(part) for part in outer), strict=True))
    return _TokenShares(True, name if crosses and spread > 1 else None, tuple(of_rows(rows)), columns_held)


def _turn(
    work: AttentionWorkload, parallel: ParallelConfig, place: RankCoordinates, now: _TokenShares, wanted: _TokenShares
) -> Traffic:
    """The traffic of re-sharding a rank's tokens over dsp: it sends all that it does not keep; backward returns as much as it received."""
    rank, token = _rank(place, parallel), work.batch * work.width * work.element_size
    rows = min(now.rows[rank], wanted.rows[rank])
    kept_tokens = rows * min(now.columns[rank][place.tp], wanted.columns[rank][place.tp])
    forward, back = (("all_to_all", "dsp", (of.own(place, parallel) - kept_tokens) * token) for of in (now, wanted))
    return Traffic(sent_bytes(forward), sent_bytes(back))


def _spread(parallel: ParallelConfig) -> int:
    """Ranks that attend together: ring x ulysses."""
    return parallel.ring * parallel.ulysses


def _group(parallel: ParallelConfig) -> int:
    """Ranks that share a sequence."""
    return parallel.sequence


def _rank(place: RankCoordinates, parallel: ParallelConfig) -> int:
    """A rank's place in its sequence-parallel group."""
    return (place.dsp * parallel.ring + place.ring) * parallel.ulysses + place.ulysses


def sent_bytes(*parts: tuple[str, str, int]) -> Sent:
    """Bytes by (kind, axis), without zeros."""
    return Counter({(kind, axis): sent for kind, axis, sent in parts if sent})
