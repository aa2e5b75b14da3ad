"""Runs of the language task on two processes against one: three steps with validation, for each way to share them.

Tolerance: sums over processes are taken in another order, float32 rounding, grown over three steps of Adam.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmspeed.config import make_config
from mmspeed.data.cache.document_blocks import Document
from mmspeed.data.cache.keys import digest
from mmspeed.data.cache.tokenizer_file import TokenizerFacts
from mmspeed.log import read_metrics
from mmspeed.preprocess.texts.preparation import TextPreparation
from tests.support.covers import slow_but
from tests.support.runs import SAVED_ONCE
from tests.support.spawn import run_ranks
from tests.support.text_caches import write_text_cache

TOLERANCE = {"rel": 2e-5}
LAYOUTS = {
    "fsdp": (),
    "ulysses": ("parallel.ulysses=2",),
    "ring": ("parallel.ring=2",),
    "tp": ("parallel.tp=2",),
}
MODELS = {
    "dense": ("model.shape=tiny-qwen3-8b", "model.num_nextn_predict_layers=1"),
    "latent": ("model.shape=tiny-deepseek-v3",),
}


def config(folder: Path, *overrides: str) -> Any:
    tree = {
        "task": "language",
        "name": "run",
        "output": str(folder / "runs"),
        "texts": {"sources": [{"path": str(folder / "a.jsonl")}], "cache": str(folder / "cache"), "validation": 0.1},
        "sequence_length": 95,  # odd: a pack's tokens never divide
        "train": {"steps": 3, "batch_size": 3, "lr": 1e-3, "warmup_steps": 0, "log_every": 1},
        "validate": {"every": 3, "samples": 4},
        "checkpoint": {**SAVED_ONCE},
        "device": {"kind": "cpu", "peak_tflops": 0.1},
    }
    return make_config(tree, overrides, origin="test")


def train(folder: str, runs: dict[str, tuple[str, ...]]) -> None:
    from mmspeed.pipelines import TrainPipeline

    for name, overrides in runs.items():
        TrainPipeline(config(Path(folder), f"name={name}", *overrides)).run()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts of 1 to 300 tokens and their cache."""
    folder = tmp_path_factory.mktemp("texts")
    texts = ["rabbit " * (1 + number * number % 43) + str(number) for number in range(60)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ["x", *texts]))
    TextPreparation(config(folder)).build()
    return folder


def rows(folder: Path, name: str) -> list[tuple[float, int]]:
    """(loss, tokens) of each step, and of the validation."""
    actual = read_metrics(config(folder, f"name={name}").run_dir / "metrics.jsonl")
    kept = [row for row in actual if row["kind"] in ("train", "validation")]
    assert {row["kind"] for row in kept} == {"train", "validation"}
    return [(row["loss"], row["tokens"]) for row in kept]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_two_processes_lose_what_one_does(home: Path, model: str) -> None:
    run_ranks(train, 1, str(home), {f"{model}-one": MODELS[model]})
    run_ranks(train, 2, str(home), {f"{model}-{name}": (*MODELS[model], *LAYOUTS[name]) for name in LAYOUTS})
    one = rows(home, f"{model}-one")
    assert len(one) >= 4
    for name in LAYOUTS:
        actual = rows(home, f"{model}-{name}")
        assert [tokens for _, tokens in actual] == [tokens for _, tokens in one], name
        assert [loss for loss, _ in actual] == pytest.approx([loss for loss, _ in one], **TOLERANCE), name


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["fsdp", "ring"])
def test_a_run_of_one_process_goes_on_with_two(home: Path, layout: str) -> None:
    """From its checkpoint, in another layout, with the losses of a run that never stopped."""
    settings = (*MODELS["latent"], "train.schedule=constant", "train.steps=4", "checkpoint.every=2")
    run_ranks(train, 1, str(home), {f"{layout}-never": settings, f"{layout}-stopped": (*settings, "train.steps=2")})
    run_ranks(train, 2, str(home), {f"{layout}-stopped": (*settings, *LAYOUTS[layout])})
    never, stopped = rows(home, f"{layout}-never"), rows(home, f"{layout}-stopped")
    assert [tokens for _, tokens in stopped][-2:] == [tokens for _, tokens in never][-2:]
    assert [loss for loss, _ in stopped][-2:] == pytest.approx([loss for loss, _ in never][-2:], **TOLERANCE)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Chats of which two in three have a long question and an answer of a few tokens: some packs have no target, others one or two."""
    folder = tmp_path_factory.mktemp("chats")
    draws = np.random.default_rng(0)
    documents = []
    for number in range(24):
        question, answer = (150 + number, 1 + number % 4) if number % 3 else (15, 40)
        marks = np.arange(question + answer) >= question
        documents.append(Document(draws.integers(0, 256, len(marks)), digest(bytes([number])), marks))
    write_text_cache(folder / "cache", {"a": documents}, TokenizerFacts("ids", 256, None))
    return folder


# alone, the same loss and norm as one process; the first rank, or half of a pack, may have no target at all
@pytest.mark.parametrize("layout", slow_but(["ddp", *LAYOUTS], ["ddp", "ulysses"]))
def test_two_processes_with_few_targets_lose_what_one_does(chats: Path, layout: str) -> None:
    settings = (
        "sequence_length=64",
        "train.batch_size=2",
        "train.steps=5",
        "model.shape=tiny-qwen3-8b",
        "train.lr=0.01",
    )
    if not config(chats, "name=one").run_dir.exists():
        run_ranks(train, 1, str(chats), {"one": settings})
    ways = LAYOUTS | {"ddp": ("parallel.strategy=ddp",)}
    run_ranks(train, 2, str(chats), {layout: (*settings, *ways[layout])})
    steps = {}
    for name in ("one", layout):
        metrics = read_metrics(config(chats, f"name={name}").run_dir / "metrics.jsonl")
        steps[name] = [(row["loss"], row["grad_norm"], row["weight"]) for row in metrics if row["kind"] == "train"]
    for ours, alone in zip(steps[layout], steps["one"], strict=True):
        assert ours == pytest.approx(alone, **TOLERANCE) and alone[0] > 1  # no step is without a target
