"""Lay out a sequence's tokens over processes: arithmetic on ranges, without tensors.

A sequence is rows x columns: frames x places of a frame, or one row of all tokens. Each block of a factorised model attends along one of
the two dims only. Three degrees split the tokens:

    ulysses, ring   split the *crossing* dim, along which attention crosses processes: in a factorised model the rows (frames), or the
                    columns where `shard` says so; in every other model the columns
    dsp             splits, in factorised models, the other dim for blocks that attend along the crossing one, and the crossing dim,
                    within each part of ulysses x ring, for blocks that attend along the other one. Tokens are re-sharded in between

    blocks attend along     crossing dim is split over     other dim is split over
    the crossing dim        ulysses x ring                 dsp
    the other dim           ulysses x ring, then dsp       nothing

Tensor-parallel processes split the columns once more, outside of the layers that they split (Megatron's sequence parallelism). Columns are
cut for them first, so that processes re-shard only with those of the same tensor-parallel rank. Sizes of parts differ by one at most, so no
length has to divide.

Sequence parallelism after Ulysses (Jacobs et al. 2023), ring attention (Liu et al. 2023), their hybrid (Fang and Zhao 2024); re-sharding
between spatial and temporal blocks after DSP (Zhao et al. 2024); norms on shards between tensor-parallel layers after Korthikanti et al.
(2022).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from mmspeed.comm import Axis, Ledger, even_sizes
from mmspeed.parallel.sequence.hybrid_attention import SequenceAxes
from mmspeed.parallel.sequence.zigzag import zigzag_lengths
from mmspeed.protocols.plan import Attended


def split_range(whole: range, parts: int, part: int) -> range:
    """Part number `part` of a range that is cut into `parts` parts; sizes differ by one at most, larger parts first."""
    sizes = even_sizes(len(whole), parts)
    start = whole.start + sum(sizes[:part])
    return range(start, start + sizes[part])


@dataclass(frozen=True)
class TokenRange:
    """The tokens that one process of a group holds: those of `rows` in the union of `columns`.

    columns: one range for each tensor-parallel process.
    """

    rows: range
    columns: tuple[range, ...]

    @property
    def width(self) -> int:
        """The number of columns of all tensor-parallel processes together."""
        return sum(map(len, self.columns))

    @property
    def tokens(self) -> int:
        """The number of tokens of all tensor-parallel processes together."""
        return len(self.rows) * self.width


@dataclass(frozen=True)
class TokenLayout:
    """How every forward pass's tokens are laid out over processes. By default one process has all, and nothing is exchanged.

    Args:
        axes: ring and ulysses, whose processes attend together.
        hybrid: the same processes as one axis, ring outermost.
        dsp: processes between which the tokens of a factorised model are re-sharded.
        whole: dsp x ring x ulysses as one axis, in this order: the group.
        tensor: the tensor-parallel axis.
        shard: the crossing dim of a factorised model.
        text_from: captions of at least so many tokens are split too, in models where they may stay whole; None: none is.
        experts: processes that hold different experts. nodes: the same as (nodes, those of a node), where a token crosses to a node once.
        etp: processes that hold parts of the same experts. ep_backend: what sends tokens to experts.
        stages: processes with the stages of a pipeline.
    """

    axes: SequenceAxes = field(default_factory=SequenceAxes.alone)
    hybrid: Axis = field(default_factory=lambda: Axis.alone("sequence"))
    dsp: Axis = field(default_factory=lambda: Axis.alone("dsp"))
    whole: Axis = field(default_factory=lambda: Axis.alone("sequence"))
    tensor: Axis = field(default_factory=lambda: Axis.alone("tp"))
    shard: Attended = "rows"
    text_from: int | None = None
    experts: Axis = field(default_factory=lambda: Axis.alone("ep"))
    nodes: tuple[Axis, Axis] | None = None
    etp: Axis = field(default_factory=lambda: Axis.alone("etp"))
    ep_backend: Literal["collective", "deepep"] = "collective"
    stages: Axis = field(default_factory=lambda: Axis.alone("pp"))

    @property
    def spreads_experts(self) -> bool:
        """True where processes hold other experts, or other parts of them."""
        return self.experts.size * self.etp.size > 1

    def __deepcopy__(self, memo: Any) -> TokenLayout:
        return self  # nothing in it changes, and process groups cannot be copied

    @property
    def ledger(self) -> Ledger:
        """The counts of this process's exchanges."""
        return self.whole.ledger

    @property
    def size(self) -> int:
        """The number of processes that compute one sample together."""
        return self.whole.size * self.tensor.size

    def crossing(self, factorised: bool) -> Attended:
        """The dim that ulysses and ring split."""
        return self.shard if factorised else "columns"

    def held(
        self,
        shape: tuple[int, int],
        attends: Attended,
        factorised: bool,
        hybrid: int | None = None,
        dsp: int | None = None,
    ) -> TokenRange:
        """The tokens of rows x columns that one process of the group holds, for blocks that attend along this dim.

        hybrid, dsp: the process's ranks on these axes; None: those of this process.
        """
        h = self.hybrid.rank if hybrid is None else hybrid
        d = self.dsp.rank if dsp is None else dsp
        crossing = self.crossing(factorised)

        def cut(whole: range, dim: Attended) -> range:
            if dim == crossing:
                part = split_range(whole, self.hybrid.size, h)
                return part if attends == crossing else split_range(part, self.dsp.size, d)
            return split_range(whole, self.dsp.size, d) if attends == crossing else whole

        rows, columns = cut(range(shape[0]), "rows"), range(shape[1])
        outer = (split_range(columns, self.tensor.size, part) for part in range(self.tensor.size))
        return TokenRange(rows, tuple(cut(part, "columns") for part in outer))

    def unsplit(self, shape: tuple[int, int]) -> TokenRange:
        """All tokens, split over tensor-parallel processes only."""
        parts = (split_range(range(shape[1]), self.tensor.size, part) for part in range(self.tensor.size))
        return TokenRange(range(shape[0]), tuple(parts))

    def places(self) -> Iterator[tuple[int, int]]:
        """(hybrid, dsp) ranks of all processes of the group, in the order of `whole`."""
        return ((h, d) for d in range(self.dsp.size) for h in range(self.hybrid.size))

    def zigzag_sizes(self, length: int) -> tuple[int, ...]:
        """Lengths of the parts of a causal sequence on all processes of the hybrid axis."""
        return self.near_sizes(zigzag_lengths(length, self.axes.ring.size))

    def near_sizes(self, joined: Iterable[int]) -> tuple[int, ...]:
        """Lengths of the parts on all processes of the hybrid axis, from the lengths at each ring place, which its Ulysses ranks split."""
        return tuple(size for part in joined for size in even_sizes(part, self.axes.ulysses.size))
