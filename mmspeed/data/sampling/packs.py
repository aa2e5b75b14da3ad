"""Packs of documents: rows of so many tokens for a language model. Pure functions of lengths, names and the length of a pack.

Every token of an epoch is in exactly one pack. Nothing here knows ranks or steps: whoever goes on with another number of ranks, another
batch or another length of packs packs the rest of an epoch again (`Packs.rest`), and so uses each token once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from mmspeed.rng import stream

Array = npt.NDArray[Any]
# "documents": documents are whole wherever they fit into a pack, put together by best fit; "stream": they follow one another, and are cut
# where a pack ends.
PackMode = Literal["documents", "stream"]
WINDOW = 1 << 24  # ranges that are packed together


@dataclass(frozen=True)
class TokenRanges:
    """Ranges of documents' tokens, one in each row: `count` tokens of `document` from `begin` on."""

    document: Array
    begin: Array
    count: Array

    def __len__(self) -> int:
        return len(self.document)

    @property
    def tokens(self) -> int:
        """All tokens."""
        return int(self.count.sum(dtype=np.int64))

    def rows(self) -> list[tuple[int, int, int]]:
        """(document, begin, count) of each range."""
        return list(zip(self.document.tolist(), self.begin.tolist(), self.count.tolist(), strict=True))

    def take(self, places: Array | slice) -> TokenRanges:
        """The ranges at these places."""
        return TokenRanges(self.document[places], self.begin[places], self.count[places])


@dataclass(frozen=True)
class Packs:
    """Packs in their order: pack i has the ranges [offsets[i], offsets[i + 1]).

    length: tokens that a pack holds at most. cut: ranges that were cut.
    """

    length: int
    offsets: Array
    ranges: TokenRanges
    cut: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def ranges_of(self, pack: int) -> TokenRanges:
        """The ranges of a pack."""
        return self.ranges.take(slice(int(self.offsets[pack]), int(self.offsets[pack + 1])))

    def pieces(self, pack: int) -> list[tuple[int, int, int]]:
        """(document, begin, count) of each range of a pack."""
        return self.ranges_of(pack).rows()

    @property
    def padding(self) -> float:
        """The share of all places that hold no token."""
        return 1 - self.ranges.tokens / (len(self) * self.length) if len(self) else 0.0

    def tokens(self) -> Array:
        """The tokens of each pack."""
        return _sums(self.ranges.count, self.offsets)

    def squares(self) -> Array:
        """The sum of the squared lengths of each pack's ranges: its work in attention."""
        count = self.ranges.count.astype(np.int64)
        return _sums(count * count, self.offsets)

    def only(self, numbers: Array) -> Packs:
        """The packs of these numbers, in this order."""
        return _ordered(self.length, np.diff(self.offsets), self.ranges, numbers, self.cut)

    def targets(self, of_ranges: Array) -> Array:
        """The targets of each pack, from those of each range."""
        return _sums(of_ranges, self.offsets)

    def rest(self, used: Array) -> TokenRanges:
        """The ranges of all packs but those whose numbers are `used`; ranges of one document that touch are joined again."""
        left = np.ones(len(self), dtype=bool)
        left[used] = False
        return joined(self.ranges.take(np.repeat(left, np.diff(self.offsets))))


def whole_documents(lengths: Sequence[int] | Array) -> TokenRanges:
    """One range for each document, by its number of tokens; documents without tokens have none. Raises ValueError for negative lengths."""
    count = np.asarray(lengths, dtype=np.int64)
    if len(count) and count.min() < 0:
        raise ValueError(f"document {int(count.argmin())} has {int(count.min())} tokens")
    (document,) = np.nonzero(count)
    return TokenRanges(_narrow(document), np.zeros(len(document), np.int32), _narrow(count[document]))


def joined(ranges: TokenRanges) -> TokenRanges:
    """Ranges by document and begin, those that touch as one."""
    ranges = ranges.take(np.lexsort((ranges.begin, ranges.document)))
    if not len(ranges):
        return ranges
    touches = (ranges.document[1:] == ranges.document[:-1]) & (
        ranges.begin[:-1].astype(np.int64) + ranges.count[:-1] == ranges.begin[1:]
    )
    (first,) = np.nonzero(np.concatenate(([True], ~touches)))
    count = np.add.reduceat(ranges.count.astype(np.int64), first)
    return TokenRanges(ranges.document[first], ranges.begin[first], _narrow(count))


def pack(ranges: TokenRanges, length: int, mode: PackMode, seed: int, *names: object) -> Packs:
    """Packs of `length` tokens, in a random order that is a pure function of the seed and the names (of the epoch, and of the ranges).

    With "documents", ranges longer than a pack are cut into full packs and a rest; windows of 2^24 ranges, in random order, are packed by
    best fit: the longest range that fits comes next, and ranges of one length are dealt to their places at random.
    """
    if length < 1:
        raise ValueError(f"packs of {length} tokens")
    ranges = ranges.take(stream(seed, "packs", "ranges", *names).permutation(len(ranges)))
    if mode == "stream":
        return _streamed(ranges, length)
    parts = [_window(ranges.take(slice(start, start + WINDOW)), length) for start in range(0, len(ranges), WINDOW)]
    counts = np.concatenate([np.diff(part.offsets) for part in parts]) if parts else np.zeros(0, np.int64)
    rows = TokenRanges(
        *(_concatenated([getattr(part.ranges, name) for part in parts]) for name in ("document", "begin", "count"))
    )
    order = stream(seed, "packs", "order", *names).permutation(len(counts))
    return _ordered(length, counts, rows, order, sum(part.cut for part in parts))


def _streamed(ranges: TokenRanges, length: int) -> Packs:
    """Ranges one behind the other, cut where a pack ends; the last pack may be short."""
    ends = np.cumsum(ranges.count, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    bounds = np.concatenate((ends, np.arange(length, total + 1, length, dtype=np.int64)))
    bounds.sort(kind="stable")  # merges two sorted parts
    bounds = bounds[np.concatenate((bounds[1:] != bounds[:-1], np.ones(min(1, len(bounds)), bool)))]
    starts = np.concatenate((np.zeros(min(1, len(bounds)), np.int64), bounds[:-1]))
    place = np.searchsorted(ends, starts, side="right")
    begin = ranges.begin[place].astype(np.int64) + starts - (ends[place] - ranges.count[place])
    rows = TokenRanges(ranges.document[place], _narrow(begin), _narrow(bounds - starts))
    packs = -(-total // length)
    return Packs(length, np.searchsorted(starts, np.arange(packs + 1) * length), rows, len(rows) - len(ranges))


def _window(ranges: TokenRanges, length: int) -> Packs:
    """Packs of a window of ranges, those of long ones first."""
    full, rest = np.divmod(ranges.count, length)
    (long,) = np.nonzero(full)
    repeats = full[long]
    number = np.arange(int(repeats.sum())) - np.repeat(np.cumsum(repeats) - repeats, repeats)
    document = np.repeat(ranges.document[long], repeats)
    begin = np.repeat(ranges.begin[long].astype(np.int64), repeats) + number * length
    (short,) = np.nonzero(rest)
    rests = rest[short]
    rest_begin = ranges.begin[short].astype(np.int64) + full[short].astype(np.int64) * length
    places, sizes = _best_fit(np.bincount(rests, minlength=length))
    # the places of one length, in their order, get the ranges of that length, in theirs
    dealt = np.empty(len(short), np.int64)
    dealt[np.argsort(places, kind="stable")] = np.argsort(rests.astype(places.dtype), kind="stable")
    rows = TokenRanges(
        np.concatenate((document, ranges.document[short][dealt])),
        _narrow(np.concatenate((begin, rest_begin[dealt]))),
        np.concatenate((np.full(len(document), length, np.int32), rests[dealt].astype(np.int32))),
    )
    counts = np.concatenate((np.ones(len(document), np.int64), sizes))
    cut = int(np.count_nonzero(ranges.count > length))
    return Packs(length, _offsets(counts), rows, cut)


def _best_fit(histogram: Array) -> tuple[Array, Array]:
    """(length of each place, places of each pack) for a histogram of lengths below that of a pack, `len(histogram)`.

    A pack takes the longest range that is left and, again and again, the longest one that fits behind; the same pack is made as often as
    the histogram allows.
    """
    length = len(histogram)
    left = histogram.astype(np.int64)
    kind: npt.DTypeLike = np.uint16 if length <= 1 << 16 else np.int32
    present = [size for size in range(1, length) if left[size]]
    places, sizes = [np.zeros(0, kind)], [np.zeros(0, np.int64)]
    while present:
        members: dict[int, int] = {}
        room = length
        index = len(present) - 1
        while index >= 0:
            size = present[index]
            if size > room:
                index = bisect_right(present, room) - 1  # of the greatest one of at most `room`
                continue
            some = min(room // size, int(left[size]))
            members[size] = some
            room -= some * size
            index -= 1
        repeats = min(int(left[size]) // some for size, some in members.items())
        one = np.repeat(np.array(list(members), kind), list(members.values()))
        places.append(np.tile(one, repeats))
        sizes.append(np.full(repeats, len(one), np.int64))
        for size, some in members.items():
            left[size] -= repeats * some
        present = [size for size in present if left[size]]
    return np.concatenate(places), np.concatenate(sizes)


def _ordered(length: int, counts: Array, rows: TokenRanges, order: Array, cut: int) -> Packs:
    """Packs, given by their counts of ranges, in another order, or some of them."""
    starts = _offsets(counts)[:-1][order]
    offsets = _offsets(counts[order])
    places = np.arange(offsets[-1]) - np.repeat(offsets[:-1] - starts, counts[order])
    return Packs(length, offsets, rows.take(places), cut)


def _offsets(counts: Array) -> Array:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)))


def _sums(values: Array, offsets: Array) -> Array:
    """Sums of the values between offsets; no pack is empty."""
    return np.add.reduceat(values.astype(np.int64), offsets[:-1]) if len(offsets) > 1 else np.zeros(0, np.int64)


def _concatenated(parts: list[Array]) -> Array:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _narrow(values: Array) -> Array:
    """Whole numbers in 32 bits where they fit."""
    fits = not len(values) or int(values.max()) < 1 << 31
    return values.astype(np.int32) if fits else values.astype(np.int64)


# ---- packs of equal cost

POOL = 64  # steps whose packs are sorted together


def steps_of_equal_cost(cost: Array, size: int, seed: int, *names: object) -> list[Array]:
    """The numbers of the packs of each step of `size` packs: packs of a step cost nearly the same; the last step may be short.

    Packs stay in their random order up to pools of 64 steps; within a pool they are sorted by cost, cut into steps, and the steps
    shuffled. So a step's packs have like lengths of documents, while each pool has all.
    """
    if size < 1:
        raise ValueError(f"steps of {size} packs")
    steps: list[Array] = []
    full = len(cost) // size
    for number, start in enumerate(range(0, full, POOL)):
        part = np.arange(start * size, min(start + POOL, full) * size)
        rows = part[np.argsort(cost[part], kind="stable")].reshape(-1, size)
        steps += list(rows[stream(seed, "packs", "steps", number, *names).permutation(len(rows))])
    if full * size < len(cost):
        steps.append(np.arange(full * size, len(cost)))
    return steps
