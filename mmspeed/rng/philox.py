"""The generator: words of a counter, keyed by the whole hash of the names, and exact maps from them to numbers.

*Words.* The SHA-256 of the JSON array [seed, purpose, names...] is four 64-bit little-endian words k0 k1 c2 c3. Block b of the name's
stream is Philox4x64-10 (Salmon et al. 2011, Random123; numpy's `Philox`) of the counter (b + 1, 0, c2, c3) under the key (k0, k1); word w
is number w % 4 of block w // 4. So any word is found from its number alone.

*Normal numbers.* Value v takes half h = v % 2 of word v // 2: bits 32h..32h+15 are a, the next 16 b. With T, the 65,536 integers that
stand for equal parts of the normal distribution (docs/randomness.md), the value is (T[a] + T[b]) / 2**21. |T| is below
2**23, so the sum is an integer below 2**24 and the value is exact in float32: no arithmetic rounds it, on any device.

*Uniform numbers* and *permutations* stand at their functions.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numpy.random import Philox
from safetensors.numpy import load_file
from torch import Tensor

VERSION = 2  # recorded by caches and runs; another one would draw other numbers
UNIT = 2.0**-21  # of the table's integers
QUANTILES = Path(__file__).parent.parent / "assets" / "normal_quantiles.safetensors"
_CHUNK = 1 << 12  # words drawn at a time: their table indices and values stay in a core's cache
_SHORT = 1 << 14  # a permutation's words, of which few are alike in their upper 18 bits

Array = npt.NDArray[Any]


def key64(*names: object) -> int:
    """A 63-bit integer that depends on every name and on their order. Names are ints, floats, strings or None."""
    text = "\x1f".join(f"{type(name).__name__}:{name}" for name in names)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def name_digest(*names: object) -> bytes:
    """The SHA-256 (32 bytes) of names as a JSON array, so that different names never meet in one text.

    Names are ints, floats, strings, bools or None, and lists of them; raises TypeError for another type.
    """
    return hashlib.sha256(json.dumps(names, separators=(",", ":")).encode()).digest()


@functools.cache
def quantiles() -> Array:
    """T: int32 (65536,), ascending and symmetric, T[i] = -T[65535 - i]; in units of 2**-21 of normal numbers of variance 1/2."""
    upper = load_file(QUANTILES)["upper"]
    return np.concatenate((-upper[::-1], upper)).astype(np.int32)


@functools.cache
def _values() -> Array:
    """The table as float32 numbers of variance 1/2: multiples of 2**-21 below 4, so that sums of two are exact."""
    return (quantiles() * np.float32(UNIT)).astype(np.float32)


class Stream:
    """The numbers of one name, one draw after another: each begins with the word after the last one's."""

    def __init__(self, seed: int, *names: object) -> None:
        self.key = np.frombuffer(name_digest(int(seed), *names), "<u8").astype(np.uint64)
        self._next = 0  # word that no draw has taken
        self._source: Philox | None = None  # of the words from `_place` on
        self._place = 0

    def words(self, begin: int, count: int) -> Array:
        """Words begin..begin+count-1, uint64."""
        if self._source is None or begin != self._place:  # to make one takes as long as 2,000 words
            block, skipped = divmod(begin, 4)
            counter = np.array([block, 0, self.key[2], self.key[3]], np.uint64)  # numpy adds 1 before each block
            self._source = Philox(counter=counter, key=self.key[:2])
            if skipped:
                self._source.random_raw(skipped)
        self._place = begin + count
        drawn: Array = self._source.random_raw(count)
        return drawn

    def normal(self, shape: tuple[int, ...]) -> Tensor:
        """Standard normal numbers, float32."""
        count = math.prod(shape)
        return self._normal(self._take(-(-count // 2)), 0, count).reshape(shape)

    def normal_part(self, count: int, begin: int, end: int) -> Tensor:
        """The values begin..end-1 of `count` normal numbers, float32; no others are drawn."""
        return self._normal(self._take(-(-count // 2)), begin, end)

    def symmetric(self, shape: tuple[int, ...], bound: float) -> Tensor:
        """Uniform numbers between -bound and bound, float32.

        Value v takes the upper 24 bits k of half v % 2 of word v // 2, and is (2k + 1 - 2**24) * s, with one rounding; s is the
        float32 number nearest to bound / 2**24.
        """
        count = math.prod(shape)
        drawn = torch.empty(
            2 * -(-count // 2), dtype=torch.float32, device="cpu"
        )  # torch's memory, which its profiler counts
        values, begin, scale = drawn.numpy(), self._take(len(drawn) // 2), np.float32(bound / 2**24)
        for at in range(0, len(values), 2 * _CHUNK):
            part = values[at : at + 2 * _CHUNK]
            bits = _halves(self.words(begin + at // 2, len(part) // 2), "<u4") >> 8
            np.multiply(2 * bits.astype(np.int32) + (1 - 2**24), scale, out=part, casting="unsafe")
        return drawn[:count].reshape(shape)

    def uniform(self) -> float:
        """A number in [0, 1): the upper 53 bits of a word, times 2**-53."""
        return (int(self.words(self._take(1), 1)[0]) >> 11) * 2.0**-53

    def permutation(self, count: int) -> Array:
        """The numbers 0..count-1 in a random order, int64: number i has word i, and they are sorted by (word, number)."""
        return _sorting_order(self.words(self._take(count), count))

    def _take(self, words: int) -> int:
        """The first of as many words that are taken from the stream now."""
        begin, self._next = self._next, self._next + words
        return begin

    def _normal(self, word: int, begin: int, end: int) -> Tensor:
        """Values begin..end-1 of the draw whose first word is `word`."""
        first, last = begin // 2, -(-end // 2)
        drawn = torch.empty(
            2 * (last - first), dtype=torch.float32, device="cpu"
        )  # torch's memory, which its profiler counts
        values, table, most = drawn.numpy(), _values(), 4 * min(_CHUNK, last - first)
        places, parts = np.empty(most, np.intp), np.empty(most, np.float32)
        for at in range(first, last, _CHUNK):
            size = min(_CHUNK, last - at)
            place, part = places[: 4 * size], parts[: 4 * size]
            place[:] = _halves(self.words(word + at, size), "<u2")
            # a third of the time of table[place]; every place is in the table, and "raise" would copy `out`
            table.take(place, out=part, mode="clip")
            np.add(part[0::2], part[1::2], out=values[2 * (at - first) : 2 * (at - first + size)])
        return drawn[begin - 2 * first : end - 2 * first]


def _halves(words: Array, kind: str) -> Array:
    """The parts of words, their low bits first."""
    return words.astype("<u8", copy=False).view(kind)


def _sorting_order(words: Array) -> Array:
    """The numbers of words, int64, sorted by (word, number).

    Sorting numbers is several times faster than sorting indices: what is sorted is a word's upper bits, with its number in place of the
    lower ones. Numbers of 32 bits sort twice as fast as those of 64, but long permutations have too many words alike in what they hold.
    """
    count = len(words)
    upper = _halves(words, "<u4")[1::2] if count <= _SHORT else words
    index = upper.dtype.type((1 << (count - 1).bit_length()) - 1 if count else 0)  # the bits that a number takes
    packed = upper & ~index
    packed |= np.arange(count, dtype=upper.dtype)
    packed.sort()
    packed_numbers = packed & index
    order = packed_numbers.view(np.int64) if packed_numbers.itemsize == 8 else packed_numbers.astype(np.int64)
    alike = np.zeros(count + 1, np.bool_)  # place i: are i - 1 and i?
    np.less_equal(packed[1:] ^ packed[:-1], index, out=alike[1:-1])
    if alike.any():  # the lower bits decide
        tied = np.flatnonzero(alike[1:] | alike[:-1])
        numbers = order[tied]  # ascending where words are alike, and a stable sort keeps that order
        order[tied] = numbers[words[numbers].argsort(kind="stable")]
    return order
