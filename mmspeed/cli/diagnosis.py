"""A line of what `mmspeed doctor` finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warn", "missing"]


@dataclass(frozen=True)
class Diagnosis:
    """One line of the diagnosis: `missing` stops mmspeed from working, `warn` makes something slow or impossible."""

    name: str
    state: State
    found: str
    advice: str = ""
