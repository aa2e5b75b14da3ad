"""Faults of runs with experts over processes: scores that are not finite, and a process that dies or stops within an exchange."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmspeed.errors import UserError
from mmspeed.log import read_metrics
from mmspeed.parallel import unwrap
from mmspeed.parallel.tensor import local
from mmspeed.pipelines import TrainCallback, TrainPipeline
from mmspeed.pipelines.training.events import StepEvent
from mmspeed.preprocess.texts.preparation import TextPreparation
from tests.ranks.test_expert_states import config
from tests.support.launched import start
from tests.support.spawn import run_ranks

RARE = ord("z")  # an id of the tokenizer of bytes that one text has
SPLIT = ("parallel.ep=2", "model.balance=sequence", "objective.balance=0.01", "train.steps=8")


class Spoils(TrainCallback):
    """Makes a rare text's embeddings NaN from the second step on, or the router of the second layer from the third."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_step(self, event: StepEvent) -> None:
        model: Any = unwrap(event.models["model"])
        if self.what == "text" and event.step == 1:
            model.embed_tokens.register_forward_hook(self._spoil)
        if self.what == "router" and event.step == 2:
            layers = dict(model.layers.named_modules())
            if "1.mlp.gate" in layers:  # the process has it
                with torch.no_grad():
                    local(layers["1.mlp.gate"].weight).fill_(math.nan)

    def _spoil(self, _: nn.Module, ids: tuple[Tensor], out_BNE: Tensor) -> Tensor:
        return out_BNE.masked_fill((ids[0] == RARE)[..., None], math.nan)


def spoiled(folder: str, *overrides: str) -> list[str]:
    """The error of each spoiled run, empty where there is none."""
    errors = []
    for what in ("text", "router"):
        run = config(Path(folder), f"name={what}-{len(overrides)}", *SPLIT[1:], *overrides)
        try:
            TrainPipeline(run, callbacks=[Spoils(what)]).run()
            errors.append("")
        except UserError as error:
            errors.append(str(error))
    return errors


def rows(home: Path, name: str) -> list[dict[str, Any]]:
    metrics = read_metrics(config(home, f"name={name}").run_dir / "metrics.jsonl")
    return [row for row in metrics if row["kind"] in ("left_out", "non_finite")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults")
    texts = ["z" if number == 9 else "rabbit " * (1 + number % 7) + str(number) for number in range(40)]
    (folder / "a.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    TextPreparation(config(folder)).build()
    return folder


def test_scores_that_are_not_finite_are_told_by_layer_and_pack(home: Path) -> None:
    alone = spoiled(str(home))
    assert run_ranks(spoiled, 2, str(home), SPLIT[0]) == [alone, alone]
    for what in ("text", "router"):
        found = rows(home, f"{what}-0")
        assert found and rows(home, f"{what}-1") == found
        assert {row["origin"] for row in found} == {"model.layers.1.mlp.gate"}
    # of a text, its pack alone, though others are in its micro-batch
    packs = [pack for row in rows(home, "text-0") if row["kind"] == "left_out" for pack in row["samples"]]
    assert packs and all("9" in pack.replace(",", "").split() for pack in packs)
    assert alone[0] == "" and "samples with a non-finite loss: documents" in alone[1]
    assert "(not finite from model.layers.1.mlp.gate on). Nothing was updated." in alone[1]


# Python runs it before its command: the last process acts in its thirtieth exchange, when rows are on their way
SITE = """
import os, signal, sys
if os.environ.get("RANK") == "1" and "train" in sys.orig_argv:
    from mmspeed.comm import exchange
    from mmspeed.moe import dispatch
    plain, calls = dispatch.start_rows, []

    def start_rows(*args):
        calls.append(args)
        if len(calls) == 30:
            os.kill(os.getpid(), signal.{signal})
        return plain(*args)

    dispatch.start_rows = start_rows
"""
ENDS = {
    "SIGKILL": ("mmspeed: error: process 1 was killed by SIGKILL",),
    "SIGSTOP": ("rank 1 (", "has given no sign of life for"),
}


def ends_in_a_line(
    home: Path, folder: Path, how: str, monkeypatch: pytest.MonkeyPatch, site: str, *overrides: str, processes: int = 2
) -> str:
    """A run whose second process ends in some way ends in one line; its name."""
    (folder / "sitecustomize.py").write_text(site.replace("{signal}", how), encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    limits = ("train.watchdog.least_seconds=5", "train.watchdog.factor=1", "train.watchdog.silent_seconds=8")
    run = config(home, f"name={folder.name}", *overrides, *limits, "train.steps=100")
    launcher, began = start(folder, run, words=("--nproc", str(processes))), time.monotonic()
    code, text = launcher.wait(200), (folder / "log.txt").read_text()
    said = [line for line in text.splitlines() if "mmspeed: " in line]
    print(f"{how}: {time.monotonic() - began:.0f} s", *said, sep="\n")
    steps = [row["step"] for row in read_metrics(run.run_dir / "metrics.jsonl") if row["kind"] == "train"]
    assert code != 0 and len(said) == 1 and max(steps) < 10, text
    assert "internal error" not in text and "Traceback" not in text, text
    for words in ENDS[how]:
        assert words in text, text
    return folder.name


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_a_process_that_ends_within_an_exchange_ends_the_run_in_a_line(
    home: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends_in_a_line(home, tmp_path, how, monkeypatch, SITE, *SPLIT)
