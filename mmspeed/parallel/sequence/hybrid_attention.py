"""Attend over a sequence that is split over ranks: an all-to-all trades tokens for heads (Ulysses), then keys go round (ring).

Ulysses (Jacobs et al. 2023): ranks of the "ulysses" axis hold parts of the sequence with all heads; an all-to-all gives each the joined
parts with some of the heads, and another brings the output back. The ring then works on the joined parts (`parallel.ring`). Both together
are USP (Fang and Zhao 2024): ulysses on the fast links, the ring on the rest, any factorisation of the degree.

    ulysses, ring    what runs
    1, 1             `compute.attention.attention`
    u, 1             all-to-all, `compute.attention.attention`, all-to-all
    1, r             ring
    u, r             all-to-all, ring, all-to-all

(Only block attention computes `causal` or a given `scale`, so with these a ring of one rank takes the place of `attention`.)

Bytes that a rank sends per call, e the element size, for even parts (uneven: the sum over the parts):

    queries, keys, values, output over "ulysses" (all_to_all):  forward (u - 1) / u * B D e (2 A N + 2 K M),  backward the same
        for values of another width than keys, that width replaces D for values and output
    key mask over "ulysses" (all_gather):                       forward (u - 1) B M
    ring: the formulas of `parallel.ring`, with K / u heads and the joined length u M

Layouts in memory (`AttentionLayout`), which the plan declares for each attention (see docs/sequence-parallel.md). Strides may differ between
ranks where a dim has size 0 or 1.

    layout   in memory                      where
    BNAD     (batch, sequence, hidden): BSH full attention; rows that attend along themselves, B is batch x rows
    NBAD     (sequence, batch, hidden): SBH tokens that run so; columns that attend along themselves, B is the columns of one video
    BNGAD    (batch, rows, columns, hidden) columns that attend along themselves, of any number of videos: no view makes one dim of B and G
    BAND     heads outside tokens           projections that were copied head by head

Between ranks tensors are always sent tokens first (N B A D), whatever the layout. A rank that joins parts along tokens then reads them in
place, and one that splits tokens sends them in place, if its kernel wrote them so. Where heads are split or joined a copy is needed in
every layout, as a matrix product writes and reads all heads of a token together; that copy also makes the transpose between the layouts.

Causal order: the sequence is in `zigzag` order over the R ring places, and the Ulysses ranks of each place hold contiguous parts of its two
chunks, joined.

Legend: B batch, G rows or columns that attend separately, A heads, K heads of the keys, N queries and M keys that this rank holds, D head
width, u and r degrees.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor

from mmspeed.comm.axis import Axis
from mmspeed.comm.exchange import (
    all_to_all,
    even_sizes,
    start_all_gather,
    start_all_to_all,
    start_all_to_all_many,
)
from mmspeed.comm.halves import finish, finish_all
from mmspeed.compute.attention import Backend, attention, attention_apart
from mmspeed.compute.autocast import autocast_alike
from mmspeed.errors import UserError
from mmspeed.graphs import outside_graphs
from mmspeed.protocols.plan import AttentionLayout

from .ring import like_queries, ring_attention

# queries, keys, values and the keys' mask, of whole heads, to the output
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
# the memory an `Attend` reads: any strides, so that nothing is copied; each tensor contiguous; contiguous with heads outside tokens
Reads = Literal["strided", "NBAD", "BAND"]


def dims_of(layout: AttentionLayout) -> str:
    """The dims of the views, in the order of their shape."""
    return "BGAND" if "G" in layout else "BAND"


def memory_order(layout: AttentionLayout) -> tuple[int, ...]:
    """The views' dims in memory order, outermost first."""
    return tuple(dims_of(layout).index(letter) for letter in layout)


def tokens_first(layout: AttentionLayout) -> tuple[int, ...]:
    """The order of the views' dims in a message: tokens first."""
    dims = dims_of(layout)
    return tuple(dims.index(letter) for letter in ("N", *dims.replace("N", "")))


@dataclass(frozen=True)
class SequenceAxes:
    """The axes over which a sequence is split. A rank's index in the group of both is ring.rank * ulysses.size + ulysses.rank.

    window: the number of ranks of a double ring's inner ring. outer: the axis for its hops between windows (see `AxisLink`).
    """

    ring: Axis
    ulysses: Axis
    window: int | None = None
    outer: Axis | None = None

    @classmethod
    def alone(cls) -> SequenceAxes:
        """Axes without a split."""
        return cls(Axis.alone("ring"), Axis.alone("ulysses"))

    @property
    def size(self) -> int:
        return self.ring.size * self.ulysses.size

    @property
    def rank(self) -> int:
        return self.ring.rank * self.ulysses.size + self.ulysses.rank

    def joined(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The number of tokens of each ring place after the all-to-all, from the local lengths of all ranks of the group."""
        u = self.ulysses.size
        return tuple(sum(sizes[u * place : u * (place + 1)]) for place in range(self.ring.size))

    def near(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """The local lengths of the ranks of this rank's Ulysses group, from those of the whole group."""
        first = self.ring.rank * self.ulysses.size
        return tuple(sizes[first : first + self.ulysses.size])


def hybrid_attention(
    q_BAND: Tensor,
    k_BKMD: Tensor,
    v_BKMD: Tensor,
    key_mask_BM: Tensor | None,
    axes: SequenceAxes,
    q_sizes: Sequence[int],
    k_sizes: Sequence[int],
    *,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
    counter: Counter[str] | None = None,
    layout: AttentionLayout = "BNAD",
) -> Tensor:
    """Attend with this rank's part of the queries to all keys of the group: `out_BAND`, whose width is that of the values.

    Under the layout BNGAD the queries, keys, values and output are BGAND, and the mask's B is B x G.

    Args:
        key_mask_BM: bool, True at keys of this rank's part that count; None on all ranks or on none. Queries that see no key give 0.
        q_sizes, k_sizes: lengths of the parts of all ranks of the group, 0 allowed; queries and keys may be split in different ways.
        causal: the parts are in the causal order of the module's docstring.
        backend: "auto", "sdpa" (a fused kernel or ValueError) or "eager"; where a ring runs, also a kernel's name.
        counter: counts calls by backend or kernel.
        layout: the memory layout of the projections on all ranks. After an exchange the output has it too, for the output projection.

    Every rank makes the call, and its backward. Under autocast, computes in its dtype.
    Raises UserError for fewer heads than Ulysses ranks, ValueError for sizes that do not fit.
    """
    q_BAND, k_BKMD, v_BKMD = autocast_alike(q_BAND, k_BKMD, v_BKMD)
    # tensors from the Ulysses axis keep the order in which they travelled; B and G that are not one dim in memory are copied into one
    order = tokens_first("BAND") if axes.ulysses.size > 1 else memory_order("BAND" if layout == "BNGAD" else layout)

    plain = axes.ring.size == 1 and not causal and scale is None

    def attend(q_BAND: Tensor, k_BKMD: Tensor, v_BKMD: Tensor, key_mask_BM: Tensor | None) -> Tensor:
        if plain:
            return _local(q_BAND, k_BKMD, v_BKMD, key_mask_BM, backend, counter)
        return _ring(
            q_BAND,
            k_BKMD,
            v_BKMD,
            key_mask_BM,
            axes.ring,
            axes.joined(k_sizes),
            causal=causal,
            window=axes.window,
            outer=axes.outer,
            scale=scale,
            backend=backend,
            counter=counter,
            order=order,
        )

    # block attention takes B and G as one dim
    reads: Reads = "strided" if axes.ring.size == 1 and (plain or layout != "BNGAD") else "NBAD"
    return with_heads_exchanged(
        q_BAND, k_BKMD, v_BKMD, key_mask_BM, axes, q_sizes, k_sizes, attend, layout=layout, reads=reads
    )


def with_heads_exchanged(
    q_BAND: Tensor,
    k_BKMD: Tensor,
    v_BKMD: Tensor,
    key_mask_BM: Tensor | None,
    axes: SequenceAxes,
    q_sizes: Sequence[int],
    k_sizes: Sequence[int],
    attend: Attend,
    *,
    layout: AttentionLayout = "BNAD",
    reads: Reads = "BAND",
) -> Tensor:
    """Run `attend` on all tokens of the Ulysses group with this rank's heads, and return its output for this rank's tokens with all heads.

    Arguments as those of `hybrid_attention`. Keys with fewer heads than queries may come to `attend` repeated, though not always up to the
    number of query heads. Under the layout BNGAD an `attend` that reads at any strides gets (B, G, A, N, D); others get B x G as B.
    """
    _check(q_BAND, k_BKMD, axes, q_sizes, k_sizes, layout)
    if axes.ulysses.size == 1:
        return _attended(attend, q_BAND, k_BKMD, v_BKMD, key_mask_BM, reads)
    heads = split_heads(q_BAND.shape[-3], k_BKMD.shape[-3], axes.ulysses.size)
    near_q, near_k = axes.near(q_sizes), axes.near(k_sizes)
    joined = _heads_for_sequence(
        q_BAND, k_BKMD, v_BKMD, key_mask_BM, axes.ulysses, heads, near_q, near_k, layout, reads
    )
    out_BAND = _attended(attend, *joined, reads)
    return _sequence_for_heads(out_BAND, axes.ulysses, heads.queries, near_q, layout)


def _attended(
    attend: Attend, q_BAND: Tensor, k_BKMD: Tensor, v_BKMD: Tensor, key_mask_BM: Tensor | None, reads: Reads
) -> Tensor:
    """The result of `attend`. Unless it reads at any strides, B and G are passed as one dim."""
    if q_BAND.dim() == 4 or reads == "strided":
        return attend(q_BAND, k_BKMD, v_BKMD, key_mask_BM)
    out_BAND = attend(q_BAND.flatten(0, 1), k_BKMD.flatten(0, 1), v_BKMD.flatten(0, 1), key_mask_BM)
    return out_BAND.reshape(*q_BAND.shape[:2], *out_BAND.shape[1:])  # a view: B is cut


@dataclass(frozen=True)
class HeadSplit:
    """The number of query heads and of key heads of each Ulysses rank; keys are first repeated to `key_heads` heads."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]

    @property
    def key_heads(self) -> int:
        return sum(self.keys)


def split_heads(heads: int, key_heads: int, ranks: int) -> HeadSplit:
    """Split heads over Ulysses ranks, unevenly where they do not divide; a rank gets the key heads that its query heads attend to.

    Key heads (GQA) are repeated no more often than it takes to split the query heads as evenly as any repetition could. Raises UserError
    for fewer heads than ranks.
    """
    if heads < ranks:
        raise UserError(
            f"parallel.ulysses is {ranks}, but the attention has {heads} heads, and each rank needs one: "
            f"set parallel.ulysses to {heads} at most and parallel.ring higher"
        )
    choices = [count for count in range(key_heads, heads + 1, key_heads) if heads % count == 0 and count >= ranks]
    best = min(choices, key=lambda count: (even_sizes(count, ranks)[0] * (heads // count), count))
    keys = even_sizes(best, ranks)
    return HeadSplit(tuple(size * (heads // best) for size in keys), keys)


@outside_graphs
def _heads_for_sequence(
    q_BAND: Tensor,
    k_BKMD: Tensor,
    v_BKMD: Tensor,
    key_mask_BM: Tensor | None,
    ulysses: Axis,
    heads: HeadSplit,
    q_sizes: tuple[int, ...],
    k_sizes: tuple[int, ...],
    layout: AttentionLayout,
    reads: Reads,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The all-to-all before attention: from all heads of this rank's tokens to this rank's heads of all tokens of the Ulysses group.

    All messages, and the gather of the mask, are started together; queries, keys and values share one message where queries and keys are
    split alike and `attend` reads at any strides.
    """
    if heads.key_heads != k_BKMD.shape[-3]:
        k_BKMD, v_BKMD = (x.repeat_interleave(heads.key_heads // x.shape[-3], dim=-3) for x in (k_BKMD, v_BKMD))
    keys, wire = [heads.keys, heads.keys], tokens_first(layout)
    order = tuple(range(q_BAND.dim())) if reads == "BAND" else wire
    apart = reads == "NBAD"
    if q_sizes == k_sizes:
        several = [
            start_all_to_all_many(
                [q_BAND, k_BKMD, v_BKMD],
                ulysses,
                -3,
                -2,
                [heads.queries, *keys],
                q_sizes,
                order,
                wire=wire,
                apart=apart,
            )
        ]
    else:
        several = [
            start_all_to_all(q_BAND, ulysses, -3, -2, heads.queries, q_sizes, order, wire=wire),
            start_all_to_all_many([k_BKMD, v_BKMD], ulysses, -3, -2, keys, k_sizes, order, wire=wire, apart=apart),
        ]
    mask = None if key_mask_BM is None else start_all_gather(key_mask_BM, ulysses, 1, k_sizes)
    q, k, v = (x for pending in several for x in finish_all(pending))
    return q, k, v, None if mask is None else finish(mask)


@outside_graphs
def _sequence_for_heads(
    out_BAND: Tensor, ulysses: Axis, heads: tuple[int, ...], q_sizes: tuple[int, ...], layout: AttentionLayout
) -> Tensor:
    wire = tokens_first(layout)
    # the gradient comes as it travels: kernels read it at any strides
    return all_to_all(out_BAND, ulysses, -2, -3, q_sizes, heads, memory_order(layout), wire=wire, grad_order=wire)


_ring = outside_graphs(ring_attention)


def _local(
    q_BAND: Tensor,
    k_BAMD: Tensor,
    v_BAMD: Tensor,
    key_mask_BM: Tensor | None,
    backend: str,
    counter: Counter[str] | None,
) -> Tensor:
    """Attention on one rank, of (B, A, N, D) or (B, G, A, N, D)."""
    if q_BAND.numel() == 0 or k_BAMD.numel() == 0:
        return of_nothing(q_BAND, k_BAMD, v_BAMD)
    chosen = attention if q_BAND.dim() == 4 else attention_apart
    return chosen(q_BAND, k_BAMD, v_BAMD, key_mask_BM, backend=cast(Backend, backend), counter=counter)


def of_nothing(q_BAND: Tensor, k_BKMD: Tensor, v_BKMD: Tensor) -> Tensor:
    """Attention without queries or keys, which kernels do not take: zeros that depend on all inputs, so that each has a gradient."""
    out_BAND = like_queries(q_BAND.detach(), v_BKMD.shape[-1], q_BAND.dtype)
    return out_BAND + sum(x[..., :0].sum() for x in (q_BAND, k_BKMD, v_BKMD))


def _check(
    q_BAND: Tensor,
    k_BKMD: Tensor,
    axes: SequenceAxes,
    q_sizes: Sequence[int],
    k_sizes: Sequence[int],
    layout: AttentionLayout,
) -> None:
    for what, x, sizes in (("queries", q_BAND, q_sizes), ("keys", k_BKMD, k_sizes)):
        if x.dim() != len(layout):
            raise ValueError(f"{what} of shape {tuple(x.shape)}, but the layout {layout} has {len(layout)} dims")
        if len(sizes) != axes.size or sizes[axes.rank] != x.shape[-2]:
            have = f"rank {axes.rank} of {axes.size} has {x.shape[-2]} {what}"
            raise ValueError(f"{have}, but the sizes of the group are {tuple(sizes)}")
