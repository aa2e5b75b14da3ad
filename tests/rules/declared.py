"""What asks a thing for what it does not declare: dynamic look-ups, casts, types left open, comments that silence the checker."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator

# Names that models and their parts, tasks and batches have in the core; no list opens these.
NAMES = {
    "model", "models", "bare", "transformer", "module", "modules", "layer", "part", "owner", "block", "blocks",
    "task", "batch", "batches", "data", "net",
}  # fmt: skip
# By whatever name or attribute they are reached (`typing.cast`, `operator.attrgetter`, `builtins.getattr`).
LOOKUPS = {
    "getattr", "hasattr", "setattr", "delattr", "getattr_static", "vars", "cast", "attrgetter", "methodcaller",
    "__dict__", "__getattr__", "__getattribute__", "__setattr__", "__import__",
}  # fmt: skip
BUILTINS = LOOKUPS | {"eval", "exec"}  # `eval` is a method of modules too
IMPORTED = LOOKUPS | {"Any"}
# Signatures that Python, autograd or torch prescribe.
PRESCRIBED = {"__torch_dispatch__", "__torch_function__", "__deepcopy__", "__exit__", "forward", "backward"}
SILENCED = re.compile(r"#\s*(type:(?!\s*ignore\[override\]($|\s))|mypy:)")


def last_name(node: ast.expr) -> str:
    """The name of a variable, or of the attribute that an expression ends in; of an element, that of what it is an element of."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def is_open(annotation: ast.AST | None) -> bool:
    """Whether Any stands anywhere in an annotation, in quotes too."""
    for node in ast.walk(annotation) if annotation is not None else ():
        if isinstance(node, ast.Name | ast.Attribute) and last_name(node) == "Any":
            return True
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.search(r"\bAny\b", node.value):
            return True
    return False


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[tuple[ast.arg, bool]]:
    """Each parameter, and whether its Any says nothing: one of a prescribed signature, or what `*args: Any` passes on."""
    signature = function.args
    prescribed = function.name in PRESCRIBED
    for each in (*signature.posonlyargs, *signature.args, *signature.kwonlyargs):
        yield each, prescribed
    for rest in (signature.vararg, signature.kwarg):
        if rest is not None:
            yield rest, isinstance(rest.annotation, ast.Name)


def open_types(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of each parameter, variable, function's result and alias whose type leaves something open."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for each, free in _parameters(node):
                if is_open(each.annotation) and (each.arg in NAMES or not free):
                    yield each.lineno, each.arg
            if is_open(node.returns) and node.name not in PRESCRIBED:
                yield node.lineno, node.name
        elif isinstance(node, ast.AnnAssign) and (is_open(node.annotation) or is_open(node.value)):
            yield node.lineno, last_name(node.target)
        elif isinstance(node, ast.Assign | ast.NamedExpr) and is_open_type(node.value):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            yield node.lineno, last_name(target)
        elif isinstance(node, ast.ClassDef) and any(map(is_open_type, (*node.bases, *node.keywords))):
            yield node.lineno, node.name


def is_open_type(node: ast.AST) -> bool:
    """Whether Any stands in an expression that is no text."""
    return any(isinstance(each, ast.Name | ast.Attribute) and last_name(each) == "Any" for each in ast.walk(node))


def lookups(tree: ast.Module) -> Iterator[int]:
    """The line of each use of a dynamic look-up or a cast, and of each import that gives one of them, or Any, another name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            if any(each.name == "*" or (each.name in IMPORTED and each.asname) for each in node.names):
                yield node.lineno
        elif isinstance(node, ast.Name | ast.Attribute):
            if last_name(node) in (BUILTINS if isinstance(node, ast.Name) else LOOKUPS):
                yield node.lineno
        elif isinstance(node, ast.FunctionDef) and node.name in LOOKUPS:
            yield node.lineno
        elif isinstance(node, ast.Constant) and node.value in LOOKUPS:  # `__builtins__["getattr"]`
            yield node.lineno


def silenced(source: str) -> Iterator[int]:
    """The line of each comment that types something or silences the checker, other than of an override."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and SILENCED.match(token.string):
            yield token.start[0]


@functools.cache
def undeclared(source: str) -> tuple[set[str], set[str]]:
    """The lines of a file that look up, cast or silence, and the names whose types it leaves open."""
    tree, lines = ast.parse(source), source.splitlines()
    asking = {lines[line - 1].strip() for line in (*lookups(tree), *silenced(source))}
    return asking, {called for _, called in open_types(tree)}
