"""The rule for spikes: limits, streaks, what counts as sound, and that its state goes on from any step."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmspeed.config.training import DivergenceConfig
from mmspeed.errors import UserError
from mmspeed.loop import guard
from mmspeed.loop.checkpoint.retention import KEPT, Retention
from mmspeed.loop.guard import Spikes, limit_of
from tests.support.runs import small_config

RULE = DivergenceConfig(action="stop", factor=5, steps=2, window=4)


def watched(
    values: Sequence[float], rule: DivergenceConfig = RULE, norm: float = 1.0, baseline: float | None = None
) -> Spikes:
    """A watch after steps of these losses, from step 1."""
    watch = Spikes(rule, baseline)
    for step, loss in enumerate(values, 1):
        watch.observe(step, loss, norm, [f"{step}.mp4"])
    return watch


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        ([1, 1, 1, 1], 5),
        ([1, 2, 3, 100], 12.5),  # one outlier moves the median by little
        ([0, 0, 0, 0], math.inf),
        ([-1, 1, -1, 1], 4),  # around 0: the median distance is 1
        ([-2, -2, -2, -2], 6),  # below 0, the same distance upwards
    ],
)
def test_the_limit_is_a_multiple_of_the_median(values: list[float], limit: float) -> None:
    assert limit_of(values, 5) == limit


def test_a_spike_is_so_many_steps_in_a_row_above_the_limit() -> None:
    calm = [1.0, 1.1, 0.9, 1.0]
    assert not watched([1.0, 100.0, 100.0]).reached  # too few steps to compare with
    assert not watched([*calm, 9.0]).reached and watched([*calm, 9.0]).first == 5
    spike = watched([*calm, 9.0, 9.0])
    assert spike.reached and spike.first == 5 and spike.samples == ["5.mp4", "6.mp4"]
    assert list(spike.losses) == calm  # the limit stays
    passed = watched([*calm, 9.0, 1.0, 9.0])
    assert not passed.reached and passed.first == 7 and passed.samples == ["7.mp4"]


@pytest.mark.parametrize(
    ("values", "first"),
    [
        ([5.7, 1350, 4852], 2),
        ([0.01, 9, 9, 8], None),  # a lucky first loss: none is worse than five times a model that knows nothing
        ([300, 900, 1400, 1000], None),  # a bad start
        ([2, 8, 30, 8, 99, 99], 5),  # the first losses are the first `steps`, however the later ones rise
        ([2, 3, 1, 1, 8], 5),  # a full window has the rule of all later steps
    ],
)
def test_before_the_window_is_full_first_losses_are_judged(values: list[float], first: int | None) -> None:
    assert watched(values, baseline=2.0).first == first
    early = watched([2.0], baseline=2.0)
    assert not early.above(2.0, 1e9) and early.above(10.1, 1.0)  # norms rise while a rate warms up
    assert watched([1.0] * 3, baseline=2.0).sound(3) == 1


def test_the_gradient_norm_counts_like_the_loss() -> None:
    watch = watched([1.0] * 4, norm=2.0)
    assert not watch.above(1.0, 10.0) and watch.above(1.0, 10.1) and watch.above(5.1, 2.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_always_count(bad: float) -> None:
    assert watched([bad, bad]).reached and watched([bad]).first == 1
    assert watched([1.0] * 4).above(1.0, bad)


def test_nothing_counts_without_a_rule() -> None:
    watch = watched([1.0] * 4 + [math.nan] * 9, DivergenceConfig(action="none", window=4))
    assert not watch.reached and watch.first is None and watch.sound(13) is None and not watch.losses


def test_a_checkpoint_is_sound_when_calm_steps_have_followed() -> None:
    assert watched([1.0] * 3).sound(3) is None  # nothing is compared yet
    assert watched([1.0] * 6).sound(6) == 4
    assert watched([1.0] * 6 + [9.0]).sound(7) == 4 == watched([1.0] * 6 + [9.0, 9.0]).sound(8)


def test_the_samples_of_a_long_spike_are_counted() -> None:
    watch = watched([1.0] * 4)
    for step in range(5, 8):
        watch.observe(step, 9.0, 1.0, [f"{step}-{number}.mp4" for number in range(40)])
    assert len(watch.samples) == guard.MOST_NAMED and watch.sample_count == 120
    watch.calm_down()
    assert watch.sample_count == 0


@given(
    st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=30),
    st.integers(0, 30),
    st.sampled_from([None, 2.0]),
)
def test_the_state_goes_on_from_any_step(values: list[float], at: int, baseline: float | None) -> None:
    whole, part = watched(values, baseline=baseline), watched(values[:at], baseline=baseline)
    resumed = Spikes(RULE, baseline)
    resumed.resume(json.loads(json.dumps(part.state())))
    for step, loss in enumerate(values[at:], at + 1):
        resumed.observe(step, loss, 1.0, [f"{step}.mp4"])
    assert resumed.state() == whole.state()


def test_of_what_only_grows_the_greater_number_holds() -> None:
    watch, before = watched([1.0]), watched([1.0]).state()
    watch.roll_backs, watch.left_out = 2, 6
    watch.resume(before)
    assert (watch.roll_backs, watch.left_out) == (2, 6)


def test_the_newest_sound_checkpoint_is_kept() -> None:
    entries = [{"step": step, "loss": None} for step in (2, 4, 6, 8)]
    times = dict.fromkeys((2, 4, 6, 8), 0.0)
    assert Retention(1).kept(entries, times) == {8}
    assert Retention(1).kept(entries, times, sound=5) == {4, 8}
    assert Retention(1).kept(entries, times, sound=1) == {8}
    assert Retention(1).kept([{**entries[0], KEPT: True}, *entries[1:]], times, sound=5) == {2, 4, 8}


def test_a_rule_that_cannot_be_is_refused(tmp_path: Path) -> None:
    overrides = ("memory.release_gradients=true", "train.clip_norm=null", "device.dtype=bfloat16")
    with pytest.raises(UserError, match=r"not train\.divergence\.action: skip"):
        small_config(tmp_path, "train.divergence.action=skip", *overrides)
