"""How a region runs: foreign blocks, what it keeps and gives up, second passes, autocast, exceptions, copies, and what is left of it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.memory import BlockPolicies
from mmspeed.memory.offload.offloader import Offloader
from mmspeed.memory.recompute.regions import region_runner, set_policies
from mmspeed.parallel import parallelize
from mmspeed.protocols.plan import BlockParts, Region
from mmspeed.replay import checkpointed, recording
from tests.support.memory_counts import MatmulCounter
from tests.support.memory_ways import LARGE, make_inputs, make_model


class Dropped(nn.Module):
    """A block of somebody else's, which names no spans and draws random numbers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * self.down(torch.dropout(torch.relu(self.up(x)), 0.5, True))


def block_step(block: nn.Module, x: Tensor, times: int = 1, **options: Any) -> list[Tensor]:
    torch.manual_seed(3)
    block.zero_grad()
    x = x.clone().requires_grad_()
    y = x
    for _ in range(times):
        y = block(y, **options)
    torch.manual_seed(4)  # backward must not draw from here
    y.square().sum().backward()
    assert x.grad is not None and not recording()
    return [x.grad, *(p.grad.clone() for p in block.parameters() if p.grad is not None)]


def keeping(way: Any, block: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    block = block or Dropped()
    set_policies(block, {"block": way}, Offloader(Device("cpu", 0), 16).group)
    return block


@pytest.mark.parametrize("way", LARGE)
@pytest.mark.parametrize("times", [1, 3])
def test_a_foreign_block_draws_the_same_numbers_again_and_may_be_used_several_times(way: Any, times: int) -> None:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)
    wanted = block_step(Dropped(), x, times, scale=0.5)
    actual = block_step(keeping(way), x, times, scale=0.5)
    assert all(map(torch.equal, actual, wanted))


class Odd(nn.Module):
    """Products without gradients, which backward needs none of, beside others; and a copy that is made in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(8, 8), nn.Linear(8, 8)
        self.first_only = True

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = (x @ x.mT).amax() if self.first_only else 1.0  # such as a plan: made in the first pass alone
            self.first_only, self.scale = False, scale if self.first_only else self.scale
        hidden = torch.tanh(self.linear(x) * self.scale)
        with torch.no_grad():
            torch.mm(hidden, hidden.mT, out=torch.empty(len(x), len(x)))
        return self.out(hidden).sigmoid()


@pytest.mark.parametrize("way", LARGE)
def test_what_runs_without_gradients_has_no_place_among_what_is_kept(way: Any) -> None:
    x = torch.randn(6, 8)
    torch.manual_seed(0)
    wanted = block_step(Odd(), x)
    torch.manual_seed(0)
    assert all(map(torch.equal, block_step(keeping(way, Odd()), x), wanted))


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.fails_at = nn.Linear(8, 8), 0, 1

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.linear(x))
        self.calls += 1
        if self.calls == self.fails_at:
            raise OSError("gone")
        return torch.sigmoid(y) * y


@pytest.mark.parametrize("way", LARGE)
def test_an_exception_leaves_no_record_in_force(way: Any) -> None:
    block = keeping(way, Failing())
    x = torch.randn(3, 8, requires_grad=True)
    with pytest.raises(OSError, match="gone"):
        block(x)
    assert not recording() and not _modes()
    block.fails_at = 3  # type: ignore[assignment]
    if way == "offload":  # has no second pass
        block.fails_at = 0  # type: ignore[assignment]
        block_step(block, x.detach())
        return
    loss = block(x).sum()
    with pytest.raises(OSError, match="gone"):  # in the second pass
        loss.backward()
    assert not recording() and not _modes()
    block_step(block, x.detach())


def _modes() -> list[Any]:
    return torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_a_graph_that_is_retained() -> None:
    x = torch.randn(5, 8)
    for way, fails in (("recompute", False), ("selective", True), ("offload_selective", True), ("offload", False)):
        block = keeping(way)
        first, again = block_step(block, x), x.clone().requires_grad_()
        torch.manual_seed(3)
        block.zero_grad()
        loss = block(again).square().sum()
        loss.backward(retain_graph=True)
        assert torch.equal(again.grad, first[0])
        if fails:
            with pytest.raises(RuntimeError, match="keeps its results for one backward pass"):
                loss.backward()
        else:
            loss.backward()
            assert torch.equal(again.grad, 2 * first[0])
        assert not recording()


def test_a_second_pass_of_other_operations_is_noticed() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.passes = nn.Parameter(torch.randn(8, 8)), 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            y = x @ self.one if self.passes == 1 else torch.addmm(self.one[0], x, self.one)
            return torch.tanh(y).exp()

    with pytest.raises(RuntimeError, match=r"second pass of a region computes aten\.addmm"):
        keeping("selective", Changing())(torch.randn(8, 8, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("way", ["selective", "offload_selective"])
def test_a_kept_result_that_is_changed_in_place_is_noticed(way: Any) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x).add_(1.0)).exp()

    with pytest.raises(RuntimeError, match="changed in place"):
        keeping(way, Changing())(torch.randn(3, 8, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("way", LARGE)
@pytest.mark.parametrize("ends", ["backward", "forward only"])
def test_nothing_is_left_of_a_step(way: Any, ends: str) -> None:
    """Nor does a forward pass without a backward leave anything, without the garbage collector."""
    model, inputs = make_model(), make_inputs()
    swap = Offloader(Device("cpu", 0), 1 << 10)
    seen: list[weakref.ref[Tensor]] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.numel() > 200:
                seen.append(weakref.ref(result))
            return result

    for block in model.blocks:
        set_policies(block, {"block": way}, swap.group)
    model(*inputs).square().mean().backward()
    model.zero_grad()
    gc.collect()
    gc.disable()
    try:
        with Watch():
            loss = model(*inputs).square().mean()
            if ends == "backward":
                loss.backward()
                model.zero_grad()
        del loss
        left = [tensor for tensor in (weak() for weak in seen) if tensor is not None]
        assert len(seen) > 50 and not left
    finally:
        gc.enable()


def test_the_second_pass_is_under_the_autocast_of_the_first() -> None:
    linear, x = nn.Linear(8, 8), torch.randn(3, 8, requires_grad=True)
    dtypes = []

    def run(x: Tensor) -> Tensor:
        y = linear(x)
        dtypes.append((torch.is_autocast_enabled("cpu"), y.dtype))
        return torch.tanh(y) * y

    for way in LARGE:
        dtypes.clear()
        course = region_runner(way, Offloader(Device("cpu", 0), 1).group)
        assert course is not None
        with torch.autocast("cpu", torch.bfloat16):
            y = course.run(run, x)
        y.float().sum().backward()
        assert dtypes == [(True, torch.bfloat16)] * (1 if way == "offload" else 2)


def test_offered_results_are_made_once_and_what_is_inside_of_them_is_not_kept_one_by_one() -> None:
    names: list[str] = []

    class Costly(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, kind: Any) -> Tensor:
            def make() -> tuple[Tensor]:
                names.append(kind)
                inner = checkpointed("matmul", lambda: (x @ x,))[0]  # part of the whole
                return (inner @ x,)

            (out,) = checkpointed(kind, make)
            ctx.save_for_backward(x)
            return out

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad @ ctx.saved_tensors[0].mT, None

    def run(x: Tensor) -> Tensor:
        return torch.tanh(Costly.apply(torch.relu(x), "attention")) + Costly.apply(torch.sigmoid(x), "exchange").sin()

    x = torch.randn(4, 4, requires_grad=True)
    (wanted,) = torch.autograd.grad(run(x).sum(), x)
    counts = {}
    for way in ("recompute", "selective", "offload_selective"):
        for again in (False, True):
            names.clear()
            course = region_runner(way, Offloader(Device("cpu", 0), 1).group, exchange_again=again)  # type: ignore[arg-type]
            assert course is not None
            with MatmulCounter() as count:
                (grad,) = torch.autograd.grad(course.run(run, x).sum(), x)
            assert torch.equal(grad, wanted)
            counts[way, again] = (names.count("attention"), names.count("exchange"), count.total)
    assert counts == {
        ("recompute", False): (2, 1, 8),
        ("recompute", True): (2, 2, 10),
        ("selective", False): (1, 1, 6),
        ("selective", True): (1, 2, 7),
        ("offload_selective", False): (1, 1, 6),
        ("offload_selective", True): (1, 2, 7),
    }


def test_ways_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="needs somewhere to offload to"):
        set_policies(Dropped(), {"block": "offload"})
    compiled = BlockPolicies(({"block": "selective"},))
    with pytest.raises(UserError, match=r"with train\.compile"):
        compiled.apply(make_model().blocks[0], 0, compiled=True)
    with pytest.raises(UserError, match="has no region norm"):
        BlockPolicies(({"norm": "recompute"},)).apply(Dropped(), 0)


def test_without_gradients_nothing_is_kept_and_spans_inside_of_spans_stand_as_they_are() -> None:
    model, inputs = make_model(), make_inputs()
    with torch.no_grad():
        wanted = model(*inputs)
    parallelize(model, None, "none", keeping=BlockPolicies.everywhere({"block": "selective"}))
    with torch.no_grad():
        assert torch.equal(model(*inputs), wanted)
    seen: list[bool] = []

    class Activated(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return self.project(self.prepare(x))

        def prepare(self, x: Tensor) -> Tensor:
            seen.append(recording())
            return torch.relu(x)

        def project(self, x: Tensor) -> Tensor:
            return torch.nn.functional.linear(x, self.weight, self.bias)

    inner = nn.Sequential(Activated(3, 3), nn.Tanh())
    owner = nn.Sequential(nn.Sequential(inner))
    regions = {"mlp": Region(("0",)), "norm": Region(("0.0.0",), small=True)}
    vars(owner)["block_parts"] = BlockParts(regions, draws=False)
    with pytest.raises(UserError, match="norm lies in mlp in Sequential, so only one of them can have a policy"):
        set_policies(owner, {"mlp": "recompute", "norm": "recompute"})
    set_policies(owner, {"mlp": "recompute"})
    vars(inner)["block_parts"] = BlockParts({"norm": Region(("0",), small=True)}, draws=False)
    set_policies(inner, {"norm": "recompute"})
    owner(torch.randn(3, requires_grad=True)).sum().backward()
    assert seen == [True, True]
    set_policies(owner, {"norm": "recompute"})  # by itself it is made again too
    owner(torch.randn(3, requires_grad=True)).sum().backward()
    assert len(seen) == 4
