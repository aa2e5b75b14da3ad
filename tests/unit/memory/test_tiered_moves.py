"""The tiered optimizer's bytes, its time under a controlled clock, and what it does when a step breaks off."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from mmspeed.errors import UserError
from mmspeed.memory import peak_bytes
from mmspeed.memory.offload.copies import CopyJob, CpuCopyEngine, HostBuffer
from mmspeed.memory.optimizer.tiered_optimizer import TieredOptimizer
from tests.support.clock import ControlledClock, Reckoned
from tests.support.tiered_cases import (
    CPU,
    MATRICES,
    VECTORS,
    Plain,
    adamw,
    assert_equal,
    gradients_of,
    of,
    parameters,
    tiered,
    two_groups,
)

COUNT, SIDE = 8, 64  # parameters, and the side of each
NUMEL = COUNT * SIDE * SIDE
BUCKET = 4 * SIDE * SIDE  # one parameter
STEP_COUNTS = 4 * COUNT  # AdamW's, one float32 each


def squares(dtype: torch.dtype) -> list[dict[str, Any]]:
    return [{"params": parameters([(SIDE, SIDE)] * COUNT, dtype)}]


def give_gradients(groups: list[dict[str, Any]]) -> None:
    for p in of(groups):
        p.grad = torch.full_like(p, 0.5)


def alive() -> dict[int, torch.UntypedStorage]:
    """All storages that tensors of this process hold, however they are held, by their place."""
    gc.collect()
    results: dict[int, torch.UntypedStorage] = {}
    for thing in gc.get_objects():
        if isinstance(thing, Tensor) and thing.device.type == "cpu" and type(thing) in (Tensor, nn.Parameter):
            tensors = [thing] if thing.grad is None else [thing, thing.grad]
            results |= {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return results


TABLE = [  # bytes per parameter on the device, in the host's memory
    ("parameters", "device", 12, 0),
    ("float32", "device", 14, 0),
    ("split", "device", 12, 0),
    ("split", "host", 4, 8),
    ("host", "device", 10, 2),
    ("host", "host", 2, 10),
]


@pytest.mark.parametrize(("master", "states", "device", "host"), TABLE)
def test_bytes_per_parameter_between_steps(master: str, states: str, device: int, host: int) -> None:
    before = alive()  # held: what other tests have left does not go meanwhile, and nothing new is in its place
    groups = squares(torch.float32 if master == "parameters" else torch.bfloat16)
    ours = tiered(groups, adamw, master, states, bucket_bytes=BUCKET)
    for _ in range(3):
        give_gradients(groups)
        ours.step()
        ours.zero_grad()
        numbers = ours.device_bytes()
        assert sum(numbers.values()) == device * NUMEL + STEP_COUNTS
        assert sum(ours.host_bytes().values()) == host * NUMEL
    own = STEP_COUNTS + 4 * (
        COUNT if master in ("split", "host") else 0
    )  # what stands for absent masters: 4 bytes each
    new = sum(storage.nbytes() for place, storage in alive().items() if place not in before)
    assert device * NUMEL <= new <= device * NUMEL + own
    assert numbers["parameters"] == (4 if master == "parameters" else 2) * NUMEL
    assert numbers["master"] == {"parameters": 0, "float32": 4, "split": 2, "host": 0}[master] * NUMEL


def peak_of_step(ours: TieredOptimizer, groups: list[dict[str, Any]]) -> int:
    """Bytes of torch's allocations that a step adds to what was there."""
    give_gradients(groups)
    return peak_bytes(CPU, 0, ours.step)


def plain_sgd(groups: list[dict[str, Any]]) -> Optimizer:
    return SGD(groups, lr=0.1, momentum=0.9, foreach=False)  # takes no memory of its own


def test_at_most_three_buckets_of_states_are_on_the_device() -> None:
    groups = squares(torch.float32)
    bucket = 4 * SIDE * SIDE  # of momentum
    slow = ControlledClock(bucket / 0.003, bucket / 0.003)
    ours = tiered(
        groups,
        plain_sgd,
        "parameters",
        "host",
        bucket_bytes=BUCKET,
        copies=slow,
    )
    allowed = 3
    first = peak_of_step(ours, groups)
    later = [peak_of_step(ours, groups) for _ in range(2)]
    assert first <= 4 * bucket + 4096  # the first ones are made by the optimizer, then packed
    for peak in later:
        assert 2 * bucket <= peak <= allowed * bucket + 4096
    assert NUMEL * 4 >= 2 * allowed * bucket  # of many more


@pytest.mark.parametrize("master", ["split", "host"])
def test_float32_masters_of_one_bucket_at_a_time(master: str) -> None:
    groups = squares(torch.bfloat16)
    ours = tiered(groups, lambda g: SGD(g, lr=0.1, foreach=False), master, "device", bucket_bytes=BUCKET)
    numel = SIDE * SIDE
    give_gradients(groups)
    peak = peak_bytes(CPU, 0, ours.step)
    # master and gradient in float32, bfloat16 halves, rests (three buckets at most), and what the codec takes
    assert 8 * numel <= peak <= (4 + 4 + 2 + 3 * 2 + 9) * numel + 4096 < NUMEL * 4


def test_a_bucket_that_came_for_nothing_leaves_no_bytes() -> None:
    groups = squares(torch.bfloat16)
    ours = tiered(groups, adamw, "host", "host", bucket_bytes=BUCKET)
    give_gradients(groups)
    ours.step()
    least = ours.device_bytes()
    ours.zero_grad()
    ours.prefetch(2)
    assert ours._masters[2].device_bytes() == 2 * SIDE * SIDE
    ours.step_bucket(2)  # without a gradient
    assert ours.device_bytes() == least


# ---- time ----


@dataclass
class Sleeping:
    """An optimizer's step that takes a set time, whatever is in the bucket."""

    clock: Reckoned
    seconds: float
    inner: SGD = field(init=False)

    def make(self, groups: list[dict[str, Any]]) -> Optimizer:
        sleeping = self

        class Sleeper(SGD):
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                super().step()
                sleeping.clock.compute(sleeping.seconds)

        self.inner = Sleeper(groups, lr=0.1, momentum=0.9)
        return self.inner


DURATIONS = [(0.02, 0.04, 0.02), (0.03, 0.01, 0.02), (0.01, 0.015, 0.03)]


@pytest.mark.parametrize(("bring", "compute", "take"), DURATIONS)
def test_the_pipeline_is_at_most_5_percent_over_its_bound(bring: float, compute: float, take: float) -> None:
    """On a reckoned clock, which a busy machine does not disturb."""
    nbytes = 4 * SIDE * SIDE
    clock = Reckoned(nbytes / take, nbytes / bring)
    groups = squares(torch.float32)
    sleeping = Sleeping(clock, compute)
    ours = tiered(groups, sleeping.make, "parameters", "host", bucket_bytes=BUCKET, copies=clock)
    give_gradients(groups)
    ours.step()  # momenta are made
    clock.seconds = dict.fromkeys(clock.seconds, 0.0)
    began = clock.now
    ours.step()
    taken, lanes = clock.now - began, (clock.seconds["back"], clock.seconds["compute"], clock.seconds["out"])
    assert lanes == pytest.approx((COUNT * bring, COUNT * compute, COUNT * take))
    ends = {0: compute + take, 1: bring + take, 2: bring + compute}  # before and after the longest lane runs
    bound = max(lane + ends[k] for k, lane in enumerate(lanes))
    assert bound * 0.999 <= taken <= 1.05 * bound < sum(lanes)


# ---- failures ----


class Failing:
    """Copies of which one fails: when it is asked for, or when it is waited for."""

    def __init__(self, direction: str, number: int, late: bool) -> None:
        self.direction, self.number, self.late = direction, number, late
        self.on = False

    def _copy(self, direction: str, a: Any, b: Any) -> CopyJob:
        job = getattr(CpuCopyEngine(), direction)(a, b)
        if self.on and direction == self.direction:
            self.number -= 1
            if self.number == 0:
                if not self.late:
                    raise MemoryError("no room")
                return _Lost()
        return job

    def out(self, source_Z: Tensor, target: HostBuffer) -> CopyJob:
        return self._copy("out", source_Z, target)

    def back(self, source: HostBuffer, target_Z: Tensor) -> CopyJob:
        return self._copy("back", source, target_Z)


class _Lost:
    def wait(self) -> None:
        raise MemoryError("no room")

    def done(self) -> bool:
        return True


@pytest.mark.parametrize(("direction", "number", "late"), [("out", 1, False), ("back", 5, True), ("out", 16, True)])
def test_a_step_that_breaks_off_cannot_be_gone_on_from(direction: str, number: int, late: bool) -> None:
    copies = Failing(direction, number, late)
    groups = squares(torch.bfloat16)
    ours = tiered(groups, adamw, "host", "host", bucket_bytes=BUCKET, copies=copies)
    give_gradients(groups)
    ours.step()
    copies.on = True
    with pytest.raises(MemoryError, match="no room"):
        ours.step()
    uses = (
        ours.step,
        lambda: ours.step_bucket(0),
        lambda: list(ours.masters()),
        lambda: ours.state_of(of(groups)[0]),
        lambda: ours.set_master(of(groups)[0], torch.zeros(SIDE, SIDE)),
        lambda: ours.load_state_of(of(groups)[0], {}),
    )
    for use in uses:
        with pytest.raises(UserError, match=r"broke off \(MemoryError: no room\).*checkpoint"):
            use()


@pytest.mark.parametrize("late", [False, True])
def test_a_step_that_fails_before_anything_changed_can_be_tried_again(late: bool) -> None:
    copies = Failing("back", 1, late)
    groups = two_groups((MATRICES, VECTORS), torch.bfloat16)
    plain = Plain(groups, adamw, torch.bfloat16)
    ours = tiered(groups, adamw, "host", "host", bucket_bytes=3000, copies=copies)
    for step in range(3):
        gradients = gradients_of(groups, step)
        for p, gradient in zip(of(groups), gradients, strict=True):
            p.grad = gradient
        copies.on = step == 1
        if copies.on:
            with pytest.raises(MemoryError):
                ours.step()
        ours.step()
        plain.step(gradients)
    assert_equal(ours, groups, plain)


def test_an_optimizer_that_fails_leaves_groups_whole() -> None:
    class Breaking(AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise torch.OutOfMemoryError("full")

    groups = squares(torch.bfloat16)
    ours = tiered(groups, lambda g: Breaking(g), "split", "host", bucket_bytes=BUCKET)
    give_gradients(groups)
    with pytest.raises(torch.OutOfMemoryError):
        ours.step()
    assert len(ours.param_groups[0]["params"]) == COUNT
    with pytest.raises(UserError):
        ours.step()
    # what is held can be listed, as a report on full memory does
    assert ours.device_bytes()["parameters"] == 2 * SIDE * SIDE * COUNT and ours.host_bytes()["states"] == 0
