"""Waits in `metrics.jsonl` of runs on two processes: where one rank pauses before a place, the other waits there, and nowhere else."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mmspeed.log import read_metrics
from mmspeed.pipelines import TrainPipeline
from tests.support.spawn import run_ranks
from tests.unit.pipelines.test_expert_balance import EXPERTS
from tests.unit.pipelines.test_language_task import MemoryTask, config

PAUSE, STEPS = 0.1, 5
# place: the module that pauses, by layout
CASES: dict[str, dict[str, str]] = {
    "experts": {"parallel.ep=2": "layers.1.mlp.gate"},
    "attention": {"parallel.ulysses=2": "layers.0.self_attn"},
    "end": {"parallel.strategy=ddp": "embed_tokens", "parallel.strategy=fsdp": "embed_tokens"},
}


def pause(*_: Any) -> None:
    time.sleep(PAUSE)


class PausingTask(MemoryTask):
    """The task on documents in memory. On rank 1 a module begins late in training; embeddings get their gradient late."""

    module = ""

    def build(self) -> dict[str, nn.Module]:
        models = super().build()
        part = models["model"].get_submodule(self.module)
        if os.environ["RANK"] == "1" and isinstance(part, nn.Embedding):
            part.register_forward_hook(lambda _, __, out: self.late(out))
        elif os.environ["RANK"] == "1":
            part.register_forward_pre_hook(lambda part, _: pause() if part.training else None)
        return models

    def late(self, out: Tensor) -> None:
        if out.requires_grad:
            out.register_hook(pause)


def waits(folder: str) -> dict[str, dict[str, list[float]]]:
    """Medians of the rows of a run for each layout."""
    results = {}
    sizes = (*EXPERTS, f"train.steps={STEPS}", "train.micro_batch_size=4", "model.num_nextn_predict_layers=0")
    for layout, module in (each for of in CASES.values() for each in of.items()):
        home = Path(folder) / layout
        settings = config(home, *sizes, layout)
        task = PausingTask(settings)
        task.module = module
        TrainPipeline(settings, task=task).run()
        rows = [row["waits"] for row in read_metrics(home / "run" / "metrics.jsonl") if row["kind"] == "train"]
        results[layout] = {
            place: [statistics.median(row[place][rank] for row in rows) for rank in range(2)] for place in rows[-1]
        }
    return results


def test_a_rank_that_pauses_is_waited_for_where_it_pauses(tmp_path: Path) -> None:
    results, other = run_ranks(waits, 2, str(tmp_path))
    assert results == other
    for place, layouts in CASES.items():
        for layout in layouts:
            of = results[layout]
            fast, slow = of[place]
            assert set(of) == {place, "end"} and 0.7 * PAUSE < fast < 2 * PAUSE and slow < fast / 2, (layout, of)
            assert all(max(seconds) < fast / 2 for name, seconds in of.items() if name != place), (layout, of)
