"""A budget on two processes: both take the same choice, whatever their clocks say, and what it takes is that of the fuller one."""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from mmspeed.config import Config, make_config
from mmspeed.config.language import LanguageConfig
from mmspeed.memory.planning.peak import peak_bytes
from mmspeed.pipelines.tasks import Task, make_task
from mmspeed.pipelines.tuning.memory_estimate import plan_memory
from mmspeed.pipelines.tuning.memory_search import MEMORY_NAME, policies_under_budget
from mmspeed.pipelines.tuning.synthetic_step import SyntheticStep
from mmspeed.preprocess import CacheBuilder
from mmspeed.protocols import MicroBatchSize, RunPlace
from tests.support.runs import losses, small_config
from tests.support.spawn import run_ranks
from tests.unit.pipelines.test_memory_choice import CPU, config_of, task_of

LAYOUTS = {
    "fsdp": ("parallel.strategy=fsdp", "train.batch_size=8"),
    "ddp": ("parallel.strategy=ddp", "train.batch_size=8"),
    "ulysses": ("parallel.strategy=fsdp", "parallel.ulysses=2", "train.batch_size=4"),
}


def train(folder: str, overrides: tuple[str, ...]) -> Any:
    """The policies of each block in the run, and what was written down."""
    from mmspeed.parallel import unwrap
    from mmspeed.pipelines import TrainPipeline
    from mmspeed.pipelines.domains.video.domain import VideoDomain
    from mmspeed.pipelines.tasks import as_task
    from mmspeed.pipelines.tuning.memory_search import MEMORY_NAME
    from mmspeed.pipelines.tuning.synthetic_step import learning_model
    from mmspeed.protocols import Models
    from tests.support.memory_counts import policies_of

    class KeepsModels(VideoDomain):
        """The video task, which keeps the models that a run trains."""

        def prepare(self, models: Models, place: RunPlace) -> None:
            self.models = models
            super().prepare(models, place)

    config = small_config(Path(folder), *overrides)
    task = KeepsModels(config)
    pipeline = TrainPipeline(config, task=task)
    pipeline.run()
    blocks = learning_model(as_task(task, config), {"model": unwrap(task.models["model"])}).blocks
    policies = [policies_of(block) for block in blocks]
    path = pipeline.folder.root / MEMORY_NAME
    return [policies, json.loads(path.read_text()) if path.exists() else None]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memory-ranks")
    CacheBuilder(small_config(folder)).run()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes_agree_and_learn_the_same(home: Path, layout: str) -> None:
    overrides = ("model.depth=8", "train.steps=2", *LAYOUTS[layout])  # blocks enough to matter
    run_ranks(train, 2, str(home), (f"name={layout}-plain", *overrides))
    # all fits: nothing is printed; and the figures say what less there may be
    [(policies, actual), _] = run_ranks(train, 2, str(home), (f"name={layout}-roomy", "memory.budget=1GB", *overrides))
    assert not any(policies) and actual["measured"]["peak_bytes"] <= 10**9
    peak, least = actual["measured"]["peak_bytes"], actual["least_bytes"]
    assert actual["plain"]["expected_peak_bytes"] == pytest.approx(peak, rel=0.2)
    budget = (peak + least) // 2
    first, second = run_ranks(train, 2, str(home), (f"name={layout}-tight", f"memory.budget={budget}", *overrides))
    assert first == second
    policies, actual = first
    assert any(policies) and policies == actual["blocks"]
    assert actual["measured"]["peak_bytes"] <= budget
    plain = losses(small_config(home, f"name={layout}-plain"))
    assert (
        losses(small_config(home, f"name={layout}-tight"))
        == plain
        == losses(small_config(home, f"name={layout}-roomy"))
    )


@pytest.mark.slow
def test_a_budget_for_none_is_reported_by_all(home: Path) -> None:
    with pytest.raises(AssertionError, match=r"more than the budget of 100\.0 kB"):
        run_ranks(train, 2, str(home), ("name=small", "memory.budget=100KB", "parallel.strategy=fsdp"))


def wide(folder: str, overrides: tuple[str, ...]) -> Config:
    """A step of which gathered weights are the largest part."""
    sharded = ("parallel.strategy=fsdp", "device.dtype=bfloat16", *overrides)
    return config_of(Path(folder), *sharded, width=512, depth=4, size=64, frames=9)


def _noted(gather: Any, sizes: list[int], output_tensor: Tensor, *args: Any, **options: Any) -> Any:
    sizes.append(output_tensor.nbytes)
    return gather(output_tensor, *args, **options)


def measured(folder: str, overrides: tuple[str, ...]) -> tuple[int, list[int]]:
    """(bytes between steps, bytes of each gather of a step)."""
    config, sizes = wide(folder, overrides), list[int]()
    call = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    trial = SyntheticStep(config, task_of(config), CPU)
    with mock.patch.object(dist, call, partial(_noted, getattr(dist, call), sizes)):
        trial.run(config.buckets[0], 1)
    return trial.state_bytes, sizes


RELEASED = ("memory.release_gradients=true", "memory.bucket=1MiB", "train.clip_norm=null", "train.skip_non_finite=0")


def test_a_plan_counts_shards_and_gathers_as_they_are(tmp_path: Path) -> None:
    """Two blocks are gathered at a time, in bfloat16; where gradients are released the weights still count whole."""
    config = wide(str(tmp_path), RELEASED)
    step = MicroBatchSize(config.buckets[0], 1, False)
    plan = plan_memory(config, task=task_of(config), step=step, world=2, options=False)
    [(between, sizes), _] = run_ranks(measured, 2, str(tmp_path), RELEASED)
    assert plan.figures.static.between == pytest.approx(between, rel=0.01)
    [(of_a_block, times), *_] = Counter(sizes).most_common()
    assert times == 2 * len(plan.figures.kinds)  # in forward and in backward
    assert plan.figures.ends - plan.alone.ends == pytest.approx(2 * of_a_block, rel=0.01)


SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": 512}


def with_experts(folder: str, overrides: tuple[str, ...]) -> LanguageConfig:
    """A decoder whose experts are the largest part of its weights."""
    tree: dict[str, Any] = {"task": "language", "name": "experts", "output": folder, "device": {"kind": "cpu"}}
    tree |= {"texts": {"sources": [{"path": "none.txt"}], "cache": "none"}, "sequence_length": 256}
    tree |= {"model": {"shape": "tiny-qwen3-30b-a3b", **SIZES}, "train": {"batch_size": 8, "ema_decay": None}}
    config = make_config(tree, ("parallel.strategy=fsdp", *overrides), origin="test")
    assert isinstance(config, LanguageConfig)
    return config


def opened(config: LanguageConfig) -> Task:
    task = make_task(config)
    task.domain.open_without_data()
    return task


def planned_and_measured(folder: str, cases: list[tuple[str, ...]]) -> list[dict[str, int]]:
    """For each case, bytes of this process between steps and at the peak, planned and measured."""
    rows = []
    for overrides in cases:
        config = with_experts(folder, overrides)
        plan = plan_memory(config, task=opened(config), world=dist.get_world_size(), options=False)
        trial = SyntheticStep(config, opened(config), CPU)
        trial.run(plan.step.shape, plan.step.items)
        peak = peak_bytes(CPU, trial.state_bytes, partial(trial.run, plan.step.shape, plan.step.items))
        between = plan.figures.static.between
        row = {
            "planned": plan.figures.plain_peak(),
            "peak": peak,
            "between": trial.state_bytes,
            "planned_between": between,
        }
        rows.append(row)
    return rows


AGAIN = "memory.activation_policy={block: recompute}"
OF_FOUR = [
    ("parallel.ep=2",),
    ("parallel.ep=2", "parallel.dp_replicate=2"),
    ("parallel.ep=4", AGAIN),
    ("parallel.ep=4", AGAIN, "memory.exchange_again=true"),
    ("parallel.ep=4", "parallel.ep_inner=2"),
    ("parallel.ep=2", "parallel.etp=2"),
    ("parallel.ep=4", "parallel.tp=2"),
    ("parallel.ep=4", "device.dtype=bfloat16", AGAIN),
]


@pytest.mark.parametrize(
    ("world", "cases"),
    [(2, [("parallel.ep=2",)]), pytest.param(4, OF_FOUR, marks=pytest.mark.slow)],
)
def test_a_plan_knows_experts_over_devices(tmp_path: Path, world: int, cases: list[tuple[str, ...]]) -> None:
    """Each process holds and gathers its own experts alone; of the peaks the mean, since loads are planned to be even."""
    by_rank = run_ranks(planned_and_measured, world, str(tmp_path), cases)
    for case, rows in zip(cases, zip(*by_rank, strict=True), strict=True):
        assert rows[0]["planned_between"] == pytest.approx(rows[0]["between"], rel=0.01), case
        assert len({row["planned"] for row in rows}) == 1
        tolerance = 0.1 if "device.dtype=bfloat16" not in case else 0.2
        assert rows[0]["planned"] == pytest.approx(sum(row["peak"] for row in rows) / world, rel=tolerance), case


def under_budget(folder: str, share: float) -> dict[str, Any]:
    """What a budget between the least and the plain peak chose, with experts on two processes."""
    config = with_experts(folder, ("parallel.ep=2",))
    place = RunPlace(CPU, rank=dist.get_rank(), world=2, dealt=2, groups=2)
    plan = plan_memory(config, task=opened(config), world=2)
    least, plain = plan.figures.least(), plan.figures.plain_peak()
    budget = f"memory.budget={int(least + share * (plain - least))}"
    config = with_experts(folder, ("parallel.ep=2", budget, f"name=share-{share}"))
    policies = policies_under_budget(config, opened(config), place)
    written = json.loads((config.run_dir / MEMORY_NAME).read_text())
    return {"policies": policies, "planned": plain, **written}


@pytest.mark.slow
def test_a_budget_knows_experts_over_devices(tmp_path: Path) -> None:
    first, second = run_ranks(under_budget, 2, str(tmp_path), 0.6)
    assert first["policies"] == second["policies"] == first["blocks"] and any(first["policies"])
    assert first["measured"]["peak_bytes"] <= first["budget_bytes"]
    assert first["expected"]["peak_bytes"] == pytest.approx(first["measured"]["peak_bytes"], rel=0.2)
    assert first["plain"]["expected_peak_bytes"] == pytest.approx(first["planned"], rel=0.2)
