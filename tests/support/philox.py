"""The generator's arithmetic by other means: whole numbers of Python, arrays, and torch's 64-bit integers as any device has them."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmspeed.rng import philox

Words = npt.NDArray[np.uint64]

WORD = 2**64
ROUNDS = 10
MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
STEPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B  # of the key, from round to round
LOW = 0xFFFFFFFF


def philox_block(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    """Philox4x64-10 of one counter (4 words) under a key (2 words), as in Salmon et al. 2011."""
    c, k = list(counter), list(key)
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * c[0], MULTIPLIERS[1] * c[2]
        c = [second // WORD ^ c[1] ^ k[0], second % WORD, first // WORD ^ c[3] ^ k[1], first % WORD]
        k = [(word + step) % WORD for word, step in zip(k, STEPS, strict=True)]
    return c


def words_of(begin: int, count: int, *names: object) -> list[int]:
    """Words of a name's stream, found one by one."""
    digest = hashlib.sha256(json.dumps(names, separators=(",", ":")).encode()).digest()
    k0, k1, c2, c3 = (int.from_bytes(digest[at : at + 8], "little") for at in range(0, 32, 8))
    return [philox_block((w // 4 + 1, 0, c2, c3), (k0, k1))[w % 4] for w in range(begin, begin + count)]


def first_words(keys_N4: Words) -> Words:
    """Word 0 of each of many streams (N,), from the four words of their keys (N, 4), all at once."""
    k = [keys_N4[:, at] for at in range(2)]
    c = [np.ones_like(k[0]), np.zeros_like(k[0]), keys_N4[:, 2], keys_N4[:, 3]]
    for _ in range(ROUNDS):
        (first, low), (second, other) = (_wide_product(c[2 * at], MULTIPLIERS[at]) for at in range(2))
        c = [second ^ c[1] ^ k[0], other, first ^ c[3] ^ k[1], low]
        k = [word + np.uint64(step) for word, step in zip(k, STEPS, strict=True)]
    return c[0]


def normal_of(value: int, *names: object) -> float:
    """One normal number of a name, alone."""
    (word,) = words_of(value // 2, 1, *names)
    a, b = (word >> 32 * (value % 2) + shift & 0xFFFF for shift in (0, 16))
    table = philox.quantiles()
    return (int(table[a]) + int(table[b])) / 2**21


def device_normal(count: int, device: str, *names: object) -> Tensor:
    """The first normal numbers of a name, drawn on a device by its 64-bit integers: products, shifts, one gather, one sum."""
    key, blocks = philox.Stream(names[0], *names[1:]).key, -(-count // 8)  # type: ignore[call-overload]
    k0, k1, c2, c3 = (_signed(int(word)) for word in key)
    c: list[Any] = [torch.arange(1, blocks + 1, device=device), 0, c2, c3]
    c = [word if isinstance(word, Tensor) else torch.full_like(c[0], word) for word in c]
    for number in range(ROUNDS):
        high, low = zip(*(_product(c[2 * at], MULTIPLIERS[at]) for at in range(2)), strict=True)
        turned = [_signed((int(word) + number * step) % WORD) for word, step in zip((k0, k1), STEPS, strict=True)]
        c = [high[1] ^ c[1] ^ turned[0], low[1], high[0] ^ c[3] ^ turned[1], low[0]]
    words = torch.stack(c, dim=1).flatten()
    quarters = torch.stack([words >> shift & 0xFFFF for shift in (0, 16, 32, 48)], dim=1)
    table = torch.from_numpy(philox.quantiles().astype(np.int32)).to(device)
    sums = table[quarters].view(-1, 2).sum(dim=1, dtype=torch.int32)
    return (sums.float() * philox.UNIT)[:count]


def _wide_product(x: Words, by: int) -> tuple[Words, Words]:
    """The upper and the lower word of x * by, by parts of 32 bits."""
    x_low, x_high, low, high = x & np.uint64(LOW), x >> np.uint64(32), np.uint64(by & LOW), np.uint64(by >> 32)
    middle = x_high * low + (x_low * low >> np.uint64(32))
    rest = x_low * high + (middle & np.uint64(LOW))
    return x_high * high + (middle >> np.uint64(32)) + (rest >> np.uint64(32)), x * np.uint64(by)


def _signed(word: int) -> int:
    return word - WORD if word >= WORD // 2 else word


def _product(x: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """The upper and the lower word of x * by, both unsigned, by parts of 32 bits."""
    x_low, x_high, low, high = x & LOW, x >> 32 & LOW, by & LOW, by >> 32
    middle = x_high * low + (x_low * low >> 32 & LOW)  # below 2**64, wrapped
    rest = x_low * high + (middle & LOW)
    return x_high * high + (middle >> 32 & LOW) + (rest >> 32 & LOW), x * _signed(by)
