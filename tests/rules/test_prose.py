"""Docstrings say what a thing is or does: they open with a verb or a noun, in the words of the field."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from .sources import CODE, offenders, python_files, syntax

RIDDLE = re.compile(r"(What|Whether|How|Which|Where|Who|Whose|When|Why)\b")
DIALECT = re.compile(r"\b(anew|dear|manieth|in other company|told)\b", re.IGNORECASE)


def riddles(tree: ast.Module) -> list[str]:
    """The docstrings of a file, its classes and its functions that open with a question or speak a dialect."""
    owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, owners)]
    return [text.split("\n")[0] for text in texts if RIDDLE.match(text) or DIALECT.search(text)]


def faults(path: Path) -> list[str]:
    """The riddles of a file."""
    return riddles(syntax(path))


def test_docstrings_are_no_riddles() -> None:
    assert offenders(python_files(*CODE), faults) == {}


@pytest.mark.parametrize("text", ["Whether it is so.", "What a run needs.", "Make it anew.", "The how manieth step."])
def test_riddles_are_seen(text: str) -> None:
    assert len(riddles(ast.parse(f'"""{text}"""'))) == 1


def test_plain_docstrings_pass() -> None:
    assert riddles(ast.parse('"""Count steps."""\ndef f():\n    """The steps of a run; where none is, 0."""')) == []
