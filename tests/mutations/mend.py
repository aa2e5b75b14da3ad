"""Gives faults whose statements were rewritten their nearest like place: the same operator in the same function, wherever that is now."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from .draw import source_files, write
from .faults import LISTS, ROOT, Fault, LostAnchorError, apply, load
from .operators import sites

_LIKE_ENOUGH = 0.6  # of the text


def mend(faults: Sequence[Fault]) -> Iterator[str]:
    """Write the drawn list with places for the faults that lost theirs; a message for each. Faults by hand are only named."""
    moved: dict[str, Fault] = {}
    for fault in faults:
        try:
            apply(fault, (ROOT / fault.file).read_text(encoding="utf-8"))
        except (LostAnchorError, FileNotFoundError) as error:
            nearest = _nearest(fault) if fault.drawn else None
            if nearest is None:
                yield f"mend by hand: {error}"
                continue
            moved[fault.id] = nearest
            yield f"{fault.id}: {nearest.file}, {nearest.function}: `{nearest.before}` in place of `{fault.before}`"
    if moved:
        stored = json.loads(LISTS["drawn"].read_text(encoding="utf-8"))
        stored.pop("faults")
        write(LISTS["drawn"], stored, [moved.get(fault.id, fault) for fault in load(LISTS["drawn"])])


def _nearest(fault: Fault) -> Fault | None:
    """The most similar change by the same operator, in the function of the same name; None where nothing is like it."""
    name = fault.function.rpartition(".")[2]
    own = [fault.file] if (ROOT / fault.file).exists() else []
    for files in (own, source_files() if name else []):
        candidates = []
        for file in files:
            source = (ROOT / file).read_text(encoding="utf-8")
            if not name or f"def {name}(" in source or f"class {name}" in source:
                alike = (site for site in sites(file, source) if site.kind == fault.kind)
                candidates += [site for site in alike if site.function.rpartition(".")[2] == name]
        likeness = {site: _likeness(fault, site) for site in candidates}
        best = max(likeness, key=lambda site: likeness[site], default=None)
        if best is not None and likeness[best] >= _LIKE_ENOUGH:
            return replace(best, id=fault.id)
    return None


def _likeness(one: Fault, other: Fault) -> float:
    pairs = ((one.statement, other.statement), (one.before, other.before), (one.function, other.function))
    return sum(difflib.SequenceMatcher(None, a, b).ratio() for a, b in pairs) / len(pairs)
