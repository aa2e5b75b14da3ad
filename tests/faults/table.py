"""The table of a campaign as text, JSON and Markdown."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """The result of a case."""

    test: str
    figure: str
    passed: bool
    seconds: float


def text(rows: Sequence[Row]) -> str:
    """A line for each case."""
    width = max([len("test"), *(len(row.test) for row in rows)])
    lines = [f"{'test':{width}}  pass  {'s':>5}  figure"]
    lines += [f"{r.test:{width}}  {'yes ' if r.passed else 'FAIL'}  {r.seconds:5.0f}  {r.figure}" for r in rows]
    return "\n".join(lines)


def markdown(rows: Sequence[Row]) -> str:
    """The table of a page."""
    lines = ["| test | figure | pass |", "|---|---|---|"]
    lines += [f"| {r.test} | {r.figure.replace('|', '/')} | {'yes' if r.passed else '**no**'} |" for r in rows]
    return "\n".join(lines) + "\n"


def write(folder: Path, rows: Sequence[Row], seed: int, full: bool) -> None:
    """`faults.json` and `faults.md` in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {"seed": seed, "full": full, "rows": [asdict(row) for row in rows]}
    (folder / "faults.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (folder / "faults.md").write_text(markdown(rows), encoding="utf-8")
