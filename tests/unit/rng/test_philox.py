"""The generator: its words and numbers by other means, its table, the statistics of what it draws."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import string
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed import rng
from mmspeed.rng import philox
from mmspeed.rng.philox import name_digest
from tests.support.philox import Words, device_normal, first_words, normal_of, philox_block, words_of

NAME = (7, "noise", "s39990", 3, 0)
PAIR = ("s39990", "s133687")  # the hashes of their names have the same low 32 bits
NORMAL = NormalDist()


@pytest.mark.parametrize(
    ("counter", "key", "block"),
    [
        ("0" * 64, "0" * 32, "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"),
        ("f" * 64, "f" * 32, "87b092c3013fe90b 438c3c67be8d0224 9cc7d7c69cd777b6 a09caebf594f0ba0"),
        (
            "243f6a8885a308d313198a2e03707344a4093822299f31d0082efa98ec4e6c89",
            "452821e638d01377be5466cf34e90c6c",
            "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
        ),
    ],
)
def test_blocks_are_those_of_random123(counter: str, key: str, block: str) -> None:
    """The known answers of philox4x64-10 that its authors publish."""
    c, k = (tuple(int(text[at : at + 16], 16) for at in range(0, len(text), 16)) for text in (counter, key))
    assert [f"{word:016x}" for word in philox_block(c, k)] == block.split()


@pytest.mark.parametrize(("begin", "count"), [(0, 9), (1, 5), (6, 2), (4 * 10**9 + 3, 6), (2**40, 1)])
def test_a_word_is_found_from_its_number_alone(begin: int, count: int) -> None:
    actual = philox.Stream(*NAME).words(begin, count).tolist()  # type: ignore[arg-type]
    assert actual == words_of(begin, count, *NAME)


def test_every_bit_of_the_hash_changes_the_words() -> None:
    stream = philox.Stream(0, "bits")
    seen = {tuple(stream.words(0, 2).tolist())}
    for word, bit in itertools.product(range(4), range(64)):
        other = philox.Stream(0, "bits")
        other.key = stream.key ^ (np.arange(4) == word).astype(np.uint64) << np.uint64(bit)
        seen.add(tuple(other.words(0, 2).tolist()))
    assert len(seen) == 257


def test_each_normal_number_is_found_alone_and_a_range_by_itself() -> None:
    count = 2 * (1 << 15) + 11  # more than is drawn at a time
    drawn = rng.normal((count,), *NAME)  # type: ignore[arg-type]
    assert drawn.dtype == torch.float32
    for value in (0, 1, 2, 7, 8, 32767, 32768, 65536, count - 1):
        assert drawn[value].item() == normal_of(value, *NAME)
    for begin, end in ((0, count), (1, 2), (3, 3), (5, 70), (32765, 32771), (65535, count), (count - 1, count)):
        assert torch.equal(rng.normal_part(count, begin, end, *NAME), drawn[begin:end])  # type: ignore[arg-type]
    assert torch.equal(rng.normal((5, 3), *NAME).flatten(), drawn[:15])  # type: ignore[arg-type]
    assert rng.normal((0, 4), *NAME).shape == (0, 4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no part of 8 numbers"):
        rng.normal_part(8, 4, 9, 0, "noise")


def test_a_rank_draws_its_part_without_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, words = [], philox.Stream.words
    monkeypatch.setattr(
        philox.Stream, "words", lambda self, begin, count: drawn.append(count) or words(self, begin, count)
    )
    rng.normal_part(10**12, 10**12 - 1000, 10**12, 0, "noise")
    assert sum(drawn) == 500


def test_sixty_four_bit_integers_of_a_device_give_the_same_numbers() -> None:
    assert torch.equal(device_normal(5003, "cpu", *NAME), rng.normal((5003,), *NAME))  # type: ignore[arg-type]


def digest(drawn: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(drawn).tobytes()).hexdigest()[:16]


def test_numbers_are_those_that_runs_and_caches_began_with() -> None:
    """Digests of what the generator draws: another way to the numbers must give these."""
    names: tuple[Any, ...] = (3, "noise", "a", 0, 0)
    normal = {1: "40457c9411f0a531", 7: "b3977bda52ce56a2", 65_536: "b00e5063df9362fe", 70_001: "4e7d914f50245555"}
    assert {count: digest(rng.normal((count,), *names)) for count in normal} == normal
    assert digest(rng.normal_part(10**9, 123_456_787, 123_556_790, *names)) == "73787008f4200a73"
    assert digest(rng.symmetric((70_001,), 0.3, 3, "init", "w")) == "c6852f64cd1bd8d1"
    orders = {
        1: "af5570f5a1810b7a", 2: "4cbbd8ca5215b8d1", 999: "8637520c494f4ca3", 10_000: "40e00439fefa0e69",
        16_384: "8b6b5b669ce0376d", 16_385: "6bbfc2d345823c59", 65_536: "bea4978996aa885f", 65_537: "051b7fa38f1e93fb",
        300_000: "1b14ef892fd5232f",
    }  # fmt: skip
    assert {count: digest(rng.permutation(count, 3, "sample_order", count)) for count in orders} == orders
    stream = rng.stream(3, "turn", "x")
    drawn = [digest(stream.normal((5,))), digest(stream.permutation(33)), digest(stream.normal((3,)))]
    assert drawn == ["3a4bc3d607029873", "84c3a60138f852ae", "874f34c446d9a427"]
    assert stream.uniform() == 0.8451748678741549


def test_normal_numbers_are_not_rounded() -> None:
    drawn = rng.normal((200_000,), 1, "exact").double() * 2**21
    assert torch.equal(drawn, drawn.round()) and drawn.abs().max() < 2**24
    assert 2 * int(philox.quantiles()[-1]) < 2**24


def test_uniform_numbers_are_the_upper_bits_of_their_words() -> None:
    (word,) = words_of(0, 1, 3, "timestep", "a")
    assert rng.uniform(3, "timestep", "a") == (word >> 11) / 2**53
    bound = 0.3
    drawn, halves = rng.symmetric((3, 5), bound, 3, "init", "w"), words_of(0, 8, 3, "init", "w")
    bits = torch.tensor([word >> shift & 0xFFFFFF for word in halves for shift in (8, 40)][:15])
    expected = (2 * bits + 1 - 2**24).float() * torch.tensor(bound / 2**24, dtype=torch.float32)
    assert torch.equal(drawn, expected.view(3, 5))
    many = rng.symmetric((1 << 18,), bound, 4, "init", "w")
    assert many.abs().max() < bound and many.abs().mean().item() == pytest.approx(bound / 2, rel=0.01)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 64, 65, 5000])
def test_a_permutation_sorts_words(count: int) -> None:
    words = words_of(0, count, 0, "order", count)
    assert rng.permutation(count, 0, "order", count).tolist() == sorted(range(count), key=lambda n: (words[n], n))


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 3), st.integers(2**64 - 3, 2**64 - 1), st.integers(0, 2**64 - 1)), max_size=70),
    st.integers(0, 40),
    st.booleans(),
)
def test_any_words_are_sorted_by_word_and_number(words: list[int], shift: int, long: bool) -> None:
    words = [word >> shift << shift for word in words]
    expected = sorted(range(len(words)), key=lambda n: (words[n], n))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(philox, "_SHORT", -1 if long else philox._SHORT)  # both ways
        assert philox._sorting_order(np.array(words, np.uint64)).tolist() == expected


def test_a_stream_gives_new_numbers_at_each_draw() -> None:
    stream, words = rng.stream(0, "step_order", 1), words_of(0, 40, 0, "step_order", 1)
    first, second = stream.permutation(20).tolist(), stream.permutation(20).tolist()
    assert first == sorted(range(20), key=words[:20].__getitem__)
    assert second == sorted(range(20), key=words[20:].__getitem__)


def exact_share_below(x: float) -> float:
    """The share of all 2**32 pairs of indices whose number is at most x."""
    table = philox.quantiles().astype(np.int64)
    return float(np.searchsorted(table, math.floor(x * 2**21) - table, side="right").sum()) / 2**32


def test_the_distribution_of_all_pairs_is_normal() -> None:
    places = np.linspace(-6.3, 6.3, 401)
    assert max(abs(exact_share_below(x) - NORMAL.cdf(x)) for x in places) < 1e-5
    for place, error in ((3.0, 1e-3), (4.0, 0.01), (4.5, 0.03), (5.0, 0.1)):  # tails, of their own size
        assert exact_share_below(-place - 2**-22) == pytest.approx(NORMAL.cdf(-place), rel=error)


def test_names_whose_hashes_agree_in_32_bits_do_not_meet() -> None:
    assert len({rng.key64(0, "noise", name, 0, 0) % 2**32 for name in PAIR}) == 1
    assert not torch.equal(*(rng.normal((64,), 0, "noise", name, 0, 0) for name in PAIR))


def first_words_of(numbers: range) -> Words:
    """The first word of many names. Were their streams random, two of ten million would meet once in 400,000 trials."""
    digests = b"".join(name_digest(0, "noise", f"s{number}", 0, 0) for number in numbers)
    return first_words(np.frombuffer(digests, "<u8").reshape(-1, 4).astype(np.uint64))


def test_no_two_of_many_names_meet() -> None:
    words = first_words_of(range(150_000))
    assert len(np.unique(words)) == 150_000  # of 2**32 seeds, three pairs would
    for number in range(0, 150_000, 10_007):
        assert words[number] == philox.Stream(0, "noise", f"s{number}", 0, 0).words(0, 1)[0]


def test_different_names_have_different_texts() -> None:
    names: list[tuple[object, ...]] = [
        ("a", "b"), ("a\x1fstr:b",), ("a", "", "b"), ('a","b',), ("ab",), (1,), ("1",), (1.0,), (True,), (None,), ("None",), ("",), (),
    ]  # fmt: skip
    assert len({name_digest(*name) for name in names}) == len(names)
    assert name_digest("\udcff", *string.printable) == name_digest("\udcff", *string.printable)
    with pytest.raises(TypeError):
        name_digest(torch.tensor(1))
    assert json.dumps((0, "noise"), separators=(",", ":")) == '[0,"noise"]'  # the text of docs/randomness.md
