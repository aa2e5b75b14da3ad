"""The pages of the documentation as a reader takes them: code blocks, commands, links, and the real parsers that check them.

A code block is fenced or indented by four spaces. Fences name their language: `python`, `yaml`, `toml`, `bash` (commands alone),
`console` (commands behind `$`, then what they print), `text` (neither). Without a name, lines that begin with a known program
are commands, and other lines are what is printed.
"""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer
import yaml

from mmspeed.cli.app import app, split_debug
from mmspeed.config import RunConfig
from mmspeed.config.load import make_config
from mmspeed.config.tasks import known_tasks

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PROGRAMS = {"mmspeed", "torchrun", "accelerate", "srun", "make", "pip", "python"}
SHELL = {"git", "cd", "source", "touch", "export"}  # of no interest here, where only commands may stand
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?<=\n\n)(?:    .*\n(?:\n+(?=    ))?)+")
INLINE = re.compile(r"(?<!`)`(mmspeed [^`]+)`(?!`)")
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)|<img[^>]* src=\"([^\"]+)\"")
SMALL: dict[str, Any] = {  # what a page's part of a config is put into
    "data": {
        "sources": [{"path": "web", "name": "web"}, {"path": "ours", "name": "ours"}],
        "buckets": [{"frames": frames, "height": 96, "width": 160} for frames in (1, 13)],
    }
}


@dataclass(frozen=True)
class CodeBlock:
    """One code block: its page, its first line there counted from 1, its language ("" for none) and its text."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"


@cache
def blocks(page: Path) -> list[CodeBlock]:
    """The code blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    fenced = [
        CodeBlock(page, line_of(text, match.start()) + 1, match[2], dedented(match[3], len(match[1])))
        for match in FENCE.finditer(text)
    ]
    rest = without_fences(text)
    plain = [CodeBlock(page, line_of(rest, m.start()), "", dedented(m[0], 4)) for m in INDENTED.finditer(rest)]
    return sorted([*fenced, *plain], key=lambda block: block.line)


def blocks_under(page: Path, heading: str, language: str = "python") -> list[str]:
    """The texts of the blocks of a language in the section of a page under `## heading`, in order."""
    rest = without_fences(page.read_text(encoding="utf-8"))
    start = rest.index(f"\n## {heading}\n") + 1
    end = rest.find("\n## ", start)
    first, last = line_of(rest, start), line_of(rest, end if end >= 0 else len(rest))
    return [block.text for block in blocks(page) if first < block.line <= last and block.language == language]


def line_of(text: str, offset: int) -> int:
    """The line, counted from 1, that the character at `offset` stands on."""
    return text.count("\n", 0, offset) + 1


def dedented(text: str, spaces: int) -> str:
    """`text` with so many spaces taken from the head of each line."""
    return re.sub(rf"^ {{0,{spaces}}}", "", text, flags=re.MULTILINE)


def without_fences(text: str) -> str:
    """`text` with its fenced blocks made empty lines, so that lines keep their numbers."""
    return FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)


def command_lines(block: CodeBlock) -> list[str]:
    """The commands of a block as they are typed, lines that end with a backslash joined."""
    if block.language not in ("", "bash", "console"):
        return []
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        return [line[2:] for line in lines if line.startswith("$ ")]
    return [line.strip() for line in lines if line.strip() and program_of(line) in PROGRAMS | SHELL]


def program_of(line: str) -> str:
    """The first word of a line behind assignments of environment variables."""
    words = line.split()
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    return words[0] if words else ""


def words_of(line: str) -> list[str]:
    """The words of a command without its comment and the variables before it; a variable of the shell is a number."""
    words = shlex.split(re.sub(r"\$\w+", "1", line), comments=True)
    while words and re.match(r"[A-Z_]+=", words[0]):
        words.pop(0)
    return words


def check_command(words: list[str]) -> None:
    """Give a command to the parser of its own program. Raises what that raises for one that it would refuse."""
    program, rest = words[0], words[1:]
    if program == "mmspeed":
        check_mmspeed(rest)
    elif program == "torchrun":
        from torch.distributed.run import get_args_parser

        launch = get_args_parser().parse_args(rest)
        check_module(launch.training_script, launch.module, launch.training_script_args)
    elif program == "accelerate":
        from accelerate.commands.launch import launch_command_parser

        assert rest[0] == "launch", f"accelerate {rest[0]}"
        launch = launch_command_parser().parse_args(rest[1:])
        check_module(launch.training_script, launch.module, launch.training_script_args)
    elif program == "srun":
        first = next(number for number, word in enumerate(rest) if word in PROGRAMS)
        check_command(rest[first:])
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert {word for word in rest if "=" not in word} <= set(targets), f"make {rest}"
    elif program == "pip":
        check_pip(rest)
    elif program == "python" and rest[0] == "-m":
        check_module(rest[1], True, rest[2:])


def check_module(name: str, module: bool, arguments: list[str]) -> None:
    """A launcher's target: a module that is there, and mmspeed's own arguments."""
    if module and name == "mmspeed":
        check_mmspeed(arguments)
    elif module:
        assert importlib.util.find_spec(name) is not None, f"no module {name}"


def check_pip(words: list[str]) -> None:
    """Packages are among those of `pyproject.toml` and of the pages on installation, and extras are declared there."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert words[0] == "install", words
    for word in (word for word in words[1:] if not word.startswith(("-", "http"))):
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", word).groups()  # type: ignore[union-attr]
        assert name in (".", "mmspeed", "torch") or re.search(rf'"{name}\b', project) or name == "torchao", word
        for extra in (extras or "").split(","):
            assert not extra or re.search(rf"^{extra} = \[", project, re.MULTILINE), f"no extra {extra}"


@cache
def parser() -> Any:
    """The command line with every command's work taken out: a call returns the values of its arguments."""
    whole: Any = typer.main.get_command(app)

    def emptied(command: Any) -> None:
        for inner in getattr(command, "commands", {}).values():
            emptied(inner)
        if not hasattr(command, "commands"):
            command.callback = lambda **values: values

    emptied(whole)
    return whole


def check_mmspeed(arguments: list[str]) -> dict[str, Any]:
    """The values of a command's arguments, by the real parser; keys behind a config are keys of a config."""
    values = parser()(args=split_debug(arguments)[0], prog_name="mmspeed", standalone_mode=False, obj={"debug": False})
    if not isinstance(values, dict):
        return {}
    for override in values.get("overrides") or ():
        make_config(SMALL, [override], origin="page")
    return values


def check_mention(text: str) -> None:
    """A command named within a sentence, perhaps without its arguments: its commands and options exist."""
    words, command = text.split()[1:], parser()
    while words and hasattr(command, "commands"):
        word = words.pop(0)
        if word.startswith("-") or not re.fullmatch(r"[a-z-]+", word):
            return
        assert word in command.commands, f"no command {word}"
        command = command.commands[word]
    options = {"--debug", "--help", *(name for parameter in command.params for name in parameter.opts)}
    for word in words:
        assert not word.startswith("--") or word.partition("=")[0] in options, f"no option {word}"


def config_of(text: str) -> RunConfig | None:
    """A block of YAML as a config: whole, or put into a small one; None for a task that the page adds.

    Raises UserError for keys or values that are not allowed.
    """
    tree = yaml.safe_load(text)
    assert isinstance(tree, dict), "a config is a mapping"
    task = tree.get("task", "video")
    if task not in known_tasks():  # a page's own, whose test runs it
        return None
    return make_config(merged(SMALL, tree) if task == "video" else tree, origin="page")


def merged(base: Any, over: Any) -> Any:
    """`over` laid upon `base`, mapping by mapping."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {**base, **{key: merged(base.get(key), value) for key, value in over.items()}}


def check_python(block: CodeBlock, own: set[str]) -> None:
    """The block compiles and what it imports is there; `own`: modules that the page itself writes."""
    tree = ast.parse(block.text, filename=str(block))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                importlib.import_module(alias.name)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] not in own:
            module = importlib.import_module(node.module)
            for alias in node.names:
                if not hasattr(module, alias.name):
                    importlib.import_module(f"{node.module}.{alias.name}")
        elif isinstance(node, ast.Attribute):
            chain = dotted(node)
            if chain.startswith("mmspeed."):
                resolve(chain)


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute of a name; empty for any other expression."""
    if isinstance(node, ast.Name):
        return node.id
    head = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{head}.{node.attr}" if head and isinstance(node, ast.Attribute) else ""


def resolve(chain: str) -> Any:
    """The object of a dotted name. Raises AttributeError or ImportError where there is none."""
    names = chain.split(".")
    value: Any = importlib.import_module(names[0])
    for number, name in enumerate(names[1:], 2):
        if not hasattr(value, name):
            importlib.import_module(".".join(names[:number]))
        value = getattr(value, name)
    return value


def modules_of(page: Path) -> set[str]:
    """Modules that a page writes: its blocks that open with `# name.py`, and a package of the reader's own."""
    heads = [re.match(r"# (\w+)\.py\b", block.text) for block in blocks(page)]
    return {"my_package", *(head[1] for head in heads if head)}


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as forges make them."""
    slugs: set[str] = set()
    for heading in re.findall(r"^#+ +(.+)$", without_fences(page.read_text(encoding="utf-8")), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in slugs:
            number += 1
        slugs.add(name)
    return slugs


def broken_links(page: Path) -> list[str]:
    """The links of a page that lead nowhere: no such file, or no such heading in it."""
    text = re.sub(r"`[^`\n]*`", "", without_fences(page.read_text(encoding="utf-8")))
    broken = []
    for match in LINK.finditer(text):
        target = match[1] or match[2]
        if "://" in target or target.startswith("mailto:"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    return broken
