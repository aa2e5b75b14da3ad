"""Methods of tests on every domain: preferences, distillation of three roles, rollouts.

Legend: U units of both entries, pair by pair; I items; B packs, N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from mmspeed.compute.operators.cross_entropy import IGNORED
from mmspeed.errors import UserError
from mmspeed.pipelines.diffusion.predictor import conditions_of, predict
from mmspeed.pipelines.tuning.memory_estimate import plan_memory
from mmspeed.protocols import Ask, Batch, Domain, Given, LearningPart, Method, Tensors, Update
from tests.support.checkpoints import differing, whole_checkpoint
from tests.support.covers import slow_but
from tests.support.method_runs import KINDS, assembled, config_of, moved, prepare, task_of, train
from tests.support.pairs import PairedPreferences
from tests.support.preferences import Preferences
from tests.support.rollouts import Rollouts
from tests.support.teaching import Teaching

WHOLE_WAY = slow_but(KINDS, ["listed", "deepseek", "experts"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the caches of all kinds."""
    folder = tmp_path_factory.mktemp("methods")
    prepare(folder, {*KINDS})
    return folder


# -- preferences


def errors_by_hand(domain: Any, part: LearningPart, model: nn.Module, batch: Batch, entry: str) -> Tensor:
    """The error of each unit of an entry (U,), by plain torch."""
    own = batch.entry(entry)
    if domain.name == "characters":
        logits_IVN = model(own["ids"][:, :-1]).transpose(1, 2)
        return cross_entropy(logits_IVN, own["ids"][:, 1:], ignore_index=0, reduction="none").sum(1)
    if domain.name == "language":
        logits_BNV = model(own["ids"], own["bounds"], counted_BN=own["counted"]).logits_BNV
        losses = cross_entropy(
            logits_BNV.flatten(0, 1), own["targets"].flatten(), ignore_index=IGNORED, reduction="none"
        )
        spans, real = own["bounds"].tolist(), own["counted"].flatten()
        return torch.stack([losses[a:b].sum() for a, b in pairwise(spans) if real[a]])
    x0, noise = own["latents"], own["noise"]
    t_B = domain._objective(part, batch).time_from_quantile(own["quantiles"]).float()
    x_t = torch.lerp(x0, noise, t_B[:, None, None, None, None])
    predicted = predict(domain.predictor, model, x_t, t_B, conditions_of(batch, domain.sizes.strides))
    return (predicted - (noise - x0)).square().mean((1, 2, 3, 4))


def balance_by_hand(domain: Any, model: nn.Module, batch: Batch) -> Tensor:
    """The mean over both entries of the experts' auxiliary loss of all packs."""
    outputs = [
        model(own["ids"], own["bounds"], counted_BN=own["counted"]) for own in map(batch.entry, ("chosen", "rejected"))
    ]
    return domain.config.objective.balance * torch.stack([output.balance_B.sum() for output in outputs]).mean()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_preferences_are_those_of_plain_torch(folder: Path, kind: str) -> None:
    """Of a policy that has moved away from its reference, in two micro-batches."""
    method = PairedPreferences(beta=0.05 if kind in ("qwen3", "deepseek") else 0.5)  # -log p is of whole documents
    with assembled(config_of(kind, folder, "name=gradients"), method) as (task, parts, step):
        learner = parts.learners[0]
        policy, reference = moved(parts.models["model"]), parts.models["reference model"]
        batches, part = list(step.batches), task.domain.parts()[0]
        learner.run(batches, step.divisors, 1.0)
        own = {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}
        for batch in batches:
            gain_U: Any = 0.0
            for entry, sign in (("chosen", method.beta), ("rejected", -method.beta)):
                with torch.no_grad():
                    asked_U = errors_by_hand(task.domain, part, reference, batch, entry)
                gain_U = gain_U + sign * (asked_U - errors_by_hand(task.domain, part, policy, batch, entry))
            assert gain_U.detach().abs().min() > 1e-4
            loss = -logsigmoid(gain_U).sum() / step.divisors["samples" if task.domain.name == "video" else "units"]
            if kind == "deepseek":
                loss = loss + balance_by_hand(task.domain, policy, batch) / step.divisors["samples"]
            (-loss).backward()
        assert max(grad.abs().max() for grad in own.values()) > 1e-3
        left = {name: p.grad.abs().max().item() for name, p in policy.named_parameters() if p.grad is not None}
        assert max(left.values()) < 1e-6, max(left, key=left.__getitem__)
        assert all(p.grad is None for p in reference.parameters())


@pytest.mark.parametrize("kind", WHOLE_WAY)
def test_a_run_by_preferences_goes_on_bitwise_and_begins_at_log_2(folder: Path, kind: str) -> None:
    rows = train(config_of(kind, folder, "name=whole"), PairedPreferences())
    firsts = {name: value for row in reversed(rows) for name, value in row["terms"].items()}
    firsts = {name: value for name, value in firsts.items() if name.rpartition(".")[2] == "loss"}
    assert [*firsts.values()] == pytest.approx([log(2)] * len(firsts), abs=1e-7)
    assert len(firsts) == (2 if kind == "experts" else 1)
    for steps in (3, 6):
        parts = train(config_of(kind, folder, "name=parts", f"train.steps={steps}"), PairedPreferences())
    assert [row["loss"] for row in parts] == [row["loss"] for row in rows]
    folders = (config_of(kind, folder, f"name={name}").run_dir for name in ("parts", "whole"))
    assert differing(*map(whole_checkpoint, folders)) == []


# -- further models


def test_copies_of_a_run_begin_with_the_weights_of_its_start(folder: Path, tmp_path: Path) -> None:
    """The reference at the beginning and after a stop, with the averages of another run; its first loss is log 2."""
    train(config_of("soradit", folder, "name=start", "train.steps=3"), PairedPreferences())
    run = config_of("soradit", folder, "name=start").run_dir
    further = ["name=further", f"train.start_from={run}"]
    rows = train(config_of("soradit", folder, *further, "train.steps=3"), PairedPreferences())
    assert rows[0]["loss"] == pytest.approx(log(2), abs=1e-7) and rows[1]["loss"] != rows[0]["loss"]
    parts = train(config_of("soradit", folder, *further), PairedPreferences())
    whole = train(config_of("soradit", folder, "name=further-whole", further[1]), PairedPreferences())
    assert [row["loss"] for row in parts] == [row["loss"] for row in whole]


@pytest.mark.parametrize("kind", ["listed", *slow_but(["soradit", "wan", "experts"], ["wan"])])
def test_a_teacher_and_a_critic_are_asked_about_what_the_student_makes(folder: Path, kind: str) -> None:
    """Nothing pulls where critic and teacher are one; a run that is stopped goes on bitwise; the teacher stays as it is."""
    rows = train(config_of(kind, folder, "name=taught"), Teaching())
    assert rows[0]["terms"]["student.loss"] == 0 < rows[1]["terms"]["student.loss"]
    assert rows[0]["terms"]["critic.loss"] > 0
    for steps in (3, 6):
        parts = train(config_of(kind, folder, "name=taught-parts", f"train.steps={steps}"), Teaching())
    assert [row["terms"] for row in parts] == [row["terms"] for row in rows]
    state, again = (
        whole_checkpoint(config_of(kind, folder, f"name={name}").run_dir) for name in ("taught", "taught-parts")
    )
    assert differing(state, again) == []
    owners = {name.partition(":")[0] for name in state if ":" in name.partition(".")[0]}
    assert owners == {"critic"}


def test_what_an_expert_makes_is_at_times_of_its_own_range(folder: Path) -> None:
    with assembled(config_of("experts", folder), Teaching()) as (task, parts, step):
        (batch, *_), quantiles = step.batches, torch.tensor([0.0, 1 - 1e-9], dtype=torch.float64)
        for part in task.domain.parts():
            inputs = task.domain.inputs(parts.models[part.role], batch, part)
            values = task.domain.values(inputs.call(parts.models[part.role]), inputs, batch)
            made = values.made(lambda size: torch.zeros(2, *size), quantiles)
            assert made is not None and made.target is not None and (made.time >= 0.875).all() == (part.name == "high")
            again = task.domain.inputs(parts.models[part.role], batch, part, given=Given(made.x, made.time))
            with pytest.raises(ValueError, match="a prediction at a given time has no loss"):
                task.domain.values(inputs.call(parts.models[part.role]), again, batch).errors()


@pytest.mark.parametrize("kind", slow_but(["soradit", "wan"], ["soradit"]))
def test_a_rollout_by_data_has_a_ratio_of_one_before_the_first_update(folder: Path, kind: str) -> None:
    rows = train(config_of(kind, folder, "name=rolled"), Rollouts())
    assert all(row["terms"]["model.ratio_off"] == 0 < row["terms"]["again.ratio_off"] for row in rows)
    for steps in (3, 6):
        parts = train(config_of(kind, folder, "name=rolled-parts", f"train.steps={steps}"), Rollouts())
    assert [row["terms"] for row in parts] == [row["terms"] for row in rows]


# -- refusals


class Unknown(Preferences):
    """Asks a role that there is not."""

    entries = ()

    def before(self, ask: Ask, batch: Batch, update: Update) -> Tensors:
        return {"error": ask("refrence model", ask.inputs(batch, update), batch).errors()[0]}


class Elsewhere(Preferences):
    """Trains a role that there is not."""

    entries = ()

    def updates(self, domain: Domain) -> Sequence[Update]:
        return [replace(update, role="adapter") for update in super().updates(domain)]


class Alone(PairedPreferences):
    """Is given the chosen entry of each pair, and not the rejected one."""

    members = ("chosen",)


@pytest.mark.parametrize(
    ("kind", "method", "override", "message"),
    [
        ("qwen3", Teaching, "", r"method.kind: teaching needs the prediction of a model, and language gives errors$"),
        ("soradit", Alone, "", "the samples have no entry 'rejected'; they have chosen$"),
        ("deepseek", Alone, "", "the samples have no entry 'rejected'; they have chosen$"),
        ("listed", Preferences, "", "the samples have no entry 'chosen'; they have none beside their own"),
        ("listed", Unknown, "", "asks the role refrence model, and there are model, reference model; did you mean 'reference model'"),
        ("listed", Elsewhere, "", "update model trains adapter; an update trains one of the roles model, reference model"),
        ("soradit", Teaching, "memory.budget=8GB", "memory.budget chooses for one model, and the task video trains model, critic"),
        ("soradit", PairedPreferences, "memory.budget=8GB", ""),
    ],
)  # fmt: skip
def test_what_a_method_cannot_have_is_refused_by_name(
    folder: Path, kind: str, method: type[Method], override: str, message: str
) -> None:
    config = config_of(kind, folder, f"name=refused-{method.__name__}", "train.steps=1", *[override][: len(override)])
    with pytest.raises(UserError, match=message) if message else nullcontext():
        train(config, method())


def test_stages_of_a_pipeline_refuse_a_method_that_asks(folder: Path) -> None:
    with assembled(config_of("listed", folder), PairedPreferences()) as (task, parts, _):
        with pytest.raises(UserError, match=r"parallel.pp: preferences asks whole models for values"):
            task.learners(task.updates(), parts.models, "none", parts.optimizers, torch.device("cpu"), staged=True)


def test_memory_is_planned_for_one_model(folder: Path) -> None:
    task = task_of(config := config_of("soradit", folder), Preferences())
    task.domain.open_without_data()
    with pytest.raises(UserError, match="memory is planned for one model, and preferences has reference model too"):
        plan_memory(config, task=task, options=False)
