"""docs/randomness.md names every purpose that the code draws for."""

from __future__ import annotations

import ast
import re
from pathlib import Path

# functions of mmspeed.rng, with the place of the purpose among their arguments
DRAWS = {"normal": 2, "normal_part": 4, "permutation": 2, "stream": 1, "symmetric": 3, "uniform": 1}


def drawn_in(path: Path) -> set[str]:
    """The purposes of the draws in a file that are written out in it."""
    results = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            place = DRAWS.get(name, 99)
            if (
                name == "normal" and node.args and isinstance(node.args[0], ast.Constant)
            ):  # a file's own function, as of a self-check
                place = 0
            if len(node.args) > place and isinstance(purpose := node.args[place], ast.Constant):
                results.add(purpose.value)
    return results


def test_the_table_lists_the_purposes_of_the_code(root: Path) -> None:
    files = [
        path for floor in ("mmspeed", "models", "pipelines", "preprocess") for path in (root / floor).rglob("*.py")
    ]
    drawn = {purpose for path in files for purpose in drawn_in(path) if isinstance(purpose, str)}
    rows = re.findall(r"^\| (`[^|]+) \|[^|]*\|[^|]*\|$", (root / "docs" / "randomness.md").read_text(), re.M)
    listed = {purpose for names in rows for purpose in re.findall(r"`([^`]+)`", names)}
    assert {"noise", "init", "val_split"} <= drawn and drawn == listed
