"""A fault: one change of one statement, anchored by the function's qualified name and the statement's own text.

Statements and expressions are compared as syntax trees, so that neither moved lines nor another formatting loses an anchor. An anchor
that no longer applies raises `LostAnchorError`, which names the nearest statement.
"""

from __future__ import annotations

import ast
import difflib
import functools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LISTS = {"drawn": HERE / "drawn.json", "by hand": HERE / "by_hand.json"}
_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")
_LEFT_OUT = (
    "decorator_list",
    "returns",
    "annotation",
    "type_params",
    "type_comment",
)  # of what is looked at in a statement
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class LostAnchorError(Exception):
    """A fault whose place is not in the sources any more."""


@dataclass(frozen=True)
class Fault:
    """One change.

    `function`: qualified, "" at the top of the file. `statement`: of a compound one its first line. `before`: the `nth` such expression in
    it (from 0), or the same text as `statement` for the whole, with its body. `occurrence`: of equal statements in the function.
    """

    id: str
    kind: str  # of a drawn fault the operator, of another what it stands for
    file: str
    function: str
    statement: str
    before: str
    after: str
    occurrence: int = 0
    nth: int = 0

    @property
    def drawn(self) -> bool:
        """True for a fault of the seeded list."""
        return self.id.startswith("d")

    def stored(self) -> dict[str, Any]:
        """The fault as it stands in a list: without what is as usual."""
        return {name: value for name, value in asdict(self).items() if value or name not in ("occurrence", "nth")}


def load(path: Path) -> list[Fault]:
    """The faults of one list."""
    return [Fault(**row) for row in json.loads(path.read_text(encoding="utf-8"))["faults"]]


def all_faults() -> list[Fault]:
    """The faults of both lists."""
    return [fault for path in LISTS.values() for fault in load(path)]


@dataclass(frozen=True)
class Place:
    """A statement of a file. `owner`: the qualified name of the function or class that it belongs to."""

    owner: str
    node: ast.stmt

    @property
    def head(self) -> str:
        """The statement's text; of a compound one its first line."""
        return ast.unparse(head_of(self.node))


def head_of(node: ast.stmt) -> ast.stmt:
    """A statement without its body, decorators and annotations."""
    fields = {name: value for name, value in ast.iter_fields(node) if name not in _LEFT_OUT}
    compound = hasattr(node, "body")
    for name in _BODIES:
        if compound and name in fields:
            fields[name] = []
    if isinstance(node, _FUNCTIONS):
        fields |= {"decorator_list": [], "returns": None}
    if isinstance(node, ast.AnnAssign):
        fields["annotation"] = node.annotation
    return ast.copy_location(type(node)(**fields), node)


def places(tree: ast.Module) -> Iterator[Place]:
    """Every statement with the function or class that it stands in; a function's first line belongs to the function itself."""
    yield from _places(tree.body, "")


@functools.lru_cache(maxsize=4)
def _places_of(source: str) -> tuple[Place, ...]:
    return tuple(places(ast.parse(source)))


def _places(body: list[Any], owner: str) -> Iterator[Place]:
    for node in body:
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            name = f"{owner}.{node.name}" if owner else node.name
            if isinstance(node, _FUNCTIONS):
                yield Place(name, node)
            yield from _places(node.body, name)
            continue
        if isinstance(node, ast.stmt) and not isinstance(node, (ast.Try, ast.Match)):
            yield Place(owner, node)
        for field in _BODIES:
            inner = getattr(node, field, [])
            if isinstance(inner, list):
                yield from _places(inner, owner)


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions of a statement, without its body and annotations, outer before inner."""
    for name, value in ast.iter_fields(node):
        if name in _LEFT_OUT or (isinstance(node, ast.stmt) and name in _BODIES):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                if isinstance(child, ast.expr):
                    yield child
                yield from expressions(child)


def same(one: ast.AST, other: ast.AST) -> bool:
    """True for equal trees, wherever they stand."""
    return ast.dump(one) == ast.dump(other)


def statement_of(text: str) -> ast.stmt:
    """The tree of a statement's text, or of its first line."""
    return head_of(ast.parse(f"{text} pass" if text.endswith(":") else text).body[0])


def locate(fault: Fault, source: str) -> tuple[int, int, str]:
    """(first and last character of what changes, what stands there instead). Raises LostAnchorError."""
    wanted = statement_of(fault.statement)
    mine = [place for place in _places_of(source) if place.owner == fault.function]
    fitting = [place for place in mine if isinstance(place.node, type(wanted)) and same(head_of(place.node), wanted)]
    if len(fitting) <= fault.occurrence:
        nearest = difflib.get_close_matches(fault.statement, [place.head for place in mine], n=1, cutoff=0.0)
        where = f"the nearest statement is `{nearest[0]}`" if nearest else "there is no such function"
        raise LostAnchorError(f"{fault.id}: {fault.file}, {fault.function or 'top'}: no `{fault.statement}`; {where}")
    statement = fitting[fault.occurrence].node
    if fault.before == fault.statement:
        start, end = _span(statement, source)
        return start, end, fault.after.replace("\n", "\n" + " " * statement.col_offset)
    before = ast.parse(fault.before, mode="eval").body
    matches = [node for node in expressions(statement) if isinstance(node, type(before)) and same(node, before)]
    if len(matches) <= fault.nth:
        raise LostAnchorError(f"{fault.id}: {fault.file}, {fault.function}: no `{fault.before}` in `{fault.statement}`")
    start, end = _span(matches[fault.nth], source)
    return start, end, f"({fault.after})"


def apply(fault: Fault, source: str) -> str:
    """The source with the fault. Raises LostAnchorError; ValueError for a fault that changes nothing or breaks the syntax."""
    start, end, after = locate(fault, source)
    changed = source[:start] + after + source[end:]
    try:
        ast.parse(changed)
        alike = same(statement_of(fault.before), statement_of(fault.after)) and fault.before != fault.statement
    except SyntaxError as error:
        raise ValueError(f"{fault.id}: `{fault.after}` breaks {fault.file}: {error}") from error
    if alike or fault.before == fault.after:
        raise ValueError(f"{fault.id}: `{fault.after}` changes nothing in {fault.file}")
    return changed


def line_of(fault: Fault, source: str) -> int:
    """The line where a fault begins, from 1. Raises LostAnchorError."""
    return source.count("\n", 0, locate(fault, source)[0]) + 1


def _span(node: ast.expr | ast.stmt, source: str) -> tuple[int, int]:
    """First character and the one after the last; the tree counts bytes within lines."""
    lines = source.splitlines(keepends=True)

    def at(line: int, column: int) -> int:
        return sum(map(len, lines[: line - 1])) + len(lines[line - 1].encode()[:column].decode())

    assert node.end_lineno is not None and node.end_col_offset is not None
    return at(node.lineno, node.col_offset), at(node.end_lineno, node.end_col_offset)
