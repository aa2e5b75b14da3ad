"""Scores in columns: thresholds reject by name, missing and other fields are counted, and `check` shows what each threshold keeps."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmspeed.config.schema import DataConfig
from mmspeed.errors import UserError
from mmspeed.media.rejections import Reason
from mmspeed.preprocess.sources.discover import SourceListing, list_sources
from mmspeed.preprocess.sources.scores import ScoreLimits, number
from tests.support.listing import BUCKETS
from tests.support.media import write_tar

SCORES: list[Any] = [4.5, 5, 5.5, 7.25]


def listed(path: Path, **data: Any) -> SourceListing:
    """The listing of one source with thresholds."""
    return list_sources(DataConfig.model_validate({"sources": [{"path": str(path)}], "buckets": BUCKETS, **data}))


def rows(folder: Path, scores: list[Any]) -> list[dict[str, Any]]:
    """Rows of files that are there, with a score each."""
    folder.mkdir(exist_ok=True)
    for number_ in range(len(scores)):
        (folder / f"{number_}.mp4").write_bytes(b"media")
    return [{"video": f"{n}.mp4", "caption": f"clip {n}", "aesthetic": score} for n, score in enumerate(scores)]


def scored(folder: Path, kind: str, scores: list[Any]) -> Path:
    """Scored media in one of the formats."""
    table = rows(folder, scores)
    path = folder / f"m.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in table))
    elif kind == "csv":
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)
    elif kind == "parquet":
        pq.write_table(pa.Table.from_pylist(table), path)
    elif kind == "tar":
        members = []
        for n, row in enumerate(table):
            members += [(f"{n}.mp4", b"media"), (f"{n}.txt", b"a clip"), (f"{n}.json", json.dumps(row).encode())]
        write_tar(path, members)
    else:
        for n, row in enumerate(table):
            (folder / f"{n}.json").write_text(json.dumps(row))
        return folder
    return path


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "tar", "folder"])
def test_sources_outside_the_thresholds_are_rejected_with_the_column(kind: str, tmp_path: Path) -> None:
    path = scored(tmp_path / "x", kind, [float(score) for score in SCORES])
    listing = listed(path, min={"aesthetic": 5}, max={"aesthetic": 7})
    assert [source.name.rpartition("!")[2] for source in listing.sources] == ["1.mp4", "2.mp4"]
    below, above = sorted(listing.rejections, key=lambda rejection: rejection.source)
    assert (below.reason, above.reason) == (Reason.BELOW_MINIMUM, Reason.ABOVE_MAXIMUM)
    assert below.detail.endswith("'aesthetic' is 4.5, and data.min asks for 5")
    assert above.detail.endswith("'aesthetic' is 7.25, and data.max allows 7")
    accounted = len(listing.sources) + len(listing.rejections) + listing.caption_files + listing.ignored
    assert listing.files == accounted
    assert len(listed(path).sources) == 4


BROKEN = [None, "", "high", True, [5.0], float("nan"), "inf", {"a": 1}]


def test_a_missing_score_and_one_that_is_no_number_are_counted_with_their_words(tmp_path: Path) -> None:
    table = rows(tmp_path / "x", [*BROKEN, 6])
    del table[0]["aesthetic"]
    path = tmp_path / "x" / "m.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in table))
    listing = listed(path, min={"aesthetic": 5})
    assert [source.name for source in listing.sources] == [f"{len(BROKEN)}.mp4"]
    assert Counter(r.reason for r in listing.rejections) == {Reason.NO_SCORE: len(BROKEN)}
    details = [rejection.detail.partition(": ")[2] for rejection in listing.rejections]
    assert details == [
        "'aesthetic' is missing",
        "'aesthetic' is missing",
        "'aesthetic' is 'high', not a number",
        "'aesthetic' is a bool, not a number",
        "'aesthetic' is a list, not a number",
        "'aesthetic' is missing",
        "'aesthetic' is inf, not a finite number",
        "'aesthetic' is a dict, not a number",
    ]
    assert listing.scores is not None and listing.scores.seen["aesthetic"].missing == len(BROKEN)


def test_a_column_that_a_manifest_lacks_is_one_line(tmp_path: Path) -> None:
    for kind in ("jsonl", "csv", "parquet"):
        path = scored(tmp_path / kind, kind, [1.0, 2.0])
        with pytest.raises(UserError, match=r"no column 'aestetic'; it has 'video', 'caption', 'aesthetic'.*data\.min"):
            listed(path, min={"aestetic": 5})


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=60), st.floats(-100, 100))
def test_the_counts_of_every_threshold_are_exact(values: list[float], limit: float) -> None:
    for key in ("min", "max"):
        limits = ScoreLimits({"a": limit}, {}) if key == "min" else ScoreLimits({}, {"a": limit})
        kept = sum(limits.refusal({"a": value}) is None for value in values)
        head, quantiles, threshold, others = limits.summaries()[0].lines()
        assert head == f"  score a: of {len(values)} sources"
        assert quantiles.startswith(f"    quantiles: 0 % {min(values):.4g}")
        assert quantiles.endswith(f"100 % {max(values):.4g}")
        assert threshold == f"    data.{key} {limit:g} keeps {kept} ({kept / len(values):.0%})"
        assert others.startswith("      others: ")
        for other in others.removeprefix("      others: ").split("; "):
            shown, count = other.split(" keeps ")
            within = [v >= float(shown) if key == "min" else v <= float(shown) for v in values]
            assert int(count.split(" ")[0]) == sum(within)


def test_numbers_of_every_kind() -> None:
    assert [number(value) for value in (5, 0.25, "4.5", " -1e2 ")] == [5, 0.25, 4.5, -100]
    with pytest.raises(ValueError, match="not a number"):
        number(10**400)
