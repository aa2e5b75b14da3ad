"""YAML that would grow, nest or turn around without end is refused before it is built."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from mmspeed.config import dump_config, load_config
from mmspeed.config.yaml_text import MOST_NODES, TooManyNodesError, parse_yaml
from mmspeed.errors import UserError
from tests.support.runs import small_config

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
        load_config(path)


def test_overrides_have_the_same_limit(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("name: small\n")
    with pytest.raises(UserError, match=r"override data.sources: .*may contain itself"):
        load_config(path, ["data.sources=&a [*a]"])


leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=20))
trees = st.recursive(leaves, lambda part: st.lists(part) | st.dictionaries(st.text(max_size=8), part), max_leaves=12)


@example({"\x85": None})
@example(["a\u2028b"])
@given(trees)
def test_both_parsers_read_the_same(tree: object) -> None:
    plain, wide = yaml.safe_dump(tree), yaml.safe_dump(tree, allow_unicode=True, default_flow_style=True)
    assert parse_yaml(plain) == tree
    for text in (
        plain,
        wide,
    ):  # PyYAML's own dump loses a next-line character where it writes all characters as they are
        assert parse_yaml(text) == parse_yaml(text, fast=yaml.SafeLoader)


@pytest.mark.skipif(not yaml.__with_libyaml__, reason="PyYAML without libyaml")
def test_configs_are_read_by_libyaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own parser takes ten times as long, and a resumed run reads several configs."""
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(small_config(tmp_path)))
    monkeypatch.setattr(yaml.scanner.Scanner, "fetch_more_tokens", None)
    assert load_config(path).name == "small"
    path.write_text("a: 1\na: 2\n")
    monkeypatch.undo()
    with pytest.raises(UserError, match="duplicate key 'a'"):
        load_config(path)
