"""The commands init, check and preprocess go through the preparation of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field

from mmspeed.cli.app import run
from mmspeed.config import RunConfig
from mmspeed.config.tasks import TASKS, TaskEntry
from mmspeed.config.texts import BytesTokenizerConfig, TextsConfig, TokenizerConfig
from mmspeed.data.cache.text_cache import TextCache
from mmspeed.errors import UserError
from mmspeed.preprocess.texts.columns import ALPACA, COMPLETION
from mmspeed.preprocess.texts.preparation import TextPreparation


class WordsConfig(RunConfig):
    """A run of texts."""

    order: ClassVar[tuple[str, ...]] = ("task", "name", "texts", "tokenizer")
    task: Literal["words"] = Field("words", description="What is trained.")
    texts: TextsConfig = Field(description="Texts.")
    tokenizer: TokenizerConfig = Field(BytesTokenizerConfig(), description="Tokenizer.")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    entry = TaskEntry(
        f"{__name__}:none", f"{__name__}:WordsConfig", "mmspeed.preprocess.texts.preparation:TextPreparation"
    )
    monkeypatch.setitem(TASKS, "words", entry)
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": ""}\n{"text": "two"}\n')
    tree = {
        "task": "words",
        "name": "w",
        "texts": {"sources": [{"path": str(tmp_path / "a.jsonl")}], "cache": str(tmp_path / "cache")},
        "tokenizer": {"kind": "bytes"},
    }
    path = tmp_path / "w.yaml"
    path.write_text(json.dumps(tree))
    return path


def test_preprocess_builds_the_cache(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["preprocess", str(config)]) == 0
    printed = capsys.readouterr().out
    assert "2 documents, 8 tokens" in printed and "rejected, empty: 1, such as" in printed
    assert len(TextCache(tmp_path / "cache")) == 2
    assert run(["cache", "verify", str(tmp_path / "cache")]) == 0


def test_check_counts_rows() -> None:
    texts = TextsConfig(sources=({"path": "/nothing/*.jsonl"},), cache="-")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no texts there"):
        TextPreparation(WordsConfig(name="w", texts=texts)).check()


def test_check_names_sources_without_documents(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n{"text": 3}\n')
    (tmp_path / "b.jsonl").write_text("{}\n")
    sources = ({"path": str(tmp_path / "a.jsonl")}, {"path": str(tmp_path / "b.jsonl")})
    texts = TextsConfig(sources=sources, cache="-")  # type: ignore[arg-type]
    check = TextPreparation(WordsConfig(name="w", texts=texts)).check()
    assert check.problems == ["source b.jsonl holds no document"]
    assert "source a.jsonl: 1 document, 3 B, about 3 tokens (bytes)" in check.lines()
    assert any(line.startswith("  rejected, not_a_string: 1") for line in check.lines())


@pytest.mark.parametrize(
    ("row", "keys"),
    [
        ({"text": "x"}, {}),
        ({"messages": [{"role": "user", "content": "x"}]}, {"content": "chat", "column": "messages"}),
        ({"conversations": [{"from": "human", "value": "x"}]}, {"content": "chat", "column": "conversations"}),
        ({"instruction": "x", "input": "", "output": "y", "text": "x y"}, {"content": "chat", "turns": ALPACA}),
        ({"prompt": "x", "completion": "y"}, {"content": "chat", "turns": COMPLETION}),
        ({"ids": [1]}, {"content": "ids", "column": "ids"}),
        ({"content": "x"}, {"content": "text", "column": "content"}),
    ],
)
def test_a_first_config_takes_the_column_that_is_there(tmp_path: Path, row: Any, keys: dict[str, str]) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    model = "qwen3-0.6b" if keys.get("content") == "chat" else None
    values, lines = TextPreparation.fitted_values("w", "a.jsonl", tmp_path, model)
    assert values["texts"]["sources"] == [{"path": "a.jsonl", **keys}] and lines
    if model is not None and "text" not in row:
        with pytest.raises(UserError, match=r"its rows are chats .*--model Qwen/Qwen3-0\.6B"):
            TextPreparation.fitted_values("w", "a.jsonl", tmp_path)
    (tmp_path / "a.jsonl").write_text("{}\n")
    columns = "text, messages, conversations, instruction and output, prompt and completion, ids, content"
    with pytest.raises(UserError, match=f"none of the columns {columns}"):
        TextPreparation.fitted_values("w", "a.jsonl", tmp_path)


def test_the_texts_of_the_package_are_split_by_work(tmp_path: Path) -> None:
    values, _ = TextPreparation.fitted_values("w", None, tmp_path)
    texts = TextsConfig(**{**values["texts"], "cache": str(tmp_path / "cache")})
    config = WordsConfig(name="w", texts=texts)
    assert TextPreparation(config).check().problems == []
    TextPreparation(config).build()
    cache = TextCache(tmp_path / "cache")
    assert cache.held_out.tolist() == [False] * 9 + [True] * 2
    assert cache.sources == ["train", "validation"]
    assert cache.lengths.sum() == 1_678_597 + 11
    assert cache.tokenizer().decode(cache.ids(9, 0, 17).tolist()) == "PARADISE REGAINED"
