"""Exchanges in two halves on a simulated clock: overlap, the exchanges of a second pass, bytes by link, and misuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mmspeed import comm
from mmspeed.comm import Axis, Ledger, RowCounts, finish
from mmspeed.comm.axis import launched_nodes
from mmspeed.memory.recompute.block_checkpoint import recompute
from mmspeed.memory.recompute.region import RegionPolicy, run_region
from mmspeed.replay import DecisionRecord, RecordedModule, replayed
from tests.support.clock import ReckonedGroup

RANKS, ROWS, WIDTH, LAYERS = 4, 8, 16, 5
MESSAGE = ROWS * WIDTH * 4 * (RANKS - 1) // RANKS  # bytes that a rank sends in an exchange
COMPUTE = 1.0  # seconds of what lies between the halves
KEEPS, AGAIN = RegionPolicy(exchange="save"), RegionPolicy(exchange="recompute")


def make_axis(share: float = 1.0, nodes: tuple[int, ...] = (), message: int = MESSAGE) -> tuple[Axis, ReckonedGroup]:
    """An axis and its group; a message of `message` bytes takes `share` of the computation between the halves."""
    group = ReckonedGroup(message / (share * COMPUTE), RANKS)
    return Axis("a", group, RANKS, 0, Ledger(), nodes=nodes), group  # type: ignore[arg-type]


def make_x() -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0)).requires_grad_()


class Timed(torch.autograd.Function):
    """Work that takes its time, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ReckonedGroup) -> Tensor:
        group.compute(COMPUTE)
        ctx.save_for_backward(x)
        ctx.group = group
        return torch.tanh(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.group.compute(COMPUTE)
        return grads[0] * (1 - torch.tanh(ctx.saved_tensors[0]) ** 2), None


Start = Callable[[Tensor, Axis], comm.PendingExchange]
STARTS: dict[str, tuple[Start, Start]] = {  # there and back, of (ROWS, WIDTH)
    "all_to_all": (
        lambda x, axis: comm.start_all_to_all(x, axis, 1, 0),
        lambda y, axis: comm.start_all_to_all(y, axis, 0, 1),
    ),
    "gather": (
        lambda x, axis: comm.start_all_gather(x, axis, 1),
        lambda y, axis: comm.start_reduce_scatter(y, axis, 1),
    ),
    "rows": (
        lambda x, axis: comm.start_rows(x, axis, RowCounts((ROWS // RANKS,) * RANKS, (ROWS // RANKS,) * RANKS)),
        lambda y, axis: comm.start_rows(y, axis, RowCounts((ROWS // RANKS,) * RANKS, (ROWS // RANKS,) * RANKS)),
    ),
}


def chain(x: Tensor, axis: Axis, group: ReckonedGroup, kind: str, overlaps: bool) -> Tensor:
    """Layers of dispatch and combine, each with work beside it that does not depend on it."""
    for _ in range(LAYERS):
        for start in STARTS[kind]:
            pending = start(x, axis)
            if not overlaps:
                came = finish(pending)
            beside = Timed.apply(x, group)
            if overlaps:
                came = finish(pending)
            x = came * 0.5 + beside.sum()
    return x


class HostReads(TorchDispatchMode):
    """Counts operations that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = ("_local_scalar_dense", "item", "nonzero", "_to_copy", "equal", "is_nonzero")
        self.count += func._overloadpacket.__name__ in names
        return func(*args, **(kwargs or {}))


def exposed(kind: str, share: float, overlaps: bool) -> tuple[float, float, Tensor, ReckonedGroup]:
    """Seconds that messages add to forward and to backward, over the seconds of these messages; the gradient; the group."""
    axis, group = make_axis(share, message=MESSAGE * RANKS if kind == "gather" else MESSAGE)
    x = make_x()
    with HostReads() as reads:
        y = chain(x, axis, group, kind, overlaps).sum()
        forward, of_messages = group.clock.now - group.clock.seconds["compute"], group.clock.copying
        y.backward()
    back = group.clock.now - group.clock.seconds["compute"] - forward
    assert of_messages == pytest.approx(2 * LAYERS * share * COMPUTE)
    assert reads.count == group.host_waits == 0
    assert x.grad is not None
    return forward / of_messages, back / (group.clock.copying - of_messages), x.grad, group


@pytest.mark.parametrize("kind", STARTS)
def test_95_percent_of_the_messages_are_hidden_behind_what_is_issued_between_the_halves(kind: str) -> None:
    forward, back, grad, group = exposed(kind, 0.95, overlaps=True)
    assert forward <= 0.05 and back <= 0.05
    # between issue and wait there is the work, forward and backward: nobody waits earlier
    assert group.events == ["issue", "compute", "wait"] * (4 * LAYERS)
    forward, back, wanted, group = exposed(kind, 0.95, overlaps=False)
    assert forward >= 0.95 and back >= 0.95  # the same without overlap
    assert torch.equal(grad, wanted)


def test_what_is_too_slow_for_the_work_beside_it_is_waited_for() -> None:
    forward, back, grad, _ = exposed("all_to_all", 4.0, overlaps=True)
    assert forward == pytest.approx(0.75) and back == pytest.approx(0.75)
    assert torch.equal(grad, exposed("all_to_all", 4.0, overlaps=False)[2])


def test_gradients_of_gradients_and_a_graph_that_is_retained() -> None:
    axis, _ = make_axis()

    def run(x: Tensor, whole: bool) -> tuple[Tensor, Tensor]:
        y = comm.all_to_all(x, axis, 1, 0) if whole else finish(comm.start_all_to_all(x, axis, 1, 0))
        (grad,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        return grad, torch.autograd.grad(grad.square().sum(), x, retain_graph=True)[0]

    x = make_x()
    for one, other in zip(run(x, False), run(x, True), strict=True):
        assert torch.equal(one, other)
    y = finish(comm.start_all_to_all(x, axis, 1, 0)).square().sum()
    twice = [torch.autograd.grad(y, x, retain_graph=True)[0] for _ in range(2)]
    assert torch.equal(*twice)


class Layer(nn.Module):
    """Exchanges between products that save something, so that a second pass goes through all of it."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        pending = comm.start_all_to_all(torch.tanh(x), self.axis, 1, 0)
        beside = torch.sigmoid(x).sum()
        y = finish(pending).sin() * beside
        back = comm.start_all_to_all(y, self.axis, 0, 1)
        return finish(back).exp().sigmoid() + beside


def gradient(run: Callable[[Tensor], Tensor], group: ReckonedGroup) -> tuple[Tensor, int, int]:
    """The gradient of x, and messages issued in forward and in backward."""
    group.events.clear()
    x = make_x()
    y = run(x).square().sum()
    count = group.events.count("issue")
    y.backward()
    assert x.grad is not None and group.events.count("issue") == group.events.count("wait")
    return x.grad, count, group.events.count("issue") - count


def region(run: Callable[..., Any], *args: Any, policy: RegionPolicy) -> Any:
    return run_region(run, *args, policy=policy, fates=policy.op_policies(), group=None, rng=False)


def test_a_second_pass_issues_nothing_where_exchanges_are_kept() -> None:
    axis, group = make_axis()
    layer = Layer(axis)
    wanted, forward, back = gradient(layer, group)
    assert (forward, back) == (2, 2)
    for run, again in (
        (lambda x: region(layer, x, policy=KEEPS), 0),
        (lambda x: region(layer, x, policy=AGAIN), 2),
        (lambda x: checkpoint(layer, x, use_reentrant=False), 2),  # torch's own keeps no results
        (lambda x: checkpoint(layer, x, use_reentrant=True), 2),
        (lambda x: checkpoint(replayed(layer), x, use_reentrant=False), 0),
        (lambda x: checkpoint(replayed(layer), x, use_reentrant=True), 0),
        (lambda x: checkpoint(replayed(layer, exchange_again=True), x, use_reentrant=True), 2),
    ):
        actual, forward, back = gradient(run, group)
        assert torch.equal(actual, wanted) and (forward, back) == (2, 2 + again)


@pytest.mark.parametrize("policy", [KEEPS, AGAIN], ids=["keeps", "again"])
def test_a_start_in_a_region_whose_finish_lies_outside_is_not_issued_again(policy: RegionPolicy) -> None:
    axis, group = make_axis()

    def first(x: Tensor) -> tuple[comm.PendingExchange, Tensor]:
        return comm.start_all_to_all(torch.tanh(x), axis, 1, 0), torch.sigmoid(x).exp()

    def run(x: Tensor, around: bool) -> Tensor:
        pending, beside = region(first, x, policy=policy) if around else first(x)
        return finish(pending).sin() + beside.sum()

    wanted, *counts = gradient(lambda x: run(x, False), group)
    actual, *counts_around = gradient(lambda x: run(x, True), group)
    assert torch.equal(actual, wanted) and counts_around == counts == [1, 1]


def test_a_finish_in_a_region_whose_start_lies_outside_is_kept_or_refused() -> None:
    axis, group = make_axis()

    def second(pending: comm.PendingExchange, x: Tensor) -> Tensor:
        return torch.sigmoid(finish(pending).sin() * x.sum())

    def run(x: Tensor, policy: RegionPolicy | None) -> Tensor:
        pending = comm.start_all_to_all(torch.tanh(x), axis, 1, 0)
        return second(pending, x) if policy is None else region(second, pending, x, policy=policy)

    wanted, *counts = gradient(lambda x: run(x, None), group)
    actual, *counts_around = gradient(lambda x: run(x, KEEPS), group)
    assert torch.equal(actual, wanted) and counts_around == counts == [1, 1]
    with pytest.raises(RuntimeError, match="started before a recomputed region is finished inside"):
        run(make_x(), AGAIN)
    # torch's own checkpoint says nothing of its passes: found out in backward
    x = make_x()
    y = checkpoint(second, comm.start_all_to_all(torch.tanh(x), axis, 1, 0), x, use_reentrant=False)
    with pytest.raises(RuntimeError, match="is finished once"):
        y.sum().backward()


def test_a_second_pass_that_stops_between_the_halves_waits_for_what_it_issued() -> None:
    axis, group = make_axis()

    def run(x: Tensor) -> Tensor:
        pending = comm.start_all_to_all(torch.tanh(x), axis, 1, 0)
        beside = torch.sigmoid(x).exp().sum()  # backward needs nothing that comes after
        return finish(pending) + beside

    wanted, *counts = gradient(run, group)
    assert counts == [1, 1]
    for policy, again in ((KEEPS, 0), (AGAIN, 1)):
        actual, *counts = gradient(lambda x, policy=policy: region(run, x, policy=policy), group)  # all are waited for
        assert torch.equal(actual, wanted) and counts == [1, 1 + again]


def test_reentrant_checkpoints_do_not_cut_an_exchange_in_two() -> None:
    """Their first pass records no gradient: the result would have none."""
    axis, _ = make_axis()
    x = make_x()
    pending = comm.start_all_to_all(x, axis, 1, 0)
    with pytest.raises(RuntimeError, match="must both record gradients, or neither"):
        checkpoint(lambda x: finish(pending) + x.sum(), x, use_reentrant=True)
    inside: list[comm.PendingExchange] = []

    def first(x: Tensor) -> Tensor:
        inside.append(comm.start_all_to_all(x, axis, 1, 0))
        return x.sin()

    checkpoint(first, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="must both record gradients, or neither"):
        finish(inside[0])


def test_misuse() -> None:
    axis, group = make_axis()
    x = make_x()
    pending = comm.start_all_to_all(x, axis, 1, 0)
    finish(pending)
    with pytest.raises(RuntimeError, match="is finished once"):
        finish(pending)
    with pytest.raises(ValueError, match="of 2 tensors: use finish_all"):
        finish(comm.start_all_to_all_many([x, x], axis, 1, 0))
    leaves = torch.ones(1, ROWS, WIDTH)
    pending = comm.start_rows(leaves[0], axis, RowCounts((2,) * RANKS, (2,) * RANKS))  # travels from where it lies
    leaves.add_(1)
    with pytest.raises(RuntimeError, match="changed in place between start and finish"):
        finish(pending)
    copied = torch.ones(ROWS, WIDTH)
    pending = comm.start_all_to_all(copied, axis, 1, 0)  # packed into a buffer
    copied.add_(1)
    assert torch.equal(finish(pending), torch.ones(ROWS * RANKS, WIDTH // RANKS))
    with pytest.raises(ValueError, match="same number of dims"):
        comm.start_all_to_all_many([], axis, 1, 0)
    before = len(group.events)
    for counts in (
        RowCounts((2, 2, 2), (2, 2, 2)),
        RowCounts((2, 2, 2, 3), (2,) * 4),
        RowCounts((3, 1, 2, 2), (2,) * 4),
    ):
        with pytest.raises(ValueError, match="to go and"):
            comm.start_rows(x, axis, counts)
    for sends in (torch.ones(3, dtype=torch.int64), torch.ones(RANKS)):
        with pytest.raises(ValueError, match="counts for 4 ranks"):
            comm.row_counts(sends, axis)
    assert len(group.events) == before


def test_row_counts_are_a_decision_that_is_made_once() -> None:
    axis, group = make_axis()
    record, results = DecisionRecord(), []
    sends = torch.tensor([2, 1, 0, 5])
    for _ in range(2):
        with record.in_force():
            results.append(comm.row_counts(sends, axis)[0])
    assert results == [RowCounts((2, 1, 0, 5), (2, 2, 2, 2))] * 2 and results[0].back().back() == results[0]
    assert group.events.count("issue") == 1 and axis.ledger.bytes == {("counts", "a"): 8 * (RANKS - 1)}
    with record.in_force():  # as a part of a greater decision it is not one by itself
        record.record_or_replay(lambda: None)
    greater = DecisionRecord()
    for _ in range(2):
        with greater.in_force():
            routed, _ = greater.record_or_replay(lambda: (sends, comm.row_counts(sends, axis)[0]))
            assert greater.record_or_replay(lambda: "next")[0] == "next" and routed[1] == results[0]
    assert group.events.count("issue") == 2


class Routed(RecordedModule):
    """Rows by counts that are known at run time, as of experts."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        counts, _ = comm.row_counts(torch.full((RANKS,), ROWS // RANKS), self.axis)
        received = finish(comm.start_rows(torch.tanh(x), self.axis, counts))
        return finish(comm.start_rows(received.sin(), self.axis, counts.back())).exp().sigmoid()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("again", [0, 2])
def test_a_routed_block_that_is_recomputed_exchanges_its_counts_once(reentrant: bool, again: int) -> None:
    axis, group = make_axis()
    wanted, *counts = gradient(Routed(axis), group)
    assert counts == [3, 2]
    block = Routed(axis)
    recompute(block, around_graphs=reentrant, exchange_again=again > 0)
    actual, *counts = gradient(block, group)
    assert torch.equal(actual, wanted) and counts == [3, 2 + again]
    actual, *counts = gradient(lambda x: region(Routed(axis), x, policy=KEEPS), group)
    assert torch.equal(actual, wanted) and counts == [3, 2]


def test_bytes_by_link() -> None:
    """With 4 ranks on two nodes, two thirds of the parts for others leave the node; a hop to the next place may."""
    axis, _ = make_axis(nodes=(0, 0, 1, 1))
    part = ROWS * WIDTH * 4 // RANKS
    with comm.ledger(axis) as counted:
        finish(comm.start_all_to_all(make_x(), axis, 1, 0)).sum().backward()
    assert counted.by_link == {("all_to_all", "a", "inner"): 2 * part, ("all_to_all", "a", "outer"): 4 * part}
    assert counted.bytes == {("all_to_all", "a"): 6 * part}  # as without a map
    axis.count("ring", 10)
    axis.count("ring", [0, 0, 7, 0], name="ring_outer")
    assert axis.ledger.by_link["ring", "a", "inner"] == 10
    assert axis.ledger.by_link["ring", "ring_outer", "outer"] == 7 == axis.ledger.total(kind="ring", link="outer")
    assert axis.ledger.total(link="outer") == 4 * part + 7 and axis.ledger.total() == 6 * part + 17
    before = axis.ledger.copy()
    axis.count("ring", 10)
    assert axis.ledger.since(before).by_link == {("ring", "a", "inner"): 10}
    axis.ledger.clear()
    assert not axis.ledger.by_link and axis.ledger.total() == 0


def test_the_node_of_each_rank_is_the_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    for local, nodes in (("2", (0, 0, 1, 1)), ("4", (0,) * 4), ("3", (0,) * 4), ("0", (0,) * 4)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
        assert launched_nodes(4) == nodes
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert launched_nodes(4) == (0,) * 4
