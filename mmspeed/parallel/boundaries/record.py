"""Record one forward pass of a model that is split over processes: its sequences' lengths, and this process's part of each tensor.

The boundary of the whole model makes the record, which lasts as long as the forward. Boundaries, attention sites and layers inside get it
from `Sequences.record()`, through `mmspeed.replay.fact`. So when a checkpoint recomputes a part of a forward, that part gets the record of
its own forward, in its own thread, even if other forwards came in between. No shared object holds a record.

A sequence is rows x columns (see `layout`). "Own" tokens are those of this one process; tokens "seen" are the own tokens of all
tensor-parallel processes together.

Legend: B batch, T rows, S columns, N tokens, E width, X position axes.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from mmspeed.comm import Ledger, all_gather, all_to_all, even_sizes, reduce_scatter
from mmspeed.compute.autocast import autocast_alike
from mmspeed.errors import UserError
from mmspeed.graphs import outside_graphs
from mmspeed.parallel.sequence.zigzag import zigzag_order
from mmspeed.protocols.plan import Attended, Gather, ModelPlan, Split, Summed, Tokens, Total, names_of
from mmspeed.replay import fact
from mmspeed.torch_internals import tree_leaves

from .layout import TokenLayout, TokenRange, split_range
from .packed import PackedTokens

_RECORD: ContextVar[ForwardRecord | None] = ContextVar("mmspeed_forward", default=None)


class Sequences:
    """What the boundaries of one model share: its plan, the layout, and counts of their uses; nothing of a single forward.

    shares_images: whether the processes of a group compute each image together. In a run of mmspeed they do not: images go to single
    processes, and an image model's tokens stay whole.
    """

    def __init__(self, plan: ModelPlan, layout: TokenLayout, shares_images: bool = False) -> None:
        self.plan, self.layout = plan, layout
        self.apart = plan.stills and not shares_images  # the processes of a group compute samples of their own
        # for sequences of which each tensor-parallel process has all tokens
        self.untensored = replace(layout, tensor=replace(layout.tensor, size=1, rank=0))
        self.factorised = plan.factorised
        self.gridded = {tokens.sequence for block in plan.blocks for tokens in block.tokens.values()}
        self.tensor_split = {name for linear in plan.linears.values() for name in linear.sequences}
        sums = (what for outputs in plan.outputs.values() for what in outputs.values() if isinstance(what, Summed))
        self.tensor_split |= {name for what in sums for name in names_of(what.sequence)}
        # with Ulysses alone, parts are contiguous, and an all-to-all joins them in order without zigzag
        self.zigzag = plan.causal and layout.hybrid.size > 1 and layout.axes.ring.size * layout.tensor.size > 1
        self.uses: Counter[str] = Counter()  # by boundary
        self.checked = False  # whether the inputs of a group's processes were compared

    def __deepcopy__(self, memo: Any) -> Sequences:
        return self  # process groups cannot be copied, and nothing in it belongs to one copy

    def record(self, where: str) -> ForwardRecord:
        """The record of the forward that is running, or being recomputed. Raises UserError outside of one."""
        known: ForwardRecord | None = fact(self, _RECORD.get)
        if known is None or known.sequences is not self:
            raise UserError(f"{where} was called outside of the forward of the model that the plan was applied to")
        return known

    def may_cross(self, sequence: str, attends: Attended) -> bool:
        """True where an attention along this dim has tokens of a sequence on other processes, given that the sequence is split."""
        if self.apart:
            return False
        if self.factorised and sequence not in self.gridded:  # over all processes alike
            return self.layout.whole.size > 1
        return self.layout.hybrid.size > 1 and attends == self.layout.crossing(self.factorised)

    def use(self, where: str) -> None:
        """Count a use of a boundary."""
        self.uses[where] += 1


def begin_forward(record: ForwardRecord | None) -> Token[ForwardRecord | None]:
    """Make a record the current one, and return a token for `end_forward`."""
    return _RECORD.set(record)


def end_forward(token: Token[ForwardRecord | None]) -> None:
    """Restore the record that was current before."""
    _RECORD.reset(token)


@contextmanager
def resumed(record: ForwardRecord | None) -> Iterator[None]:
    """Make the record of an earlier forward (`current_record`) current inside the block, to run a part of the model by itself."""
    token = begin_forward(record)
    try:
        yield
    finally:
        end_forward(token)


def current_record() -> ForwardRecord | None:
    """The record of the forward that is running; None outside of a model that is split over processes."""
    return _RECORD.get()


@dataclass(eq=False)
class ForwardRecord:
    """The record of one forward pass.

    image: nothing is split over the group; tensor-parallel processes still share the columns. grid: video tokens along time, height and
    width, with sparse attention. bounds_Z: cumulative lengths of documents that a ring shares; packed: how it shares them, known from the
    first split on.
    """

    sequences: Sequences
    image: bool = False
    grid: tuple[int, int, int] | None = None
    bounds_Z: Tensor | None = None
    packed: PackedTokens | None = None
    lengths: dict[str, tuple[int, int]] = field(default_factory=dict)
    positions: dict[str, Tensor] = field(default_factory=dict)  # (T, S, X) of a sequence, whole

    def __deepcopy__(self, memo: Any) -> ForwardRecord:
        return self

    # -- layouts of sequences -------------------------------------------------------------------------------------------

    def shape(self, sequence: str, where: str) -> tuple[int, int]:
        """(rows, columns) of a sequence. Raises UserError before its first split."""
        if sequence not in self.lengths:
            raise UserError(f"{where}: sequence {sequence!r} is needed before it was split; correct the plan")
        return self.lengths[sequence]

    def tell(self, sequence: str, shape: tuple[int, int], where: str) -> None:
        """Note a sequence's (rows, columns). Raises UserError where they differ from those noted before."""
        known = self.lengths.setdefault(sequence, shape)
        if known != shape:
            now, then = (size[1] if size[0] == 1 else " x ".join(map(str, size)) for size in (shape, known))
            raise UserError(
                f"{where}: sequence {sequence!r} has {now} tokens here and had {then} before; correct the plan"
            )

    def is_split(self, sequence: str, where: str) -> bool:
        """True where the tokens of a sequence lie on several processes of the group."""
        layout = self.sequences.layout
        if self.image or self.sequences.apart or layout.whole.size == 1:
            return False
        if sequence != self.sequences.plan.long_text:
            return True
        return layout.text_from is not None and math.prod(self.shape(sequence, where)) >= layout.text_from

    def held(self, sequence: str, attends: Attended, where: str, place: tuple[int, int] | None = None) -> TokenRange:
        """The tokens of a sequence that one process of the group holds, for blocks that attend along this dim.

        place: the process's (hybrid, dsp) ranks; None: this process.
        """
        shape = self.shape(sequence, where)
        layout = self.sequences.layout if sequence in self.sequences.tensor_split else self.sequences.untensored
        if not self.is_split(sequence, where):
            return layout.unsplit(shape)
        h, d = place if place is not None else (layout.hybrid.rank, layout.dsp.rank)
        if self.sequences.factorised and sequence not in self.sequences.gridded:  # over all processes alike
            own = split_range(range(shape[1]), layout.whole.size, d * layout.hybrid.size + h)
            return TokenRange(range(shape[0]), (own,))
        if self.sequences.zigzag:
            sizes = self.causal_order(sequence, where)[1]
            part, tp = range(sum(sizes[:h]), sum(sizes[: h + 1])), layout.tensor.size
            return TokenRange(range(shape[0]), tuple(split_range(part, tp, place) for place in range(tp)))
        return layout.held(shape, attends, self.sequences.factorised, h, d)

    def causal_order(self, sequence: str, where: str) -> tuple[Tensor, tuple[int, ...]]:
        """(order, sizes) of a causal sequence: its positions in the order of the processes of ring x ulysses, and how many each holds."""
        layout, length = self.sequences.layout, self.shape(sequence, where)[1]
        if self.packed is not None:
            shares = self.packed.shares
            return shares.order, layout.near_sizes(shares.sizes)
        return zigzag_order(length, layout.axes.ring.size), layout.zigzag_sizes(length)

    def widths(self, sequence: str, attends: Attended, where: str) -> tuple[int, ...]:
        """The number of own columns of each tensor-parallel process."""
        return tuple(map(len, self.held(sequence, attends, where).columns))

    def crosses(self, sequences: Sequence[str], attends: Attended, where: str) -> bool:
        """True where an attention along this dim has tokens on other processes, in this forward."""
        return any(self.is_split(name, where) and self.sequences.may_cross(name, attends) for name in sequences)

    def attended_sizes(self, sequences: Sequence[str], attends: Attended, where: str) -> tuple[int, ...]:
        """The number of tokens along the attended dim, on each process of ring x ulysses."""
        layout, sizes = self.sequences.layout, []
        for place in range(layout.hybrid.size):
            each = [self.held(name, attends, where, (place, layout.dsp.rank)) for name in sequences]
            sizes.append(sum(len(held.rows) if attends == "rows" else held.width for held in each))
        return tuple(sizes)

    def all_sizes(self, sequence: str, attends: Attended, where: str) -> tuple[int, ...]:
        """The number of tokens of a sequence on each process of the group, in the order of `TokenLayout.whole`."""
        return tuple(self.held(sequence, attends, where, place).tokens for place in self.sequences.layout.places())

    def positions_of_all(self, sequence: str, attends: Attended, where: str) -> Tensor:
        """The positions (N, X) along the attended dim of the tokens of all processes of ring x ulysses, in the order of the processes."""
        key = f"{sequence} {attends}"
        if key not in self.positions:
            raise UserError(
                f"{where}: sparse attention across processes needs the positions of {sequence!r}; correct the plan"
            )
        pos_TSX = self.positions[key]
        return pos_TSX[:, 0] if attends == "rows" else self.in_order_of_all(pos_TSX[0], sequence, attends, where)

    def in_order_of_all(self, columns: Tensor, sequence: str, attends: Attended, where: str) -> Tensor:
        """Reorder values along the columns of a sequence (N, ...) into the order in which the processes of ring x ulysses hold them."""
        layout = self.sequences.layout
        held = [self.held(sequence, attends, where, (h, layout.dsp.rank)) for h in range(layout.hybrid.size)]
        return torch.cat([columns[part.start : part.stop] for each in held for part in each.columns])

    # -- tensors --------------------------------------------------------------------------------------------------------

    def cut(self, tensor: Tensor, split: Split, attends: Attended, where: str) -> Tensor:
        """Cut a tensor that all processes of the group hold whole to this process's part.

        Floats are copied: a view would keep the whole sequence in memory for backward. Raises UserError where lengths do not agree.
        """
        if split.ndim is not None and tensor.ndim != split.ndim:
            return tensor
        tensor = self._in_one_row(self._part_of_channels(tensor, split), split, where)
        names = names_of(split.sequence)
        columns, rows = tensor.shape[split.dim], 1 if split.rows is None else tensor.shape[split.rows]
        if split.positions is not None:
            self.positions[f"{names[0]} {split.positions}"] = tensor
        if split.broadcast and columns == 1 and (split.rows is None or rows == 1):
            return tensor
        whole_columns, whole_rows = split.broadcast and columns == 1, split.broadcast and rows == 1
        if len(names) == 1 and not (whole_columns or (whole_rows and split.rows is not None)):
            self.tell(names[0], (rows, columns), where)
        begin, parts = 0, []
        for name in names:
            shape = self.shape(name, where)
            part_held = self.held(name, attends, where)
            self._check_least(split, name, attends, where)
            part = tensor
            if split.rows is not None and not whole_rows:
                part = _narrowed(part, split.rows, part_held.rows, 0)
            if not whole_columns:
                parts += self._columns(part, split, part_held, name, begin, shape[1])
                begin += shape[1]
            else:
                parts.append(part)
        if not whole_columns and begin != columns:
            lengths = {name: math.prod(self.shape(name, where)) for name in names}
            raise UserError(f"{where}: {columns} places for {lengths} tokens; correct the plan")
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, split.dim)
        if joined.shape == tensor.shape and self.packed is None:
            return tensor
        return joined.clone() if len(parts) == 1 and joined.is_floating_point() else joined

    def _part_of_channels(self, tensor: Tensor, split: Split) -> Tensor:
        """The channels of this process's heads; their number divides, since that of the heads does."""
        axis = self.sequences.layout.tensor
        if split.channels is None or axis.size == 1:
            return tensor
        return tensor.chunk(axis.size, split.channels)[axis.rank].contiguous()

    def _in_one_row(self, tensor: Tensor, split: Split, where: str) -> Tensor:
        """The tokens of packs that a ring shares, flattened into one row; any other tensor as it is."""
        packed = self.sequences.plan.packed
        if self.bounds_Z is None or packed is None or split.sequence != packed[1] or split.dim == 0:
            return tensor
        if self.packed is None:
            rows, columns = tensor.shape[split.dim - 1 : split.dim + 1]
            ranks = self.sequences.layout.axes.ring.size
            self.packed = PackedTokens.of(self.bounds_Z, rows, columns, ranks, where)
        return self.packed.in_one_row(tensor, split.dim)

    def _columns(
        self, part: Tensor, split: Split, held: TokenRange, name: str, begin: int, length: int
    ) -> list[Tensor]:
        own = self.sequences.layout.tensor.rank if len(held.columns) > 1 else 0
        ranges = [held.columns[own]] if split.level == "own" else list(held.columns)
        if self.sequences.zigzag and self.is_split(name, ""):
            order = self.causal_order(name, "")[0][ranges[0].start : ranges[-1].stop]
            return [part.index_select(split.dim, (begin + order).to(part.device))]
        if len(ranges) > 1 and ranges == _neighbours(ranges):  # contiguous ranges are one part
            ranges = [range(ranges[0].start, ranges[-1].stop)]
        return [_narrowed(part, split.dim, each, begin) for each in ranges]

    def _check_least(self, split: Split, name: str, attends: Attended, where: str) -> None:
        if not split.least:
            return
        places = self.sequences.layout.places() if self.is_split(name, where) else [None]
        columns = [part for place in places for part in self.held(name, attends, where, place).columns]
        if len(columns) > 1 and min(map(len, columns)) < split.least:
            raise UserError(
                f"{where}: {sum(map(len, columns))} tokens of {name!r} for {len(columns)} ranks; this model needs {split.least} on "
                f"every rank: pad to {len(columns) * split.least} (and mask), or lower parallel.ring, ulysses or tp"
            )

    def leading(self, count: int, sequence: str, attends: Attended, where: str) -> int:
        """How many of the first `count` tokens of a one-row sequence this process holds; they lead its part too."""
        held = self.held(sequence, attends, where)
        columns = held.columns[self.sequences.layout.tensor.rank if len(held.columns) > 1 else 0]
        if self.sequences.zigzag:
            order = self.causal_order(sequence, where)[0]
            return int((order[columns.start : columns.stop] < count).sum())
        return min(max(count - columns.start, 0), len(columns))

    @outside_graphs
    def reshard(self, x: Tensor, tokens: Tokens, before: Attended, now: Attended, where: str) -> Tensor:
        """Re-shard own tokens for blocks that attend along `now`, from blocks that attend along `before`: the all-to-all of DSP."""
        sequences, layout = self.sequences, self.sequences.layout
        if before == now or layout.dsp.size == 1 or not self.is_split(tokens.sequence, where):
            return x
        shape = self.shape(tokens.sequence, where)
        crossing = layout.crossing(sequences.factorised)
        dims: Mapping[Attended, int] = {"rows": _required(tokens.rows, where), "columns": tokens.dim}
        own = split_range(range(shape[1]), layout.tensor.size, layout.tensor.rank)
        lengths: dict[Attended, int] = {"rows": shape[0], "columns": len(own)}
        other: Attended = "columns" if crossing == "rows" else "rows"
        within = len(split_range(range(lengths[crossing]), layout.hybrid.size, layout.hybrid.rank))
        parts = {crossing: even_sizes(within, layout.dsp.size), other: even_sizes(lengths[other], layout.dsp.size)}
        away, home = (crossing, other) if before == crossing else (other, crossing)
        return all_to_all(x, layout.dsp, dims[away], dims[home], parts[away], parts[home])

    @outside_graphs
    def gather(self, x: Tensor, gather: Gather, attends: Attended, where: str) -> Tensor:
        """All-gather the tokens of a sequence on every process; gradients are summed over the processes."""
        sequences, layout, name = self.sequences, self.sequences.layout, gather.sequence
        shape, tensored = self.shape(name, where), name in sequences.tensor_split and gather.level == "own"
        if self.is_split(name, where):
            if sequences.zigzag and tensored:  # the tensor-parallel parts lie within one part of the group
                x, tensored = all_gather(x, layout.tensor, gather.dim, self.widths(name, attends, where)), False
            x = self._gather_group(x, gather, attends, shape, where)
        if tensored:
            x = all_gather(x, layout.tensor, gather.dim, even_sizes(shape[1], layout.tensor.size))
        return x

    @outside_graphs
    def total(self, x: Tensor, total: Total, where: str) -> Tensor:
        """Sum over all processes that share a sequence, on each of them; gradients are summed over the processes too."""
        layout, name = self.sequences.layout, total.sequence
        x = x[None]
        if self.is_split(name, where):
            x = self._gather_hybrid(x, 0, (1,) * layout.hybrid.size).sum(0, keepdim=True)
            x = all_gather(x, layout.dsp, 0).sum(0, keepdim=True)
        if name in self.sequences.tensor_split:
            x = all_gather(x, layout.tensor, 0).sum(0, keepdim=True)
        return x[0]

    def _gather_group(self, x: Tensor, gather: Gather, attends: Attended, shape: tuple[int, int], where: str) -> Tensor:
        sequences, layout = self.sequences, self.sequences.layout
        if sequences.zigzag:
            order, sizes = self.causal_order(gather.sequence, where)
            whole = self._gather_hybrid(x, gather.dim, sizes)
            whole = whole.index_select(gather.dim, order.argsort().to(whole.device))
            return whole if self.packed is None else self.packed.in_rows(whole, gather.dim)
        if gather.sequence not in sequences.gridded:
            if sequences.factorised:
                return all_gather(x, layout.whole, gather.dim, even_sizes(shape[1], layout.whole.size))
            if gather.level == "seen" and layout.tensor.size > 1 and gather.sequence in sequences.tensor_split:
                raise UserError(
                    f"{where}: tokens that tensor-parallel processes see are gathered in causal models alone"
                )
            own = split_range(range(shape[1]), layout.tensor.size, layout.tensor.rank)
            length = len(own) if gather.sequence in sequences.tensor_split else shape[1]
            return self._gather_hybrid(x, gather.dim, even_sizes(length, layout.hybrid.size))
        return self._gather_grid(x, gather, attends, where)

    def _gather_grid(self, x: Tensor, gather: Gather, attends: Attended, where: str) -> Tensor:
        """Gather a factorised model's rows and columns. If both are split, parts are gathered as a list of tokens and then put in place."""
        layout, rows = self.sequences.layout, _required(gather.rows, where)
        dims: Mapping[Attended, int] = {"rows": rows, "columns": gather.dim}
        held = [self.held(gather.sequence, attends, where, place) for place in layout.places()]
        own = layout.tensor.rank if len(held[0].columns) > 1 else 0
        sizes = [(len(each.rows), len(each.columns[own])) for each in held]
        crossing = layout.crossing(True)
        other: Attended = "columns" if crossing == "rows" else "rows"
        outer = dims[crossing]
        inner = dims[crossing if attends != crossing else other]
        if layout.dsp.size == 1 or layout.hybrid.size == 1:  # one dim is split, in the order of the group
            dim = outer if layout.dsp.size == 1 else inner
            return all_gather(x, layout.whole, dim, [size[0 if dim == rows else 1] for size in sizes])
        if gather.dim != rows + 1:
            raise UserError(f"{where}: rows and columns of gathered tokens must be neighbouring dims")
        lengths = [t * s for t, s in sizes]
        parts = all_gather(x.flatten(rows, gather.dim), layout.whole, rows, lengths).split(lengths, rows)
        tiles = [part.unflatten(rows, size) for part, size in zip(parts, sizes, strict=True)]
        near = [torch.cat(tiles[place :: layout.hybrid.size], inner) for place in range(layout.hybrid.size)]
        return torch.cat(near, outer)

    def _gather_hybrid(self, x: Tensor, dim: int, sizes: Sequence[int]) -> Tensor:
        """All-gather over ring x ulysses: at once if they have a common process group, else over ulysses and then over the ring."""
        layout = self.sequences.layout
        ring, ulysses = layout.axes.ring, layout.axes.ulysses
        if layout.hybrid.group is not None or ring.size == 1 or ulysses.size == 1:
            return all_gather(x, layout.hybrid, dim, sizes)
        parts = [sizes[begin : begin + ulysses.size] for begin in range(0, len(sizes), ulysses.size)]
        near = all_gather(x, ulysses, dim, parts[ring.rank])
        return all_gather(near, ring, dim, [sum(part) for part in parts])

    # -- tensor parallelism ---------------------------------------------------------------------------------------------

    @outside_graphs
    def gather_seen(
        self, x: Tensor, sequence: str | tuple[str, ...], dim: int, attends: Attended, where: str
    ) -> Tensor:
        """All-gather the tokens seen from the own tokens of each tensor-parallel process.

        Of several sequences, the result has all tokens of the first, then all of the next.
        """
        widths = [self.widths(name, attends, where) for name in names_of(sequence)]
        by_process = list(zip(*widths, strict=True))
        # norms may return float32, which autocast would round in the next layer anyway
        joined = all_gather(autocast_alike(x)[0], self.sequences.layout.tensor, dim, [*map(sum, by_process)])
        if len(widths) == 1:
            return joined
        parts = joined.split([width for process in by_process for width in process], dim)
        return torch.cat([part for place in range(len(widths)) for part in parts[place :: len(widths)]], dim)

    @outside_graphs
    def scatter_own(
        self, x: Tensor, sequence: str | tuple[str, ...], dim: int, attends: Attended, where: str
    ) -> Tensor:
        """Reduce-scatter over the tensor-parallel processes: own tokens of the sum. Several sequences lie as `gather_seen` returns them."""
        widths, tensor = (
            [self.widths(name, attends, where) for name in names_of(sequence)],
            self.sequences.layout.tensor,
        )
        if len(widths) > 1:
            parts = x.split([width for each in widths for width in each], dim)
            x = torch.cat([part for place in range(tensor.size) for part in parts[place :: tensor.size]], dim)
        return reduce_scatter(x, tensor, dim, [*map(sum, zip(*widths, strict=True))])

    # -- agreement of all processes -------------------------------------------------------------------------------------

    def check_same(self, arguments: Mapping[str, Any]) -> None:
        """Check once per model that all processes of the group got the same inputs, by comparing shapes and sums.

        Raises UserError on every process where they differ, since processes that compute one video together need the same inputs.
        """
        sequences = self.sequences
        if sequences.checked or self.image or sequences.layout.whole.size == 1:
            return
        sequences.checked = True
        names, prints = [], []
        for name, value in sorted(arguments.items()):
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            sizes = [float(size) for tensor in tensors for size in (tensor.ndim, *tensor.shape)]
            shape = sum(size * math.sqrt(place + 2) for place, size in enumerate(sizes))
            names.append(name)
            prints += [shape, sum(float(tensor.detach().float().sum()) for tensor in tensors)]
        device = next((v.device for v in tree_leaves(arguments) if isinstance(v, torch.Tensor)), None)
        own_prints = torch.tensor(prints).nan_to_num().to(device).unsqueeze(0)
        whole, axes = sequences.layout.whole, (sequences.layout.axes.ulysses, sequences.layout.axes.ring)
        with torch.no_grad():
            every = own_prints
            for axis in (*axes, sequences.layout.dsp):
                every = all_gather(every, replace(axis, ledger=Ledger()), 0)
        other = (every != every[:1]).any(0).tolist()
        wrong = [name for name, *differ in zip(names, other[::2], other[1::2], strict=True) if any(differ)]
        if wrong:
            raise UserError(
                f"sequence parallelism: {', '.join(wrong)} differ between the {whole.size} ranks that compute one video "
                f"together; give ranks of a group the same sample, noise and timestep (group = rank // {whole.size})"
            )


def _narrowed(x: Tensor, dim: int, part: range, begin: int) -> Tensor:
    return x.narrow(dim, begin + part.start, len(part))


def _neighbours(ranges: list[range]) -> list[range]:
    """The same ranges if each begins where the previous one ends; else none."""
    follow = all(left.stop == right.start for left, right in itertools.pairwise(ranges))
    return ranges if follow else []


def _required(dim: int | None, where: str) -> int:
    if dim is None:
        raise UserError(
            f"{where}: tokens are re-sharded between rows and columns, and the plan names no dim of the rows"
        )
    return dim
