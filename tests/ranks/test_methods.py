"""Methods over ranks: preferences, distillation and rollouts are those of one process; pipeline stages take those that ask no model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mmspeed.errors import UserError
from mmspeed.pipelines.methods.finetune import Finetune
from mmspeed.protocols import Method
from tests.support.method_runs import KINDS, config_of, prepare, train
from tests.support.pairs import PairedPreferences
from tests.support.rollouts import Rollouts
from tests.support.spawn import run_ranks
from tests.support.teaching import Teaching

LAYOUTS = {
    "ddp": ("parallel.strategy=ddp",),
    "fsdp": ("parallel.strategy=fsdp",),
    "ulysses": ("parallel.ulysses=2", "parallel.strategy=fsdp"),
    "stages": ("parallel.pp=2",),
}
METHODS: dict[str, Method] = {
    "preferences": PairedPreferences(beta=0.05),
    "teaching": Teaching(),
    "rollouts": Rollouts(),
    "finetune": Finetune(),
}
SERVED = {
    "preferences": [*KINDS],
    "teaching": ["listed", "soradit", "wan", "experts"],
    "rollouts": ["soradit", "wan"],
    "finetune": ["qwen3", "wan"],
}
CASES = [
    (method, kind, layout)
    for method, kinds in SERVED.items()
    for kind in kinds
    for layout in LAYOUTS
    if (kind, layout) != ("listed", "ulysses")  # no token of it is split
    and (layout == "stages") == (method == "finetune")
]
COVER = [
    ("preferences", "listed", "fsdp"),
    ("preferences", "qwen3", "ulysses"),
    ("preferences", "deepseek", "fsdp"),
    ("preferences", "soradit", "ddp"),
    ("preferences", "wan", "ulysses"),
    ("preferences", "experts", "fsdp"),
    ("teaching", "listed", "ddp"),
    ("teaching", "wan", "fsdp"),
    ("teaching", "soradit", "ulysses"),
    ("rollouts", "soradit", "fsdp"),
    ("finetune", "qwen3", "stages"),
    ("finetune", "wan", "stages"),
]
Numbers = list[tuple[float, float, dict[str, float]]]  # of steps: loss, norm, terms


def numbers(folder: str, method: str, kind: str, layout: str) -> Numbers:
    """The numbers of three steps, on however many ranks call this."""
    name = f"name={method}-{layout or 'alone'}"
    config = config_of(kind, Path(folder), name, "train.steps=3", "validate.samples=0", *LAYOUTS.get(layout, ()))
    return [(row["loss"], row["grad_norm"], row.get("terms", {})) for row in train(config, METHODS[method])]


def of_cases(folder: str, cases: list[tuple[str, str, str]]) -> list[Numbers]:
    return [numbers(folder, *case) for case in cases]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the caches of all kinds."""
    folder = tmp_path_factory.mktemp("methods")
    prepare(folder, {*KINDS})
    return folder


@pytest.mark.parametrize(
    "cases", [COVER, pytest.param([case for case in CASES if case not in COVER], marks=pytest.mark.slow)], ids=len
)
def test_methods_on_two_processes_are_those_of_one(folder: Path, cases: list[tuple[str, str, str]]) -> None:
    alone = {case: numbers(str(folder), *case, "") for case in sorted({case[:2] for case in cases})}
    for (method, kind, layout), of_layout in zip(cases, run_ranks(of_cases, 2, str(folder), cases)[0], strict=True):
        for own, row in zip(of_layout, alone[method, kind], strict=True):
            for (where, number), expected in zip(flat(own), flat(row), strict=True):
                # sums in another order, grown over three steps of AdamW; a policy's gains of about 1 cancel in its loss
                near = pytest.approx(expected[1], rel=1e-5, abs=1e-5 if method == "rollouts" else 1e-6)
                assert number == near, (method, kind, layout, where)


def flat(row: tuple[float, float, dict[str, float]]) -> list[tuple[str, float]]:
    return [("loss", row[0]), ("norm", row[1]), *sorted(row[2].items())]


def refused(folder: str) -> dict[str, str]:
    """What is said to each method that asks whole models for values, in a pipeline."""
    said = {}
    for method in ("preferences", "teaching", "rollouts"):
        with pytest.raises(UserError) as caught:
            numbers(folder, method, SERVED[method][-1], "stages")
        said[method] = str(caught.value)
    return said


def test_methods_that_ask_whole_models_are_refused_in_stages(folder: Path) -> None:
    for said in run_ranks(refused, 2, str(folder)):
        print(said)
        assert all(re.fullmatch(r"parallel\.pp: .*: leave pp at 1", words) for words in said.values()), said
