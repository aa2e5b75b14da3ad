"""The weight of a step: a factor of its gradients, and of nothing that is reported of it."""

from __future__ import annotations

import pytest

from mmspeed.config.memory import MemoryConfig
from mmspeed.config.schema import TrainConfig
from mmspeed.device import Device
from mmspeed.loop.optimizers.gradient_release import ReleasingOptimizer
from mmspeed.loop.optimizers.make_optimizer import make_optimizer
from mmspeed.loop.step import StepResult, train_step
from mmspeed.protocols import Divisors, Update
from tests.support.steps import learner_of
from tests.support.toy import split
from tests.unit.loop.test_step_terms import KEYS, TOKENS, Grads, close, learner, one_term, step, toys


def times(grads: Grads, factor: float) -> Grads:
    return {name: grad * factor for name, grad in grads.items()}


@pytest.mark.parametrize(("late", "micro"), [(False, 4), (True, 1)])
def test_gradients_have_the_weight_and_the_numbers_of_the_step_do_not(late: bool, micro: int) -> None:
    divisors: Divisors = {"tokens": None if late else TOKENS}
    plain, weighed = (step(one_term, divisors, micro=micro, weight=weight) for weight in (1.0, 2.5))
    close(weighed.grads, times(plain.grads, 2.5))
    assert weighed.result.loss == plain.result.loss and weighed.result.terms == plain.result.terms
    assert weighed.result.grad_norm == pytest.approx(plain.result.grad_norm, rel=1e-6)


@pytest.mark.parametrize(("late", "weight"), [(False, 0.2), (True, 3.0)])
def test_clipping_bounds_the_mean_and_keeps_the_weight(late: bool, weight: float) -> None:
    divisors: Divisors = {"tokens": None if late else TOKENS}
    plain = step(one_term, divisors)
    bound = plain.result.grad_norm / 2
    clipped = step(one_term, divisors, bound, weight=weight)
    close(clipped.grads, times(plain.grads, weight / 2))
    free = step(one_term, divisors, plain.result.grad_norm * 1.01, weight=weight)  # with its weight it may be above
    close(free.grads, times(plain.grads, weight))


def test_release_gives_the_weight_too() -> None:
    """The first moment after a first step is a tenth of its gradient."""

    def released(weight: float) -> tuple[StepResult, Grads]:
        models = toys()
        memory = MemoryConfig(release_gradients=True, bucket="1KiB")
        optimizer = make_optimizer(models["model"], TrainConfig(clip_norm=None), memory, Device("cpu", 0))
        assert isinstance(optimizer, ReleasingOptimizer)
        learners = [learner_of(models, one_term, optimizer)]
        batches, divisors = split(KEYS, 8, 0, 1, 8), {"tokens": TOKENS}
        result = train_step(models, learners, batches, divisors, clip_norm=None, weight=weight)
        return result, {name: optimizer.state_of(p)["exp_avg"] for name, p in models["model"].named_parameters()}

    (plain, moments), (weighed, weighed_moments) = released(1.0), released(4.0)
    close(weighed_moments, times(moments, 4.0))
    assert weighed.grad_norm == pytest.approx(plain.grad_norm, rel=1e-5) and weighed.loss == plain.loss


def test_all_updates_of_a_step_have_its_weight() -> None:
    divisors: Divisors = {"tokens": TOKENS}
    plain, weighed = (step(one_term, divisors, weight=weight) for weight in (1.0, 0.5))
    both: list[Grads] = [{}, {}]
    models = toys()
    learners = [
        learner(models, one_term, grads, Update(name=name)) for name, grads in zip(("a", "b"), both, strict=True)
    ]
    train_step(models, learners, split(KEYS, 8, 0, 1, 4), divisors, clip_norm=None, weight=0.5)
    close(both[0], weighed.grads)
    close(both[0], times(plain.grads, 0.5))
    assert both[1].keys() == both[0].keys()


@pytest.mark.parametrize("weight", [0.0, float("nan")])
def test_a_weight_that_is_none_is_an_error(weight: float) -> None:
    with pytest.raises(ValueError, match=r"a step's weight is .*: it must be above 0"):
        step(one_term, {"tokens": TOKENS}, weight=weight)
