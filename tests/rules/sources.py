"""What the rule tests read: the project's files, and their syntax trees."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

ROOT = Path(__file__).resolve().parents[2]
LINKS = ("models", "preprocess", "pipelines")
CODE = ("mmspeed", *LINKS)  # the real folders; the links inside mmspeed are not followed
TEXT_ENDINGS = {".py", ".md", ".toml", ".yaml", ".yml", ".jsonl", ".json", ".txt", ".cfg", ""}
NOT_OURS = {"build", "dist", "__pycache__", "runs", "cache", "mmspeed-demo"}  # what commands make


def python_files(*folders: str) -> list[Path]:
    """Every Python file below the named folders of the repository, links not followed."""
    results = []
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            inside = path.relative_to(ROOT).parts
            linked = inside[0] == "mmspeed" and inside[1] in LINKS
            if not linked and "__pycache__" not in inside:
                results.append(path)
    return results


def text_files() -> list[Path]:
    """Every text file of the project that people or programs write by hand."""
    results = []
    for path in sorted(ROOT.rglob("*")):
        inside = path.relative_to(ROOT).parts
        hidden = any(part.startswith(".") and part not in (".ci", ".gitignore") for part in inside)
        output = inside[0] in NOT_OURS or any(part == "__pycache__" or part.endswith(".egg-info") for part in inside)
        linked = inside[0] == "mmspeed" and len(inside) > 1 and inside[1] in LINKS
        if not hidden and not output and not linked and path.is_file() and path.suffix in TEXT_ENDINGS:
            results.append(path)
    return results


def name(path: Path) -> str:
    """A file's path in the repository."""
    return path.relative_to(ROOT).as_posix()


def offenders(paths: Iterable[Path], faults: Callable[[Path], T]) -> dict[str, T]:
    """By file, what a rule finds wrong in it; files in which it finds nothing are left out."""
    by_file = {name(path): faults(path) for path in paths}
    return {file: wrong for file, wrong in by_file.items() if wrong}


@functools.cache
def syntax(path: Path) -> ast.Module:
    """A file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    """All nodes of a tree, as `ast.walk` has them: walked once for all rules, which would take seconds of each."""
    return tuple(ast.walk(tree))


def docstrings(tree: ast.Module) -> set[int]:
    """The ids of the constants that are docstrings."""
    owners = [
        node
        for node in nodes(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    firsts = [owner.body[0] for owner in owners if owner.body]
    return {
        id(first.value) for first in firsts if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    }
