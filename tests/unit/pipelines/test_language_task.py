"""The language task on one process: losses and gradients against a reference by hand, exact resumption, other lengths in mid-epoch.

Legend: B packs, N tokens, V vocabulary.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mmspeed.compute.operators.cross_entropy import IGNORED
from mmspeed.config import make_config
from mmspeed.config.language import LanguageConfig
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.initialize import init_weights, materialize
from mmspeed.log import read_metrics
from mmspeed.models.language.decoder import Decoder
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.domains.base import values_of
from mmspeed.pipelines.domains.language.data import packs_of, targets_in
from mmspeed.pipelines.domains.language.domain import LanguageDomain
from mmspeed.preprocess.texts.preparation import TextPreparation
from mmspeed.protocols import RunPlace

ALONE = RunPlace(Device("cpu", 0))
LENGTHS = [5, 40, 17, 1, 64, 9, 33, 12, 28, 21, 3, 50, 7, 16, 30, 11]
VOCABULARY = 97


class MemoryTexts:
    """Documents in memory, with the attributes of a text cache; those of the second source are chats."""

    fingerprint, vocabulary, sources = "texts in memory", VOCABULARY, ["plain", "chats"]
    tokenizer_folder, begin_of_document, end_of_document = None, (), None
    info: ClassVar[dict[str, Any]] = {}
    marked = True

    def __init__(self) -> None:
        draws = np.random.default_rng(0)
        self.lengths = np.array(LENGTHS, np.uint32)
        self.documents = [draws.integers(1, VOCABULARY, length).astype(np.uint8) for length in LENGTHS]
        self.held_out = np.isin(np.arange(len(LENGTHS)), (2, 7))
        self.source = np.arange(len(LENGTHS)) % 2

    def ids(self, document: int, begin: int = 0, count: int | None = None) -> Any:
        return self.documents[document][begin:][:count]

    def ids_of(self, pieces: Any) -> Any:
        return [self.ids(*piece) for piece in pieces]

    def trained(self, document: int, begin: int = 0, count: int | None = None) -> Any:
        marks = np.arange(len(self.documents[document])) % 3 > 0
        return marks[begin:][:count] if document % 2 else None

    def targets(self, document: Any, begin: Any, count: Any) -> Any:
        rows = zip(document.tolist(), begin.tolist(), count.tolist(), strict=True)
        return np.array([targets_in(cast(Any, self), *row) for row in rows], np.int64)


class MemoryTask(LanguageDomain):
    """The task on documents in memory."""

    def open(self, place: RunPlace) -> None:
        self._cache = cast(Any, MemoryTexts())
        self._vocabulary = VOCABULARY
        self._check_sizes()


def config(folder: Path, *overrides: str) -> LanguageConfig:
    """A small run."""
    tree = {
        "task": "language",
        "output": str(folder),
        "texts": {
            "sources": [{"path": "a.txt", "name": "plain"}, {"path": "b.txt", "name": "chats"}],
            "cache": "cache",
        },
        "model": {
            "shape": "tiny-llama3-8b", "hidden_size": 16, "num_hidden_layers": 2, "intermediate_size": 24,
            "head_dim": 4,
        },
        "sequence_length": 48,
        "objective": {"z_loss": 0.01},
        "train": {
            "steps": 6, "batch_size": 3, "lr": 1e-2, "warmup_steps": 1, "log_every": 1, "ema_decay": None,
            "prefetch": 0,
        },
        "validate": {"every": 3, "report": False},
        "checkpoint": {"every": 2},
        "device": {"kind": "cpu", "peak_tflops": 0.1},
    }  # fmt: skip
    return cast(LanguageConfig, make_config(tree, overrides, origin="test"))


def opened(folder: Path, *overrides: str) -> MemoryTask:
    task = MemoryTask(config(folder, *overrides))
    task.open(ALONE)
    return task


def model_of(task: MemoryTask) -> Decoder:
    """The model with the weights that a run begins with."""
    model = cast(Decoder, task.build()["model"])
    materialize(model, torch.device("cpu"))
    init_weights(model, task.config.seed)
    return model


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_metrics(folder / "run" / "metrics.jsonl") if row["kind"] == "train"]


def by_hand(model: Decoder, task: MemoryTask, step: int) -> Tensor:
    """Mean cross-entropy and z-loss over a step's targets, document by document, from logits in full."""
    data, total, count = task.data(ALONE), torch.zeros(()), 0
    for draw in data.sampler.draws(step):
        for document, begin, length in draw.sample.pieces:
            ids_N = torch.from_numpy(task.cache.ids(document, begin, length).astype(np.int64))
            logits_NV = cast(Tensor, model(ids_N[None]).logits_BNV)[0, :-1]
            marks = task.cache.trained(document, begin, length)
            kept_N = torch.ones(length - 1, dtype=torch.bool) if marks is None else torch.from_numpy(marks[1:])
            loss_N = F.cross_entropy(logits_NV, ids_N[1:], reduction="none") + 0.01 * logits_NV.logsumexp(-1).square()
            total, count = total + loss_N[kept_N].sum(), count + int(kept_N.sum())
    return total / count


def test_a_steps_loss_and_gradients_are_those_of_documents_one_by_one(tmp_path: Path) -> None:
    task = opened(tmp_path, "train.micro_batch_size=2")
    ours, theirs = model_of(task), model_of(task)
    data = task.data(ALONE)
    steps = data.steps(1, 2)
    step = next(steps)
    total = torch.zeros(())
    for batch in step.batches:
        values = values_of(task, {"model": ours}, batch)
        terms = (values.loss, *values.own().values())
        total = total + sum(term.total() / cast(float, step.divisors[term.divisor]) for term in terms)
    total.backward()
    expected = by_hand(theirs, task, 1)
    expected.backward()
    torch.testing.assert_close(total, expected, rtol=2e-6, atol=0.0)
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None and other.grad.norm() > 0, name
        assert (mine.grad - other.grad).norm() <= 5e-6 * other.grad.norm(), name
    assert step.tokens == sum(sample.tokens for sample in packs_of(step))
    assert task.describe(step)["source_tokens"].keys() == {"plain", "chats"}


def test_a_run_learns_and_a_resumed_one_goes_on_bit_by_bit(tmp_path: Path) -> None:
    whole = config(tmp_path / "whole")
    TrainPipeline(whole, task=MemoryTask(whole)).run()
    assert len(losses(tmp_path / "whole")) == 6 and losses(tmp_path / "whole")[-1] < losses(tmp_path / "whole")[0]
    for steps in (2, 6):
        part = config(tmp_path / "part", f"train.steps={steps}")
        TrainPipeline(part, task=MemoryTask(part)).run()
    assert losses(tmp_path / "part") == losses(tmp_path / "whole")
    rows = read_metrics(tmp_path / "whole" / "run" / "metrics.jsonl")
    held_out = [row for row in rows if row["kind"] == "validation" or "perplexity" in row]
    assert held_out and held_out[-1]["sources"].keys() == {"plain", "chats"}
    assert held_out[-1]["perplexity"] == pytest.approx(np.exp(held_out[-1]["loss"]))


@pytest.mark.parametrize("change", ["sequence_length=20", "train.batch_size=2", "packing=stream"])
def test_each_token_of_an_epoch_is_trained_once_though_a_key_changes(tmp_path: Path, change: str) -> None:
    met: Counter[tuple[int, int]] = Counter()
    task = opened(tmp_path)
    first = task.data(ALONE)
    for step in first.steps(0, 2):
        count(met, packs_of(step))
    other = opened(tmp_path, change).data(ALONE)
    assert other.resume(json.loads(json.dumps(first.state(2)))) is not None
    last = next(step for step in range(2, 99) if other.locate(step).epoch)
    for step in other.steps(2, last):
        count(met, packs_of(step))
    held_out = task.cache.held_out
    assert met == {(d, place): 1 for d, length in enumerate(LENGTHS) if not held_out[d] for place in range(length)}


def count(met: Counter[tuple[int, int]], samples: list[Any]) -> None:
    """Count the tokens of packs."""
    for sample in samples:
        for document, begin, length in sample.pieces:
            met.update((document, place) for place in range(begin, begin + length))


def test_keys_and_sizes_that_do_not_fit_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="section of the task video"):
        config(tmp_path, "vae.kind=linear")
    with pytest.raises(UserError, match=r"train\.loss_frames is a key of the task video"):
        config(tmp_path, "train.loss_frames=distinct")
    with pytest.raises(UserError, match="97 ids and the model's embedding 64 rows"):
        opened(tmp_path, "model.vocab_size=64")
    with pytest.raises(UserError, match="the model's 2 heads of keys cannot be divided among the 4 devices"):
        opened(tmp_path, "parallel.tp=4")
    rows = "parallel.tp 2 does not divide the 99 rows of the embedding and the head: set model.vocab_size: 100"
    with pytest.raises(UserError, match=rows):
        opened(tmp_path, "parallel.tp=2", "model.vocab_size=99")
    with pytest.raises(UserError, match=rows):  # as `check` asks
        MemoryTask(config(tmp_path, "parallel.tp=2", "model.vocab_size=99")).outlines()
    with pytest.raises(UserError, match="is no known shape"):
        opened(tmp_path, "model.shape=tiny-lama3-8b")
    batch = opened(tmp_path).synthetic_batch(opened(tmp_path).shape, 2, ALONE)
    assert int((batch["targets"] == IGNORED).sum()) == 4


def test_a_run_of_texts_in_a_file_goes_on_with_longer_packs_and_keeps_their_tokenizer(tmp_path: Path) -> None:
    words = "a run of texts that is stopped goes on with what is left of them".split()
    rows = [json.dumps({"text": " ".join(words[number % 7 :] * (1 + number % 3))}) for number in range(60)]
    (tmp_path / "a.jsonl").write_text("\n".join(rows))
    texts = "texts={{sources: [{{path: {}}}], cache: {}, validation: 0.1}}".format(
        tmp_path / "a.jsonl", tmp_path / "cache"
    )
    before = config(tmp_path, texts, "train.steps=2", "model.shape=tiny-qwen3-0.6b")
    TextPreparation(before).build()
    TrainPipeline(before).run()
    longer = config(tmp_path, texts, "train.steps=4", "model.shape=tiny-qwen3-0.6b", "sequence_length=200")
    result = TrainPipeline(longer).run()
    assert result.finished and len(losses(tmp_path)) == 4
    folder = tmp_path / "run" / "tokenizer"
    kept, built = (
        {path.name: path.read_bytes() for path in at.iterdir()} for at in (folder, tmp_path / "cache" / "tokenizer")
    )
    assert kept == built and "tokenizer.json" in kept


STAGES = "curriculum=[{steps: 2, sequence_length: 20}, {steps: 1}, {sequence_length: 30}]"


def test_stages_of_other_lengths_train_each_token_of_an_epoch_once(tmp_path: Path) -> None:
    task = opened(tmp_path, STAGES, "train.steps=6")
    data, met = task.data(ALONE), Counter[tuple[int, int]]()
    last = next(step for step in range(99) if data.locate(step).epoch)
    lengths = []
    for step in data.steps(0, last):
        count(met, packs_of(step))
        lengths.append({sample.shape.numbers for sample in packs_of(step)})
    assert lengths[:4] == [{20}, {20}, {48}, {30}]
    held_out = task.cache.held_out
    assert met == {(d, place): 1 for d, length in enumerate(LENGTHS) if not held_out[d] for place in range(length)}
    assert [shape.numbers for shape in task.shapes()] == [20, 30, 48]


@pytest.mark.parametrize("stop", [1, 2])
def test_a_run_that_stops_in_a_stage_goes_on_bit_by_bit(tmp_path: Path, stop: int) -> None:
    """At the border of two stages, too."""
    draws = []
    for begin in (0, stop):
        data = opened(tmp_path, STAGES, "train.steps=6").data(ALONE)
        if begin:
            state = json.loads(json.dumps(opened(tmp_path, STAGES, "train.steps=6").data(ALONE).state(begin)))
            assert data.resume(state) is None or stop == 2
        draws.append([[sample.pieces for sample in packs_of(step)] for step in data.steps(stop, 6)])
    assert draws[0] == draws[1]


def test_a_stage_of_other_shares_begins_an_epoch(tmp_path: Path) -> None:
    stages = "curriculum=[{steps: 2, weights: {plain: 1}}, {weights: {plain: 1, chats: 3}}]"
    task = opened(tmp_path, stages, "train.steps=4")
    data = task.data(ALONE)
    sources = [set(task.describe(step)["source_tokens"]) for step in data.steps(0, 4)]
    assert sources[0] == sources[1] == {"plain"} and "chats" in sources[2] | sources[3]
    assert data.locate(2).epoch > data.locate(1).epoch
    for wrong, message in (
        ("[{}, {}]", "stage 1 is not the last, so it needs `steps`"),
        ("[{weights: {books: 1}}]", r"a weight for books, which is not a source \(known: plain, chats\)"),
        ("[{steps: 2}]", "leave `steps` out of the last stage"),
    ):
        with pytest.raises(UserError, match=message):
            config(tmp_path, f"curriculum={wrong}")
