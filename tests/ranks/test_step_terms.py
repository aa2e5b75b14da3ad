"""Several forward passes before one backward, frozen references, late divisors and several updates: ranks against one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid

from mmspeed.initialize import init_weights
from tests.support.character_runs import character_config, losses, rows, step_packs
from tests.support.characters import CharacterModel
from tests.support.checkpoints import farthest, whole_checkpoint
from tests.support.spawn import run_ranks
from tests.support.updates import Pairs, train_updates

# A loss of about 1 is of differences of sums of about 80, whose last bit is 8e-6. Adam makes of that a share of its steps of 1e-3.
LOSS, WEIGHTS = {"rel": 1e-5}, 1e-5
LAYOUTS = {"fsdp": "parallel.strategy=fsdp", "ddp": "parallel.strategy=ddp"}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs of one process."""
    folder = tmp_path_factory.mktemp("terms")
    for kind in ("pairs", "late", "twice"):
        train_updates(str(folder), kind, (f"name={kind}",))
    return folder


def check_equal(home: Path, name: str, truth: str) -> None:
    actual, one = (character_config(home, f"name={each}") for each in (name, truth))
    assert losses(actual) == pytest.approx(losses(one), **LOSS) and len(losses(one)) == 6
    norms = [[row["grad_norm"] for row in rows(config)] for config in (actual, one)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert farthest(whole_checkpoint(actual.run_dir), whole_checkpoint(one.run_dir), "model.") < WEIGHTS


def preference(models: dict[str, nn.Module], ids_IN: Tensor) -> tuple[float, float]:
    """The mean loss of pairs of texts and themselves backwards, and how often the text is preferred."""
    margins = [
        likelihood(models[role], ids_IN) - likelihood(models[role], ids_IN.flip(1))
        for role in ("model", "reference model")
    ]
    gain_I = 0.5 * (margins[0] - margins[1])
    return -logsigmoid(gain_I).mean().item(), (gain_I > 0).float().mean().item()


@torch.no_grad()
def likelihood(model: nn.Module, ids_IN: Tensor) -> Tensor:
    """The logarithm of the probability of each row's characters (I,), without padding."""
    logits_INV: Tensor = model(ids_IN[:, :-1]).float()
    return -cross_entropy(logits_INV.transpose(1, 2), ids_IN[:, 1:], ignore_index=0, reduction="none").sum(1)


@pytest.mark.slow
def test_one_process_takes_the_loss_of_pairs_with_the_reference_that_came(home: Path) -> None:
    config = character_config(home, "name=pairs")
    domain = Pairs(config)
    models = domain.build() | {"model": CharacterModel(config.width, config.depth)}
    init_weights(models["model"], config.seed)
    ids_IN = domain.batch_of(step_packs(domain, 0))["ids"]
    loss, preferred = preference(models, ids_IN)
    first = rows(config)[0]
    assert first["loss"] == pytest.approx(loss, rel=1e-6)
    assert first["terms"]["preferred"] == pytest.approx(preferred)
    state = whole_checkpoint(config.run_dir)
    trained = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
    assert {name.split(".")[0] for name in trained} == {"embed", "blocks", "head"}  # the reference is no part of it
    models["model"].load_state_dict(trained)
    assert preference(models, ids_IN)[0] < loss


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pairs_on_two_ranks_equal_one_process(home: Path, layout: str) -> None:
    """Two forward passes of the sharded model and two of the sharded reference, then one backward; micro-batches of two."""
    overrides = (f"name=pairs-{layout}", "train.micro_batch_size=2", LAYOUTS[layout])
    run_ranks(train_updates, 2, str(home), "pairs", overrides)
    check_equal(home, f"pairs-{layout}", "pairs")


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp"])
def test_a_divisor_that_is_known_afterwards_is_the_known_one(home: Path, layout: str) -> None:
    """On one process and on two, with clipping, which all these steps meet."""
    check_equal(home, "late", "pairs")
    assert all(row["grad_norm"] > 1.0 for row in rows(character_config(home, "name=pairs")))
    run_ranks(train_updates, 2, str(home), "late", (f"name=late-{layout}", LAYOUTS[layout]))
    check_equal(home, f"late-{layout}", "pairs")


@pytest.mark.slow
def test_two_updates_of_a_step_on_two_ranks_equal_one_process(home: Path) -> None:
    run_ranks(train_updates, 2, str(home), "twice", ("name=twice-fsdp", LAYOUTS["fsdp"]))
    check_equal(home, "twice-fsdp", "twice")
    first = rows(character_config(home, "name=twice"))[1]["terms"]  # the learning rate is not 0
    assert set(first) == {"model.loss", "model.right", "again.loss", "again.right"}
    assert first["again.loss"] < first["model.loss"]
