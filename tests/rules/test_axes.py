"""Axes of the device mesh are named where they are made, chosen and applied; everything else reads a parameter's layout or the mesh."""

from __future__ import annotations

import ast
import re

from mmspeed.axes import DENSE, EXPERT, NODES, AxisName

from .sources import CODE, name, nodes, offenders, python_files, syntax

# "shard" is left out: it is the name of a file in a cache too, and of a key of the config
NAMES = {axis.value for axis in (*DENSE, *EXPERT, *NODES)}
HOMES = re.compile(
    r"mmspeed/(axes|mesh)\.py"  # the table
    r"|mmspeed/(config|parallel|moe|comm|plan)/.*"  # keys; where axes are applied; the ledger and what is expected of it
    r"|mmspeed/(cli/bench_\w+|bench/\w+)\.py"  # benches compare layouts
    # messages to users about keys that do not fit, or what crosses an axis; plans compare layouts too
    r"|pipelines/(.*/)?(accelerate|check/(exchanges|verdict)|domains/language/small|report/pipeline_plan)\.py"
)


def axes_named(tree: ast.Module) -> list[str]:
    """Axes that are strings, attributes (of a config, or of AxisName) or keywords, with their lines."""
    results = []
    for node in nodes(tree):
        word: object = None
        if isinstance(node, ast.Constant):
            word = node.value
        elif isinstance(node, ast.Attribute):
            enum = isinstance(node.value, ast.Name) and node.value.id == AxisName.__name__
            word = node.attr.lower() if enum else node.attr
        elif isinstance(node, ast.keyword):
            word = node.arg
        if isinstance(word, str) and word in NAMES:
            results.append(f"line {node.lineno}: {word}")  # type: ignore[attr-defined]
    return results


def test_axes_are_named_in_their_homes_alone() -> None:
    others = [path for path in python_files(*CODE) if not HOMES.fullmatch(name(path))]
    assert offenders(others, lambda path: axes_named(syntax(path))) == {}


def test_names_of_axes_are_seen() -> None:
    code = (
        'mesh["tp"]; parallel.ring; AxisSizes(pp=2); AxisName.EP_INNER; layout_of(parameter).parts; "a ring of ranks"'
    )
    assert len(axes_named(ast.parse(code))) == 4
