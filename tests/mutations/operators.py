"""Every small change of a file that the seeded draw may pick: operators over the syntax tree.

Left out: docstrings, texts, annotations, decorators, `assert`, `raise`, what is logged or printed, `__repr__` and `__str__`, and blocks
under TYPE_CHECKING or `__name__`.
"""

from __future__ import annotations

import ast
import copy
import re
from collections import Counter
from collections.abc import Iterator

from .faults import Fault, Place, expressions, places

_OPPOSITES = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
_COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    a: b for one, other in _OPPOSITES for a, b in ((one, other), (other, one))
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
}  # fmt: skip
OPERATORS = (
    "comparison", "arithmetic", "off by one", "dropped not", "and/or", "swapped arguments", "removed keyword", "dropped call",
    "dropped assignment", "dropped return",
)  # fmt: skip
_MESSAGE_CALLS = set("debug info warning warn error print echo secho exception".split())  # calls that only inform
_WORDS = set(
    "description help title label stacklevel strict".split()
)  # keywords that hold texts, and `strict`, an assertion
_PATHS = re.compile(r"(root|folder|path|home|directory|parent|tmp_path)$")  # what `/` joins
_LISTS = ast.List | ast.ListComp | ast.Tuple | ast.Dict | ast.DictComp | ast.Set | ast.SetComp
_UNREAD_NAMES = {"__repr__", "__str__", "__all__", "__slots__"}


def sites(file: str, source: str) -> list[Fault]:
    """All changes of a file, without ids, in the order of the text."""
    tree = ast.parse(source)
    skipped, last = _skipped(tree), _last_statements(tree)
    changes: list[Fault] = []
    seen: Counter[tuple[str, str]] = Counter()
    for place in places(tree):
        head = place.head
        occurrence = seen[place.owner, head]
        seen[place.owner, head] += 1
        if place.owner.rpartition(".")[2] in _UNREAD_NAMES or id(place.node) in skipped or _is_unread(place.node):
            continue
        for kind, before, after, nth in [*_of_statement(place, head, last), *_of_expressions(place.node)]:
            changes.append(Fault("", kind, file, place.owner, head, before, after, occurrence, nth))
    return changes


def _of_statement(place: Place, head: str, last: set[int]) -> Iterator[tuple[str, str, str, int]]:
    """(operator, before, after, nth) of changes to a statement as a whole."""
    node = place.node
    if not place.owner:
        return
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        yield "dropped call", head, "pass", 0
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
    if any(isinstance(target, ast.Attribute | ast.Subscript) for target in targets):
        yield "dropped assignment", head, "pass", 0
    if isinstance(node, ast.Return) and id(node) not in last:
        yield "dropped return", head, "pass", 0


def _of_expressions(statement: ast.stmt) -> Iterator[tuple[str, str, str, int]]:
    """(operator, before, after, nth) of changes within a statement."""
    counted: Counter[str] = Counter()
    hidden: set[int] = set()
    for node in expressions(statement):
        text = ast.unparse(node)
        nth = counted[text]
        counted[text] += 1
        if id(node) in hidden or isinstance(node, ast.JoinedStr) or _is_message(node):
            hidden |= {id(child) for child in ast.walk(node)}
            continue
        if isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
            continue
        for kind, changed in _changes(node):
            yield kind, text, ast.unparse(ast.fix_missing_locations(changed)), nth


def _changes(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    new = copy.deepcopy(node)
    if isinstance(new, ast.Compare) and len(new.ops) == 1:
        new.ops = [_COMPARISONS[type(new.ops[0])]()]
        yield "comparison", new
    elif isinstance(new, ast.BinOp) and type(new.op) in _ARITHMETIC and not _no_number(new):
        new.op = _ARITHMETIC[type(new.op)]()
        yield "arithmetic", new
    elif isinstance(new, ast.Constant) and type(new.value) is int:
        yield "off by one", ast.Constant(new.value + 1)
    elif isinstance(new, ast.UnaryOp) and isinstance(new.op, ast.Not):
        yield "dropped not", new.operand
    elif isinstance(new, ast.BoolOp):
        new.op = ast.Or() if isinstance(new.op, ast.And) else ast.And()
        yield "and/or", new
    elif isinstance(new, ast.Call):
        if ast.unparse(new.func) in ("cast", "isinstance", "issubclass", "field", "TypeVar", "hasattr", "getattr"):
            return
        plain = len(new.args) > 1 and not any(isinstance(arg, ast.Starred) for arg in new.args[:2])
        if plain and ast.dump(new.args[0]) != ast.dump(new.args[1]):
            new.args[0], new.args[1] = new.args[1], new.args[0]
            yield "swapped arguments", new
        for place, keyword in enumerate(node.keywords if isinstance(node, ast.Call) else []):
            if keyword.arg is not None and keyword.arg not in _WORDS:
                less = copy.deepcopy(node)
                assert isinstance(less, ast.Call)
                del less.keywords[place]
                yield "removed keyword", less


def _no_number(node: ast.BinOp) -> bool:
    """True for what joins texts, lists or paths: another operator there would only be a type error."""
    parts = [node.left, node.right]
    if any(isinstance(p, ast.Constant) and isinstance(p.value, str) for p in parts):
        return True
    joins_path = isinstance(node.op, ast.Div) and _PATHS.search(ast.unparse(node.left)) is not None
    return joins_path or any(isinstance(p, ast.JoinedStr | _LISTS) for p in parts)


def _is_message(node: ast.expr) -> bool:
    """True for a call that only informs, and for the construction of an error."""
    if not isinstance(node, ast.Call):
        return False
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
    return name in _MESSAGE_CALLS or name.endswith(("Error", "Warning", "Exit"))


def _is_unread(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assert | ast.Raise | ast.Import | ast.ImportFrom):
        return True
    return isinstance(node, ast.Expr) and (isinstance(node.value, ast.Constant) or _is_message(node.value))


def _skipped(tree: ast.Module) -> set[int]:
    """The ids of the nodes under `if TYPE_CHECKING` and `if __name__`, and in annotations."""
    blocks = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).startswith(("TYPE_CHECKING", "typing.T", "__name__"))
    ]
    return {id(node) for block in blocks for node in ast.walk(block)}


def _last_statements(tree: ast.Module) -> set[int]:
    """The ids of the statements that end a function: a return there is no early one."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {id(function.body[-1]) for function in functions}
