"""Runs with experts over processes that go on in another layout, and what is exported from each.

A run goes through all layouts, two steps in each, in several ways to keep its memory: it loses what one process does, and takes the same
packs. What begins with trained weights and a learning rate of nearly 0 exports the bytes of one process, from any layout.
Tolerance: as in test_language_train.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from mmspeed.config import make_config
from mmspeed.log import read_metrics
from mmspeed.pipelines import TrainCallback, TrainPipeline
from mmspeed.pipelines.inference.language import export_language_run
from mmspeed.pipelines.training.events import StepEvent
from mmspeed.preprocess.texts.preparation import TextPreparation
from tests.support.runs import SAVED_ONCE
from tests.support.spawn import run_ranks

TOLERANCE = {"rel": 2e-5}
EACH = 2  # steps in a layout
Layout = tuple[int, tuple[str, ...]]  # processes, settings
Run = tuple[str, tuple[str, ...]]
Took = dict[int, list[str]]
LAYOUTS: dict[str, Layout] = {
    "one process": (1, ()),
    "shards": (2, ()),
    "ep": (2, ("parallel.ep=2",)),
    "etp": (2, ("parallel.etp=2",)),
    "ep over tp": (2, ("parallel.ep=2", "parallel.tp=2")),
    "ep x edp": (4, ("parallel.ep=2",)),
    "tp, ep of four": (4, ("parallel.tp=2", "parallel.ep=4")),
    "ep of two nodes": (4, ("parallel.ep=4", "parallel.ep_inner=2")),
    "ep x etp over tp": (4, ("parallel.tp=2", "parallel.ep=2", "parallel.etp=2")),
    "replicas of ep": (4, ("parallel.dp_replicate=2", "parallel.ep=2")),
    "ep x etp x edp": (8, ("parallel.ep=2", "parallel.etp=2")),
}
RELEASED = ("memory.release_gradients=true", "train.clip_norm=null")
WAYS: dict[str, tuple[str, ...]] = {
    "kept": (),
    "states and averages on the host": ("memory.states=host", "memory.ema=host", "memory.bucket=64KiB"),
    "gradients released": (*RELEASED, "model.shape=tiny-qwen3-30b-a3b"),
    "released to the host, offloaded": (*RELEASED, "memory.states=host", "memory.activation_policy.block=offload", "memory.offload_from=0"),
}  # fmt: skip


def config(folder: Path, *overrides: str) -> Any:
    tree = {
        "task": "language",
        "output": str(folder / "runs"),
        "texts": {"sources": [{"path": str(folder / "a.jsonl")}], "cache": str(folder / "cache"), "validation": 0.0},
        "model": {"shape": "tiny-deepseek-v3"},
        "sequence_length": 63,
        "train": {"batch_size": 4, "lr": 1e-3, "warmup_steps": 0, "schedule": "constant", "ema_decay": 0.5, "log_every": 1},
        "checkpoint": {**SAVED_ONCE},
        "device": {"kind": "cpu", "peak_tflops": 0.1},
    }  # fmt: skip
    return make_config(tree, overrides, origin="test")


def named(*words: str) -> str:
    return re.sub("[^a-z0-9]+", "-", " ".join(words))


class Taken(TrainCallback):
    """The packs of this process by step, by their documents."""

    def __init__(self) -> None:
        self.packs: Took = {}

    def on_step(self, event: StepEvent) -> None:
        self.packs[event.step] = [item.source for item in event.outcome.data.items]


def train(folder: str, runs: list[Run]) -> dict[str, Took]:
    """The packs that this process took in each of some runs, one after the other."""
    took: dict[str, Took] = {}
    for name, overrides in runs:
        taken = Taken()
        TrainPipeline(config(Path(folder), f"name={name}", *overrides), callbacks=[taken]).run()
        took.setdefault(name, {}).update(taken.packs)
    return took


def trained(home: Path, layouts: list[Layout], ways: Mapping[str, tuple[str, ...]]) -> None:
    """Go with each way through the layouts, beside one process that trains as long; compare losses and packs."""
    packs: dict[str, dict[int, set[str]]] = {}

    def go(world: int, runs: list[Run]) -> None:
        for took in run_ranks(train, world, str(home), runs) if world > 1 else [train(str(home), runs)]:
            for name, steps in took.items():
                for step, mine in steps.items():
                    packs.setdefault(name, {}).setdefault(step, set()).update(mine)

    last = f"train.steps={EACH * len(layouts)}"
    go(1, [(named(way, "whole"), (*ways[way], last)) for way in ways])
    staged = [(place, *layout) for place, layout in enumerate(layouts, 1)]
    for world, stages in groupby(staged, lambda stage: stage[1]):
        steps = [(f"train.steps={EACH * place}", *settings) for place, _, settings in stages]
        go(world, [(named(way, "parts"), (*ways[way], *each)) for way in ways for each in steps])
    for way in ways:
        whole, parts = (losses(home, named(way, name)) for name in ("whole", "parts"))
        assert len(whole) == EACH * len(layouts)
        assert parts == pytest.approx(whole, **TOLERANCE), way
        assert packs[named(way, "parts")] == packs[named(way, "whole")], way


def losses(home: Path, name: str, kind: str = "train") -> list[float]:
    """The losses of a run's steps, or of its validations."""
    rows = read_metrics(config(home, f"name={name}").run_dir / "metrics.jsonl")
    return [row["loss"] for row in rows if row["kind"] == kind]


def write_texts(folder: Path) -> None:
    texts = ["rabbit " * (1 + number * number % 43) + str(number) for number in range(160)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with texts and their cache."""
    folder = tmp_path_factory.mktemp("states")
    write_texts(folder)
    TextPreparation(config(folder)).build()
    return folder


def test_a_run_goes_from_shards_to_experts_over_processes_and_back(home: Path) -> None:
    way = "states and averages on the host"
    trained(home, [LAYOUTS[name] for name in ("shards", "ep", "ep over tp")], {way: WAYS[way]})


@pytest.mark.slow
def test_a_run_goes_through_all_layouts_in_all_ways_of_memory(home: Path) -> None:
    every, released = (
        [*LAYOUTS.values(), LAYOUTS["one process"]],
        {name: WAYS[name] for name in WAYS if "released" in name},
    )
    trained(home, every, {name: own for name, own in WAYS.items() if name not in released})
    trained(home, [each for each in every if "parallel.tp=2" not in each[1]], released)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def exported_alike(home: Path, name: str, own: tuple[str, ...], layouts: Mapping[str, Layout]) -> None:
    """Export from each layout what begins with a run of one process, or with its exported folder, and compare the bytes."""
    run_ranks(train, 1, str(home), [(name, (*own, "train.steps=3"))])
    run, base = config(home, f"name={name}").run_dir, home / f"{name}-base"
    export_language_run(run, base)  # the averages, which another run begins with
    still = ("train.steps=1", "train.lr=1e-30", "objective.balance_rate=0")
    others = (each for each in own if not each.startswith("model."))
    begins = {"run": (*own, f"train.start_from={run}"), "folder": (*others, f"model={{pretrained: {base}}}")}
    for world, some in groupby(layouts, lambda layout: layouts[layout][0]):
        runs = [(named(name, layout, begin), (*begins[begin], *still, *layouts[layout][1])) for layout in some for begin in begins]  # fmt: skip
        run_ranks(train, world, str(home), runs)
        for name, _ in runs:
            for weights in ("model", "ema"):
                out = home / f"out-{name}-{weights}"
                export_language_run(config(home, f"name={name}").run_dir, out, weights=weights)  # type: ignore[arg-type]
                assert files(out) == files(base), (name, weights)


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["tiny-deepseek-v3", "tiny-qwen3-30b-a3b"])
def test_every_layout_exports_and_takes_up_the_bytes_of_one_process(home: Path, shape: str) -> None:
    exported_alike(home, shape, (f"model.shape={shape}",), LAYOUTS)


@pytest.mark.slow
def test_bfloat16_over_processes_is_within_what_orders_of_sums_make_of_one(home: Path) -> None:
    """The router stays float32; on one process, micro-batches of 8, 4 and 2 packs sum in three orders.

    One process is sharded, too: unlike autocast, fsdp gathers all other weights in bfloat16, which moves a first loss by 6e-5.
    """
    half = (
        "device.dtype=bfloat16",
        "parallel.strategy=fsdp",
        "model.shape=tiny-qwen3-30b-a3b",
        "train.batch_size=8",
        "train.steps=20",
    )
    orders = [(f"half-{size}", (*half, f"train.micro_batch_size={size}")) for size in (8, 4, 2)]
    run_ranks(train, 1, str(home), orders)
    run_ranks(train, 4, str(home), [("half-ep", (*half, "parallel.ep=4"))])
    alone = [losses(home, name) for name, _ in orders]
    spreads = [max(each) - min(each) for each in zip(*alone, strict=True)]
    gaps = [min(abs(loss - one) for one in each) for loss, *each in zip(losses(home, "half-ep"), *alone, strict=True)]
    print(f"spread {max(spreads):.2e}, ep {max(gaps):.2e}")
    assert max(gaps) <= max(spreads)
