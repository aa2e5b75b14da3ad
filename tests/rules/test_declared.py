"""Nothing is asked of a model, a task or a batch that no protocol declares: the core would otherwise know one of them after all.

Three rules hold it. Dynamic look-ups, casts and comments that silence the checker stand in a list or not at all; so do types with Any;
and mypy, by `declared_plugin`, reports what only `nn.Module.__getattr__` would find (`make lint` over the product).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from .declared import NAMES, undeclared
from .declared_list import ALLOWED, OPEN
from .declared_plugin import in_core
from .sources import ROOT, name, offenders, python_files

FILES = [path for path in python_files("mmspeed", "pipelines") if in_core(name(path))]

# Ways to ask a model for what it does not declare, which the syntax shows.
SNEAKS = [
    'getattr(model, "roles", None)',
    'net = model\ngetattr(net, "sparse")',
    'hasattr(self.block, "spans")',
    'getattr(models["model"], "heads")',
    'getattr(unwrap(model), "config")',
    'setattr(model, "x", 1)',
    'ask = getattr\nask(net, "sparse")',
    'import builtins\nbuiltins.getattr(net, "sparse")',
    '__builtins__["getattr"](net, "sparse")',
    'from operator import attrgetter\nattrgetter("config")(net)',
    'from operator import attrgetter as get\nget("config")(net)',
    'import operator as o\no.attrgetter("config")(net)',
    'o.methodcaller("config")(net)',
    'import inspect\ninspect.getattr_static(net, "config")',
    'vars(model)["x"]',
    'model.__dict__["x"]',
    'type(net).__getattr__(net, "x")',
    'object.__getattribute__(net, "x")',
    'eval("net.x")',
    "cast(DiffusionModel, model).blocks",
    "cast(Any, net).sparse",
    "cast(Any, models[role]).sparse",
    "import typing\ntyping.cast(typing.Any, net).sparse",
    "from typing import cast as c\nc(object, net)",
    "from typing import Any as Anything",
    "from typing import *",
    "def f(model: Any) -> None: ...",
    "def f(model: typing.Any) -> None: ...",
    'def f(model: "Any") -> None: ...',
    'def f(net: "typing.Any | None") -> None: ...',
    "def f(net: Any) -> None: ...",
    "def f(*models: Any) -> None: ...",
    "def forward(self, model: Any) -> None: ...",
    "def f(batch: Callable[[], Any], *, task: Task) -> None: ...",
    "def f(nets: Mapping[str, Any]) -> None: ...",
    "def bare_of(model: nn.Module) -> Any: ...",
    'def bare_of(model: nn.Module) -> "Any": ...',
    "async def f(net: Any) -> None: ...",
    "net: Any = model",
    "self.task: Any = make()",
    "Anything = Any\ndef f(net: Anything) -> None: ...",
    "Nets = dict[str, Any]",
    'Net = TypeVar("Net", bound=Any)',
    "class Net(Protocol[Any]): ...",
    "net = make()  # type: Any",
    "model.sparse  # type: ignore",
    "model.sparse  # type: ignore[misc]",
    "# mypy: ignore-errors",
    "class Open(nn.Module):\n    def __getattr__(self, name: str) -> object: ...",
]

# Ways that types alone show; each is wrong on its line.
ASKS = [
    "model.nonsense",
    'models["model"].config',
    "next(iter(models.values())).sparse",
    "[each.heads for each in model.children()]",
    'model.get_submodule("blocks").first',
    "bound.roles",
    "either.weight",
    "made().spans",
    "inner.own.inherited",
    "(lambda net: net.config)(model)",
]
DECLARED = ["model.training", "model.named_parameters()", "inner.own", "linear.weight", "sized.config", "seen(model)"]


def unlisted(path: Path) -> set[str]:
    """The lines and names of a file that ask a model, a task or a batch for what it does not declare, and that no list allows."""
    lines, names = undeclared(path.read_text(encoding="utf-8"))
    allowed = {line for files in ALLOWED.values() for line in files.get(name(path), set())}
    return (lines - allowed) | (names - set(OPEN.get(name(path), "").split()))


def test_models_tasks_and_batches_are_asked_for_what_they_declare() -> None:
    assert offenders(FILES, unlisted) == {}


def test_what_is_allowed_is_still_there_and_is_no_model() -> None:
    results = {name(path): undeclared(path.read_text(encoding="utf-8")) for path in FILES}
    for files in ALLOWED.values():
        assert {path: lines - results[path][0] for path, lines in files.items() if lines - results[path][0]} == {}
    for path, names in OPEN.items():
        assert set(names.split()) == results[path][1] and not set(names.split()) & NAMES, path


@pytest.mark.parametrize("code", SNEAKS)
def test_undeclared_questions_are_seen(code: str) -> None:
    assert undeclared(code) != (set(), set())


@pytest.mark.parametrize(
    "code",
    [
        "def f(model: nn.Module, batch: Batch, *args: Any, **given: Any) -> nn.Module: ...",
        "def forward(ctx: Any, x: Tensor, *others: Any) -> Any: ...",
        "def backward(ctx: Any, grad: Tensor) -> Tensor: ...  # type: ignore[override]",
        "isinstance(block, NamesRegions)",
        "model.eval()",
        "from typing import Any, cast",
        '"""Any number of models."""',
    ],
)
def test_declared_questions_are_none(code: str) -> None:
    assert undeclared(code) == (set(), set())


def test_mypy_reports_what_modules_do_not_declare(tmp_path: Path) -> None:
    head = """
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar
from torch import nn
class Sized(Protocol):
    config: int
class Inner(nn.Module):
    own: nn.Module
def seen(net: nn.Module) -> int:
    return net.config if isinstance(net, Own) else 0
class Own(nn.Module):
    config: int = 0
M = TypeVar("M", bound=nn.Module)
def ask(model: nn.Module, models: Mapping[str, nn.Module], bound: M, either: nn.Linear | nn.Module,
        made: Callable[[], nn.Module], inner: Inner, linear: nn.Linear, sized: Sized) -> None:
"""
    start = head.count("\n") + 1
    body = "".join(f"    {line}\n" for line in (*ASKS, *DECLARED))
    core, domain = (
        tmp_path / folder / f"{called}.py" for folder, called in (("pipelines", "a"), ("pipelines/tasks", "b"))
    )
    domain.parent.mkdir(parents=True)
    core.write_text(head + body, encoding="utf-8")
    domain.write_text(head + body, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml", str(core), str(domain)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    errors = re.findall(r"(a|b)\.py:(\d+): error: .* is declared neither by nn\.Module nor by a protocol", done.stdout)
    assert errors == [("a", str(start + place)) for place in range(len(ASKS))], done.stdout + done.stderr
    assert done.returncode == 1 and done.stdout.count("error:") == len(ASKS), done.stdout


@pytest.mark.parametrize(
    ("path", "core"),
    [
        ("mmspeed/loop/step.py", True),
        ("mmspeed/pipelines/run/build.py", True),
        ("pipelines/selfcheck/worker.py", True),
        ("mmspeed/pipelines/tasks/video.py", False),
        ("pipelines/diffusion/flow.py", False),
        ("mmspeed/models/sora/model.py", False),
    ],
)
def test_the_plugin_knows_the_core(path: str, core: bool) -> None:
    assert in_core(path) == core


def test_mypy_takes_the_plugin_in_every_run() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert '"tests/rules/declared_plugin.py"' in text
