"""Several models that learn in one run: updates, optimizers, averages and checkpoints by role."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmspeed.initialize import init_weights
from mmspeed.loop.averages import ema_decay
from mmspeed.loop.optimizers.build import learning_rate
from tests.support.character_runs import ALONE, character_config, losses
from tests.support.checkpoints import differing, farthest, whole_checkpoint
from tests.support.distillation import DistillationTask, critic_loss, student_loss, train_both
from tests.support.spawn import run_ranks

# Gradients are sums of the same numbers in another order; Adam divides small ones by their own size, in six steps of 1e-3.
LOSS, WEIGHTS = {"rel": 1e-6}, 1e-6


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run `small` of one process."""
    folder = tmp_path_factory.mktemp("roles")
    train_both(str(folder))
    return folder


def test_a_run_is_the_updates_by_hand(home: Path) -> None:
    """Of each update the gradients of its own role alone, one role after the other; averages of both."""
    config = character_config(home)
    task = DistillationTask(config)
    models = {
        role: model.to_empty(device="cpu") if next(model.parameters()).is_meta else model
        for role, model in task.build().items()
    }
    init_weights(models["model"], config.seed)
    averages = {role: [p.detach().clone() for p in model.parameters()] for role, model in models.items()}
    optimizers = {
        role: torch.optim.AdamW(
            [
                {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": config.train.weight_decay},
                {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=config.train.lr,
            betas=config.train.betas,
            eps=config.train.eps,
        )
        for role, model in models.items()
    }
    curve = []
    for number, step in enumerate(task.data(ALONE).steps(0, config.train.steps)):
        (batch,) = step.batches
        for role, loss_fn in (("model", student_loss), ("critic", critic_loss)):
            loss = loss_fn(models, batch)["loss"].total() / step.divisors["tokens"]
            parameters = list(models[role].parameters())
            for parameter, grad in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.grad = grad
            if config.train.clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(
                    parameters, config.train.clip_norm, torch.nn.utils.get_total_norm([p.grad for p in parameters])
                )
            for group in optimizers[role].param_groups:
                group["lr"] = learning_rate(number, config.train)
            optimizers[role].step()
            if role == "model":
                curve.append(loss.item())
        for role, model in models.items():
            weight = 1 - ema_decay(config.train.ema_decay, number + 1)
            for average, parameter in zip(averages[role], model.parameters(), strict=True):
                average.lerp_(parameter.detach(), weight)
    assert losses(config) == pytest.approx(curve, **LOSS)
    held = whole_checkpoint(config.run_dir)
    for role, prefix in (("model", ""), ("critic", "critic:")):
        for (name, parameter), average in zip(models[role].named_parameters(), averages[role], strict=True):
            assert torch.allclose(held[f"{prefix}model.{name}"], parameter.detach(), atol=WEIGHTS, rtol=0), (role, name)
            assert torch.allclose(held[f"{prefix}ema.{name}"], average, atol=WEIGHTS, rtol=0), (role, name)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_two_ranks_equal_one_process(home: Path, strategy: str) -> None:
    run_ranks(train_both, 2, str(home), (f"name={strategy}", f"parallel.strategy={strategy}"))
    config, one = character_config(home, f"name={strategy}"), character_config(home)
    assert losses(config) == pytest.approx(losses(one), **LOSS)
    state, truth = whole_checkpoint(config.run_dir), whole_checkpoint(one.run_dir)
    assert state.keys() == truth.keys()
    for prefix in ("model.", "ema.", "critic:model.", "critic:ema."):
        assert farthest(state, truth, prefix) < WEIGHTS


@pytest.mark.slow
def test_a_stopped_run_goes_on_bitwise(home: Path) -> None:
    train_both(str(home), ("name=parts", "train.steps=3"))
    train_both(str(home), ("name=parts",))
    parts, whole = character_config(home, "name=parts"), character_config(home)
    assert losses(parts) == losses(whole)
    assert differing(whole_checkpoint(parts.run_dir), whole_checkpoint(whole.run_dir)) == []
