"""The order of training on packs: each token of an epoch once, whatever changes in the middle of it, and exact resumption."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.data.sampling.assignment import Cost
from mmspeed.data.sampling.order import Batching
from mmspeed.data.sampling.pack_order import DocumentSupply, PackLength, PackSample, PackSampler
from mmspeed.data.sampling.rank_batches import imbalance, rank_batches
from mmspeed.data.sampling.sampler import SampleUse
from mmspeed.errors import UserError


def supply(lengths: list[int], held_out: tuple[int, ...] = (), sources: int = 1, **more: Any) -> DocumentSupply:
    """Documents of these lengths, dealt to sources in turn."""
    number = np.arange(len(lengths))
    names = [f"source{place}" for place in range(sources)]
    trained = ~np.isin(number, held_out)
    return DocumentSupply(np.array(lengths, np.uint32), number % sources, trained, names, "text", **more)


def sampler(documents: DocumentSupply, length: int, size: int, mode: str = "documents", seed: int = 3) -> PackSampler:
    """An order of steps of `size` packs."""
    return PackSampler(documents, length, mode, Batching(size), 1 / 64, seed)  # type: ignore[arg-type]


def tokens(draws: list[SampleUse[PackSample]]) -> Counter[tuple[int, int]]:
    """(document, place in it) of all tokens."""
    return Counter(
        (document, place)
        for draw in draws
        for document, begin, count in draw.sample.pieces
        for place in range(begin, begin + count)
    )


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any),
    st.lists(
        st.tuples(st.integers(3, 50), st.integers(1, 5), st.sampled_from(["documents", "stream"]), st.integers(0, 4)),
        min_size=1,
        max_size=4,
    ),
)
def test_each_token_of_an_epoch_is_used_once_whatever_changes_in_the_middle(
    lengths: list[int], parts: list[tuple[int, int, str, int]]
) -> None:
    documents, state, step = supply(lengths), None, 0
    met: Counter[tuple[int, int]] = Counter()
    for number, (length, size, mode, some) in enumerate(parts):
        order = sampler(documents, length, size, mode)
        if state is not None:
            order.resume(json.loads(json.dumps(state)))
        last = number == len(parts) - 1
        while order.locate(step).epoch == 0 and (last or some):
            draws = order.draws(step)
            assert all(draw.sample.tokens <= length for draw in draws) and draws
            met += tokens(draws)
            step, some = step + 1, some - 1
        if order.locate(step).epoch:
            break
        state = order.state(step)
    assert met == Counter((document, place) for document, count in enumerate(lengths) for place in range(count))


def test_a_resumed_order_is_that_of_one_that_was_never_stopped() -> None:
    documents = supply([5, 30, 7, 64, 12, 1, 90, 33] * 5)
    whole = sampler(documents, 32, 3)
    keys = [[draw.name for draw in whole.draws(step)] for step in range(60)]
    for stop in (0, 1, 7, whole.first_pass - 1, whole.first_pass, whole.first_pass + 2):
        again = sampler(documents, 32, 3)
        assert again.resume(json.loads(json.dumps(whole.state(stop)))) is None
        assert [[draw.name for draw in again.draws(step)] for step in range(stop, 60)] == keys[stop:]
        assert again.state(40) == whole.state(40)
        assert [again.locate(step)[1] for step in range(stop, 60)] == [
            whole.locate(step)[1] for step in range(stop, 60)
        ]
    # an order goes back, too, and the packs of two epochs differ
    assert [draw.name for draw in whole.draws(2)] == keys[2]
    first = [name[0] for step in keys[: whole.first_pass] for name in step]
    assert first != [name[0] for step in keys[whole.first_pass : 2 * whole.first_pass] for name in step]


def answered_from(first: dict[int, int], lengths: list[int]) -> DocumentSupply:
    """Documents that have a loss from a token on (from the first on where none is named)."""
    least = np.array([first.get(number, 0) for number in range(len(lengths))])

    def targets(document: Any, begin: Any, count: Any) -> Any:
        return np.maximum(0, begin + count - np.maximum(begin + 1, least[document]))

    return supply(lengths, targets=targets)


def steps_of(order: PackSampler, first: int, last: int) -> list[list[Any]]:
    return [[draw.name for draw in order.draws(step)] for step in range(first, last)]


@pytest.mark.parametrize("mode", ["documents", "stream"])
def test_packs_without_a_target_are_left_out_and_counted(mode: str) -> None:
    """Long questions, with an answer in the last eight tokens; then a run goes on with longer packs."""
    lengths, first = [5, 40, 33, 1, 80, 9] * 3, {1: 32, 4: 72, 10: 72, 16: 200}
    documents = answered_from(first, lengths)
    order, old = sampler(documents, 8, 2, mode), sampler(supply(lengths), 8, 2, mode)
    assert order.without_targets == old.samples_of(0) - order.samples_of(0) > 20 and order.first_pass < old.first_pass

    def predicted(draws: list[SampleUse[PackSample]]) -> Counter[tuple[int, int]]:
        places = [
            (d, at)
            for draw in draws
            for d, begin, count in draw.sample.pieces
            for at in range(begin + 1, begin + count)
        ]
        return Counter((document, at) for document, at in places if at >= first.get(document, 0))

    draws = [draw for step in range(order.first_pass) for draw in order.draws(step)]
    assert all(predicted([draw]) for draw in draws)
    every = [draw for step in range(old.first_pass) for draw in old.draws(step)]
    assert predicted(draws) == predicted(every) and max(predicted(draws).values()) == 1
    assert len(order.packs_of(0)) == order.samples_of(0) == len(draws) and order.packs_of(0).tokens().sum() == sum(
        tokens(draws).values()
    )
    longer = sampler(documents, 24, 2, mode)
    state = json.loads(json.dumps(order.state(4)))
    assert "are packed again" in str(longer.resume(state))
    behind, rest = (
        tokens(draws[:8]),
        tokens([draw for step in range(4, longer.first_pass) for draw in longer.draws(step)]),
    )
    assert max((behind + rest).values()) == 1
    assert mode == "stream" or not predicted(every) - behind - rest  # cuts of a stream move, and with them first tokens
    with pytest.raises(UserError, match="no pack of 8 tokens has a token to predict"):
        sampler(answered_from({0: 99, 1: 99}, [30, 20]), 8, 2, mode).draws(0)


def test_an_order_from_before_goes_on_where_packs_without_targets_do_not_matter() -> None:
    """A state that counts no packs without a target is of a run that used them; what it has left of the epoch is packed again."""
    lengths = [5, 40, 33, 7, 80, 9] * 3
    for documents, same in ((answered_from({}, lengths), True), (answered_from({4: 72}, lengths), False)):
        old, new = sampler(supply(lengths), 8, 2), sampler(documents, 8, 2)
        assert (steps_of(old, 0, 60) == steps_of(new, 0, 60)) == same
        state = json.loads(json.dumps(old.state(3)))
        for past in state["past"]:
            del past["without"]
        assert (new.resume(state) is None) == same
        assert not same or steps_of(new, 3, 60) == steps_of(old, 3, 60)
        behind = tokens([draw for step in range(3) for draw in old.draws(step)])
        rest = tokens([draw for step in range(3, new.first_pass) for draw in new.draws(step)])
        assert max((behind + rest).values()) == 1 and (len(behind) + len(rest) == sum(lengths)) == same
        again = sampler(documents, 8, 2)
        again.resume(json.loads(json.dumps(new.state(5))))
        assert steps_of(again, 5, 60) == steps_of(new, 5, 60)


def test_the_message_says_how_many_tokens_are_left_and_other_texts_begin_an_epoch() -> None:
    order = sampler(supply([16] * 20), 16, 4)
    state = order.state(2)
    other = sampler(supply([16] * 20), 32, 2)
    message = other.resume(state)
    assert (
        message
        == "packs differ from those before the checkpoint: the 192 tokens that are left of epoch 0 are packed again"
    )
    assert other.locate(2).epoch == 0 and other.first_pass == 2 + 3
    changed = sampler(supply([16] * 21), 16, 4)
    changed.supply.__dict__["fingerprint"] = "other"
    message = changed.resume(state)
    assert message is not None and "20 documents, now 21" in message and changed.locate(2).epoch == 1


def test_what_is_left_out_counts_no_more_and_is_not_packed_again() -> None:
    lengths = [8] * 24
    order = sampler(supply(lengths), 8, 2)
    gone = order.leave_out(range(3, 5))
    assert len(gone) == 4 and all(draw.left_out for step in (3, 4) for draw in order.draws(step))
    assert not any(draw.left_out for draw in order.draws(5))
    state = json.loads(json.dumps(order.state(2)))
    same = sampler(supply(lengths), 8, 2)
    same.resume(state)
    assert [draw.left_out for step in range(2, 6) for draw in same.draws(step)] == [False] * 2 + [True] * 4 + [
        False
    ] * 2
    longer = sampler(supply(lengths), 16, 1)
    longer.resume(state)
    rest: Counter[tuple[int, int]] = Counter()
    for step in range(2, longer.first_pass):
        rest += tokens(longer.draws(step))
    behind = tokens([draw for step in range(2) for draw in order.draws(step)]) + tokens(gone)
    assert not rest & behind and len(rest) + len(behind) == 8 * 24


def test_sources_are_used_by_their_shares_and_repeats() -> None:
    documents = supply([10] * 40, held_out=(0, 3), sources=2, repeats={"source0": 1, "source1": 3})
    order = sampler(documents, 20, 5)
    met = sum((tokens(order.draws(step)) for step in range(order.first_pass)), Counter())
    assert {met[document, 4] for document in range(2, 40, 2)} == {1}
    assert {met[document, 4] for document in range(1, 40, 2) if document != 3} == {3}
    assert not met[0, 0] and not met[3, 0]
    shared = sampler(supply([10] * 40, sources=2, weights={"source0": 3.0, "source1": 1.0}), 20, 5)
    met = sum((tokens(shared.draws(step)) for step in range(shared.first_pass)), Counter())
    shares = [sum(count for (document, _), count in met.items() if document % 2 == source) for source in range(2)]
    assert shares == [300, 100]
    with pytest.raises(UserError, match="no documents to train on"):
        sampler(supply([4], held_out=(0,)), 8, 1).draws(0)


def test_steps_have_packs_of_like_cost() -> None:
    lengths = np.maximum(1, np.random.default_rng(0).lognormal(6.0, 1.2, 12_000).astype(int))
    documents = supply(lengths.tolist())
    attention = 1 / 4_096
    shape = PackLength(4_096)

    def share(sample: Any) -> float:
        return sample.tokens + attention * sample.squares  # type: ignore[no-any-return]

    batching = Batching(64, {}, {shape: Cost(0.0, 1.0)}, share=share)
    order = PackSampler(documents, 4_096, "documents", batching, attention, 0)
    worst = [imbalance(order.draws(step), batching, 64) for step in range(order.first_pass - 1)]
    assert order.first_pass > 25 and np.median(worst) <= 1.02
    ranks = [rank_batches(order.draws(5), batching, rank, 64) for rank in range(64)]
    assert len({part[0][0][0].sample.key for part in ranks}) == 64
