"""One optimizer step on one process, against a plain loop in float32; recomputation; the guard against non-finite numbers."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from mmspeed import rng
from mmspeed.config.schema import TrainConfig
from mmspeed.errors import UserError
from mmspeed.loop.gradients import clip_gradients
from mmspeed.loop.optimizers.make_optimizer import make_optimizer
from mmspeed.loop.step import StepResult
from mmspeed.parallel import parallelize, resolve_strategy
from mmspeed.protocols import Batch
from tests.support.steps import train_step
from tests.support.toy import ToyDiT, flow_loss, make_batch, split

KEYS = [f"s{i}" for i in range(7)]  # of 8 slots: the last is a filler
Grads = dict[str, torch.Tensor]


def plain_gradients(model: nn.Module) -> tuple[float, Grads]:
    loss = flow_loss(model, make_batch(KEYS)).mean()
    loss.backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.item(), grads


def step(model: nn.Module, batches: list[Batch], clip: float | None = None) -> tuple[StepResult, Grads]:
    """A step and the gradients that the optimizer saw."""
    grads: Grads = {}
    optimizer = make_optimizer(model, TrainConfig())
    optimizer.register_step_pre_hook(
        lambda *_: grads.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    )
    samples = int(sum(b.weights_I.sum().item() for b in batches))
    result = train_step(model, batches, flow_loss, optimizer, global_samples=samples, clip_norm=clip, strategy="none")
    return result, grads


def close(actual: Grads, truth: Grads) -> None:
    # Sums of at most 8 x 12 products in another order: a few eps (1.2e-7) of the largest element.
    assert set(actual) == set(truth)
    for name in truth:
        torch.testing.assert_close(actual[name], truth[name], rtol=0, atol=2e-6 * truth[name].abs().max().item())


@pytest.mark.parametrize("micro", [4, 1])
def test_accumulation_with_a_filler_equals_one_big_batch(micro: int) -> None:
    loss, truth = plain_gradients(ToyDiT())
    batches = split(KEYS, 8, 0, 1, micro)
    assert len(batches) == 8 // micro
    result, grads = step(ToyDiT(), batches)
    close(grads, truth)
    assert result.loss == pytest.approx(loss, rel=1e-6) and result.finite and result.bad == []
    norm = torch.cat([g.flatten() for g in truth.values()]).norm().item()
    assert result.grad_norm == pytest.approx(norm, rel=1e-6)


@pytest.mark.parametrize("clip", [0.01, 1e6])
def test_clipping_is_that_of_torch_bit_by_bit(clip: float) -> None:
    """Also of gradients of two number types."""
    models = [ToyDiT().to(dtype) for dtype in (torch.float32, torch.bfloat16)]
    parameters = [p for model in models for p in model.parameters()]
    for number, parameter in enumerate(parameters):
        parameter.grad = rng.normal(parameter.shape, 0, "gradient", number).to(parameter.dtype)
    before = [p.grad.clone() for p in parameters if p.grad is not None]
    norm = clip_gradients(models, clip)
    clipped = [p.grad for p in parameters]
    for parameter, grad in zip(parameters, before, strict=True):
        parameter.grad = grad
    assert torch.equal(norm, nn.utils.clip_grad_norm_(parameters, clip))
    assert all(torch.equal(p.grad, grad) for p, grad in zip(parameters, clipped, strict=True))


def test_bfloat16_computes_in_bfloat16_and_keeps_float32() -> None:
    model = parallelize(ToyDiT(), None, "none", compute_dtype=torch.bfloat16)
    seen: list[torch.dtype] = []
    model.blocks[0].up.register_forward_hook(lambda m, i, out: seen.append(out.dtype))  # type: ignore[index, union-attr]
    _, grads = step(model, split(KEYS, 8, 0, 1, 8))
    _, truth = plain_gradients(ToyDiT())
    assert seen == [torch.bfloat16]
    assert all(p.dtype == torch.float32 for p in model.parameters())
    gap = sum(((grads[n] - truth[n]).norm() ** 2).item() for n in truth) ** 0.5
    norm = sum((truth[n].norm() ** 2).item() for n in truth) ** 0.5
    assert 0 < gap < 0.05 * norm  # 8 bits of mantissa through a few layers; equal would mean float32


class Lazy:
    """Micro-batches that are made on access; none may be alive by then."""

    def __init__(self, batches: list[Batch]) -> None:
        self.count, self.waiting = len(batches), batches[::-1]

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Batch]:
        previous: weakref.ref[Batch] | None = None
        while self.waiting:
            assert previous is None or previous() is None, "the batch before is still in memory"
            previous = weakref.ref(self.waiting[-1])
            yield self.waiting.pop()


def test_micro_batches_are_asked_for_one_by_one_and_let_go() -> None:
    truth = step(ToyDiT(), split(KEYS, 8, 0, 1, 2))
    lazy = Lazy(split(KEYS, 8, 0, 1, 2))
    model = ToyDiT()
    optimizer = make_optimizer(model, TrainConfig())
    result = train_step(model, lazy, flow_loss, optimizer, global_samples=7, clip_norm=None, strategy="none")
    assert not lazy.waiting and result == truth[0]


class Held:
    """State that a function keeps for its backward, beside tensors."""


class Holds(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss_B: torch.Tensor, held: Held) -> torch.Tensor:
        ctx.held = held
        return loss_B.clone()

    @staticmethod
    def backward(ctx, dloss_B: torch.Tensor):
        return dloss_B, None


def test_what_a_graph_keeps_is_gone_when_the_next_forward_begins() -> None:
    kept: list[weakref.ref[Held]] = []

    def loss_fn(model: nn.Module, batch: Batch) -> torch.Tensor:
        assert not any(ref() for ref in kept)
        held = Held()
        kept.append(weakref.ref(held))
        return Holds.apply(flow_loss(model, batch), held)

    model = ToyDiT()
    optimizer = make_optimizer(model, TrainConfig())
    batches = split(KEYS, 8, 0, 1, 2)
    train_step(model, batches, loss_fn, optimizer, global_samples=7, clip_norm=None, strategy="none")
    assert len(kept) > 1 and not any(ref() for ref in kept)


def test_a_non_finite_sample_is_named_and_nothing_moves() -> None:
    model = ToyDiT()
    optimizer = make_optimizer(model, TrainConfig())
    before = {n: t.clone() for n, t in model.state_dict().items()}
    batches = split(KEYS, 8, 0, 1, 4)
    batches[0]["latents"][2] = float("nan")
    call = {"global_samples": 7, "clip_norm": 1.0, "strategy": "none"}
    result = train_step(model, batches, flow_loss, optimizer, **call)  # type: ignore[arg-type]
    assert not result.finite and result.bad == ["s2.mp4"]
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    assert not optimizer.state and all(p.grad is None for p in model.parameters())
    good = train_step(model, split(KEYS, 8, 0, 1, 4), flow_loss, optimizer, **call)  # type: ignore[arg-type]
    assert good.finite and optimizer.state


def test_strategies_are_resolved() -> None:
    assert [resolve_strategy("auto", w) for w in (1, 2)] == ["none", "fsdp"]
    assert resolve_strategy("ddp", 1) == "ddp"
    with pytest.raises(UserError, match="this run has 4"):
        resolve_strategy("none", 4)
    with pytest.raises(UserError, match="use auto, none, ddp or fsdp"):
        resolve_strategy("zero", 4)
