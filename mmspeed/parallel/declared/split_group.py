"""The sequences of one forward pass, and this rank's parts of them, for a model that is split by a plan.

A rank's part is known from a sequence's length alone, so that lengths are never exchanged: even parts in the order of the ranks,
ring outermost, or zigzag parts where attention is causal.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mmspeed.comm import Ledger, all_gather, even_sizes
from mmspeed.errors import UserError
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes
from mmspeed.parallel.sequence.zigzag import zigzag_lengths, zigzag_order
from mmspeed.replay import fact
from mmspeed.torch_internals import tree_leaves

from .plan import Gather, SequencePlan, Split


@dataclass
class ForwardRecord:
    """One forward: lengths of its sequences over all ranks; `whole` for an image."""

    lengths: dict[str, int] = field(default_factory=dict)
    whole: bool = False


class SplitGroup:
    """What all changed modules of one model share: the axes, and the record of the forward that is being computed."""

    def __init__(self, axes: SequenceAxes, plan: SequencePlan) -> None:
        self.axes, self.frames = axes, plan.frames
        self.zigzag = plan.causal and axes.ring.size > 1  # over Ulysses alone, zigzag order is the sequence's own
        self.degree, self.place = axes.size, axes.rank
        self.record: ForwardRecord | None = None
        self.checked = False

    def __deepcopy__(self, memo: Any) -> SplitGroup:
        return self  # process groups cannot be copied; the record is told anew before every use

    def now(self) -> ForwardRecord | None:
        """The record of the forward that is being computed, or that is being recomputed."""
        return fact(self, lambda: self.record)

    def sizes(self, sequence: str, where: str) -> tuple[int, ...]:
        """Lengths of a sequence on all ranks of the group."""
        record = self.now()
        lengths = record.lengths if record is not None else {}
        if sequence not in lengths:
            raise UserError(f"{where}: sequence {sequence!r} was not split before it is needed; mend the plan")
        if not self.zigzag:
            return even_sizes(lengths[sequence], self.degree)
        joined = zigzag_lengths(lengths[sequence], self.axes.ring.size)
        return tuple(size for length in joined for size in even_sizes(length, self.axes.ulysses.size))

    def added(self, sequences: Iterable[str], where: str) -> tuple[int, ...]:
        """Lengths of several sequences together on all ranks."""
        each = [self.sizes(sequence, where) for sequence in sequences]
        return tuple(sum(sizes) for sizes in zip(*each, strict=True))

    def tell(self, sequence: str, length: int, where: str) -> None:
        """Note a sequence's length over all ranks, or hold it against what is known."""
        record = self.now()
        assert record is not None
        known = record.lengths.setdefault(sequence, length)
        if known != length:
            raise UserError(
                f"{where}: sequence {sequence!r} has {length} tokens here and had {known} before; mend the plan"
            )

    def cut(self, tensor: torch.Tensor, split: Split, where: str) -> torch.Tensor:
        """This rank's part. A copy: a view would keep the whole sequence in memory for backward."""
        if split.ndim is not None and tensor.ndim != split.ndim:
            return tensor
        size, parts, begin = tensor.shape[split.dim], [], 0
        if split.broadcast and size == 1:
            return tensor
        for sequence, length in self._lengths(split, size, where):
            sizes = self.sizes(sequence, where)
            if min(sizes) < split.least:
                raise UserError(
                    f"{where}: {length} tokens of {sequence!r} for {self.degree} ranks; this model needs {split.least} on "
                    f"every rank: pad to {self.degree * split.least} (and mask), or lower parallel.ring or parallel.ulysses"
                )
            first, count = sum(sizes[: self.place]), sizes[self.place]
            if self.zigzag:
                own = begin + zigzag_order(length, self.axes.ring.size)[first : first + count]
                parts.append(tensor.index_select(split.dim, own.to(tensor.device)))
            else:
                parts.append(tensor.narrow(split.dim, begin + first, count))
            begin += length
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts, split.dim)

    def _lengths(self, split: Split, size: int, where: str) -> list[tuple[str, int]]:
        sequences = (split.sequence,) if isinstance(split.sequence, str) else split.sequence
        if len(sequences) == 1:
            self.tell(sequences[0], size, where)
        lengths = [(sequence, sum(self.sizes(sequence, where))) for sequence in sequences]
        if sum(length for _, length in lengths) != size:
            raise UserError(f"{where}: {size} places for {dict(lengths)} tokens; mend the plan")
        return lengths

    def gather(self, tensor: torch.Tensor, gather: Gather, where: str) -> torch.Tensor:
        """The parts of all ranks: over ulysses within a row, then over ring."""
        sizes, width = self.sizes(gather.sequence, where), self.axes.ulysses.size
        rows = [sizes[begin : begin + width] for begin in range(0, self.degree, width)]
        row = all_gather(tensor, self.axes.ulysses, gather.dim, rows[self.axes.ring.rank])
        whole = all_gather(row, self.axes.ring, gather.dim, [sum(row) for row in rows])
        if self.zigzag:
            back = zigzag_order(sum(sizes), self.axes.ring.size).argsort()
            whole = whole.index_select(gather.dim, back.to(whole.device))
        return self.mark(whole)

    def leading(self, count: int, sequence: str, where: str) -> int:
        """How many of the first `count` tokens of a sequence are on this rank; a part keeps its tokens' order."""
        sizes = self.sizes(sequence, where)
        first, own = sum(sizes[: self.place]), sizes[self.place]
        if self.zigzag:
            places = zigzag_order(sum(sizes), self.axes.ring.size)[first : first + own]
            return int((places < count).sum())
        return min(max(count - first, 0), own)

    def mark(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make the backward through `tensor` begin by telling this forward's record."""
        return _Mark.apply(tensor, self, self.now()) if tensor.requires_grad else tensor  # type: ignore[no-any-return]

    def check_same(self, arguments: Mapping[str, Any]) -> None:
        """Hold the inputs of all ranks of the group against one another, by shapes and sums.

        Raises UserError on every rank: ranks that compute one video together must be given the same one.
        """
        names, prints = [], []
        for name, value in sorted(arguments.items()):
            tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
            sizes = [float(size) for tensor in tensors for size in (tensor.ndim, *tensor.shape)]
            shape = sum(size * math.sqrt(place + 2) for place, size in enumerate(sizes))
            names.append(name)
            prints += [shape, sum(float(tensor.detach().float().sum()) for tensor in tensors)]
        device = next((v.device for v in tree_leaves(arguments) if isinstance(v, torch.Tensor)), None)
        mine = torch.tensor(prints).nan_to_num().to(device).unsqueeze(0)
        with torch.no_grad():
            every = mine
            for axis in (self.axes.ulysses, self.axes.ring):
                every = all_gather(every, replace(axis, ledger=Ledger()), 0)
        other = (every != every[:1]).any(0).tolist()
        wrong = [name for name, *differ in zip(names, other[::2], other[1::2], strict=True) if any(differ)]
        if wrong:
            raise UserError(
                f"sequence parallelism: {', '.join(wrong)} differ between the {self.degree} ranks that compute one video "
                f"together; give ranks of a group the same sample, noise and timestep (group = rank // {self.degree})"
            )


class _Mark(torch.autograd.Function):
    """Identity; its backward, the first of a forward's, puts that forward's record back.

    Layers that are recomputed in backward then find the lengths of their own forward, whatever was computed since.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: SplitGroup, record: ForwardRecord) -> torch.Tensor:  # type: ignore[override]
        ctx.group, ctx.record = group, record
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        ctx.group.record = ctx.record
        return grad, None, None
