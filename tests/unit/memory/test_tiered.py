"""The tiered optimizer gives the plain optimizer's bits in every tier, around several optimizers, whole and bucket by bucket."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.optim import SGD, Adagrad

from mmspeed.memory.optimizer.tiered_optimizer import cut_into_buckets
from tests.support.clock import ControlledClock
from tests.support.tiered_cases import (
    MATRICES,
    TIERS,
    VECTORS,
    EightBit,
    Plain,
    adamw,
    assert_equal,
    gradients_of,
    muon,
    of,
    parameters,
    same,
    set_lr,
    sgd,
    tiered,
    two_groups,
)

SOME = [("parameters", "device"), ("split", "host"), ("host", "host")]  # of the tiers
ONLY_MATRICES = ([(16, 24), (24, 8)], [(33, 8)])


def dtype_of(master: str) -> torch.dtype:
    return torch.float32 if master == "parameters" else torch.bfloat16


def clock() -> ControlledClock:
    """Copies in threads, so fast that tests are, and strict about what may be touched meanwhile."""
    return ControlledClock(2e8)


def step_both(ours: Any, groups: list[dict[str, Any]], plain: Plain, step: int, in_float32: bool = False) -> None:
    gradients = gradients_of(groups, step)
    for p, gradient in zip(of(groups), gradients, strict=True):
        if in_float32 or p.dtype == torch.float32:
            p.grad = None if gradient is None else gradient.to(p.dtype)
        else:
            p.grad = gradient
    set_lr(ours, step)
    set_lr(plain.optimizer, step)
    plain.step(gradients)
    ours.step()
    ours.zero_grad()


@pytest.mark.parametrize(
    ("make", "tier"),
    [*((adamw, tier) for tier in TIERS), *((make, tier) for make in (sgd, muon, EightBit) for tier in SOME[1:])],
)
def test_twenty_steps_equal_the_plain_optimizer(make: Any, tier: tuple[str, str]) -> None:
    master, states = tier
    shapes = ONLY_MATRICES if make is muon else (MATRICES, VECTORS)
    groups = two_groups(shapes, dtype_of(master))
    plain = Plain(groups, make, dtype_of(master))
    copies = clock()
    ours = tiered(groups, make, master, states, bucket_bytes=1500, copies=copies)
    assert len(ours.buckets) >= 3
    for step in range(22):
        step_both(ours, groups, plain, step)
        if step in (0, 1, 21):
            assert_equal(ours, groups, plain)
    assert not copies.faults
    assert (copies.outward.bytes > 0) == ("host" in (master, states))
    for group, expected in zip(ours.param_groups, plain.optimizer.param_groups, strict=True):
        assert {k: v for k, v in group.items() if k != "params"} == {k: v for k, v in expected.items() if k != "params"}


@pytest.mark.parametrize(("master", "states"), SOME)
def test_buckets_in_any_order_are_one_step(master: str, states: str) -> None:
    for make, prefetches in itertools.product((adamw, EightBit), (False, True)):
        groups = two_groups((MATRICES, VECTORS), dtype_of(master))
        plain = Plain(groups, make, dtype_of(master))
        copies = clock()
        ours = tiered(groups, make, master, states, bucket_bytes=3000, copies=copies)
        draws = random.Random(4)
        for step in range(6):
            gradients = gradients_of(groups, step)
            for p, gradient in zip(of(groups), gradients, strict=True):
                p.grad = None if gradient is None else gradient.to(p.dtype)
            plain.step(gradients)
            order = list(range(len(ours.buckets)))
            draws.shuffle(order)
            for k, bucket in enumerate(order):
                if prefetches and k + 1 < len(order):
                    ours.prefetch(order[k + 1])
                ours.step_bucket(bucket)
                for p in ours.buckets[bucket]:
                    p.grad = None
            if step % 2:
                ours.finish()  # else the next step's first bucket tells
        assert_equal(ours, groups, plain)
        assert not copies.faults


def test_a_bucket_stepped_twice_without_an_end_is_the_next_step() -> None:
    groups = [{"params": parameters([(4, 4)] * 3, torch.float32)}]
    ours = tiered(groups, EightBit, "parameters", "device", bucket_bytes=64)
    for _ in range(3):
        for bucket in (2, 0, 1):
            for p in of(groups):
                p.grad = torch.ones_like(p)
            ours.step_bucket(bucket)
    assert ours.param_groups[0]["steps"] == 3


@pytest.mark.parametrize(("master", "states"), SOME)
def test_state_and_masters_go_from_any_tier_to_any_other(master: str, states: str) -> None:
    source = two_groups((MATRICES, VECTORS), dtype_of(master))
    plain = Plain(source, adamw, dtype_of(master))
    ours = tiered(source, adamw, master, states, copies=clock())
    for step in range(4):
        step_both(ours, source, plain, step)
    for other_master, other_states in TIERS:
        target = two_groups((MATRICES, VECTORS), dtype_of(other_master))
        for p in of(target):
            p.data.zero_()
        other = tiered(target, adamw, other_master, other_states, bucket_bytes=2000, copies=clock())
        for (p, values), q in zip(ours.masters(), of(target), strict=True):
            assert p.shape == q.shape
            other.set_master(q, values)
        pairs = list(zip(of(source), of(target), strict=True))
        random.Random(0).shuffle(pairs)  # the order of buckets is fastest, any is right
        for p, q in pairs:
            other.load_state_of(q, ours.state_of(p))
        for (_, a), (_, b) in zip(ours.masters(), other.masters(), strict=True):
            assert same(a, b)
        twin = Plain(source, adamw, dtype_of(other_master))
        for a, b in zip(twin.masters, plain.masters, strict=True):
            a.data.copy_(b.data)
        twin.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
        for step in range(4, 6):
            step_both(other, target, twin, step)
        assert_equal(other, target, twin)


@pytest.mark.parametrize(("master", "states"), [("host", "host"), ("float32", "device")])
def test_states_made_before_the_first_step(master: str, states: str) -> None:
    """Adagrad makes its sums, of a given value, when it is built."""

    def make(groups: list[dict[str, Any]]) -> Adagrad:
        return Adagrad(groups, lr=0.1, initial_accumulator_value=0.5, foreach=True)

    groups = two_groups((MATRICES, VECTORS), torch.bfloat16)
    plain = Plain(groups, make, torch.bfloat16)
    ours = tiered(groups, make, master, states, copies=clock())
    assert same(ours.state_of(of(groups)[0])["sum"], torch.full(MATRICES[0], 0.5))
    for step in range(3):
        step_both(ours, groups, plain, step)
    assert_equal(ours, groups, plain)


@pytest.mark.parametrize(("master", "states"), SOME)
def test_tensors_with_dims_in_another_order(master: str, states: str) -> None:
    weights = torch.randn(4, 3, 5, 6, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    strided = weights.to(memory_format=torch.channels_last).to(dtype_of(master))
    gaps = torch.zeros(6, 10, dtype=dtype_of(master))[:, ::2]
    groups = [{"params": [nn.Parameter(strided), nn.Parameter(gaps)]}]
    plain = Plain(groups, adamw, dtype_of(master))
    ours = tiered(groups, adamw, master, states, copies=clock())
    for step in range(4):
        step_both(ours, groups, plain, step)
    assert_equal(ours, groups, plain)
    assert groups[0]["params"][0].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("master", ["split", "host"])
def test_a_master_exists_during_its_buckets_step_only(master: str) -> None:
    seen: list[int] = []

    class Looking(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            seen.append(sum(bool(m.untyped_storage().nbytes() > 4) for m in everyone))
            assert sum(len(g["params"]) for g in self.param_groups) == seen[-1]
            super().step()

    groups = two_groups((MATRICES, VECTORS), torch.bfloat16)
    ours = tiered(groups, lambda g: Looking(g, foreach=True), master, "device", bucket_bytes=3000)
    everyone = of(ours.param_groups)
    for p in of(groups):
        p.grad = torch.ones_like(p)
    ours.step()
    assert seen == [len(bucket) for bucket in ours.buckets] and len(seen) > 2
    assert all(bool(m.isnan().all()) and m.untyped_storage().nbytes() <= 4 for m in everyone)
    assert all(m.grad is None for m in everyone)


def test_what_it_refuses() -> None:
    bf16, float32 = parameters([(4,)], torch.bfloat16), parameters([(4,)], torch.float32)
    with pytest.raises(ValueError, match="bfloat16"):
        tiered([{"params": parameters([(4,)], torch.float16)}], adamw, "split", "device")
    with pytest.raises(ValueError, match="float32"):
        tiered([{"params": bf16}], adamw, "parameters", "device")
    with pytest.raises(ValueError, match="one group"):
        tiered([{"params": float32}, {"params": float32}], adamw, "parameters", "device")
    with pytest.raises(ValueError, match="parameters"):
        tiered([{"params": []}], adamw, "parameters", "device")
    ours = tiered([{"params": float32}], adamw, "parameters", "device")
    with pytest.raises(ValueError, match=r"\(1,\) for a part \(4,\)"):
        ours.set_master(float32[0], torch.ones(1))


def test_cutting_into_buckets() -> None:
    sizes = [10, 10, 5, 40, 1, 0, 30]
    actual = cut_into_buckets(parameters([(n,) for n in sizes], torch.float32), 100)
    assert [[p.numel() for p in bucket] for bucket in actual] == [[10, 10, 5], [40], [1, 0], [30]]
    assert len(cut_into_buckets(parameters([(2,)] * 3, torch.float32), 0)) == 3


# ---- tensors that are split over processes ----


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(("master", "states"), SOME)
def test_parameters_of_fully_shard(alone: None, master: str, states: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 8)).to(torch.bfloat16).to(dtype_of(master))
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    groups = [{"params": list(model.parameters())}]
    assert all(isinstance(p, DTensor) for p in of(groups))
    local = [{"params": [nn.Parameter(p.to_local().detach().clone()) for p in of(groups)]}]  # type: ignore[attr-defined]
    plain = Plain(local, adamw, dtype_of(master))
    ours = tiered(groups, adamw, master, states, bucket_bytes=2000, copies=clock())
    for step in range(5):
        x = torch.randn(6, 24, generator=torch.Generator().manual_seed(step)).to(dtype_of(master))
        model(x).float().square().mean().backward()
        plain.step([p.grad.to_local().clone() for p in of(groups)])  # type: ignore[union-attr]
        ours.step()
        ours.zero_grad()
    for p, expected, (q, values) in zip(of(groups), plain.rounded(), ours.masters(), strict=True):
        assert p is q and same(p.to_local().detach(), expected)  # type: ignore[attr-defined]
        assert not isinstance(values, DTensor)
    for p, m in zip(of(groups), plain.masters, strict=True):
        assert same(ours.state_of(p), plain.optimizer.state[m])


@pytest.mark.parametrize(("master", "states"), SOME)
def test_empty_shards(alone: None, master: str, states: str) -> None:
    """A process may hold nothing of some parameters, or of all of a bucket."""
    mesh = init_device_mesh("cpu", (1,))
    full = parameters([(6, 4), (0, 4), (0,), (0, 3)], dtype_of(master))
    sharded = [nn.Parameter(DTensor.from_local(p.detach().clone(), mesh, [Shard(0)])) for p in full]
    for bucket_bytes in (0, 1 << 20):
        groups = [{"params": sharded}]
        plain = Plain(
            [{"params": [nn.Parameter(p.to_local().detach().clone()) for p in sharded]}], adamw, dtype_of(master)
        )  # type: ignore[attr-defined]
        ours = tiered(groups, adamw, master, states, bucket_bytes=bucket_bytes, copies=clock())
        for (_, values), m in zip(ours.masters(), plain.masters, strict=True):
            m.data.copy_(values)
        for step in range(3):
            gradients = [torch.full_like(m, step + 1.0) for m in plain.masters]
            for p, gradient in zip(sharded, gradients, strict=True):
                p.grad = DTensor.from_local(gradient.to(p.dtype), mesh, [Shard(0)])
            plain.step(gradients)  # type: ignore[arg-type]
            ours.step()
        for p, m in zip(sharded, plain.masters, strict=True):
            assert same(ours.state_of(p), plain.optimizer.state[m])
            ours.load_state_of(p, plain.optimizer.state[m])
        assert [same(v, m.detach()) for (_, v), m in zip(ours.masters(), plain.masters, strict=True)] == [True] * 4


def test_gradients_that_are_still_to_be_summed_are(alone: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    p = nn.Parameter(DTensor.from_local(torch.zeros(4), mesh, [Replicate()]))
    p.grad = DTensor.from_local(torch.ones(4), mesh, [Partial()])
    ours = tiered([{"params": [p]}], lambda g: SGD(g, lr=1.0), "parameters", "device")
    ours.step()
    assert same(p.to_local().detach(), torch.full((4,), -1.0))  # type: ignore[attr-defined]


class Paced(SGD):
    """Keeps a tensor of several numbers in its groups, and replaces it in each step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["pace"] = group["pace"] + torch.tensor([1.0, 2.0])
        return super().step(closure)


def test_a_tensor_of_a_group_advances_once_a_step() -> None:
    groups = [{**group, "pace": torch.zeros(2)} for group in two_groups((VECTORS, MATRICES), torch.float32)]
    ours = tiered(groups, lambda parameters: Paced(parameters, lr=1e-2), "parameters", "host")
    assert len(ours.buckets) > 1
    for step in range(3):
        for p, gradient in zip(of(groups), gradients_of(groups, step), strict=True):
            p.grad = None if gradient is None else gradient.float()
        ours.step()
    assert [group["pace"].tolist() for group in ours.param_groups] == [[3.0, 6.0]] * 2
