"""Updates of several roles, with optimizers of their own, at every k-th step: by hand, over ranks, and resumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss

from mmspeed.initialize import init_weights
from mmspeed.loop.averages import ema_decay
from mmspeed.loop.optimizers.learning_rate import learning_rate
from mmspeed.protocols import Batch, OptimizerSetting, Update
from tests.support.character_runs import ALONE, character_config, losses, rows
from tests.support.characters import CharacterConfig
from tests.support.checkpoints import differing, farthest, whole_checkpoint
from tests.support.spawn import run_ranks
from tests.support.updates import NEAR, task_of, train_updates, train_whole_and_in_parts

# Gradients are sums of the same numbers in another order; Adam divides small ones by their own size, in six steps of 1e-3.
LOSS, WEIGHTS = {"rel": 1e-6}, 1e-6
CLIPS = {"partly-frozen": "0.05", "slow": "null"}
PLAIN = OptimizerSetting()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of each task on one process."""
    folder = tmp_path_factory.mktemp("updates")
    for kind, clip in CLIPS.items():
        train_updates(str(folder), kind, (f"name={kind}", f"train.clip_norm={clip}"))
    return folder


def losses_of(model: nn.Module, other: nn.Module, batch: Batch) -> Tensor:
    """Each pack's cross-entropy by `model`, and how far it is from `other` (I,)."""
    ids_IN, targets_IN = batch["ids"][:, :-1], batch["ids"][:, 1:]
    logits_INV, other_INV = model(ids_IN).float(), other(ids_IN).float()
    loss_IN = cross_entropy(logits_INV.transpose(1, 2), targets_IN, ignore_index=0, reduction="none")
    return loss_IN.sum(1) + NEAR * mse_loss(logits_INV, other_INV, reduction="none").sum((1, 2))


class ByHand:
    """Training of six steps in plain torch: by each update's own gradients and their norm."""

    def __init__(self, config: CharacterConfig, kind: str) -> None:
        task = task_of(kind, config)
        self.config, self.updates, self.models = config, task.updates(), task.build()
        for model in self.models.values():
            if any(p.is_meta for p in model.parameters()):
                init_weights(model.to_empty(device="cpu"), config.seed)
        self.averages = {role: dict(self.trained(role)) for role in self.models}
        self.averages = {role: {n: p.detach().clone() for n, p in held.items()} for role, held in self.averages.items()}
        self.moved = dict.fromkeys(self.models, 0)
        self.optimizers = {update.role: self.optimizer(update) for update in self.updates}
        self.losses: list[float] = []
        for number, step in enumerate(task.domain.data(ALONE).steps(0, config.train.steps)):
            (batch,) = step.batches
            self.step(number, batch, step.divisors)

    def trained(self, role: str) -> Mapping[str, nn.Parameter]:
        return {name: p for name, p in self.models[role].named_parameters() if p.requires_grad}

    def optimizer(self, update: Update) -> torch.optim.AdamW:
        train, own = self.config.train, update.optimizer or PLAIN
        held = self.trained(update.role).values()
        decay = train.weight_decay if own.weight_decay is None else own.weight_decay
        groups = [
            {"params": [p for p in held if p.ndim >= 2], "weight_decay": decay},
            {"params": [p for p in held if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, betas=own.betas or train.betas, eps=own.eps or train.eps)

    def step(self, number: int, batch: Batch, divisors: Mapping[str, float | None]) -> None:
        moved: set[str] = set()
        for update in self.updates:
            if number % update.every:
                continue
            (other,) = self.models.keys() - {update.role}
            loss_I = losses_of(self.models[update.role], self.models[other], batch)
            loss = (loss_I * batch.weights_I).sum() / divisors["tokens"]  # type: ignore[operator]
            held = [*self.trained(update.role).values()]
            for p, grad in zip(held, torch.autograd.grad(loss, held), strict=True):
                p.grad = grad
            if self.config.train.clip_norm is not None:
                torch.nn.utils.clip_grad_norm_(held, self.config.train.clip_norm)
            for group in self.optimizers[update.role].param_groups:
                group["lr"] = learning_rate(number, self.config.train) * (update.optimizer or PLAIN).lr_factor
            self.optimizers[update.role].step()
            moved.add(update.role)
            if update.every == 1 and len(self.losses) == number:
                self.losses.append(loss.item())
        self.average(moved)

    def average(self, roles: set[str]) -> None:
        for role in roles:
            self.moved[role] += 1
            weight = 1 - ema_decay(self.config.train.ema_decay or 0.0, self.moved[role])
            for name, p in self.trained(role).items():
                self.averages[role][name].lerp_(p.detach(), weight)


@pytest.mark.parametrize("kind", CLIPS)
def test_a_run_is_the_updates_by_hand(home: Path, kind: str) -> None:
    """Each role moves by its own norm, and its average with it, at its own steps."""
    config = character_config(home, f"name={kind}", f"train.clip_norm={CLIPS[kind]}")
    truth = ByHand(config, kind)
    assert losses(config) == pytest.approx(truth.losses, **LOSS)
    held = whole_checkpoint(config.run_dir)
    expected: set[str] = set()
    for role in truth.models:
        prefix = "" if role == "model" else f"{role}:"
        for name, parameter in truth.trained(role).items():
            assert torch.allclose(held[f"{prefix}model.{name}"], parameter.detach(), atol=WEIGHTS, rtol=0), (role, name)
            assert torch.allclose(held[f"{prefix}ema.{name}"], truth.averages[role][name], atol=WEIGHTS, rtol=0)
            expected |= {f"{prefix}model.{name}", f"{prefix}ema.{name}"}
    assert {name for name in held if "optimizer." not in name} == expected


def test_an_update_of_every_second_step_is_reported_at_its_steps(home: Path) -> None:
    terms = [row["terms"] for row in rows(character_config(home, "name=slow"))]
    assert ["model.loss" in row for row in terms] == [True, False] * 3
    assert all("critic.loss" in row for row in terms)
    steps = {
        name: float(t)
        for name, t in whole_checkpoint(character_config(home, "name=slow").run_dir).items()
        if name.endswith(".step")
    }
    assert {value for name, value in steps.items() if name.startswith("critic:")} == {6.0}
    assert {value for name, value in steps.items() if not name.startswith("critic:")} == {3.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "kind"),
    [("fsdp", "slow"), ("ddp", "partly-frozen")],
)
def test_two_ranks_equal_one_process_and_go_on_bitwise(home: Path, kind: str, strategy: str) -> None:
    layout = (f"parallel.strategy={strategy}", f"train.clip_norm={CLIPS[kind]}")
    run_ranks(train_whole_and_in_parts, 2, str(home), kind, f"{kind}-{strategy}", layout)
    whole, parts = (character_config(home, f"name={kind}-{strategy}{part}", *layout) for part in ("", "-parts"))
    assert losses(parts) == losses(whole)
    assert differing(whole_checkpoint(parts.run_dir), whole_checkpoint(whole.run_dir)) == []
    one = character_config(home, f"name={kind}")
    assert losses(whole) == pytest.approx(losses(one), **LOSS)
    near(whole, one)


def near(actual: CharacterConfig, truth: CharacterConfig) -> None:
    """The weights and averages of both runs, of all roles."""
    state, expected = whole_checkpoint(actual.run_dir), whole_checkpoint(truth.run_dir)
    assert state.keys() == expected.keys()
    parts: Sequence[str] = sorted({name.split(".", 1)[0] for name in state if "optimizer." not in name})
    assert len(parts) == 4
    assert all(farthest(state, expected, f"{part}.") < WEIGHTS for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "kind"), [(1, "slow"), (4, "partly-frozen")])
def test_a_stopped_run_goes_on_bitwise(home: Path, kind: str, stop: int) -> None:
    name = f"name={kind}-{stop}"
    clip = f"train.clip_norm={CLIPS[kind]}"
    train_updates(str(home), kind, (name, clip, f"train.steps={stop}"))
    train_updates(str(home), kind, (name, clip))
    parts, whole = character_config(home, name), character_config(home, f"name={kind}")
    assert losses(parts) == losses(whole)
    assert differing(whole_checkpoint(parts.run_dir), whole_checkpoint(whole.run_dir)) == []
