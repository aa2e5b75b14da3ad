"""YAML that would grow, nest or turn around without end is refused before it is built."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from mmspeed.config import load_run_config
from mmspeed.config.yaml_text import MOST_NODES, TooManyNodesError, parse_yaml
from mmspeed.errors import UserError

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "with its aliases it has more than 100,000 nodes"),
        ("[" * 5_000 + "]" * 5_000, "nested too deeply"),
        ("[" * 200_000, "nested too deeply"),
        ("- x\n" * (MOST_NODES + 1), "more than 100,000 nodes"),
        ("a: &a [1, *a]", "may contain itself"),
    ],
)
def test_endless_yaml_is_refused_in_a_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(TooManyNodesError, match=message):
        parse_yaml(text)
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=f"not YAML: .*({message})"):
        load_run_config(path)


def test_overrides_have_the_same_limit(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("name: small\n")
    with pytest.raises(UserError, match=r"override data.sources: .*may contain itself"):
        load_run_config(path, ["data.sources=&a [*a]"])


@pytest.mark.parametrize("text", ["", "a: 1", "a: &x [1, 2]\nb: *x", "- x\n" * 5_000, "# nothing"])
def test_other_yaml_is_read_as_always(text: str) -> None:
    assert parse_yaml(text) == yaml.safe_load(text)
