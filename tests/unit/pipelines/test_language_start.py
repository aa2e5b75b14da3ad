"""A language run whose text cache is missing, unfinished or of other texts: completed before the first step, or refused in a line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from mmspeed.config import make_config
from mmspeed.config.language import LanguageConfig
from mmspeed.data.cache.document_blocks import Document
from mmspeed.data.cache.keys import digest
from mmspeed.data.cache.text_cache import TextCache
from mmspeed.data.cache.tokenizer_file import TokenizerFacts
from mmspeed.device import Device
from mmspeed.errors import UserError
from mmspeed.log import read_metrics
from mmspeed.pipelines import TrainPipeline
from mmspeed.pipelines.check.data_report import check_task
from mmspeed.pipelines.domains.language.data import held_out_packs
from mmspeed.pipelines.domains.language.domain import LanguageDomain
from mmspeed.pipelines.domains.language.start import open_texts
from mmspeed.pipelines.tasks import make_task, maker_of
from mmspeed.pipelines.training.opening import data_line
from mmspeed.preprocess.texts.cache_builder import TextCacheBuilder
from mmspeed.preprocess.texts.preparation import TextPreparation
from mmspeed.protocols import RunPlace
from tests.support.text_caches import write_text_cache

ALONE = RunPlace(Device("cpu", 0))


def config(home: Path, *overrides: str) -> LanguageConfig:
    """A run on forty lines."""
    path = home / "a.jsonl"
    if not path.exists():
        path.write_text("".join(json.dumps({"text": f"rabbit {n} of {n * n} flowers"}) + "\n" for n in range(40)))
        os.utime(path, (0, 0))  # the cache records the time
    tree = {
        "task": "language",
        "output": str(home / "runs"),
        "texts": {"sources": [{"path": str(path)}], "cache": str(home / "cache"), "validation": 0.1},
        "model": {
            "shape": "tiny-llama3-8b", "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24,
            "head_dim": 4,
        },
        "sequence_length": 48,
        "train": {"steps": 3, "batch_size": 4, "lr": 1e-2, "log_every": 1, "ema_decay": None, "prefetch": 0},
        "validate": {"report": False},
        "device": {"kind": "cpu", "peak_tflops": 0.1},
    }  # fmt: skip
    return cast(LanguageConfig, make_config(tree, overrides, origin="test"))


def losses(home: Path, name: str) -> list[float]:
    return [row["loss"] for row in read_metrics(home / "runs" / name / "metrics.jsonl") if row["kind"] == "train"]


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def train(home: str, name: str) -> None:
    TrainPipeline(config(Path(home), f"name={name}"), online=True).run()


def test_a_run_without_a_cache_makes_the_one_of_preprocess_and_trains_alike(tmp_path: Path) -> None:
    before, online = tmp_path / "before", tmp_path / "online"
    for home in (before, online):
        home.mkdir()
    TextPreparation(config(before)).build()
    train(str(before), "run")
    with pytest.raises(UserError, match="mmspeed preprocess"):
        TrainPipeline(config(online)).run()
    train(str(online), "run")
    assert losses(before, "run") == losses(online, "run") and len(losses(online, "run")) == 3
    assert files(before / "cache") == files(online / "cache")


def test_a_cache_of_other_texts_is_completed_or_refused(tmp_path: Path) -> None:
    def cache_of(*overrides: str, online: bool = True) -> TextCache:
        wanted = config(tmp_path, *overrides)
        return open_texts(wanted, maker_of(wanted) if online else None, ALONE)

    first = cache_of()
    assert len(first) == 40 and len(cache_of(online=False)) == 40  # as it was made
    for change, named in (
        ("texts.max_tokens=23", r"texts\.max_tokens"),
        ("texts.validation=0.5", r"texts\.validation"),
        ("seed=1", r"texts\.seed"),
        ("texts.sources.0.name=other", r"texts\.sources\.0\.name"),
    ):
        with pytest.raises(UserError, match=rf"was made with other {named}; run `mmspeed preprocess` again"):
            cache_of(change, online=False)
    assert 0 < len(cache_of("texts.max_tokens=23")) < 40  # `train` makes it
    assert maker_of(config(tmp_path, "texts.online=false")) is None
    tokenizer = f"tokenizer={{kind: transformers, path: {tmp_path / 'cache' / 'tokenizer'}}}"
    with pytest.raises(UserError, match="was made with another tokenizer"):
        cache_of("texts.max_tokens=23", tokenizer)


def test_a_tokenizer_at_another_place_is_the_same_one(tmp_path: Path) -> None:
    made_by = config(tmp_path, f"texts.cache={tmp_path / 'bytes'}")
    TextPreparation(made_by).build()
    folder = tmp_path / "here"
    shutil.copytree(tmp_path / "bytes" / "tokenizer", folder)
    TextPreparation(config(tmp_path, f"tokenizer={{kind: transformers, path: {folder}}}")).build()
    for name in ("there", "moved"):
        shutil.copytree(folder, tmp_path / name)
    main = tmp_path / "moved" / "tokenizer.json"
    main.write_text(main.read_text() + " ")
    same, other = (
        config(tmp_path, f"tokenizer={{kind: transformers, path: {tmp_path / n}}}") for n in ("there", "moved")
    )
    assert len(open_texts(same, None, ALONE)) == 40
    with pytest.raises(UserError, match=r"was made with other tokenizer\.path"):
        open_texts(other, None, ALONE)


def test_a_pack_shorter_than_an_assistants_turn_is_refused(tmp_path: Path) -> None:
    seed = config(tmp_path, f"texts.cache={tmp_path / 'bytes'}")
    TextPreparation(seed).build()
    chats = [[{"role": "user", "content": "why?"}, {"role": "assistant", "content": "so " * n}] for n in (3, 20, 1)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    template = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    changes = [
        f"texts.sources=[{{path: {tmp_path / 'chats.jsonl'}, content: chat}}]",
        "texts.validation=0.0",
        f"tokenizer={{kind: transformers, path: {tmp_path / 'bytes' / 'tokenizer'}, chat_template: '{template}'}}",
    ]
    wanted = config(tmp_path, *changes)
    task = LanguageDomain(wanted, maker_of(wanted))
    with pytest.raises(
        UserError, match=r"sequence_length: an assistant's turn in the chats has 6\d tokens and a pack 48"
    ):
        task.open(ALONE)
    assert TextCacheBuilder(wanted.texts, wanted.tokenizer, wanted.seed).run().longest_turn in range(
        60, 63
    )  # of stored blocks
    LanguageDomain(config(tmp_path, *changes, "sequence_length=70"), None).open(ALONE)


class Lengths:
    """Lengths of held-out documents of two sources."""

    def __init__(self, lengths: list[int], source: list[int], marked: bool = False) -> None:
        self.lengths, self.source = np.array(lengths, np.uint32), np.array(source)
        self.held_out, self.sources = np.ones(len(lengths), bool), ["a", "b"]
        self.marked = marked

    def trained(self, document: int, begin: int, count: int) -> Any:
        return np.arange(begin, begin + count) >= (20 if self.lengths[document] > 20 else 0)


def test_held_out_packs_are_full_and_begin_with_the_beginnings() -> None:
    documents: Any = Lengths([5, 25, 1, 4, 11, 3], [0, 0, 0, 0, 0, 1])
    packs = held_out_packs(documents, 10, 99)
    assert [pack.pieces for pack in packs["b"]] == [((5, 0, 3),)]
    assert [pack.pieces for pack in packs["a"]] == [
        ((0, 0, 5),),
        ((1, 0, 10),),
        ((3, 0, 4),),
        ((4, 0, 10),),
        ((1, 10, 10),),
        ((1, 20, 5),),
    ]
    assert sum(map(len, held_out_packs(documents, 10, 2).values())) == 3
    chats: Any = Lengths(
        [5, 25, 1, 4, 11, 3], [0, 0, 0, 0, 0, 1], marked=True
    )  # the second is answered from place 20 on
    pieces = [pack.pieces for pack in held_out_packs(chats, 10, 4)["a"]]
    assert pieces == [((0, 0, 5),), ((3, 0, 4),), ((4, 0, 10),), ((1, 20, 5),)]
    assert held_out_packs(documents, 10, 0) == {}


def test_packs_without_a_target_are_counted_by_check_and_at_the_start(tmp_path: Path) -> None:
    """Questions of four packs, and an answer in the fifth."""
    marks = np.arange(200) >= 196
    chats = [Document(np.arange(200) % 97, digest(bytes([number])), marks) for number in range(4)]
    write_text_cache(tmp_path / "cache", {"a": [[1, 2, 3], *chats]}, TokenizerFacts("ids", 97, None))
    settings = config(tmp_path, "sequence_length=40", "train.batch_size=3", "tokenizer={kind: bytes}")
    report = "\n".join(check_task(settings, task=make_task(settings)).lines())
    assert "left out of the first epoch: 16 items without a token to predict" in report
    task = LanguageDomain(settings)
    task.open(ALONE)
    data = task.data(ALONE)
    assert data_line(data, 10) == (
        "data: 5 samples, 2 steps an epoch; 10 steps are 5 epochs; 16 more without a token to predict are left out"
    )
    assert [step.divisors["tokens"] for step in data.steps(0, 2)] in ([12.0, 6.0], [10.0, 8.0])


def test_texts_that_changed_are_told_or_brought_in_and_a_run_keeps_its_tokenizer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder, trained = (
        tmp_path / "texts",
        ("tokenizer={kind: train, size: 300}", f"texts.sources.0.path={tmp_path / 'texts'}"),
    )
    folder.mkdir()
    (folder / "a.txt").write_text("a rabbit among flowers\n" * 50)

    def run(name: str, *overrides: str, online: bool = True) -> bytes:
        wanted = config(tmp_path, f"name={name}", "texts.validation=0", *trained, *overrides)
        caplog.clear()
        TrainPipeline(wanted, online=online).run()
        return (tmp_path / "runs" / name / "tokenizer" / "tokenizer.json").read_bytes()

    began = run("a")
    (folder / "b.txt").write_text("quite another zebra\n" * 50)
    run("b", online=False)
    assert "(1 new): it is trained on as it is" in caplog.text and len(TextCache(tmp_path / "cache")) == 1
    run("a", "train.steps=4")
    assert "(1 new): this run keeps its order" in caplog.text and len(TextCache(tmp_path / "cache")) == 1
    run("c")
    assert len(TextCache(tmp_path / "cache")) == 2
    shutil.rmtree(tmp_path / "cache")
    assert run("a", "train.steps=5") == began
    shutil.rmtree(tmp_path / "cache")
    assert run("d") != began
    with pytest.raises(UserError, match="runs/a was begun with another `tokenizer` than the texts in"):
        run("a", "train.steps=6")
