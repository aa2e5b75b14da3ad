"""`mmspeed check CONFIG --parallel LAYOUT`: the report of `pipelines.selfcheck`, and its exit code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from mmspeed.errors import UserError

if TYPE_CHECKING:
    from mmspeed.config import RunConfig


def check_parallel(config: RunConfig, layout: str, others: Mapping[str, object]) -> int:
    """Print the report; 0 where the layout passed, else 1. Raises UserError for options that go with another check."""
    given = next((name for name, value in others.items() if value is not None), None)
    if given is not None:
        raise UserError(f"--parallel checks a layout and reads no data set: not with {given}")
    from mmspeed.pipelines.selfcheck.run import selfcheck

    result = selfcheck(config, layout)
    print("\n".join(result.lines()))
    return 0 if result.passed else 1
