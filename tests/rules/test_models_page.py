"""docs/models.md tells the sizes that the code has."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmspeed.config.model import SIZES
from tests.support.model_sizes import size_rows


@pytest.mark.parametrize("column", ["factorised", "full"])
def test_the_table_of_sizes_is_true(root: Path, column: str) -> None:
    lines = (root / "docs" / "models.md").read_text(encoding="utf-8").splitlines()
    cells = {
        row[0]: row
        for row in ([c.strip() for c in line.strip("|").split("|")] for line in lines if line.startswith("|"))
    }
    for row in size_rows(column):  # type: ignore[arg-type]
        shown = cells[row.name]
        assert shown[1:4] == [str(SIZES[row.name][name]) for name in ("width", "depth", "heads")]
        assert shown[4] == f"{row.parameters / 1e6:,.1f} M"
        assert shown[5 if column == "factorised" else 6] == f"{row.gflops / 1e3:,.2f}"
