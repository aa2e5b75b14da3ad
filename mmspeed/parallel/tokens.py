"""Which process holds which tokens of a forward pass, and how tokens move between layers.

A model sees its tokens as T x S: the frames and the places of a frame of a factorised model, one row of all tokens of a full
one. Its blocks attend along one of the two dims. n = dsp x spread processes of a sequence-parallel group hold parts of it (spread is
ring x ulysses); tensor-parallel processes hold parts of the columns of these again, between the layers that they split.
Everything is uneven by one at most at each cut, so no length has to divide.

    blocks that attend along      hold the crossing dim          hold the other dim     attention
    the crossing dim              cut over spread                cut over dsp           over spread
    the other dim                 cut over spread, then dsp      whole                  local

Between two such blocks tokens are re-sharded over dsp alone. The crossing dim is T or S (`shard`), and S of a full model, whose dsp is 1.

Sequence parallelism after Ulysses (Jacobs et al. 2023), ring attention (Liu et al. 2023), their hybrid (Fang and Zhao 2024);
re-sharding between spatial and temporal blocks after DSP (Zhao et al. 2024); norms on shards between tensor-parallel layers
after Korthikanti et al. (2022).

Legend: B batch, T rows, S columns, N tokens, E width, C channels, A heads, D head width, L caption tokens, X position axes,
n processes of the group, m tensor-parallel processes, P processes with the degrees (dsp, spread).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from mmspeed.comm import Axis, Ledger, all_gather, all_to_all, even_sizes, reduce_scatter
from mmspeed.compute.autocast import autocast_alike
from mmspeed.compute.sparse.module import ClusteredAttention
from mmspeed.graphs import outside_graphs
from mmspeed.protocols import CountsHeads

from .sequence.hybrid_attention import SequenceAxes, hybrid_attention, of_nothing
from .sparse.attention import sparse_attention

Along = Literal["T", "S"]
Degree = Literal["dsp", "spread"]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]

T_DIM, S_DIM = 1, 2  # of tokens BTSE


def split_range(whole: range, parts: int, part: int) -> range:
    """Part number `part` of a range cut into `parts`, the first ones larger by one."""
    sizes = even_sizes(len(whole), parts)
    start = whole.start + sum(sizes[:part])
    return range(start, start + sizes[part])


@dataclass(frozen=True)
class TokenRange:
    """The tokens of one sequence-parallel process: `rows` x the union of `columns`, one range for each tensor-parallel process."""

    rows: range
    columns: tuple[range, ...]

    @property
    def width(self) -> int:
        """Columns of all tensor-parallel processes."""
        return sum(map(len, self.columns))

    @property
    def tokens(self) -> int:
        return len(self.rows) * self.width


@dataclass(frozen=True)
class TokenPlacement:
    """The degrees that cut rows and columns, outermost first. Of none: every process holds all."""

    rows: tuple[Degree, ...] = ()
    columns: tuple[Degree, ...] = ()


WHOLE = TokenPlacement()


def shard_of(holding: TokenPlacement, shape: tuple[int, int], sizes: tuple[int, int], place: int, m: int) -> TokenRange:
    """What a place of the group, of `sizes` (dsp, spread), holds of T x S tokens, by tensor-parallel process.

    Columns are cut for the m tensor-parallel processes first and then for the group, so that to re-shard is an exchange among the
    processes of one tensor-parallel place.
    """
    at = dict(zip(("dsp", "spread"), divmod(place, sizes[1]), strict=True))
    parts = dict(zip(("dsp", "spread"), sizes, strict=True))

    def cut(whole: range, degrees: tuple[Degree, ...]) -> range:
        for degree in degrees:
            whole = split_range(whole, parts[degree], at[degree])
        return whole

    outer = tuple(split_range(range(shape[1]), m, part) for part in range(m))
    return TokenRange(cut(range(shape[0]), holding.rows), tuple(cut(part, holding.columns) for part in outer))


@dataclass(frozen=True)
class TokenLayout:
    """How the tokens of every forward pass are spread. Of one process by default: nothing moves.

    Args:
        axes: ring and ulysses; with dsp they compute a video together.
        dsp: the axis that tokens of a factorised model are re-sharded over, between blocks that attend along other dims.
        whole: all processes of a video as one axis, dsp outermost, then ring.
        tensor: the tensor-parallel axis.
        shard: what ring and ulysses split the tokens of a factorised model by: "rows" (frames) or "columns" (space).
        text_from: captions of at least so many tokens are split too.
    """

    axes: SequenceAxes = field(default_factory=SequenceAxes.alone)
    whole: Axis = field(default_factory=lambda: Axis.alone("sequence"))
    tensor: Axis = field(default_factory=lambda: Axis.alone("tp"))
    dsp: Axis = field(default_factory=lambda: Axis.alone("dsp"))
    shard: Literal["rows", "columns"] = "rows"
    text_from: int | None = None

    def __deepcopy__(self, memo: Any) -> TokenLayout:
        return self  # nothing in it changes, and process groups cannot be copied

    @property
    def ledger(self) -> Ledger:
        """What the exchanges of this process were, in bytes."""
        return self.whole.ledger

    def shard_tokens(
        self, pos_TSX: Tensor, mask_BTS: Tensor | None, text_tokens: int, *, full: bool, image: bool
    ) -> ShardedTokens:
        """The tokens of one forward pass.

        Args:
            pos_TSX: positions (frame first) of all tokens.
            mask_BTS: True at tokens that count as keys; None: all do.
            text_tokens: length of the captions.
            full: all blocks attend along S, over all tokens; else some attend along T.
            image: every process computes its own: nothing is split over the group.
        """
        split = self.whole.size > 1 and not image
        if full and self.dsp.size > 1:
            raise ValueError("a full model's tokens are not re-sharded: dsp is for factorised ones")
        if not split:
            holdings: dict[Along, TokenPlacement] = {"T": WHOLE, "S": WHOLE}
        elif full or self.shard == "columns":
            holdings = {"S": TokenPlacement(("dsp",), ("spread",)), "T": TokenPlacement((), ("spread", "dsp"))}
        else:
            holdings = {"T": TokenPlacement(("spread",), ("dsp",)), "S": TokenPlacement(("spread", "dsp"), ())}
        text_split = split and self.text_from is not None and text_tokens >= self.text_from
        return ShardedTokens(self, pos_TSX, mask_BTS, full, image, holdings, text_tokens, text_split)


@runtime_checkable
class SpreadsTokens(CountsHeads, Protocol):
    """A model that computes the tokens that its layout gives to this process."""

    layout: TokenLayout


@dataclass(frozen=True)
class ShardedTokens:
    """The tokens of one forward pass over the processes; what is in it is of all tokens."""

    layout: TokenLayout
    pos_TSX: Tensor
    mask_BTS: Tensor | None
    full: bool
    image: bool
    placements: dict[Along, TokenPlacement]
    text_tokens: int
    text_is_split: bool

    @property
    def shape(self) -> tuple[int, int]:
        """(T, S)."""
        return self.pos_TSX.shape[0], self.pos_TSX.shape[1]

    def everyone(self, holding: TokenPlacement) -> list[TokenRange]:
        """What each place of the group holds."""
        group, sizes = self.layout.whole, (self.layout.dsp.size, self.layout.axes.size)
        tensor = self.layout.tensor.size
        return [shard_of(holding, self.shape, sizes, place, tensor) for place in range(group.size)]

    def attending(self, everyone: list[TokenRange]) -> list[TokenRange]:
        """Of what each place holds, that of the places that attend together with this process: those of its place on dsp."""
        spread = self.layout.axes.size
        return everyone[self.layout.dsp.rank * spread :][:spread]

    def shard_along(self, along: Along) -> TokenShard:
        """This process's part for blocks that attend along a dim."""
        group, tensor, holding = self.layout.whole, self.layout.tensor, self.placements[along]
        everyone = self.everyone(holding)
        held = everyone[group.rank]
        rows, own, seen = _slice(held.rows), _slice(held.columns[tensor.rank]), [_slice(c) for c in held.columns]
        cuts = holding.rows if along == "T" else holding.columns
        crosses = cuts == ("spread",) and self.layout.axes.size > 1
        mask_BTS = self.mask_BTS
        return TokenShard(
            sharded=self,
            placement=holding,
            held=held,
            frames=self.pos_TSX[rows, own, 0] if self.full else self.pos_TSX[rows, :1, 0],
            pos_NX=self.pos_TSX[rows, 0] if along == "T" else _joined([self.pos_TSX[0, c] for c in seen], 0),
            mask_BTS=None if mask_BTS is None else _joined([mask_BTS[:, rows, c] for c in seen], 2),
            lengths=tuple(len(h.rows) if along == "T" else h.width for h in self.attending(everyone))
            if crosses
            else None,
            tokens=tuple(h.tokens for h in everyone),
            widths=tuple(map(len, held.columns)),
        )

    def shard(self, whole_BTS: Tensor, part: TokenShard) -> Tensor:
        """This process's own tokens of what every process of the group has whole: (B, T, S, ...)."""
        return whole_BTS[:, _slice(part.held.rows), _slice(part.held.columns[self.layout.tensor.rank])]

    def reshard(self, x_BTSE: Tensor, now: TokenShard, wanted: TokenShard) -> Tensor:
        """Own tokens as `wanted` holds them; an exchange when that is otherwise than `now`."""
        dsp, place = self.layout.dsp, self.layout.tensor.rank
        if now.placement == wanted.placement or dsp.size == 1:
            return x_BTSE
        rows = max(len(now.held.rows), len(wanted.held.rows))  # of all processes of the axis together
        columns = max(len(now.held.columns[place]), len(wanted.held.columns[place]))
        by_rows, by_columns = even_sizes(rows, dsp.size), even_sizes(columns, dsp.size)
        if "dsp" in now.placement.rows:
            return all_to_all(x_BTSE, dsp, S_DIM, T_DIM, by_columns, by_rows)
        return all_to_all(x_BTSE, dsp, T_DIM, S_DIM, by_rows, by_columns)

    def unshard(self, x_BTSE: Tensor, part: TokenShard) -> Tensor:
        """All tokens, on every process; its gradient is the sum of what all processes do with them."""
        layout, group = self.layout, self.layout.whole
        tensor, dsp, spread = layout.tensor, layout.dsp.size, layout.axes.size
        if part.placement != WHOLE:
            held = [(len(h.rows), len(h.columns[tensor.rank])) for h in self.everyone(part.placement)]
            rows = part.placement.rows
            if dsp == 1 or spread == 1:  # one dim is cut, in the order of the group
                dim = T_DIM if self._cuts(rows) else S_DIM
                x_BTSE = all_gather(x_BTSE, group, dim, [sizes[dim - T_DIM] for sizes in held])
            else:  # parts differ in both dims, or follow in another order: gathered as one list of tokens, and put in place
                sizes = [t * s for t, s in held]
                parts = all_gather(x_BTSE.flatten(T_DIM, S_DIM), group, T_DIM, sizes).split(sizes, T_DIM)
                tiles = [tokens.unflatten(T_DIM, at) for tokens, at in zip(parts, held, strict=True)]
                inner, outer = (T_DIM if "dsp" in rows else S_DIM), (T_DIM if "spread" in rows else S_DIM)
                near = [torch.cat(tiles[place::spread], inner) for place in range(spread)]
                x_BTSE = torch.cat(near, outer)
        return all_gather(x_BTSE, tensor, S_DIM, even_sizes(self.shape[1], tensor.size))

    def _cuts(self, degrees: tuple[Degree, ...]) -> bool:
        """True where one of a dim's degrees has several processes."""
        return any({"dsp": self.layout.dsp.size, "spread": self.layout.axes.size}[degree] > 1 for degree in degrees)

    def text(self, text_BL: Tensor) -> Tensor:
        """This process's part of captions (B, L, ...): all of it unless captions are split."""
        if not self.text_is_split:
            return text_BL
        return text_BL[:, _slice(split_range(range(text_BL.shape[1]), self.layout.whole.size, self.layout.whole.rank))]


@dataclass(frozen=True)
class TokenShard:
    """One process's tokens for blocks that attend along one dim.

    `own` are those of this process, `seen` those of all its tensor-parallel processes, which their layers work on together.
    """

    sharded: ShardedTokens
    placement: TokenPlacement
    held: TokenRange
    frames: Tensor  # frame of each own token, (T, S); (T, 1) where a row is a frame
    pos_NX: Tensor  # positions along the attended dim, of the tokens seen
    mask_BTS: Tensor | None  # of the tokens seen: True at those that count as keys
    lengths: tuple[int, ...] | None  # of the attended dim on all processes of ring x ulysses, where it is split
    tokens: tuple[int, ...]  # seen, by process of the group
    widths: tuple[int, ...]  # own columns of each tensor-parallel process

    def positions_of_all(self) -> Tensor:
        """Positions along the attended dim, where it is split: of the tokens of all processes of the group, in their order, (N, X)."""
        pos_TSX, together = self.sharded.pos_TSX, self.sharded.attending(self.sharded.everyone(self.placement))
        if self.placement.rows == ("spread",):
            return pos_TSX[:, 0]
        return _joined([pos_TSX[0, _slice(columns)] for held in together for columns in held.columns], 0)

    def all_gather(self, x_BTSE: Tensor) -> Tensor:
        """The tokens seen, from the own ones of each tensor-parallel process."""
        tensor = self.sharded.layout.tensor
        if tensor.size == 1:
            return x_BTSE
        # norms may give float32, which the next layer would round anyway
        return _all_gathered(autocast_alike(x_BTSE)[0], tensor, self.widths)

    def reduce_scatter(self, x_BTSE: Tensor) -> Tensor:
        """The own tokens of the sum over tensor-parallel processes."""
        tensor = self.sharded.layout.tensor
        return x_BTSE if tensor.size == 1 else _reduce_scattered(x_BTSE, tensor, self.widths)

    def attend(self, local: Attend, q_BAND: Tensor, k_BAND: Tensor, v_BAND: Tensor, mask_BN: Tensor | None) -> Tensor:
        """Self-attention along this part's dim (B: batch x the other dim), over the tokens of all processes.

        `local` serves where this process has all of them.
        """
        if isinstance(local, ClusteredAttention):
            if not self.sharded.image:
                return self._attend_sparsely(local, q_BAND, k_BAND, v_BAND, mask_BN)
            local = local.dense
        if self.lengths is None:
            return _where_any(local, q_BAND, k_BAND, v_BAND, mask_BN)
        axes = self.sharded.layout.axes
        return hybrid_attention(q_BAND, k_BAND, v_BAND, mask_BN, axes, self.lengths, self.lengths)

    def _attend_sparsely(
        self, layer: ClusteredAttention, q_BAND: Tensor, k_BAND: Tensor, v_BAND: Tensor, mask_BN: Tensor | None
    ) -> Tensor:
        """Sparse attention along this part's dim, over the tokens of all processes."""
        if self.lengths is not None:
            axes = self.sharded.layout.axes
            return sparse_attention(
                q_BAND, k_BAND, v_BAND, mask_BN, axes, self.lengths, self.lengths, self.positions_of_all().long(), layer
            )
        if not q_BAND.numel():
            return of_nothing(q_BAND, k_BAND, v_BAND)
        out_BAND: Tensor = layer(q_BAND, k_BAND, v_BAND, mask_BN, self.pos_NX.long())
        return out_BAND

    def attend_text(
        self, local: Attend, q_BAND: Tensor, k_BALD: Tensor, v_BALD: Tensor, mask_BL: Tensor | None
    ) -> Tensor:
        """Cross-attention of the tokens seen (N) to the caption."""
        if not self.sharded.text_is_split:
            return _where_any(local, q_BAND, k_BALD, v_BALD, mask_BL)
        whole = self.sharded.layout.whole
        lengths = even_sizes(self.sharded.text_tokens, whole.size)
        # a caption is short beside a video: its keys go round all processes, and no queries are exchanged
        axes = SequenceAxes(whole, Axis.alone("ulysses"))
        return hybrid_attention(q_BAND, k_BALD, v_BALD, mask_BL, axes, self.tokens, lengths)


@outside_graphs
def _all_gathered(x_BTSE: Tensor, tensor: Axis, widths: tuple[int, ...]) -> Tensor:
    return all_gather(x_BTSE, tensor, S_DIM, widths)


@outside_graphs
def _reduce_scattered(x_BTSE: Tensor, tensor: Axis, widths: tuple[int, ...]) -> Tensor:
    return reduce_scatter(x_BTSE, tensor, S_DIM, widths)


def _slice(part: range) -> slice:
    return slice(part.start, part.stop)


def _joined(parts: list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _where_any(local: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """`local`, where there is something to attend, and to attend to."""
    return local(q, k, v, mask) if q.numel() and k.numel() else of_nothing(q, k, v)
