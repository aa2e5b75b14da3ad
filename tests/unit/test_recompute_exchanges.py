"""Recomputation issues no exchange again: forms, nests, overlapping micro-batches, threads, drawn programs, and what is refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from mmspeed import comm
from mmspeed.comm import Axis, finish
from mmspeed.graphs import compile_forward
from mmspeed.memory.recompute.block_checkpoint import recompute, replay_checkpoints
from mmspeed.replay import apart, fact, record_or_replay, recording, replayed, set_fact
from tests.unit.comm.test_halves import AGAIN, KEEPS, Layer, gradient, make_axis, make_x, region

Run = Callable[[Tensor], Tensor]
Around = Callable[[Run, Tensor], Tensor]
FORMS: dict[str, Around] = {
    "plain": lambda run, x: run(x),
    "graph": lambda run, x: checkpoint(replayed(run), x, use_reentrant=False),
    "reentrant": lambda run, x: checkpoint(replayed(run), x, use_reentrant=True),
    "region": lambda run, x: region(run, x, policy=KEEPS),
}
CHECKPOINTED = [form for form in FORMS if form != "plain"]


def issued(run: Run, group: Any) -> tuple[Tensor, int, int]:
    actual, forward, back = gradient(run, group)
    assert not recording()
    return actual, forward, back


@pytest.mark.parametrize("around_graphs", [False, True])
@pytest.mark.parametrize("how", ["eager", "graphs inside", "graphs around"])
def test_a_block_in_every_form_and_order(around_graphs: bool, how: str) -> None:
    """torch.compile finds an exchange in the recomputed block, gives the checkpoint up as a graph, and it runs as it is written."""
    torch._dynamo.reset()
    axis, group = make_axis()
    wanted, *counts = issued(Layer(axis), group)
    for again in (False, True):
        block = Layer(axis)
        if how == "graphs inside":
            compile_forward(block, "eager")
        recompute(block, around_graphs, exchange_again=again)
        if how == "graphs around":
            compile_forward(block, "eager")
        for _ in range(2):
            actual, *counts_now = issued(block, group)
            assert torch.equal(actual, wanted) and counts_now == [counts[0], counts[1] + 2 * again]


@pytest.mark.parametrize("form", CHECKPOINTED)
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("thread", [False, True])
def test_two_micro_batches_whose_forward_passes_both_come_first(form: str, first: int, thread: bool) -> None:
    axis, group = make_axis()
    layer = Layer(axis)
    inputs = [make_x(), make_x().detach().neg().requires_grad_()]
    wanted = [torch.autograd.grad(layer(x).square().sum(), x)[0] for x in inputs]
    losses = [FORMS[form](layer, x).square().sum() for x in inputs]
    group.events.clear()
    for place in (first, 1 - first):
        if thread:  # as on an accelerator, whose backward passes have threads of their own
            worker = threading.Thread(target=losses[place].backward)
            worker.start()
            worker.join()
        else:
            losses[place].backward()
    assert group.events.count("issue") == group.events.count("wait") == 4  # the gradients' own
    assert all(torch.equal(x.grad, grad) for x, grad in zip(inputs, wanted, strict=True))  # type: ignore[arg-type]


def test_backward_passes_of_two_threads_at_once() -> None:
    """Both stand in the midst of their second pass together."""
    axis, group = make_axis()
    meet, seconds = threading.Barrier(2, timeout=60), 0

    class Meets(Layer):
        def forward(self, x: Tensor) -> Tensor:
            if seconds:
                meet.wait()
            y = super().forward(x)
            if seconds:
                meet.wait()
            return y + y.tanh()

    layer = Meets(axis)
    inputs = [make_x(), make_x().detach().neg().requires_grad_()]
    wanted = [torch.autograd.grad(layer(x).square().sum(), x)[0] for x in inputs]
    for reentrant in (False, True):
        seconds = 0
        losses = [checkpoint(replayed(layer), x, use_reentrant=reentrant).square().sum() for x in inputs]
        seconds = 1
        group.events.clear()
        workers = [threading.Thread(target=loss.backward) for loss in losses]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert group.events.count("issue") == 4
        for x, grad in zip(inputs, wanted, strict=True):
            assert x.grad is not None and torch.equal(x.grad, grad)
            x.grad = None


@pytest.mark.parametrize("form", ["graph", "reentrant"])
def test_results_are_given_up_in_backward_though_the_loss_lives(form: str) -> None:
    axis, _ = make_axis()
    held: list[StorageWeakRef] = []

    def run(x: Tensor) -> Tensor:
        y = comm.all_to_all(x.sin(), axis, 1, 0)
        held.append(StorageWeakRef(y.untyped_storage()))
        beside = torch.sigmoid(x).exp().sum()  # backward needs nothing that comes after
        return finish(comm.start_all_to_all(y.sin(), axis, 0, 1)).sin() + beside

    loss = FORMS[form](run, make_x()).sum()
    assert len(held) == 1 and not held[0].expired()
    loss.backward()
    assert len(held) == 2 and all(one.expired() for one in held) and loss.grad_fn is not None


@pytest.mark.parametrize("form", ["graph", "reentrant"])
def test_what_cannot_be_recomputed_is_refused(form: str) -> None:
    axis, _ = make_axis()
    passes: list[int] = []

    def changes(x: Tensor) -> Tensor:
        return comm.all_to_all(x.sin(), axis, 1, 0).mul_(2).sin()

    def other(x: Tensor) -> Tensor:
        passes.append(0)
        dims = (1, 0) if len(passes) == 1 else (0, 1)
        return comm.all_to_all(x.sin(), axis, *dims).sin().sum()

    def more(x: Tensor) -> Tensor:
        passes.append(0)
        for _ in passes:
            x = comm.all_to_all(comm.all_to_all(x.sin(), axis, 1, 0), axis, 0, 1).sin()
        return x

    for run, words in ((changes, "changed in place"), (other, "another exchange"), (more, "of which it has no result")):
        passes.clear()
        x = make_x()
        y = FORMS[form](run, x).sum()
        if run is more and form == "graph":
            y.backward()  # it stops before
            continue
        with pytest.raises(RuntimeError, match=words):
            y.backward()


def test_facts_of_a_pass() -> None:
    key, slot, seen = object(), {"now": 1}, list[int]()

    def run(x: Tensor) -> Tensor:
        seen.append(fact(key, lambda: slot["now"]))
        x = x.sin()
        set_fact(key, 7)
        seen.append(fact(key, lambda: slot["now"]))
        return x.sin()

    def outer(x: Tensor) -> Tensor:
        return checkpoint(replayed(run), x, use_reentrant=False)

    x = make_x()
    y = checkpoint(replayed(outer), x, use_reentrant=False)
    slot["now"] = 2
    y.sum().backward()
    assert seen[:2] == [1, 7] and all(pair in ((1, 7), (7, 7)) for pair in zip(seen[::2], seen[1::2], strict=False))
    assert fact(key, lambda: slot["now"]) == 2  # outside of any


class Checkpointing(nn.Module):
    """As diffusers and transformers do it."""

    gradient_checkpointing = False
    _gradient_checkpointing_func: Any = None

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Layer(axis) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = (self._gradient_checkpointing_func(block, x) if self.gradient_checkpointing else block(x)).sin()
        return x


@pytest.mark.parametrize("before", [False, True])
def test_checkpoints_of_a_models_own(before: bool) -> None:
    axis, group = make_axis()
    model = Checkpointing(axis)
    wanted, *counts = issued(model, group)

    def enable() -> None:
        model.gradient_checkpointing = True
        model._gradient_checkpointing_func = lambda *args: checkpoint(*args, use_reentrant=False)

    for act in (enable, lambda: replay_checkpoints(model))[:: 1 if before else -1]:
        act()
    assert type(model).__name__ == "Checkpointing"
    actual, *counts_now = issued(model, group)
    assert torch.equal(actual, wanted) and counts_now == counts


# what a block is made of: exchanges whole, in halves, without gradients, and by counts known at run time
STEPS = ("work", "exchange", "start", "finish", "gather", "no gradient", "counts")


class Drawn(nn.Module):
    """A block that makes these steps."""

    def __init__(self, axis: Axis, steps: list[str]) -> None:
        super().__init__()
        self.axis, self.steps = axis, steps

    def forward(self, x: Tensor) -> Tensor:
        axis, pending = self.axis, list[comm.PendingExchange]()
        for step in [*self.steps, "work"]:
            if step == "work":
                x = x.sin() * torch.sigmoid(x)
            elif step == "exchange":
                x = comm.all_to_all(comm.all_to_all(x, axis, 1, 0).sin(), axis, 0, 1).cos()
            elif step == "start":
                pending.append(comm.start_all_to_all(x.tanh(), axis, 1, 0))
            elif step == "finish" and pending:
                x = x + finish(pending.pop(0)).sin().sum()
            elif step == "gather":
                x = comm.reduce_scatter(comm.all_gather(x, axis, 0).sin(), axis, 0).tanh()
            elif step == "no gradient":
                with torch.no_grad():
                    scale = comm.all_gather(x[:1].abs(), axis, 0).amax()
                x = x / (1 + scale)
            elif step == "counts":
                counts, _ = comm.row_counts(torch.full((axis.size,), len(x) // axis.size), axis)
                x = finish(comm.start_rows(finish(comm.start_rows(x, axis, counts)).sin(), axis, counts.back()))
        for one in pending:
            x = x + finish(one).sin().sum()
        return x


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(STEPS), max_size=7), min_size=1, max_size=3),
    st.sampled_from(CHECKPOINTED),
    st.sampled_from([*CHECKPOINTED, "plain"]),
)
def test_whatever_a_block_exchanges(programs: list[list[str]], outer: str, inner: str) -> None:
    axis, group = make_axis()
    blocks = [Drawn(axis, steps) for steps in programs]

    def chain(x: Tensor, around: str) -> Tensor:
        for block in blocks:
            x = FORMS[around](block, x)
        return x

    wanted, *counts = issued(lambda x: chain(x, "plain"), group)
    sent = axis.ledger.copy()
    actual, *counts_now = issued(lambda x: FORMS[outer](lambda x: chain(x, inner), x), group)
    assert torch.equal(actual, wanted) and counts_now == counts
    assert axis.ledger.since(sent).calls == sent.calls and axis.ledger.since(sent).bytes == sent.bytes


def test_an_exchange_of_the_first_pass_alone_stands_apart() -> None:
    axis, group = make_axis()
    measured: list[int] = []

    def run(x: Tensor) -> Tensor:
        y, first = comm.all_to_all(x.sin(), axis, 1, 0), record_or_replay(lambda: None)[1]
        if first:
            with apart():
                measured.append(len(comm.all_gather(y.detach(), axis, 0)))
        return comm.all_to_all(y.sin(), axis, 0, 1).sin()

    wanted, *counts = issued(run, group)
    for form in CHECKPOINTED:
        measured.clear()
        actual, *counts_now = issued(lambda x, form=form: FORMS[form](run, x), group)
        assert torch.equal(actual, wanted) and counts_now == counts and len(measured) == 1


def test_an_inner_one_that_exchanges_again_does_so_by_itself_alone() -> None:
    axis, group = make_axis()
    layer = Layer(axis)
    wanted, forward, back = issued(layer, group)
    inner = replayed(layer, exchange_again=True)
    actual, *counts = issued(lambda x: FORMS["graph"](lambda x: checkpoint(inner, x, use_reentrant=False), x), group)
    assert torch.equal(actual, wanted) and counts[0] == forward and back <= counts[1] <= back + 2
    actual, *counts = issued(lambda x: FORMS["graph"](lambda x: region(layer, x, policy=AGAIN), x), group)
    assert torch.equal(actual, wanted) and counts[0] == forward and back <= counts[1] <= back + 2
