"""The sections of texts and tokenizers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from mmspeed.config.texts import StoredTokenizerConfig, TextsConfig, TokenizerConfig


def _texts(**values: Any) -> TextsConfig:
    return TextsConfig(**{"sources": [{"path": "a/x.jsonl"}], "cache": "cache/x", **values})


def test_sources_have_distinct_names() -> None:
    paths = [{"path": "a/x.jsonl"}, {"path": "b/x.jsonl"}, {"path": "c", "name": "x.jsonl-2"}]
    assert _texts(sources=paths).source_names == ("x.jsonl", "x.jsonl-3", "x.jsonl-2")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"sources": []}, "at least 1 item"),
        ({"sources": [{"path": "a", "weight": 1}, {"path": "b"}]}, "give every source a weight, or none"),
        ({"sources": [{"path": "a", "weight": 1}], "temperature": 2}, "use one of them"),
        ({"sources": [{"path": "a", "repeats": 2}], "temperature": 2}, "use one of them"),
        ({"sources": [{"path": "a", "name": "n"}, {"path": "b", "name": "n"}]}, "two sources have the name n"),
        ({"sources": [{"path": "a", "kolumn": "n"}]}, "Extra inputs"),
        ({"validation": 1}, "less than 1"),
    ],
)
def test_contradictions(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        _texts(**values)


def test_tokenizers_are_chosen_by_kind() -> None:
    adapter: TypeAdapter[Any] = TypeAdapter(TokenizerConfig)
    assert adapter.validate_python({"kind": "bytes"}).kind == "bytes"
    assert adapter.validate_python({"kind": "train"}).size == 8192
    assert adapter.validate_python({"kind": "transformers", "path": "x"}) == StoredTokenizerConfig(
        kind="transformers", path="x"
    )
    with pytest.raises(ValidationError, match="greater than or equal to 257"):
        adapter.validate_python({"kind": "train", "size": 10})
