"""Nothing is asked of a model, a task or a batch that no protocol declares: the core would otherwise know one of them after all."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from .sources import name, python_files, syntax

FOLDERS = ("mmspeed/loop", "mmspeed/parallel", "mmspeed/memory", "pipelines")
# Folders of one domain know its models by their classes.
DOMAINS = re.compile(r"pipelines/(tasks|diffusion|inference)/.*")
# Names that models and their parts, tasks and batches have in these folders.
NAMES = {
    "model", "models", "bare", "transformer", "module", "layer", "part", "owner", "block", "blocks",
    "task", "batch", "batches", "data",
}  # fmt: skip
# The notes that memory itself leaves on the modules of a block, of any class; read in the middle of compiled forwards.
ALLOWED = {"mmspeed/memory/recompute/spans.py": {"getattr(module, '_courses', {})"}}


def last_name(node: ast.expr) -> str | None:
    """The name of a variable, or of the attribute that an expression ends in; of an element, that of what it is an element of."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else None


def asks_for_any(annotation: ast.expr | None) -> bool:
    """Whether an annotation leaves open the type of the thing itself, or of what it holds or gives."""
    return annotation is not None and any(
        isinstance(node, ast.Name) and node.id == "Any" for node in ast.walk(annotation)
    )


def undeclared(tree: ast.Module) -> list[tuple[int, str]]:
    """(line, code) of each place where a model, task or batch is asked for what is not declared, or is of any type."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            place = {"getattr": 0, "hasattr": 0, "cast": 1}.get(node.func.id)
            asked = place is not None and len(node.args) > place and last_name(node.args[place]) in NAMES
        elif isinstance(node, ast.arg):
            asked = node.arg in NAMES and asks_for_any(node.annotation)
        elif isinstance(node, ast.AnnAssign):
            asked = last_name(node.target) in NAMES and asks_for_any(node.annotation)
        else:
            continue
        if asked:
            found.append((node.lineno, ast.unparse(node)))
    return found


@pytest.mark.parametrize("path", python_files(*FOLDERS), ids=name)
def test_models_tasks_and_batches_are_asked_for_what_they_declare(path: Path) -> None:
    if not DOMAINS.fullmatch(name(path)):
        allowed = ALLOWED.get(name(path), set())
        assert [f"line {line}: {code}" for line, code in undeclared(syntax(path)) if code not in allowed] == []


def test_what_is_allowed_is_still_there() -> None:
    for path in python_files(*FOLDERS):
        codes = {code for _, code in undeclared(syntax(path))}
        assert ALLOWED.get(name(path), set()) <= codes


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ('getattr(model, "roles", None)', 1),
        ('hasattr(self.block, "spans")', 1),
        ('getattr(models["model"], "heads")', 1),
        ("cast(DiffusionModel, model).blocks", 1),
        ("cast(Any, models[role])", 1),
        ("def f(batch: Any) -> None: ...", 1),
        ("def f(batch: Callable[[], Any], *, task: Task) -> None: ...", 1),
        ("model: Any = make()", 1),
        ("self.task: Any = make()", 1),
        ("cast(Tensor, block(x))", 0),
        ('getattr(torch, "float32")', 0),
        ("def f(model: nn.Module, batch: Batch, **given: Any) -> Any: ...", 0),
        ("isinstance(block, NamesRegions)", 0),
    ],
)
def test_undeclared_questions_are_seen(code: str, count: int) -> None:
    assert len(undeclared(ast.parse(code))) == count
