"""Discard and restore, beside recomputation that stops early: equal gradients and equal bytes after the forward pass."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker

from mmspeed.errors import UserError
from mmspeed.memory.planning.measure import MatmulCounter
from mmspeed.memory.recompute.discard import Discard, discarded
from mmspeed.memory.recompute.regions import set_policies
from mmspeed.protocols.plan import BlockParts, Region
from mmspeed.replay import checkpointed, recording
from tests.support.memory_ways import Step, assert_same, make_inputs, make_model, step_of

WIDTH, HIDDEN, TOKENS, LAYERS = 128, 512, 1024, 4
MIB = 1 << 20


class Down(nn.Linear):
    """An activation function and a scale, then the product."""

    def __init__(self, act: Callable[[Tensor], Tensor], scale: nn.Parameter) -> None:
        super().__init__(HIDDEN, WIDTH)
        self.act = act
        vars(self)["scale"] = scale  # of the chain: a tensor that is no argument

    def forward(self, hidden: Tensor) -> Tensor:
        return self.project(self.prepare(hidden))

    def prepare(self, hidden: Tensor) -> Tensor:
        return self.act(hidden) * self.scale

    def project(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Chain(nn.Module):
    """MLPs one after another; `way` of their activation functions."""

    def __init__(self, way: Any = "save", act: Callable[[Tensor], Tensor] = F.gelu) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.rand(HIDDEN))
        self.ups = nn.ModuleList(nn.Linear(WIDTH, HIDDEN) for _ in range(LAYERS))
        self.downs = nn.ModuleList(Down(act, self.scale) for _ in range(LAYERS))
        vars(self)["block_parts"] = BlockParts({"activation": Region(("downs.*",), small=True)}, draws=False)
        set_policies(self, {"activation": way})

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(up(x))
        return x


def run(way: Any, **options: Any) -> tuple[list[Tensor], dict[str, float]]:
    """Gradients of a chain, and MiB and matrix products that it took."""
    model, x = Chain(way, **options), torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    x.requires_grad_()
    tracker = MemTracker()
    tracker.track_external(model, x)
    with MatmulCounter() as count, tracker:
        loss = model(x).square().mean()
        forward, after = count.total, tracker.get_tracker_snapshot("current")[torch.device("cpu")]["Total"]
        loss.backward()
        peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]
    assert x.grad is not None
    grads = [x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]
    return grads, {"after": after / MIB, "peak": peak / MIB, "forward": forward, "backward": count.total - forward}


@pytest.mark.parametrize("act", [F.gelu, torch.tanh, torch.sigmoid], ids=["gelu", "tanh", "sigmoid"])
def test_gradients_and_bytes_are_those_of_recomputation(act: Any) -> None:
    """The peak is no higher: what is made again is there twice only until the product's gradient is computed, which takes as much."""
    plain, plain_cost = run("save", act=act)
    recomputed, recomputed_cost = run("recompute", act=act)
    freed, cost = run("recompute_output", act=act)
    assert len(plain) == len(freed) and all(map(torch.equal, plain, recomputed)) and all(map(torch.equal, plain, freed))
    assert cost["after"] == recomputed_cost["after"] < plain_cost["after"] - 7  # the results of 4 layers, of 2 MiB
    assert cost["peak"] <= recomputed_cost["peak"] < plain_cost["peak"]
    for each in (recomputed_cost, cost):
        assert (each["forward"], each["backward"]) == (plain_cost["forward"], plain_cost["backward"]) == (8, 16)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arrangement", "dtype"),
    [
        ("factorised", torch.bfloat16),
        ("full", torch.float32),
        ("factorised", torch.float32),
        ("full", torch.bfloat16),
    ],
)
def test_a_model_keeps_as_much_as_under_recomputation(arrangement: str, dtype: torch.dtype) -> None:
    make, inputs = partial(make_model, arrangement), make_inputs(frames=True, masked=True)
    results: dict[str, Step] = {}
    for way in ("save", "recompute", "recompute_output"):
        ways: Any = {"norm": way, "activation": way}
        results[way] = step_of(ways, make, inputs, dtype, track=True)
    assert_same(results["recompute_output"], results["save"])
    assert (
        results["recompute_output"].kept < results["save"].kept
        and results["recompute_output"].backward == results["save"].backward
    )
    if dtype == torch.float32:  # under autocast a region holds no low-precision copies of its product's weights either
        assert results["recompute_output"].kept == results["recompute"].kept


def test_the_memory_is_given_back_and_comes_again() -> None:
    linear, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    seen: list[torch.UntypedStorage] = []

    def use(hidden: Tensor) -> Tensor:
        seen.append(hidden.untyped_storage())
        return linear(hidden)

    out = discarded(torch.tanh, use, x)
    assert seen[0].nbytes() == 0
    sizes = []
    out.register_hook(lambda _: sizes.append(seen[0].nbytes()))
    out.sum().backward()
    assert sizes == [4 * 8 * 4]


def test_several_in_a_chain_are_restored_in_the_order_of_the_forward_pass() -> None:
    torch.manual_seed(0)
    one, two, x = nn.Linear(8, 8), nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    order: list[str] = []

    def named(name: str, f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        order.append(name)
        return f(x)

    def step(frees: bool) -> list[Tensor]:
        first, second, third = (
            partial(named, name, f) for name, f in (("a", torch.tanh), ("b", torch.exp), ("c", F.silu))
        )
        if frees:
            discard = Discard()
            a = discard.make(first, x)
            b = discard.make(second, a)  # of a result that is freed itself, and that what uses it also uses
            c = discard.make(third, b)
            out = discard.use(lambda a, c: one(a) + two(c), a, c)
        else:
            a = first(x)
            out = one(a) + two(third(second(a)))
        return list(torch.autograd.grad(out.square().sum(), [x, *one.parameters(), *two.parameters()]))

    wanted = step(False)
    order.clear()
    assert all(map(torch.equal, step(True), wanted)) and order == ["a", "b", "c"] * 2


def test_random_numbers_are_drawn_again() -> None:
    linear, x = nn.Linear(64, 8), torch.randn(16, 64, requires_grad=True)
    drop = partial(torch.dropout, p=0.5, train=True)

    def step(f: Callable[[], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        out = f()
        torch.manual_seed(1)
        return list(torch.autograd.grad(out.square().sum(), [x, linear.weight]))

    def freed() -> Tensor:
        discard = Discard(rng=True)
        return discard.use(linear, discard.make(drop, x))

    assert all(map(torch.equal, step(freed), step(lambda: linear(drop(x)))))


def test_what_an_exchange_gave_is_kept_or_exchanged_again() -> None:
    """As of tokens that are gathered between a norm and its product: what lies before the exchange is made again."""
    linear, x, calls = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True), []

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            def make() -> tuple[Tensor]:
                calls.append(1)
                return (torch.cat((x, x)),)

            return checkpointed("exchange", make)[0]

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad[:4] + grad[4:]

    storages: list[torch.UntypedStorage] = []

    def use(hidden: Tensor) -> Tensor:
        storages.append(hidden.untyped_storage())
        return linear(hidden)

    wanted = torch.autograd.grad(linear(Gather.apply(torch.tanh(x))).square().sum(), [x, linear.weight])
    for again in (False, True):
        calls.clear()
        out = discarded(lambda x: Gather.apply(torch.tanh(x)), use, x, exchange_again=again)
        assert (storages[-1].nbytes() == 0) == again
        actual = torch.autograd.grad(out.square().sum(), [x, linear.weight])
        assert all(map(torch.equal, actual, wanted)) and len(calls) == 1 + again


def test_what_cannot_be_discarded() -> None:
    linear, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    frozen = nn.Linear(8, 8).requires_grad_(False)
    with pytest.raises(ValueError, match="is an input, or a view of one"):
        discarded(lambda x: x.view(8, 4).view(4, 8), linear, x)
    with pytest.raises(ValueError, match="is an input, or a view of one"):
        discarded(lambda x: x, linear, x)
    with pytest.raises(ValueError, match="is an input, or a view of one"):
        discarded(lambda x: linear.weight.mT, linear, x)
    with pytest.raises(ValueError, match="must return one tensor, not tuple"):
        discarded(lambda x: (x.exp(),), linear, x)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="must return one tensor, not list"):
        discarded(torch.exp, lambda y: [linear(y)], x)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="returns a view of it"):
        discarded(torch.exp, lambda y: y.mT, x)
    with pytest.raises(ValueError, match="was changed in place"):
        discarded(torch.exp, lambda y: linear(y.mul_(2.0)), x)
    for use in (frozen, lambda y: linear(y.clone()), lambda y: y.sum(0)):
        with pytest.raises(ValueError, match="does not keep it for backward"):
            discarded(torch.exp, use, x)
    owner = nn.Sequential(linear)
    vars(owner)["block_parts"] = BlockParts({"mlp": Region(("0",))})
    with pytest.raises(UserError, match="mlp cannot be recompute_output, which frees one result"):
        set_policies(owner, {"mlp": "recompute_output"})
    assert not recording()


def test_what_needs_no_gradient_is_not_kept() -> None:
    linear = nn.Linear(8, 8).requires_grad_(False)
    out = discarded(torch.exp, linear, torch.ones(4, 8))
    assert not out.requires_grad and torch.equal(out, linear(torch.ones(4, 8).exp()))
    trained = nn.Linear(8, 8)  # an input that needs none, before weights that do
    discarded(torch.exp, trained, torch.ones(4, 8)).sum().backward()
    assert trained.weight.grad is not None
    # the rounding of exp, and of a sum of four in the order of the machine
    torch.testing.assert_close(trained.weight.grad, torch.full((8, 8), 4 * torch.e), rtol=5 * 2.0**-23, atol=0)


def test_a_second_backward_and_a_function_that_changes_are_noticed() -> None:
    linear, x = nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    loss = discarded(torch.tanh, linear, x).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="restored for one backward pass"):
        loss.backward()
    passes: list[int] = []

    def changing(x: Tensor) -> Tensor:
        passes.append(1)
        return x.exp() if len(passes) == 1 else x.exp().tanh()

    with pytest.raises(RuntimeError, match="computes something else when it runs again"):
        discarded(changing, linear, x).sum().backward()


def test_an_exception_in_the_function_leaves_nothing_in_force() -> None:
    def failing(x: Tensor) -> Tensor:
        x.exp()
        raise OSError("gone")

    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(OSError, match="gone"):
        discarded(failing, nn.Linear(8, 8), x)
    y = x.exp()
    assert not recording() and y.grad_fn is not None and torch.equal(y.grad_fn._saved_result, y)  # type: ignore[attr-defined]


@pytest.mark.parametrize("ends", ["backward", "forward only"])
def test_nothing_is_left_of_a_step(ends: str) -> None:
    model, inputs = make_model(), make_inputs()
    for block in model.blocks:
        set_policies(block, {"norm": "recompute_output", "activation": "recompute_output"})
    seen: list[weakref.ref[Any]] = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, out: seen.append(weakref.ref(out)))
        block.mlp.down.register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0])))
    gc.collect()
    gc.disable()
    try:
        loss = model(*inputs).square().mean()
        if ends == "backward":
            loss.backward()
        del loss
        assert len(seen) == 6 and not any(weak() is not None for weak in seen)
    finally:
        gc.enable()
