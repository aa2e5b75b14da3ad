"""Text caches of several machines as one: that of a single build, byte for byte; caches that do not fit are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mmspeed.data.cache.text_cache import TextCache
from mmspeed.data.maintenance.merge import merge
from mmspeed.data.maintenance.verify import verify
from mmspeed.errors import UserError
from tests.unit.preprocess.test_texts import build, many, texts_of, write

TABLE = Path("index/documents.arrow")


@pytest.fixture
def sources(tmp_path: Path) -> list[dict[str, Any]]:
    """Two sources of a few blocks, one of which is held out in part."""
    first, second = many(tmp_path / "a.jsonl", 3_000), write(tmp_path / "b.txt", [f"line {n} of b" for n in range(500)])
    return [{"path": str(first), "name": "a"}, {"path": str(second), "name": "b"}]


def test_two_machines_make_the_cache_of_one(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    settings = {"validation": 0.2}
    _, whole = build(tmp_path / "whole", sources, **settings)
    for number, source in enumerate(sources):
        build(tmp_path / str(number), [source], **settings)
    into, parts = tmp_path / "new", [tmp_path / "0" / "cache", tmp_path / "1" / "cache"]
    report = merge(into, parts)
    assert (report.samples, report.noun, report.present) == (len(whole), "documents", 0)
    assert (into / TABLE).read_bytes() == (whole.root / TABLE).read_bytes()
    merged = TextCache(into)
    assert merged.fingerprint == whole.fingerprint
    assert 0 < merged.held_out.sum() < len(merged) and not verify(into).damage
    assert merged.info["made_for"] == whole.info["made_for"]
    assert texts_of(merged) == texts_of(whole)
    del merged  # an open cache keeps merges away
    # again, and into one of both
    assert merge(into, parts).present > 0 and (into / TABLE).read_bytes() == (whole.root / TABLE).read_bytes()
    merge(parts[0], parts[1:])
    assert (parts[0] / TABLE).read_bytes() == (whole.root / TABLE).read_bytes()
    # a build on top of it encodes nothing
    (tmp_path / "on").mkdir()
    into.rename(tmp_path / "on" / "cache")
    after, cache = build(tmp_path / "on", sources, **settings)
    assert after.reused == after.blocks > 1 and cache.fingerprint == whole.fingerprint


def test_caches_that_do_not_fit_are_named(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    roots = [tmp_path / name / "cache" for name in ("1", "2", "3", "4")]
    build(tmp_path / "1", sources[:1])
    build(tmp_path / "2", sources[1:], {"kind": "train", "size": 300})
    build(tmp_path / "3", sources[1:], validation=0.1)
    build(tmp_path / "4", [{**sources[1], "name": "a", "split": "blank_line"}])
    messages = (
        "their tokenizers differ; a tokenizer of `kind: train` is another one on other",
        r"made with other settings \(seed, validation\)",
        r"both have a source a, read in other ways \(split\)",
    )
    for root, message in zip(roots[1:], messages, strict=True):
        with pytest.raises(UserError, match=message):
            merge(tmp_path / "new", [roots[0], root])
    with pytest.raises(UserError, match="cannot be merged into itself"):
        merge(roots[0], roots[:1])
    (roots[3] / TABLE).unlink()
    with pytest.raises(UserError, match="lists no documents yet"):
        merge(tmp_path / "new", [roots[0], roots[3]])
    assert not (tmp_path / "new").exists()
