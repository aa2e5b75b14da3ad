"""Docstrings, names and pages say what a thing is or does, with a verb or a noun, in the words of the field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .sources import CODE, ROOT, nodes, offenders, python_files, syntax

RIDDLE = re.compile(r"(What|Whether|How|Which|Where|Who|Whose|When|Why)\b")
DIALECT = re.compile(r"\b(anew|dear|manieth|in other company|told)\b", re.IGNORECASE)
OLD_PARTS = {
    "told",
    "made",
    "remade",
    "found",
    "given",
    "there",
    "anew",
    "dear",
}  # of names: none of them is a noun of the thing
# Fields that dataclasses write by name to JSON that users keep or parse (`doctor`, `cache verify`,
# each with --json or --output), so a new name would break what reads them.
WRITTEN = {"Diagnosis.found", "MendReport.found"}


def docstrings_of(tree: ast.Module) -> list[str]:
    """The docstrings of a file, its classes and its functions."""
    owners = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [ast.get_docstring(node) or "" for node in nodes(tree) if isinstance(node, owners)]


def riddles(tree: ast.Module) -> list[str]:
    """The first lines of docstrings that open with a question or speak a dialect."""
    return [text.split("\n")[0] for text in docstrings_of(tree) if RIDDLE.match(text) or DIALECT.search(text)]


def bound(tree: ast.AST, owner: str = "") -> Iterator[str]:
    """The names that code binds: functions, classes, arguments, variables and attributes; fields behind the name of their class."""
    for node in ast.iter_child_nodes(tree):
        inner = ""
        if isinstance(node, ast.ClassDef):
            yield node.name
            inner = f"{node.name}."
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign):
            inner = owner
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield owner + node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        yield from bound(node, inner)


def parts(name: str) -> set[str]:
    """The words of a name in snake case, camel case or capitals, in lower case."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name.rpartition(".")[2])}


def old_names(tree: ast.Module) -> list[str]:
    """The names that a file binds to a participle or an adverb in place of a noun, but for fields that files hold."""
    return [name for name in bound(tree) if parts(name) & OLD_PARTS and name not in WRITTEN]


def slips(tree: ast.Module) -> list[str]:
    """The docstrings and names of a file of tests that speak a dialect. Names of tests are sentences: they may hold a participle."""
    names = [name.rpartition(".")[2] for name in bound(tree)]
    return [text.split("\n")[0] for text in docstrings_of(tree) if DIALECT.search(text)] + [
        name for name in names if name.lower() in OLD_PARTS or DIALECT.search(name.replace("_", " "))
    ]


def dialect(page: Path) -> list[str]:
    """The words of a dialect on a page, outside of its code."""
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return [match[0] for match in DIALECT.finditer(text)]


def faults(path: Path) -> list[str]:
    """The riddles of a file."""
    return riddles(syntax(path))


def test_docstrings_are_no_riddles() -> None:
    assert offenders(python_files(*CODE), faults) == {}


@pytest.mark.parametrize("text", ["Whether it is so.", "What a run needs.", "Make it anew.", "The how manieth step."])
def test_riddles_are_seen(text: str) -> None:
    assert len(riddles(ast.parse(f'"""{text}"""'))) == 1


def test_pages_speak_no_dialect() -> None:
    assert offenders([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")], dialect) == {}


def test_a_dialect_is_seen_outside_of_code(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A cache opened anew; `told` stays.\n\n```text\nfound anew\n```\n", encoding="utf-8")
    assert dialect(page) == ["anew"]


def test_names_are_nouns_of_the_thing() -> None:
    assert offenders(python_files(*CODE), lambda path: old_names(syntax(path))) == {}


def test_tests_speak_no_dialect_and_name_things_by_nouns() -> None:
    assert offenders(python_files("tests"), lambda path: slips(syntax(path))) == {}


@pytest.mark.parametrize(
    "text",
    ["found = 1", "def f(given): ...", "class Row:\n    made: int", "def test_it_is_told(): ...", '"""Made anew."""'],
)
def test_slips_are_seen(text: str) -> None:
    assert len(slips(ast.parse(text))) == 1


def test_sentences_of_tests_pass() -> None:
    assert slips(ast.parse("def test_what_is_not_there_is_not_found(found_on_four): ...")) == []


def test_fields_that_files_hold_are_still_there() -> None:
    names = {name for path in python_files(*CODE) for name in bound(syntax(path))}
    assert names >= WRITTEN


@pytest.mark.parametrize(
    "text",
    [
        "def told_degrees(): ...",
        "class RemadeElsewhere: ...",
        "class Row:\n    told: str",
        "def f(*, found): ...",
        "def f(self):\n    self._given = 0",
        "for there_G1U in ():\n    pass",
        "TOLD = Made = 1",
    ],
)
def test_old_names_are_seen(text: str) -> None:
    assert old_names(ast.parse(text))


def test_plain_names_pass() -> None:
    assert old_names(ast.parse("gathered, thereby = f(found)\nclass Diagnosis:\n    found: str")) == []


def test_plain_docstrings_pass() -> None:
    assert riddles(ast.parse('"""Count steps."""\ndef f():\n    """The steps of a run; where none is, 0."""')) == []
