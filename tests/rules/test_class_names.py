"""One class name, one meaning: no class of the code stands in two files."""

from __future__ import annotations

import ast
from collections import defaultdict

from tests.rules.sources import CODE, name, nodes, python_files, syntax


def test_a_class_name_stands_in_one_file() -> None:
    places: defaultdict[str, set[str]] = defaultdict(set)
    for path in python_files(*CODE):
        for node in nodes(syntax(path)):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].add(name(path))
    assert len(places) > 300
    assert {word: files for word, files in places.items() if len(files) > 1} == {}
