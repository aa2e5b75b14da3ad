"""The threshold's controller: its counts add up, and it brings a model to the requested share or error."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspeed.compute.sparse.controller import SparsityController, keep_at, next_tau, watched_at
from mmspeed.compute.sparse.mass_histogram import ShareCounts, threshold
from mmspeed.compute.sparse.module import ClusteredAttention, warm_plans
from mmspeed.config.sparse import SparseConfig
from mmspeed.memory import recompute
from mmspeed.replay import DecisionRecord, record_or_replay, recording, replayed


def own(values: list[float]) -> list[float]:
    return values


def tokens(seed: int = 0, n: int = 256, batch: int = 1) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(seed)
    centers = torch.randn(8, 16) * 2
    pick = torch.randint(0, 8, (batch, 2, n))
    q, k = (centers[pick] + torch.randn(batch, 2, n, 16) for _ in range(2))
    return q, k, torch.randn(batch, 2, n, 16), torch.cartesian_prod(*(torch.arange(s) for s in (4, 8, n // 32)))


def layer_of(**fields: object) -> ClusteredAttention:
    fields = {"min_tokens": 16, "cluster_size": 32, "dense_steps": 1, "update_every": 1, **fields}
    return ClusteredAttention(SparseConfig(**fields))


class Holder(torch.nn.Module):
    def __init__(self, layer: ClusteredAttention) -> None:
        super().__init__()
        self.attend = layer


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10_000), st.floats(0.01, 0.9))
def test_the_threshold_of_the_counts_keeps_the_share(seed: int, keep: float) -> None:
    torch.manual_seed(seed)
    share = (torch.randn(3, 4, 500) * 1.5).exp()
    weight = torch.randint(0, 9, (3, 4))
    counts = ShareCounts()
    counts.add(share, weight)
    tau = threshold(counts.values(), keep)
    if weight.sum() == 0:
        assert tau is None
        return
    kept = ((share >= tau) * weight[..., None]).sum() / (weight.sum() * 500)
    assert kept.item() == pytest.approx(keep, abs=0.02)


def test_counts_of_parts_add_up_to_those_of_the_whole() -> None:
    torch.manual_seed(0)
    share, weight = torch.rand(4, 3, 100) * 5, torch.randint(0, 50, (4, 3))
    share[:, :, 7], share[:, :, 9] = math.inf, -1.0
    whole, first, second = ShareCounts(), ShareCounts(), ShareCounts()
    whole.add(share, weight)
    first.add(share[:1], weight[:1])
    second.add(share[1:], weight[1:])
    assert whole.values() == [a + b for a, b in zip(first.values(), second.values(), strict=True)]
    assert sum(whole.values()) == 99 * weight.sum()  # masked keys are no pairs
    assert threshold(whole.values(), 1.0) == 0.0 and threshold([0.0] * 5, 0.3) is None


def test_the_course_of_what_is_kept() -> None:
    config = SparseConfig(keep=0.2, dense_steps=5, ramp_steps=3, update_every=4)
    assert [round(keep_at(config, step), 3) for step in range(10)] == [1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert [step for step in range(20) if watched_at(config, step)] == [4, 5, 6, 7, 8, 9, 10, 13, 17]


def test_the_threshold_goes_to_the_error_that_is_asked_for() -> None:
    config = SparseConfig(error=0.1, min_keep=0.05, max_keep=0.5)
    share = ShareCounts()
    share.add((torch.randn(1, 4, 2000)).exp(), torch.ones(1, 4))
    counts = share.values()
    assert next_tau(config, 1.0, counts, 0.05, 0.15) > 1.0 > next_tau(config, 1.0, counts, 0.2, 0.15)
    assert next_tau(config, 1.0, counts, 1e-9, 0.15) == pytest.approx(threshold(counts, 0.05))
    assert next_tau(config, 1.0, counts, 1e9, 0.15) == pytest.approx(threshold(counts, 0.5))
    assert math.isnan(next_tau(config, math.nan, [0.0] * len(counts), 0.2, 0.15))


@pytest.mark.parametrize("planner", ["clusters", "tiles"])
def test_a_layer_is_brought_to_what_it_should_keep(planner: str) -> None:
    layer = layer_of(planner=planner, rule="threshold", keep=0.2, tile=(2, 2, 2))
    controller = SparsityController.of(Holder(layer))
    assert controller is not None
    layer.train()
    for step in range(5):
        controller.before_step(step)
        q, k, v, positions = tokens(seed=step, batch=2)
        layer(q, k, v, None, positions)
        assert controller.after_step(own)
    row = controller.rows[0]
    assert row.kept == pytest.approx(0.2, abs=0.04) and row.plan_ms > 0 and row.error > 0
    assert layer.counter["dense"] == 1 and layer.counter["sparse_grouped"] == 4
    frozen = float(layer.tau)
    layer.eval()  # sampling: nothing moves
    layer(*tokens(seed=9)[:3], None, tokens()[3])
    controller.after_step(own)
    assert float(layer.tau) == frozen


def test_arithmetic_that_was_left_out_is_counted_once() -> None:
    layer = layer_of(tau=1.0, tail="zero", dense_steps=0)
    controller = SparsityController.of(Holder(layer))
    assert controller is not None
    layer.reset()
    controller.before_step(0)
    q, k, v, positions = tokens()
    layer(q, k, v, None, positions)
    controller.after_step(own)
    kept = controller.rows[0].kept
    assert controller.saved_flops(own) == pytest.approx((1 - kept) * 2 * 256 * 256 * 4 * 16)
    assert controller.saved_flops(own) == 0.0


def test_a_fixed_threshold_stays_whatever_weights_bring() -> None:
    layer = layer_of(tau=1.5, dense_steps=0)
    controller = SparsityController.of(Holder(layer))
    assert controller is not None
    layer.tau.fill_(7.0)  # a checkpoint of another run
    controller.before_step(0)
    assert float(layer.tau) == 1.5


def test_a_step_that_is_not_finite_moves_no_threshold() -> None:
    layer = layer_of(keep=0.2)
    controller = SparsityController.of(Holder(layer))
    assert controller is not None
    q, k, v, positions = tokens()
    for step in range(3):
        controller.before_step(step)
        layer(q, k, v, None, positions)
        controller.after_step(own)
    before = float(layer.tau)
    controller.before_step(3)
    layer(q * math.nan, k, v, None, positions)
    assert not controller.after_step(own, finite=False) and float(layer.tau) == before
    assert layer.seen.calls == 0
    steered = SparseConfig(error=0.1)
    counts = ShareCounts()
    counts.add(torch.rand(1, 4, 100), torch.ones(1, 4))
    assert next_tau(steered, 1.0, counts.values(), math.nan, 0.2) == 1.0


def test_plans_under_autocast_are_made_of_what_kernels_get() -> None:
    layer = layer_of(tau=1.0, dense_steps=0)
    layer.reset()
    q, k, v, positions = tokens()
    plans = []
    own_plan = layer.plan
    layer.plan = lambda *args: plans.append(own_plan(*args)) or plans[-1]
    with torch.autocast("cpu", torch.bfloat16):
        layer(q, k, v, None, positions)
        half = [x.bfloat16() for x in (q, k, v)]
        layer(*half, None, positions)
    assert torch.equal(plans[0].kv_index_Z, plans[1].kv_index_Z)
    assert torch.equal(plans[0].q_index_GN, plans[1].q_index_GN)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = layer_of(tau=1.0, dense_steps=0, tail="zero", backend="masked")
        self.attention.reset()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q = x * self.scale
        return self.attention(q, q, x, None, positions)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_uses_the_plan_of_the_first_pass(reentrant: bool) -> None:
    block = Block()
    recompute(block, around_graphs=reentrant)
    x, positions = tokens()[0].requires_grad_(), tokens()[3]
    plans = []
    own_plan = block.attention.plan
    block.attention.plan = lambda *args: plans.append(own_plan(*args)) or plans[-1]
    out = block(x, positions)
    block.attention.tau.fill_(50.0)  # a plan made now would be another
    out.square().sum().backward()
    assert len(plans) == 1 and not recording()
    again = Block()
    y = tokens()[0].requires_grad_()
    again(y, positions).square().sum().backward()
    assert torch.equal(x.grad, y.grad) and torch.equal(block.scale.grad, again.scale.grad)
    assert block.attention.work.dense_flops == again.attention.work.dense_flops  # the second pass is not counted


def test_a_dense_pass_that_is_made_again_looks_at_nothing() -> None:
    block = Block()
    block.attention = layer_of(keep=0.2)
    controller = SparsityController.of(block)
    assert controller is not None
    recompute(block)
    x, positions = tokens()[0].requires_grad_(), tokens()[3]
    controller.before_step(0)
    out = block(x, positions)
    seen = block.attention.seen.shares.values()
    assert sum(seen) > 0
    out.sum().backward()
    assert block.attention.seen.shares.values() == seen
    block.attention.watching = False
    out = block(x, positions)
    block.attention.watching = True  # whatever comes in between
    out.sum().backward()
    assert block.attention.seen.shares.values() == seen


def test_a_record_replays_in_order() -> None:
    results = []
    record = DecisionRecord()
    for _ in range(2):
        with record.in_force():
            results.append([record_or_replay(lambda n=n: n) for n in ("a", "b")])
    assert results == [[("a", True), ("b", True)], [("a", False), ("b", False)]]
    assert replayed(lambda: 3)() == 3


def test_centroids_are_carried_over_the_steps_of_a_video() -> None:
    layer = layer_of(tau=1.0, dense_steps=0)
    layer.reset()
    layer.eval()
    q, k, v, positions = tokens()
    cold = layer(q, k, v, None, positions)
    with warm_plans(Holder(layer)) as use:
        use("text")
        first = layer(q, k, v, None, positions)
        starts = layer.warm.starts["text"][0]
        use("negative")
        layer(q * 1.5, k, v, None, positions)
        assert set(layer.warm.starts) == {"text", "negative"} and layer.warm.starts["text"][0] is starts
    assert torch.equal(cold, first) and layer.warm is None
