"""Methods of tests on every domain: preferences, distillation of three roles, rollouts.

Legend: U units of both entries, pair by pair; I items; B packs, N tokens, V vocabulary.
"""

from __future__ import annotations

from math import log
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from mmspeed.compute.operators.cross_entropy import IGNORED
from mmspeed.pipelines.diffusion.predictor import conditions_of, predict
from mmspeed.protocols import Batch, LearningPart
from tests.support.checkpoints import differing, whole_checkpoint
from tests.support.covers import slow_but
from tests.support.method_runs import KINDS, assembled, config_of, moved, prepare, train
from tests.support.pairs import PairedPreferences

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
        return torch.stack([losses[a:b].sum() for a, b in zip(spans, spans[1:], strict=False) if real[a]])
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
