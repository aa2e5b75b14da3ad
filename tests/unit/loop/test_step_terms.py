"""Terms, divisors and updates of a step on one process, against plain loops.

Legend: I items of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from mmspeed.config.memory import MemoryConfig
from mmspeed.config.schema import TrainConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.loop.optimizers.make_optimizer import AnyOptimizer, make_optimizer
from mmspeed.loop.step import Learner, StepResult, train_step
from mmspeed.protocols import Batch, Divisors, Models, Term, Terms, Update, UseName
from tests.support.steps import Loss, learner_of
from tests.support.toy import ToyDiT, flow_loss, make_batch, split

KEYS = [f"s{i}" + "x" * (i % 2) for i in range(7)]  # of 8 slots: the last is a filler; captions of 3 and 2 tokens
Grads = dict[str, Tensor]


@dataclass
class Taken:
    """A step, and the gradients that the optimizer saw."""

    result: StepResult
    grads: Grads = field(default_factory=dict)


def gradients(model: nn.Module) -> Grads:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def toys() -> dict[str, nn.Module]:
    return {"model": ToyDiT()}


def learner(models: Models, loss: Loss, grads: Grads, update: Update | None = None) -> Learner:
    optimizer = make_optimizer(models["model"], TrainConfig())
    assert isinstance(optimizer, torch.optim.Optimizer)
    optimizer.register_step_pre_hook(lambda *_: grads.update(gradients(models["model"])))
    return learner_of(models, loss, optimizer, update=update)


def step(loss: Loss, divisors: Divisors, clip: float | None = None, micro: int = 4, weight: float = 1.0) -> Taken:
    """A step of the toy by a loss, of eight slots."""
    models, taken = toys(), Taken(StepResult(0.0, 0.0, True))
    learners, batches = [learner(models, loss, taken.grads)], split(KEYS, 8, 0, 1, micro)
    taken.result = train_step(models, learners, batches, divisors, clip_norm=clip, weight=weight)
    return taken


def caption_weights(batch: Batch) -> Tensor:
    """Caption tokens of each item, 0 of fillers."""
    return batch["text_mask"].sum(1).float() * batch.weights_I


def sizes(model: nn.Module, batch: Batch) -> Tensor:
    """Another loss: the mean square of what the model gives for pure data."""
    out = model(batch["latents"], torch.zeros(batch.size), batch["text"], batch["text_mask"])
    return out.float().square().mean(dim=(1, 2, 3, 4))


def two_terms(models: Models, batch: Batch) -> Terms:
    model = models["model"]
    return {
        "flow": Term(flow_loss(model, batch), batch.weights_I, "samples"),
        "size": Term(sizes(model, batch), caption_weights(batch), "tokens"),
    }


def one_term(models: Models, batch: Batch) -> Terms:
    return {"flow": Term(flow_loss(models["model"], batch), caption_weights(batch), "tokens")}


TOKENS = float(sum(make_batch(KEYS)["text_mask"].sum(1).tolist()))


def close(actual: Grads, truth: Mapping[str, Tensor], eps: float = 2e-6) -> None:
    """Sums of some 100 products in another order: a few eps (1.2e-7) of the largest number."""
    assert actual.keys() == truth.keys() and actual
    for name in truth:
        torch.testing.assert_close(actual[name], truth[name], rtol=0, atol=eps * truth[name].abs().max().item())


@pytest.mark.parametrize("micro", [4])
def test_each_term_is_over_its_own_divisor(micro: int) -> None:
    model, batch = ToyDiT(), make_batch(KEYS)
    flow_I, size_I, tokens_I = flow_loss(model, batch), sizes(model, batch), batch["text_mask"].sum(1)
    flow, size = flow_I.mean(), (size_I * tokens_I).sum() / tokens_I.sum()
    (flow + size).backward()
    taken = step(two_terms, {"samples": 7.0, "tokens": TOKENS}, micro=micro)
    close(taken.grads, gradients(model))
    assert taken.result.terms == pytest.approx({"flow": flow.item(), "size": size.item()}, rel=1e-6)
    assert taken.result.loss == pytest.approx((flow + size).item(), rel=1e-6)


def test_a_logged_term_changes_no_bit() -> None:
    def logged(models: Models, batch: Batch) -> Terms:
        return {
            **one_term(models, batch),
            "big": Term(1e3 * flow_loss(models["model"], batch), batch.weights_I, "samples", trains=False),
            "count": Term(torch.ones(batch.size), batch.weights_I, "samples", trains=False),
        }

    plain, taken = (step(loss, {"samples": 7.0, "tokens": TOKENS}) for loss in (one_term, logged))
    assert all(torch.equal(taken.grads[name], plain.grads[name]) for name in plain.grads)
    assert taken.result.loss == plain.result.loss == plain.result.terms["flow"]
    mean = flow_loss(ToyDiT(), make_batch(KEYS)).mean().item()
    assert taken.result.terms["big"] == pytest.approx(1e3 * mean, rel=1e-6) and taken.result.terms["count"] == 1.0


def test_a_loss_without_a_term_that_trains_is_refused() -> None:
    with pytest.raises(ValueError, match="no term of count trains"):
        step(lambda _, batch: {"count": Term(torch.ones(batch.size), batch.weights_I, trains=False)}, {"samples": 7.0})


def test_a_divisor_that_the_data_does_not_name_is_refused() -> None:
    with pytest.raises(ValueError, match="the term 'flow' has the divisor 'tokens', and the step's data has samples"):
        step(one_term, {"samples": 7.0})


@pytest.mark.parametrize("clip", [None, 0.01])
def test_a_divisor_that_is_known_afterwards_gives_the_same_step(clip: float | None) -> None:
    """A product by 1 / divisor before or after a sum: one rounding of each number, 1.2e-7."""
    known, late = (step(one_term, {"tokens": value}, clip) for value in (TOKENS, None))
    close(late.grads, known.grads, 1e-6)
    assert late.result.loss == pytest.approx(known.result.loss, rel=1e-6)
    assert late.result.grad_norm == pytest.approx(known.result.grad_norm, rel=1e-6)
    norm = torch.cat([grad.flatten() for grad in late.grads.values()]).norm().item()
    assert norm == pytest.approx(min(clip or 1e9, known.result.grad_norm), rel=1e-5)


def test_a_logged_term_may_have_a_divisor_that_is_known_afterwards() -> None:
    def hits(models: Models, batch: Batch) -> Terms:
        none = torch.zeros(batch.size)
        return {
            **one_term(models, batch),
            "short": Term(torch.full((batch.size,), 3.0), (caption_weights(batch) == 2).float(), "short", trains=False),
            "never": Term(torch.ones(batch.size), none, "never", trains=False),
        }

    plain = step(one_term, {"tokens": TOKENS})
    taken = step(hits, {"tokens": TOKENS, "short": None, "never": None})
    assert all(torch.equal(taken.grads[name], plain.grads[name]) for name in plain.grads)
    assert taken.result.terms == {**plain.result.terms, "short": 3.0}  # no mean of nothing


@pytest.mark.parametrize("known", [True, False])
def test_a_divisor_of_0_is_reported(known: bool) -> None:
    def nothing(models: Models, batch: Batch) -> Terms:
        return {"flow": Term(flow_loss(models["model"], batch), torch.zeros(batch.size), "tokens")}

    with pytest.raises(UserError, match="the step's divisor 'tokens' is 0: it has no item that counts"):
        step(nothing, {"tokens": 0.0 if known else None})


def test_a_late_divisor_goes_with_no_other() -> None:
    with pytest.raises(UserError, match="'tokens' is known after the step only, so all terms of the loss must have it"):
        step(two_terms, {"samples": 7.0, "tokens": None})


def test_released_gradients_need_a_divisor_beforehand() -> None:
    models, memory = toys(), MemoryConfig(release_gradients=True)
    optimizer = make_optimizer(models["model"], TrainConfig(clip_norm=None), memory, Device("cpu", 0))
    learners = [learner_of(models, one_term, optimizer)]
    with pytest.raises(UserError, match=r"memory\.release_gradients needs divisors that are known before a step"):
        train_step(models, learners, split(KEYS, 8, 0, 1, 8), {"tokens": None}, clip_norm=None)


def test_a_frozen_reference_is_there_and_does_not_learn() -> None:
    reference = ToyDiT(seed=1).requires_grad_(False)

    def against(models: Models, batch: Batch) -> Terms:
        gap_I = flow_loss(models["model"], batch) - flow_loss(models["reference"], batch)
        return {"loss": Term(gap_I.square(), batch.weights_I)}

    model, grads = ToyDiT(), {}
    before = {name: value.clone() for name, value in reference.state_dict().items()}
    models = {"model": model, "reference": reference}
    train_step(models, [learner(models, against, grads)], split(KEYS, 8, 0, 1, 4), {"samples": 7.0}, clip_norm=None)
    truth, batch = ToyDiT(), make_batch(KEYS)
    (flow_loss(truth, batch) - flow_loss(reference, batch)).square().mean().backward()
    close(grads, gradients(truth), 1e-5)  # differences of losses lose a digit
    assert all(torch.equal(value, before[name]) for name, value in reference.state_dict().items())
    assert gradients(reference) == {}


def test_updates_are_taken_in_order_each_with_its_own_optimizer() -> None:
    """The second update sees what the first has changed; micro-batches that come once serve both."""

    def critic_loss(models: Models, batch: Batch) -> Terms:
        with torch.no_grad():
            target_I = flow_loss(models["model"], batch)
        return {"gap": Term((flow_loss(models["critic"], batch) - target_I).square(), batch.weights_I)}

    def flow(models: Models, batch: Batch) -> Terms:
        return {"flow": Term(flow_loss(models["model"], batch), batch.weights_I)}

    def optimizers(models: Sequence[nn.Module]) -> list[AnyOptimizer]:
        return [make_optimizer(model, TrainConfig(lr=1e-2)) for model in models]

    models = {"model": ToyDiT(), "critic": ToyDiT(seed=1)}
    learners = [
        learner_of(models, loss, optimizer, update=Update(role=role, name=role))
        for role, loss, optimizer in zip(models, (flow, critic_loss), optimizers([*models.values()]), strict=True)
    ]
    batches = split(KEYS, 8, 0, 1, 8)
    result = train_step(models, learners, batches, {"samples": 7.0}, clip_norm=1.0)

    truths, batch = (ToyDiT(), ToyDiT(seed=1)), make_batch(KEYS)
    values = []
    for optimizer, truth in zip(optimizers(truths), truths, strict=True):
        loss_I = flow_loss(truth, batch)
        if truth is truths[1]:
            loss_I = (loss_I - flow_loss(truths[0], batch).detach()).square()
        loss_I.mean().backward()
        nn.utils.clip_grad_norm_(truth.parameters(), 1.0)
        optimizer.step()
        values.append(loss_I.mean().item())
    assert result.terms == pytest.approx({"model.flow": values[0], "critic.gap": values[1]}, rel=1e-5)
    assert result.loss == pytest.approx(values[0], rel=1e-6)
    for actual, truth in zip(models.values(), truths, strict=True):
        for (name, one), other in zip(actual.named_parameters(), truth.parameters(), strict=True):
            # a first step of AdamW is 1e-2 times the sign of the gradient, near enough
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5, msg=name)


def test_gradients_are_exchanged_with_the_last_micro_batch_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanges = []

    def noted(model: nn.Module, strategy: object, last: bool) -> AbstractContextManager[None]:
        exchanges.append(last)
        return nullcontext()

    monkeypatch.setattr("mmspeed.loop.runner.no_sync", noted)
    batches, models = split(KEYS, 8, 0, 1, 3), toys()
    divisors = {"samples": 7.0, "tokens": 18.0}
    train_step(models, [learner(models, two_terms, {})], batches, divisors, clip_norm=None)
    assert exchanges == [False] * (len(batches) - 1) + [True] and len(batches) > 2


@pytest.mark.parametrize("micro", [2])
def test_a_step_is_computed_again_without_its_spoiled_samples(micro: int) -> None:
    def spoil(batches: list[Batch]) -> list[Batch]:
        for batch in batches:
            for place, (key, *_) in enumerate(batch.names):
                batch["latents"][place] *= float("nan") if key in (KEYS[2], KEYS[5]) else 1.0
        return batches

    def without(uses: Sequence[UseName]) -> list[Batch]:
        asked.extend(uses)
        batches = split(KEYS, 8, 0, 1, micro)
        for batch in batches:
            keep = torch.tensor([name not in uses for name in batch.names])
            batch.weights_I *= keep
        return batches

    def loss(models: Models, batch: Batch) -> Terms:
        return {"loss": Term(flow_loss(models["model"], batch), batch.weights_I)}

    asked: list[UseName] = []
    steps = []
    spoiled = spoil(split(KEYS, 8, 0, 1, micro))
    sound = without([(KEYS[2], 0, 0), (KEYS[5], 0, 0)])
    asked.clear()
    for batches, again in ((spoiled, without), (sound, None)):
        models, grads = toys(), dict[str, Tensor]()
        learners = [learner(models, loss, grads)]
        result = train_step(models, learners, batches, {"samples": 7.0}, clip_norm=1.0, again=again)
        steps.append((result, grads))
    (again_result, again_grads), (result, grads) = steps
    assert asked == [(KEYS[2], 0, 0), (KEYS[5], 0, 0)]
    assert again_result.finite and again_result.updated == {"model"}
    assert again_result.left_out == (f"{KEYS[2]}.mp4", f"{KEYS[5]}.mp4")
    assert (again_result.loss, again_result.grad_norm) == (result.loss, result.grad_norm)  # by 7 samples, as planned
    assert all(torch.equal(grad, again_grads[name]) for name, grad in grads.items())


def test_a_step_without_a_sound_sample_is_not_computed_again() -> None:
    def loss(models: Models, batch: Batch) -> Terms:
        return {"loss": Term(flow_loss(models["model"], batch) * float("nan"), batch.weights_I)}

    models = toys()
    asked: list[int] = []
    result = train_step(
        models,
        [learner(models, loss, {})],
        split(KEYS, 8, 0, 1, 4),
        {"samples": 7.0},
        clip_norm=None,
        again=lambda uses: asked.append(len(uses)),
    )
    assert asked == [7] and not result.finite and len(result.bad) == 7 and not result.left_out and not result.updated
