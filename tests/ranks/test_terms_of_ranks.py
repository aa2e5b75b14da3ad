"""Terms that ranks have in another order, or that only one of them has: paired by name, with the numbers of one process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mmspeed.comm import all_gather_objects
from mmspeed.errors import UserError
from mmspeed.loop.terms import TermKind, reduce_terms, terms_of_all
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.methods.finetune import Finetune
from mmspeed.pipelines.tasks import Task
from mmspeed.protocols import Ask, Batch, Method, Tensors, Term, Terms, Update, Values
from tests.support.character_runs import character_config, rows
from tests.support.characters import CharacterDomain
from tests.support.spawn import run_ranks


class Turned(Finetune):
    """The second rank names its terms in another order, and has one of its own that is logged alone."""

    def terms(self, values: Sequence[Values], before: Tensors, ask: Ask, batch: Batch, update: Update) -> Terms:
        terms = dict(super().terms(values, before, ask, batch, update))
        if dist.get_rank() == 1:
            terms = dict(reversed(terms.items()))
            terms["second"] = Term(terms["loss"].loss_I.detach(), batch.weights_I, "tokens", trains=False)
        return terms


def train(folder: str, method: Method, name: str) -> None:
    config = character_config(Path(folder), f"name={name}", "train.steps=3")
    TrainPipeline(config, task=Task(CharacterDomain(config), method)).run()


def test_terms_are_paired_by_name(tmp_path: Path) -> None:
    train(str(tmp_path), Finetune(), "one")
    run_ranks(train, 2, str(tmp_path), Turned(), "two")
    one, two = (rows(character_config(tmp_path, f"name={name}")) for name in ("one", "two"))
    assert len(one) == len(two) == 3
    for expected, row in zip(one, two, strict=True):
        assert row["loss"] == pytest.approx(expected["loss"], rel=1e-5)
        assert row["terms"]["right"] == pytest.approx(expected["terms"]["right"], abs=1e-6)
        assert 0 < row["terms"]["second"] < row["loss"]  # of the second rank's packs, over those of both


def exchange_terms() -> tuple[list[str], dict[str, float], dict[str, float], str]:
    rank = dist.get_rank()
    names = sorted(terms_of_all({"abc"[rank]: TermKind("samples", False), "both": TermKind("tokens", True)}, None))
    ones = torch.ones(2)
    mine = {f"of {rank}": Term(ones * (rank + 1), ones)} if rank else {}
    values = reduce_terms(mine, {"samples": 4.0})
    nothing = reduce_terms({}, {"samples": 4.0})
    try:
        terms_of_all({"both": TermKind("tokens", rank == 0)}, None)
        message = ""
    except UserError as error:
        message = str(error)
    return names, values, nothing, all_gather_objects(message)[rank]


def test_a_term_of_one_rank_counts_nothing_on_the_others() -> None:
    for names, values, nothing, message in run_ranks(exchange_terms, 2):
        assert names == ["a", "b", "both"]
        assert values == {"of 1": 1.0} and nothing == {}
        assert "the term 'both' is not the same on all ranks: rank 1 has" in message
