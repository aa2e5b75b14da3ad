"""Share the documents of a pack among the ranks of a ring: which rank holds which tokens, in which order, and how balanced that is.

Attention never crosses a document, so a document that lies whole on one rank needs no messages. Long documents are cut over all ranks in
zigzag (`sequence.zigzag`), which gives each rank equal tokens and equal attention work. The others stay whole: longest first, each goes to
the rank where the larger of its two loads, tokens and attention work, stays the smallest. A search finds which documents to cut: the
fewest, longest first, with which both loads are balanced enough.

A rank holds its parts of the cut documents first, each an early and a late chunk, and then its whole documents, both in falling order of
length. Documents of one length thus follow one another, and their pieces are batched into one call of a kernel.

All of this is arithmetic on lengths, the same on every rank, without messages.

Legend: T tokens of a pack, M of them in documents that are cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmspeed.comm.packing import even_sizes
from mmspeed.parallel.sequence.zigzag import zigzag_lengths

Loads = npt.NDArray[np.float64]
WORK_LIMIT = 1.05  # largest attention work of a rank, as a multiple of the mean
TOKEN_LIMIT = 0.02  # largest difference of a rank's tokens from the mean, as a fraction of it


@dataclass(frozen=True)
class HeldRange:
    """Tokens [begin, end) of document number `document`, which one rank holds."""

    document: int
    begin: int
    end: int

    def behind(self, start: int) -> tuple[int, int]:
        """The same range in a sequence where the document begins at `start`."""
        return start + self.begin, start + self.end

    @property
    def work(self) -> int:
        """The number of scores of these queries: each sees the keys of its document up to its own position."""
        return (self.end * (self.end + 1) - self.begin * (self.begin + 1)) // 2


@dataclass(frozen=True)
class DocumentShares:
    """How a pack's documents are shared among the ranks of a ring.

    lengths: of all documents, in the order of the pack, 0 allowed. cut: the numbers of the documents that all ranks share. whole: for each
    rank, the numbers of the documents that it holds alone.
    """

    lengths: tuple[int, ...]
    cut: tuple[int, ...]
    whole: tuple[tuple[int, ...], ...]

    @property
    def ranks(self) -> int:
        """The number of ranks of the ring."""
        return len(self.whole)

    @cached_property
    def cut_lengths(self) -> tuple[int, ...]:
        """Lengths of the cut documents, in the order in which each rank holds its parts."""
        return tuple(self.lengths[document] for document in self.cut)

    def whole_lengths(self, rank: int) -> tuple[int, ...]:
        """Lengths of a rank's whole documents, which come after its parts of the cut ones."""
        return tuple(self.lengths[document] for document in self.whole[rank])

    def ranges(self, rank: int) -> Iterator[HeldRange]:
        """Yield the ranges of tokens that a rank holds, in its order; none is empty."""
        for document, starts in zip(self.cut, self._chunk_starts, strict=True):
            for chunk in (rank, 2 * self.ranks - 1 - rank):
                if starts[chunk] < starts[chunk + 1]:
                    yield HeldRange(document, starts[chunk], starts[chunk + 1])
        for document in self.whole[rank]:
            if self.lengths[document]:
                yield HeldRange(document, 0, self.lengths[document])

    @cached_property
    def _chunk_starts(self) -> list[list[int]]:
        """For each cut document, the starts of its chunks, and its end."""
        return [[0, *accumulate(even_sizes(length, 2 * self.ranks))] for length in self.cut_lengths]

    @cached_property
    def shared_sizes(self) -> tuple[int, ...]:
        """The number of tokens of cut documents on each rank: the keys that go round the ring."""
        parts = [zigzag_lengths(length, self.ranks) for length in self.cut_lengths]
        return tuple(sum(part[rank] for part in parts) for rank in range(self.ranks))

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of tokens of each rank."""
        return tuple(size + sum(self.whole_lengths(rank)) for rank, size in enumerate(self.shared_sizes))

    @cached_property
    def work(self) -> tuple[int, ...]:
        """The attention work of each rank, in scores per head."""
        return tuple(sum(held.work for held in self.ranges(rank)) for rank in range(self.ranks))

    @property
    def imbalance(self) -> float:
        """The largest attention work of a rank, as a multiple of the mean."""
        return max(self.work) * self.ranks / max(1, sum(self.work))

    @property
    def spread(self) -> float:
        """The largest difference of a rank's tokens from the mean, as a fraction of it."""
        mean = max(1, sum(self.sizes)) / self.ranks
        return max(abs(size - mean) for size in self.sizes) / mean

    def excess(self) -> str:
        """Describe which limits the shares exceed, and by how much; "" where they keep both."""
        over = []
        if self.imbalance > WORK_LIMIT:
            over.append(f"attention work of the busiest rank is {self.imbalance:.3f} x the mean (limit {WORK_LIMIT})")
        if self.spread > TOKEN_LIMIT:
            over.append(f"tokens differ by {self.spread:.1%} from the mean (limit {TOKEN_LIMIT:.0%})")
        return "; ".join(over)

    @cached_property
    def order(self) -> Tensor:
        """(T,) the positions of the pack's tokens in the order in which the ranks, one after the other, hold them."""
        starts = [0, *accumulate(self.lengths)]
        held = (each for rank in range(self.ranks) for each in self.ranges(rank))
        return places_of([each.behind(starts[each.document]) for each in held])

    @cached_property
    def _cut_starts(self) -> dict[int, int]:
        """Where each cut document begins in the concatenation of the cut documents alone."""
        return dict(zip(self.cut, accumulate(self.cut_lengths, initial=0), strict=False))

    def _cut_ranges(self, rank: int) -> list[HeldRange]:
        return [held for held in self.ranges(rank) if held.document in self._cut_starts]

    @cached_property
    def cut_order(self) -> Tensor:
        """(M,) `order` for the cut documents alone: positions in their concatenation, in the order in which ranks hold them."""
        held = (each for rank in range(self.ranks) for each in self._cut_ranges(rank))
        return places_of([each.behind(self._cut_starts[each.document]) for each in held])

    @cached_property
    def cut_places(self) -> Tensor:
        """(M,) the inverse of `cut_order`: where in the order of the ranks each token of the concatenated cut documents is held."""
        return self.cut_order.argsort()

    def window_ranges(self, rank: int, window: int) -> list[tuple[int, int, int]]:
        """(first key, first query, end) of each range of cut documents that a rank holds, as positions in their concatenation.

        window: how many earlier keys a query sees besides its own.
        """
        ranges = []
        for held in self._cut_ranges(rank):
            start = self._cut_starts[held.document]
            ranges.append((start + max(0, held.begin - window), start + held.begin, start + held.end))
        return ranges


def places_of(ranges: Sequence[tuple[int, int]]) -> Tensor:
    """All integers of the ranges [begin, end), one range after the other, int64."""
    begins, ends = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
    counts = ends - begins
    behind = np.cumsum(counts) - counts  # places at which the ranges begin
    return torch.from_numpy(np.repeat(begins - behind, counts) + np.arange(counts.sum()))


@lru_cache(maxsize=64)  # validation repeats its packs
def share_documents(lengths: tuple[int, ...], ranks: int) -> DocumentShares:
    """Share documents of these lengths among the ranks of a ring, with the fewest cut documents that a search finds to keep both limits.

    Where no number of cuts keeps both, the shares that exceed them least (`excess` says by how much).
    """
    longest_first = sorted(range(len(lengths)), key=lambda document: (-lengths[document], document))
    if ranks == 1:
        return DocumentShares(lengths, (), (tuple(longest_first),))
    search = _Search(lengths, ranks, longest_first)
    tried: dict[int, float] = {}

    def fits(count: int) -> bool:
        tried.setdefault(count, search.excess_of(count))
        return tried[count] <= 1.0

    low = search.least
    high, step = low, 1
    while not fits(high) and high < len(lengths):
        low, high, step = high, min(high + step, len(lengths)), 2 * step
    if fits(high):
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        count = low if fits(low) else high
    else:
        any(fits(count) for count in range(len(lengths) + 1))
        count = min(tried, key=lambda each: (tried[each], each))
    return search.shares(count)


class _Search:
    """Tries shares with the longest documents cut, by how many are. Each rank's load is its tokens and its attention work."""

    def __init__(self, lengths: Sequence[int], ranks: int, longest_first: Sequence[int]) -> None:
        self.lengths, self.ranks, self.longest_first = tuple(lengths), ranks, longest_first
        ordered = np.array([lengths[document] for document in longest_first], dtype=np.int64)
        self.loads = _loads(np.zeros_like(ordered), ordered)
        self.mean = np.maximum(self.loads.sum(0) / ranks, 1e-9)
        self.most = self.mean * (1 + TOKEN_LIMIT, WORK_LIMIT)
        self.least = int((self.loads > self.most).any(1).sum())  # no rank may have one of these whole
        quotient, rest = np.divmod(ordered, 2 * ranks)
        chunks = np.arange(2 * ranks + 1)
        starts = quotient[:, None] * chunks + np.minimum(chunks, rest[:, None])  # as `even_sizes` cuts
        loads = _loads(starts[:, :-1], starts[:, 1:])
        both = loads[:, :ranks] + loads[:, : ranks - 1 : -1]
        self.cut_loads = np.concatenate((np.zeros_like(both[:1]), both.cumsum(0)))  # by the number of cut documents

    def assigned(self, count: int) -> tuple[Loads, list[list[int]]]:
        """(loads of each rank, its whole documents) with the `count` longest documents cut."""
        held, own = self.cut_loads[count] / self.most, self.loads / self.most
        whole: list[list[int]] = [[] for _ in range(self.ranks)]
        for place in range(count, len(own)):
            rank = int((held + own[place]).max(1).argmin())
            held[rank] += own[place]
            whole[rank].append(self.longest_first[place])
        return held * self.most, whole

    def shares(self, count: int) -> DocumentShares:
        """The shares with the `count` longest documents cut."""
        whole = self.assigned(count)[1]
        return DocumentShares(self.lengths, tuple(self.longest_first[:count]), tuple(map(tuple, whole)))

    def excess_of(self, count: int) -> float:
        """How far loads are from balanced, as a multiple of the limits; the worse of both loads. At most 1 where both limits are kept."""
        loads = self.assigned(count)[0] / self.mean
        spread, imbalance = np.abs(loads[:, 0] - 1).max(), loads[:, 1].max()
        return float(max((imbalance - 1) / (WORK_LIMIT - 1), spread / TOKEN_LIMIT))


def _loads(begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> Loads:
    """The tokens of the queries [begin, end) of documents, and their scores per head."""
    work = (ends * (ends + 1) - begins * (begins + 1)) // 2
    return np.stack((ends - begins, work), -1).astype(np.float64)
